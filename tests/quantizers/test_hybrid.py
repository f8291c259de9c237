"""The hybrid quantizer: two children, each pinned to its direction, and what one of them alone would do."""

import pickle

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.kernels import Target
from crossgrain.quantizers.request import QuantizerRequest

from ..common.golden_cases import golden
from ..common.quantizers import E4M3, PAIRS, QUANTIZERS, assert_same_bytes, buffers_of, hybrid_of
from ..kernels.test_golden_planes import check_plane

DIRECTIONS = [ROWWISE, COLUMNWISE]
SOURCES = ["original", "rowwise_dequantized"]


def assert_same_plane(mine, theirs):
    assert (mine.format, mine.direction, mine.shape) == (theirs.format, theirs.direction, theirs.shape)
    assert torch.equal(mine.operand_codes(), theirs.operand_codes()), f"{mine.direction.value} codes differ"
    if mine.scale is not None:
        assert torch.equal(mine.operand_scales(), theirs.operand_scales()), f"{mine.direction.value} scales differ"
    if mine.amax is not None:
        assert torch.equal(mine.amax, theirs.amax), f"{mine.direction.value} amaxes differ"


def twin(quantizer):
    """A hybrid of two quantizers like ``quantizer``, each with state of its own."""
    return cg.HybridQuantizer(
        rowwise_quantizer=pickle.loads(pickle.dumps(quantizer)),
        columnwise_quantizer=pickle.loads(pickle.dumps(quantizer)),
    )


@pytest.fixture
def encoded(monkeypatch):
    """The (format, direction) of every plane that kernels are asked to write."""
    seen = []
    encode = kernels.encode

    def spy(x, targets, *rest, **options):
        seen.extend((target.plane.format.name, target.plane.direction) for target in targets)
        return encode(x, targets, *rest, **options)

    monkeypatch.setattr(kernels, "plan", no_plan)
    monkeypatch.setattr(kernels, "encode", spy)
    return seen


def no_plan(*_):
    """In the place of `kernels.plan`: planes are then written by `kernels.encode`."""


# ---- children ----------------------------------------------------------------------------------------


def test_children_are_pinned_to_their_directions():
    h = hybrid_of("mxfp8", "nvfp4")
    assert h.rowwise_quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    assert h.columnwise_quantizer.get_usages() == {"rowwise": False, "columnwise": True}
    h.set_usage(rowwise=False)
    assert h.rowwise_quantizer.get_usages() == {"rowwise": True, "columnwise": False}, "usages are the parent's"


def test_a_child_stays_pinned_whatever_is_done_to_it(x, encoded):
    h = hybrid_of("mxfp8", "nvfp4")
    h.rowwise_quantizer.set_usage(columnwise=True)
    h.columnwise_quantizer = cg.MXFP8Quantizer(E4M3)
    h(x)
    assert encoded == [("mxfp8", ROWWISE), ("mxfp8", COLUMNWISE)]


def test_bad_children_are_refused():
    mx, nv = cg.MXFP8Quantizer(E4M3), cg.NVFP4Quantizer()
    with pytest.raises(TypeError, match="columnwise child of a HybridQuantizer must be a quantizer, got str"):
        cg.HybridQuantizer(rowwise_quantizer=mx, columnwise_quantizer="nvfp4")
    with pytest.raises(ValueError, match="two objects"):
        cg.HybridQuantizer(rowwise_quantizer=mx, columnwise_quantizer=mx)
    with pytest.raises(ValueError, match="columnwise_source must be"):
        cg.HybridQuantizer(rowwise_quantizer=mx, columnwise_quantizer=nv, columnwise_source="columns")
    with pytest.raises(ValueError, match="rowwise child of a HybridQuantizer cannot be another HybridQuantizer"):
        cg.HybridQuantizer(rowwise_quantizer=hybrid_of("mxfp8", "fp8"), columnwise_quantizer=nv)
    assert mx.columnwise_usage, "a refused child is not pinned"


@pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda d: d.value)
@pytest.mark.parametrize("source", SOURCES)
def test_unneeded_directions_are_never_computed(x, encoded, direction, source):
    h = hybrid_of("mxfp8", "nvfp4", source)
    h.set_usage(rowwise=direction is ROWWISE, columnwise=direction is COLUMNWISE)
    q = h(x)
    wanted = [("mxfp8", ROWWISE)] if direction is ROWWISE else [("nvfp4", COLUMNWISE)]
    if source == "rowwise_dequantized" and direction is COLUMNWISE:
        wanted.insert(0, ("mxfp8", ROWWISE))  # the way to the column; it is not kept
    assert encoded == wanted
    assert q.get_usages() == {direction.value: True, direction.other.value: False}


