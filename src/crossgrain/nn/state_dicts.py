"""State dicts of modules that may have quantized parameters, and histories of delayed scaling as extra state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..recipe import RecipeState, extra_state_of, load_extra_state
from ..recipe.extra_state import encoded_extra_state, is_empty
from ..recipe.pickled_state import passes_over
from ..tensor.init_values import renew_preserved_values
from ..tensor.loading import check_formats
from .module_interface import SLOTS, Built, Mode, ModuleInterface, nothing_built

_EXTRA_STATE = "_extra_state"  # torch's name


class StateDicts(nn.Module):
    """Base class of modules that save an extra state, unless it is empty: then the keys are those of torch.nn.

    What cannot be loaded is refused before parameters are overwritten.
    """

    def get_extra_state(self) -> Tensor:
        """Return the histories of delayed scaling as a tensor of bytes. If there are none, it is empty and not saved.

        `crossgrain.recipe.read_extra_state` gives its fields.
        """
        raise NotImplementedError

    def set_extra_state(self, state: Any) -> None:
        """Load the histories of `get_extra_state`. Before the first forward, they wait for it."""
        raise NotImplementedError

    def clear_weight_cache(self) -> None:
        """Drop the cached quantized copies of the weights."""
        raise NotImplementedError

    def _expect_other_weights(self) -> None:
        """Prepare for weights that are replaced from outside: the next forward checks them."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if is_empty(destination[prefix + _EXTRA_STATE]):
            del destination[prefix + _EXTRA_STATE]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + _EXTRA_STATE
        if local_metadata.get("assign_to_params_buffers", False):
            self._expect_other_weights()
        else:
            check_formats(self._parameters, state_dict, prefix)
        if key in state_dict:
            self.set_extra_state(state_dict[key])
        self.clear_weight_cache()
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        renew_preserved_values(self._parameters, state_dict, prefix)
        if key in missing_keys:
            missing_keys.remove(key)


class Histories(StateDicts, ModuleInterface):
    """The part of `QuantizedModule` that keeps the histories of delayed scaling, also when the recipe changes."""

    def __init__(self) -> None:
        super().__init__()
        self._learned: dict[Mode, RecipeState] = {}  # the last states with histories
        self._unloaded: Tensor | None = None  # extra state that waits for states to load it into

    def _learn(self, new: Built) -> None:
        """Keep the histories of ``new`` from now on, after loading what has been waiting for them."""
        learned = {mode: state for mode, state in new.states.items() if state.delayed is not None}
        if learned and self._unloaded is not None:
            load_extra_state(self._unloaded, new.states["forward"], new.states["backward"], self.layer)
            self._unloaded = None
        self._learned |= learned

    def _move_histories(self, device: torch.device | None) -> bool:
        """Move the histories to a device, and return whether they were elsewhere. None leaves them where they are."""
        if device is None:
            return False
        delayed = [state.delayed for state in self._learned.values() if state.delayed is not None]
        elsewhere = [state for state in delayed if state.scale.device != device]
        for state in elsewhere:
            state.move_to(device)
        return bool(elsewhere)

    def get_fp8_meta_tensors(self) -> dict[str, list[Tensor]] | None:
        """Copies of the scales and histories of delayed scaling, of both passes; None if there are none."""
        if not self._learned:
            return None
        return {
            SLOTS[mode]: [each.detach().clone() for each in _tensors(state)] for mode, state in self._learned.items()
        }

    @torch.no_grad()
    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        """Reset the histories of delayed scaling: amaxes become 0 and scales 1.

        Args:
            fp8_meta_tensors: what `get_fp8_meta_tensors` has returned, to go back to that.

        Raises:
            KeyError: it has nothing for one of the passes.
        """
        for mode, state in self._learned.items():
            scale, history = _tensors(state)
            if fp8_meta_tensors is None:
                scale.fill_(1.0)
                history.zero_()
            elif SLOTS[mode] not in fp8_meta_tensors:
                raise KeyError(f"{self.layer}: fp8_meta_tensors has no {SLOTS[mode]}, only {[*fp8_meta_tensors]}")
            else:
                scale.copy_(fp8_meta_tensors[SLOTS[mode]][0])
                history.copy_(fp8_meta_tensors[SLOTS[mode]][1])

    def get_extra_state(self) -> Tensor:
        if self._unloaded is not None:
            return self._unloaded.clone()
        return extra_state_of(self._learned.get("forward"), self._learned.get("backward"))

    def set_extra_state(self, state: Any) -> None:
        if passes_over(state, self.layer):
            return
        state = encoded_extra_state(state, self.layer)
        self._unloaded = None
        if is_empty(state):
            return
        if self._learned:
            load_extra_state(state, self._learned.get("forward"), self._learned.get("backward"), self.layer)
        else:
            self._unloaded = state

    def _expect_other_weights(self) -> None:
        self._built = nothing_built()


def _tensors(state: RecipeState) -> tuple[Tensor, Tensor]:
    """The scale and the history of a state that keeps them."""
    assert state.delayed is not None
    return state.delayed.scale, state.delayed.amax_history
