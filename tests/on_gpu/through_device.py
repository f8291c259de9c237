"""`ThroughDevice`: a backend for tensors of the CPU that computes on another device.

The cases of kernels and what compares them (`tests/gpu/kernels`) work with tensors of the CPU. Here each call copies
the memory of its tensors to a device, all of it, with what lies around each tensor; runs there; and copies it back. So
a byte that a kernel of the device writes beside a buffer is found as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crossgrain.kernels import Backend, GlobalScale, GroupedTarget, Target
from crossgrain.planes import Plane


class _Copies:
    """Copies of memory on a device. Tensors that share memory share it there.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[int, tuple[Tensor, Tensor]] = {}
        self._written: set[int] = set()

    def of(self, tensor: Tensor, *, written: bool = False) -> Tensor:
        """The tensor on the device, with the strides and the place in memory that it has here."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        key = storage.data_ptr()
        if key not in self._storages:
            here = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._storages[key] = here, here.to(self._device, copy=True)
        if written:
            self._written.add(key)
        there = torch.empty(0, dtype=tensor.dtype, device=self._device)
        memory = self._storages[key][1].untyped_storage()
        there.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch._neg_view(there) if tensor.is_neg() else there

    def maybe(self, tensor: Tensor | None, *, written: bool = False) -> Any:
        """The same for a tensor that may be missing."""
        return None if tensor is None else self.of(tensor, written=written)

    def plane(self, plane: Any, *, written: bool = False) -> Any:
        """A plane, or planes of groups, on the device."""
        buffers = {name: self.maybe(getattr(plane, name), written=written) for name in ("data", "scale", "amax")}
        return replace(plane, **buffers)

    def target(self, target: Target) -> Target:
        """A target on the device. Its plane will be written."""
        plane = self.plane(target.plane, written=True)
        return replace(target, plane=plane, amax=self.maybe(target.amax), scale=self.maybe(target.scale))

    def grouped(self, target: GroupedTarget) -> GroupedTarget:
        """The same for groups."""
        planes = self.plane(target.planes, written=True)
        return replace(target, planes=planes, amax=self.maybe(target.amax), scale=self.maybe(target.scale))

    def scale(self, scale: GlobalScale | None) -> GlobalScale | None:
        """A global scale on the device."""
        return None if scale is None else scale._replace(values=self.of(scale.values))

    def back(self) -> None:
        """Copy what may have been written. Memory that was only to be read must be as it was."""
        for key, (here, there) in self._storages.items():
            if key in self._written:
                here.copy_(there)
            else:
                assert torch.equal(here, there.cpu()), "a kernel has written to memory that it should only read"


class ThroughDevice:
    """A backend for tensors of the CPU.

    Args:
        backend: the backend that runs.
        device: the device on which it runs.
    """

    def __init__(self, backend: Backend, device: torch.device) -> None:
        self.name = f"{backend.name} on {device}"
        self._backend = backend
        self._device = device

    def measure(self, x: Tensor, targets: Sequence[Target]) -> list[Tensor | None]:
        copies = _Copies(self._device)
        found = self._backend.measure(copies.of(x), [copies.target(target) for target in targets])
        copies.back()
        return [None if amax is None else amax.cpu() for amax in found]

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> bool | None:
        copies = _Copies(self._device)
        found = self._backend.encode(copies.of(x), [copies.target(target) for target in targets], seed)
        copies.back()
        return found

    def measure_groups(self, x: Tensor, targets: Sequence[GroupedTarget]) -> list[Tensor | None]:
        copies = _Copies(self._device)
        found = self._backend.measure_groups(copies.of(x), [copies.grouped(target) for target in targets])
        copies.back()
        return [None if amax is None else amax.cpu() for amax in found]

    def encode_groups(self, x: Tensor, targets: Sequence[GroupedTarget], seeds: Sequence[int] | None) -> bool | None:
        copies = _Copies(self._device)
        found = self._backend.encode_groups(copies.of(x), [copies.grouped(target) for target in targets], seeds)
        copies.back()
        return found

    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        copies = _Copies(self._device)
        found = self._backend.decode(copies.plane(plane), dtype).cpu()
        copies.back()
        return found

    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor:
        copies = _Copies(self._device)
        found = self._backend.decode_operand(copies.plane(plane), copies.maybe(workspace, written=True)).cpu()
        copies.back()
        return found

    def decode_bf16(self, plane: Plane) -> Tensor:
        copies = _Copies(self._device)
        found = self._backend.decode_bf16(copies.plane(plane)).cpu()
        copies.back()
        return found

    def joint_scale(
        self, row_scale: GlobalScale | None, column_scale: GlobalScale | None, alpha: float, like: Tensor
    ) -> Tensor:
        copies = _Copies(self._device)
        scales = copies.scale(row_scale), copies.scale(column_scale)
        return self._backend.joint_scale(*scales, alpha, copies.of(like)).cpu()

    def epilogue(
        self,
        product: Tensor,
        out: Tensor,
        row_scale: GlobalScale | None,
        column_scale: GlobalScale | None,
        alpha: float,
        bias: Tensor | None,
        beta: float | None,
    ) -> None:
        copies = _Copies(self._device)
        result = copies.of(out, written=True)
        scales = copies.scale(row_scale), copies.scale(column_scale)
        self._backend.epilogue(copies.of(product), result, *scales, alpha, copies.maybe(bias), beta)
        copies.back()

    def swizzle_scales(self, scales: Tensor) -> Tensor:
        return self._backend.swizzle_scales(_Copies(self._device).of(scales)).cpu()

    def amax(self, x: Tensor) -> Tensor:
        return self._backend.amax(_Copies(self._device).of(x)).cpu()