def test_both_planes_are_written_by_one_call(x, monkeypatch):
    calls = []
    monkeypatch.setattr(kernels, "plan", no_plan)
    monkeypatch.setattr(kernels, "encode", lambda x, targets, *rest, **options: calls.append(len(targets)))
    h = hybrid_of("mxfp8", "nvfp4_rht")
    h(x).quantize_(x)
    assert calls == [2, 2]


def test_no_usage_makes_an_empty_hybrid(x, encoded):
    h = hybrid_of("mxfp8", "nvfp4")
    h.set_usage(rowwise=False, columnwise=False)
    for internal in (False, True):
        h.internal = internal
        q = h(x)
        assert (q.rowwise_sub_storage, q.columnwise_sub_storage, q.shape) == (None, None, x.shape)
        with pytest.raises(RuntimeError, match="does not hold any data"):
            q.dequantize()
    assert encoded == []
    with pytest.raises(TypeError, match="can only quantize tensors, got list"):
        h([1.0])


def test_the_parent_is_copied_as_a_snapshot(x):
    h = hybrid_of("mxfp8", "nvfp4")
    q = h(x)
    h.set_usage(columnwise=False)
    h.columnwise_quantizer.stochastic_rounding = True
    assert q._quantizer.columnwise_usage
    assert not q._quantizer.columnwise_quantizer.stochastic_rounding
    copied = h.copy()
    assert copied.get_usages() == h.get_usages()
    assert copied.rowwise_quantizer is not h.rowwise_quantizer
    assert copied == h
    assert hash(copied) == hash(h)
    assert pickle.loads(pickle.dumps(h)) == h
    h.internal = True
    assert h.copy().internal
    assert h.copy() != copied


# ---- the same as one format ----------------------------------------------------------------------------


def test_a_hybrid_of_one_format_is_that_format(quantizer, x):
    """Bit for bit, in both directions, quantized and refilled, tensor and storage."""
    h = twin(quantizer)
    for internal in (False, True):
        quantizer.internal = h.internal = internal
        seed = torch.get_rng_state()
        plain = quantizer(x.clone())
        used = torch.get_rng_state()
        torch.set_rng_state(seed)
        both = h(x.clone())
        assert torch.equal(torch.get_rng_state(), used), "it draws as many random numbers"
        for direction in DIRECTIONS:
            assert_same_plane(both.plane(direction), plain.plane(direction))
        torch.set_rng_state(seed)
        plain.quantize_(x * 3)
        torch.set_rng_state(seed)
        both.quantize_(x * 3)
        for direction in DIRECTIONS:
            assert_same_plane(both.plane(direction), plain.plane(direction))
            assert torch.equal(both.dequantize(direction=direction), plain.dequantize(direction=direction))


@pytest.mark.parametrize("row", ["fp8", "mxfp8", "fp8_block", "nvfp4_rht", "identity", "mxfp6_e2m3"])
@pytest.mark.parametrize("column", ["fp8", "mxfp8", "fp8_block_2d", "nvfp4_rht", "identity", "mxfp4"])
def test_each_child_makes_what_it_would_make_alone(row, column, x):
    q = hybrid_of(row, column)(x.clone())
    alone = {ROWWISE: QUANTIZERS[row]()(x.clone()), COLUMNWISE: QUANTIZERS[column]()(x.clone())}
    for direction in DIRECTIONS:
        assert_same_plane(q.plane(direction), alone[direction].plane(direction))


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_make_empty_is_what_quantize_returns(names, x):
    h = hybrid_of(*names)
    for internal in (False, True):
        h.internal = internal
        seed = torch.get_rng_state()
        q = h(x.clone())
        made = h.make_empty(x.shape, dtype=x.dtype)
        assert type(made) is type(q)
        assert [(n, b.shape, b.dtype) for n, b in made._buffers()] == [(n, b.shape, b.dtype) for n, b in q._buffers()]
        torch.set_rng_state(seed)
        made.quantize_(x)
        assert_same_bytes(made, q)
    h.internal = False
    assert h.make_empty((128, 128), requires_grad=True).requires_grad
    assert h.make_empty((128, 128), device="meta").device.type == "meta"


