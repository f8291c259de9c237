"""Compile all CPU kernels into the cache on disk, so that later runs do not wait for the compiler.

There is no list of kernels, which could become out of date: every registered format is encoded with every option, in
each direction, then in pairs of directions, and decoded. Formats without compiled kernels take no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import DEFAULT_SIGN_MASK, Format, formats
from ..formats.dtypes import HIGH_PRECISION
from ..formats.encoding import Encoding
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, empty_plane
from ..planes.groups import PlaneGroups, empty_groups
from .backend import Seen
from .cpu.backend import CpuBackend
from .reference import ReferenceBackend
from .target import GroupedTarget, Target

_SHAPE = (128, 128)  # a multiple of the blocks of every format, in both directions
_LARGE = (1024, 1024)  # large enough for the kernels that write past the caches

OPTIONS: dict[str, tuple[Any, ...]] = {
    "stochastic": (False, True),
    "power_of_two": (False, True),
    "epsilon": (0.0,),
    "four_over_six": (None, "MAE", "MSE"),
    "random": ("hash",),
}
"""The values of every option of an `Encoding` for which there may be another kernel."""


class Use(NamedTuple):
    """A kind of plane that kernels may have to write."""

    direction: Direction
    encoding: Encoding
    transposed: bool | None = None  # None for what the format says

    def __str__(self) -> str:
        return f"{self.direction.value} {self.encoding.format.name}"


class Step(NamedTuple):
    """What is compiled next, its number, and the number of all steps."""

    name: str
    number: int
    total: int


def warm_up() -> Iterator[Step]:
    """Compile all kernels. Before each step, yield what it is."""
    backend, single, inputs = _CompilingBackend(), uses(), list(_inputs())
    compiled: dict[Direction, list[Use]] = {ROWWISE: [], COLUMNWISE: []}
    for number, use in enumerate(single):
        yield Step(str(use), number, len(single))
        found = [backend.compiles(x, [use]) for x in inputs]
        if any(found):
            compiled[use.direction].append(use)
        if use.encoding == Encoding(use.encoding.format):  # decoding does not depend on options
            backend.decode_all(_plane(use, _SHAPE))
            backend.decode_operand(_plane(use, _LARGE))
            backend.multiply_by_itself(_plane(use, _SHAPE))
    backend.fingerprint(inputs[0])
    # Kernels that write columns call that of a row by its address: with one of them, those of all rows are compiled.
    columns = next(use for use in compiled[COLUMNWISE] if use.encoding.format.name == "mxfp8")
    pairs = [(row, columns) for row in compiled[ROWWISE]]
    # Planes with the same codes in both directions have kernels of their own.
    tiled = [use for use in compiled[ROWWISE] if use.encoding.format.block_rows > 1]
    pairs += [(row, column) for row in tiled for column in compiled[COLUMNWISE] if column.encoding == row.encoding]
    for number, pair in enumerate(pairs, start=len(single)):
        yield Step(" + ".join(map(str, pair)), number, len(single) + len(pairs))
        for x in inputs:
            backend.compiles(x, pair)


def uses() -> list[Use]:
    """Every format with every option in each direction, and with both layouts if there are two."""
    return [
        Use(direction, encoding, transposed)
        for fmt in _formats()
        for encoding in _encodings(fmt)
        for direction in Direction
        for transposed in ((False, True) if direction is COLUMNWISE and fmt.block is None else (None,))
    ]


def _formats() -> Iterator[Format]:
    for fmt in formats():
        if not fmt.is_identity:
            yield fmt
            if fmt.global_amax == "tensor" and fmt.block_rows == 1:
                yield fmt.with_rotation(DEFAULT_SIGN_MASK)


def _encodings(fmt: Format) -> Iterator[Encoding]:
    assert OPTIONS.keys() == {field.name for field in fields(Encoding)} - {"format"}, "an option was added"
    for values in product(*OPTIONS.values()):
        try:
            yield Encoding(fmt, **dict(zip(OPTIONS, values, strict=True)))
        except ValueError:  # an option that this format does not have
            continue


def _inputs() -> Iterator[Tensor]:
    """Inputs of every dtype, with and without NaNs, for which there are different kernels."""
    for dtype in HIGH_PRECISION:
        x = torch.ones(_SHAPE, dtype=dtype, device="cpu")
        yield x
        yield x.clone().fill_(torch.nan)


def _plane(use: Use, shape: tuple[int, int]) -> Plane:
    cpu = torch.device("cpu")
    return empty_plane(use.encoding.format, use.direction, shape, device=cpu, transposed=use.transposed)


def _groups(use: Use) -> PlaneGroups:
    cpu = torch.device("cpu")
    return empty_groups(
        use.encoding.format, use.direction, _SHAPE[:1], _SHAPE[1], device=cpu, transposed=use.transposed
    )


class _NoReference(ReferenceBackend):
    """A replacement for the reference that only records which targets have no compiled kernel."""

    skipped: Sequence[Target] = ()

    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> Seen:
        self.skipped = targets
        return None

    def encode_groups(self, x: Tensor, targets: Sequence[GroupedTarget], seeds: Sequence[int] | None) -> Seen:
        return None

    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor:
        return plane.data

    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor:
        return plane.data


class _CompilingBackend(CpuBackend, _NoReference):
    """The CPU backend, which does not call the reference for what it has no kernels for."""

    def compiles(self, x: Tensor, uses: Sequence[Use]) -> bool:
        """Encode, and return whether there is a kernel for any of these uses."""
        self.skipped = ()
        targets = [Target(_plane(use, _SHAPE), use.encoding) for use in uses]
        targets = [replace(target, amax=amax) for target, amax in zip(targets, self.measure(x, targets), strict=True)]
        self.encode(x, targets, seed=0)
        planes = [target.plane for target in targets]
        plan = self.plan(x, planes, [use.encoding for use in uses], known={})
        if plan is not None:
            plan.run(x, planes, 0)
        self._compile_for_groups(x, uses, targets)
        return len(self.skipped) < len(targets)

    def _compile_for_groups(self, x: Tensor, uses: Sequence[Use], targets: Sequence[Target]) -> None:
        """The same for groups of rows, if both directions have an amax for the whole tensor."""
        if not all(target.needs_amax for target in targets):
            return
        asked = [GroupedTarget(_groups(use), use.encoding) for use in uses]
        amaxes = self.measure_groups(x, asked)
        ready = [target.with_amax(amax) for target, amax in zip(asked, amaxes, strict=True)]
        self.encode_groups(x, ready, [0])

    def decode_all(self, plane: Plane) -> None:
        """Decode to every dtype."""
        self.decode_operand(plane)
        for dtype in HIGH_PRECISION:
            self.decode(plane, dtype)

    def multiply_by_itself(self, plane: Plane) -> None:
        """Multiply a plane by itself, if that is possible without decoding."""
        if self.can_multiply(plane, plane):
            rows = plane.operand_shape[0]
            self.multiply(plane, plane, torch.empty(rows, rows, dtype=torch.float32, device="cpu"), 1.0)
