"""The numbers in the pictures: measured on the tensors of a trained model, and kept in ``measured.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.formats import formats

from .tensors import Operands, relative_error

FILE = Path(__file__).with_name("measured.json")
ROW, COLUMN = cg.ROWWISE, cg.COLUMNWISE
# The format of the first picture: of those with 4 bits, its directions differ most on these tensors.
FOUR_BITS = "mxfp4"
# The planes in the order in which GEMMs read them.
READS = {
    "fprop": (("input", ROW), ("weight", ROW)),
    "dgrad": (("grad_output", ROW), ("weight", COLUMN)),
    "wgrad": (("grad_output", COLUMN), ("input", COLUMN)),
}
DRAWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Measurements:
    """Relative errors, all in percent.

    Attributes:
        planes: by layer of the last block, of the planes of `READS` in their order, in `FOUR_BITS`.
        formats: by format, the root mean square over all tensors in both directions.
        rounding: by way to round, of the mean of `DRAWS` quantizations of one gradient to NVFP4.
        directions: by format, how much more the worse direction of a tensor loses than the better one, at most.
    """

    planes: dict[str, list[float]]
    formats: dict[str, float]
    rounding: dict[str, list[float]]
    directions: dict[str, float]

    @classmethod
    def of(cls, operands: Sequence[Operands]) -> Measurements:
        """Measure the tensors of a model."""
        block = operands[-1].layer[: len("blocks.0")]
        gradient = operands[-2].dy  # of fc1 in the last block: the one with the most outliers
        tensors = [tensor for each in operands for tensor in each.named().values()]
        names = [fmt.name for fmt in formats() if fmt.element is not None]
        both = {name: [_errors(tensor, name) for tensor in tensors] for name in names}
        return cls(
            {each.layer: _planes(each) for each in operands if each.layer.startswith(block)},
            {name: _root_mean_square([error for pair in pairs for error in pair]) for name, pairs in both.items()},
            {"to nearest": averaged(gradient, "nvfp4"), "stochastically": averaged(gradient, "nvfp4(sr)")},
            {name: max(100 * (max(pair) / min(pair) - 1) for pair in pairs) for name, pairs in both.items()},
        )

    @classmethod
    def load(cls) -> Measurements:
        """Those that the pictures of the pages show."""
        return cls(**json.loads(FILE.read_text(encoding="utf-8")))

    def save(self) -> None:
        """Keep them, with more digits than pictures show."""
        rounded = json.loads(json.dumps(asdict(self)), parse_float=lambda text: float(f"{float(text):.7g}"))
        FILE.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


def _planes(operands: Operands) -> list[float]:
    named = operands.named()
    return [100 * relative_error(named[name], FOUR_BITS, way) for pair in READS.values() for name, way in pair]


def _errors(tensor: Tensor, text: str) -> tuple[float, float]:
    return 100 * relative_error(tensor, text, ROW), 100 * relative_error(tensor, text, COLUMN)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def averaged(x: Tensor, text: str) -> list[float]:
    """Relative errors, in percent, of the mean of so many quantizations of one tensor."""
    torch.manual_seed(0)
    quantizer = cg.quantizer_for(text, columnwise=False)
    total, found = torch.zeros_like(x, dtype=torch.float64), []
    for draw in range(1, max(DRAWS) + 1):
        total += quantizer(x).dequantize(dtype=torch.float32).double()
        if draw in DRAWS:
            found.append(100 * float((total / draw - x.double()).norm() / x.double().norm()))
    return found
