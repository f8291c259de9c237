"""`QuantizedTensor`: a storage of two planes as a torch.Tensor.

It has a shape, a nominal dtype and a device like any tensor, and takes part in autograd. Operations that cannot use its
bytes decode it. What each operation does is in `dispatch`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor

from ..planes import Direction
from ..runtime.devices import resolved_device
from ..runtime.torch_patches import lists_of_tensors
from . import dispatch, sharding
from .autograd import DequantizeFunction
from .holder import new_epochs
from .storage import QuantizedTensorStorage


class QuantizedTensor(QuantizedTensorStorage, Tensor):
    """A torch.Tensor whose numbers are in quantized planes. Quantizers make it: ``crossgrain.quantize(x, "mxfp8")``.

    Args:
        shape: the shape.
        dtype: nominal dtype: what torch sees, and what `dequantize` returns by default.
        requires_grad: whether the tensor requires gradients.
        device: the device; by default that of the buffers.
        stride: strides of the tensor, for formats that can be strided.
        storage_offset: offset of the tensor, for formats that can be strided.
        **storage: buffers and options of the storage class.

    Examples:
        >>> q = cg.quantize(torch.ones(32, 64), "mxfp8")
        >>> isinstance(q, torch.Tensor), q.shape
        (True, torch.Size([32, 64]))
        >>> q.dequantize(direction=cg.COLUMNWISE).sum()
        tensor(2048.)
        >>> type(q + 1)  # other operations decode
        <class 'torch.Tensor'>
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # torch's versions of these, because those of the storage do not know about autograd.
    shape = Tensor.shape
    size = Tensor.size  # type: ignore[assignment]
    device = Tensor.device
    view = Tensor.view  # type: ignore[assignment]

    _is_param: bool = False  # torch sets it on parameters
    _of_param: bool = False  # a view or a detached alias of a parameter, such as `parameter.data`

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: torch.device | str | None = None,
        stride: Sequence[int] | None = None,
        storage_offset: int = 0,
        **storage: Any,
    ) -> QuantizedTensor:
        if device is None:
            buffers = (value for value in storage.values() if isinstance(value, (Tensor, QuantizedTensorStorage)))
            device = next((buffer.device for buffer in buffers), torch.device("cpu"))
        return cls._wrapper(shape, dtype, resolved_device(device), requires_grad, stride, storage_offset)

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        fake_dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        device: torch.device | str | None = None,
        stride: Sequence[int] | None = None,
        storage_offset: int = 0,
        **storage: Any,
    ) -> None:
        QuantizedTensorStorage.__init__(
            self, **storage, fake_dtype=dtype if fake_dtype is None else fake_dtype, shape=shape
        )

    @classmethod
    def _wrapper(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
        storage_offset: int = 0,
    ) -> Self:
        placement: dict[str, Any] = {}
        if not lists_of_tensors.installed:
            _teach_torch()
        if stride is not None:
            placement = {"strides": tuple(stride), "storage_offset": storage_offset}
        return Tensor._make_wrapper_subclass(
            cls,
            torch.Size(shape),
            **placement,
            dtype=dtype,
            layout=torch.strided,
            device=device,
            requires_grad=requires_grad,
        )

    def _blank(self, shape: torch.Size, dtype: torch.dtype, buffers: Mapping[str, Tensor | None]) -> Self:
        device = next((buffer.device for buffer in buffers.values() if buffer is not None), self.device)
        with torch.inference_mode(self.is_inference()):  # an alias of an inference tensor is one as well
            return type(self)._wrapper(shape, dtype, device)

    @classmethod
    def _storage_class(cls) -> type[QuantizedTensorStorage]:
        return next(base for base in cls.__mro__ if not issubclass(base, Tensor))  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return dispatch.dispatch(func, args, dict(kwargs or {}))

    # ---- values --------------------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None, direction: Direction | None = None) -> Tensor:
        """Decode to a plain tensor in high precision. The gradient passes through unchanged.

        Args:
            dtype: dtype of the result; by default the nominal dtype.
            direction: decode the plane of this direction; by default the rowwise plane if there is one.

        Raises:
            RuntimeError: the tensor does not have the plane, or the plane is stale.
        """
        dtype = self._dtype if dtype is None else dtype
        if torch.is_grad_enabled() and self.requires_grad:
            return cast(Tensor, DequantizeFunction.apply(self, dtype, direction))
        return self._decoded(dtype, direction)

    def float(self) -> Tensor:
        """Decode to float32. A parameter stays quantized and changes its nominal dtype."""
        return self._to_nominal(torch.float32)

    def half(self) -> Tensor:
        """Decode to float16. A parameter stays quantized and changes its nominal dtype."""
        return self._to_nominal(torch.float16)

    def bfloat16(self) -> Tensor:
        """Decode to bfloat16. A parameter stays quantized and changes its nominal dtype."""
        return self._to_nominal(torch.bfloat16)

    def _to_nominal(self, dtype: torch.dtype) -> Tensor:
        # nn.Module.bfloat16() and similar methods call these on parameters and replace them by the result. A parameter
        # must stay quantized, so only its nominal dtype changes.
        return self.to(dtype) if self._is_param else self.dequantize(dtype=dtype)

    def to_dtype(self, dtype: torch.dtype) -> Self:
        """The tensor with another nominal dtype. The bytes are kept."""
        return cast(Self, self.to(dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The nominal dtype. Setting it keeps the bytes."""
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        if dtype != self._dtype:
            self.data = self._rewrap(dtype=dtype)

    @property
    def data(self) -> Self:
        """The tensor detached from autograd, with the same buffers.

        A plain tensor that is assigned to it is quantized. A quantized tensor of the same class replaces the buffers.
        """
        with torch.no_grad():
            return cast(Self, self.detach())

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, QuantizedTensor):
            self._check_assignable(value)
            with torch.no_grad():
                if (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device):
                    self.quantize_(value)
                    return
                value = self._quantized_alike(value)
        if type(value) is not type(self):
            raise TypeError(f"cannot assign a {type(value).__name__} to the data of a {type(self).__name__}")
        # torch's setter changes shape, dtype and device, but does not know the buffers.
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        alias = value._rewrap()
        for name in self._shared_names():
            setattr(self, name, getattr(alias, name))

    def _quantized_alike(self, value: Tensor) -> QuantizedTensor:
        """Quantize ``value``, of any shape and dtype, to the formats and directions of this tensor."""
        quantizer = self._get_quantizer().copy()
        quantizer.set_usage(**self.get_usages())
        quantizer.internal = False
        return cast(QuantizedTensor, quantizer.quantize(value))

    def _check_assignable(self, value: Tensor) -> None:
        if not any(self.get_usages().values()):
            raise RuntimeError(
                f"this {type(self).__name__} of shape {list(self.shape)} has no planes, so a tensor that is assigned "
                "to its data would be lost"
            )
        if value._base is not None and value._base.numel() > value.numel():
            raise RuntimeError(
                f"the data of a {type(self).__name__} of shape {list(self.shape)} cannot be a piece of a larger tensor "
                f"of shape {list(value._base.shape)}, as in ZeroRedundancyOptimizer(parameters_as_bucket_view=True), "
                "because later writes to that tensor would not change this one. Assign a clone of the piece."
            )

    def _mark_written(self, number: int | None = None) -> None:
        super()._mark_written(number)
        if not self.is_inference():
            torch.autograd.graph.increment_version(self)  # ordinary operations save the wrapper

    # ---- construction --------------------------------------------------------------------------

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensor,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **overrides: Any,
    ) -> Self:
        """Make a tensor with the buffers of another.

        Args:
            tensor: the other tensor.
            shape: shape of the new tensor; by default that of the other.
            dtype: nominal dtype; by default that of the other.
            requires_grad: whether the new tensor requires gradients.
            **overrides: arguments of the constructor that are different.
        """
        metadata = {**tensor.get_metadata(), **overrides}
        dtype = tensor.dtype if dtype is None else dtype
        metadata.pop("fake_dtype", None)
        return cls(tensor.shape if shape is None else shape, dtype, requires_grad=requires_grad, **metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return cast(Self, memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError("only tensors created by the user (graph leaves) support deepcopy")
        with torch.no_grad():
            new = self._clone()
            new._quantizer = copy.deepcopy(self._quantizer, memo)
            new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            if name not in self._shared_names():  # attributes that the user has set
                setattr(new, name, copy.deepcopy(value, memo))
        if self.grad is not None:
            new.grad = self.grad.clone()
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        from .pickling import reduce_tensor

        return reduce_tensor(self)

    # ---- what a tensor without storage of its own cannot do ------------------------------------

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes that are stored, codes, scales and amaxes of all planes: not the size in the nominal dtype."""
        return sum(buffer.nbytes for _, buffer in self._buffers())

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage: the bytes are in the buffers of the planes."""
        return torch.UntypedStorage(0, device=self.device)

    def storage_offset(self) -> int:
        """Which element of the tensor that it was cut from is the first one here, as in torch; 0 for no slice."""
        return self._begins_at or int(Tensor.storage_offset(self))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Decode the tensor, change it and requantize all of it: an index may cut blocks."""
        with torch.no_grad():
            changed = self._decoded(self._dtype, None).clone()
            changed[index] = value
            self.quantize_(changed)

    def numpy(self, *, force: bool = False) -> Any:
        """The decoded numbers as a float32 array."""
        return self.dequantize(dtype=torch.float32).numpy(force=force)

    def _refuse_memory_access(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{type(self).__name__} has no memory with numbers of its dtype; dequantize() it first")

    __dlpack__ = apply_ = map_ = map2_ = _refuse_memory_access

    def share_memory_(self) -> Self:
        """Not supported: raises RuntimeError."""
        raise RuntimeError(
            f"{type(self).__name__} has no single storage to share between processes; share the tensors of "
            "get_data_tensors(), or send the tensor itself, which is pickled"
        )

    # ---- FSDP2 ---------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        orig_size: torch.Size | None = None,
        contiguous_orig_stride: Sequence[int] | None = None,
        module: torch.nn.Module | None = None,
        mp_policy: Any = None,
    ) -> tuple[tuple[Tensor], sharding.Gather]:
        """The bytes of this shard in one buffer. FSDP2 calls it.

        Args:
            mesh: the mesh of ranks with the other shards; None if this is the whole parameter.
            orig_size: accepted; it is not used.
            contiguous_orig_stride: accepted; it is not used.
            module: accepted; it is not used.
            mp_policy: accepted; it is not used.
        """
        self._check_gather()
        return sharding.pre_all_gather(self, mesh)

    def _check_gather(self) -> None:
        """Raise if strict mode does not allow gathering this tensor."""

    # torch counts the parameters of this method. If it has all five, torch wants buffers of the size of the parameter.
    fsdp_pre_all_gather.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "mesh")]
    )

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor],
        metadata: sharding.Gather,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[QuantizedTensor, list[Tensor]]:
        """Make the whole parameter from the bytes of all shards, or fill ``out`` again. FSDP2 calls it.

        Args:
            all_gather_outputs: the gathered bytes.
            metadata: the second result of `fsdp_pre_all_gather`.
            param_dtype: nominal dtype of the parameter.
            out: the parameter of an earlier call; None to make one.

        Returns:
            The parameter, and its buffers.
        """
        return sharding.post_all_gather(self, all_gather_outputs[0], metadata, param_dtype, out)

    # ---- tracing -------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        self._check_fresh()
        return [name for name, _ in self._buffers()], {name: getattr(self, name) for name in self._attribute_names}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], context: Mapping[str, Any], outer_size: Any, outer_stride: Any
    ) -> Self:
        device = next(iter(inner.values())).device
        new = cls._wrapper(outer_size, context["_dtype"], device)
        for name in cls._buffer_names:
            setattr(new, name, inner.get(name))
        for name, value in context.items():
            setattr(new, name, value)
        new._shape = torch.Size(outer_size)
        new._epochs = new_epochs()
        return new

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return self._storage_class().__repr__(self)


def _teach_torch() -> None:
    """Patch the functions of torch that take lists of tensors. Called when the first quantized tensor is created."""
    from .broadcast import BroadcastHandler

    lists_of_tensors.install(BroadcastHandler())
