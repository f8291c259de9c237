"""What layers do about NaNs and infinities, which many formats cannot hold: the ``nonfinite`` policy.

    propagate   results that depend on them are NaN, so that loss scalers, gradient norms and people see it
    raise       `NonfiniteError`; on a GPU, the host waits for every tensor that is quantized
    saturate    the bytes that the format defines: FP4 turns NaN into 6, FP8 an infinity into its largest number

A quantizer by itself saturates. Layers give their quantizers the policy of the layer, of its recipe or of `settings`.
Kernels notice the numbers while they encode, so nothing is read a second time unless there are some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ..kernels import Seen
from ..kernels.marks import mark_nonfinite
from ..planes import Plane
from ..runtime.settings import settings
from ..runtime.step_count import current_step

if TYPE_CHECKING:
    from .base import Quantizer

Policy = Literal["propagate", "raise", "saturate"]
POLICIES: tuple[Policy, ...] = get_args(Policy)


class NonfiniteError(FloatingPointError):
    """A tensor that a layer quantizes has a NaN or an infinity, and the policy is "raise".

    Attributes:
        subject: what the tensor is.
        formats: the formats that it was to be quantized in.
    """

    subject: str = ""
    formats: str = ""


@contextmanager
def naming_places_in(rows: Tensor) -> Iterator[None]:
    """A context manager: a `NonfiniteError` names places in ``rows``, which are quantized inside with padding."""
    try:
        yield
    except NonfiniteError as error:
        if bool(rows.isfinite().all()):
            raise
        raise _error(rows, error.subject, error.formats) from None


def check_policy(value: Any, where: str) -> None:
    """Raise ValueError if ``value`` is neither a policy nor None."""
    if value is not None and value not in POLICIES:
        raise ValueError(f"{where} must be one of {', '.join(POLICIES)}, got {value!r}")


def act_on_nonfinite(x: Tensor, written: Sequence[tuple[Quantizer, Sequence[Plane]]], seen: Seen) -> None:
    """Do what the policies say after planes were encoded.

    Args:
        x: the matrix.
        written: the planes that were encoded from it, by quantizer.
        seen: what `kernels.encode` has returned. On a GPU planes are marked without looking at it, because looking
            would wait for the device. Only "raise" looks.

    Raises:
        NonfiniteError: a policy is "raise".
    """
    for quantizer, planes in written:
        policy = policy_of(quantizer)
        if policy == "raise" and x.device.type != "meta":
            _refuse_nonfinite(x.reshape(planes[0].shape), quantizer, planes)
        if policy == "propagate":
            for plane in planes:
                mark_nonfinite(x, plane, seen)


def policy_of(quantizer: Quantizer) -> Policy:
    """The policy of a quantizer: its own, or that of the settings."""
    return settings.nonfinite_policy() if quantizer.nonfinite is None else quantizer.nonfinite


def _refuse_nonfinite(numbers: Tensor, quantizer: Quantizer, planes: Sequence[Plane]) -> None:
    if bool(numbers.isfinite().all()):  # it is not known, or an infinity was made by a rotation, whose plane shows it
        return
    formats = " and ".join(f"{plane.direction.value} as {plane.format.name}" for plane in planes)
    raise _error(numbers, str(quantizer.subject) or f"a tensor of shape {list(numbers.shape)}", formats)


def _error(numbers: Tensor, subject: str, formats: str) -> NonfiniteError:
    bad = ~numbers.isfinite()
    row, column = (int(place) for place in torch.nonzero(bad)[0])
    error = NonfiniteError(
        f"{subject}: {int(bad.sum())} of {numbers.numel()} numbers are NaN or infinite. The first is "
        f"{float(numbers[row, column])} in row {row}, column {column}. They were to be quantized "
        f"{formats}, in step {current_step()}. The nonfinite policy is 'raise': look for what made them, or choose "
        "'propagate' to go on with NaN."
    )
    error.subject, error.formats = subject, formats
    return error