# ---- the column from what the row decodes to -----------------------------------------------------------


DERIVED = [("nvfp4", "mxfp8"), ("fp8", "nvfp4_rht"), ("mxfp8", "identity"), ("identity", "fp8")]


@pytest.mark.parametrize("names", DERIVED, ids="-".join)
def test_rowwise_dequantized(names, x):
    row_name, column_name = names
    h = hybrid_of(*names, "rowwise_dequantized")
    q = h(x.clone())
    for values in (x, x * 5):
        decoded = QUANTIZERS[row_name]()(values.clone()).dequantize()
        assert torch.equal(q.dequantize(), decoded)
        assert_same_plane(q.plane(COLUMNWISE), QUANTIZERS[column_name]()(decoded).plane(COLUMNWISE))
        h.set_usage(rowwise=False)
        alone = h(values.clone())
        assert alone.rowwise_sub_storage is None
        assert_same_plane(alone.plane(COLUMNWISE), q.plane(COLUMNWISE))
        alone.quantize_(x * 2)
        h.set_usage(rowwise=True)
        assert_same_plane(alone.plane(COLUMNWISE), h((x * 2).clone()).plane(COLUMNWISE))
        q.quantize_(x * 5)  # the row is refreshed first


def test_the_column_is_decoded_in_the_dtype_of_the_input(x):
    h = hybrid_of("nvfp4", "identity", "rowwise_dequantized")
    q = h(x.float())
    assert torch.equal(q.dequantize(direction=COLUMNWISE), cg.quantize(x.float(), "nvfp4").dequantize())
    assert q.columnwise_sub_storage._hp_data.dtype == torch.float32


@golden("hybrid.npz")
def test_golden(case):
    names = {"mxfp8_row": "mxfp8", "mxfp8_col": "mxfp8", "nvfp4_row": "nvfp4", "nvfp4_plain_col": "nvfp4"}
    names |= {"nvfp4_rht_col": "nvfp4_rht", "identity_col": "identity"}
    row, column, source = case.name.split("__")
    q = hybrid_of(names[row], names[column], source)(case.tensor())
    check_plane(case, "row", q.plane(ROWWISE))
    case.check_if_present("row_dq_bf16", q.dequantize())
    if column == "identity_col":
        case.check("col_hp", q.dequantize(direction=COLUMNWISE))
    else:
        check_plane(case, "col", q.plane(COLUMNWISE))
    case.assert_complete()


# ---- state and properties ------------------------------------------------------------------------------


def test_delayed_children_keep_histories_of_their_own(x):
    row = cg.Float8Quantizer(torch.tensor([2.0]), torch.zeros(1), E4M3)
    column = cg.Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), cg.DType.kFloat8E5M2)
    h = cg.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)
    q = h(x)
    assert row.amax.item() == column.amax.item() == x.abs().max()
    assert [plane.scale.item() for plane in q.planes()] == [0.5, 0.25]
    h.set_usage(columnwise=False)
    h(x * 2)
    assert (row.amax / column.amax).item() == 2.0, "a child that does not run sees nothing"
    h.set_usage(rowwise=False, columnwise=True)
    h.calibrate(x * 4)
    assert (column.amax / row.amax).item() == 2.0


def test_amax_reduction_is_set_on_those_that_can():
    group, other = object(), object()
    h = hybrid_of("fp8", "mxfp8")
    assert not h.with_amax_reduction
    h.with_amax_reduction, h.amax_reduction_group = True, group
    assert h.rowwise_quantizer.with_amax_reduction
    assert h.amax_reduction_group is group
    assert h.copy().amax_reduction_group is group
    assert not h.columnwise_quantizer.with_amax_reduction
    assert hybrid_of("mxfp8", "identity").amax_reduction_group is None
    both = hybrid_of("fp8", "nvfp4")
    both.rowwise_quantizer.amax_reduction_group, both.columnwise_quantizer.amax_reduction_group = group, other
    with pytest.raises(RuntimeError, match="different groups"):
        _ = both.amax_reduction_group


