"""Master weights in pieces: bitwise what quantizing the whole would give."""

import itertools

import pytest
import torch
import torch.multiprocessing as mp

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE
from crossgrain.kernels.reference.packing import pack, unpack
from crossgrain.optim.weight_update import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from crossgrain.tensor.init_values import keep_high_precision_init_val

from ..common.quantizers import PAIRS, QUANTIZERS, assert_same_bytes, buffers_of, hybrid_of
from ..common.ranks import error_of, run

SHAPE = (64, 96)
SOURCES = ["original", "rowwise_dequantized"]
HYBRIDS = {f"{row}|{column}|{source}": (row, column, source) for row, column in PAIRS for source in SOURCES}
CUTS = {"halves": (3072,), "inside_a_block": (7, 1111, 5000), "uneven": (1,)}


def quantizer_of(name):
    return hybrid_of(*HYBRIDS[name]) if name in HYBRIDS else QUANTIZERS[name]()


def shape_of(name):
    return (128, 96) if "mxfp8_2d" in name or "block_2d" in name else SHAPE


def old_weight(quantizer, shape=SHAPE, dtype=torch.bfloat16):
    return quantizer(torch.linspace(-3, 3, shape[0] * shape[1]).view(shape).to(dtype))


def new_master(shape=SHAPE):
    """Of another magnitude, with outliers that decide block scales."""
    master = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.05
    master[5, 7], master[40, 90] = 2.0, -1.5
    return master


def pieces_of(master, cuts):
    edges = [0, *cuts, master.numel()]
    return [(start, master.flatten()[start:end].clone()) for start, end in itertools.pairwise(edges)]


def expected_weight(name, master, seed=5):
    weight = old_weight(quantizer_of(name), tuple(master.shape))
    torch.manual_seed(seed)
    return weight.quantize_(master.to(weight.dtype))


def codes_of(plane):
    """In logical order: [M * K]."""
    if plane.format.is_identity:
        return plane.data.flatten()
    codes = unpack(plane.operand_codes(), plane.format.element.bits)
    return (codes if plane.direction is ROWWISE else codes.t()).flatten()


@pytest.mark.parametrize("name", [*QUANTIZERS, *HYBRIDS])
def test_a_whole_master_is_quantized(name):
    master = new_master(shape_of(name))
    weight = old_weight(quantizer_of(name), shape_of(name))
    torch.manual_seed(5)
    quantize_master_weights([weight], [master.flatten()], [0], None)
    assert_same_bytes(weight, expected_weight(name, master))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", [*QUANTIZERS, *HYBRIDS])
def test_pieces_of_one_call_make_the_whole(name, cuts, monkeypatch):
    """Through the path of pieces, too, which is what several ranks use."""
    from crossgrain.optim import weight_update

    monkeypatch.setattr(weight_update._Weight, "is_complete", lambda self: False)
    master = new_master(shape_of(name))
    weight = old_weight(quantizer_of(name), shape_of(name))
    pieces = pieces_of(master, CUTS[cuts])
    torch.manual_seed(5)
    quantize_master_weights(
        [weight] * len(pieces), [piece for _, piece in pieces], [start for start, _ in pieces], None
    )
    assert_same_bytes(weight, expected_weight(name, master))


@pytest.mark.parametrize("name", [*QUANTIZERS, "mxfp8|nvfp4_rht|original", "nvfp4|mxfp8|original"])
def test_a_piece_alone_writes_its_codes_and_all_scales(name):
    """What nobody has counts as zero, and keeps its codes."""
    shape = shape_of(name)
    master = new_master(shape)
    weight = old_weight(quantizer_of(name), shape)
    before = [codes_of(plane).clone() for plane in weight.planes()]
    start, end = 1111, 5000
    torch.manual_seed(5)
    quantize_master_weights([weight], [master.flatten()[start:end]], [start], None)
    known = torch.zeros_like(master).flatten()
    known[start:end] = master.flatten()[start:end]
    expected = expected_weight(name, known.view(shape))
    for plane, same, old in zip(weight.planes(), expected.planes(), before, strict=True):
        codes = codes_of(plane)
        assert torch.equal(codes[start:end], codes_of(same)[start:end])
        assert torch.equal(codes[:start], old[:start]) and torch.equal(codes[end:], old[end:])
        if plane.scale is not None:
            assert torch.equal(plane.operand_scales(), same.operand_scales())
        assert plane.amax is None or torch.equal(plane.amax, same.amax)


