"""`with_masters`: use any torch optimizer on quantized parameters. It updates float32 masters.

    optimizer = with_masters(torch.optim.AdamW, model.parameters(), lr=1e-3)

Schedulers, gradient clipping, GradScaler and checkpoints see the parameters of the model as usual. Only while a step
runs are they replaced by their masters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..tensor.sharding import local_part, sharded_like
from .base import MASTER
from .masters import as_plain, check_in_use, check_shapes, is_quantized, take_master, write_params

Pair = tuple[Tensor, Tensor]  # a parameter and its master
SomeOptimizer = TypeVar("SomeOptimizer", bound=Optimizer)


def with_masters(optimizer: type[SomeOptimizer], params: Any, *args: Any, **options: Any) -> SomeOptimizer:
    """Create a torch optimizer that keeps float32 masters of quantized and 16-bit parameters.

    Masters are in the state of their parameters, as ``"master_param"``, and in the state dict. They start from the
    initial values that `quantized_model_init` has preserved, which are then dropped, or else from the decoded
    parameters.

    Args:
        optimizer: a class of torch optimizer, such as ``torch.optim.AdamW``.
        params: parameters or parameter groups.
        *args: further arguments of ``optimizer``.
        **options: further options of ``optimizer``.

    Returns:
        An instance of ``optimizer``.

    Examples:
        >>> with cg.quantized_model_init(recipe="mxfp8"):
        ...     layer = cg.Linear(32, 32)
        >>> optimizer = cg.optim.with_masters(torch.optim.AdamW, layer.parameters(), lr=1e-3)
        >>> layer(torch.randn(4, 32)).sum().backward()
        >>> optimizer.step()
        >>> isinstance(optimizer, torch.optim.AdamW)
        True
    """
    return cast(SomeOptimizer, _class_with_masters(cast(Any, optimizer))(params, *args, **options))


@cache
def _class_with_masters(optimizer: type[Optimizer]) -> type[Optimizer]:
    return type(optimizer.__name__, (_WithMasters, optimizer), {})


def _blank_with_masters(optimizer: type[Optimizer]) -> Optimizer:
    """An empty instance, which unpickling fills."""
    cls: Any = _class_with_masters(cast(Any, optimizer))
    return cast(Optimizer, cls.__new__(cls))


class _WithMasters(Optimizer):
    """The base class that adds masters to a torch optimizer, before it in the order of base classes."""

    _in_place: list[Pair]  # parameters in whose place their masters are, while a step runs

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        self._put_back()
        check_in_use(self.param_groups)
        with self._masters_in_place() as pairs:
            _hand_gradients(pairs)
            if closure is not None:
                options["closure"] = self._on_parameters(closure, pairs)
            loss = _unhooked_step(type(self))(self, **options)
        write_params(*_apart(pairs))
        return loss

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made on demand, so a pickle names the one it was made from.
        self._put_back()
        return _blank_with_masters, (_made_from(type(self)),), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The optimizer itself looks into any state that is not empty for what its steps make.
        states = state.get("state", {})
        bare = {param: own for param, own in states.items() if own.keys() == {MASTER}}
        own = defaultdict(dict, {param: own for param, own in states.items() if param not in bare})
        super().__setstate__({**state, "state": own})
        self.state.update(bare)

    def _wants_master(self, param: Tensor) -> bool:
        if not is_quantized(param) and param.dtype == torch.float32:
            return False
        return param.requires_grad or param.grad is not None or param in self.state

    def state_dict(self) -> dict[str, Any]:
        """The state dict, with masters in the states of their parameters."""
        self._put_back()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict. A parameter whose state has no master gets one from its values in the next step.

        Raises:
            ValueError: a master has another shape than its parameter.
        """
        check_shapes(self, state_dict, [MASTER])
        masters = {index: state[MASTER] for index, state in state_dict["state"].items() if MASTER in state}
        # The optimizer itself knows no masters: it takes any state that is not empty for one that it has begun.
        states = {index: _without_master(state) for index, state in state_dict["state"].items()}
        own = {**state_dict, "state": {index: state for index, state in states.items() if state}}
        blank: list[Tensor] = []
        try:
            with self._masters_in_place(partial(_noted_blank_master, blank)):  # torch casts states to their dtype
                super().load_state_dict(own)
        except BaseException:
            for param in blank:
                self._take_loaded_master(param, None)
            raise
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, param in zip(saved, [p for group in self.param_groups for p in group["params"]], strict=True):
            self._take_loaded_master(param, masters.get(index))

    def _take_loaded_master(self, param: Tensor, loaded: Any) -> None:
        """Replace the master of ``param``. One of the run before the load would overwrite what was loaded."""
        wanted, state = self._wants_master(param), self.state.pop(param, {})
        master = state.pop(MASTER, None)
        if loaded is not None and wanted:
            master = _blank_master(param) if master is None else master
            local_part(master).copy_(local_part(torch.as_tensor(loaded)))
            state[MASTER] = master
        if state:
            self.state[param] = state

    @contextmanager
    def _masters_in_place(self, make: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Pair]]:
        """Context manager: inside, groups and states have the masters in place of the parameters. Yields the pairs.

        ``make`` returns the master of a parameter that has none; by default it is made from the parameter.
        """
        make = make or _master_of
        self._put_back()  # what an interrupted step has left
        pairs = self._in_place
        try:
            for param in [param for group in self.param_groups for param in group["params"]]:
                if self._wants_master(param):
                    state = self.state.get(param, {})
                    if MASTER not in state:  # some optimizers make a state along with themselves
                        state = self.state[param] = {**_in_float32(state, param), MASTER: make(param)}
                    master, own = state[MASTER], _without_master(state)
                    pairs.append((param, master))
                    if own:  # optimizers take an empty state for the first step
                        self.state[master] = own
                    self.state[param] = {MASTER: master}
            self._exchange(pairs)
            yield pairs
        finally:
            self._put_back()

    def _put_back(self) -> None:
        """Put the parameters in place of their masters, with the states of these.

        An interrupt may come at any time, so each master is kept by somebody at any time, and doing it again completes
        what was begun.
        """
        pairs = self.__dict__.get("_in_place", [])
        self._exchange([(master, param) for param, master in pairs])
        for param, master in pairs:
            master.grad = None
            if master in self.state or MASTER not in self.state.get(param, {}):
                self.state[param] = {**self.state.get(master, {}), MASTER: master}
            self.state.pop(master, None)
        self._in_place = []

    def _exchange(self, pairs: Sequence[Pair]) -> None:
        """Replace the first of each pair by the second in all groups."""
        other = {id(first): second for first, second in pairs}
        for group in self.param_groups:
            group["params"][:] = [other.get(id(param), param) for param in group["params"]]

    def _on_parameters(self, closure: Callable[[], Any], pairs: Sequence[Pair]) -> Callable[[], Any]:
        """Wrap ``closure`` so that it runs on the parameters, which are written from the masters first."""

        def evaluate() -> Any:
            with torch.no_grad():
                write_params(*_apart(pairs))
            self._exchange([(master, param) for param, master in pairs])
            try:
                with torch.enable_grad():
                    return closure()
            finally:
                self._exchange(pairs)
                _hand_gradients(pairs)

        return evaluate


