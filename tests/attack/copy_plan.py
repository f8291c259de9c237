"""What ``a.copy_(b)`` of two quantized tensors does: which planes are copied as bytes, and which quantized again."""

from __future__ import annotations

import numpy as np

from .tensor_model import COLUMN, OTHER, ROW, PlaneModel, TensorModel
from .transcription import Encoded


class CopyPlan:
    """Worked out before anything is written: a refused copy must change nothing.

    Attributes:
        problem: why the copy must be refused.
        perhaps: it may be refused or done.
    """

    def __init__(self, target: TensorModel, source: TensorModel) -> None:
        self.target, self.source = target, source
        self.bytes: dict[str, Encoded] = {}
        self.perhaps = False
        self.problem = self._planned()

    def _planned(self) -> str | None:
        target, source = self.target, self.source
        if not target.planes:
            return "there is nothing to write to"
        if not source.planes:
            return "there is nothing to copy"
        written = [ROW] if target.one_buffer else list(target.planes)
        for direction in written:
            fitting = self._fitting(direction, target.planes[direction])
            if fitting is not None:
                self.bytes[direction] = fitting
        self.rest = [direction for direction in written if direction not in self.bytes]
        if target.derives and ROW in self.rest:
            self.bytes, self.rest = {}, written  # new rows need new columns
        return self._source_problem() or self._scale_problem()

    def _fitting(self, direction: str, plane: PlaneModel) -> Encoded | None:
        """Bytes of the source for a plane: those of the same direction, or of the other one if that is exact."""
        target, fmt = self.target, plane.format
        theirs = self.source.planes.get(direction)
        if theirs is None and fmt.symmetric and not (target.derives and direction == COLUMN):
            theirs = self.source.planes.get(OTHER[direction])
        if theirs is None or theirs.format != fmt or (not fmt.element and not target.hybrid):
            return None
        codes, scales, amax = theirs.operand()
        if theirs.direction != plane.direction:
            codes, scales = codes.T, scales.T
        return Encoded(codes.copy(), scales.copy(), None if amax is None else amax.copy())

    def _source_problem(self) -> str | None:
        """Whether what is read of the source is stale."""
        source, target = self.source, self.target
        overlaps = np.shares_memory(source.truth, target.truth)
        if target.hybrid or overlaps:
            read = list(source.planes)  # a hybrid wants all of it; of overlapping memory a clone is made
        else:
            first = ROW if ROW in source.planes else COLUMN
            read = [*([first] if self.rest else []), *(d if d in source.planes else OTHER[d] for d in self.bytes)]
        problem, open_ = source.read_problem(read)
        self.perhaps = self.perhaps or open_
        return problem

    def _scale_problem(self) -> str | None:
        """Whether a slice would get bytes, or numbers, under another scale than the whole that it is cut from."""
        target = self.target
        problem = target.write_problem(self.rest)
        if problem:
            return problem
        for direction, theirs in self.bytes.items():
            plane = target.planes[direction]
            mine, other = (plane.scales, theirs.scales) if plane.format.block is None else (plane.amax, theirs.amax)
            if target.shares_scale(plane) and not np.array_equal(np.ravel(mine), np.ravel(other)):
                return f"its {direction} scale belongs to the whole tensor"
        return None

    def carry_out(self) -> None:
        target = self.target
        if self.rest:
            target.encode(self.source.decoded(), self.rest)
        for direction, theirs in self.bytes.items():
            target.planes[direction].take(theirs)
        target.mark_written()
