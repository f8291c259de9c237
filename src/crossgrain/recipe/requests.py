"""`DelayedScalingRequest`: what a factory returns for a tensor with delayed scaling."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..quantizers.request import QuantizerRequest
from .amax_history import AmaxAlgorithm
from .params import FP8Format
from .per_tensor import DelayedScaling, ScaleAlgorithm


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """A request for a quantizer with delayed scaling. The module keeps the history and makes the quantizer.

    All requests of a module in one pass must be equal.

    Args:
        fp8_format: see `DelayedScaling`.
        margin: see `DelayedScaling`.
        amax_history_len: see `DelayedScaling`.
        amax_compute_algo: see `DelayedScaling`.
        scaling_factor_compute_algo: see `DelayedScaling`.
        reduce_amax: see `DelayedScaling`.

    Examples:
        >>> def factory(role):
        ...     return cg.DelayedScalingRequest(amax_history_len=16)
        >>> layer = cg.Linear(32, 32)
        >>> with cg.autocast(recipe=cg.recipe.CustomRecipe(factory)):
        ...     y = layer(torch.ones(32, 32))
        >>> y.shape
        torch.Size([32, 32])
    """

    fp8_format: FP8Format = FP8Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True

    def recipe(self) -> DelayedScaling:
        """The recipe with the same options."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return DelayedScaling(**options, backward_override=None)
