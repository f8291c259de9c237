"""How many tokens the loss of a batch is the mean of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

TokenCount = int | Callable[[Any], float] | None


def tokens_of(batch: Any, given: TokenCount, labels: int, rows: Mapping[str, int], kinds: Mapping[str, str]) -> float:
    """The number of tokens of a batch.

    Args:
        batch: the batch.
        given: what the user said: a number, a function of the batch, or None.
        labels: number of labels that the loss function has used; 0 if it is not known.
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
    if labels:
        return float(labels)
    single = [count for layer, count in rows.items() if kinds[layer] != "grouped_linear"]
    return float(Counter(single or rows.values()).most_common(1)[0][0])
