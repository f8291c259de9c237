"""The state of recipes with a factory: it calls the factory for every slot and keeps the histories of requests."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..planes import Direction
from ..quantizers.base import Quantizer
from ..quantizers.hybrid import HybridQuantizer
from ..quantizers.request import QuantizerRequest
from ..runtime.logs import warn
from .delayed_state import Column, DelayedScalingRecipeState
from .per_tensor import DelayedScaling
from .requests import DelayedScalingRequest
from .roles import QuantizerRole
from .state import RecipeState


class CustomRecipeState(RecipeState, kind="custom"):
    """Quantizers from ``recipe.qfactory(role)``.

    All requests, also those inside hybrid quantizers, share one delayed-scaling state, with one column for each.

    Examples:
        >>> recipe = cg.recipe.CustomRecipe(qfactory=lambda role: cg.quantizer_for("mxfp8"))
        >>> roles = [cg.QuantizerRole(tensor_type="input")]
        >>> state = cg.recipe.RecipeState.create(recipe, mode="forward", roles=roles)
        >>> [type(each).__name__ for each in state.make_quantizers()]
        ['MXFP8Quantizer']
    """

    _inherited: DelayedScalingRecipeState | None = None

    def make_quantizers(self) -> list[Quantizer]:
        answers = self._asked()
        requests = _requests_in(answers)
        self._refuse_unequal(requests)
        previous, self._inherited = self._inherited or self.delayed, None
        self.delayed = self._state_for(requests, previous)
        made = iter([] if self.delayed is None else self.delayed.make_quantizers())
        resolved: dict[int, dict[Direction | None, Quantizer]] = {}
        for slot, direction in requests:
            resolved.setdefault(slot, {})[direction] = next(made)
        for slot, parts in resolved.items():
            answers[slot] = parts[None] if None in parts else answers[slot].resolved(parts)
        return answers

    def _asked(self) -> list[Any]:
        """What the factory returns for every slot, checked. No two slots have the same object."""
        roles: list[QuantizerRole | None]
        if self.roles is None:
            warn(
                __name__,
                "no roles were given to the recipe state, so the factory is called with an empty QuantizerRole()",
            )
            roles = [QuantizerRole()] * self.num_quantizers
        else:
            roles = self.roles
        answers: list[Any] = []
        for slot, role in enumerate(roles):
            answer = self.recipe.qfactory(role)
            if answer is None:
                raise ValueError(
                    f"qfactory returned None for {self._describe_slot(slot)}; return an IdentityQuantizer for a tensor "
                    "that stays in high precision"
                )
            if not isinstance(answer, (Quantizer, QuantizerRequest)):
                raise TypeError(
                    f"qfactory returned a {type(answer).__name__} for {self._describe_slot(slot)}; it must return a "
                    "Quantizer or a QuantizerRequest"
                )
            if isinstance(answer, Quantizer) and any(answer is other for other in answers):
                answer = answer.copy()  # each slot sets its own usages
            answers.append(answer)
        return answers

    def _refuse_unequal(self, requests: dict[Column, QuantizerRequest]) -> None:
        first: Column | None = None
        for column, request in requests.items():
            if not isinstance(request, DelayedScalingRequest):
                raise TypeError(
                    f"{self._describe(column)} asks for {request!r}, but only DelayedScalingRequest is supported"
                )
            if first is None:
                first = column
            elif request != requests[first]:
                raise ValueError(
                    "all requests of a module for one pass must be equal, but "
                    f"{self._describe(first)} asks for {requests[first]!r} and {self._describe(column)} for {request!r}"
                )

    def _describe(self, column: Column) -> str:
        slot, direction = column
        return self._describe_slot(slot) + (f", {direction.value}" if direction is not None else "")

    def _state_for(
        self, requests: dict[Column, QuantizerRequest], previous: DelayedScalingRecipeState | None
    ) -> DelayedScalingRecipeState | None:
        if not requests:
            return None
        request = next(iter(requests.values()))
        assert isinstance(request, DelayedScalingRequest)
        state = DelayedScalingRecipeState(
            request.recipe(),
            mode=self.mode,
            num_quantizers=len(requests),
            device=self.device,
            columns=list(requests),
        )
        if previous is not None:
            state.inherit_state_from(previous)
        return state

    def inherit_state_from(self, other: RecipeState) -> bool:
        """The next `make_quantizers` takes over the histories, if the factory then returns the same requests."""
        if not isinstance(other, CustomRecipeState) or other.delayed is None:
            return False
        self._inherited = other.delayed
        return True

    # ---- the delayed-scaling part, under Transformer Engine's names -------------------------------

    @property
    def _ds_state(self) -> DelayedScalingRecipeState | None:
        return self.delayed

    @property
    def _has_delayed_scaling(self) -> bool:
        return self.delayed is not None

    @property
    def _inner_delayed_scaling_recipe(self) -> DelayedScaling | None:
        return None if self.delayed is None else self.delayed.recipe

    @property
    def scale(self) -> Tensor | None:
        return None if self.delayed is None else self.delayed.scale

    @property
    def amax_history(self) -> Tensor | None:
        return None if self.delayed is None else self.delayed.amax_history


def _requests_in(answers: list[Any]) -> dict[Column, QuantizerRequest]:
    """All requests by slot and, inside a hybrid quantizer, direction."""
    requests: dict[Column, QuantizerRequest] = {}
    for slot, answer in enumerate(answers):
        if isinstance(answer, QuantizerRequest):
            requests[slot, None] = answer
        elif isinstance(answer, HybridQuantizer):
            requests |= {(slot, direction): request for direction, request in answer.pending().items()}
    return requests