def test_columns_made_from_rows_follow_the_rows_of_a_piece():
    weight = old_weight(hybrid_of("mxfp8", "nvfp4", "rowwise_dequantized"))
    quantize_master_weights([weight], [new_master().flatten()[100:200]], [100], None)
    expected = QUANTIZERS["nvfp4"]()
    expected.set_usage(rowwise=False)
    assert_same_bytes(weight.columnwise_sub_storage, expected(weight.dequantize(direction=ROWWISE)))


@pytest.mark.parametrize("one_buffer", [True, False])
@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE])
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp8|nvfp4_rht|rowwise_dequantized"])
def test_weights_with_one_direction(name, direction, one_buffer):
    with cg.settings.override(non_tn_fp8_gemm=one_buffer):
        quantizer = quantizer_of(name)
        quantizer.set_usage(rowwise=direction is ROWWISE, columnwise=direction is COLUMNWISE)
        weight, expected = old_weight(quantizer), old_weight(quantizer)
        master = new_master()
        half = master.numel() // 2
        quantize_master_weights([weight, weight], [master.flatten()[:half], master.flatten()[half:]], [0, half], None)
        assert_same_bytes(weight, expected.quantize_(master.bfloat16()))


def test_histories_see_the_largest_magnitude():
    weight = old_weight(QUANTIZERS["fp8_delayed"]())
    weight._quantizer.amax.zero_()
    quantize_master_weights([weight], [new_master().flatten()[:600]], [0], None)
    assert float(weight._quantizer.amax) == 2.0


def test_preserved_values_are_let_go():
    weight = old_weight(QUANTIZERS["mxfp8"]())
    keep_high_precision_init_val(weight, weight.dequantize())
    cast_master_weights_to_fp8([weight], [None], [None], None)
    assert weight.get_high_precision_init_val() is None


def test_codes_go_to_shards_where_they_are_given():
    master, weight = new_master(), old_weight(hybrid_of("mxfp8", "mxfp8"))
    expected = expected_weight("mxfp8", master)
    before = buffers_of(weight)
    shards = tuple(torch.zeros(1000, dtype=torch.uint8) for _ in range(2))
    pieces = [master.flatten()[:500], master.flatten()[500:1500], master.flatten()[1500:]]
    quantize_master_weights([weight], [pieces[1]], [500], None, [shards])
    for shard, direction in zip(shards, cg.Direction, strict=True):
        known = torch.zeros_like(master).flatten()
        known[500:1500] = pieces[1]
        same = expected_weight("mxfp8", known.view(SHAPE)).plane(direction)
        assert torch.equal(shard, codes_of(same)[500:1500])
        assert torch.equal(weight.plane(direction).data, before[f"{direction.value}_{direction.value}_data"])
    assert expected.shape == weight.shape


