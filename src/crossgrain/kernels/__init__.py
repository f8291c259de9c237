"""Kernels write and read the bytes of planes. Code outside of this package does not work with bits.

A backend writes planes (`measure`, then `encode`) and reads them (`decode`, `decode_operand`). The backend is chosen by
the type of the device. Every backend must give exactly the bytes of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..formats.encoding import Encoding
from ..planes import Plane, shape_problem
from .backend import Backend, HalfStep, Make, Plan, Plans, ProductOf, Seen, StepPlan, StepPlans
from .choice import REFERENCE, backend_for, get_backend, serving, set_backend
from .global_scale import GlobalScale, global_scale, has_global_scale, under_scale_one
from .layout import check_is_matrix, unswizzle_scales
from .target import GroupedTarget, Target, Within
from .transpose import transposed_plane
from .workspaces import free_workspaces, own_workspaces, workspace

__all__ = [
    "FEW_ROWS",
    "REFERENCE",
    "Backend",
    "GlobalScale",
    "GroupedTarget",
    "HalfStep",
    "Make",
    "Plan",
    "Plans",
    "ProductOf",
    "Seen",
    "StepPlan",
    "StepPlans",
    "Target",
    "Within",
    "amax",
    "can_multiply",
    "check_targets",
    "decode",
    "decode_bf16",
    "decode_operand",
    "encode",
    "encode_groups",
    "epilogue",
    "fingerprint",
    "free_workspaces",
    "get_backend",
    "global_scale",
    "has_global_scale",
    "joint_scale",
    "measure",
    "measure_groups",
    "multiply",
    "multiply_few",
    "own_workspaces",
    "plan",
    "set_backend",
    "step_plan",
    "swizzle_scales",
    "tensor_scale",
    "transposed_plane",
    "under_scale_one",
    "unswizzle_scales",
    "workspace",
]


FEW_ROWS = 8  # `multiply_few` is for so many rows at most


def _backend(tensor: Tensor) -> Backend:
    device = "cpu" if tensor.is_cpu else tensor.device.type  # the name of a device takes longer
    return serving.get(device) or backend_for(device)


def measure(x: Tensor, targets: Sequence[Target], *, checked: bool = False) -> list[Target]:
    """Measure the amax of a matrix, for targets that need one and do not have it.

    Args:
        x: the matrix.
        targets: the planes to write later.
        checked: it is known that the planes fit ``x``, for instance because they were just made for it.

    Returns:
        The targets with their amaxes.
    """
    _refuse_flush_to_zero()
    if not checked:
        check_targets(x, targets)
    ready = list(targets)
    missing = [at for at, target in enumerate(ready) if target.amax is None and target.encoding.needs_amax]
    if missing:
        found = _backend(x).measure(x, [ready[at] for at in missing])
        for at, amax in zip(missing, found, strict=True):
            target = ready[at]
            ready[at] = Target(target.plane, target.encoding, amax, target.scale, target.within)
    return ready


def measure_groups(x: Tensor, targets: Sequence[GroupedTarget]) -> list[GroupedTarget]:
    """`measure` for groups of rows: an amax for each group."""
    _refuse_flush_to_zero()
    ready = list(targets)
    missing = [at for at, target in enumerate(ready) if target.amax is None and target.needs_amax]
    found = _backend(x).measure_groups(x, [ready[at] for at in missing])
    for at, amax in zip(missing, found, strict=True):
        ready[at] = ready[at].with_amax(amax)
    return ready


def encode(x: Tensor, targets: Sequence[Target], seed: int | None = None, *, checked: bool = False) -> Seen:
    """Write a matrix to the planes of targets.

    Args:
        x: the matrix.
        targets: the targets that `measure` has returned.
        seed: seed of stochastic rounding; None if no target rounds stochastically.
        checked: it is known that the planes fit ``x``.

    Returns:
        Whether ``x`` has a NaN or an infinity. This is found on the way; on a GPU it is a tensor, so that the host does
        not wait; None if it is not known.

    Raises:
        ValueError: a plane does not fit, an amax was not measured, or a seed is missing.
    """
    _refuse_flush_to_zero()
    if not checked:
        check_targets(x, targets)
        for target in targets:
            fmt = target.encoding.format
            if target.amax is None and target.needs_amax:
                raise ValueError(f"the amax of a {fmt.name} target must be measured before it is encoded: call measure")
            if target.encoding.stochastic and seed is None:
                raise ValueError(f"stochastic rounding to {fmt.name} needs a seed")
    return _backend(x).encode(x, targets, seed)


def plan(x: Tensor, planes: Sequence[Plane], encodings: Sequence[Encoding], known: Plans) -> Plan | None:
    """A plan to measure ``x`` and write it to new planes with one call of compiled code; None if there is none.

    What depends on the shape, the dtype and the formats is determined once. ``plan.run(x, planes, seed)`` returns what
    `encode` returns; or None if the numbers need `measure` and `encode`, for instance if there is a NaN. With a list as
    its fourth argument, the amax of ``x`` is appended to it if a plane needs one.

    Args:
        x: the matrix.
        planes: planes that were just made for ``x``, and nobody else has.
        encodings: how the bytes of each plane are chosen.
        known: the plans for matrices and planes of the same shapes and encodings, to which a new plan is added.
    """
    if _SMALLEST * 2.0 == 0.0:
        _refuse_flush_to_zero()
    return _backend(x).plan(x, planes, encodings, known)


_MOST_STEP_PLANS = 16


def step_plan(
    x: Tensor, key: tuple[object, ...], known: StepPlans, what: Callable[[], HalfStep], keep: object
) -> StepPlan | None:
    """A plan for forward or backward of a layer, from a cache; None if there is none.

    ``plan.start(matrices, scales, kept, given, seeds, totals)`` fills in what is different in each call: the matrices,
    the scale that is given for each of them (None if it follows from the matrix), new planes to keep of them, planes
    that exist already, a seed for each matrix (None without stochastic rounding), and fp32 memory for each product. The
    caller holds all of these to the end. What comes back runs the products in their order: ``product(number)`` returns
    the two fp32 operands to multiply, [rows, inner] and [inner, columns]; or an empty tuple if the product itself is in
    its total. For formats with one scale for all numbers, a third tensor has the scales of both operands, which the
    caller applies, then the amax of each matrix and the scale that it was encoded with. It returns None if there is a
    NaN or an infinity, or if the numbers need `measure` and `encode` for another reason. Then nothing that was written
    counts. All of this is in one block `own_workspaces`.

    Args:
        x: a matrix of the layer.
        key: everything that the plan depends on.
        known: plans of the same kind, to which a new plan is added.
        what: what to do; it is called if the plan is not known.
        keep: objects whose addresses are in ``key``.
    """
    if _SMALLEST * 2.0 == 0.0:
        _refuse_flush_to_zero()
    backend = _backend(x)
    key = (backend.name, *key)
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_STEP_PLANS:
            known.clear()
        found = known[key] = backend.step_plan(what()), keep
    return found[0]


def encode_groups(x: Tensor, targets: Sequence[GroupedTarget], seeds: Sequence[int] | None) -> Seen:
    """`encode` for groups of rows. Each group gets the bytes that it would get alone.

    Args:
        x: the matrix of all rows.
        targets: the planes of all groups.
        seeds: a seed for each group; None if no target rounds stochastically.

    Returns:
        See `encode`.
    """
    _refuse_flush_to_zero()
    return _backend(x).encode_groups(x, targets, seeds)


def decode(plane: Plane, dtype: torch.dtype) -> Tensor:
    """Decode a plane to a matrix [M, K]."""
    _check_readable(plane)
    return _backend(plane.data).decode(plane, dtype)


def decode_operand(plane: Plane, workspace: Tensor | None = None) -> Tensor:
    """Decode a plane to the fp32 operand of a GEMM: [M, K] if rowwise, [K, M] if columnwise. Rotations are not undone.

    Args:
        plane: the plane.
        workspace: a contiguous float32 vector to write to, of at least the size of the operand. Without it memory is
            allocated, and page faults can take several times as long as decoding (see `workspaces`).

    Raises:
        ValueError: the workspace is not of this kind.
    """
    _check_readable(plane)
    if workspace is not None and not (
        workspace.dtype == torch.float32
        and workspace.is_contiguous()
        and workspace.dim() == 1
        and workspace.numel() >= plane.shape[0] * plane.shape[1]
    ):
        raise ValueError(
            f"a workspace for a plane of shape {list(plane.shape)} must be a contiguous float32 vector of at least "
            f"that size, got {workspace.dtype} of shape {list(workspace.shape)}"
        )
    return _backend(plane.data).decode_operand(plane, workspace)


def decode_bf16(plane: Plane) -> Tensor:
    """Decode a plane to the bf16 operand of a GEMM, as if its global scale were one. Rotations are not undone.

    The operand is [M, K] if rowwise and [K, M] if columnwise, with any strides. Where the fp32 operand is not a bf16
    number it is rounded to the nearest one, ties to even (see `gemm.exactness`).
    """
    _check_readable(plane)
    return _backend(plane.data).decode_bf16(plane)


def can_multiply(a: Plane, b: Plane) -> bool:
    """Whether `multiply` can multiply two operands: from their codes, without decoding them."""
    return a.data.device == b.data.device and _backend(a.data).can_multiply(a, b)


def multiply(a: Plane, b: Plane, out: Tensor, factor: float = 1.0) -> None:
    """Compute ``out = factor · a · bᵀ`` from the codes of two operands for which `can_multiply` is True.

    Only block scales are applied. The scales that follow from amaxes must be in ``factor``, or be applied later.

    Args:
        a: the first operand [rows, summed dimension].
        b: the second operand.
        out: the fp32 matrix to write to.
        factor: multiplies the product.
    """
    _check_readable(a, b)
    _backend(a.data).multiply(a, b, out, factor)


def multiply_few(x: Tensor, plane: Plane, out: Tensor) -> bool:
    """Compute ``out = x · planeᵀ`` for a few rows, if that is faster than decoding the plane; otherwise return False.

    Args:
        x: fp32 rows [rows, K].
        plane: a plane with an operand [N, K].
        out: the fp32 matrix [rows, N] to write to.
    """
    _check_readable(plane)
    return _backend(x).multiply_few(x, plane, out)


def joint_scale(row_scale: GlobalScale | None, column_scale: GlobalScale | None, alpha: float, like: Tensor) -> Tensor:
    """The two fp32 factors of a product whose scales are single numbers; see `reference.epilogue.joint_scale`."""
    return _backend(like).joint_scale(row_scale, column_scale, alpha, like)


def epilogue(
    product: Tensor,
    out: Tensor,
    row_scale: GlobalScale | None = None,
    column_scale: GlobalScale | None = None,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    beta: float | None = None,
) -> None:
    """Scale the product of a GEMM, add ``beta * out`` and a bias, and write it to ``out``: in one pass, if it can be.

    `reference.epilogue.epilogue` says exactly what is computed and where it is rounded.
    """
    _backend(product).epilogue(product, out, row_scale, column_scale, alpha, bias, beta)


def _check_readable(*planes: Plane) -> None:
    if _SMALLEST * 2.0 == 0.0:
        _refuse_flush_to_zero()
    for plane in planes:
        if plane.stale or not plane.data.untyped_storage().nbytes():
            plane.check_readable()
        plane.check_buffers()


def swizzle_scales(scales: Tensor) -> Tensor:
    """Convert compact scales to the swizzled layout that GEMMs of GPUs read, see `layout`.

    Args:
        scales: compact scales [R, C], of an operand. Transpose columnwise scales that are not stored transposed
            (MXFP8) first.

    Returns:
        Swizzled scales, with R padded to a multiple of 128 and C to a multiple of 4 by zeros.

    Raises:
        ValueError: the scales are not a matrix.

    Examples:
        >>> scales = torch.arange(128 * 4, dtype=torch.uint8).view(128, 4)
        >>> swizzled = cg.swizzle_scales(scales)
        >>> torch.equal(cg.unswizzle_scales(swizzled, 128, 4), scales)
        True
    """
    check_is_matrix(scales)
    return _backend(scales).swizzle_scales(scales)


def fingerprint(x: Tensor) -> bytes | None:
    """Bytes that are different after any number of ``x`` has changed; None if the backend has no fast way to them."""
    return _backend(x).fingerprint(x)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of ``x``, without NaNs, as fp32 [1]."""
    _refuse_flush_to_zero()
    return _backend(x).amax(x)


