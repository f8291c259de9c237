"""What a quantized module says about itself, and what is built for it from a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from ..linear.parallel import TensorParallel
from ..quantizers.base import Quantizer
from ..quantizers.nonfinite import Policy
from ..recipe import QuantizerRole, Recipe, RecipeState

Mode = Literal["forward", "backward"]

SLOTS: dict[Mode, str] = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
"""The names of the lists of quantizers, in the attributes ``quantizers`` and ``fp8_meta`` of a module."""


class Built(NamedTuple):
    """What was built for a recipe. It is one object, so that a thread never sees parts of two recipes."""

    recipe: Recipe | None
    states: Mapping[Mode, RecipeState]
    quantizers: dict[str, list[Quantizer]]
    details: Any = None  # what the module derives from them
    serves_backward: bool = True  # whether the operands of its GEMMs are known to pair up, too
    nonfinite: Policy | None = None  # the policy about NaNs and infinities where the recipe says none
    stamp: Any = None  # of the last call that compared all options and roles: as long as it is the same, so are they


def nothing_built() -> Built:
    return Built(None, {}, {slot: [] for slot in SLOTS.values()})


class ParameterInit(NamedTuple):
    """How to create weights that are still on the meta device."""

    recipe: Recipe
    preserve_init_value: bool


class ModuleInterface(nn.Module):
    """What modules provide for `QuantizedModule`, and what all its parts know about a module.

    Attributes:
        name: name of the layer, for recipes and messages.
        bound_recipe: the recipe to use when no autocast is active; None for high precision.
        tp_group: process group of the ranks that share the module.
    """

    name: str | None
    bound_recipe: Recipe | None = None
    tp_group: Any
    _built: Built
    _parameter_init: ParameterInit | None

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list[QuantizerRole | None]:
        """The role of each slot for a quantizer, in the forward or the backward pass."""
        raise NotImplementedError

    def _slot_counts(self) -> Mapping[Mode, int]:
        """The number of quantizers in each pass: ``{"forward": ..., "backward": ...}``."""
        raise NotImplementedError

    def _gemm_operands(self, quantizers: Mapping[str, Sequence[Quantizer]]) -> Sequence[Mapping[str, Quantizer]]:
        """For each linear layer of the module, its quantizers by tensor."""
        raise NotImplementedError

    def _weights_and_operands(
        self, quantizers: Mapping[str, Sequence[Quantizer]]
    ) -> Iterable[tuple[str, Mapping[str, Quantizer]]]:
        """The name of each weight, and the quantizers of its linear layer; of the first one, if it has several."""
        return zip(self.weight_names, self._gemm_operands(quantizers), strict=False)

    def _details(self, recipe: Recipe, quantizers: Mapping[str, Sequence[Quantizer]]) -> Any:
        """What the module computes once per recipe; kept as ``Built.details``."""
        return None

    @property
    def weight_names(self) -> list[str]:
        """Names of the parameters that are weights of GEMMs, in the order of `_gemm_operands`."""
        raise NotImplementedError

    def _sharing_of_weight(self, index: int) -> TensorParallel | None:
        """How ranks share weight ``index``; None if each rank has the whole weight."""
        return None

    # ---- what `QuantizedModule` provides for its parts -----------------------------------------

    @property
    def layer(self) -> str:
        """The name of the layer in messages."""
        raise NotImplementedError

    def _build_quantizers(self, recipe: Recipe, *, backward: bool = True) -> Built:
        """Build the quantizers for ``recipe``, unless the present ones fit."""
        raise NotImplementedError

    def _made_for(self, recipe: Recipe) -> Built:
        """New quantizers for ``recipe``, which the module does not use yet."""
        raise NotImplementedError
