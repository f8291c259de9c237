"""Plans: new planes written by one compiled call have the bytes of the reference, whatever changes between calls."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.kernels.choice import using_backend
from crossgrain.kernels.cpu.backend import CpuBackend
from crossgrain.kernels.cpu.known import is_known
from crossgrain.kernels.cpu.plans import Plan
from crossgrain.planes import empty_plane

from ...common.encodings import DIRECTIONS, HYBRIDS, NAMES, SEED, encoded, encodings_of, pair_of, that_fit
from ...common.quantizers import QUANTIZERS, hybrid_of

CPU, REFERENCE = CpuBackend(), kernels.REFERENCE
SHAPES = [(128, 96), (160, 544)]
DTYPES = (torch.float32, torch.bfloat16)
COMPILED = [name for name in NAMES if is_known(encodings_of(name, (ROWWISE,))[0][1].format)]
CASES = {
    **{f"{name} {ways}": encodings_of(name, DIRECTIONS[ways]) for name in COMPILED for ways in DIRECTIONS},
    **{name: pair_of(name) for name in HYBRIDS},
}
# Planes whose amaxes are those of rows, and pairs with tables of elements, are written one after the other.
UNPLANNED = ("row_scaled", "hifloat8")


def numbers(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def new_planes(x, encodings):
    """Planes, filled with a pattern where nothing is written, as `encoded` does it."""
    planes = [empty_plane(encoding.format, way, x.shape, device=x.device) for way, encoding in encodings]
    for buffer in bytes_of(planes):
        buffer.fill_(0xA5)
    return planes


def planned(x, encodings, known=None):
    planes = new_planes(x, encodings)
    plan = CPU.plan(x, planes, [encoding for _, encoding in encodings], {} if known is None else known)
    return plan, planes


def bytes_of(planes):
    return [buffer.contiguous().view(torch.uint8) for plane in planes for buffer in plane.buffers()]


def assert_same(found, wanted):
    assert all(torch.equal(*each) for each in zip(bytes_of(found), bytes_of(wanted), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_reference(case, monkeypatch):
    for shape, dtype, threads in itertools.product(SHAPES, DTYPES, (1, 3)):
        monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", str(threads))
        monkeypatch.setattr("crossgrain.kernels.cpu.runtime.ELEMENTS_PER_THREAD", 1 << 12 if threads > 1 else 1 << 18)
        x, encodings = numbers(shape, dtype), that_fit(CASES[case], shape)
        plan, planes = planned(x, encodings)
        if any(name in case for name in UNPLANNED):
            assert plan is None
            return
        assert isinstance(plan, Plan)
        for source in (x, x * 2.0**-30, torch.zeros_like(x)):
            for plane in planes:
                plane.data.fill_(0xA5)
            assert plan.run(source, planes, SEED) is False
            assert_same(planes, encoded(REFERENCE, source, encodings))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4_rht_sr", "fp8_block", "mxfp8 | nvfp4"])
def test_nonfinite_numbers_are_noticed_and_give_the_bytes_of_the_reference(name, bad, threads, monkeypatch):
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", str(threads))
    monkeypatch.setattr("crossgrain.kernels.cpu.runtime.ELEMENTS_PER_THREAD", 1 << 12 if threads > 1 else 1 << 18)
    quantizer = hybrid_of("mxfp8", "nvfp4") if "|" in name else QUANTIZERS[name]()
    x = numbers((160, 96))
    x[77, 5] = bad
    made = []
    for backend in ("reference", "auto"):
        torch.manual_seed(3)
        with using_backend(backend):
            made.append(quantizer.make_planes(x, rowwise=True, columnwise=True))
    assert_same(*[[pair.rowwise, pair.columnwise] for pair in made])
    for own in quantizer.plain_quantizers():
        own.nonfinite = "raise"
    with pytest.raises(cg.NonfiniteError, match="row 77, column 5"):
        quantizer.make_planes(x, rowwise=True, columnwise=True)


def test_a_matrix_of_another_dtype_has_another_plan():
    encodings, known = encodings_of("mxfp8", (ROWWISE, COLUMNWISE)), {}
    first, _ = planned(numbers((64, 64)), encodings, known)
    second, planes = planned(numbers((64, 64), torch.bfloat16), encodings, known)
    assert first is not second and list(known) == [torch.float32, torch.bfloat16]
    assert planned(numbers((64, 64)), encodings, known)[0] is first
    second.run(numbers((64, 64), torch.bfloat16), planes, None)
    assert_same(planes, encoded(REFERENCE, numbers((64, 64), torch.bfloat16), encodings))


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_kernels_cannot_read_as_it_is_has_no_plan():
    encodings = encodings_of("mxfp8", (ROWWISE,))
    x = numbers((64, 64))
    for other in (
        x.t(),
        x.half(),
        x[:0],
        x.repeat(1, 2)[:, :64],
        torch._neg_view(x),
        x.as_subclass(torch.nn.Parameter),
    ):
        assert planned(other, encodings)[0] is None
    planes = new_planes(x, encodings)
    with Watching():
        assert CPU.plan(x, planes, [encoding for _, encoding in encodings], {}) is None
    assert planned(x, encodings)[0] is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda quantizer: setattr(quantizer, "stochastic_rounding", True),
        lambda quantizer: setattr(quantizer, "nvfp4_use_4over6", True),
        lambda quantizer: quantizer.set_usage(columnwise=False),
        lambda quantizer: quantizer.set_usage(rowwise=False),
    ],
)
def test_an_option_that_changes_drops_the_plans(change):
    quantizer, fresh, x = cg.NVFP4Quantizer(), cg.NVFP4Quantizer(), numbers((64, 96))
    quantizer(x)
    for each in (quantizer, fresh):
        change(each)
    made = []
    for each in (quantizer, fresh):
        torch.manual_seed(5)
        made.append(each(x).planes())
    assert_same(*made)


def test_the_backend_that_was_chosen_is_used_at_once():
    quantizer, x, used = QUANTIZERS["mxfp8"](), numbers((64, 64)), []
    quantizer(x)
    encode = REFERENCE.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REFERENCE, "encode", lambda *args: used.append(1) or encode(*args), raising=False)
        with using_backend("reference"):
            quantizer(x)
    assert used


def test_the_number_of_plans_is_bounded():
    quantizer = QUANTIZERS["mxfp8"]()
    for rows in range(1, 600):
        quantizer.make_planes(torch.ones(32, 32 * rows), rowwise=True, columnwise=False)
    assert len(quantizer._memo) <= 256


def test_planes_of_two_calls_share_no_memory():
    quantizer, x = hybrid_of("mxfp8", "nvfp4"), numbers((64, 64))
    first = quantizer.make_planes(x, rowwise=True, columnwise=True)
    kept = [buffer.clone() for buffer in bytes_of(first)]
    quantizer.make_planes(-3 * x, rowwise=True, columnwise=True)
    assert all(torch.equal(*each) for each in zip(bytes_of(first), kept, strict=True))


@pytest.mark.parametrize("numbers_of", [lambda x: x, lambda x: x.clone().fill_(float("nan")), torch.zeros_like])
@pytest.mark.parametrize("name", ["fp8", "fp8_pow2_eps", "fp8_delayed"])
def test_quantizers_record_the_same_with_and_without_plans(name, numbers_of, monkeypatch):
    x, found = numbers_of(numbers((64, 96))), []
    for plan in (kernels.plan, lambda *_: None):
        monkeypatch.setattr(kernels, "plan", plan)
        quantizer = QUANTIZERS[name]()
        made = quantizer(x)
        found.append(
            [*bytes_of(made.planes()), *(each.view(torch.uint8) for each in (quantizer.amax, quantizer.scale))]
        )
    assert all(torch.equal(*each) for each in zip(*found, strict=True))


def test_numbers_of_another_type_do_not_change_what_kernels_are_given():
    """A format that is equal to a built-in one, written with integers; an option that is numpy's."""
    element = cg.formats.Element("e4m3", 4, 3, bias=7, max=448, specials="nan")
    x = numbers((128, 128))
    mine = cg.FormatQuantizer(cg.formats.Format("fp8", element, ragged=True))
    with using_backend("reference"):
        wanted = QUANTIZERS["fp8"]()(x).planes()
    for quantizer in (mine, QUANTIZERS["fp8"](), mine):
        assert_same(quantizer(x).planes()[:1], wanted[:1])
    odd = cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3, force_pow_2_scales=np.bool_(True))
    assert_same(
        odd(x).planes(), cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3, force_pow_2_scales=True)(x).planes()
    )


def test_an_amax_that_a_base_class_gives_is_used():
    class Given:
        def _given(self):
            return torch.full((1,), 100.0), None

    class Mixed(Given, cg.NVFP4Quantizer):
        pass

    assert Mixed.gives_scales and not cg.NVFP4Quantizer.gives_scales
    assert float(Mixed()(numbers((64, 64)))._amax_rowwise) == 100.0
