"""Tensor-parallel styles for torch's `parallelize_module`: parameters of crossgrain's linear layers become DTensors.

>>> parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..convert.layers import ConvertedConv1D
from ..linear.parallel import ParallelMode, mark_sequence_parallel, set_tensor_model_parallel_attributes, share
from ..nn.layernorm_linear import LayerNormLinear
from ..nn.linear import SingleLinear
from ..planes import CutsBlocks
from ..tensor import QuantizedTensor
from ..tensor.init_values import keep_high_precision_init_val, preserved_value
from ..tensor.sharding import own_part
from .weight_shard import WeightShard


class _LinearStyle(ParallelStyle):
    """What the two styles have in common."""

    _mode: ParallelMode

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = self._checked(module, device_mesh)
        if device_mesh.size() == 1:
            return layer
        self._cut(layer, device_mesh)
        layer.register_forward_pre_hook(self._with_local_input)
        return layer

    def _checked(self, module: nn.Module, mesh: DeviceMesh) -> SingleLinear:
        name = f"{type(self).__name__} of {getattr(module, 'name', None) or type(module).__name__}"
        if not isinstance(module, SingleLinear) or isinstance(module, ConvertedConv1D):
            raise TypeError(
                f"{name}: this style is for crossgrain's Linear and LayerNormLinear; convert an nn.Linear with "
                "crossgrain.convert first"
            )
        if self._mode == "row" and isinstance(module, LayerNormLinear):
            raise TypeError(
                f"{name}: a norm needs whole rows, but a row-parallel rank has only a part of each input row; use "
                "ColwiseParallel"
            )
        if mesh.ndim != 1:
            raise ValueError(
                f"{name}: the mesh has {mesh.ndim} dimensions; pass the one-dimensional mesh of tensor parallelism"
            )
        if module.tp_size > 1:
            raise ValueError(f"{name}: the layer is already tensor parallel over {module.tp_size} ranks")
        if module.fuse_wgrad_accumulation or module.delay_wgrad_compute:
            raise NotImplementedError(
                f"{name}: fuse_wgrad_accumulation and delay_wgrad_compute are not supported with DTensor parameters, "
                "whose gradients must come from autograd"
            )
        for own, parameter in module.named_parameters():
            if isinstance(parameter, DTensor):
                raise NotImplementedError(
                    f"{name}: {own} is already a DTensor; call parallelize_module before fully_shard"
                )
            if isinstance(parameter, WeightShard):
                raise NotImplementedError(f"{name}: call gather_quantized after parallelize_module")
        ranks = mesh.size()
        for split, rows in module._splits.items():
            share(name, f"rows of {split}weight", rows, ranks if self._mode == "column" else 1)
        share(name, "in_features", module.in_features, ranks if self._mode == "row" else 1)
        for own, weight in module._quantized_weights().items():
            try:
                dim = 0 if self._mode == "column" else 1
                step = weight.shape[dim] // ranks
                for start in range(0, weight.shape[dim], step):
                    weight._sliced(dim, start, start + step)
            except CutsBlocks as error:
                raise ValueError(
                    f"{name}: {own} is kept quantized and cannot be cut for {ranks} ranks: {error}"
                ) from error
        return module

    def _cut(self, layer: SingleLinear, mesh: DeviceMesh) -> None:
        ranks = mesh.size()
        layer.parallel_mode, layer.tp_size, layer.sequence_parallel = self._mode, ranks, self.sequence_parallel
        layer.set_tensor_parallel_group(mesh.get_group())
        for name, old in list(layer.named_parameters(recurse=False)):
            placement = self._placement(name, layer)
            if isinstance(old, QuantizedTensor):
                whole = self._distributed(old, mesh, placement)
            else:
                whole = distribute_tensor(old.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
            new: Any = nn.Parameter(whole, requires_grad=old.requires_grad)
            if isinstance(placement, Shard):
                set_tensor_model_parallel_attributes(new, True, placement.dim, 1)
            layer.register_parameter(name, new)
            if not isinstance(placement, Shard):
                mark_sequence_parallel(layer, name, marked=self.sequence_parallel)
        if self._mode == "column":
            layer._splits = {name: rows // ranks for name, rows in layer._splits.items()}
            layer.out_features //= ranks
        else:
            layer.in_features //= ranks

    def _distributed(self, weight: QuantizedTensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
        """Cut this rank's planes from those of the whole weight; the scales stay the same."""
        value = None if weight.is_meta else preserved_value(weight)
        if self.src_data_rank is not None and not weight.is_meta:
            source: Any = {"group": mesh.get_group(), "group_src": self.src_data_rank}
            dist.broadcast(weight.detach(), **source)
            if value is not None:
                dist.broadcast(value := value.to(weight.device, copy=True), **source)
        part = own_part(weight, mesh, [placement]).clone()
        if value is not None:
            keep_high_precision_init_val(part, own_part(value, mesh, [placement]))
        return DTensor.from_local(part, mesh, [placement], run_check=False, shape=weight.shape, stride=weight.stride())

    def _placement(self, name: str, layer: SingleLinear) -> Placement:
        if name in layer.weight_names:
            return Shard(0 if self._mode == "column" else 1)
        return Shard(0) if name in layer.bias_names and self._mode == "column" else Replicate()

    def _with_local_input(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        if not isinstance(x, DTensor):
            return inputs
        row = self._mode == "row"
        wanted = Shard(x.dim() - 1) if row else Shard(0) if self.sequence_parallel else Replicate()
        return (x.redistribute(placements=[wanted]).to_local(), *rest)


class ColwiseParallel(_LinearStyle):
    """Column parallel: each rank computes some of the output features.

    Each rank's input is the whole input, or some rows of it with ``sequence_parallel``. Its output are its features.

    Args:
        sequence_parallel: each rank has only its part of the rows of the input, which the layer gathers.

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))

        >>> model = torch.nn.Sequential(cg.Linear(32, 128), torch.nn.GELU(), cg.Linear(128, 32))
        >>> plan = {"0": cg.distributed.ColwiseParallel(), "2": cg.distributed.RowwiseParallel()}
        >>> _ = parallelize_module(model, mesh, plan)
        >>> model[0].out_features  # of this rank; with two ranks 64
        128
        >>> torch.distributed.destroy_process_group()
    """

    _mode = "column"


class RowwiseParallel(_LinearStyle):
    """Row parallel: each rank has some of the input features, that is a part of the last dimension of the input.

    Each rank's output is the whole output, or some rows of it with ``sequence_parallel``.

    Args:
        sequence_parallel: each rank gets only its part of the rows of the output.

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1,))

        >>> layer = parallelize_module(cg.Linear(128, 32), mesh, cg.distributed.RowwiseParallel())
        >>> layer.in_features  # of this rank; with two ranks 64
        128
        >>> torch.distributed.destroy_process_group()
    """

    _mode = "row"
