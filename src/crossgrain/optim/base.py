"""The base class of the fused optimizers: master weights, stored states, checkpoints, and the step.

A step collects the float32 masters, gradients and moments of many parameters and passes them to one of torch's fused
kernels, which updates them in place. Then states that are kept in fewer bits are stored, and the parameters are written
from their masters, all planes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from ..quantizers.float8 import Float8Quantizer
from ..runtime.logs import warn
from ..runtime.transforms import new_tensors_are_fake
from ..tensor import QuantizedTensor
from ..tensor.sharding import is_sharded, local_part, shard_groups, sharded_like
from .masters import (
    as_plain,
    check_in_use,
    check_shapes,
    is_quantized,
    join_master,
    split_master,
    take_master,
    write_params,
)
from .stored_state import STATE_DTYPES, own_scale, store, take_scale, unscaled, zero_state

MASTER = "master_param"
_SCALE = "_scale_inv"  # follows the name of a state
_BATCH = 1 << 24  # elements whose float32 copies may exist at a time


class FusedOptimizer(Optimizer):
    """Base class. A subclass gives the names and dtypes of its moments, and `_update`, which calls the kernel."""

    # What copies and pickles carry beside torch's own; subclasses add theirs.
    _travelling: ClassVar[tuple[str, ...]] = (
        "master_weights",
        "master_weight_dtype",
        "use_decoupled_grad",
        "store_param_remainders",
        "set_grad_none",
        "name_to_dtype_map",
        "_moments",
        "_scales",
    )

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        moment_dtypes: Mapping[str, torch.dtype],
        master_weights: bool,
        master_weight_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        name = type(self).__name__
        if master_weight_dtype not in (torch.float32, torch.float16):
            raise RuntimeError(
                f"{name}: master_weight_dtype must be torch.float32 or torch.float16, got {master_weight_dtype}"
            )
        for moment, dtype in moment_dtypes.items():
            if dtype not in STATE_DTYPES:
                raise RuntimeError(
                    f"{name}: {moment}_dtype must be torch.float32, bfloat16, float16 or uint8, got {dtype}"
                )
        if store_param_remainders and not (master_weights and master_weight_dtype == torch.float32):
            raise RuntimeError(
                f"{name}: store_param_remainders=True needs master_weights=True and master_weight_dtype=torch.float32"
            )
        super().__init__(params, defaults)
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.set_grad_none = True if set_grad_none is None else set_grad_none
        self.name_to_dtype_map = {**moment_dtypes, MASTER: master_weight_dtype}
        self._moments = tuple(moment_dtypes)  # that the present group uses
        self._scales: dict[Tensor, dict[str, Tensor]] = {}  # of states in float16

    # ---- what an optimizer provides ------------------------------------------------------------

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        moments: list[list[Tensor]],
        first: bool,
    ) -> None:
        """Update float32 tensors in place. ``first`` tells that the moments are new, that is zero."""
        raise NotImplementedError

    def _begin(self, group: dict[str, Any]) -> None:
        """Called once per group and step."""

    # ---- the step ------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
            grad_scaler: unscales the gradients first, and skips the step if they overflowed, as
                ``grad_scaler.step(optimizer)`` does.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: a parameter cannot be updated; then none has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if grad_scaler is not None:
            if self.use_decoupled_grad:
                raise ValueError(
                    "grad_scaler cannot be used with use_decoupled_grad=True: a GradScaler unscales .grad only. "
                    "Unscale param.decoupled_grad yourself"
                )
            grad_scaler.step(self)
            return loss
        check_in_use(self.param_groups)
        groups = [(group, self._with_grads(group)) for group in self.param_groups]
        for _, params in groups:
            self._check(params)
        for group, params in groups:
            self._begin(group)
            new = [param for param in params if self._is_new(param)]
            known = [param for param in params if not self._is_new(param)]
            for batch in _batches(new):
                self._step_batch(group, batch, first=True)
            for batch in _batches(known):
                self._step_batch(group, batch, first=False)
        return loss

    def _with_grads(self, group: dict[str, Any]) -> list[Tensor]:
        return [param for param in group["params"] if self._grad(param) is not None]

    def _is_new(self, param: Tensor) -> bool:
        """Whether the parameter has no moments yet."""
        state = self.state.get(param, {})
        return any(name not in state for name in self._moments)

    def _grad(self, param: Tensor) -> Tensor | None:
        grad: Tensor | None = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
        return grad

    def _check(self, params: Iterable[Tensor]) -> None:
        """Raise, before anything changes, if a parameter cannot be updated."""
        fake = new_tensors_are_fake()
        for param in params:
            grad = self._grad(param)
            assert grad is not None
            if grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            own = local_part(param)
            if fake and not _is_fake(own):
                raise RuntimeError(
                    f"{type(self).__name__}: a parameter of shape {list(param.shape)} has numbers, but new tensors are "
                    "fake here (FakeTensorMode), and moments and counts of steps would stay so. Make the model and "
                    "the optimizer under the mode too, or leave out the step."
                )
            if isinstance(own, QuantizedTensor):
                if is_sharded(param):
                    own._stand_alone()
                own._get_quantizer().check_writable(own)
                self._check_quantized(own)

    def _check_quantized(self, param: QuantizedTensor) -> None:
        if self.master_weights:
            return
        if not isinstance(param._get_quantizer(), Float8Quantizer):
            raise RuntimeError(
                f"{type(self).__name__}: a {type(param).__name__} of shape {list(param.shape)} needs "
                "master_weights=True; without masters, rounding would lose most updates"
            )
        warn(
            __name__,
            f"{type(self).__name__} updates FP8 parameters without master weights: changes smaller than half the "
            "distance between FP8 numbers are lost. Pass master_weights=True.",
        )

    def _step_batch(self, group: dict[str, Any], params: Sequence[Tensor], first: bool) -> None:
        for param in params:
            self.initialize_state(param, self.store_param_remainders)
        masters = [self._working_master(param) for param in params]
        grads = [_as_float32(self._grad(param)) for param in params]
        moments = [[self.get_unscaled_state(param, name) for param in params] for name in self._moments]
        self._update(group, masters, grads, moments, first)
        for name, values in zip(self._moments, moments, strict=True):
            for param, value in zip(params, values, strict=True):
                self._store(param, name, value)
        self._store_masters(params, masters)

    def _working_master(self, param: Tensor) -> Tensor:
        """The tensor that the kernel updates in place: float32 and contiguous."""
        if MASTER in self.state[param]:
            return self.get_unscaled_state(param, MASTER)
        return as_plain(param).to(torch.float32).contiguous()

    def _store_masters(self, params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        rounded, values = [], []
        for param, master in zip(params, masters, strict=True):
            if MASTER in self.state[param]:
                self._store(param, MASTER, master)
            if _is_same(param, master):  # it is written already, but torch's fused kernels tell autograd nothing
                torch.autograd.graph.increment_version(local_part(param))
            elif not self._keeps_remainder(param):  # else it is written with its remainder
                rounded.append(param)
                values.append(master)
        write_params(rounded, values)

    # ---- states --------------------------------------------------------------------------------

    def _needs_master(self, param: Tensor) -> bool:
        return self.master_weights and (is_quantized(param) or param.dtype != torch.float32)

    def _keeps_remainder(self, param: Tensor) -> bool:
        state = self.state[param].get(MASTER)
        return state is not None and state.dtype == torch.int16

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Create the states of ``param`` that do not exist yet: zero moments, and a master if it needs one."""
        for name in self._moments:
            if name not in self.state[param]:
                self._add_state(param, name, self._zero_state(param, name))
        if MASTER in self.state[param] or not self._needs_master(param):
            return
        plain_bfloat16 = param.dtype == torch.bfloat16 and not is_quantized(param)
        if store_param_remainders and plain_bfloat16:
            own = local_part(param)
            self.state[param][MASTER] = torch.zeros(own.shape, dtype=torch.int16, device=own.device)
            return
        master = take_master(param)
        if self.master_weight_dtype == torch.float32:
            self.state[param][MASTER] = master
            return
        self._add_state(param, MASTER, self._zero_state(param, MASTER))
        self._store(param, MASTER, master)

    def _zero_state(self, param: Tensor, name: str) -> Tensor:
        return zero_state(local_part(param).shape, self.name_to_dtype_map[name], param.device)

    def _add_state(self, param: Tensor, name: str, state: Tensor) -> None:
        self.state[param][name] = state
        if state.dtype == torch.float16 and not isinstance(state, QuantizedTensor):
            self._scales.setdefault(param, {})[name] = torch.ones(1, dtype=torch.float32, device=param.device)

    def _scale(self, param: Tensor, name: str) -> Tensor | None:
        return self._scales.get(param, {}).get(name)

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """Return a state in float32. It is the state itself if that is stored as float32, otherwise a copy.

        Args:
            param: the parameter.
            state_name: name of the state.
            skip_unscale: return a state that is stored as bfloat16, which has no scale, itself.
        """
        state = self.state[param][state_name]
        if skip_unscale and state.dtype == torch.bfloat16:
            stored: Tensor = local_part(state)
            return stored
        if state_name == MASTER and self._keeps_remainder(param):
            return join_master(local_part(param).detach(), state)
        return unscaled(state, self._scale(param, state_name)).view(local_part(param).shape)

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store a float32 value as a state, in the dtype that this optimizer stores it in.

        If masters are kept as remainders (``store_param_remainders``), storing a master also writes the parameter.

        Args:
            param: the parameter.
            state_name: name of the state, such as "exp_avg" or "master_param".
            unscaled_state: the value, float32.
        """
        if unscaled_state.dtype != torch.float32:
            raise RuntimeError(f"set_scaled_state: unscaled_state must be float32, got {unscaled_state.dtype}")
        self.initialize_state(param, self.store_param_remainders)
        if state_name not in self.state[param]:
            self._add_state(param, state_name, self._zero_state(param, state_name))
        self._store(param, state_name, unscaled_state)

    def _store(self, param: Tensor, name: str, value: Tensor) -> None:
        state = self.state[param][name]
        if value is state:
            return
        if name == MASTER and self._keeps_remainder(param):
            rounded, remainder = split_master(value.contiguous())
            state.copy_(remainder)
            local_part(param).detach().copy_(rounded)
        else:
            store(value, state, self._scale(param, name), shard_groups(param))

    # ---- copies and checkpoints ----------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._travelling}}

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict in torch's layout, with all states in float32, however they are stored.

        States that are stored in FP8 add their scale, as ``<name>_scale_inv``. States of sharded parameters are
        sharded like them.
        """
        packed = super().state_dict()
        params = self._all_params()
        for index, state in packed["state"].items():
            param = params[index]
            scales = {f"{name}{_SCALE}": own_scale(value) for name, value in state.items()}
            packed["state"][index] = {
                **{name: sharded_like(self.get_unscaled_state(param, name), param) for name in state},
                **{name: scale for name, scale in scales.items() if scale is not None},
            }
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of `state_dict`. States are stored in the dtypes of this optimizer.

        A parameter whose state has no master gets one from its values in the next step.

        Raises:
            ValueError: a state has another shape than its parameter.
        """
        states = state_dict["state"]
        check_shapes(self, state_dict, self.name_to_dtype_map)
        # torch would cast states to the dtype of their parameter.
        super().load_state_dict({**state_dict, "state": {}})
        self._scales.clear()
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, param in zip(saved, self._all_params(), strict=True):
            loaded = states.get(index, {})
            for name, value in loaded.items():
                value = local_part(torch.as_tensor(value))
                if self._needs_master(param) if name == MASTER else name in self.name_to_dtype_map:
                    if name != MASTER and name not in self.state[param]:
                        self._add_state(param, name, self._zero_state(param, name))
                    value = value.to(device=param.device, dtype=torch.float32, copy=True)
                    (self.set_scaled_state if name == MASTER else self._store)(param, name, value)
                    if f"{name}{_SCALE}" in loaded:
                        take_scale(self.state[param][name], loaded[f"{name}{_SCALE}"])

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset all gradients, also ``decoupled_grad``.

        Args:
            set_to_none: set gradients to None instead of zero; by default as ``set_grad_none`` says.
        """
        forget = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=forget)
        for param in self._all_params():
            grad = getattr(param, "decoupled_grad", None)
            if grad is not None:
                param.decoupled_grad = None if forget else grad.zero_()  # type: ignore[attr-defined]


def _as_float32(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return as_plain(grad).to(torch.float32).contiguous()


def _is_same(param: Tensor, master: Tensor) -> bool:
    """Whether ``master`` is the memory of the parameter itself."""
    own = local_part(param)
    if isinstance(own, QuantizedTensor | FakeTensor):
        return False
    return bool(own.data_ptr() == master.data_ptr())


def _is_fake(own: Tensor) -> bool:
    buffer = own.planes()[0].data if isinstance(own, QuantizedTensor) else own
    return isinstance(buffer, FakeTensor)


def _batches(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split ``params`` into lists on one device each, of about `_BATCH` elements in total."""
    for device in dict.fromkeys(param.device for param in params):
        batch: list[Tensor] = []
        size = 0
        for param in params:
            if param.device != device:
                continue
            batch.append(param)
            size += param.numel()
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch
