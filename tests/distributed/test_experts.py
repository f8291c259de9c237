"""Tokens that are sent to the ranks of their experts: as they are, or as rowwise planes."""

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import ROWWISE
from crossgrain.distributed import TokenExchange, all_to_all_rows, count_exchanged_bytes
from crossgrain.planes.rows import bytes_of_rows

from ..common.planes import normal
from ..common.quantizers import QUANTIZERS, hybrid_of
from ..common.ranks import error_of, run

RANKS, WIDTH = 3, 256
# Of each rank, the rows for each of six experts: nobody has any for the third, and the second rank has none at all.
COUNTS = [[5, 1, 0, 7, 0, 2], [0] * 6, [3, 0, 0, 40, 1, 0]]
SENT = {
    **{name: QUANTIZERS[name] for name in ("fp8", "fp8_e5m2", "fp8_block", "fp8_block_fp32_scales", "mxfp8", "mxfp4")},
    **{name: QUANTIZERS[name] for name in ("mxfp6_e2m3", "nvfp4", "nvfp4_rht", "nvfp4_max256", "nvfp4_row_scaled")},
    "mxfp8|nvfp4": lambda: hybrid_of("mxfp8", "nvfp4_rht_sr"),
    "nvfp4|mxfp8": lambda: hybrid_of("nvfp4", "mxfp8", "rowwise_dequantized"),
}


def tokens(rank):
    """With other magnitudes on each rank, so that scales of the whole are not those of a part."""
    return normal(sum(COUNTS[rank]), WIDTH, seed=rank) * 10.0**rank


def sources(rank):
    """Where the rows for the experts of ``rank`` come from: places among the rows of all ranks, by expert."""
    places, start = {}, 0
    for counts in COUNTS:
        for expert, count in enumerate(counts):
            places.setdefault(expert, []).extend(range(start, start + count))
            start += count
    return [place for expert in (2 * rank, 2 * rank + 1) for place in places[expert]]


def _sent(rank):
    rows = tokens(rank).requires_grad_()
    exchange = TokenExchange(COUNTS[rank])
    plain = exchange.dispatch(rows)
    weights = normal(len(plain), WIDTH, seed=10 + rank)
    (plain * weights).sum().backward()
    found = {"sizes": exchange.sizes, "plain": plain.detach().numpy(), "gradient": rows.grad.numpy()}
    found["back"] = exchange.combine(plain.detach()).numpy()
    for name, make in SENT.items():
        rows.grad = None
        with count_exchanged_bytes() as count:
            arrived = exchange.dispatch(rows, make())
            (arrived.dequantize() * weights).sum().backward()
        assert arrived.get_usages()["rowwise"] and torch.equal(rows.grad, torch.from_numpy(found["gradient"]))
        plane = arrived.plane(ROWWISE)
        common = plane.scale_across((0,))
        found[name] = (bytes_of_rows(plane).numpy(), None if common is None else common.item(), count.sizes)
    return found


def test_what_arrives_is_what_quantizing_it_there_would_give(tmp_path):
    """The oracle is one process that has the tokens of all ranks, quantizes them together and takes some rows."""
    everything = torch.cat([tokens(rank) for rank in range(RANKS)])
    wholes = {name: make().storing(rowwise=True, columnwise=False)(everything) for name, make in SENT.items()}
    ranks = run(_sent, RANKS, tmp_path)
    weights = torch.cat([normal(sum(found["sizes"]), WIDTH, seed=10 + rank) for rank, found in enumerate(ranks)])
    by_expert = torch.tensor([place for rank in range(RANKS) for place in sources(rank)])
    gradient = torch.empty_like(everything).index_copy_(0, by_expert, weights)
    assert torch.equal(torch.cat([torch.from_numpy(found["gradient"]) for found in ranks]), gradient)
    for rank, found in enumerate(ranks):
        places = sources(rank)
        assert found["sizes"] == [sum(counts[2 * rank + e] for counts in COUNTS) for e in (0, 1)]
        assert torch.equal(torch.from_numpy(found["plain"]), everything[places])
        assert torch.equal(torch.from_numpy(found["back"]), tokens(rank))
        for name, whole in wholes.items():
            plane = whole.plane(ROWWISE)
            common = plane.scale_across((0,))
            arrived, scale, sizes = found[name]
            assert torch.equal(torch.from_numpy(arrived), bytes_of_rows(plane)[places]), name
            assert scale == (None if common is None else common.item()), name
            assert sizes == [arrived.size, found["gradient"].nbytes], name


