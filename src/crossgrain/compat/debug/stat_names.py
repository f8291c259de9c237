"""The names of statistics in configurations and logs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...planes import COLUMNWISE, ROWWISE, Direction

PLAIN = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
BLOCKWISE = "max_blockwise_dynamic_range"
RECIPES = ("fp8_delayed_scaling", "fp8_current_scaling", "mxfp8", "fp8_block_scaling")
FP8 = ("underflows%", "overflows%", "scale_inv_min", "scale_inv_max", "mse")
NVFP4 = ("underflows%", "mse")

_OF_PLANE = re.compile(rf"(?:(?P<recipe>{'|'.join(RECIPES)})_)?(?P<kind>.+?)(?P<columnwise>_columnwise)?")


@dataclass(frozen=True)
class TensorStat:
    """A statistic of a tensor in high precision. ``block_size`` and ``dims`` are those of the blockwise range."""

    kind: str
    block_size: int = 32
    dims: int = 1
    both_orientations: bool = False

    @property
    def name(self) -> str:
        """The name in logs."""
        if self.kind != BLOCKWISE:
            return self.kind
        suffix = "_max_over_orientations" if self.both_orientations else ""
        return f"{BLOCKWISE}_block_size_{self.block_size}_dims_{self.dims}{suffix}"


@dataclass(frozen=True)
class PlaneStat:
    """A statistic of a quantized tensor.

    Attributes:
        name: the name in logs.
        kind: "underflows%", "mse", ...
        recipe: the recipe whose format the tensor is quantized to for it; empty for that of training.
        direction: rows, or columns with the suffix ``_columnwise``.
    """

    name: str
    kind: str
    recipe: str
    direction: Direction


def tensor_stat(given: Any, tensor: str) -> TensorStat:
    """A statistic of ``LogTensorStats``: a name, or ``{max_blockwise_dynamic_range: {block_size: 32, dims: 1}}``.

    Args:
        given: what the configuration says.
        tensor: name of the tensor. Activations and weights are read in both directions, so that the blockwise range is
            the larger one of both.

    Raises:
        ValueError: there is no such statistic.
    """
    if isinstance(given, str) and given in PLAIN:
        return TensorStat(given)
    options: Any = {} if given == BLOCKWISE else given.get(BLOCKWISE) if isinstance(given, dict) else None
    if (isinstance(given, dict) and len(given) != 1) or not isinstance(options, dict):
        raise ValueError(f"there is no statistic {given!r}; there are {', '.join((*PLAIN, BLOCKWISE))}")
    size, dims = options.get("block_size", 32), options.get("dims", 1)
    if options.keys() - {"block_size", "dims"} or dims not in (1, 2) or type(size) is not int or size < 1:
        raise ValueError(f"{BLOCKWISE} takes a block_size of at least 1, and dims 1 or 2, got {options}")
    return TensorStat(BLOCKWISE, size, dims, both_orientations=tensor in ("activation", "weight"))


def fp8_stat(given: Any) -> PlaneStat:
    """A statistic of ``LogFp8TensorStats``: ``[<recipe>_]<statistic>[_columnwise]``.

    Raises:
        ValueError: there is no such statistic.
    """
    return _plane_stat(given, FP8, given)


def nvfp4_stat(given: Any) -> PlaneStat:
    """A statistic of ``LogNvfp4TensorStats``: ``<statistic>[_columnwise]``. Its name in logs begins with ``nvfp4_``.

    Raises:
        ValueError: there is no such statistic.
    """
    return _plane_stat(given, NVFP4, f"nvfp4_{given}")


def _plane_stat(given: Any, kinds: tuple[str, ...], name: str) -> PlaneStat:
    found = _OF_PLANE.fullmatch(given) if isinstance(given, str) else None
    recipe = "" if found is None else found["recipe"] or ""
    if found is None or found["kind"] not in kinds or (recipe and kinds is NVFP4):
        before = "" if kinds is NVFP4 else f"; before them may stand one of {', '.join(RECIPES)} and '_'"
        raise ValueError(
            f"there is no statistic {given!r}; there are {', '.join(kinds)}, also with the suffix _columnwise{before}"
        )
    if found["kind"] == "overflows%" and recipe not in ("", "fp8_delayed_scaling"):
        raise ValueError(f"{given!r}: only fp8_delayed_scaling has overflows%; other scales follow the largest number")
    return PlaneStat(name, found["kind"], recipe, COLUMNWISE if found["columnwise"] else ROWWISE)
