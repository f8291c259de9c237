"""What Transformer Engine refuses and crossgrain can do: the limits that ``settings.strict = True`` brings back.

Strict mode is for trying, on any machine, whether code will run on Transformer Engine. Each limit is one line of
`LIMITS`; where crossgrain goes beyond it, the code calls `refuse_if_strict`. The list is in
docs/how-to/transformer_engine.md.
"""

from __future__ import annotations

from typing import NamedTuple

from .settings import settings


class Limit(NamedTuple):
    """A limit of Transformer Engine.

    Attributes:
        error: what it raises.
        phrase: words that its message has, by which a client may recognise it.
        lifted: what crossgrain can do there.
    """

    error: type[Exception]
    phrase: str
    lifted: str


LIMITS = {
    "nested request": Limit(
        TypeError,
        "nested QuantizerRequest",
        "delayed scaling inside a hybrid: each child has its own history",
    ),
    "storages in a hybrid": Limit(
        NotImplementedError,
        "does not support storage-only",
        "hybrid tensors whose children are storages can be detached and gathered by FSDP2",
    ),
    "other usages": Limit(
        NotImplementedError,
        "requires matching rowwise/columnwise usages",
        "`copy_` between hybrids with different usages",
    ),
    "pieces that cut blocks of a hybrid": Limit(
        NotImplementedError,
        "split produced a high-precision",
        "`split` of a hybrid through a block gives decoded, read-only pieces",
    ),
    "NVFP4 of a hybrid in FSDP2": Limit(
        NotImplementedError,
        "Hybrid FSDP2 all-gather is not supported",
        "FSDP2 gathers hybrids with NVFP4 children",
    ),
    "masters of block formats in a hybrid": Limit(
        NotImplementedError,
        "is not supported yet",
        "`quantize_master_weights` writes MXFP8, NVFP4 and FP8 blocks of hybrids",
    ),
    "masters of derived columns": Limit(
        NotImplementedError,
        "rowwise_dequantized",
        "`quantize_master_weights` writes hybrids whose columns are made from the rows, also from pieces of masters",
    ),
    "masters of NVFP4 1x16": Limit(
        ValueError,
        "NVFP4 2D quantization must be enabled",
        "`quantize_master_weights` writes NVFP4 weights in blocks of 1x16",
    ),
    "channels of a sequence in use": Limit(
        RuntimeError,
        "captured by an OperationFuser",
        "channels of operations can be changed after their sequence was made or used",
    ),
    "operands of different formats": Limit(
        RuntimeError,
        "scaled alike",
        "operands that cannot be multiplied are found when a recipe is first used (a `ValueError`); in strict mode the "
        "GEMM raises",
    ),
    "columns of FP8 alone": Limit(
        NotImplementedError,
        "columnwise plane alone",
        "per-tensor FP8 can have columnwise data alone where it is a transposed copy (compute capability below 10.0)",
    ),
    "columns of NVFP4 alone": Limit(
        NotImplementedError,
        "cannot be dequantized from columnwise data alone",
        "NVFP4 can be decoded from columnwise data alone",
    ),
    "dtype of rotated NVFP4": Limit(
        RuntimeError,
        "needs a bfloat16 tensor",
        "the Hadamard rotation of float32 and float16 tensors",
    ),
    "columns of row-scaled NVFP4": Limit(
        RuntimeError,
        "row-scaled NVFP4 needs",
        "row-scaled NVFP4 columns of any dtype and size, also alone",
    ),
    "partial blocks": Limit(
        ValueError,
        "cannot quantize a tensor of shape",
        "sizes that are not a multiple of the block in the direction that is not quantized",
    ),
}


def strict_error(limit: str, message: str) -> Exception:
    """The error of a limit. Its message has the words of Transformer Engine."""
    known = LIMITS[limit]
    text = message if known.phrase in message else f"{message}: {known.phrase}"
    return known.error(f"strict mode: {text} (settings.strict = False allows it)")


def refuse_if_strict(limit: str, message: str) -> None:
    """Raise the error of a limit in strict mode.

    Args:
        limit: a key of `LIMITS`.
        message: what is refused, and of which object.
    """
    if settings.strict:
        raise strict_error(limit, message)
