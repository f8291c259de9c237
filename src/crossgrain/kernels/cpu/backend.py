"""The CPU backend: chooses a kernel for what it can do fast, and asks the reference for the rest.

Both give the same bytes, so which one ran shows only in the time it took.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...formats import E2M1, E4M3
from ...plane import COLUMNWISE, ROWWISE, Plane
from ..reference import ReferenceBackend
from ..reference.hadamard import unrotate
from ..target import Target
from . import columns, fp8_tiles, nvfp4_columns, rows
from .decoders import decoder
from .elements import INFINITY_BITS, element_tag
from .runtime import kernel, run_ranges
from .support import (
    from_bits,
    global_scales,
    has_memory,
    is_cast,
    is_fp8_tiled,
    is_mxfp8,
    is_mxfp8_columns,
    is_mxfp8_rows,
    is_nvfp4_columns,
    is_nvfp4_rows,
    is_readable,
    is_row_cast,
    is_standard,
    keys_of,
    one_per_direction,
    readable_memory,
    reciprocal,
    row_bytes,
    scales_of,
    tag_of_input,
    tag_of_plane,
    yes_or_no,
)
from .tags import NO, YES, Tag

_STREAM_FROM = 1 << 20  # elements of a result that does not fit the caches anyway
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
            elif is_standard(target.plane) and is_nvfp4_columns(target) and is_readable(x) and x.numel():
                measured.append(self._rotated_amax(readable_memory(x), target))
            else:
                measured.extend(super().measure(x, [target]))
        return measured

    def amax(self, x: Tensor) -> Tensor:
        if not is_readable(x) or x.numel() == 0:
            return super().amax(x)
        source = readable_memory(x)
        for with_nan in (NO, YES):

            def work(first: int, last: int, with_nan: Tag = with_nan) -> int:
                arguments = (source.data_ptr(), first, last, tag_of_input(source), with_nan, NO)
                return int(kernel(rows.amax_bits, *arguments)(*arguments))

            bits = max(run_ranges(work, source.numel(), source.numel()))
            if bits <= INFINITY_BITS:
                break
        return from_bits(bits)

    def _rotated_amax(self, x: Tensor, target: Target) -> Tensor | None:
        height, width = target.plane.shape

        def work(first: int, last: int) -> int:
            scratch = torch.empty(16 * 16, dtype=torch.float32, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(), first, last, width, scratch.data_ptr(),
                tag_of_input(x), Tag(str(target.plane.format.rotation)),
            )  # fmt: skip
            return int(kernel(nvfp4_columns.rotated_amax, *arguments)(*arguments))

        bits = max(run_ranges(work, height // 16, x.numel()))
        return super().measure(x, [target])[0] if bits > INFINITY_BITS else from_bits(bits)

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> None:
        if not is_readable(x) or not all(has_memory(b) for target in targets for b in target.plane.buffers()):
            super().encode(x, targets, seed)
            return
        # fp16 goes through fp32, but for the scales that depend on the range of the input's dtype.
        bound_to_dtype = [t for t in targets if x.dtype == torch.float16 and t.encoding.format.scale_rule == "fp32"]
        slow = [t for t in targets if t in bound_to_dtype or not is_standard(t.plane) or not _has_usable_amax(t)]
        source, left = readable_memory(x), [target for target in targets if target not in slow]
        left = self._encode_nvfp4_columns(source, left, seed)
        left = self._encode_mx_together(source, left)
        left = self._encode_mx_tiles(source, left)
        left = self._encode_fp8_tiles(source, left)
        left = [target for target in left if not self._encode_alone(source, target, seed)]
        super().encode(x, left + slow, seed)

    def _encode_mx_together(self, x: Tensor, targets: list[Target]) -> list[Target]:
        """MXFP8 columnwise, with MXFP8 rowwise in the same pass if that is wanted too; returns the rest."""
        column = next((target for target in targets if is_mxfp8_columns(target)), None)
        if column is None:
            return targets
        row = next((target for target in targets if is_mxfp8_rows(target)), None)
        plane = column.plane
        height, width = plane.shape
        beside = (row or column).plane
        strip = min(_STRIP_WIDTH, width)

        def work(first: int, last: int) -> None:
            scratch = torch.empty(33 * strip, dtype=torch.float32, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
                beside.data.data_ptr(), width, scales_of(beside).data_ptr(), scales_of(beside).stride(0),
                first, last, width, strip, scratch.data_ptr(),
                tag_of_input(x), tag_of_plane(plane), tag_of_plane(beside), row is not None, NO, YES,
            )  # fmt: skip
            kernel(columns.mx_columns, *arguments)(*arguments)

        run_ranges(work, height // 32, x.numel())
        return [target for target in targets if target is not column and target is not row]

    def _encode_alone(self, x: Tensor, target: Target, seed: int | None) -> bool:
        if is_mxfp8_rows(target):
            self._encode_mx_rows(x, target.plane)
        elif is_cast(target):
            self._cast(x, target)
        elif is_nvfp4_rows(target):
            return self._encode_nvfp4_rows(x, target, seed)
        else:
            return False
        return True

    def _encode_nvfp4_columns(self, x: Tensor, targets: list[Target], seed: int | None) -> list[Target]:
        """NVFP4 columnwise, with a rowwise MXFP8 or per-tensor FP8 plane in the same pass; returns the rest."""
        column = next((target for target in targets if is_nvfp4_columns(target)), None)
        if column is None:
            return targets
        row = next((target for target in targets if is_mxfp8_rows(target) or is_row_cast(target)), None)
        plane, amax = column.plane, column.amax
        assert amax is not None and plane.amax is not None
        height, width = plane.shape
        strip = width if width < 64 else max(w for w in range(32, _TILE_WIDTH + 1, 32) if w <= width)
        encode_scale, decode_scale = (float(scale.item()) for scale in global_scales(column))
        key0, key1 = keys_of(seed, column)
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
                plane.data.data_ptr(), height // 2, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
                encode_scale, decode_scale,
                beside.data.data_ptr(), width, scales_of(beside).data_ptr(), scales_of(beside).stride(0), factor,
                first, last, height, width, strip, scratch.data_ptr(), key0, key1, plane.format.block_rows > 1,
                tag_of_input(x), rotation, element_tag(E4M3), element_tag(E2M1), yes_or_no(column.encoding.stochastic),
                kind, tag_of_plane(beside), NO, YES,
            )  # fmt: skip
            return bool(kernel(nvfp4_columns.columns, *arguments)(*arguments))

        if not all(run_ranges(work, -(-height // 128), x.numel())):
            return targets
        plane.amax.copy_(amax)
        if kind is _CAST:
            scales_of(beside).fill_(reciprocal(factor))
        return [target for target in targets if target is not column and target is not row]

    def _encode_mx_tiles(self, x: Tensor, targets: list[Target]) -> list[Target]:
        """MXFP8 with 32x32 tiles, in one or both directions; returns the rest."""
        group = [target for target in targets if is_mxfp8(target, (32, 32))]
        group = one_per_direction([target for target in group if target.encoding == group[0].encoding])
        if not group:
            return targets
        planes = {target.plane.direction: target.plane for target in group}
        first_plane = group[0].plane
        row, column = planes.get(ROWWISE, first_plane), planes.get(COLUMNWISE, first_plane)
        height, width = first_plane.shape

        def work(first: int, last: int) -> None:
            arguments = (
                x.data_ptr(), width * x.element_size(), row.data.data_ptr(), column.data.data_ptr(),
                scales_of(row).data_ptr(), scales_of(row).stride(0),
                scales_of(column).data_ptr(), scales_of(column).stride(0),
                first, last, width, ROWWISE in planes, COLUMNWISE in planes,
                tag_of_input(x), tag_of_plane(first_plane), NO, YES,
            )  # fmt: skip
            kernel(columns.mx_tiles, *arguments)(*arguments)

        run_ranges(work, height // 32, x.numel())
        return [target for target in targets if target not in group]

    def _encode_fp8_tiles(self, x: Tensor, targets: list[Target]) -> list[Target]:
        """FP8 with block scales, or transposed per-tensor FP8, in one or both directions; returns the rest."""
        first = next((target for target in targets if is_fp8_tiled(target)), None)
        if first is None:
            return targets
        group = one_per_direction([t for t in targets if is_fp8_tiled(t, beside=first)])
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
                scales_of(to_row).data_ptr(), row_bytes(scales_of(to_row)),
                scales_of(to_column).data_ptr(), row_bytes(scales_of(to_column)),
                begin, end, height, width, factor, float(encoding.epsilon), largest_code,
                float(torch.finfo(x.dtype).max), scratch.data_ptr(),
                row is not None, column is not None, fmt.block == (1, 128), fmt.block == (128, 128),
                tag_of_input(x), tag_of_plane(first.plane), yes_or_no(encoding.power_of_two), NO, YES,
            )  # fmt: skip
            kernel(fp8_tiles.tiles, *arguments)(*arguments)

        run_ranges(work, -(-height // fp8_tiles.SIDE), x.numel())
        if fmt.block is None:
            scales_of(first.plane).fill_(reciprocal(factor))
            for target in group:
                scales_of(target.plane).copy_(scales_of(first.plane))
        return [target for target in targets if target not in group]

    def _encode_mx_rows(self, x: Tensor, plane: Plane) -> None:
        height, width = plane.shape

        def work(first: int, last: int) -> None:
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
                first, last, width, tag_of_input(x), tag_of_plane(plane), NO, YES,
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
                tag_of_input(x),
                tag_of_plane(plane),
                YES,
            )
            kernel(rows.cast, *arguments)(*arguments)

        run_ranges(work, x.numel(), x.numel())
        scales_of(plane).fill_(reciprocal(factor))

    def _tensor_factor(self, target: Target) -> float:
        """The encode scale of a per-tensor format: given, or from the current amax."""
        return float((self.tensor_scale(target) if target.scale is None else target.scale).item())

    def _encode_nvfp4_rows(self, x: Tensor, target: Target, seed: int | None) -> bool:
        plane, amax, stochastic = target.plane, target.amax, target.encoding.stochastic
        assert amax is not None and plane.amax is not None
        height, width = plane.shape
        encode_scales, decode_scales = global_scales(target)
        step = 4 if plane.format.global_amax == "row" else 0
        key0, key1 = keys_of(seed, target)

        def work(first: int, last: int) -> bool:
            scratch = torch.empty(192, dtype=torch.uint8, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width // 2, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
                encode_scales.data_ptr(), decode_scales.data_ptr(), step,
                first, last, width, scratch.data_ptr(), key0, key1,
                tag_of_input(x), element_tag(E4M3), element_tag(E2M1), yes_or_no(stochastic), stochastic, NO, YES,
            )  # fmt: skip
            return bool(kernel(rows.nvfp4_rows, *arguments)(*arguments))

        def work_on_tiles(first: int, last: int) -> bool:
            scratch = torch.empty(96, dtype=torch.uint8, device="cpu")
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width // 2, scales_of(plane).data_ptr(), scales_of(plane).stride(0),
                float(encode_scales.item()), float(decode_scales.item()), first, last, width, scratch.data_ptr(),
                tag_of_input(x), element_tag(E4M3), element_tag(E2M1), NO,
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
        if not plane.data.is_contiguous() or not all(map(has_memory, plane.buffers())):
            return None
        if plane.scale is None or not is_standard(plane):
            return None
        if plane.format.block is not None and plane.scale.stride(-1) != 1:
            return None
        height, width = plane.operand_shape if plane.transposed else plane.shape
        work = decoder(plane, width)
        if work is None:
            return None
        if workspace is None:
            out = torch.empty(height, width, dtype=torch.float32, device="cpu")
        else:
            out = workspace[: height * width].view(height, width)
        aligned = width % 16 == 0 and out.data_ptr() % 64 == 0
        streaming = yes_or_no(out.numel() >= _STREAM_FROM and aligned)
        flat = plane.format.block is None
        run_ranges(lambda first, last: work(out, first, last, streaming), out.numel() if flat else height, out.numel())
        return out


def _has_usable_amax(target: Target) -> bool:
    """One amax for each row of a row-scaled plane, and no NaN: the reference would spread what is there."""
    amax, kind = target.amax, target.encoding.format.global_amax
    if kind is None:
        return True
    count = target.plane.operand_shape[0] if kind == "row" else 1
    return amax is not None and amax.numel() == count and not amax.isnan().any()
