"""The table of the documentation: ``python -m tests.gpu.gates.table`` prints it, which takes some minutes."""

from .figures import built, instructions_per_element
from .launches import WORK
from .roof import GPUS

HEAD = "| kernel | bytes | " + " | ".join(f"{gpu.name} ({gpu.target})" for gpu in GPUS) + " |"


def rows() -> list[str]:
    """The lines of the table."""
    lines = [HEAD, "|---|---|" + "---|" * len(GPUS)]
    for work in WORK:
        cells = []
        for gpu in GPUS:
            count = instructions_per_element(work, gpu.target)
            share = gpu.bandwidth_share(work.bytes, count)
            cells.append(f"{count:.1f}, {built(work, gpu.target)[0].registers}, {share:.0%}")
        lines.append(f"| {work.name} | {work.bytes:.2f} | " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows()))
