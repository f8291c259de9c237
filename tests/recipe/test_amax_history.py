"""Delayed scaling: how histories and scales evolve, and casts with a scale from an earlier step."""

from functools import partial

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import fp8_format, get_element
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Target
from crossgrain.kernels.reference.blocks import amax
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane
from crossgrain.recipe.amax_history import scale_from_amax, scale_from_amax_reciprocal, update_history_and_scale

from ..common.golden_cases import golden

FP32_MAX = torch.finfo(torch.float32).max
update_history_and_scale_always = partial(update_history_and_scale, fused=False)
UPDATES = {"fused": update_history_and_scale, "unfused": update_history_and_scale_always}
BOTH = pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)


def evolve(update, amaxes, length, **options):
    """Histories and scales after every step, starting from nothing seen and a scale of one."""
    amaxes = torch.as_tensor(amaxes, dtype=torch.float32)
    history, scale = torch.zeros(length, amaxes.shape[1]), torch.ones(amaxes.shape[1])
    histories, scales = [], []
    for step in amaxes:
        history[0] = torch.maximum(history[0], step)
        update(history, scale, **options)
        histories.append(history.clone())
        scales.append(scale.clone())
    return torch.stack(histories), torch.stack(scales)


@golden("fp8_delayed_scaling.npz", lambda case: "amax_seq" in case)
def test_golden_evolution(case):
    fp8_max = get_element(case["fp8"]).max
    options = {"fp8_max": fp8_max, "margin": case["margin"], "algorithm": case["algo"]}
    for kind, update in UPDATES.items():
        histories, scales = evolve(update, case.tensor("amax_seq"), case["history_len"], **options)
        case.check(f"{kind}_history", histories)
        case.check(f"{kind}_scale", scales)
    case.assert_complete()


@golden("fp8_delayed_scaling.npz", lambda case: "x" in case)
def test_golden_cast_with_a_stale_scale(case):
    x, scale = case.tensor(), case.tensor("scale")
    encoding = Encoding(fp8_format(get_element(case["fp8"])))
    for prefix, direction in (("row", ROWWISE), ("col", COLUMNWISE)):
        plane = empty_plane(encoding.format, direction, x.shape, device=x.device)
        targets = kernels.measure(x, [Target(plane, encoding, scale=scale)])
        kernels.encode(x, targets)
        case.check(f"{prefix}_data", plane.data)
        case.check("scale_inv", plane.scale)
        case.check("row_dq", kernels.decode(plane, torch.float32))
    case.check("amax", amax(x))  # what goes into the history
    codes = torch.from_numpy(case.input("row_data"))
    assert ((codes & 0x7F) == encoding.format.element.max_code).sum() > 1, "the stale scale is meant to saturate"
    case.assert_complete()


def test_documented_example():
    amaxes = [[0.93473244], [0.61009353], [0.09371055], [0.0], [12.574811]]
    expected = np.array([479.28152, 479.28152, 479.28152, 479.28152, 35.626778], dtype=np.float32)
    fused_history, fused_scale = evolve(update_history_and_scale, amaxes, 4, fp8_max=448.0)
    unfused_history, unfused_scale = evolve(update_history_and_scale_always, amaxes, 4, fp8_max=448.0)
    np.testing.assert_array_equal(fused_scale[:, 0], expected)
    np.testing.assert_allclose(unfused_scale[:, 0], expected, rtol=2**-23)  # two roundings instead of one
    after_four = torch.tensor([0.0, 0.93473244, 0.61009353, 0.09371055])
    assert torch.equal(fused_history[3, :, 0], after_four)
    assert torch.equal(unfused_history[3, :, 0], torch.tensor([0.0, 0.61009353, 0.09371055, 0.0]))


@BOTH
def test_amaxes_of_one_step_accumulate_in_row_zero(update):
    """Row 0 is cleared by the update, so what the next step collects starts from nothing."""
    history, scale = torch.tensor([[3.0], [1.0]]), torch.ones(1)
    update(history, scale, 448.0)
    assert torch.equal(history, torch.tensor([[0.0], [3.0]]))
    assert scale.item() == pytest.approx(448.0 / 3.0)


@BOTH
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("unusable", [0.0, torch.inf])
def test_unusable_amax_keeps_the_scale(update, algorithm, unusable):
    history, scale = torch.tensor([[unusable]]), torch.tensor([7.0])
    update(history, scale, 448.0, algorithm=algorithm)
    assert scale.item() == 7.0


def test_a_step_without_data_ages_the_history_only_in_the_unfused_rule():
    start = torch.tensor([[0.0], [2.0], [1.0]])
    fused, unfused, scale = start.clone(), start.clone(), torch.tensor([5.0])
    update_history_and_scale(fused, scale.clone(), 448.0)
    update_history_and_scale_always(unfused, scale.clone(), 448.0)
    assert torch.equal(fused, start)
    assert torch.equal(unfused, torch.tensor([[0.0], [1.0], [0.0]]))


@BOTH
def test_most_recent_forgets_what_max_remembers(update):
    amaxes = [[8.0], [2.0]]
    assert evolve(update, amaxes, 4, fp8_max=448.0, algorithm="max")[1][-1].item() == 56.0
    assert evolve(update, amaxes, 4, fp8_max=448.0, algorithm="most_recent")[1][-1].item() == 224.0


@BOTH
def test_margin_halves_the_scale(update):
    amaxes = [[8.0]]
    scales = [evolve(update, amaxes, 2, fp8_max=448.0, margin=margin)[1][-1].item() for margin in range(3)]
    assert scales == [56.0, 28.0, 14.0]


@BOTH
def test_reduced_amax_replaces_the_local_one_unless_zero(update):
    history, scale = torch.tensor([[2.0, 2.0], [0.0, 0.0]]), torch.ones(2)
    update(history, scale, 448.0, reduced_amax=torch.tensor([4.0, 0.0]))
    assert torch.equal(history[-1], torch.tensor([4.0, 2.0]))
    assert torch.equal(scale, torch.tensor([112.0, 224.0]))


@BOTH
def test_a_callable_gets_the_whole_history_before_it_rolls(update):
    seen = []

    def smallest(history):
        seen.append(history.clone())
        return history.amin(dim=0)

    history, scale = torch.tensor([[4.0], [2.0], [0.0]]), torch.ones(1)
    before = history.clone()
    update(history, scale, 448.0, algorithm=smallest)
    assert torch.equal(seen[0], before)
    assert scale.item() == 1.0, "an amax of 0 keeps the scale"
    assert torch.equal(history, torch.tensor([[0.0], [0.0], [4.0]])), "callables roll in any case"


@pytest.mark.parametrize("rule", [scale_from_amax, scale_from_amax_reciprocal])
def test_scale_beyond_fp32_is_the_largest_number(rule):
    tiny = torch.tensor([1e-40])
    assert rule(tiny, torch.ones(1), 448.0).item() == FP32_MAX


def test_updates_happen_in_place():
    history, scale = torch.tensor([[1.0], [0.0]]), torch.ones(1)
    pointers = history.data_ptr(), scale.data_ptr()
    assert update_history_and_scale(history, scale, 448.0) is None
    assert (history.data_ptr(), scale.data_ptr()) == pointers
    assert scale.item() == 448.0
