"""CUDA calls of Megatron-core, answered by the CPU.

Megatron-core names CUDA wherever it makes a tensor, draws a random number or waits for a stream. ``install()`` gives
those names a meaning on a machine without a GPU, before Megatron is imported:

- **devices**: "cuda", ``torch.device("cuda")`` and the number of a device mean "cpu" wherever a tensor is made or
  moved, or ranks form a mesh; ``Tensor.type()`` answers with the name of the CUDA type, by which Megatron's optimizers
  sort parameters;
- **random numbers**: the generator of the GPU is the default generator of the CPU;
- **streams and events**: everything has happened by the time a call returns, so there is nothing to wait for;
- **memory and markers**: nothing is counted, nothing is marked;
- **collectives**: those which Megatron puts together run one after the other. Gloo (torch 2.13) gives wrong numbers for
  gathers of several dtypes in one, and puts together only collectives of one kind. As with NCCL, autograd does not
  see that they write. Split sizes of an exchange, which come from the GPU, become numbers;
- **apex**: gradients of weights are added to ``main_grad`` by a product of torch, where Megatron asks a CUDA extension;
- **compilers**: ``torch.compile``, which Megatron uses for small fusions, returns the function as it is.

Nothing of this is part of the library, and nothing else of Megatron is changed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones"),
    *("ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "scalar_tensor", "tensor"),
    *("zeros", "zeros_like"),
)
METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "to")


def install() -> None:
    """Idempotent. Modules of Megatron that are there already hold the names that are replaced here: an error."""
    if getattr(torch.cuda, "answered_by_cpu", False):
        return
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU: Megatron does not need CUDA calls to be answered by the CPU")
    if any(name.split(".")[:2] == ["megatron", "core"] for name in sys.modules):
        raise RuntimeError("cuda_on_cpu.install() has to come before the first import of megatron.core")
    _devices()
    _random_numbers()
    _streams()
    _memory_and_markers()
    _collectives()
    _gradient_accumulation()
    _put(torch, compile=lambda model=None, **options: model if model is not None else (lambda function: function))
    _put(torch.cuda, answered_by_cpu=True)


def _put(owner: Any, **answers: Any) -> None:
    for name, answer in answers.items():
        setattr(owner, name, answer)


# ---- devices -----------------------------------------------------------------------------------------------


def on_cpu(device: Any) -> Any:
    """The device to use where ``device`` is asked for."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def _devices() -> None:
    for owner, names in ((torch, FACTORIES), (torch.Tensor, METHODS), (torch.nn.Module, ("to", "to_empty"))):
        _put(owner, **{name: _translating(getattr(owner, name)) for name in names})
    for owner in (torch.Tensor, torch.nn.Module):
        _put(owner, to=_translating_first(owner.to), cuda=lambda self, *args, **kwargs: self)
    _put(torch.Tensor, type=_type_on_cuda(torch.Tensor.type))
    _put(DeviceMesh, __init__=_translating_first(DeviceMesh.__init__))
    _put(
        torch.cuda,
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=lambda device: None,
        get_device_capability=lambda device=None: (0, 0),
        get_device_properties=lambda device=None: SimpleNamespace(name="cpu", major=0, minor=0),
    )


def _translating(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)  # it is for copies to a GPU
        return function(*args, **kwargs)

    return call


