"""What the layouts of other programs can hold, and what is refused before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..formats import E2M1, E4M3, Format
from .walk import Bytes, ExportedWeight

NVFP4, MXFP4, MXFP8 = "nvfp4", "mxfp4", "mxfp8"
FP8, FP8_ROWS, FP8_TILES = "fp8", "fp8_block", "fp8_block_2d"

_WAY_OUT = (
    "Give the layer another format in the recipe, leave it in high precision (`layer: hp`), or export the model with "
    "format='plain'"
)
_MOST_SHOWN = 6


def kind_of(fmt: Format) -> str | None:
    """The family of a format as other programs know it; None if they know none.

    Scales of square tiles that are stored once for each row are scales of rows: the family is the same.
    """
    element, block, rule = fmt.element, fmt.block, fmt.scale_rule
    if fmt.rotation is not None or fmt.global_amax == "row":
        return None
    by_rows = block is not None and (block[0] == 1 or fmt.layout.replicated)
    if rule == "two_level" and element == E2M1 and fmt.scale_element == E4M3:
        return NVFP4 if fmt.block_length == 16 and by_rows else None
    if rule in ("e8m0_up", "e8m0_floor") and fmt.block_length == 32 and by_rows:
        return MXFP4 if element == E2M1 else MXFP8 if element == E4M3 else None
    if rule == "fp32" and element == E4M3:
        return {None: FP8, (1, 128): FP8_ROWS, (128, 128): FP8_TILES}.get(block)
    return None


def why_not(fmt: Format, kinds: Collection[str], target: str) -> str | None:
    """Why a layout cannot hold a format; None if it can."""
    kind = kind_of(fmt)
    if kind in kinds:
        return None
    if fmt.rotation is not None:
        return f"its rowwise plane is rotated ({fmt.name}), and other programs do not rotate their inputs"
    if fmt.global_amax == "row":
        return f"{fmt.name} has an amax for every row, and {target} has one for the tensor"
    known = ", ".join(sorted(kinds))
    return f"it is {fmt.name} in fprop, and {target} holds {known}"


def check_weights(weights: Sequence[ExportedWeight], kinds: Collection[str], target: str) -> None:
    """Raise if a layout cannot hold all weights.

    Raises:
        ValueError: it names the layers, the reason, and what can be done.
    """
    problems = []
    for weight in weights:
        problem = weight.problem
        if problem is None and weight.format is not None:
            problem = why_not(weight.format, kinds, target) or _shape_problem(weight)
        if problem is not None:
            problems.append(f"{weight.name} {list(weight.shape)}: {problem}")
    refuse(problems, target)


def refuse(problems: Sequence[str], target: str) -> None:
    """Raise a ValueError that lists problems of layers, if there are any."""
    if not problems:
        return
    shown = list(problems[:_MOST_SHOWN])
    if len(problems) > _MOST_SHOWN:
        shown.append(f"and {len(problems) - _MOST_SHOWN} more")
    raise ValueError(f"this model cannot be exported as {target}:\n  " + "\n  ".join(shown) + f"\n{_WAY_OUT}.")


def _shape_problem(weight: ExportedWeight) -> str | None:
    fmt = weight.format
    assert fmt is not None
    if fmt.block_rows > 1 and not fmt.layout.replicated and weight.part.start % fmt.block_rows:
        return (
            f"it is the part of a larger weight that begins at row {weight.part.start}, inside a tile of "
            f"{fmt.block_rows} rows"
        )
    if fmt.block is None or fmt.ragged:
        return None
    if weight.shape[1] % fmt.block_length:
        return (
            f"its {weight.shape[1]} columns are padded to whole blocks of {fmt.block_length} while training, and other "
            "programs do not pad"
        )
    return None


def check_finite(name: str, found: Bytes) -> None:
    """Raise ValueError if codes or scales stand for NaN or infinity, which programs read in different ways."""
    kind = kind_of(found.format)
    bad = False
    if kind in (FP8, FP8_ROWS, FP8_TILES, MXFP8):
        bad = bool(((found.codes & 0x7F) == 0x7F).any())
    if kind in (MXFP4, MXFP8):
        bad = bad or bool((found.scales == 0xFF).any())
    elif kind == NVFP4:
        bad = bool(((found.scales & 0x7F) == 0x7F).any())
    else:
        bad = bad or not bool(found.scales.isfinite().all())
    if found.amax is not None:
        bad = bad or not bool(torch.isfinite(found.amax).all())
    if bad:
        raise ValueError(f"{name}: the weight holds NaNs or infinities, which cannot be exported")
