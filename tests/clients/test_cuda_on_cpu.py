"""CUDA calls answered by the CPU: right numbers, also of collectives. In processes of their own: torch is changed."""

import sys

import torch
import torch.distributed as dist

from ..common import ranks
from .conftest import EXAMPLE


def installed():
    sys.path.insert(0, str(EXAMPLE))
    import cuda_on_cpu

    cuda_on_cpu.install()
    return cuda_on_cpu


def test_a_gpu_is_the_cpu_wherever_one_is_named(tmp_path):
    [found] = ranks.run(name_devices, 1, tmp_path)
    assert found == {"cpu"}


def name_devices(rank):
    installed()
    made = [
        torch.zeros(2, device="cuda"),
        torch.zeros(2, device="cpu", pin_memory=True),
        torch.tensor([1.0], device=torch.cuda.current_device()),
        torch.empty_like(torch.ones(2), device=torch.device("cuda", 0)),
        torch.ones(2).cuda(),
        torch.ones(2).to("cuda:0"),
        torch.ones(2).to(torch.cuda.current_device(), torch.bfloat16),
        torch.ones(2).new_zeros(3, device="cuda"),
        torch.nn.Linear(2, 2).to("cuda").cuda().weight,
    ]
    return {tensor.device.type for tensor in made}


def test_types_are_those_of_a_gpu(tmp_path):
    [found] = ranks.run(name_types, 1, tmp_path)
    assert found == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", torch.float16, torch.float32]


def name_types(rank):
    installed()
    x = torch.ones(2)
    half, single = x.type(torch.half), x.type("torch.cuda.FloatTensor")
    return [x.type(), x.bfloat16().type(), half.dtype, single.dtype]


def test_the_generator_of_the_gpu_is_that_of_the_cpu(tmp_path):
    [(first, again)] = ranks.run(draw, 1, tmp_path)
    assert torch.equal(first, again)


def draw(rank):
    installed()
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)
    return first, torch.rand(4, device="cuda")


def test_collectives_that_were_put_together_are_each_right(tmp_path):
    """Of several dtypes and kinds, at once and later."""
    for found in ranks.run(communicate, 2, tmp_path):
        for later in (False, True):
            gathered, bytes_gathered, scattered, summed = found[later]
            assert gathered.tolist() == [0.5, 0.5, 0.5, 1.5, 1.5, 1.5]
            assert bytes_gathered.tolist() == [7] * 5 + [8] * 5
            assert scattered.tolist() == [3.0] * 2
            assert summed.tolist() == [3.0] * 4


def communicate(rank):
    cuda_on_cpu = installed()
    assert dist._coalescing_manager is cuda_on_cpu.one_by_one
    found = {}
    for later in (False, True):
        numbers, codes = torch.zeros(6), torch.zeros(10, dtype=torch.uint8)
        grads, all_grads = torch.full((4,), rank + 1.0), torch.full((4,), rank + 1.0, dtype=torch.bfloat16)
        shard = grads[2 * rank : 2 * rank + 2]
        with dist._coalescing_manager(None, async_ops=later) as works:
            dist.all_gather_into_tensor(numbers, torch.full((3,), rank + 0.5), async_op=later)
            dist.all_gather_into_tensor(codes, torch.full((5,), 7 + rank, dtype=torch.uint8), async_op=later)
            dist.reduce_scatter_tensor(shard, grads, async_op=later)
            dist.all_reduce(all_grads, async_op=later)
        if later:
            works.wait()
        found[later] = numbers, codes, shard.clone(), all_grads
    return found


def test_it_has_to_come_before_megatron(tmp_path):
    [(kind, text)] = ranks.run(too_late, 1, tmp_path)
    assert kind == "RuntimeError" and "before the first import of megatron.core" in text


def too_late(rank):
    sys.modules["megatron.core"] = sys
    return ranks.error_of(installed)
