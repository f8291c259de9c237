"""How many tokens the loss of a batch is the mean of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .labels import Labels

TokenCount = int | Callable[[Any], float] | None

_NEAR = 0.05  # a loss that differs more from the mean over its labels is said to be something else


def tokens_of(
    batch: Any, given: TokenCount, labels: Labels, loss: float, rows: Mapping[str, int], kinds: Mapping[str, str]
) -> float:
    """The number of tokens of a batch: by what the sum of the losses of its labels is divided.

    Args:
        batch: the batch.
        given: what the user said: a number, a function of the batch, or None.
        labels: what the loss function has done with labels.
        loss: the loss of the batch.
        rows: rows of the input of each layer, which are counted if nothing else is known.
        kinds: the type of each layer. Rows of grouped layers are not tokens: experts share tokens.

    Raises:
        ValueError: the number is not positive.
    """
    if given is not None:
        count = float(given(batch)) if callable(given) else float(given)
        if not count > 0:
            raise ValueError(f"the number of tokens of a batch must be above 0, got {count}")
        return count
    if labels.count and labels.total > 0 and loss > 0:
        return labels.total / loss
    single = [count for layer, count in rows.items() if kinds[layer] != "grouped_linear"]
    return float(Counter(single or rows.values()).most_common(1)[0][0])


def unit_note(tokens: float, labels: Labels) -> str | None:
    """What to say if the loss is not the mean over its labels; None if it is."""
    if not labels.count or abs(tokens / labels.count - 1) <= _NEAR:
        return None
    return (
        f"the loss is {labels.count / tokens:.3g} times the mean over its {labels.count} labels (it is a sum, or has "
        "other terms): effects of fprop are in the unit of this loss, not in nats per token"
    )