def tensor_scale(target: Target | GroupedTarget) -> Tensor:
    """The scale by which a per-tensor format multiplies, from the measured amax: fp32 [1], or one for each group."""
    assert target.amax is not None
    return _backend(target.amax).tensor_scale(target)


def check_targets(x: Tensor, targets: Sequence[Target]) -> None:
    """Raise ValueError if a plane does not fit ``x`` or its encoding."""
    for target in targets:
        plane, fmt = target.plane, target.encoding.format
        plane.check_buffers()
        if plane.format != fmt:
            raise ValueError(
                f"a {plane.direction.value} plane of the format {plane.format.name} cannot be written as {fmt.name}"
            )
        problem = shape_problem(fmt, plane.direction, plane.shape)
        if x.numel() != plane.shape[0] * plane.shape[1]:
            problem = f"the input has shape {list(x.shape)}"
        if problem:
            raise ValueError(
                f"cannot write a {plane.direction.value} {fmt.name} plane of shape {list(plane.shape)}: {problem}"
            )


_SMALLEST = 5e-324  # the smallest float64 number: with flush-to-zero, products with it are 0


def _refuse_flush_to_zero() -> None:
    """Raise RuntimeError if subnormal numbers are flushed to zero: scales may be subnormal, and would become wrong."""
    if _SMALLEST * 2.0 == 0.0:
        raise RuntimeError(
            "flush-to-zero is on (torch.set_flush_denormal(True)): quantization scales may be subnormal "
            "numbers and would become 0. Call torch.set_flush_denormal(False) before you use crossgrain."
        )
