"""Groups of rows, quantized in one call of the kernels: bytes, statistics and random streams are those of a loop."""

import itertools

import pytest
import torch

import crossgrain as cg
from crossgrain import kernels
from crossgrain.formats.dtypes import DType
from crossgrain.planes import COLUMNWISE, ROWWISE
from crossgrain.quantizers.groups import can_quantize_groups, quantize_groups


def nvfp4(**options):
    return lambda: cg.NVFP4Quantizer(**options)


def delayed():
    return cg.Float8Quantizer(torch.full((1,), 3.0), torch.full((1,), 0.5), DType.kFloat8E4M3)


def current(**options):
    return lambda: cg.Float8CurrentScalingQuantizer(DType.kFloat8E5M2, **options)


def hybrid(row, column):
    return lambda: cg.HybridQuantizer(rowwise_quantizer=row(), columnwise_quantizer=column())


ROTATED = {"with_rht": True, "with_post_rht_amax": True}
MAKERS = {
    "nvfp4": nvfp4(),
    "nvfp4 rotated": nvfp4(**ROTATED),
    "nvfp4 stochastic": nvfp4(stochastic_rounding=True),
    "nvfp4 rotated stochastic": nvfp4(**ROTATED, stochastic_rounding=True),
    "nvfp4 tiles": nvfp4(with_2d_quantization=True),
    "nvfp4 4-over-6": nvfp4(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
    "nvfp4 by rows": nvfp4(row_scaled_nvfp4=True),
    "fp8 delayed": delayed,
    "fp8 current": current(),
    "fp8 current, powers of two": current(force_pow_2_scales=True, amax_epsilon=1e-3),
    "fp8 current, given amax": current(use_existing_amax=True, amax=torch.full((1,), 2.0)),
    "fp8 blocks": lambda: cg.Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda: cg.MXFP8Quantizer(DType.kFloat8E4M3),
    "mxfp4 stochastic": lambda: cg.FormatQuantizer("mxfp4", stochastic_rounding=True),
    "hybrid": hybrid(delayed, nvfp4(**ROTATED, stochastic_rounding=True)),
    "hybrid nvfp4": hybrid(nvfp4(), nvfp4(**ROTATED)),
    "hybrid identity": hybrid(cg.IdentityQuantizer, nvfp4()),
}
SIZES = {"several": [32, 0, 160, 64], "one": [96], "empty ends": [0, 32, 0]}


def rows_for(sizes, width=96, dtype=torch.bfloat16):
    spread = torch.logspace(-2, 2, sum(sizes)).unsqueeze(1)  # so that every group has an amax of its own
    return (torch.randn(sum(sizes), width) * spread).to(dtype)


def one_by_one(rows, sizes, quantizers, rowwise=True, columnwise=True):
    groups = zip(quantizers, rows.split(sizes), strict=True)
    return [q.storing(rowwise=rowwise, columnwise=columnwise).quantize(group) for q, group in groups]


def together(rows, sizes, quantizers, rowwise=True, columnwise=True):
    assert can_quantize_groups(quantizers)
    return quantize_groups(rows, sizes, [q.storing(rowwise=rowwise, columnwise=columnwise) for q in quantizers])


def assert_same(mine, theirs):
    """Of every buffer: shape, padding and bytes."""
    assert type(mine) is type(theirs) and mine.shape == theirs.shape and mine.dtype == theirs.dtype
    for direction in (ROWWISE, COLUMNWISE):
        a, b = mine.plane(direction), theirs.plane(direction)
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert (a.format, a.shape, a.transposed) == (b.format, b.shape, b.transposed)
        for one, other in itertools.zip_longest(a.buffers(), b.buffers()):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def statistics(quantizer):
    children = [quantizer]
    if isinstance(quantizer, cg.HybridQuantizer):
        children = [quantizer.rowwise_quantizer, quantizer.columnwise_quantizer]
    return [getattr(child, name).tolist() for child in children for name in ("amax", "scale") if hasattr(child, name)]


def check(name, rows, sizes, **directions):
    mine, theirs = ([MAKERS[name]() for _ in sizes] for _ in range(2))
    torch.manual_seed(7)
    expected = one_by_one(rows, sizes, theirs, **directions)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    found = together(rows, sizes, mine, **directions)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(found, expected, strict=True):
        assert_same(a, b)
    assert list(map(statistics, mine)) == list(map(statistics, theirs))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MAKERS)