def _master_of(param: Tensor) -> Tensor:
    return sharded_like(take_master(param), param)


def _blank_master(param: Tensor) -> Tensor:
    """A master without values, for those that are loaded."""
    return sharded_like(torch.zeros(local_part(param).shape, dtype=torch.float32, device=param.device), param)


def _noted_blank_master(params: list[Tensor], param: Tensor) -> Tensor:
    params.append(param)
    return _blank_master(param)


def _without_master(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != MASTER}


def _in_float32(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The state with tensors in the dtype of ``param`` converted to float32."""
    return {
        name: value.to(torch.float32) if isinstance(value, Tensor) and value.dtype == param.dtype else value
        for name, value in state.items()
    }


def _apart(pairs: Sequence[Pair]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that have a gradient, and their masters."""
    active = [(param, master) for param, master in pairs if param.grad is not None]
    return [param for param, _ in active], [master for _, master in active]


def _hand_gradients(pairs: Sequence[Pair]) -> None:
    for param, master in pairs:
        grad = None if param.grad is None else as_plain(param.grad).to(torch.float32)
        master.grad = None if grad is None else sharded_like(grad, param)


def _unhooked_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The step of the torch optimizer without the hooks that torch adds, because ours has them already."""
    step: Any = _made_from(cls).step
    return cast(Callable[..., Any], step.__wrapped__ if getattr(step, "hooked", False) else step)


def _made_from(cls: type[Optimizer]) -> type[Optimizer]:
    """The class of torch optimizer that masters were added to."""
    return cls.__mro__[cls.__mro__.index(_WithMasters) + 1]