@pytest.mark.parametrize(
    "row, column, refused",
    [
        ("mxfp8", "fp8", "rowwise child of .* \\(MXFP8Quantizer\\)"),
        ("fp8", "mxfp8", "columnwise child of .* \\(MXFP8Quantizer\\)"),
        ("nvfp4", "fp8", "rowwise child of .* \\(NVFP4Quantizer\\)"),
        ("fp8", "fp8_block", "columnwise child of .* \\(Float8BlockQuantizer\\)"),
        ("fp8", "fp8", None),
        ("identity", "fp8", None),
    ],
)
def test_strict_takes_masters_only_into_children_with_one_scale(row, column, refused):
    weight, master = old_weight(hybrid_of(row, column)), new_master().flatten()
    before = {name: buffer.clone() for name, buffer in weight._buffers()}
    with cg.settings.override(strict=True):
        if refused is None:
            quantize_master_weights([weight], [master], [0], None)
            return
        with pytest.raises(NotImplementedError, match=refused):
            quantize_master_weights([weight], [master], [0], None)
    assert all(torch.equal(before[name], buffer) for name, buffer in weight._buffers())


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda a: a.update(start_offsets=[0]), ValueError, "needs lists of the same length"),
        (lambda a: a.update(start_offsets=[0, None]), ValueError, "must both be given, or both be None"),
        (lambda a: a.update(start_offsets=[0, 1]), ValueError, "is not a piece of it"),
        (
            lambda a: a["model_weights"].__setitem__(1, torch.zeros(SHAPE)),
            TypeError,
            "must be a quantized tensor, got a Tensor",
        ),
        (
            lambda a: a["master_weights"].__setitem__(1, torch.zeros(64 * 96, dtype=torch.int32)),
            ValueError,
            "needs a floating-point master",
        ),
        (
            lambda a: a["model_weights"][1].update_usage(False, False),
            ValueError,
            "holds no data: both rowwise and columnwise are absent",
        ),
        (
            lambda a: a.update(fsdp_shard_model_weights=[None, (torch.zeros(3, dtype=torch.uint8),) * 2]),
            ValueError,
            "the shard of its rowwise plane must have",
        ),
    ],
)
def test_everything_is_checked_before_anything_is_written(change, error, message):
    weights = [old_weight(hybrid_of("mxfp8", "fp8")) for _ in range(2)]
    first, before = weights[0], buffers_of(weights[0])
    arguments = {
        "model_weights": weights,
        "master_weights": [new_master().flatten()] * 2,
        "start_offsets": [0, 0],
        "group": None,
    }
    change(arguments)
    with pytest.raises(error, match=message):
        quantize_master_weights(**arguments)
    assert all(torch.equal(before[name], buffer) for name, buffer in first._buffers())


@pytest.mark.parametrize("name", ["mxfp8", "fp8", "identity"])
def test_codes_whose_memory_was_freed_are_not_touched(name):
    """Nor read: that would end the process. Scales are written, and codes to shards."""
    master, weight = new_master(), old_weight(QUANTIZERS[name]())
    expected = expected_weight(name, master)
    planes = weight.planes()
    for plane in planes:
        plane.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="weight 0: the memory of its rowwise codes was freed, and no shard is given"):
        quantize_master_weights([weight], [master.flatten()], [0])
    quantize_master_weights([weight], [None], [None])
    shards = [torch.zeros(master.numel(), dtype=plane.data.dtype) for plane in planes]
    quantize_master_weights([weight], [master.flatten()], [0], None, [shards])
    for shard, plane in zip(shards, expected.planes(), strict=True):
        assert torch.equal(shard, codes_of(plane))


@pytest.mark.parametrize("name", ["mxfp8", "fp8", "nvfp4_2d", "identity"])
def test_replace_raw_data(name):
    weight = old_weight(QUANTIZERS[name]())
    plane = weight.planes()[0]
    values, buffer = weight.dequantize(), torch.zeros_like(plane.data)
    replace_raw_data(weight, buffer)
    assert weight.planes()[0].data.data_ptr() == buffer.data_ptr()
    assert torch.equal(weight.dequantize(), values)
    with pytest.raises(ValueError, match="the new buffer is"):
        replace_raw_data(weight, buffer[:1])


def test_raw_data_of_a_hybrid_is_that_of_its_rows():
    weight = old_weight(hybrid_of("mxfp8", "nvfp4", "original"))
    before, buffer = buffers_of(weight), torch.zeros(SHAPE, dtype=torch.uint8)
    replace_raw_data(weight, buffer)
    assert weight.plane(ROWWISE).data.data_ptr() == buffer.data_ptr()
    assert all(torch.equal(before[name], data) for name, data in weight._buffers())
    with pytest.raises(ValueError, match=r"rowwise codes of a .*\[64, 96\] are torch.uint8 \[64, 96\]"):
        replace_raw_data(weight, buffer.float())


def test_processing_twice_or_without_need_changes_nothing():
    with cg.settings.override(non_tn_fp8_gemm=False):
        names = ["fp8", "mxfp8", "nvfp4_2d", "fp8_block_2d", "identity", "mxfp8|nvfp4_rht|rowwise_dequantized"]
        weights = [old_weight(quantizer_of(name), (128, 128)) for name in names]
        before = [buffers_of(weight) for weight in weights]
        for _ in range(2):
            post_all_gather_processing([*weights, torch.zeros(3)])
        for weight, old in zip(weights, before, strict=True):
            assert all(torch.equal(old[name], buffer) for name, buffer in weight._buffers())