def test_gives_what_a_loop_gives(name, sizes):
    check(name, rows_for(SIZES[sizes]), SIZES[sizes])


@pytest.mark.parametrize("name", MAKERS)
def test_in_one_direction(name):
    for rowwise in (True, False):
        check(name, rows_for([64, 32]), [64, 32], rowwise=rowwise, columnwise=not rowwise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", MAKERS)
def test_for_every_dtype(name, dtype):
    check(name, rows_for([32, 0, 64], dtype=dtype), [32, 0, 64])


@pytest.mark.parametrize("name", MAKERS)
def test_on_the_reference(name):
    kernels.set_backend("reference")
    try:
        check(name, rows_for([32, 0, 64], width=32), [32, 0, 64])
    finally:
        kernels.set_backend("auto")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
@pytest.mark.parametrize("name", MAKERS)
def test_with_awkward_numbers_in_one_group(name, value):
    rows = rows_for([32, 32, 32])
    rows[40, 3] = value
    if value == 0.0:
        rows[32:64] = 0.0
    check(name, rows, [32, 32, 32])


@pytest.mark.parametrize("name", ["nvfp4 rotated stochastic", "nvfp4 by rows", "fp8 current", "hybrid"])
def test_threads_share_groups_out(name, monkeypatch):
    """Groups of uneven sizes: two threads have parts of one."""
    monkeypatch.setenv("CROSSGRAIN_NUM_THREADS", "3")
    sizes = [32, 1600, 0, 480]
    rows = rows_for(sizes, width=512)
    for values in (rows, rows.flip(0)):  # the amax of a group is in the last part of it, and in the first
        check(name, values, sizes)


def test_widths_that_no_column_kernel_takes():
    for name in ("nvfp4", "nvfp4 rotated", "fp8 current"):
        check(name, rows_for([32, 64], width=16), [32, 64])


def test_rows_of_other_strides():
    wide = rows_for([64, 32], width=160)
    check("nvfp4", wide[:, ::2], [64, 32])
    check("fp8 current", wide.t()[:96, :96].contiguous().t(), [64, 32])


def test_groups_that_blocks_do_not_divide_are_refused_before_anything_is_written():
    quantizers = [delayed(), delayed()]
    hybrids = [cg.HybridQuantizer(rowwise_quantizer=q, columnwise_quantizer=cg.NVFP4Quantizer()) for q in quantizers]
    with pytest.raises(ValueError, match=r"shape \[40, 64\] columnwise as nvfp4.*\(M\) is 40.*multiple of 16"):
        together(torch.randn(72, 64), [32, 40], hybrids)
    assert [q.amax.item() for q in quantizers] == [0.5, 0.5]


def test_kernels_are_called_once_for_all_groups(monkeypatch):
    from crossgrain.kernels.cpu import runtime

    called = []
    found = runtime.address
    monkeypatch.setattr(runtime, "address", lambda *call: called.append(call[0].__name__) or found(*call))
    sizes = [32] * 8
    together(rows_for(sizes), sizes, [MAKERS["nvfp4 rotated"]() for _ in sizes])
    assert called == ["of_all", "of_rotated", "columns"]


def test_columns_made_from_rows_and_custom_quantizers_are_left_to_a_loop():
    def derived():
        return cg.HybridQuantizer(
            rowwise_quantizer=cg.NVFP4Quantizer(),
            columnwise_quantizer=cg.NVFP4Quantizer(),
            columnwise_source="rowwise_dequantized",
        )

    class Custom(cg.NVFP4Quantizer):
        custom = True

    assert not can_quantize_groups([derived(), derived()])
    assert not can_quantize_groups([Custom(), Custom()])


def test_numbers_that_are_kept_as_they_are_have_no_kernel_for_groups():
    identity = cg.IdentityQuantizer()
    hybrid = cg.HybridQuantizer(rowwise_quantizer=cg.IdentityQuantizer(), columnwise_quantizer=cg.NVFP4Quantizer())
    assert not can_quantize_groups([identity, identity])
    assert can_quantize_groups([hybrid, hybrid])
