"""Gathered planes are those of quantizing the gathered tensor, bit for bit, whether they travelled or not."""

import warnings
from functools import partial

import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE
from crossgrain.distributed import allreduce, gather_along_first_dim, reduce_scatter_along_first_dim
from crossgrain.linear.gather_activations import why_not_gathered
from crossgrain.runtime.collectives import gathered_rows, scattered_sum

from ..common.quantizers import E4M3, PAIRS, QUANTIZERS, buffers_of, hybrid_of
from ..common.ranks import GATHER, error_of, run

MAKERS = {
    **QUANTIZERS,
    **{f"{row}, {column}": partial(hybrid_of, row, column) for row, column in PAIRS},
    "derived": partial(hybrid_of, "nvfp4", "mxfp8", "rowwise_dequantized"),
    "nvfp4_2d_sr": lambda: cg.NVFP4Quantizer(with_2d_quantization=True, stochastic_rounding=True),
    "nvfp4_sr, nvfp4_rht_sr": lambda: cg.HybridQuantizer(
        rowwise_quantizer=cg.NVFP4Quantizer(stochastic_rounding=True), columnwise_quantizer=QUANTIZERS["nvfp4_rht_sr"]()
    ),
    "derived_sr": partial(hybrid_of, "mxfp4_sr", "mxfp8", "rowwise_dequantized"),
}
USAGES = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
COLUMNS = 128


def whole(rows):
    generator = torch.Generator().manual_seed(rows)
    # Rows of very different size: an amax that is not reduced shows.
    numbers = torch.randn(rows, COLUMNS, generator=generator) * torch.logspace(-2, 2, rows).view(-1, 1)
    return numbers.to(torch.bfloat16)