@pytest.mark.parametrize("internal", [False, True])
def test_results_leave_the_group(x, monkeypatch, internal):
    calls = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, *, op, group: calls.append(group))
    h = hybrid_of("fp8", "nvfp4")
    h.internal = internal
    h.with_amax_reduction = True
    h.rowwise_quantizer.amax_reduction_group, h.columnwise_quantizer.amax_reduction_group = "rows", "columns"
    q = h(x)
    assert calls == ["rows", "columns"], "each child reduces over its own group"
    assert not q._quantizer.with_amax_reduction
    assert q._quantizer.amax_reduction_group is None
    assert not any(child._quantizer.with_amax_reduction for child in (q._rowwise_storage, q._columnwise_storage))
    q.quantize_(x)
    assert len(calls) == 2
    h.update_quantized(x, q)
    assert calls == ["rows", "columns"] * 2


def test_requantization_safety():
    assert hybrid_of("mxfp8", "nvfp4").is_requantization_safe()
    for source in SOURCES:
        h = hybrid_of("fp8_delayed", "nvfp4", source)
        assert not h.is_requantization_safe()
        h.set_usage(rowwise=False)
        assert h.is_requantization_safe() == (source == "original"), "the row counts where it is the source"


def test_gathering_and_alignment(x):
    assert hybrid_of("fp8", "mxfp8").supports_only_rowwise_all_gather()
    assert hybrid_of("mxfp8", "nvfp4").supports_only_rowwise_all_gather()
    assert not hybrid_of("mxfp8", "fp8").supports_only_rowwise_all_gather()
    assert hybrid_of("mxfp8", "nvfp4").is_quantizable(x)
    assert not hybrid_of("fp8", "nvfp4").is_quantizable(x[:3])


# ---- requests --------------------------------------------------------------------------------------------


def test_requests_wait_to_be_resolved(x):
    request = QuantizerRequest()
    h = cg.HybridQuantizer(rowwise_quantizer=request, columnwise_quantizer=cg.NVFP4Quantizer())
    h.set_usage(rowwise=False)
    assert h.pending() == {ROWWISE: request}
    uses = (
        lambda: h(x),
        lambda: h.make_empty(x.shape),
        lambda: h.update_quantized(x, hybrid_of("fp8", "nvfp4")(x)),
        lambda: h.is_requantization_safe(),
        lambda: h.supports_only_rowwise_all_gather(),
        lambda: h.is_quantizable(x),
        lambda: h.calibrate(x),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match="its rowwise quantizer is a request"):
            use()
    made = QUANTIZERS["fp8_delayed"]()
    ready = h.resolved({ROWWISE: made})
    assert ready.rowwise_quantizer is made
    assert not made.columnwise_usage
    assert (ready.pending(), ready.get_usages()) == ({}, h.get_usages())
    assert h.pending() == {ROWWISE: request}, "the template can be resolved again"
    ready.set_usage(rowwise=True)
    assert_same_bytes(ready(x), hybrid_of("fp8_delayed", "nvfp4")(x))
    with pytest.raises(ValueError, match="two objects"):
        cg.HybridQuantizer(rowwise_quantizer=request, columnwise_quantizer=request).resolved(
            dict.fromkeys(DIRECTIONS, made)
        )
    with cg.settings.override(strict=True), pytest.raises(TypeError, match="nested QuantizerRequest"):
        cg.HybridQuantizer(rowwise_quantizer=request, columnwise_quantizer=cg.NVFP4Quantizer())


# ---- custom quantizers -----------------------------------------------------------------------------------


class HalvesStorage(cg.QuantizedTensorStorage):
    """Not made of planes: keeps half of the numbers, in a list of its own."""

    def __init__(self, halves, quantizer):
        self.halves, self._shape, self._dtype = halves, halves.shape, halves.dtype
        self._quantizer = quantizer

    def get_usages(self):
        held = self.halves is not None
        return {direction.value: held and self._quantizer.get_usages()[direction.value] for direction in DIRECTIONS}

    def dequantize(self, *, dtype=None):
        return (self.halves * 2).to(dtype or self._dtype)

    def prepare_for_saving(self):
        halves, self.halves = self.halves, None
        return [halves], self

    def restore_from_saved(self, tensors):
        self.halves = tensors[0]
        return tensors[1:]


