"""Draw all pictures: ``python -m docs.pictures``. With ``--measure`` it trains the small GPT first: some minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import error_bits, gemms, idea, rounding, sizes, speed
from .measurements import Measurements
from .style import save
from .tensors import trained_operands


def draw_all(measured: Measurements, directory: Path | None = None) -> list[Path]:
    """All pictures, of these numbers."""
    return [
        save(idea.draw(measured.planes), "idea", directory),
        save(gemms.draw(), "gemms", directory),
        save(sizes.draw(), "sizes", directory),
        save(error_bits.draw(measured.formats), "error-bits", directory),
        save(rounding.draw(measured.rounding), "rounding", directory),
        save(speed.draw(), "speed", directory),
    ]


def main() -> None:
    """Measure, if that was asked for, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="train the GPT, and measure its tensors anew")
    if parser.parse_args().measure:
        Measurements.of(trained_operands()).save()
    for path in draw_all(Measurements.load()):
        print(path)


if __name__ == "__main__":
    main()
