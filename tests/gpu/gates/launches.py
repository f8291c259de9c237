"""The launches of kernels whose machine code is looked at: what the backend would launch for large matrices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from crossgrain.formats import DEFAULT_SIGN_MASK, get_format, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import GlobalScale, Target
from crossgrain.kernels.triton.backend import TritonBackend
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction, empty_plane

from ..kernels.emulated import traits_of

SHAPE = (256, 512)
BF16_BYTES = 2


@dataclass(frozen=True)
class Launch:
    """A launch.

    Attributes:
        kernel: the kernel.
        programs: number of programs.
        warps: warps of each.
        arguments: all arguments by name.
    """

    kernel: Any
    programs: int
    warps: int
    arguments: dict[str, Any]

    @property
    def elements(self) -> int:
        """Elements of the tile of a program."""
        rows = next(self.arguments[name] for name in ("BM", "BR") if name in self.arguments)
        return int(rows * next(self.arguments[name] for name in ("BK", "BC", "BN") if name in self.arguments))


@dataclass(frozen=True)
class Work:
    """Something that kernels do, in one launch.

    Attributes:
        name: its name in the table.
        run: does it with a backend.
        bytes: bytes that go through the memory of the GPU for each element, with bf16 numbers.
    """

    name: str
    run: Callable[[TritonBackend], object]
    bytes: float

    def launch(self, target: str) -> Launch:
        """The last launch, as it would be on a target."""
        launches: list[Launch] = []

        def record(kernel: Any, programs: int, device: torch.device, warps: int, arguments: dict[str, Any]) -> None:
            launches.append(Launch(kernel, programs, warps, arguments))

        self.run(TritonBackend(record, traits_of(target)))
        return launches[-1]


def _format(name: str) -> Any:
    return nvfp4_format(rotation=DEFAULT_SIGN_MASK) if name == "nvfp4_rht" else get_format(name)


def _plane_bytes(name: str) -> float:
    return float(_format(name).bits_per_element) / 8


def _encode(
    name: str, row: str | None, column: str | None, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Work:
    def run(backend: TritonBackend) -> None:
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
        targets = []
        for fmt, direction in ((row, ROWWISE), (column, COLUMNWISE)):
            if fmt is not None:
                plane = empty_plane(_format(fmt), direction, SHAPE, device=x.device)
                targets.append(Target(plane, Encoding(_format(fmt), **options), torch.full((1,), 5.0)))
        backend.encode(x, targets, 1 if options.get("stochastic") else None)

    return Work(name, run, dtype.itemsize + sum(_plane_bytes(fmt) for fmt in (row, column) if fmt is not None))


def _decode(name: str, fmt: str, direction: Direction) -> Work:
    def run(backend: TritonBackend) -> None:
        plane = empty_plane(_format(fmt), direction, SHAPE, device=torch.device("cpu"))
        for buffer in plane.buffers():
            buffer.zero_()
        backend.decode_bf16(plane)

    return Work(name, run, BF16_BYTES + _plane_bytes(fmt))


def _amax(backend: TritonBackend) -> None:
    backend.amax(torch.ones(SHAPE, dtype=torch.bfloat16))


def _epilogue(backend: TritonBackend) -> None:
    scale = GlobalScale(torch.ones(1), 1.0)
    out = torch.zeros(SHAPE, dtype=torch.bfloat16)
    backend.epilogue(torch.ones(SHAPE), out, scale, scale, 1.0, torch.ones(SHAPE[1]), None)


MXFP8_BOTH = _encode("MXFP8, both planes", "mxfp8", "mxfp8")
NVFP4_ROTATED = _encode("NVFP4 column, rotated, stochastic", None, "nvfp4_rht", stochastic=True)
MXFP8_DECODED = _decode("decode MXFP8, rowwise", "mxfp8", ROWWISE)
MXFP8_COLUMN_DECODED = _decode("decode MXFP8, columnwise", "mxfp8", COLUMNWISE)
FP8_DECODED = _decode("decode FP8, rowwise", "fp8", ROWWISE)
NVFP4_DECODED = _decode("decode NVFP4, rowwise", "nvfp4", ROWWISE)

WORK = (
    MXFP8_BOTH,
    _encode("MXFP8 2-D, both planes", "mxfp8_2d", "mxfp8_2d"),
    _encode("FP8, both planes", "fp8", "fp8"),
    _encode("FP8 1x128, both planes", "fp8_block", "fp8_block"),
    _encode("FP8 128x128, both planes", "fp8_block_2d", "fp8_block_2d"),
    _encode("MXFP4, both planes", "mxfp4", "mxfp4"),
    _encode("MXFP6, both planes", "mxfp6_e2m3", "mxfp6_e2m3"),
    _encode("MXINT8, both planes", "mxint8", "mxint8"),
    _encode("MXFP8 stochastic, both planes", "mxfp8", "mxfp8", stochastic=True),
    _encode("MXFP4 stochastic, both planes", "mxfp4", "mxfp4", stochastic=True),
    _encode("FP8 1x128 stochastic, both planes", "fp8_block", "fp8_block", stochastic=True),
    _encode("NVFP4 row", "nvfp4", None),
    NVFP4_ROTATED,
    _encode("NVFP4 row, and column rotated, stochastic", "nvfp4", "nvfp4_rht", stochastic=True),
    _encode("NVFP4 2-D, both planes", "nvfp4_2d", "nvfp4_2d"),
    _encode("NVFP4 4-over-6, row", "nvfp4_max256", None, four_over_six="MSE"),
    _encode("MXFP8 row, NVFP4 column rotated", "mxfp8", "nvfp4_rht"),
    Work("amax", _amax, BF16_BYTES),
    MXFP8_DECODED,
    MXFP8_COLUMN_DECODED,
    FP8_DECODED,
    NVFP4_DECODED,
    Work("end of a GEMM, bf16 result", _epilogue, 4 + BF16_BYTES),
)
