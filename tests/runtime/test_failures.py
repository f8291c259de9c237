"""A rank that raises before it communicates: the others say why they waited in vain."""

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import ops
from crossgrain.distributed import TokenExchange, gather_quantized
from crossgrain.runtime.failures import OtherRankFailed, communicate, telling_others
from crossgrain.tensor.sharding import local_part, write_shard

from ..common.ranks import converted_model, error_of, mesh_of, quantized_model, run, shard


class Failing(cg.Float8CurrentScalingQuantizer):
    """Fails on the second rank before amaxes are reduced."""

    def _given(self):
        if dist.get_rank() == 1:
            raise ValueError("no such number")
        return super()._given()


def failing(role):
    return Failing(cg.DType.kFloat8E4M3)


def _shared_layer():
    layer = cg.Linear(64, 64, parallel_mode="column", tp_group=dist.group.WORLD, name="up")
    layer.bound_recipe = cg.recipe.as_recipe("fp8")
    return layer


def in_forward():
    """An input of another shape."""
    _shared_layer()(torch.randn(32, 64 if dist.get_rank() == 0 else 48))


def in_a_quantizer():
    layer = _shared_layer()
    layer.bound_recipe = cg.recipe.CustomRecipe(qfactory=failing)
    layer(torch.randn(32, 64))


def in_backward():
    layer = _shared_layer()
    y = layer(torch.randn(32, 64))
    if dist.get_rank() == 1:
        layer._built.details[0].grad_output._given = None  # no quantizer any more
    y.sum().backward()


def in_an_operation():
    operation = ops.Linear(64, 64, tensor_parallel_mode="column", name="up")
    with cg.autocast(recipe="fp8"):
        operation(torch.randn(32, 64 if dist.get_rank() == 0 else 48))


def in_an_update():
    model = shard(quantized_model("fp8"), mesh_of(2))
    own = local_part(model[0].weight)
    write_shard(model[0].weight, torch.zeros(own.shape if dist.get_rank() == 0 else (1, 1)))


def in_a_gather():
    model = converted_model("fp8")
    gather_quantized(model)
    shard(model, mesh_of(2))
    object.__setattr__(model[0].weight._local_tensor.gather_layout, "quantizer", failing(None))
    model(torch.randn(32, 64))


def in_an_exchange():
    TokenExchange([1, 2]).dispatch(torch.ones(3 + dist.get_rank(), 32))


CASES = {
    in_an_exchange: "dispatched tokens: ValueError: expected a matrix of 3 rows to be dispatched, "
    "got a tensor of shape [4, 32]",
    in_forward: "up: ValueError: up: the last dimension of the input [32, 48] must be 64",
    in_an_operation: "up: ValueError: up: the last dimension of the input [32, 48] must be 64",
    in_a_quantizer: "up: ValueError: no such number",
    in_backward: "up, backward: TypeError",
    in_an_update: "a shard of a Float8Tensor of shape [128, 64]: ValueError: Float8CurrentScalingQuantizer: cannot",
    in_a_gather: "0: ValueError: no such number",
}


def _of_rank(rank, work):
    return error_of(work)  # and then it leaves


@pytest.mark.parametrize("work", CASES)
def test_those_who_wait_say_why(tmp_path, work):
    waiting, failed = run(_of_rank, 2, tmp_path, work)
    assert waiting[0] == "OtherRankFailed"
    assert waiting[1].startswith(f"rank 1: {CASES[work]}")
    assert failed[0] != "OtherRankFailed"


def _goes_on(rank):
    """A reason that was told, and caught, does not count for what happens later."""
    error_of(lambda: _raise() if rank == 1 else None)
    numbers = torch.full((1,), float(rank))
    dist.barrier()
    communicate(dist.all_reduce, numbers, group=dist.group.WORLD)
    refused = None
    if rank == 0:
        refused = error_of(lambda: communicate(_broken, numbers, group=dist.group.WORLD))
    dist.barrier()
    return numbers.item(), refused


def _raise():
    with telling_others("here"):
        raise ValueError("caught")


def _broken(*_, **__):
    raise RuntimeError("connection closed")


def test_what_was_caught_is_forgotten(tmp_path):
    assert run(_goes_on, 2, tmp_path) == [(1.0, ("RuntimeError", "connection closed")), (1.0, None)]


def _along_a_chain(rank):
    """Ranks 0 and 1, 1 and 2 wait for each other: the reason goes on."""
    groups = [dist.new_group(members) for members in ([0, 1], [1, 2])]
    if rank == 2:
        return error_of(_raise)
    with pytest.raises(OtherRankFailed) as caught, telling_others("waiting"):
        communicate(dist.all_reduce, torch.zeros(1), group=groups[rank])
    return str(caught.value)


def test_reasons_are_passed_on(tmp_path):
    found = run(_along_a_chain, 3, tmp_path)
    assert found == ["rank 2: here: ValueError: caught"] * 2 + [("ValueError", "caught")]
