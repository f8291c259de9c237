"""The test kernels with their inputs and what must come out, computed in numpy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from . import Report, run
from .values import Array

Result = tuple[list[Array], list[Array], Report]  # got, wanted


@dataclass(frozen=True)
class Case:
    """A kernel: how it is compiled, and a function that runs its PTX."""

    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    launch: Callable[[str, int], Result]  # PTX, bytes of shared memory

    def check(self, ptx: str, shared: int) -> Report:
        """Run PTX; all results are right, to the last bit."""
        got, wanted, report = self.launch(ptx, shared)
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
        return report


_M, _N, _BM, _BN = 48, 96, 32, 64


@cache
def _tile_inputs() -> tuple[Array, list[Array]]:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((_M, _N)) * np.exp(3 * rng.standard_normal((_M, _N)))).astype(np.float32)
    x = x.astype(ml_dtypes.bfloat16)
    value = x.astype(np.float32)
    row_codes, col_codes = np.zeros((_M, _N), np.uint8), np.zeros((_N, _M), np.uint8)
    sizes = np.zeros((-(-_N // _BN), _M), np.float32)
    for m in range(0, _M, _BM):
        for n in range(0, _N, _BN):
            tile = value[m : m + _BM, n : n + _BN]
            rows, cols = np.abs(tile).max(axis=1), np.abs(tile).max(axis=0)
            sizes[n // _BN, m : m + _BM] = rows
            row_codes[m : m + _BM, n : n + _BN] = _codes(tile / rows[:, None])
            col_codes[n : n + _BN, m : m + _BM] = _codes(tile / cols[None, :]).T
    return x.view(np.uint16), [row_codes, col_codes, sizes, np.abs(value).max(keepdims=True)[0]]


def _codes(share: Array) -> Array:
    return (share * np.float32(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _launch_tile(ptx: str, shared: int) -> Result:
    x, wanted = _tile_inputs()
    got = [np.zeros_like(each) for each in wanted]
    report = run(ptx, (-(-_M // _BM), -(-_N // _BN)), [x.copy(), *got, _M, _N], shared)
    return got, wanted, report


def _launch_ragged(ptx: str, shared: int) -> Result:
    rng = np.random.default_rng(1)
    x = rng.integers(-1000, 1000, (9, 1000), dtype=np.int32)
    lengths = np.array([0, 1, 127, 128, 129, 500, 0, 1000, 999], np.int32)
    sums = np.full(9, -7, np.int32)
    report = run(ptx, (9,), [x, lengths, sums, 1000], shared)
    wanted = np.array([x[i, :n].sum() if n else -7 for i, n in enumerate(lengths)], np.int32)
    return [sums], [wanted], report


def _launch_scan(ptx: str, shared: int) -> Result:
    x = np.random.default_rng(2).integers(-(2**20), 2**20, (3, 256), dtype=np.int32)
    running, ordered = np.zeros_like(x), np.zeros_like(x)
    report = run(ptx, (3,), [x, running, ordered], shared)
    return [running, ordered], [np.cumsum(x, axis=1, dtype=np.int32), np.sort(x, axis=1)], report


def _launch_transpose(ptx: str, shared: int) -> Result:
    x = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    y = np.zeros_like(x)
    report = run(ptx, (1,), [x, y], shared)
    return [y], [x.T.copy()], report


def _tile(hardware: bool) -> Case:
    pointers = {"x": "*bf16", "row_codes": "*u8", "col_codes": "*u8", "row_sizes": "*fp32", "largest": "*i32"}
    signature = pointers | {"M": "i32", "N": "i32"}
    constants = {"BM": _BM, "BN": _BN, "HARDWARE": hardware}
    return Case("tile_kernel", signature, constants, tuple(signature), _launch_tile)


def _integers(kernel: str, pointers: tuple[str, ...], launch: Callable[[str, int], Result], **constants: int) -> Case:
    return Case(kernel, dict.fromkeys(pointers, "*i32"), constants, pointers, launch)


_RAGGED = _integers("ragged_kernel", ("x", "lengths", "sums"), _launch_ragged, B=128)
CASES = {
    "tile": _tile(hardware=True),
    "tile_on_bits": _tile(hardware=False),
    "ragged": replace(_RAGGED, signature=_RAGGED.signature | {"width": "i32"}),
    "scan": _integers("scan_kernel", ("x", "running", "ordered"), _launch_scan, N=256),
    "transpose": Case(
        "transpose_kernel", {"x": "*bf16", "y": "*bf16"}, {"R": 64, "C": 64}, ("x", "y"), _launch_transpose
    ),
}
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def runs_on(case: str, target: str) -> bool:
    """sm_80 has no instruction for E4M3."""
    return not (case == "tile" and target == "sm_80")