def cases(ranks, names=tuple(MAKERS)):
    """Rows of a rank with whole blocks of all formats, and rows that end within a block of most."""
    for name in names:
        for usages in USAGES:
            for rows in (256 // ranks, 24):
                if possible(name, USAGES[usages], rows * ranks):
                    yield name, usages, rows


def made(name, usages):
    quantizer = MAKERS[name]()
    quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
    return quantizer


def possible(name, usages, rows):
    try:
        made(name, usages).quantize(torch.zeros(rows, COLUMNS, dtype=torch.bfloat16))
    except ValueError:
        return False
    return True


def quantized(name, usages, x):
    torch.manual_seed(0)
    return buffers_of(made(name, usages).quantize(x))


def on_ranks(rank, ranks, names):
    found, sent = {}, []
    gather = getattr(dist, GATHER)

    def counting(out, x, **options):
        sent.append((x.dtype, x.numel() * x.element_size()))
        return gather(out, x, **options)

    setattr(dist, GATHER, counting)
    for name, usages, rows in cases(ranks, names):
        torch.manual_seed(rank)  # the seed of the first rank counts
        sent.clear()
        quantizer = made(name, USAGES[usages])
        x = whole(rows * ranks).chunk(ranks)[rank]
        result, handle = gather_along_first_dim(x, dist.group.WORLD, quantizer=quantizer)
        assert handle is None and result.shape == (rows * ranks, COLUMNS)
        found[name, usages, rows] = buffers_of(result), list(sent)
    return found


def check(ranks, names, tmp_path):
    wanted = {
        (name, usages, rows): quantized(name, USAGES[usages], whole(rows * ranks))
        for name, usages, rows in cases(ranks, names)
    }
    for found in run(on_ranks, ranks, tmp_path, ranks, names):
        assert found.keys() == wanted.keys()
        for (name, usages, rows), (buffers, sent) in found.items():
            what = (name, usages, rows)
            expected = wanted[what]
            assert buffers.keys() == expected.keys(), what
            for field, buffer in buffers.items():
                assert torch.equal(buffer.view(torch.uint8), expected[field].view(torch.uint8)), (what, field)
            assert len(sent) == 1, what
            check_bytes(what, *sent[0], rows)


def check_bytes(what, dtype, size, rows):
    name, usages, _ = what
    quantizer = made(name, USAGES[usages])
    cut = any(why_not_gathered(quantizer, d, rows) for d in quantizer._directions_to_make())
    assert (dtype == torch.bfloat16) == cut, what
    if cut:
        assert size == rows * COLUMNS * 2, what
    elif name in ("fp8", "fp8_delayed", "fp8_e5m2"):
        assert size == rows * COLUMNS + 8, what  # columns are rows transposed; 4 bytes of scale, aligned
    elif name == "nvfp4" and usages == "rows":
        assert size == rows * COLUMNS // 2 + rows * COLUMNS // 16 + 8, what
    elif name == "mxfp8":
        assert size == rows * (COLUMNS + COLUMNS // 32) * (2 if usages == "both" else 1), what


def test_two_ranks(tmp_path):
    check(2, tuple(MAKERS), tmp_path)


def test_four_ranks(tmp_path):
    check(4, ("fp8", "mxfp8", "nvfp4", "mxfp8, nvfp4_rht", "derived"), tmp_path)


def test_what_travels():
    q = hybrid_of("mxfp8", "nvfp4_rht_sr")
    assert why_not_gathered(q, ROWWISE, 1) is None
    assert why_not_gathered(q, COLUMNWISE, 16) is None
    assert "24 rows per rank are not a multiple of the 32 rows" in why_not_gathered(MAKERS["mxfp8"](), COLUMNWISE, 24)
    assert why_not_gathered(MAKERS["derived"](), COLUMNWISE, 32) is None
    assert why_not_gathered(MAKERS["derived_sr"](), COLUMNWISE, 32) is None


def keeps_no_group(rank):
    found = []
    for name in ("nvfp4", "mxfp8, nvfp4_rht"):
        quantizer = made(name, (True, True)).reducing(dist.group.WORLD, axis=0)
        result, _ = gather_along_first_dim(whole(32), dist.group.WORLD, quantizer=quantizer)
        found.append((quantizer.with_amax_reduction, result._quantizer.with_amax_reduction))
    return found


def test_what_was_gathered_keeps_no_group(tmp_path):
    assert run(keeps_no_group, 2, tmp_path) == [[(True, False)] * 2] * 2


def scales_differ(rank):
    q = cg.Float8Quantizer(torch.tensor([1.0 + rank]), torch.zeros(1), E4M3)
    return error_of(lambda: gather_along_first_dim(torch.randn(4, 8), dist.group.WORLD, quantizer=q))


def test_codes_of_different_scales_are_refused_by_all(tmp_path):
    """Delayed scaling whose histories are not reduced over these ranks."""
    for kind, text in run(scales_differ, 2, tmp_path):
        assert kind == "RuntimeError" and "different rowwise fp8 scales for the whole" in text


def _with_handles(rank):
    world, found = dist.group.WORLD, []
    out = torch.zeros(2, 2)
    for result, handle in (
        gather_along_first_dim(torch.full((1, 2), rank + 1.0), world, async_op=True, output_tensor=out),
        reduce_scatter_along_first_dim(torch.ones(2, 2), world, async_op=True),
        allreduce(torch.ones(1), world, async_op=True),
    ):
        assert handle.wait() and handle.is_completed()
        found.append(result.tolist())
    assert found[0] == out.tolist()
    return found


def test_handles_have_nothing_to_wait_for(tmp_path):
    assert run(_with_handles, 2, tmp_path) == [[[[1.0, 1.0], [2.0, 2.0]], [[2.0, 2.0]], [2.0]]] * 2


def _collectives_under_their_new_names(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        rows = gathered_rows(torch.full((1, 2), float(rank)), dist.group.WORLD)
        share = scattered_sum(rows, dist.group.WORLD, "a layer")
    return rows.tolist(), share.tolist()


def test_torch_has_nothing_to_say_about_old_names(tmp_path):
    rows = [[0.0, 0.0], [1.0, 1.0]]
    assert run(_collectives_under_their_new_names, 2, tmp_path) == [(rows, [[0.0, 0.0]]), (rows, [[2.0, 2.0]])]
