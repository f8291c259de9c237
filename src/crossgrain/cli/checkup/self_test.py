"""Golden vectors on one backend: bytes that independent programs have computed.

``golden.npz`` has some of the vectors that the tests of crossgrain compare, small ones, of every family of formats. A
test keeps it equal to them (`tests/cli/test_doctor.py`).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...formats import DEFAULT_SIGN_MASK, E4M3, fp8_block_format, fp8_format, mxfp8_format, nvfp4_format
from ...formats.encoding import Encoding
from ...kernels import Backend, Target
from ...planes import COLUMNWISE, ROWWISE, Direction, Plane, empty_plane
from .findings import SelfTest

ARCHIVE = Path(__file__).with_name("golden.npz")

_MXFP8 = Encoding(mxfp8_format())
_NVFP4 = Encoding(nvfp4_format())
_NVFP4_ROTATED = Encoding(nvfp4_format(rotation=DEFAULT_SIGN_MASK))
_NVFP4_TILES = Encoding(nvfp4_format(two_d=True))
_NVFP4_CHOSEN = Encoding(nvfp4_format(scale_bound=256), four_over_six="MAE")
_FP8 = Encoding(fp8_format(E4M3))
_FP8_TILES = Encoding(fp8_block_format(E4M3, two_d=True), power_of_two=True)

CASES: dict[str, tuple[Encoding, Encoding]] = {
    "mxfp8/special_infnan_e4m3": (_MXFP8, _MXFP8),
    "nvfp4/special_nan": (_NVFP4, _NVFP4),
    "hybrid/mxfp8_row__nvfp4_rht_col__original": (_MXFP8, _NVFP4_ROTATED),
    "fp8_current_scaling/tiny_e4m3_bf16": (_FP8, _FP8),
    "fp8_blockwise/tiny_2d_e4m3_bf16_pow2": (_FP8_TILES, _FP8_TILES),
    "nvfp4/tiny_2d_bf16": (_NVFP4_TILES, _NVFP4_TILES),
    "nvfp4/tiny_4over6_mae256_bf16": (_NVFP4_CHOSEN, _NVFP4_CHOSEN),
}
"""The encodings of the rowwise and of the columnwise plane, by file and case. What compiles fastest comes first."""

FIELDS = ("x", *(f"{side}_{part}" for side in ("row", "col") for part in ("data", "scale", "amax", "dq")))
"""The fields of a case in the archive, as far as it has them."""


def run_self_test(backend: Backend, device: str, seconds: float) -> SelfTest:
    """Compare all cases, or as many as begin within ``seconds``."""
    start, problems, done = time.perf_counter(), [], 0
    for name in CASES:
        if done and time.perf_counter() - start > seconds:
            break
        problems += case_problems(backend, torch.device(device), name)
        done += 1
    return SelfTest(backend.name, device, done, len(CASES), round(time.perf_counter() - start, 2), tuple(problems))


def case_problems(backend: Backend, device: torch.device, name: str) -> list[str]:
    """What is wrong with a case on a backend, one line for each field."""
    try:
        return list(_wrong_fields(backend, device, name))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{name} raised {type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {error}"]


def _wrong_fields(backend: Backend, device: torch.device, name: str) -> Iterator[str]:
    x = _input(name).to(device)
    for side, direction, encoding in zip(("row", "col"), (ROWWISE, COLUMNWISE), CASES[name], strict=True):
        plane = _encoded(backend, x, encoding, direction)
        for part, read in _PARTS.items():
            expected = _archive().get(f"{name}/{side}_{part}")
            if expected is not None:
                wrong = _differing(read(backend, plane).cpu(), expected)
                if wrong:
                    yield f"{name}: {wrong} of {expected.size} numbers of {side}_{part} are wrong"


def _encoded(backend: Backend, x: Tensor, encoding: Encoding, direction: Direction) -> Plane:
    plane = empty_plane(encoding.format, direction, (x.shape[0], x.shape[1]), device=x.device)
    target = Target(plane, encoding)
    if target.needs_amax:
        target = target.with_amax(backend.measure(x, [target])[0])
    backend.encode(x, [target], None)
    return plane


def _scales(backend: Backend, plane: Plane) -> Tensor:
    return plane.operand_scales().t() if _lies_like_the_matrix(plane) else plane.operand_scales()


def _amax(backend: Backend, plane: Plane) -> Tensor:
    assert plane.amax is not None
    return plane.amax


def _decoded(backend: Backend, plane: Plane) -> Tensor:
    operand = backend.decode_operand(plane)
    return operand.t() if _lies_like_the_matrix(plane) else operand


def _lies_like_the_matrix(plane: Plane) -> bool:
    """Columns of MXFP8 are stored as [M, K], and so is everything about them in the archive."""
    return plane.direction is COLUMNWISE and not plane.transposed


_PARTS: dict[str, Callable[[Backend, Plane], Tensor]] = {
    "data": lambda backend, plane: plane.data,
    "scale": _scales,
    "amax": _amax,
    "dq": _decoded,
}


def _differing(actual: Tensor, expected: np.ndarray[Any, Any]) -> int:
    """How many numbers differ in their bits; NaNs may differ in sign and payload."""
    found = actual.numpy()
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return int(expected.size)
    same = np.ascontiguousarray(found).view(f"u{found.itemsize}") == expected.view(f"u{found.itemsize}")
    if found.dtype.kind == "f":
        same |= np.isnan(found) & np.isnan(expected)
    return int((~same).sum())


def _input(name: str) -> Tensor:
    """The input of a case. bf16 numbers are stored as their bits."""
    array = _archive()[f"{name}/x"]
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@lru_cache(maxsize=1)
def _archive() -> dict[str, np.ndarray[Any, Any]]:
    with np.load(ARCHIVE) as arrays:
        return dict(arrays)
