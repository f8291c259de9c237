"""`Backend`: the interface of backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..formats.encoding import Encoding
from ..planes import Plane
from ..planes.groups import PlaneGroups
from .global_scale import GlobalScale
from .target import GroupedTarget, Target

Seen = bool | Tensor | None
"""Whether an input has a NaN or an infinity: known, in an int32 tensor [1] on a GPU (not 0 if it has), or not known."""


class Plan(Protocol):
    """How matrices of one shape and dtype are encoded to new planes; see `kernels.plan`."""

    def run(
        self, x: Tensor, planes: Sequence[Plane], seed: int | None, amaxes: list[Tensor] | None = None
    ) -> bool | None: ...


Plans = dict[torch.dtype, Plan | None]
"""Plans by the dtype of the matrix; None if there is none for it."""


class Make(NamedTuple):
    """A matrix that half a step of a layer encodes, for `kernels.step_plan`.

    Attributes:
        matrix: an example.
        planes: examples of the planes that are made of it.
        encodings: how their bytes are chosen.
        kept: whether each of them is read later, and so has tensors.
        derives: whether the second plane is made of the decoded first one, not of the matrix.
        scale: an example of the scale to multiply by, if it is given; None if it follows from the matrix.
    """

    matrix: Tensor
    planes: Sequence[Plane]
    encodings: Sequence[Encoding]
    kept: Sequence[bool]
    derives: bool = False
    scale: Tensor | None = None


class ProductOf(NamedTuple):
    """The two operands of a product, by their numbers: planes that are made come first, then given ones."""

    left: int
    right: int


class HalfStep(NamedTuple):
    """What forward or backward of a layer does: matrices to encode, planes that exist already, and products.

    All tensors are examples: a plan is for others of the same shapes, dtypes and strides.
    """

    makes: Sequence[Make]
    given: Sequence[Plane]
    products: Sequence[ProductOf]


class Running(Protocol):
    """Half a step that has begun; see `kernels.step_plan`."""

    def product(self, number: int) -> tuple[Tensor, ...] | None: ...


class StepPlan(Protocol):
    """How forward or backward of layers of one shape runs; see `kernels.step_plan`."""

    def is_for_one_thread(self) -> bool: ...
    def suits(self, matrices: Sequence[Tensor], scales: Sequence[Tensor | None], given: Sequence[Plane]) -> bool: ...
    def start(
        self,
        matrices: Sequence[Tensor],
        scales: Sequence[Tensor | None],
        kept: Sequence[Plane],
        given: Sequence[Plane],
        seeds: Sequence[int | None],
        totals: Sequence[Tensor],
    ) -> Running: ...


StepPlans = dict[tuple[object, ...], tuple[StepPlan | None, object]]
"""Plans of half steps by what they depend on, each with what must live as long; None if there is no plan."""


class Backend(Protocol):
    """The interface of backends; see the functions of the same names in `kernels`.

    The targets of one call have the same input, so that a backend can write several of them in one pass.
    """

    name: str

    def measure(self, x: Tensor, targets: Sequence[Target]) -> list[Tensor | None]: ...
    def encode(self, x: Tensor, targets: Sequence[Target], seed: int | None) -> Seen: ...
    def plan(self, x: Tensor, planes: Sequence[Plane], encodings: Sequence[Encoding], known: Plans) -> Plan | None: ...
    def step_plan(self, what: HalfStep) -> StepPlan | None: ...
    def measure_groups(self, x: Tensor, targets: Sequence[GroupedTarget]) -> list[Tensor | None]: ...
    def encode_groups(self, x: Tensor, targets: Sequence[GroupedTarget], seeds: Sequence[int] | None) -> Seen: ...
    def mark(self, x: Tensor, plane: Plane, seen: Seen) -> None: ...
    def mark_groups(self, x: Tensor, planes: PlaneGroups, seen: Seen) -> None: ...
    def decode(self, plane: Plane, dtype: torch.dtype) -> Tensor: ...
    def decode_operand(self, plane: Plane, workspace: Tensor | None = None) -> Tensor: ...
    def decode_bf16(self, plane: Plane) -> Tensor: ...
    def can_multiply(self, a: Plane, b: Plane) -> bool: ...
    def multiply(self, a: Plane, b: Plane, out: Tensor, factor: float) -> None: ...
    def multiply_few(self, x: Tensor, plane: Plane, out: Tensor) -> bool: ...
    def joint_scale(
        self, row_scale: GlobalScale | None, column_scale: GlobalScale | None, alpha: float, like: Tensor
    ) -> Tensor: ...
    def epilogue(
        self,
        product: Tensor,
        out: Tensor,
        row_scale: GlobalScale | None,
        column_scale: GlobalScale | None,
        alpha: float,
        bias: Tensor | None,
        beta: float | None,
    ) -> None: ...
    def swizzle_scales(self, scales: Tensor) -> Tensor: ...
    def amax(self, x: Tensor) -> Tensor: ...
    def fingerprint(self, x: Tensor) -> bytes | None: ...
    def tensor_scale(self, target: Target | GroupedTarget) -> Tensor: ...
