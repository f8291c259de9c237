"""What one linear layer costs: the bytes that it saves, the GEMMs that it runs, and what it quantizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..gemm.operands import GEMMS, scaling_family
from ..linear.padding import Sizes, padding_for
from ..planes import COLUMNWISE, ROWWISE, Direction
from ..recipe.base import BackwardOverride
from ..recipe.format_spec import FormatSpec
from ..recipe.layer_formats import LayerFormats
from .devices import HIGH_PRECISION, KINDS, kind_of_element
from .plane_bytes import Gathered, buffer_bytes, gathered_by_formats, plane_bytes, planes_of, quantizer_for

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Gemm:
    """A GEMM.

    Attributes:
        name: "fprop", "dgrad", "wgrad", or a pass of attention.
        format: the format of its operands.
        kind: the kind of their elements (of two kinds the wider one).
        scaling: the kind of their scales.
        flops: number of operations.
        bytes: bytes of operands and result.
    """

    name: str
    format: str
    kind: str
    scaling: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class LayerCost:
    """The cost of one weight and one micro batch.

    Attributes:
        gemms: the three GEMMs.
        saved_input: bytes that are saved of the input for backward.
        saved_weight: bytes that are saved of the weight for backward, without the parameter itself.
        keeps_input_itself: the input tensor itself is saved, in high precision.
        operands: largest number of bytes of operands that exist at one time and are not saved.
        quantized_forward: bytes read and written to quantize x and W.
        quantized_backward: bytes read and written to quantize dy.
    """

    gemms: tuple[Gemm, ...]
    saved_input: int
    saved_weight: int
    keeps_input_itself: bool
    operands: int
    quantized_forward: int
    quantized_backward: int


@lru_cache(maxsize=4096)
def layer_cost(
    chosen: LayerFormats,
    override: BackwardOverride,
    tokens: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    weight_is_kept: bool,
) -> LayerCost:
    """The cost of one linear layer.

    Args:
        chosen: the formats of the layer.
        override: ``backward_override`` of the recipe.
        tokens: number of rows of the input.
        inputs: features of the input.
        outputs: features of the output.
        dtype: dtype of activations.
        weight_is_kept: the weight is already quantized, so the layer neither quantizes nor saves it.
    """
    shapes = padded_shapes(chosen, override, Sizes(tokens, inputs, outputs))
    given = {"input": (tokens, inputs), "weight": (outputs, inputs)}
    itself = {
        tensor: _saves_itself(chosen, override, tensor, dtype, is_padded=shapes[tensor] != shape)
        for tensor, shape in given.items()
    }

    def saved(tensor: str, plain: int) -> int:
        """Bytes that are saved of a tensor. ``plain`` is the number of numbers if the tensor itself is saved."""
        if itself[tensor]:
            return plain * dtype.itemsize
        return size(tensor, _saved_direction(chosen, override, tensor))

    def size(tensor: str, *directions: Direction) -> int:
        return plane_bytes(chosen, tensor, shapes[tensor], dtype, directions)

    backward = override is None
    quantized = ("input",) if weight_is_kept else ("input", "weight")
    late = [tensor for tensor in quantized if backward and makes_late(chosen, tensor)]
    made = {name: (ROWWISE, COLUMNWISE) if backward and name not in late else (ROWWISE,) for name in quantized}
    gradient = size("grad_output", ROWWISE, COLUMNWISE) if backward else 0
    if backward and makes_late(chosen, "weight"):
        gradient += size("weight", COLUMNWISE)  # also of a weight that is kept quantized; for dgrad, before those of x

    def traffic(tensor: str, directions: tuple[Direction, ...]) -> int:
        return _traffic(chosen, tensor, shapes[tensor], dtype, directions)

    return LayerCost(
        gemms=tuple(_gemm(name, chosen, override, Sizes(tokens, inputs, outputs), shapes, dtype) for name in GEMMS),
        saved_input=saved("input", tokens * inputs),
        saved_weight=0 if weight_is_kept else saved("weight", 0),
        keeps_input_itself=itself["input"],
        operands=max(sum(size(tensor, *directions) for tensor, directions in made.items()), gradient),
        quantized_forward=sum(traffic(tensor, directions) for tensor, directions in made.items()),
        quantized_backward=(traffic("grad_output", (ROWWISE, COLUMNWISE)) if backward else 0)
        + sum(traffic(tensor, (COLUMNWISE,)) for tensor in late),
    )


def padded_shapes(chosen: LayerFormats, override: BackwardOverride, sizes: Sizes) -> dict[str, tuple[int, int]]:
    """The shapes of x, W and dy, padded to whole blocks."""
    gradient = quantizer_for(chosen, "grad_output") if override is None else None
    padding = padding_for(quantizer_for(chosen, "input"), quantizer_for(chosen, "weight"), gradient)
    m, k, n = padding.padded(sizes, backward=True)
    return {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}


def gathered_planes(
    chosen: LayerFormats,
    override: BackwardOverride,
    shape: tuple[int, int],
    ranks: int,
    dtype: torch.dtype,
    *,
    tokens: int,
    kept_quantized: bool,
) -> Gathered:
    """Bytes of the planes of a weight, as FSDP gathers them for the passes that read them.

    Args:
        chosen: the formats of the layer.
        override: ``backward_override`` of the recipe.
        shape: shape of the weight.
        ranks: number of ranks.
        dtype: dtype of the weight in high precision.
        tokens: number of rows of the input.
        kept_quantized: the parameter itself is quantized.

    Raises:
        ValueError: the weight cannot be divided into blocks.
    """
    padded = shape
    if not kept_quantized:  # a weight that is quantized before it is sent may be padded
        padded = padded_shapes(chosen, override, Sizes(tokens, shape[1], shape[0]))["weight"]
    read = (ROWWISE, COLUMNWISE) if override is None else (ROWWISE,)
    sizes = gathered_by_formats(chosen, shape, ranks, dtype, padded=padded, directions=read)
    if kept_quantized and makes_late(chosen, "weight"):  # backward makes columns from what forward read
        return Gathered(sizes.forward, sizes.forward, sizes.forward)
    return sizes


def makes_late(chosen: LayerFormats, tensor: str) -> bool:
    """Whether backward makes the columns of a tensor from its rows."""
    return bool(chosen.source(tensor).value == "dequantized_late")


def _saved_direction(chosen: LayerFormats, override: BackwardOverride, tensor: str) -> Direction:
    return ROWWISE if override == "dequantized" or makes_late(chosen, tensor) else COLUMNWISE


def _saves_itself(
    chosen: LayerFormats, override: BackwardOverride, tensor: str, dtype: torch.dtype, is_padded: bool
) -> bool:
    """Whether a tensor is saved and not a plane of it; one in high precision is a copy if the other operand pads it."""
    if override == "high_precision":
        return True
    return not is_padded and _is_itself(chosen, tensor, _saved_direction(chosen, override, tensor), dtype)


def _is_itself(chosen: LayerFormats, tensor: str, direction: Direction, dtype: torch.dtype) -> bool:
    """Whether a direction is the tensor itself: in high precision, and not made from decoded numbers."""
    spec: FormatSpec = chosen.format_in(tensor, direction).value
    if spec.format != "hp" or (spec.dtype is not None and spec.dtype != _DTYPE_NAMES[dtype]):
        return False
    rowwise: FormatSpec = chosen.format_in(tensor, ROWWISE).value
    return direction is ROWWISE or chosen.source(tensor).value == "original" or rowwise.format == "hp"


def _traffic(
    chosen: LayerFormats, tensor: str, shape: tuple[int, int], dtype: torch.dtype, directions: tuple[Direction, ...]
) -> int:
    """Bytes read and written to quantize a tensor: it is read once, and once more if its amax is needed first."""
    made = tuple(d for d in directions if not _is_itself(chosen, tensor, d, dtype))
    if not made:
        return 0
    planes = planes_of(chosen, tensor, shape, dtype, made)
    measured = any(p.format.global_amax or (p.format.block is None and not p.format.is_identity) for p in planes)
    return shape[0] * shape[1] * dtype.itemsize * (2 if measured else 1) + buffer_bytes(planes)


# ---- GEMMs -----------------------------------------------------------------------------------------


def _gemm(
    name: str,
    chosen: LayerFormats,
    override: BackwardOverride,
    sizes: Sizes,
    shapes: dict[str, tuple[int, int]],
    dtype: torch.dtype,
) -> Gemm:
    m, k, n = sizes
    flops = 2 * m * k * n
    results = {"fprop": m * n, "dgrad": m * k, "wgrad": n * k}
    written = results[name] * dtype.itemsize
    if override is not None and name != "fprop":
        read = sum(rows * columns for rows, columns in (shapes[tensor] for tensor in GEMMS[name])) * dtype.itemsize
        return Gemm(name, _DTYPE_NAMES[dtype], *_plain_kind(dtype), flops, read + written)
    read = sum(plane_bytes(chosen, t, shapes[t], dtype, (direction,)) for t, direction in GEMMS[name].items())
    specs: list[FormatSpec] = [chosen.format(name, tensor).value for tensor in GEMMS[name]]
    kind = _kind_and_scaling(specs, list(GEMMS[name].values()), dtype)
    return Gemm(name, _format_name(specs, dtype), *kind, flops, read + written)


def _format_name(specs: list[FormatSpec], dtype: torch.dtype) -> str:
    """The formats of both operands: ``mxfp8``, or ``mxfp8 x mxfp4`` if they differ."""
    names = [spec.format if spec.format != "hp" else spec.dtype or _DTYPE_NAMES[dtype] for spec in specs]
    return " x ".join(dict.fromkeys(names))


def _kind_and_scaling(specs: list[FormatSpec], directions: list[Direction], dtype: torch.dtype) -> tuple[str, str]:
    """The kinds of elements and scales that a GEMM multiplies. Operands with different kinds of scales are decoded.

    Of two kinds of elements it is the one without a published rate, if there is one; otherwise the wider one.
    """
    formats = [spec.stored_format(direction) for spec, direction in zip(specs, directions, strict=True)]
    families = {scaling_family(fmt) for fmt in formats}
    elements = [fmt.element for fmt in formats if fmt.element is not None]
    if not elements or len(families) > 1:
        return _plain_kind(dtype)
    widest_first = sorted(elements, key=lambda element: element.bits, reverse=True)
    kinds = [kind_of_element(element) for element in widest_first]
    return next((kind for kind in kinds if kind not in KINDS), kinds[0]), families.pop()


def _plain_kind(dtype: torch.dtype) -> tuple[str, str]:
    return "tf32" if dtype == torch.float32 else "bf16", HIGH_PRECISION


# ---- attention -------------------------------------------------------------------------------------


def attention_cost(
    chosen: LayerFormats, tokens: int, sequence: int, heads: int, kv_heads: int, channels: int, dtype: torch.dtype
) -> tuple[list[Gemm], int]:
    """The GEMMs of a causal attention core, and the bytes that it saves: q, k, v, its output, and a sum per head.

    Forward has two GEMMs (scores and output). Backward has five, of which the first computes the scores again.
    """
    product = tokens * sequence * heads * channels  # 2 FLOPs for half of all pairs of tokens, because it is causal
    moved = tokens * (2 * heads + 2 * kv_heads) * channels * dtype.itemsize
    gemms = []
    for name, tensor, count, passes in (("attention forward", "qkv", 2, 1), ("attention backward", "do", 5, 3)):
        specs: list[FormatSpec] = [chosen.format("attention", tensor).value]
        kind = _kind_and_scaling(specs, [ROWWISE], dtype)
        gemms.append(Gemm(name, _format_name(specs, dtype), *kind, count * product, passes * moved))
    kept = plane_bytes(chosen, "qkv", (tokens, (heads + 2 * kv_heads) * channels), dtype, (ROWWISE,))
    return gemms, kept + plane_bytes(chosen, "o", (tokens, heads * channels), dtype, (ROWWISE,)) + tokens * heads * 4