class HalvesQuantizer(cg.Quantizer):
    custom = True

    def quantize_impl(self, tensor):
        return HalvesStorage(tensor / 2, self.copy())

    def update_quantized(self, src, dst, *, noop_flag=None):
        if (src == 13).any():
            raise RuntimeError("thirteen")
        dst.halves.copy_(src / 2)
        return dst


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("custom", DIRECTIONS, ids=lambda d: d.value)
def test_custom_children(x, custom, source):
    children = {custom: HalvesQuantizer(rowwise=True, columnwise=True), custom.other: cg.MXFP8Quantizer(E4M3)}
    h = cg.HybridQuantizer(
        rowwise_quantizer=children[ROWWISE], columnwise_quantizer=children[COLUMNWISE], columnwise_source=source
    )
    q = h(x)
    assert q.get_usages() == {"rowwise": True, "columnwise": True}
    expected = cg.quantize(x, "mxfp8")
    through_row = source == "rowwise_dequantized" and custom is COLUMNWISE
    assert torch.equal(q.dequantize(direction=custom), expected.dequantize() if through_row else x)
    assert torch.equal(q.dequantize(direction=custom.other), expected.dequantize(direction=custom.other))
    alias = q.detach()
    flat, objects = cg.prepare_for_saving(alias)
    assert q.dequantize().shape == x.shape
    assert torch.equal(cg.restore_from_saved(objects, flat)[0].dequantize(), q.dequantize())
    q.quantize_(x * 2)
    for direction in DIRECTIONS:
        assert torch.equal(alias.dequantize(direction=direction), q.dequantize(direction=direction))
    alias = q.detach()
    alias.update_usage(**{f"{custom.other.value}_usage": False})
    alias.quantize_(x * 3)
    with pytest.raises(RuntimeError, match=f"{custom.other.value} MXFP8Tensor .* is stale"):
        q.dequantize(direction=custom.other)
    for refused in (lambda: q.clone(), lambda: q.view(-1), lambda: h.make_empty(x.shape)):
        with pytest.raises((NotImplementedError, RuntimeError)):
            refused()


def test_a_custom_child_that_fails_leaves_no_mixture(x, monkeypatch):
    h = cg.HybridQuantizer(
        rowwise_quantizer=cg.MXFP8Quantizer(E4M3), columnwise_quantizer=HalvesQuantizer(rowwise=True, columnwise=True)
    )
    q = h(x.clone())
    before = buffers_of(q)
    with pytest.raises(RuntimeError, match="thirteen"):
        q.quantize_(torch.full_like(x, 13.0))
    assert all(torch.equal(buffer, before[name]) for name, buffer in q._buffers())
    derived = h.copy()
    derived.columnwise_source = "rowwise_dequantized"
    with pytest.raises(RuntimeError, match="thirteen"):
        derived.update_quantized(torch.full_like(x, 13.0), q)
    with pytest.raises(RuntimeError, match="columnwise HalvesStorage .* is stale"):
        q.dequantize(direction=COLUMNWISE)
    q.quantize_(x)
    monkeypatch.setattr(kernels, "encode", lambda *_, **__: [][0])
    with pytest.raises(IndexError):
        q.quantize_(x * 2)
    with pytest.raises(RuntimeError, match="rowwise MXFP8Tensor .* is stale"):
        q.dequantize()


def test_kernels_are_asked_with_the_encoding_of_each_child(x, monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "plan", no_plan)
    monkeypatch.setattr(kernels, "encode", lambda x, targets, *rest, **options: asked.extend(targets))
    hybrid_of("nvfp4_4over6_mse", "nvfp4_rht_sr")(x)
    assert all(isinstance(target, Target) for target in asked)
    assert [target.encoding.four_over_six for target in asked] == ["MSE", None]
    assert [target.encoding.stochastic for target in asked] == [False, True]


def test_columns_of_rows_that_are_there():
    x = torch.randn(32, 64)
    hybrid = hybrid_of("mxfp8", "nvfp4", "rowwise_dequantized")
    rows = QUANTIZERS["mxfp8"]().storing(rowwise=True, columnwise=False)(x)
    assert_same_bytes(hybrid.quantized_from_rows(rows), hybrid(x))
    with pytest.raises(ValueError, match="cannot make the columnwise plane from rows"):
        hybrid_of("mxfp8", "nvfp4").quantized_from_rows(rows)


@pytest.mark.parametrize("row, column", [("nvfp4", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("mxfp8", "nvfp4")])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_columns_from_rows_do_not_depend_on_the_dtype_that_is_copied_in(row, column, source):
    """Masters are float32, and a weight may be bfloat16: the columns are those of the rows in the weight's dtype."""
    x = torch.randn(64, 64).to(torch.bfloat16)
    made = hybrid_of(row, column, "rowwise_dequantized")(x)
    written = hybrid_of(row, column, "rowwise_dequantized")(torch.zeros_like(x))
    written.copy_(x.to(source))
    assert_same_bytes(written, made)
