"""A report is one file that loads nothing, whose numbers are those of the results, and which no name can break."""

import json
import re
from html.parser import HTMLParser

import pytest

from crossgrain.lab import Sensitivity, write_report
from crossgrain.lab.intervals import with_spread
from crossgrain.lab.report.numbers import Pieces, short, thinned
from crossgrain.lab.sensitivity import Site

from . import samples

LOADING = ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "background", "formaction")


class Page(HTMLParser):
    """What is in a page: elements with their attributes, the data, and texts of table cells."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts, self.cells = [], [], []
        self._inside = None
        self.source = path.read_text()
        self.feed(self.source)
        self.data = json.loads(self.scripts[1])

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._inside = tag
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, text):
        if self._inside == "script":
            self.scripts[-1] += text
        elif self._inside in ("td", "th"):
            self.cells[-1] += text


@pytest.fixture
def written(tmp_path):
    def write(**arguments):
        write_report(tmp_path / "report.html", **arguments)
        return Page(tmp_path / "report.html")

    return write


def joined(data, numbers):
    return "".join(data["pieces"][number] for number in numbers)


# ---- one file --------------------------------------------------------------------------------------------------------


def test_it_loads_nothing(written):
    page = written(**samples.small_report())
    addresses = [value for _, attributes in page.elements for name, value in attributes.items() if name in LOADING]
    assert addresses and all(address.startswith("#") or address == "data:," for address in addresses)
    policies = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert len(policies) == 1 and "default-src 'none'" in policies[0]  # browsers refuse what this test may overlook
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(|\bimport ", page.source)


def test_672_sites_take_at_most_a_megabyte(tmp_path):
    arguments = samples.large_report()
    assert len(list(arguments["sensitivity"].sites())) == 672 and len(arguments["frontier"]) == 60
    write_report(tmp_path / "report.html", **arguments)
    assert (tmp_path / "report.html").stat().st_size <= 1_000_000


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="not measured"):
        write_report(
            path,
            samples.sensitivity(),
            frontier=[{**samples.frontier(samples.sensitivity(), 2)[0], "chosen": {99: "nvfp4"}}],
        )
    assert path.read_text() == "old"


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_all_effects_are_those_of_the_result_to_five_digits(written):
    result = samples.sensitivity()
    data = written(sensitivity=result).data
    names = [layer[0] for layer in data["layers"]]
    for site in json.loads(json.dumps(result.to_dict()))["sites"]:
        for number, candidate in enumerate(data["candidates"]):
            for quantity, values in site["effects"][candidate["label"]].items():
                shown = data["effects"][number][f"{site['gemm']}.{quantity}"][names.index(site["layer"])]
                assert shown == [float(f"{value:.5g}") for value in values[:3]]
    assert data["loss"] == 1.4817 and data["batches"] == 8


def test_points_have_their_recipes_and_choices(written):
    arguments = samples.small_report()
    data = written(**arguments).data
    layers, gemms = [layer[0] for layer in data["layers"]], data["gemms"]
    for shown, point in zip(data["points"], arguments["frontier"], strict=True):
        assert joined(data, shown["recipe"]) == point["recipe"]
        assert shown["saving"] == pytest.approx(point["saving"], rel=1e-4)
        chosen = {
            Site(layers[i // len(gemms)], gemms[i % len(gemms)]): data["candidates"][ord(letter) - ord("a")]["label"]
            for i, letter in enumerate(shown["chosen"])
            if letter != "."
        }
        assert chosen == point["chosen"]
    assert data["found"] == 14


def test_a_recipe_that_is_not_on_the_frontier_is_put_there(written):
    arguments = samples.small_report()
    between = {**arguments["frontier"][3], "saving": 0.5, "recipe": "mxfp8; head: hp"}
    data = written(sensitivity=arguments["sensitivity"], frontier=arguments["frontier"], found=between).data
    assert len(data["points"]) == 21 and joined(data, data["points"][data["found"]]["recipe"]) == "mxfp8; head: hp"
    savings = [point["saving"] for point in data["points"]]
    assert savings == sorted(savings)


def test_verified_recipes_are_found_on_the_frontier(written):
    arguments = samples.small_report()
    page = written(**arguments)
    rows = {row["label"]: row for row in page.data["verified"]["rows"]}
    assert rows["found"]["point"] == 14 and rows["nvfp4"]["point"] == 19 and rows["mxfp8"]["saving"] == 0
    for label, row in rows.items():
        if label != "high precision":
            gap = arguments["verification"].gap(label)
            assert row["gap"] == [short(gap.mean), short(gap.low), short(gap.high)]
            assert len(row["curve"]) == 60
    assert "GROWS" in rows["nvfp4"]["growth"] and rows["found"]["verdict"] == "not above the tolerance"
    assert "The recipe that the search chose saves" in page.source and "not above the tolerance." in page.source


def test_what_diverged_has_no_gap(written):
    rows = {row["label"]: row for row in written(**samples.large_report()).data["verified"]["rows"]}
    assert rows["mxfp4"]["diverged"] == {"1": 18} and "gap" not in rows["mxfp4"] and "loss" not in rows["mxfp4"]
    assert "saving" not in rows["all nvfp4"]  # it is not on the frontier


def test_without_javascript_there_are_tables_of_all_numbers(written):
    result = samples.sensitivity()
    page = written(sensitivity=result)
    for effects in result.effects.values():
        for effect in effects.values():
            for value in filter(None, vars(effect).values()):
                assert with_spread(short(value.mean), (short(value.high) - short(value.low)) / 2) in page.cells


def test_what_may_be_claimed_is_in_the_page(written):
    arguments = samples.small_report()
    source = written(**arguments).source
    assert "found: from this start, on this data, the mean gap to high precision" in source
    assert "The final loss of a longer training" in source
    alone = written(sensitivity=arguments["sensitivity"]).source
    assert "no paired runs are in this report" in alone and "The final loss" in alone


def test_what_was_left_out_and_notes_are_in_the_page(written):
    result = samples.sensitivity()
    result.left_out["blocks.0.norm"], result.interrupted = "it has no weight <matrix>", True
    result.notes.append("a note & more")
    source = written(sensitivity=result).source
    assert "blocks.0.norm: it has no weight &lt;matrix&gt;" in source and "a note &amp; more" in source
    assert "The measurement was stopped early" in source


def test_a_measurement_that_was_stopped_at_once_can_be_shown(written):
    page = written(sensitivity=Sensitivity("mxfp8", samples.FORMATS, interrupted=True))
    assert page.data["layers"] == [] and page.data["points"] == []


# ---- names that could break it ---------------------------------------------------------------------------------------

ODD = ["</script><script>broken()</script>", "a<!--b", "]]>", "quote\"' & <b>", "ünï\u2028çødé", "$title", "x" * 200]


def test_odd_names_are_only_text(written):
    result = samples.sensitivity(ODD)
    page = written(sensitivity=result, title='A <b>"title"</b> & $style', distributions=samples.distributions(ODD[:1]))
    assert len(page.scripts) == 3 and "b" not in [tag for tag, _ in page.elements]
    assert [layer[0] for layer in page.data["layers"]] == ODD
    assert page.data["title"] == 'A <b>"title"</b> & $style'
    assert "<!--" not in page.scripts[1] and "</" not in page.scripts[1]


# ---- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"chosen": {Site("nowhere", "fprop"): "nvfp4"}}, "chooses 'nvfp4' for nowhere fprop, which was not measured"),
        ({"chosen": {0: "nvfp5"}}, "chooses 'nvfp5' for 0, which was not measured"),
    ],
)
def test_points_about_what_was_not_measured_are_refused(changed, message, tmp_path):
    result = samples.sensitivity()
    with pytest.raises(ValueError, match=re.escape(message)):
        write_report(tmp_path / "r.html", result, frontier=[{**samples.frontier(result, 2)[0], **changed}])


def test_a_point_needs_its_fields(tmp_path):
    with pytest.raises(ValueError, match="there is no predicted"):
        write_report(tmp_path / "r.html", samples.sensitivity(), frontier=[{"saving": 1.0}])


@pytest.mark.parametrize(
    "changed, message",
    [({"layer": "nowhere"}, "a distribution of nowhere"), ({"colour": 1}, "not a distribution: .*colour")],
)
def test_distributions_of_other_layers_are_refused(changed, message, tmp_path):
    one = samples.distributions(samples.SMALL)[0]
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path / "r.html", samples.sensitivity(), distributions=[{**one, **changed}])


# ---- small numbers ---------------------------------------------------------------------------------------------------


def test_numbers_are_short():
    assert json.dumps([short(x) for x in (0.123456789, 1.0, -2e-9, float("nan"), float("inf"), None, 0.0)]) == (
        "[0.12346, 1, -2e-09, null, null, null, 0]"
    )


def test_pieces_of_texts_are_stored_once():
    pieces = Pieces()
    texts = ["mxfp8; a|b: fprop: nvfp4, dgrad: hp", "mxfp8; b|a: fprop: nvfp4", "", "|;, "]
    numbers = [pieces.numbers_of(text) for text in texts]
    assert ["".join(pieces.all[i] for i in found) for found in numbers] == texts
    assert len(pieces.all) == len(set(pieces.all)) < sum(map(len, numbers))


@pytest.mark.parametrize("points, most", [(0, 5), (1, 5), (5, 5), (6, 5), (1000, 200), (999, 200)])
def test_long_curves_are_thinned_and_keep_their_end(points, most):
    found = list(thinned(points, most))
    assert len(found) <= most and found == sorted(found)
    assert not points or found[-1] == points - 1
    assert points > most or found == list(range(points))
