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
from ..reference.scaling import global_scale
from ..target import Target
from . import columns, decode, rows
from .elements import INFINITY_BITS, element_tag
from .runtime import kernel, run_ranges
from .tags import BF16, F32, NO, YES, Tag

_STREAM_FROM = 1 << 20  # elements of a result that does not fit the caches anyway
_STRIP_WIDTH = 512  # columns of a strip: 32 rows of them stay in the second-level cache


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
        return torch.tensor([bits], dtype=torch.int32).view(torch.float32)

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> None:
        left = list(targets)
        if _readable(x) and x.numel():
            source = _contiguous(x)
            left = self._encode_mx_together(source, left)
            left = [target for target in left if not self._encode_alone(source, target)]
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
            scratch = torch.empty(33 * strip, dtype=torch.float32)
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

    def _encode_alone(self, x: Tensor, target: Target) -> bool:
        if _is_mxfp8_rows(target):
            self._encode_mx_rows(x, target.plane)
        elif _is_cast(target):
            self._cast(x, target)
        elif _is_nvfp4_rows(target):
            self._encode_nvfp4_rows(x, target)
        else:
            return False
        return True

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
        plane = target.plane
        scale = self.tensor_scale(target) if target.scale is None else target.scale
        factor = float(scale.item())

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
        _scales(plane).fill_(float(np.float32(1.0) / np.float32(factor)))

    def _encode_nvfp4_rows(self, x: Tensor, target: Target) -> None:
        plane, amax = target.plane, target.amax
        assert amax is not None and plane.amax is not None
        height, width = plane.shape
        scale = global_scale(amax, plane.format)
        sixth = torch.tensor(1.0 / E2M1.max, dtype=torch.float32)
        encode_scales, decode_scales = (scale.encode * sixth).contiguous(), scale.decode.contiguous()
        step = 4 if plane.format.global_amax == "row" else 0

        def work(first: int, last: int) -> None:
            scratch = torch.empty(64, dtype=torch.uint8)
            arguments = (
                x.data_ptr(), width * x.element_size(),
                plane.data.data_ptr(), width // 2, _scales(plane).data_ptr(), _scales(plane).stride(0),
                encode_scales.data_ptr(), decode_scales.data_ptr(), step,
                first, last, width, scratch.data_ptr(),
                _dtype_tag(x), element_tag(E4M3), element_tag(E2M1), NO, YES,
            )  # fmt: skip
            kernel(rows.nvfp4_rows, *arguments)(*arguments)

        run_ranges(work, height, x.numel())
        plane.amax.copy_(amax)

    # ---- decoding ------------------------------------------------------------------------------

    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        decoded = self._decode_fast(plane)
        return super().decode(plane, dtype) if decoded is None else decoded.to(dtype)

    def decode_operand(self, plane: Plane) -> Tensor:
        decoded = self._decode_fast(plane)
        if decoded is None:
            return super().decode_operand(plane)
        return decoded if plane.direction is ROWWISE else decoded.t()

    def _decode_fast(self, plane: Plane) -> Tensor | None:
        """The matrix [M, K] in fp32, or None if there is no kernel for this plane."""
        if type(plane.data) is not Tensor or not plane.data.is_contiguous() or plane.data.numel() == 0:
            return None
        if plane.transposed:
            return None
        work = self._decoder(plane)
        if work is None:
            return None
        height, width = plane.shape
        out = torch.empty(height, width)
        streaming = YES if out.numel() >= _STREAM_FROM and width % 16 == 0 and out.data_ptr() % 64 == 0 else NO
        flat = plane.format.block is None
        run_ranges(lambda first, last: work(out, first, last, streaming), out.numel() if flat else height, out.numel())
        return out

    def _decoder(self, plane: Plane) -> Callable[[Tensor, int, int, Tag], None] | None:
        fmt, width = plane.format, plane.shape[1]
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
        if fmt.element == E2M1 and fmt.scale_rule == "two_level" and fmt.block_length == 16:
            amax = plane.amax
            assert amax is not None
            constant = float(np.float32(1.0 / (E2M1.max * fmt.scale_bound)))

            def nvfp4(out: Tensor, first: int, last: int, streaming: Tag) -> None:
                table = torch.empty(320, dtype=torch.float32)
                table.view(torch.uint8)[1024:] = torch.arange(256, dtype=torch.uint8)
                arguments = (
                    plane.data.data_ptr(), width // 2, _scales(plane).data_ptr(), _scales(plane).stride(0),
                    amax.data_ptr(), 4 if fmt.global_amax == "row" else 0, constant,
                    out.data_ptr(), first, last, width, table.data_ptr(),
                    element_tag(E4M3), element_tag(E2M1), streaming,
                )  # fmt: skip
                kernel(decode.nvfp4_rows, *arguments)(*arguments)

            return nvfp4
        return None


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


def _is_plain_mxfp8(target: Target) -> bool:
    fmt, plane = target.encoding.format, target.plane
    return (
        fmt.element in (E4M3, E5M2)
        and fmt.block == (1, 32)
        and fmt.scale_rule == "e8m0_up"
        and not target.encoding.stochastic
        and not plane.transposed
        and plane.data.is_contiguous()
        and _scales(plane).stride(1) == 1
        and plane.shape[1] % 32 == 0
    )


def _is_mxfp8_rows(target: Target) -> bool:
    return target.plane.direction is ROWWISE and _is_plain_mxfp8(target)


def _is_mxfp8_columns(target: Target) -> bool:
    return target.plane.direction is COLUMNWISE and _is_plain_mxfp8(target)


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
        and fmt.block == (1, 16)
        and fmt.scale_rule == "two_level"
        and fmt.rotation is None
        and not encoding.stochastic
        and encoding.four_over_six is None
        and plane.data.is_contiguous()
        and _scales(plane).stride(1) == 1
    )