# ---- two ranks ---------------------------------------------------------------------------------------


NAMES = [*QUANTIZERS, *HYBRIDS]
IN_BYTES = [name for name in NAMES if not name.startswith("identity")]


def _gather(plane, spans):
    """Codes of ``spans`` are ours: each has one owner, so they add up."""
    codes = codes_of(plane).clone()
    own = torch.zeros(codes.numel(), dtype=torch.bool)
    own[slice(*spans)] = True
    gathered = torch.where(own, codes, torch.zeros_like(codes))
    torch.distributed.all_reduce(gathered.view(torch.uint8))
    if plane.format.is_identity:
        plane.data.copy_(gathered.view(plane.data.shape))
        return
    gathered = gathered.view(plane.shape)
    operand = gathered if plane.direction is ROWWISE else gathered.t().contiguous()
    plane.operand_codes().copy_(pack(operand, plane.format.element.bits))


def _rank(rank, path, cut, results):
    cg.settings.non_tn_fp8_gemm = False
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    torch.manual_seed(5)
    weights = [old_weight(quantizer_of(name), shape_of(name)) for name in NAMES]
    spans = [(0, cut) if rank == 0 else (cut, weight.numel()) for weight in weights]
    masters = [new_master(shape_of(name)).flatten()[slice(*span)] for name, span in zip(NAMES, spans, strict=True)]
    quantize_master_weights(weights, masters, [start for start, _ in spans], group, None, True)
    stale = [[plane.stale for plane in weight.planes()] for weight in weights]
    for weight, span in zip(weights, spans, strict=True):
        for plane in weight.planes():
            _gather(plane, span)
    post_all_gather_processing(weights)
    results[rank] = [(buffers_of(weight), flags) for weight, flags in zip(weights, stale, strict=True)]

    results[f"shared{rank}"] = _update_in_one_buffer(spans, masters, group)

    dropped = old_weight(QUANTIZERS["nvfp4_2d"]())
    quantize_master_weights([dropped], [masters[0]], [spans[0][0]], group)
    results[f"usages{rank}"] = dropped.get_usages()

    refused = old_weight(QUANTIZERS["mxfp8"]())
    bad_start = 10**6 if rank == 0 else 0
    try:
        quantize_master_weights([refused], [torch.zeros(4)], [bad_start], group)
    except (ValueError, RuntimeError) as error:
        results[f"error{rank}"] = str(error)
    torch.distributed.destroy_process_group()


def _update_in_one_buffer(spans, masters, group):
    """As distributed optimizers do that have a byte for each number, and gather nothing else."""
    torch.manual_seed(5)
    weights = [old_weight(quantizer_of(name), shape_of(name)) for name in IN_BYTES]
    raw = [torch.zeros(weight.shape, dtype=torch.uint8) for weight in weights]
    for weight, buffer in zip(weights, raw, strict=True):
        replace_raw_data(weight, buffer)
    own = [NAMES.index(name) for name in IN_BYTES]
    spans, masters = [spans[i] for i in own], [masters[i] for i in own]
    quantize_master_weights(weights, masters, [start for start, _ in spans], group, None, True)
    for buffer, (start, end) in zip(raw, spans, strict=True):
        mine = torch.zeros_like(buffer).flatten()
        mine[start:end] = buffer.flatten()[start:end]
        torch.distributed.all_reduce(mine)
        buffer.copy_(mine.view(buffer.shape))
    post_all_gather_processing(weights)
    return [buffers_of(weight) for weight in weights]


