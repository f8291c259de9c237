"""The same work done by torchao, if it is installed, in the same run.

Both libraries are called as their users call them, eagerly and from fp32: quantize a matrix rowwise into a new
tensor, decode it, and train a linear layer. On a CPU, torchao trains by emulation: it decodes and calls the fp32
GEMM, as crossgrain does. What torchao cannot do on a CPU is noted with its own reason.

New tensors of this size come from the system page by page, which costs more than a copy; ``clone`` in the table
shows how much. Each call starts with fresh memory, or the calls of one library would leave warm pages to the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor, nn

import crossgrain as cg

from . import linear
from .timing import Job, give_memory_back, least_times

T = TypeVar("T")
HOW_TO_INSTALL = (
    "torchao is not installed, so there is nothing to compare with: "
    ".venv/bin/pip install -c constraints/clients.txt -e '.[compare]'"
)
Convert = Callable[[Tensor], tuple[Job, Job]]  # to the jobs that quantize it, and that decode what it becomes


@dataclass(frozen=True)
class Timing:
    """Multiples of a copy of the matrix; 0 where there is nothing to do."""

    library: str
    name: str
    quantize: float
    dequantize: float


@dataclass(frozen=True)
class Torchao:
    """What works of torchao here, and one line on each thing that does not."""

    conversions: dict[str, Convert]
    layers: dict[str, linear.MakeLayer]
    notes: list[str]


def installed() -> bool:
    return find_spec("torchao") is not None


def torchao() -> Torchao:
    """Everything is tried once on a small matrix."""
    conversions: dict[str, Convert] = {"MXFP8": _to_mxfp8, "NVFP4": _to_nvfp4, "FP8 current": _to_float8}
    layers: dict[str, linear.MakeLayer] = {
        "MXFP8": _mxfp8_linear,
        "NVFP4": _nvfp4_linear,
        "FP8 current": _float8_linear,
    }
    notes: list[str] = []
    with _quiet():
        return Torchao(
            _working(conversions, lambda convert: [job() for job in convert(torch.randn(128, 128))], notes),
            _working(layers, lambda make: linear.step(make, (128, 128, 128))(), notes),
            notes,
        )


def model_conversions() -> dict[str, Callable[[nn.Module], nn.Module]]:
    """How torchao changes the linear layers of a model: what works here."""
    conversions = {"MXFP8": _mxfp8_model, "FP8 current": _float8_model}
    with _quiet():
        return _working(
            conversions, lambda convert: convert(nn.Sequential(nn.Linear(128, 128)))(torch.ones(128, 128)), []
        )


def run(size: int, theirs: Mapping[str, Convert], only: str, repeats: int) -> list[Timing]:
    """Our formats and theirs, side by side."""
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    copy = torch.empty_like(x)
    ours = {name: _ours(fmt) for name, fmt in (("MXFP8", "mxfp8"), ("NVFP4", "nvfp4"), ("FP8 current", "fp8"))}
    pairs = [
        (library, name, by_name[name](x))
        for name in ours
        for library, by_name in (("crossgrain", ours), ("torchao", theirs))
        if name in by_name and only.lower() in name.lower()
    ]
    jobs: list[Job] = [lambda: copy.copy_(x), x.clone, *(job for *_, both in pairs for job in both)]
    copy_time, *times = least_times(jobs, repeats, before=give_memory_back)
    clone, *ratios = [seconds / copy_time for seconds in times]
    return [
        Timing("torch", "clone", clone, 0.0),
        *(
            Timing(library, name, quantize, dequantize)
            for (library, name, _), quantize, dequantize in zip(pairs, ratios[::2], ratios[1::2], strict=True)
        ),
    ]


def rows(timings: list[Timing]) -> list[list[str]]:
    """Cells of a table."""
    return [[t.name, t.library, f"{t.quantize:.2f}", f"{t.dequantize:.2f}" if t.dequantize else ""] for t in timings]


def _ours(name: str) -> Convert:
    quantizer = cg.quantizer_for(name)
    quantizer.set_usage(rowwise=True, columnwise=False)
    return lambda x: (lambda: quantizer(x), quantizer(x).dequantize)


def _working(made: Mapping[str, T], attempt: Callable[[T], object], notes: list[str]) -> dict[str, T]:
    """Those that an attempt does not break; the others leave a note."""
    works = {}
    for name, what in made.items():
        try:
            attempt(what)
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            label = getattr(what, "__name__", name).strip("_").replace("_", " ")
            notes.append(f"torchao, {label}: not on this machine: {type(error).__name__}: {reason[0][:120]}")
        else:
            works[name] = what
    return works


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torchao's warnings about GPU libraries that cannot be loaded."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


# ---- torchao ---------------------------------------------------------------------------------------


def _to_mxfp8(x: Tensor) -> tuple[Job, Job]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    def quantize() -> MXTensor:
        return MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)

    return quantize, quantize().dequantize


def _to_nvfp4(x: Tensor) -> tuple[Job, Job]:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def quantize() -> NVFP4Tensor:
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax()))

    return quantize, quantize().dequantize


def _to_float8(x: Tensor) -> tuple[Job, Job]:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, LinearMMConfig

    def quantize() -> Float8TrainingTensor:
        return hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig())

    return quantize, quantize().to_original_precision


def _mxfp8_linear(in_features: int, out_features: int, bias: bool = True) -> tuple[nn.Module, linear.Forward]:
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    layer = MXFP8Linear(in_features, out_features, bias=bias, kernel_preference=KernelPreference.EMULATED)
    return layer, layer


def _nvfp4_linear(in_features: int, out_features: int) -> tuple[nn.Module, linear.Forward]:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_mm_triton

    layer, seed, signs = nn.Linear(in_features, out_features), torch.zeros(1, dtype=torch.int64), [1] * 16
    return layer, lambda x: nvfp4_mm_triton.apply(x, layer.weight, layer.bias, seed, signs)


def _float8_linear(in_features: int, out_features: int) -> tuple[nn.Module, linear.Forward]:
    model = _float8_model(nn.Sequential(nn.Linear(in_features, out_features)))
    return model, model


def _float8_model(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    changed: nn.Module = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    return changed


def _mxfp8_model(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            layer, _ = _mxfp8_linear(child.in_features, child.out_features, bias=child.bias is not None)
            layer.load_state_dict(child.state_dict())
            setattr(model, name, layer)
        else:
            _mxfp8_model(child)
    return model
