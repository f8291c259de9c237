"""The CPU backend: chooses a kernel for what it can do fast, and asks the reference for the rest.

Both give the same bytes, so which one ran shows only in the time it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...formats import E2M1, E4M3, E5M2
from ...plane import COLUMNWISE, ROWWISE, Plane
from ..reference import ReferenceBackend
from ..reference.hadamard import unrotate
from ..reference.random_bits import stream_keys
from ..reference.scaling import global_scale
from ..target import Target
from . import columns, decode, fp8_tiles, nvfp4_columns, rows
from .elements import INFINITY_BITS, element_tag
from .runtime import kernel, run_ranges
from .tags import BF16, F32, NO, YES, Tag

_STREAM_FROM = 1 << 20  # elements of a result that does not fit the caches anyway
_MOST_COUNTERS = 1 << 33  # elements whose random words, four to one, are counted in 32 bits
_TILE_WIDTH = 512  # columns of a tile of the transposed planes
_STRIP_WIDTH = 512  # columns of a strip: 32 rows of them stay in the second-level cache

_NONE, _MX, _CAST = Tag("none"), Tag("mx"), Tag("cast")


class CpuBackend(ReferenceBackend):
    """Vector kernels where there is one, the reference elsewhere."""

    name = "cpu"

    # ---- encoding ------------------------------------------------------------------------------

    def measure(self, x: Tensor, targets: Sequence[Target]) -> list[Tensor | None]:
        whole: Tensor | None = None
        measured: list[Tensor | None] = []
        for target in targets:
            fmt = target.plane.format
            of_tensor = fmt.global_amax == "tensor" or (fmt.block is None and not fmt.is_identity)
            if of_tensor and fmt.rotation is None:
                whole = self.amax(x) if whole is None else whole
                measured.append(whole.clone())
            elif _is_nvfp4_columns(target) and _readable(x) and x.numel():
                measured.append(self._rotated_amax(_contiguous(x), target))
            else:
                measured.extend(super().measure(x, [target]))
        return measured

    def amax(self, x: Tensor) -> Tensor:
        if not _readable(x) or x.numel() == 0:
            return super().amax(x)
        source = _contiguous(x)
        for with_nan in (NO, YES):

            def work(first: int, last: int, with_nan: Tag = with_nan) -> int:
                arguments = (source.data_ptr(), first, last, _dtype_tag(source), with_nan, NO)
                return int(kernel(rows.amax_bits, *arguments)(*arguments))

            bits = max(run_ranges(work, source.numel(), source.numel()))
            if bits <= INFINITY_BITS:
                break
        return _from_bits(bits)

    def _rotated_amax(self, x: Tensor, target: Target) -> Tensor | None:
        height, width = target.plane.shape

        def work(first: int, last: int) -> int:
            scratch = torch.empty(16 * 16, dtype=torch.float32, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(), first, last, width, scratch.data_ptr(),
                _dtype_tag(x), Tag(str(target.plane.format.rotation)),
            )  # fmt: skip
            return int(kernel(nvfp4_columns.rotated_amax, *arguments)(*arguments))

        bits = max(run_ranges(work, height // 16, x.numel()))
        return super().measure(x, [target])[0] if bits > INFINITY_BITS else _from_bits(bits)

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> None:
        left = list(targets)
        if _readable(x) and x.numel():
            source = _contiguous(x)
            left = self._encode_nvfp4_columns(source, left, seed)
            left = self._encode_mx_together(source, left)
            left = self._encode_mx_tiles(source, left)
            left = self._encode_fp8_tiles(source, left)
            left = [target for target in left if not self._encode_alone(source, target, seed)]
        super().encode(x, left, seed)

    def _encode_mx_together(self, x: Tensor, targets: list[Target]) -> list[Target]:
        """MXFP8 columnwise, with MXFP8 rowwise in the same pass if that is wanted too; returns the rest."""
        column = next((target for target in targets if _is_mxfp8_columns(target)), None)
        if column is None:
            return targets
        row = next((target for target in targets if _is_mxfp8_rows(target)), None)
        plane = column.plane
        height, width = plane.shape
        beside = (row or column).plane
        strip = min(_STRIP_WIDTH, width)

        def work(first: int, last: int) -> None:
            scratch = torch.empty(33 * strip, dtype=torch.float32, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width, _scales(plane).data_ptr(), _scales(plane).stride(0),
                beside.data.data_ptr(), width, _scales(beside).data_ptr(), _scales(beside).stride(0),
                first, last, width, strip, scratch.data_ptr(),
                _dtype_tag(x), _element_tag(plane), _element_tag(beside), row is not None, NO, YES,
            )  # fmt: skip
            kernel(columns.mx_columns, *arguments)(*arguments)

        run_ranges(work, height // 32, x.numel())
        return [target for target in targets if target is not column and target is not row]

    def _encode_alone(self, x: Tensor, target: Target, seed: int | None) -> bool:
        if _is_mxfp8_rows(target):
            self._encode_mx_rows(x, target.plane)
        elif _is_cast(target):
            self._cast(x, target)
        elif _is_nvfp4_rows(target):
            return self._encode_nvfp4_rows(x, target, seed)
        else:
            return False
        return True

    def _encode_nvfp4_columns(self, x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
        """NVFP4 columnwise, with a rowwise MXFP8 or per-tensor FP8 plane in the same pass; returns the rest."""
        column = next((target for target in targets if _is_nvfp4_columns(target)), None)
        if column is None:
            return targets
        row = next((target for target in targets if _is_mxfp8_rows(target) or _is_row_cast(target)), None)
        plane, amax = column.plane, column.amax
        assert amax is not None and plane.amax is not None
        height, width = plane.shape
        strip = width if width < 64 else max(w for w in range(32, _TILE_WIDTH + 1, 32) if w <= width)
        encode_scale, decode_scale = (float(scale.item()) for scale in _global_scales(column))
        key0, key1 = _stream_keys(seed, column)
        beside = (row or column).plane
        kind, factor = _NONE, 1.0
        if row is not None and row.plane.format.block is None:
            kind, factor = _CAST, self._tensor_factor(row)
        elif row is not None:
            kind = _MX
        rotation = _NONE if plane.format.rotation is None else Tag(str(plane.format.rotation))

        def work(first: int, last: int) -> bool:
            scratch = torch.empty((16 * 4 + 64 + 8) * strip, dtype=torch.uint8, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), height // 2, _scales(plane).data_ptr(), _scales(plane).stride(0),
                encode_scale, decode_scale,
                beside.data.data_ptr(), width, _scales(beside).data_ptr(), _scales(beside).stride(0), factor,
                first, last, height, width, strip, scratch.data_ptr(), key0, key1, plane.format.block_rows > 1,
                _dtype_tag(x), rotation, element_tag(E4M3), element_tag(E2M1), _yes_or_no(column.encoding.stochastic),
                kind, _element_tag(beside), NO, YES,
            )  # fmt: skip
            return bool(kernel(nvfp4_columns.columns, *arguments)(*arguments))

        if not all(run_ranges(work, -(-height // 128), x.numel())):
            return targets
        plane.amax.copy_(amax)
        if kind is _CAST:
            _scales(beside).fill_(_reciprocal(factor))
        return [target for target in targets if target is not column and target is not row]

    def _encode_mx_tiles(self, x: Tensor, targets: list[Target]) -> list[Target]:
        """MXFP8 with 32x32 tiles, in one or both directions; returns the rest."""
        group = [target for target in targets if _is_mxfp8(target, (32, 32))]
        group = [target for target in group if target.encoding == group[0].encoding]
        if not group:
            return targets
        planes = {target.plane.direction: target.plane for target in group}
        first_plane = group[0].plane
        row, column = planes.get(ROWWISE, first_plane), planes.get(COLUMNWISE, first_plane)
        height, width = first_plane.shape

        def work(first: int, last: int) -> None:
            arguments = (
                x.data_ptr(), width * x.element_size(), row.data.data_ptr(), column.data.data_ptr(),
                _scales(row).data_ptr(), _scales(row).stride(0), _scales(column).data_ptr(), _scales(column).stride(0),
                first, last, width, ROWWISE in planes, COLUMNWISE in planes,
                _dtype_tag(x), _element_tag(first_plane), NO, YES,
            )  # fmt: skip
            kernel(columns.mx_tiles, *arguments)(*arguments)

        run_ranges(work, height // 32, x.numel())
        return [target for target in targets if target not in group]

    def _encode_fp8_tiles(self, x: Tensor, targets: list[Target]) -> list[Target]:
        """FP8 with block scales, or transposed per-tensor FP8, in one or both directions; returns the rest."""
        first = next((target for target in targets if _is_fp8_tiled(target)), None)
        if first is None:
            return targets
        group = [t for t in targets if _is_fp8_tiled(t, beside=first)]
        row = next((t.plane for t in group if t.plane.direction is ROWWISE), None)
        column = next((t.plane for t in group if t.plane.direction is COLUMNWISE), None)
        fmt, encoding = first.plane.format, first.encoding
        assert fmt.element is not None
        height, width = first.plane.shape
        factor = self._tensor_factor(first) if fmt.block is None else 1.0
        largest_code = fmt.element.max
        to_row, to_column = row or first.plane, column or first.plane

        def work(begin: int, end: int) -> None:
            scratch = torch.empty(fp8_tiles.SCRATCH_BYTES, dtype=torch.uint8, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(),
                to_row.data.data_ptr(), width, to_column.data.data_ptr(), height,
                _scales(to_row).data_ptr(), _row_bytes(_scales(to_row)),
                _scales(to_column).data_ptr(), _row_bytes(_scales(to_column)),
                begin, end, height, width, factor, float(encoding.epsilon), largest_code,
                float(torch.finfo(x.dtype).max), scratch.data_ptr(),
                row is not None, column is not None, fmt.block == (1, 128), fmt.block == (128, 128),
                _dtype_tag(x), _element_tag(first.plane), _yes_or_no(encoding.power_of_two), NO, YES,
            )  # fmt: skip
            kernel(fp8_tiles.tiles, *arguments)(*arguments)

        run_ranges(work, -(-height // fp8_tiles.SIDE), x.numel())
        if fmt.block is None:
            _scales(first.plane).fill_(_reciprocal(factor))
            for target in group:
                _scales(target.plane).copy_(_scales(first.plane))
        return [target for target in targets if target not in group]

    def _encode_mx_rows(self, x: Tensor, plane: Plane) -> None:
        height, width = plane.shape

        def work(first: int, last: int) -> None:
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width, _scales(plane).data_ptr(), _scales(plane).stride(0),
                first, last, width, _dtype_tag(x), _element_tag(plane), NO, YES,
            )  # fmt: skip
            kernel(rows.mx_rows, *arguments)(*arguments)

        run_ranges(work, height, x.numel())

    def _cast(self, x: Tensor, target: Target) -> None:
        plane, factor = target.plane, self._tensor_factor(target)

        def work(first: int, last: int) -> None:
            arguments = (
                x.data_ptr(),
                plane.data.data_ptr(),
                factor,
                first,
                last,
                _dtype_tag(x),
                _element_tag(plane),
                YES,
            )
            kernel(rows.cast, *arguments)(*arguments)

        run_ranges(work, x.numel(), x.numel())
        _scales(plane).fill_(_reciprocal(factor))

    def _tensor_factor(self, target: Target) -> float:
        """The encode scale of a per-tensor format: given, or from the current amax."""
        return float((self.tensor_scale(target) if target.scale is None else target.scale).item())

    def _encode_nvfp4_rows(self, x: Tensor, target: Target, seed: int | None) -> bool:
        plane, amax, stochastic = target.plane, target.amax, target.encoding.stochastic
        assert amax is not None and plane.amax is not None
        height, width = plane.shape
        encode_scales, decode_scales = _global_scales(target)
        step = 4 if plane.format.global_amax == "row" else 0
        key0, key1 = _stream_keys(seed, target)

        def work(first: int, last: int) -> bool:
            scratch = torch.empty(192, dtype=torch.uint8, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width // 2, _scales(plane).data_ptr(), _scales(plane).stride(0),
                encode_scales.data_ptr(), decode_scales.data_ptr(), step,
                first, last, width, scratch.data_ptr(), key0, key1,
                _dtype_tag(x), element_tag(E4M3), element_tag(E2M1), _yes_or_no(stochastic), stochastic, NO, YES,
            )  # fmt: skip
            return bool(kernel(rows.nvfp4_rows, *arguments)(*arguments))

        def work_on_tiles(first: int, last: int) -> bool:
            scratch = torch.empty(96, dtype=torch.uint8, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width // 2, _scales(plane).data_ptr(), _scales(plane).stride(0),
                float(encode_scales.item()), float(decode_scales.item()), first, last, width, scratch.data_ptr(),
                _dtype_tag(x), element_tag(E4M3), element_tag(E2M1), NO,
            )  # fmt: skip
            return bool(kernel(rows.nvfp4_tile_rows, *arguments)(*arguments))

        tiles = plane.format.block_rows > 1
        done = run_ranges(work_on_tiles if tiles else work, height // plane.format.block_rows, x.numel())
        if not all(done):
            return False
        plane.amax.copy_(amax)
        return True

    # ---- decoding ------------------------------------------------------------------------------

    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        decoded = self._decode_fast(plane)
        if decoded is None:
            return super().decode(plane, dtype)
        if plane.format.rotation is not None:
            decoded = unrotate(decoded, plane.format.rotation)
        return (decoded.t() if plane.transposed else decoded).to(dtype).contiguous()

    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor:
        decoded = self._decode_fast(plane, workspace)
        if decoded is None:
            return super().decode_operand(plane, workspace)
        return decoded if plane.direction is ROWWISE or plane.transposed else decoded.t()

    def _decode_fast(self, plane: Plane, workspace: Tensor | None = None) -> Tensor | None:
        """The plane as it lies, in fp32: the operand, or [M, K] if it is stored so. None: there is no kernel."""
        if type(plane.data) is not Tensor or not plane.data.is_contiguous() or plane.data.numel() == 0:
            return None
        if plane.scale is None or plane.scale.stride(-1) != 1:
            return None
        height, width = plane.operand_shape if plane.transposed else plane.shape
        work = self._decoder(plane, width)
        if work is None:
            return None
        if workspace is None:
            out = torch.empty(height, width, dtype=torch.float32, device="cpu")
        else:
            out = workspace[: height * width].view(height, width)
        aligned = width % 16 == 0 and out.data_ptr() % 64 == 0
        streaming = _yes_or_no(out.numel() >= _STREAM_FROM and aligned)
        flat = plane.format.block is None
        run_ranges(lambda first, last: work(out, first, last, streaming), out.numel() if flat else height, out.numel())
        return out

    def _decoder(self, plane: Plane, width: int) -> Callable[[Tensor, int, int, Tag], None] | None:
        """What decodes rows ``first:last`` of the plane as it lies (elements, for per-tensor scales)."""
        fmt = plane.format
        if fmt.element in (E4M3, E5M2) and fmt.block is None:
            factor = float(_scales(plane).item())

            def per_tensor(out: Tensor, first: int, last: int, streaming: Tag) -> None:
                # Ranges of a streamed result start on a cache line.
                first, last = (at if at == out.numel() else at // 64 * 64 for at in (first, last))
                arguments = (plane.data.data_ptr(), out.data_ptr(), factor, first, last, _element_tag(plane), streaming)
                kernel(decode.scaled, *arguments)(*arguments)

            return per_tensor
        if fmt.element in (E4M3, E5M2) and fmt.scale_rule == "e8m0_up" and fmt.block_length == 32 and width % 32 == 0:
            which = decode.mx_rows if plane.direction is ROWWISE else decode.mx_columns

            def mx(out: Tensor, first: int, last: int, streaming: Tag) -> None:
                arguments = (
                    plane.data.data_ptr(), width, _scales(plane).data_ptr(), _scales(plane).stride(0),
                    out.data_ptr(), first, last, width, _element_tag(plane), streaming,
                )  # fmt: skip
                kernel(which, *arguments)(*arguments)

            return mx
        if fmt.element in (E4M3, E5M2) and fmt.scale_rule == "fp32" and fmt.block_length == 128:
            row_step, block_step = 4, _row_bytes(_scales(plane))
            if fmt.block_rows == 128:
                row_step, block_step = block_step, row_step

            def blocks(out: Tensor, first: int, last: int, streaming: Tag) -> None:
                arguments = (
                    plane.data.data_ptr(), width, _scales(plane).data_ptr(), row_step, block_step, fmt.block_rows,
                    out.data_ptr(), first, last, width, _element_tag(plane), streaming,
                )  # fmt: skip
                kernel(decode.block_rows, *arguments)(*arguments)

            return blocks
        if fmt.element == E2M1 and fmt.scale_rule == "two_level" and fmt.block_length == 16:
            amax = plane.amax
            assert amax is not None
            constant = float(np.float32(1.0 / (E2M1.max * fmt.scale_bound)))

            def nvfp4(out: Tensor, first: int, last: int, streaming: Tag) -> None:
                table = torch.empty(320, dtype=torch.float32, device="cpu")
                table.view(torch.uint8)[1024:] = torch.arange(256, dtype=torch.uint8, device="cpu")
                arguments = (
                    plane.data.data_ptr(), width // 2, _scales(plane).data_ptr(), _scales(plane).stride(0),
                    amax.data_ptr(), 4 if fmt.global_amax == "row" else 0, constant,
                    out.data_ptr(), first, last, width, table.data_ptr(),
                    element_tag(E4M3), element_tag(E2M1), streaming,
                )  # fmt: skip
                kernel(decode.nvfp4_rows, *arguments)(*arguments)

            return nvfp4
        return None


def _from_bits(bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.int32, device="cpu").view(torch.float32)


def _reciprocal(factor: float) -> float:
    return float(np.float32(1.0) / np.float32(factor))


def _yes_or_no(condition: bool) -> Tag:
    return YES if condition else NO


def _global_scales(target: Target) -> tuple[Tensor, Tensor]:
    """Global encode scale over the largest code, and global decode scale; one, or one per row."""
    assert target.amax is not None
    scale = global_scale(target.amax, target.encoding.format)
    sixth = torch.tensor(1.0 / E2M1.max, dtype=torch.float32, device="cpu")
    return (scale.encode * sixth).contiguous(), scale.decode.contiguous()


def _stream_keys(seed: int | None, target: Target) -> tuple[int, int]:
    return (0, 0) if seed is None else stream_keys(seed, target.plane.direction)


def _readable(x: Tensor) -> bool:
    # Only real memory: tensors that are traced have none.
    return x.dtype in (torch.float32, torch.bfloat16) and type(x) is Tensor


def _contiguous(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def _dtype_tag(x: Tensor) -> Tag:
    return BF16 if x.dtype == torch.bfloat16 else F32


def _element_tag(plane: Plane) -> Tag:
    assert plane.format.element is not None
    return element_tag(plane.format.element)


def _scales(plane: Plane) -> Tensor:
    assert plane.scale is not None
    return plane.scale


def _is_mxfp8(target: Target, block: tuple[int, int]) -> bool:
    fmt, plane = target.encoding.format, target.plane
    return (
        fmt.element in (E4M3, E5M2)
        and fmt.block == block
        and fmt.scale_rule == "e8m0_up"
        and not target.encoding.stochastic
        and not plane.transposed
        and plane.data.is_contiguous()
        and _scales(plane).stride(1) == 1
        and plane.shape[1] % 32 == 0
    )


def _is_mxfp8_rows(target: Target) -> bool:
    return target.plane.direction is ROWWISE and _is_mxfp8(target, (1, 32))


def _is_mxfp8_columns(target: Target) -> bool:
    return target.plane.direction is COLUMNWISE and _is_mxfp8(target, (1, 32))


def _is_cast(target: Target) -> bool:
    fmt, plane = target.encoding.format, target.plane
    return (
        fmt.element in (E4M3, E5M2)
        and fmt.block is None
        and not target.encoding.stochastic
        and not plane.transposed
        and plane.data.is_contiguous()
    )


def _is_nvfp4_rows(target: Target) -> bool:
    fmt, encoding, plane = target.encoding.format, target.encoding, target.plane
    return (
        plane.direction is ROWWISE
        and fmt.element == E2M1
        and (fmt.block == (1, 16) or (fmt.block == (16, 16) and not encoding.stochastic))
        and fmt.scale_rule == "two_level"
        and fmt.rotation is None
        and encoding.four_over_six is None
        and plane.data.is_contiguous()
        and _scales(plane).stride(1) == 1
        and plane.shape[0] * plane.shape[1] < _MOST_COUNTERS
    )


def _is_nvfp4_columns(target: Target) -> bool:
    fmt, encoding, plane = target.encoding.format, target.encoding, target.plane
    return (
        plane.direction is COLUMNWISE
        and fmt.element == E2M1
        and fmt.block in ((1, 16), (16, 16))
        and fmt.scale_rule == "two_level"
        and fmt.global_amax == "tensor"
        and encoding.four_over_six is None
        and plane.transposed
        and plane.data.is_contiguous()
        and _scales(plane).stride(1) == 1
        and plane.shape[1] >= 32
        and plane.shape[0] * plane.shape[1] < _MOST_COUNTERS
    )


def _is_fp8_tiled(target: Target, beside: Target | None = None) -> bool:
    """Block scales of 128, or per-tensor FP8 stored transposed; ``beside``: what goes with it in one pass."""
    fmt, plane = target.encoding.format, target.plane
    suits = (
        fmt.element in (E4M3, E5M2)
        and fmt.scale_rule == "fp32"
        and fmt.block in (None, (1, 128), (128, 128))
        and not target.encoding.stochastic
        and (plane.direction is ROWWISE or plane.transposed)
        and plane.data.is_contiguous()
        and (fmt.block is None or _scales(plane).stride(1) == 1)
    )
    if beside is None:
        return suits and (fmt.block is not None or plane.direction is COLUMNWISE)
    same_scale = target.scale is beside.scale and (fmt.block is not None or _same(target.amax, beside.amax))
    return suits and target.encoding == beside.encoding and same_scale


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _row_bytes(scales: Tensor) -> int:
    return scales.stride(0) * scales.element_size()


def _is_row_cast(target: Target) -> bool:
    return target.plane.direction is ROWWISE and _is_cast(target)