def _process_in_other_orders(rank, path, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    quantizer = hybrid_of("mxfp8", "nvfp4", "rowwise_dequantized")
    weights = [quantizer(new_master().bfloat16() * scale) for scale in (1, 100)]
    for weight in weights:  # as a module does whose weight is shared
        weight._quantizer = quantizer.reducing(torch.distributed.group.WORLD, axis=1)
    for weight in weights:
        replace_raw_data(weight, torch.zeros(SHAPE, dtype=torch.uint8))
    post_all_gather_processing(weights[:: 1 if rank else -1])
    results[rank] = [weight.plane(COLUMNWISE).amax.item() for weight in weights]
    torch.distributed.destroy_process_group()


def test_ranks_that_share_amaxes_may_process_weights_in_other_orders(tmp_path):
    """Megatron has them in a set."""
    with mp.get_context("fork").Manager() as manager:
        results = manager.dict()
        args = (str(tmp_path / "store"), results)
        mp.start_processes(_process_in_other_orders, args=args, nprocs=2, start_method="fork")
        assert results[0] == results[1] and results[0][1] > 50 * results[0][0]


@pytest.mark.parametrize("cut", [3072, 1111])
def test_two_ranks_write_what_one_would(cut, tmp_path):
    """The same bytes on both, once the codes are gathered; what follows from them cannot be read before."""
    with mp.get_context("fork").Manager() as manager:
        results = manager.dict()
        mp.start_processes(_rank, args=(str(tmp_path / "store"), cut, results), nprocs=2, start_method="fork")
        found, errors = [results[rank] for rank in range(2)], [results[f"error{rank}"] for rank in range(2)]
        shared, usages = [results[f"shared{rank}"] for rank in range(2)], results["usages0"]
    assert usages == {"rowwise": True, "columnwise": False}, "made from the rows when it is next needed"
    assert "is not a piece of it" in errors[0] and "another rank raised an error about its weights" in errors[1]
    with cg.settings.override(non_tn_fp8_gemm=False):
        for name, (mine, stale), (theirs, _) in zip(NAMES, *found, strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
            whole = expected_weight(name, new_master(shape_of(name)))
            is_last_derived = name.endswith("rowwise_dequantized") or (
                name not in HYBRIDS and len(whole.planes()) == 2 and whole.planes()[0].format.is_symmetric
            )
            assert stale[-1] is is_last_derived, name
            if "_sr" not in name:  # their seeds depend on how many were drawn before
                for key, buffer in buffers_of(whole).items():
                    assert torch.equal(mine[key], buffer), (name, key)
        for name, mine, theirs in zip(IN_BYTES, *shared, strict=True):
            assert all(torch.equal(mine[key], theirs[key]) for key in mine), name
            if "_sr" not in name:
                for key, buffer in buffers_of(expected_weight(name, new_master(shape_of(name)))).items():
                    assert torch.equal(mine[key], buffer), (name, key)


NEED_NEIGHBOURS = ["nvfp4_rht", "nvfp4_max256", "mxfp8|nvfp4_rht|original"]


def _all_have_all(rank):
    group, made = torch.distributed.group.WORLD, []
    for name in NEED_NEIGHBOURS:
        weight, master = old_weight(quantizer_of(name), shape_of(name)), new_master(shape_of(name)).flatten()
        start = 100 * rank
        quantize_master_weights([weight], [master[start:]], [start], group)
        made.append(weight)
    return [buffers_of(weight) for weight in made] if rank == 0 else None


def test_pieces_of_several_ranks_may_overlap(tmp_path):
    """Also where codes are made from the numbers of all."""
    found, _ = run(_all_have_all, 2, tmp_path)
    for name, buffers in zip(NEED_NEIGHBOURS, found, strict=True):
        whole = buffers_of(expected_weight(name, new_master(shape_of(name))))
        assert all(torch.equal(buffers[key], buffer) for key, buffer in whole.items()), name


def _other_lists(rank):
    group, errors = torch.distributed.group.WORLD, []
    for mine, theirs in (
        ([("mxfp8", 64), ("mxfp8", 128)], [("mxfp8", 128), ("mxfp8", 64)]),
        ([("mxfp8", 64)], [("mxfp8", 64), ("mxfp8", 64)]),
        ([("mxfp8", 64)], [("fp8", 64)]),
    ):
        weights = [old_weight(QUANTIZERS[name](), (64, columns)) for name, columns in (theirs if rank else mine)]
        before = [buffers_of(weight) for weight in weights]
        masters = [torch.ones(64) for _ in weights]
        errors.append(error_of(lambda w=weights, m=masters: quantize_master_weights(w, m, [0] * len(m), group)))
        assert all(torch.equal(old[key], b) for w, old in zip(weights, before, strict=True) for key, b in w._buffers())
    return errors


def test_ranks_have_to_list_the_same_weights(tmp_path):
    for errors in run(_other_lists, 2, tmp_path):
        assert [kind for kind, _ in errors] == ["ValueError"] * 3
        assert all("but ranks [1] of the group differ from rank 0" in text for _, text in errors)
