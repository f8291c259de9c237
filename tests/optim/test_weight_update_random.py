"""Weights of tensor-parallel layers that are rounded stochastically: parts have the bytes of the whole weight."""

import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import ROWWISE
from crossgrain.optim.weight_update import quantize_master_weights

from ..common.planes import normal
from ..common.ranks import error_of, run

ROWS, COLUMNS = 64, 96
MAKERS = {
    "nvfp4_2d": lambda: cg.NVFP4Quantizer(with_2d_quantization=True, stochastic_rounding=True),
    "mxfp4": lambda: cg.FormatQuantizer("mxfp4", stochastic_rounding=True),
    "hybrid": lambda: cg.HybridQuantizer(
        rowwise_quantizer=cg.NVFP4Quantizer(stochastic_rounding=True),
        columnwise_quantizer=cg.FormatQuantizer("mxfp4", stochastic_rounding=True),
    ),
}


def codes(weight):
    """The codes of each plane, M-major. Columns that follow from rows are not there between an update and a gather."""
    planes = {plane.direction: plane.operand_codes().clone() for plane in weight.planes()}
    return {direction: own if direction is ROWWISE else own.t() for direction, own in planes.items()}


def share(x, axis, rank):
    return x.chunk(2, axis)[rank].contiguous()


def _written(rank):
    """Four ranks: two tensor-parallel parts of a weight, the master of each cut into two pieces."""
    tensor_groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    piece_groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    piece, part = divmod(rank, 2)
    found = {}
    for name, make in MAKERS.items():
        for axis in (0, 1):
            torch.manual_seed(100 + rank)
            mine = share(normal(ROWS, COLUMNS if axis == 0 else 128, seed=3), axis, part)
            quantizer = make().reducing(tensor_groups[piece], axis=axis)
            weight = make().quantize(torch.zeros_like(mine))
            weight._quantizer = quantizer
            weight.quantize_(mine)
            directly = codes(weight)
            half = mine.numel() // 2
            quantize_master_weights(
                [weight], [mine.flatten()[piece * half : (piece + 1) * half]], [piece * half], piece_groups[part]
            )
            found[name, axis] = directly, codes(weight)
    return found


def test_parts_and_pieces_have_the_bytes_of_the_whole_weight(tmp_path):
    found = run(_written, 4, tmp_path)
    for name, make in MAKERS.items():
        for axis in (0, 1):
            whole = normal(ROWS, COLUMNS if axis == 0 else 128, seed=3)
            torch.manual_seed(100)  # as the first of all ranks
            weight = make().quantize(torch.zeros_like(whole))
            weight.quantize_(whole)
            directly = codes(weight)
            weight.quantize_(whole)
            updated = codes(weight)
            for rank, of_rank in enumerate(found):
                piece, part = divmod(rank, 2)
                if piece == 0:  # the other tensor-parallel group has a first rank of its own
                    for direction, mine in of_rank[name, axis][0].items():
                        assert torch.equal(mine, share(directly[direction], axis, part)), (name, axis, direction)
                for direction, mine in of_rank[name, axis][1].items():
                    expected = share(updated[direction], axis, part).chunk(2)[piece]
                    assert torch.equal(mine.chunk(2)[piece], expected), (name, axis, direction, rank)


def test_pieces_that_ranks_divide_separately_must_not_be_cut(tmp_path):
    def refused(rank):
        quantizer = MAKERS["mxfp4"]().reducing(dist.group.WORLD, axis=0, segments=(32, 32))
        weight = MAKERS["mxfp4"]().quantize(torch.zeros(ROWS, COLUMNS))
        weight._quantizer = quantizer
        return error_of(lambda: quantize_master_weights([weight], [torch.ones(32)], [0]))

    for kind, text in run(refused, 2, tmp_path):
        assert kind == "NotImplementedError" and "2 pieces that tensor-parallel ranks divide separately" in text