def _translating_first(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        return method(self, *args, **kwargs)

    return call


def _type_on_cuda(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return method(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return method(self, dtype, *args, **kwargs)

    return call


# ---- random numbers ----------------------------------------------------------------------------------------


class _OneGenerator:
    """``torch.cuda.default_generators``: whatever device is asked for has this one."""

    def __getitem__(self, device: Any) -> torch.Generator:
        return torch.default_generator


def _random_numbers() -> None:
    for owner in (torch.cuda, torch.cuda.random):
        _put(
            owner,
            get_rng_state=lambda device="cuda": torch.get_rng_state(),
            set_rng_state=lambda state, device="cuda": torch.set_rng_state(state),
            manual_seed=lambda seed: torch.manual_seed(seed),
        )
    # CUDA is never initialized here, so what is to be called once it is would never be.
    _put(
        torch.cuda, default_generators=_OneGenerator(), _lazy_call=lambda function: function(), _lazy_init=lambda: None
    )
    # Megatron warns if the generator of the CPU moves while that of the GPU is used; here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


# ---- streams and events ------------------------------------------------------------------------------------


class _Done:
    """A stream or an event: what was asked of it has happened."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Done:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Done()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _streams() -> None:
    stream = _Done()
    _put(
        torch.cuda,
        **dict.fromkeys(("Stream", "Event", "ExternalStream"), _Done),
        **dict.fromkeys(("current_stream", "default_stream"), lambda device=None: stream),
        stream=lambda stream: contextlib.nullcontext(),
        set_stream=lambda stream: None,
        synchronize=lambda device=None: None,
    )
    _put(torch.Tensor, record_stream=lambda self, stream: None)


def _memory_and_markers() -> None:
    counted = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    _put(
        torch.cuda,
        **dict.fromkeys(counted, lambda device=None: 0),
        empty_cache=lambda: None,
        memory_stats=lambda device=None: {},
        reset_peak_memory_stats=lambda device=None: None,
    )
    _put(
        torch.cuda.nvtx,
        range_push=lambda message: 0,
        range_pop=lambda: 0,
        range=lambda message, *args, **kwargs: contextlib.nullcontext(),
    )


# ---- collectives -------------------------------------------------------------------------------------------


class _Works:
    """What ``_coalescing_manager`` yields: the collectives that were started, to wait for."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def wait(self) -> None:
        for work in self.started:
            if work is not None:
                work.wait()
        self.started.clear()


@contextlib.contextmanager
def one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[_Works]:
    """torch's ``_coalescing_manager``, except that the collectives it holds back are then run one after the other."""
    group = group or distributed_c10d._get_default_group()
    state = distributed_c10d._world.pg_coalesce_state
    if state.setdefault(group, []):
        raise ValueError("collectives of this group are being held back already")
    works = _Works()
    try:
        yield works
    finally:
        held_back = state.pop(group)
    for call in held_back:
        # What NCCL writes, autograd does not count. What gloo writes it would count as a write to all parameters that
        # share a buffer, also to those that backward still needs; `data` has a count of its own.
        tensors = [tensor.data for tensor in (call.dst_tensor, call.tensor) if tensor is not None]
        options = {} if call.redop is None else {"op": call.redop}
        works.started.append(call.op(*tensors, group=group, async_op=async_ops, **options))


def _numbers(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _collectives() -> None:
    for owner in (dist, distributed_c10d):
        _put(owner, _coalescing_manager=one_by_one)
    barrier, exchange = dist.barrier, dist.all_to_all_single

    def all_to_all_single(output: Any, input: Any, *splits: Any, **kwargs: Any) -> Any:
        """Megatron makes numbers of split sizes when it moves them from the GPU, where ours never were."""
        splits = tuple(map(_numbers, splits))
        return exchange(output, input, *splits, **{name: _numbers(value) for name, value in kwargs.items()})

    _put(
        dist,
        # Gloo has no devices to choose among.
        barrier=lambda group=None, async_op=False, device_ids=None: barrier(group=group, async_op=async_op),
        all_to_all_single=all_to_all_single,
    )


# ---- an extension of apex ----------------------------------------------------------------------------------


def _gradient_accumulation() -> None:
    """``main_grad += dyᵀ · x`` in the dtype of ``main_grad``, for Megatron's own layers: the one that makes logits."""

    def accumulate(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(dy.t().to(main_grad.dtype), x.to(main_grad.dtype))

    extension = ModuleType("fused_weight_gradient_mlp_cuda")
    _put(extension, wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate)
    sys.modules[extension.__name__] = extension
