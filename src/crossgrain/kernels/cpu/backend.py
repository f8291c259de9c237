"""The CPU backend: it uses compiled kernels where there are some, and the reference for everything else.

Both give the same bytes, so only the time differs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...formats.encoding import Encoding
from ...planes import ROWWISE, Plane
from ...planes.groups import PlaneGroups
from ..backend import HalfStep, Plan, Plans, Seen, StepPlan
from ..reference import ReferenceBackend
from ..target import GroupedTarget, Target
from . import fingerprint, measure, products, runtime, turned
from .decoders import decoder
from .elements import INFINITY_BITS
from .encoders import Step, chosen_work
from .few_rows_products import multiply_few
from .known import is_known
from .places import GroupsAsOne, Ints, as_one, starts
from .plans import plan_for
from .programs import REFUSED
from .runtime import Arguments, PartOfGroups, kernel, run_groups, run_ranges
from .step_plans import step_plan_for
from .support import (
    Seed,
    all_have_memory,
    from_bits,
    has_memory,
    is_plain_memory,
    is_readable,
    is_standard,
    is_standard_format,
    plane_has_memory,
    readable_memory,
    same_amax,
    tag,
    tag_of_input,
    tensor_factor,
)
from .tags import F32, NO, YES, Tag
from .turned_decoders import turned_decoder
from .work import run_work

_STREAM_FROM = 1 << 20  # results of so many numbers do not fit into the caches, and are written past them


_MOST_KINDS = 4096  # kinds of work whose steps are cached, so that many shapes do not fill memory


class _Known(NamedTuple):
    """How a kind of work is done. Its key has the addresses of the encodings, so they are kept alive here."""

    steps: list[Step]
    encodings: list[Encoding]


_known: dict[Hashable, _Known] = {}  # for each kind of work that needs only compiled kernels


class CpuBackend(ReferenceBackend):
    """The backend for the CPU: compiled kernels where there are some, otherwise the reference."""

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
            elif fmt.global_amax is None or not is_readable(x) or not x.numel() or not is_standard(target.plane):
                measured.extend(super().measure(x, [target]))
            elif fmt.global_amax == "row":
                measured.append(_amax_of_each_row(readable_memory(x), target.plane))
            elif target.plane.transposed and target.plane.shape[1] >= 16:
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
                arguments = (source.data_ptr(), first, last, tag_of_input(source), with_nan)
                return int(kernel(measure.of_all, *arguments)(*arguments))

            bits = max(run_ranges(work, source.numel(), source.numel()))
            if bits <= INFINITY_BITS:
                break
        return from_bits(bits)

    def fingerprint(self, x: Tensor) -> bytes | None:
        size = x.numel() * x.element_size()
        if not is_readable(x) or not x.is_contiguous() or size % fingerprint.WORD:
            return None
        groups = size // fingerprint.GROUP
        chunks = -(-groups // fingerprint.CHUNK)
        states = torch.empty(chunks * fingerprint.GROUP, dtype=torch.uint8)

        def work(first: int, last: int) -> None:
            arguments = (x.data_ptr(), states.data_ptr(), first, last, groups, F32)
            kernel(fingerprint.of_chunks, *arguments)(*arguments)

        run_ranges(work, chunks, x.numel())
        ending = x.detach().view(-1)[groups * fingerprint.GROUP // x.element_size() :].view(torch.uint8)
        return states.numpy().tobytes() + ending.numpy().tobytes()

    def _rotated_amax(self, x: Tensor, target: Target) -> Tensor | None:
        height, width = target.plane.shape
        rotation = tag(str(target.plane.format.rotation))

        def work(first: int, last: int) -> int:
            arguments = (
                x.data_ptr(), width * x.element_size(), first, last, width,
                tag_of_input(x), rotation,
            )  # fmt: skip
            return int(kernel(measure.of_rotated, *arguments)(*arguments))

        bits = max(run_ranges(work, height // 16, x.numel()))
        return super().measure(x, [target])[0] if bits > INFINITY_BITS else from_bits(bits)

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> Seen:
        buffers: list[Tensor] = []
        for target in targets:
            buffers += target.plane.buffers()
        if not is_readable(x) or not all_have_memory(buffers):
            return super().encode(x, targets, seed)
        source = readable_memory(x)
        key = _kind_of_work(x, targets)
        known = None if key is None else _known.get(key)
        if known is not None:
            return self._run(x, source, known.steps, targets, seed) >= INFINITY_BITS
        # fp16 is converted to fp32, except if scales depend on the range of the input's dtype.
        bound_to_dtype = [t for t in targets if x.dtype == torch.float16 and t.encoding.format.scale_rule == "fp32"]
        unusual = [t for t in targets if not _draws_hashes(t.encoding) or not is_standard(t.plane)]
        slow = [t for t in targets if t in bound_to_dtype or t in unusual or not _has_usable_amax(t)]
        fast = [target for target in targets if target not in slow]
        steps, left = chosen_work(source.dtype, fast)
        slow += [fast[at] for at in left]
        if key is not None and not slow:
            if len(_known) >= _MOST_KINDS:
                _known.clear()
            _known[key] = _Known(steps, [target.encoding for target in targets])
        most = self._run(x, source, steps, fast, seed)
        return super().encode(x, slow, seed) if slow else most >= INFINITY_BITS

    def plan(self, x: Tensor, planes: Sequence[Plane], encodings: Sequence[Encoding], known: Plans) -> Plan | None:
        if not is_plain_memory(x):
            return None
        if x.dtype not in known:
            known[x.dtype] = plan_for(x, [Target(*each) for each in zip(planes, encodings, strict=True)])
        return known[x.dtype]

    def step_plan(self, what: HalfStep) -> StepPlan | None:
        return step_plan_for(what)

    def _run(self, x: Tensor, source: Tensor, steps: list[Step], targets: Sequence[Target], seed: Seed) -> int:
        """Run kernels. What one refuses is encoded by the reference. Returns the bits of the largest magnitude."""
        most = 0
        for work, at in steps:
            chosen = tuple([None if i is None else targets[i] for i in at])
            bits = run_work(work, source, chosen, seed)
            if bits == REFUSED:
                self._encode_refused(x, [target for target in chosen if target is not None], seed)
                bits = INFINITY_BITS  # kernels refuse only NaNs
            most = max(most, bits)
        return most

    def _encode_refused(self, x: Tensor, targets: Sequence[Target], seed: Seed) -> None:
        groups = [target.as_groups() for target in targets if isinstance(target, GroupsAsOne)]
        if groups:
            assert not isinstance(seed, int)
            super().encode_groups(x, groups, seed)
        else:
            assert seed is None or isinstance(seed, int)
            super().encode(x, targets, seed)

    def tensor_scale(self, target: Target | GroupedTarget) -> Tensor:
        if isinstance(target, GroupedTarget) or not is_known(target.encoding.format):
            return super().tensor_scale(target)
        if target.amax is None or not has_memory(target.amax):
            return super().tensor_scale(target)
        return torch.full((1,), tensor_factor(target), dtype=torch.float32, device="cpu")

    # ---- groups of rows ------------------------------------------------------------------------

    def measure_groups(self, x: Tensor, targets: Sequence[GroupedTarget]) -> list[Tensor | None]:
        if not is_readable(x) or not x.numel():
            return super().measure_groups(x, targets)
        source = readable_memory(x)
        wholes: list[Tensor] = []  # one, which is used for all targets

        def measured(target: GroupedTarget) -> Tensor | None:
            fmt, planes = target.encoding.format, target.planes
            if fmt.global_amax == "row":
                return _amax_of_each_row_of_groups(source, planes)
            if fmt.rotation is None:
                if not wholes:
                    wholes.append(_amax_of_groups(source, planes))
                return wholes[0].clone()
            found = _rotated_amax_of_groups(source, planes) if planes.transposed and planes.width >= 16 else None
            return super(CpuBackend, self).measure_groups(x, [target])[0] if found is None else found

        return [measured(target) for target in targets]

    def encode_groups(self, x: Tensor, targets: Sequence[GroupedTarget], seeds: Sequence[int] | None) -> Seen:
        if not is_readable(x) or not x.numel():
            return super().encode_groups(x, targets, seeds)
        fast = [target for target in targets if _has_kernels(x, target)]
        ones = [as_one(target) for target in fast]
        source = readable_memory(x)
        steps, left = chosen_work(source.dtype, ones)
        slow = [target for target in targets if not any(target is other for other in fast)]
        slow += [fast[at] for at in left]
        most = self._run(x, source, steps, ones, seeds)
        return super().encode_groups(x, slow, seeds) if slow else most >= INFINITY_BITS

    # ---- decoding ------------------------------------------------------------------------------

    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        written = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        decoded = self._decode_turned(plane, written) if plane.transposed else self._decode_fast(plane, dtype=written)
        return super().decode(plane, dtype) if decoded is None else decoded.to(dtype)

    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor:
        decoded = self._decode_fast(plane, workspace)
        if decoded is None:
            return super().decode_operand(plane, workspace)
        return decoded if plane.direction is ROWWISE or plane.transposed else decoded.t()

    # ---- multiplying ---------------------------------------------------------------------------

    def can_multiply(self, a: Plane, b: Plane) -> bool:
        return a.format.scale_rule == b.format.scale_rule == "two_level" and products.can_multiply(a, b)

    def multiply(self, a: Plane, b: Plane, out: Tensor, factor: float) -> None:
        products.multiply(a, b, out, factor)

    def multiply_few(self, x: Tensor, plane: Plane, out: Tensor) -> bool:
        return multiply_few(x, plane, out)

    def _decode_fast(
        self, plane: Plane, workspace: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor | None:
        """Decode a plane in its layout: the operand, or [M, K] if it is stored so. None if there is no kernel."""
        found = decoder(plane, dtype) if plane_has_memory(plane) else None
        if found is None:
            return None
        height, width = found.shape
        count = height * width
        if workspace is None:
            out = torch.empty(height, width, dtype=dtype, device="cpu")
        else:
            out = workspace.as_strided((height, width), (width, 1))
        address, past_caches = out.data_ptr(), _is_written_past_caches(out)
        if count < 2 * runtime.ELEMENTS_PER_THREAD:
            found.run(plane, address, 0, found.steps, past_caches)
        else:
            run_ranges(lambda first, last: found.run(plane, address, first, last, past_caches), found.steps, count)
        return out

    def _decode_turned(self, plane: Plane, dtype: torch.dtype) -> Tensor | None:
        """The matrix [M, K] of a plane that is stored transposed, any rotation undone; None if there is no kernel."""
        work = turned_decoder(plane) if plane_has_memory(plane) else None
        if work is None:
            return None
        out = torch.empty(plane.shape, dtype=dtype, device="cpu")
        past_caches, tiles = _is_written_past_caches(out), -(-out.shape[0] // turned.HEIGHT)
        run_ranges(lambda first, last: work(out, first, last, past_caches), tiles, out.numel())
        return out


def _is_written_past_caches(out: Tensor) -> bool:
    """Whether a decoded matrix is too large for the caches, and suits instructions that write past them."""
    if out.numel() < _STREAM_FROM:
        return False
    return out.shape[1] * out.element_size() % 64 == 0 and out.data_ptr() % 64 == 0


def _amax_of_each_row(x: Tensor, plane: Plane) -> Tensor:
    """The amax of each row of the operand, that is, of each row or column of ``x``."""
    height, width = plane.shape
    rowwise = plane.direction is ROWWISE
    found = torch.empty(height, dtype=torch.int32, device="cpu")

    def work(first: int, last: int) -> Tensor:
        out = found if rowwise else torch.zeros(width, dtype=torch.int32, device="cpu")
        arguments = (x.data_ptr(), width * x.element_size(), out.data_ptr(), first, last, width, tag_of_input(x))
        kernel(measure.of_rows if rowwise else measure.of_columns, *arguments)(*arguments)
        return out

    parts = run_ranges(work, height, x.numel())
    return (found if rowwise else torch.stack(parts).amax(dim=0)).view(torch.float32)


def _amax_of_groups(x: Tensor, planes: PlaneGroups) -> Tensor:
    """The amax of each group."""
    counts = np.array(planes.heights) * planes.width
    begins = x.data_ptr() + starts(counts) * x.element_size()
    for with_nan in (NO, YES):

        def arguments(first: Ints, last: Ints, with_nan: Tag = with_nan) -> Arguments:
            return (begins, first, last, tag_of_input(x), with_nan)

        bits = _largest_of_groups(run_groups(measure.of_all, arguments, counts, x.numel()), len(counts))
        if bits.max() <= INFINITY_BITS:
            break
    return _as_numbers(bits)


def _rotated_amax_of_groups(x: Tensor, planes: PlaneGroups) -> Tensor | None:
    """The amax of each group after the rotation; None if there is a NaN."""
    heights, step = np.array(planes.heights), planes.width * x.element_size()
    begins = x.data_ptr() + starts(heights) * step
    rotation = Tag(str(planes.format.rotation))

    def arguments(first: Ints, last: Ints) -> Arguments:
        return (begins, step, first, last, planes.width, tag_of_input(x), rotation)

    bits = _largest_of_groups(run_groups(measure.of_rotated, arguments, heights // 16, x.numel()), len(heights))
    return None if bits.max() > INFINITY_BITS else _as_numbers(bits)


def _largest_of_groups(parts: Sequence[PartOfGroups], groups: int) -> np.ndarray[Any, Any]:
    largest = np.zeros(groups, np.int64)
    for part in parts:
        largest[part.groups] = np.maximum(largest[part.groups], part.results)
    return largest


def _as_numbers(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits.astype(np.int32).view(np.float32))


def _amax_of_each_row_of_groups(x: Tensor, planes: PlaneGroups) -> Tensor:
    """The amax of each row of the operands of all groups."""
    if planes.direction is ROWWISE:  # the boundaries of groups do not matter
        return _amax_of_each_row(x, Plane(planes.format, ROWWISE, (x.numel() // planes.width, planes.width), x))
    heights, step = np.array(planes.heights), planes.width * x.element_size()
    begins = x.data_ptr() + starts(heights) * step
    found: list[Tensor] = []

    def arguments(first: Ints, last: Ints) -> Arguments:
        out = torch.zeros(len(heights) * planes.width, dtype=torch.int32, device="cpu")
        found.append(out)  # of this thread
        outs = out.data_ptr() + np.arange(len(heights)) * (planes.width * 4)
        return (begins, step, outs, first, last, planes.width, tag_of_input(x))

    run_groups(measure.of_columns, arguments, heights, x.numel())
    return torch.stack(found).amax(dim=0).view(torch.float32)


def _has_kernels(x: Tensor, target: GroupedTarget) -> bool:
    """Whether there may be a kernel for a target."""
    bound_to_dtype = x.dtype == torch.float16 and target.encoding.format.scale_rule == "fp32"
    known = is_standard_format(target.planes.format, target.planes.direction, target.planes.transposed)
    usual = known and not bound_to_dtype and _draws_hashes(target.encoding)
    return usual and (target.amax is None or not bool(target.amax.isnan().any()))


def _kind_of_work(x: Tensor, targets: Sequence[Target]) -> Hashable | None:
    """Everything on which the choice of encoders depends; None if targets are stored or scaled in unusual ways."""
    kinds: list[Hashable] = [x.dtype]
    alike: list[Target] = []
    for target in targets:
        plane, scale, encoding = target.plane, target.plane.scale, target.encoding
        plain = plane.data.is_contiguous() and (scale is None or scale.dim() < 2 or scale.stride(1) == 1)
        if not plain or (plane.amax is not None and not plane.amax.is_contiguous()):
            return None
        if encoding.format.global_amax is not None and not _has_usable_amax(target):
            return None
        kinds.append((id(encoding), plane.direction, plane.shape, plane.transposed, target.within))
        if encoding.format.block is None or encoding.format.block_rows > 1:  # with equal scales, both have one pass
            alike.append(target)
            kinds.append([t.scale is target.scale and same_amax(t.amax, target.amax) for t in alike].index(True))
    return tuple(kinds)


def _draws_hashes(encoding: Encoding) -> bool:
    """Whether random bits are those that kernels can draw. Philox is drawn by the reference."""
    return encoding.random == "hash"


def _has_usable_amax(target: Target) -> bool:
    """Whether a target has as many amaxes as kernels expect, without NaN. The reference also accepts others."""
    amax, kind = target.amax, target.encoding.format.global_amax
    if kind is None:
        return True
    if amax is None or amax.numel() != (target.plane.operand_shape[0] if kind == "row" else 1):
        return False
    return not (bool(amax.isnan().any()) if kind == "row" else math.isnan(amax.item()))
