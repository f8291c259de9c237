"""What ranks do with Megatron. Imported before Megatron is, by processes that never have it: functions import it."""

import math

import torch
import torch.distributed as dist

import crossgrain as cg

from .ranks import error_of

STEPS = 5
NEVER_CLIPPED = 1e9


def losses(rank, options):
    """Of every step."""
    import small_gpt

    return [loss for loss, _ in small_gpt.train(small_gpt.Options(**options), STEPS)]


def error_of_training(rank, options):
    """The type and text of the error; None if there is none."""
    return error_of(lambda: losses(rank, options))


def losses_and_norms(rank, options):
    """Of every step. Norms are exact: however gradients are cut among ranks, the same ones give the same bits.

    Megatron's own norm, of pieces in float32, is not; gradients that it scales by that norm would differ.
    """
    import small_gpt

    given = small_gpt.Options(**options, clip_grad=NEVER_CLIPPED)
    model, optimizer = small_gpt.build(given)
    norms, step = [], optimizer.step_with_ready_grads

    def step_with_ready_grads():
        norms.append(exact_norm(optimizer))
        return step()

    optimizer.step_with_ready_grads = step_with_ready_grads
    found = list(small_gpt.run(model, optimizer, given, STEPS))
    assert all(math.isclose(norm, exact, rel_tol=1e-5) for (_, norm), exact in zip(found, norms, strict=True))
    return [(loss, exact) for (loss, _), exact in zip(found, norms, strict=True)]


def where_pieces_begin(rank, options):
    """Of weights kept quantized: the place within the weight and the length of its rows, for those of this rank."""
    import small_gpt

    _, optimizer = small_gpt.build(small_gpt.Options(**options))
    found = []
    for each in optimizer.chained_optimizers:
        weights, _, starts = each._get_fp8_params_and_shard_fp32_from_fp8()
        found += [(start, weight.shape[1]) for weight, start in zip(weights, starts, strict=True) if start is not None]
    return found


def exact_norm(optimizer):
    """Squares of float32 numbers are exact in float64, and so is their sum by fsum, rounded once."""
    own = [grad.flatten() for each in optimizer.chained_optimizers for grad in each.get_main_grads_for_grad_norm()]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, torch.cat(own).double().square().tolist() if own else [])
    return math.sqrt(math.fsum(square for squares in everyone for square in squares))


def columns_of_their_own_factory(role):
    """Weights have MXFP8 columns of their original numbers, which do not follow from the rows."""
    row, column = (cg.MXFP8Quantizer(cg.DType.kFloat8E4M3) for _ in range(2))
    is_weight = role is not None and role.tensor_type == "weight"
    return cg.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column) if is_weight else row
