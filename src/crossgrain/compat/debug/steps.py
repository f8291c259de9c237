"""In which steps a feature is active: ``freq``, ``start_step``, ``end_step`` and ``start_end_list``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

STEP_KEYS = ("freq", "start_step", "end_step", "start_end_list")


def next_enabled_iter(
    start_step: int | None,
    end_step: int | None,
    start_end_list: Sequence[Sequence[int]] | None,
    freq: int,
    iteration: int,
) -> tuple[bool, int | None]:
    """Whether a feature is active in an iteration, and when next.

    Args:
        start_step: the first step; None for 0.
        end_step: the last step, which is included; None or -1 if there is none.
        start_end_list: pairs of a first and a last step, which are used instead, if given.
        freq: only steps that are a multiple of this.
        iteration: the iteration.

    Returns:
        Whether it is active now, and the next iteration in which it is; None if there is none.
    """
    spans = sorted(tuple(span) for span in start_end_list) if start_end_list else [(start_step or 0, end_step)]
    ends = [(first, math.inf if last is None or last == -1 else last) for first, last in spans]
    active = iteration % freq == 0 and any(first <= iteration <= last for first, last in ends)
    for first, last in ends:
        following = math.ceil(max(iteration + 1, first) / freq) * freq
        if following <= last:
            return active, following
    return active, None


def enabled_now(config: Mapping[str, Any], iteration: int) -> tuple[bool, int | None]:
    """The same for the settings of a feature."""
    start, end, spans = (config.get(key) for key in ("start_step", "end_step", "start_end_list"))
    return next_enabled_iter(start, end, spans, config.get("freq", 1), iteration)