@pytest.mark.parametrize(
    "name, bytes_per_row",
    [("fp8", 256), ("fp8_block", 256 + 2 * 4), ("mxfp8", 256 + 8), ("nvfp4", 128 + 16), ("nvfp4_row_scaled", 148)],
)
def test_bytes_of_a_row(name, bytes_per_row):
    rows = normal(5, WIDTH)
    with count_exchanged_bytes() as count:
        TokenExchange([3, 2]).dispatch(rows, SENT[name]())
        TokenExchange([3, 2]).dispatch(rows)
    assert count.sizes == [5 * bytes_per_row, rows.nbytes] and count.total == sum(count.sizes)


def test_one_process_is_a_group_of_one():
    rows = normal(5, WIDTH)
    exchange = TokenExchange(torch.tensor([3, 0, 2]))
    assert exchange.sizes == [3, 0, 2]
    assert torch.equal(exchange.dispatch(rows), rows) and torch.equal(exchange.combine(rows), rows)
    assert torch.equal(all_to_all_rows(rows, [5], [5]), rows)
    quantizer = cg.NVFP4Quantizer()
    assert torch.equal(
        exchange.dispatch(rows, quantizer).dequantize(), cg.quantize(rows, "nvfp4", columnwise=False).dequantize()
    )
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": True}, "the caller's quantizer is as it was"


# ---- errors --------------------------------------------------------------------------------------------


class Custom(cg.MXFP8Quantizer):
    custom = True


@pytest.mark.parametrize(
    "make, reason",
    [
        (QUANTIZERS["mxfp8_2d"], "block spans 32 rows, which may belong to different experts"),
        (QUANTIZERS["nvfp4_rht_sr"], "stochastic rounding depends on the position of a row among all tokens"),
        (QUANTIZERS["fp8_delayed"], "scale is set from outside, as by delayed scaling, so it may differ between ranks"),
        (lambda: hybrid_of("fp8_delayed", "mxfp8"), "scale is set from outside"),
        (lambda: hybrid_of("mxfp4_sr", "mxfp8"), "stochastic rounding"),
        (
            lambda: cg.Float8CurrentScalingQuantizer(cg.DType.kFloat8E4M3, use_existing_amax=True),
            "scale is set from outside",
        ),
        (
            lambda: Custom(cg.DType.kFloat8E4M3),
            "the bytes that a custom quantizer makes may depend on the position of a row",
        ),
    ],
)
def test_what_cannot_be_sent_row_by_row_is_refused(make, reason):
    with pytest.raises(ValueError, match=f"tokens cannot be sent as rowwise planes of .*{reason}"):
        TokenExchange([32]).dispatch(normal(32, WIDTH), make())


def test_wrong_rows():
    exchange = TokenExchange([3, 2])
    with pytest.raises(
        ValueError, match=r"expected a matrix of 5 rows to be dispatched, got a tensor of shape \[4, 256\]"
    ):
        exchange.dispatch(normal(4, WIDTH))
    with pytest.raises(
        ValueError, match=r"expected a matrix of 5 rows to be combined, got a tensor of shape \[5, 2, 8\]"
    ):
        exchange.combine(normal(5, 2, 8))
    with pytest.raises(TypeError, match="must be a plain tensor, got a MXFP8Tensor"):
        exchange.dispatch(cg.quantize(normal(5, WIDTH), "mxfp8", columnwise=False))
    with pytest.raises(ValueError, match=r"rows for each expert, must be >= 0, got \[3, -1\]"):
        TokenExchange([3, -1])


def _refused(rank):
    half = dist.new_group([0, 1])
    elsewhere = cg.NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=half)
    return [
        error_of(lambda: TokenExchange([1, 2, 3])),
        error_of(lambda: TokenExchange([1, 1]).dispatch(normal(2, WIDTH), elsewhere)),
    ]


def test_experts_and_groups_that_do_not_fit_are_refused_on_all_ranks(tmp_path):
    for uneven, elsewhere in run(_refused, 2, tmp_path):
        assert uneven == (
            "ValueError",
            "counts has shape [3], but it must have one number for each expert, and the number of experts must be a "
            "multiple of the 2 ranks",
        )
        assert elsewhere[0] == "ValueError" and "reduced over other ranks" in elsewhere[1]
