"""The namespace ``transformer_engine`` of nvdlfw_inspect: which calls there are, and which feature answers one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from nvdlfw_inspect.base import BaseConfigAPIMapper, BaseNamespaceAPI
from torch import Tensor

from ...formats import Format
from ...gemm.operands import GEMMS
from ...tensor import QuantizedTensorStorage
from . import session

NAMESPACE = "transformer_engine"

CALLS: dict[str, tuple[str, ...]] = {
    "fp8_gemm_enabled": ("gemm",),
    "modify_tensor_enabled": ("tensor_name", "gemm"),
    "modify_tensor": ("tensor_name", "gemm"),
    "check_modify_tensor": ("tensor_name", "gemm"),
    "inspect_tensor_enabled": ("tensor_name",),
    "inspect_tensor": ("tensor_name",),
    "inspect_tensor_postquantize_enabled": ("tensor_name",),
    "inspect_tensor_postquantize": ("tensor_name",),
}
"""All calls, and by which of their arguments the settings of a feature are chosen."""


class TEConfigAPIMapper(BaseConfigAPIMapper):
    """Base class of features: finds the settings for a GEMM and a tensor in ``gemms_struct``, ``tensors`` and so on."""

    def parse_config_and_api(self, config: Mapping[str, Any], **kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
        """Find the settings for a call.

        Args:
            config: the settings of the feature.
            **kwargs: the arguments of the call; ``gemm_parsing`` and ``tensor_parsing`` say which of them count.

        Returns:
            Whether the feature is for this call, and its settings.
        """
        settings: dict[str, Any] | None = copy.deepcopy(dict(config))
        if kwargs.get("gemm_parsing"):
            settings = self._for_gemm(settings, kwargs)
        elif kwargs.get("tensor_parsing"):
            settings = self._process_tensor_config(settings, kwargs["tensor_name"])
        else:
            settings = None
        if not settings:
            return False, None
        settings.pop("enabled", None)
        return True, settings

    def _for_gemm(self, settings: Any, call: Mapping[str, Any]) -> dict[str, Any] | None:
        gemm = call["gemm"]
        if gemm not in GEMMS:
            raise ValueError(f"there is no GEMM {gemm!r}; there are {', '.join(GEMMS)}")
        if "gemms_struct" in settings:
            own = next((item for item in settings.pop("gemms_struct") if item["gemm"] == gemm), None)
        elif "gemms" in settings:
            own = {"gemm": gemm} if gemm in settings.pop("gemms") else None
        else:
            raise ValueError("gemms, a list of names, or gemms_struct, a list of mappings with 'gemm', is missing")
        if own is None:
            return None
        settings.update(own)
        if not call.get("tensor_parsing"):
            return dict(settings)
        found: dict[str, Any] | None = self._process_tensor_config(settings, call["tensor_name"])
        return found


class TEDefaultFeatures:
    """What the calls return for layers that no feature is for."""

    def fp8_gemm_enabled(self, config: Any, layer_name: str, **call: Any) -> tuple[bool, int | None]:
        """Whether a GEMM multiplies quantized operands."""
        return True, None

    def modify_tensor_enabled(self, config: Any, layer_name: str, **call: Any) -> tuple[bool, int | None]:
        """Whether ``modify_tensor`` makes an operand, or changes a result."""
        return False, None

    def modify_tensor(self, config: Any, layer_name: str, **call: Any) -> Any:
        """Make an operand, or change a result."""
        raise NotImplementedError(
            f"layer {layer_name!r}: no feature modifies {call.get('tensor_name')} in {call.get('gemm')}, so that "
            "modify_tensor has nothing to return"
        )

    def check_modify_tensor(self, config: Any, layer_name: str, **call: Any) -> Format | None:
        """Raise if ``modify_tensor`` would not be possible; else the format that it makes, if that is known.

        It is called before a layer runs.
        """
        return None

    def inspect_tensor_enabled(self, config: Any, layer_name: str, **call: Any) -> tuple[bool, int | None]:
        """Whether ``inspect_tensor`` is called."""
        return False, None

    def inspect_tensor(self, config: Any, layer_name: str, **call: Any) -> None:
        """Look at a tensor, and at what it was quantized to."""

    def inspect_tensor_postquantize_enabled(self, config: Any, layer_name: str, **call: Any) -> tuple[bool, int | None]:
        """Whether ``inspect_tensor_postquantize`` is called."""
        return False, None

    def inspect_tensor_postquantize(self, config: Any, layer_name: str, **call: Any) -> None:
        """Look at the operand of a GEMM."""


class TransformerEngineAPI(BaseNamespaceAPI):
    """Passes calls of layers on to the features of the configuration."""

    def __init__(self) -> None:
        super().__init__()
        self._default_api_impl = TEDefaultFeatures()
        # Answers are not cached by nvdlfw_inspect: it would take them by the line of code from which a call comes.
        self._cacheable_api_kwargs_map: dict[str, list[str]] = {}

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        return api_name.endswith("_enabled") or api_name.startswith("inspect_tensor")

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        known = CALLS.keys() | self.api_to_features_map.keys()
        if api_name not in known:
            raise ValueError(f"{NAMESPACE} has no call {api_name!r}; there are {', '.join(sorted(known))}")
        for argument in CALLS.get(api_name, ("tensor_name", "gemm")):
            if argument not in kwargs:
                raise ValueError(f"{NAMESPACE}.{api_name} needs the argument {argument}")

    def routing_condition(
        self, api_name: str, config: Any, layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> tuple[bool, Any]:
        by = CALLS.get(api_name, ("tensor_name", "gemm"))
        parsing = {"gemm_parsing": "gemm" in by, "tensor_parsing": "tensor_name" in by}
        found: tuple[bool, Any] = feature_obj.parse_config_and_api(config, **parsing, **kwargs)
        return found

    def call_feature(self, call: Any, feat_config: Any, layer_name: str, **kwargs: Any) -> Any:
        """Call a feature with those arguments that it takes: features of older versions know fewer of them."""
        names = _parameters(call)
        given = kwargs if names is None else {name: value for name, value in kwargs.items() if name in names}
        return call(feat_config, layer_name, **given)

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        if api_name.endswith("_enabled") and not isinstance(ret, bool | tuple):
            raise TypeError(f"{api_name} must return a bool, or a pair of a bool and the next iteration, got {ret!r}")
        made = isinstance(ret, Tensor | QuantizedTensorStorage)
        if api_name == "modify_tensor" and kwargs.get("out") is None and not made:
            raise TypeError(f"modify_tensor must return a tensor, got {type(ret).__name__}")

    def handle_multi_feature_output(
        self, api_name: str, multi_feature_outputs: Any, features_to_invoke: Any, **kwargs: Any
    ) -> Any:
        given = multi_feature_outputs
        answers = list(given.values()) if isinstance(given, Mapping) else list(given)
        return joined_answers(api_name, answers) if api_name.endswith("_enabled") else None

    def step(self) -> None:
        """Called by ``debug_api.step()``."""
        session.current().step()

    def end_debug(self) -> None:
        """Called by ``debug_api.end_debug()``."""
        session.end()


def joined_answers(call: str, answers: Sequence[Any]) -> Any:
    """One answer of several features: a GEMM is quantized if all say so; anything else is done if one says so.

    The next iteration is known only if all features know it.
    """
    pairs = [answer if isinstance(answer, tuple) else (answer, None) for answer in answers]
    join = all if call == "fp8_gemm_enabled" else any
    now = join(bool(first) for first, _ in pairs)
    if not all(isinstance(answer, tuple) for answer in answers):
        return now
    return now, min((later for _, later in pairs if later is not None), default=None)


@lru_cache(maxsize=256)
def _parameters(call: Any) -> frozenset[str] | None:
    """The names of the parameters of a function; None if it takes any."""
    parameters = inspect.signature(call).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
