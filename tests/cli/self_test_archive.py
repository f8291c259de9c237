"""Write the golden vectors that ``crossgrain doctor`` compares: some of those in ``tests/common/golden``.

python -m tests.cli.self_test_archive
"""

from __future__ import annotations

from typing import Any

import numpy as np

from crossgrain.cli.checkup.self_test import ARCHIVE, CASES, FIELDS

from ..common.golden_cases import archive


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of the archive by name."""
    found = {}
    for case in CASES:
        file, name = case.split("/")
        golden = archive(f"{file}.npz")
        found |= {f"{case}/{field}": golden[f"{name}/{field}"] for field in FIELDS if f"{name}/{field}" in golden}
    return found


if __name__ == "__main__":
    np.savez_compressed(ARCHIVE, **arrays())
