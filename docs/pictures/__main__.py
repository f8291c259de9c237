"""Draw all pictures: ``python -m docs.pictures``. It trains the small GPT first, which takes some minutes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from . import error_bits, gemms, idea, rounding, sizes, speed
from .style import save
from .tensors import Operands, trained_operands

# The format of the first picture: of all built-in ones, its directions differ most on these tensors.
FOUR_BITS = "mxfp4"


def draw_all(operands: Sequence[Operands], directory: Path | None = None) -> list[Path]:
    """All pictures, from the tensors of a trained model."""
    some = [each for each in operands if each.layer.startswith(operands[-1].layer[: len("blocks.0")])]
    gradient = operands[-2].dy  # of fc1 in the last block: the one with the most outliers
    return [
        save(idea.draw(some, FOUR_BITS), "idea", directory),
        save(gemms.draw(), "gemms", directory),
        save(sizes.draw(), "sizes", directory),
        save(error_bits.draw(operands), "error-bits", directory),
        save(rounding.draw(gradient), "rounding", directory),
        save(speed.draw(), "speed", directory),
    ]


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="train for fewer steps, to try the program")
    parser.add_argument("--out", type=Path, help="directory; by default that of the pages")
    arguments = parser.parse_args()
    for path in draw_all(trained_operands(steps=arguments.steps), arguments.out):
        print(path)


if __name__ == "__main__":
    main()
