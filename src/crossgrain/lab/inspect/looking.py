"""Look at planes that were just made: the records of one event of the observer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import kernels
from ...formats import DEFAULT_SIGN_MASK
from ...formats.encoding import Encoding
from ...gemm.operands import GEMMS
from ...planes import ROWWISE, Direction, Plane
from ...quantizers.observer import MadePlane, PlanesMade
from .draws import BiasAndNoise, bias_and_noise
from .encode import Given, encoded, measured, padded_for
from .passes import sum_of_squares
from .sample import Sample, sample_of
from .statistics import Operand, operand_of, plane_statistics, tensor_statistics
from .what_if import Alternative, WhatIf

Record = dict[str, Any]
_GEMM = {(tensor, direction): gemm for gemm, operands in GEMMS.items() for tensor, direction in operands.items()}


@dataclass(frozen=True)
class Settings:
    """What to look at.

    Attributes:
        what_if: formats that are not in use.
        rows: look at so many rows of a tensor; None for all.
        draws: how often stochastic rounding is repeated to tell bias from noise; 0 not to.
    """

    what_if: Sequence[WhatIf] = ()
    rows: int | None = None
    draws: int = 0


class Look:
    """One look at one tensor.

    Args:
        event: what the observer was shown.
        settings: what to look at.
        others: the formats that are not in use and will be looked at.
    """

    def __init__(
        self, event: PlanesMade, settings: Settings, others: Iterable[tuple[Alternative, Direction]] = ()
    ) -> None:
        self._event = event
        self._settings = settings
        in_use = [(made.encoding, direction) for made in event.made for direction in made.directions]
        instead = [(alternative.encoding, direction) for alternative, direction in others]
        self._sample = sample_of(event.source, settings.rows, [*in_use, *instead])
        chosen = self._sample.numbers if self._sample.pieces else None
        self._tensor = tensor_statistics(event.source, chosen)
        self._known: dict[tuple[Encoding, Direction], Record] = {}
        self._operands: dict[tuple[Direction, int | None], Operand] = {}

    # ---- formats in use ------------------------------------------------------------------------

    def in_use(self, wanted: Iterable[tuple[MadePlane, Direction]]) -> Iterator[Record]:
        """The records of planes of the event in some of the directions that they serve."""
        for made, direction in wanted:
            target = made.target
            given = Given(target.amax, target.scale)
            plane = self._sample.plane(made.plane.read(direction))
            given = given.for_rows(self._sample, made.encoding, direction)
            found = self._statistics(plane, made.encoding, direction, given, self._sample)
            if target.scale is None and not self._event.subject.from_rows:
                self._known[made.encoding, direction] = found
            gain = self._rotation_gain(made.encoding, direction, found["snr_db"])
            yield {
                **self._header(direction),
                "what_if": None,
                "format": described(made.encoding, given),
                **vars(self._tensor),
                **found,
                "rotation_gain_db": gain,
            }

    def _header(self, direction: Direction) -> Record:
        event = self._event
        return {
            "group": event.group,
            "tensor": event.tensor,
            "direction": direction.value,
            "gemm": _GEMM.get((event.tensor, direction)),
            "source": "decoded rows" if event.subject.from_rows else "tensor",
            "shape": list(event.source.shape),
            "rows": len(self._sample.numbers),
            "recomputed": event.recomputed,
        }

    def _statistics(
        self, plane: Plane, encoding: Encoding, direction: Direction, given: Given, sample: Sample
    ) -> Record:
        operand = self._operand(encoding, direction, sample)
        found = plane_statistics(operand, plane, encoding)
        split = BiasAndNoise(found.relative_error, 0.0)
        if encoding.stochastic:
            split = self._draws(operand, sample, encoding, direction, given)
        return {**vars(found), "bias": split.bias, "noise": split.noise if split.bias is not None else None}

    def _operand(self, encoding: Encoding, direction: Direction, sample: Sample) -> Operand:
        """The operand of the rows that are looked at. Those of the event itself are made once."""
        fmt = encoding.format
        if sample is not self._sample:
            return operand_of(sample.numbers, fmt, direction, self._tensor.amax)
        key = (direction, fmt.rotation)
        if key not in self._operands:
            self._operands[key] = operand_of(sample.numbers, fmt, direction, self._tensor.amax)
        return self._operands[key]

    def _draws(
        self, operand: Operand, sample: Sample, encoding: Encoding, direction: Direction, given: Given
    ) -> BiasAndNoise:
        if not self._settings.draws:
            return BiasAndNoise(None, 0.0)
        return bias_and_noise(operand, sample.numbers, encoding, direction, given, self._settings.draws)

    def _rotation_gain(self, encoding: Encoding, direction: Direction, snr: float | None) -> float | None:
        """How many decibels the rotation gains, or would gain if the plane is not rotated; None if it cannot be."""
        other = other_rotation(encoding) if _GEMM.get((self._event.tensor, direction)) == "wgrad" else None
        if other is None or snr is None:
            return None
        given, sample = self._measured(other, direction, self._sample)
        error = kernels.decode(encoded(sample.numbers, other, direction, given), torch.float32) - sample.numbers
        noise, power = sum_of_squares(error), sum_of_squares(sample.numbers.to(torch.float32))
        if not (power and noise and math.isfinite(noise / power)):
            return None
        gain = snr - 10 * math.log10(power / noise)
        return gain if encoding.format.rotation is not None else -gain

    # ---- other formats -------------------------------------------------------------------------

    def what_if(self, label: str, alternative: Alternative, direction: Direction) -> Record:
        """The record of a format that is not in use."""
        header = {**self._header(direction), "what_if": label, "format": described(alternative.encoding)}
        if alternative.rows is not None:
            header["source"] = "decoded rows"
        if alternative.encoding.format.is_identity:
            numbers = self._sample.numbers
            plane = Plane(alternative.encoding.format, direction, (numbers.shape[0], numbers.shape[1]), numbers)
            return {**header, **self._statistics(plane, alternative.encoding, direction, Given(), self._sample)}
        if alternative.rows is None and (alternative.encoding, direction) in self._known:  # it is in use, too
            return {**header, **self._known[alternative.encoding, direction]}
        return {**header, **self._encoded(alternative, direction)}

    def _encoded(self, alternative: Alternative, direction: Direction) -> Record:
        """Encode the rows that are looked at, with the amax of the whole tensor."""
        encoding, sample = alternative.encoding, self._sample
        if alternative.rows is not None:
            sample = self._decoded_rows(alternative.rows)
        given, looked = self._measured(encoding, direction, sample)
        plane = encoded(looked.numbers, encoding, direction, given)
        return self._statistics(plane, encoding, direction, given, looked)

    def _measured(self, encoding: Encoding, direction: Direction, sample: Sample) -> tuple[Given, Sample]:
        """What an encoding needs to know of the whole tensor, and the rows to encode, up to whole blocks."""
        tensor = self._tensor
        amax = tensor.amax if sample is self._sample and not (tensor.nan or tensor.inf) else None
        given = measured(padded_for(sample.whole, encoding, direction), encoding, direction, amax)
        numbers = padded_for(sample.numbers, encoding, direction)
        same = numbers is sample.numbers
        return given.for_rows(sample, encoding, direction), sample if same else Sample(numbers, numbers)

    def _decoded_rows(self, encoding: Encoding) -> Sample:
        given, sample = self._measured(encoding, ROWWISE, self._sample)
        decoded = kernels.decode(encoded(sample.numbers, encoding, ROWWISE, given), sample.whole.dtype)
        return Sample(decoded, decoded)


def other_rotation(encoding: Encoding) -> Encoding | None:
    """The same encoding with a rotation, or without the one that it has; None if the format cannot be rotated."""
    fmt = encoding.format
    if fmt.rotation is not None:
        return replace(encoding, format=replace(fmt, name=fmt.name.partition("_rht")[0], rotation=None))
    possible = fmt.scale_rule == "two_level" and fmt.block_rows == 1 and fmt.block_length == 16
    if not possible or fmt.global_amax == "row" or encoding.four_over_six is not None:
        return None
    return replace(encoding, format=fmt.with_rotation(DEFAULT_SIGN_MASK))


def described(encoding: Encoding, given: Given | None = None) -> str:
    """An encoding in a few words: "nvfp4_rht(sr)"."""
    options = {
        "sr": encoding.stochastic,
        "4over6": encoding.four_over_six is not None,
        "pow2": encoding.power_of_two,
        "given scale": given is not None and given.scale is not None,
    }
    chosen = ", ".join(name for name, is_set in options.items() if is_set)
    name = "hp" if encoding.format.is_identity else encoding.format.name
    return f"{name}({chosen})" if chosen else name
