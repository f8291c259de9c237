"""Labels that are drawn from the model's own predictions.

The curvature of a likelihood is the Fisher matrix: the mean square of gradients, with labels that the model itself
would draw. With the labels of the data instead, a model that does not fit them well has larger gradients, and curvature
is overstated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_IGNORED = -100  # the default of torch


class Labels(TorchFunctionMode):
    """Context manager: looks at the labels that torch's losses for classes get, or replaces them by drawn ones.

    Args:
        seed: seed of the drawn labels; None to use the labels of the data.

    Attributes:
        count: number of labels that count, of all calls of losses for classes; 0 if there was none.
        size: number of labels, also of those that are ignored.
        total: the sum of the losses of all labels that count; only of the labels of the data.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.count = self.size = 0
        self.total = 0.0
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.cross_entropy or func is functional.nll_loss:
            args, kwargs = self._seen(func, args, kwargs)
        return func(*args, **kwargs)

    def _seen(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        scores, target = given["input"], given["target"]
        if not isinstance(target, Tensor) or target.is_floating_point():
            return args, kwargs  # probabilities of classes: there are no labels to draw
        counts = target != kwargs.get("ignore_index", _IGNORED)
        self.count += int(counts.sum())
        self.size += counts.numel()
        if self._generator is None:
            with torch.no_grad():
                self.total += float(func(*args, **{**kwargs, "reduction": "sum"}))
            return args, kwargs
        drawn = torch.where(counts, self._drawn(scores.detach(), target.dim()), target)
        if func is functional.cross_entropy:
            kwargs["label_smoothing"] = 0.0  # smoothed labels are not a sample of what the model predicts
        if len(args) > 1:
            return (args[0], drawn, *args[2:]), kwargs
        return args, {**kwargs, "target": drawn}

    def _drawn(self, scores: Tensor, dimensions: int) -> Tensor:
        """Classes from scores [classes], [N, classes] or [N, classes, ...], by the logarithm of their probabilities."""
        by_class = scores.movedim(1, -1) if dimensions else scores
        noise = torch.empty(by_class.shape, dtype=torch.float32).exponential_(generator=self._generator)
        return (by_class.float().log_softmax(-1) - noise.to(scores.device).log()).argmax(-1)
