"""Count how many bytes FSDP2 gathers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather


class GatheredBytes(DefaultAllGather):
    """The result of `count_gathered_bytes`.

    Attributes:
        sizes: for each gather, the number of bytes that arrived.
        total: their sum.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.sizes.append(output_tensor.numel() * output_tensor.element_size())
        return super().__call__(output_tensor, input_tensor, group, async_op)


def count_gathered_bytes(model: nn.Module) -> GatheredBytes:
    """Count the bytes that the sharded modules of ``model`` gather from now on, including unquantized parameters.

    Args:
        model: a model with modules that ``fully_shard`` has sharded.

    Returns:
        An object whose ``sizes`` and ``total`` grow with every gather.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())

        >>> model = fully_shard(torch.nn.Linear(32, 32, bias=False))
        >>> count = cg.distributed.count_gathered_bytes(model)
        >>> _ = model(torch.randn(4, 32))
        >>> count.total  # nothing, because one rank has all; with two ranks 4096
        0
        >>> torch.distributed.destroy_process_group()
    """
    count = GatheredBytes()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(count)
    return count
