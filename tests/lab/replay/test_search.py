"""The search for operands, on invented differences."""

import pytest

from crossgrain.lab.replay.looking import Site
from crossgrain.lab.replay.search import Found, OutOfRuns, search, smallest_set

KINDS = ("fprop.input", "fprop.weight", "dgrad.grad_output")
SITES = [Site(f"blocks.{at}", kind) for kind in KINDS for at in range(64)]


def found_by(explained, most=1000):
    runs, found = [], Found()

    def counted(sites):
        if len(runs) == most:
            raise OutOfRuns
        runs.append(sites)
        return explained(set(sites))

    search(SITES, counted, found)
    return found, len(runs)


def parts(**shares):
    """A difference that is the sum of parts."""
    by_site = {Site(f"blocks.{at}", KINDS[kind]): share for (kind, at), share in shares["of"].items()}
    return lambda raised: sum(share for site, share in by_site.items() if site in raised)


def test_one_operand_among_many_is_found_with_few_runs():
    found, runs = found_by(parts(of={(2, 41): 0.95, (0, 3): 0.05}))
    assert found.culprits == [Site("blocks.41", "dgrad.grad_output")] and found.share == 0.95
    assert runs == 3 + 2 * 6  # the kinds, and halves of 64
    assert found.kinds == {"fprop.input": 0.05, "fprop.weight": 0.0, "dgrad.grad_output": 0.95} and found.complete


def test_operands_that_explain_parts_are_raised_together():
    found, _ = found_by(parts(of={(0, 3): 0.45, (2, 40): 0.3, (2, 41): 0.2, (1, 7): 0.05}))
    assert set(found.culprits) == {Site("blocks.3", KINDS[0]), *(Site(f"blocks.{at}", KINDS[2]) for at in (40, 41))}
    assert found.share == pytest.approx(0.95)


def test_an_operand_that_explains_more_than_half_is_named():
    rest = {(0, at): 0.4 / 64 for at in range(64)}
    found, _ = found_by(parts(of={(2, 41): 0.6, **rest}))
    assert found.culprits == [Site("blocks.41", "dgrad.grad_output")] and found.share == pytest.approx(0.6)
    found, _ = found_by(parts(of={(2, 41): 0.45, **rest}))
    assert not found.culprits


def test_more_operands_are_named_only_if_they_explain_more():
    first, second = Site("blocks.41", KINDS[2]), Site("blocks.5", KINDS[0])

    def explained(raised):
        return 0.62 if {first, second} <= raised else 0.6 * (first in raised) + 0.3 * (second in raised)

    found, _ = found_by(explained)
    assert found.culprits == [first] and found.single[second] == 0.3


def test_several_causes_each_of_which_is_enough_are_found():
    """Raising one of them changes nothing."""
    bad = {Site("blocks.5", KINDS[0]), Site("blocks.6", KINDS[0]), Site("blocks.60", KINDS[2])}
    found, runs = found_by(lambda raised: float(bad <= raised))
    assert set(found.culprits) == bad and found.share == 1.0
    assert runs < 40  # and not 192


def test_several_causes_in_one_kind_are_found_there():
    bad = {Site("blocks.5", KINDS[1]), Site("blocks.50", KINDS[1])}
    found, _ = found_by(lambda raised: float(bad <= raised))
    assert set(found.culprits) == bad and found.kinds == {KINDS[0]: 0.0, KINDS[1]: 1.0, KINDS[2]: 0.0}


def test_two_operands_that_only_together_do_harm_are_both_shown():
    """Raising either of them is enough. One is named; the other is in the list with the same share."""
    bad = {Site("blocks.5", KINDS[0]), Site("blocks.50", KINDS[2])}
    found, _ = found_by(lambda raised: float(bool(bad & raised)))
    assert len(found.culprits) == 1 and set(found.culprits) < bad
    assert {site for site, share in found.single.items() if share == 1.0} == bad


def test_a_sum_of_many_parts_has_no_culprits():
    found, runs = found_by(lambda raised: len(raised) / len(SITES))
    assert not found.culprits and found.complete and runs < 40
    examined = {site for members, _ in found.groups for site in members} | set(found.single)
    assert examined == set(SITES)  # what was not raised alone was raised in a group


def test_what_explains_more_than_half_is_kept_by_a_search_that_is_ended():
    rest = {(kind, at): 0.2 / 32 for kind in (0, 1) for at in range(32)}
    for most in (15, 20):
        found, _ = found_by(parts(of={(2, 41): 0.6, **rest}), most)
        assert not found.complete and found.culprits == [Site("blocks.41", "dgrad.grad_output")]


@pytest.mark.parametrize("most", range(15))
def test_a_search_that_is_ended_says_so_and_keeps_what_it_has(most):
    found, runs = found_by(parts(of={(2, 41): 1.0}), most)
    assert runs == most and not found.complete and not found.culprits
    assert len(found.kinds) == min(most, 3)


def test_more_than_a_few_are_no_explanation():
    members = SITES[:32]
    for count in (1, 2, 4, 5):
        bad = set(members[:: 32 // count][:count])
        chosen = smallest_set(members, lambda some, bad=bad: bad <= set(some))
        assert set(chosen) == (bad if count <= 4 else set())
