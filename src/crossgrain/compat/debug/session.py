"""One session of debug features: from ``debug_api.initialize`` to ``debug_api.end_debug``."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor

from ...linear import probe
from ...linear.call import LinearCall
from ...nn.linear_module import LinearModule
from ...runtime.logs import warn
from ..adapters.debug_state import TEDebugState
from .buffers import STATS_BUFFERS, gathered
from .configuration import LOGGING, check_features
from .names import LayerNames
from .plans import LayerPlan, plan_of
from .tensors import gemm_of
from .watching import Watch, change_operands

_NAMESPACE = "transformer_engine"


class Session:
    """What is known about layers while debug features are active.

    Attributes:
        names: the names of layers.
    """

    def __init__(self) -> None:
        self.names = LayerNames()
        self.ended = False
        self._plans: dict[str, LayerPlan] = {}
        self._idle_until: dict[str, int | None] = {}
        self._ran: dict[str, None] = {}
        self._expected: set[tuple[str, str]] = set()
        self._seen: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self._last = 0
        self._checked = False
        self._stepped = False
        self._lock = threading.RLock()

    # ---- layers --------------------------------------------------------------------------------

    def attach(self, module: LinearModule, index: int, weight: Tensor, call: LinearCall) -> None:
        """Give a call of a layer what features want to see and to change."""
        if self.ended or _manager() is None:
            return
        name = self.names.name_of(module, index)
        with self._lock:
            plan = self._plan(name)
        if plan is None:
            return
        self._check_groups(module, index, plan)
        quantizers = {"activation": call.input, "weight": call.weight, "gradient": call.grad_output}
        if plan.changed:
            change_operands(call, plan, weight, quantizers, self.ask)
        call.probe = Watch(self, plan, call, quantizers, module.tp_group, module.tp_size)

    def _plan(self, name: str) -> LayerPlan | None:
        """The plan of a layer in this iteration; None if it runs as without features."""
        iteration = self.iteration
        if not self._checked:
            _check_configuration()
            self._checked = True
        if iteration < self._last:  # `initialize_training_step` went back
            self._plans.clear()
            self._idle_until.clear()
        self._last = iteration
        self._ran[name] = None
        known = self._plans.get(name)
        if known is None or known.iteration != iteration:
            if name in self._idle_until and _is_before(iteration, self._idle_until[name]):
                return None
            if not _settings_of(name):
                self._idle_until[name] = None
                return None
            known, upcoming = plan_of(name, iteration, lambda call, **about: self.ask(name, call, iteration, **about))
            self._plans[name] = known
            if known.is_idle:
                self._idle_until[name] = upcoming
            self._note(known)
        return None if known.is_idle else known

    def _check_groups(self, module: LinearModule, index: int, plan: LayerPlan) -> None:
        """Raise if features change some groups of a grouped layer, and others not: they are quantized together."""
        if plan.numbers is None:
            return
        for other in self.names.groups_beside(module, index):
            with self._lock:
                beside = self._plan(other)
            if beside is None or beside.numbers != plan.numbers:
                raise ValueError(
                    f"layers {plan.layer!r} and {other!r} are groups of one grouped layer, but debug features change "
                    "numbers of only one of them, or of both in different ways: choose layers of the configuration so "
                    "that all groups have the same features"
                )

    def _note(self, plan: LayerPlan) -> None:
        """Write to the log of nvdlfw_inspect how the operands of a layer are made, when that is first known."""
        from nvdlfw_inspect.logging import get_logger

        for tensor, ways in plan.ways.items():
            for direction, way in ways.items():
                message = f"LAYER={plan.layer}: Tensor: {tensor}, gemm {gemm_of(tensor, direction)} - {way}"
                if message not in self._warned:
                    self._warned.add(message)
                    get_logger().log_message(message)

    @property
    def iteration(self) -> int:
        """How often ``debug_api.step()`` was called, counted from ``init_training_step``."""
        return int(_manager()._trainer_iteration_count)

    def ask(self, layer: str, call: str, iteration: int, **about: Any) -> Any:
        """Call the features of a layer."""
        import nvdlfw_inspect.api as debug_api

        if self.ended:
            raise RuntimeError(
                f"layer {layer!r}: debug features change numbers of its backward pass, but debug_api.end_debug() was "
                "called after its forward pass: call it after backward"
            )
        with torch.no_grad():
            answer = getattr(debug_api.transformer_engine, call)
            return answer(layer_name=layer, iteration=iteration, **about)

    # ---- tensors that are looked at --------------------------------------------------------------

    def expect(self, plan: LayerPlan) -> None:
        """Note that a layer runs whose tensors features want to see in this step."""
        with self._lock:
            self._expected |= {(plan.layer, tensor) for tensor in plan.inspected}

    def saw(self, layer: str, tensor: str) -> None:
        """Note that a tensor was seen."""
        with self._lock:
            self._seen.add((layer, tensor))

    def warn_once(self, message: str) -> None:
        """Warn, if the same was not said before in this session."""
        with self._lock:
            if message in self._warned:
                return
            self._warned.add(message)
        warn(__name__, message, once=False)  # a session knows what it has said

    # ---- steps -----------------------------------------------------------------------------------

    def step(self) -> None:
        """Log statistics. Warn of tensors and layers that features are for, and that did not come."""
        if any(name in LOGGING for spec in _sections() for name in _features(spec)):
            STATS_BUFFERS.log_stats()
        with self._lock:
            missing, self._expected, self._seen = self._expected - self._seen, set(), set()
        for layer, tensor in sorted(missing):
            self.warn_once(
                f"debug features look at {tensor} of layer {layer!r}, but there was none in a step: no backward pass "
                "ran, or nothing before the layer needs its gradient"
            )
        if not self._stepped:
            self._warn_of_idle_sections()

    def _warn_of_idle_sections(self) -> None:
        from nvdlfw_inspect.config_manager import is_layer_in_cfg

        ran = list(dict.fromkeys(name for names in gathered(list(self._ran)) for name in names))
        self._stepped = bool(ran)
        for spec in _sections() if ran else ():
            if not any(is_layer_in_cfg(name, spec) for name in ran):
                self.warn_once(
                    f"the configuration has features for layers {_described(spec)}, but no layer that ran in the first "
                    f"step has such a name; there were {', '.join(ran)}"
                )

    def end(self) -> None:
        """Forget what was not logged, and say so."""
        self.ended = True
        if len(STATS_BUFFERS):
            warn(
                __name__,
                "debug_api.end_debug() was called, but statistics wait for debug_api.step(), which logs them; they are "
                "lost. Call debug_api.step() after each step",
                once=False,
            )


_current: Session | None = None


def start() -> None:
    """Begin a session. Graphs of the compiler are made again: nobody could look into those that there are."""
    global _current
    if _current is not None:
        end()
    _current = Session()
    _current.names.follow_inference()
    TEDebugState.debug_enabled = True
    probe.install(_current.attach)
    _forget_graphs()


def end() -> None:
    """End the session."""
    global _current
    if _current is None:
        return
    session, _current = _current, None
    probe.remove(session.attach)
    session.names.stop_following()
    _forget_graphs()
    session.end()
    TEDebugState._reset()
    STATS_BUFFERS.reset()


def current() -> Session:
    """The session that is active.

    Raises:
        RuntimeError: there is none.
    """
    if _current is None:
        raise RuntimeError("debug features are not active: call nvdlfw_inspect.api.initialize")
    return _current


def warn_once(message: str) -> None:
    """`Session.warn_once` of the active session."""
    current().warn_once(message)


def _forget_graphs() -> None:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


# ---- nvdlfw_inspect ------------------------------------------------------------------------------------------


def _manager() -> Any:
    import nvdlfw_inspect.api as debug_api

    return debug_api.DEBUG_MANAGER


def _sections() -> list[Any]:
    """The sections of the configuration that have features for Transformer Engine."""
    from nvdlfw_inspect.config_manager import ConfigManager

    return [spec for spec in ConfigManager.configs if spec.extension_config.get(_NAMESPACE)]


def _features(spec: Any) -> list[str]:
    return [name for name, settings in spec.extension_config[_NAMESPACE].items() if settings.get("enabled")]


def _settings_of(layer: str) -> Any:
    from nvdlfw_inspect.config_manager import ConfigManager

    return ConfigManager.get_config_for_layer(layer).get(_NAMESPACE)


def _check_configuration() -> None:
    for spec in _sections():
        check_features(spec.extension_config[_NAMESPACE], _described(spec))


def _described(spec: Any) -> str:
    """The layers of a section, as the configuration describes them."""
    layers = spec.layers
    given = {
        "layer_numbers": layers.layer_numbers,
        "layer_types": layers.layer_types,
        "exact_layer_names": layers.exact_layer_names,
        "layer_name_regex_pattern": getattr(layers.layer_name_regex_pattern, "pattern", None),
    }
    return ", ".join(f"{key}: {value}" for key, value in given.items() if value is not None)


def _is_before(iteration: int, until: int | None) -> bool:
    return until is None or iteration < until
