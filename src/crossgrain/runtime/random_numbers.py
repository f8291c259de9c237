"""Random numbers: states of the generator by name, for parallel ranks, and seeds of stochastic rounding."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .host_and_device import on_device
from .logs import warn
from .passes import same_seed, same_value
from .transforms import dispatch_modes, new_tensors_are_fake


class CudaRNGStatesTracker:
    """Named states of torch's generators: of the CPU, and of the current GPU if there is one.

    The name of the class is that of Transformer Engine and Megatron.

    Examples:
        >>> tracker = cg.CudaRNGStatesTracker()
        >>> tracker.add("model-parallel-rng", 1)  # another seed on each rank
        >>> with tracker.fork():  # draws from that state, and continues from there next time
        ...     dropped = torch.nn.functional.dropout(torch.ones(4))
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Remove all states."""
        self._states.clear()
        self._seeds.clear()

    def get_states(self) -> dict[str, Tensor]:
        """Copies of the states by name: bytes of the CPU's generator, followed by those of the GPU's."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Set the states that `get_states` returned.

        Raises:
            ValueError: a state was made without a GPU, and now there is one.
        """
        for name, state in states.items():
            if torch.cuda.is_available() and len(state) == len(torch.get_rng_state()):
                raise ValueError(
                    f"the random state {name!r} was made without a GPU, whose generator would not follow it: reset the "
                    "tracker and add the state again"
                )
        self._states = {name: state.clone() for name, state in states.items()}

    def state_dict(self) -> dict[str, Any]:
        """States and seeds, for checkpoints."""
        return {"states": self.get_states(), "seeds": sorted(self._seeds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states and seeds that `state_dict` returned."""
        seeds = {int(seed) for seed in state["seeds"]}
        self.set_states(state["states"])
        self._seeds = seeds

    def add(self, name: str, seed: int) -> None:
        """Add a state.

        Args:
            name: name of the state.
            seed: seed from which it begins.

        Raises:
            ValueError: the name or the seed was already added.
        """
        if seed in self._seeds:
            raise ValueError(f"a state with the seed {seed} was already added")
        if name in self._states:
            raise ValueError(f"a state with the name {name!r} was already added")
        self._seeds.add(seed)
        self._states[name] = _states_from(seed)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """A context manager in which torch draws from a named state. The state outside does not change.

        Raises:
            KeyError: there is no state of this name.
        """
        if name not in self._states:
            raise KeyError(f"there is no state {name!r}; available: {', '.join(self._states) or 'none'}")
        outer = _generator_states()
        _set_generator_states(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _generator_states()
            _set_generator_states(outer)


def _states_from(seed: int) -> Tensor:
    """The states of `_generator_states` that begin from a seed. The generators themselves do not change."""
    cpu = torch.Generator().manual_seed(seed).get_state()
    if not torch.cuda.is_available():
        return cpu
    outer = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(seed)  # of the current GPU only
    seeded = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(outer)
    return torch.cat((cpu, seeded))


def _generator_states() -> Tensor:
    """The states of torch's generators of the CPU and of the current GPU, if there is one, in one tensor of bytes."""
    cpu = torch.get_rng_state()
    return torch.cat((cpu, torch.cuda.get_rng_state())) if torch.cuda.is_available() else cpu


def _set_generator_states(states: Tensor) -> None:
    size = len(torch.get_rng_state())
    torch.set_rng_state(states[:size].clone())  # generators read the memory of a tensor from its beginning
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states[size:].clone())


def forked_generators() -> AbstractContextManager[None]:
    """A context manager: torch's generators, also that of a GPU in use, are afterwards as they were before."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else [])


class LayerDraws:
    """Seeds of stochastic rounding by what is rounded and how often it was: they depend on nothing else that runs.

    Args:
        seed: seed of all of them.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: Counter[str] = Counter()

    def next(self, subject: str) -> int:
        """The next seed for a subject."""
        text = f"{self._seed}:{self._drawn[subject]}:{subject}"
        self._drawn[subject] += 1
        return _not_of_an_earlier_capture(_hashed(text))


def _hashed(text: str) -> int:
    """A seed of 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


_by_layer: LayerDraws | None = None  # not a context variable: backward may run in threads of autograd


@contextmanager
def draws_by_layer(seed: int) -> Iterator[None]:
    """Context manager: stochastic rounding draws its seeds by layer, tensor and call, not from torch's generator.

    Changing the format of one layer then leaves the draws of all other layers as they were, so that two runs differ
    only by what was changed. Forward and backward must both be inside; the calls of a layer are counted from the
    beginning of the context. It applies to all threads of the process.

    Args:
        seed: another seed gives other draws everywhere.

    Examples:
        >>> layer, x = cg.Linear(32, 32, name="fc1"), torch.randn(32, 32)
        >>> results = []
        >>> for _ in range(2):
        ...     with cg.draws_by_layer(seed=1), cg.autocast(recipe="mxfp4(sr)"):
        ...         results.append(layer(x))
        >>> torch.equal(*results)
        True
    """
    global _by_layer
    outer, _by_layer = _by_layer, LayerDraws(seed)
    try:
        yield
    finally:
        _by_layer = outer


class DrawRecord:
    """Seeds that one run has drawn, by what was rounded and how often it was, for other runs to use again.

    Attributes:
        count: number of seeds that were recorded.
    """

    def __init__(self) -> None:
        self.count = 0
        self._seeds: dict[str, list[int]] = {}
        self._used: Counter[str] | None = None  # None while seeds are recorded
        self._variant = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: record the seeds that are drawn inside, in place of those recorded before."""
        self.count, self._seeds = 0, {}
        with self._active(None):
            yield

    @contextmanager
    def repeating(self, variant: int = 0) -> Iterator[None]:
        """Context manager: use the recorded seeds again. Where more are needed, they are drawn as usual.

        Torch's generator still advances with each of them, so that dropout draws the same numbers as in the recorded
        run. If another part of a model rounds more or less often than before, the seeds of all other parts stay.

        Args:
            variant: any other number than 0 gives other seeds for the rounding, and still the same dropout.
        """
        with self._active(Counter(), variant):
            yield

    @contextmanager
    def _active(self, used: Counter[str] | None, variant: int = 0) -> Iterator[None]:
        global _record
        outer, _record, self._used, self._variant = _record, self, used, variant
        try:
            yield
        finally:
            _record = outer

    def next(self, subject: str, drawn: int) -> int:
        """The seed to use for a subject, if ``drawn`` was drawn for it just now."""
        seeds = self._seeds.setdefault(subject, [])
        if self._used is None:
            self.count += 1
            seeds.append(drawn)
            return drawn
        at = self._used[subject]
        self._used[subject] += 1
        seed = seeds[at] if at < len(seeds) else drawn
        return seed if self._variant == 0 else _hashed(f"{self._variant}:{seed}")


_record: DrawRecord | None = None  # not a context variable, see above


class _Again(threading.local):
    drawn: tuple[object, int] | None = None  # a subject and its seed


_again = _Again()


@contextmanager
def seed_again(subject: object, seed: int) -> Iterator[None]:
    """A context manager: the next `draw_seed` for ``subject`` in this thread returns ``seed``, which it drew before."""
    outer, _again.drawn = _again.drawn, (subject, seed)
    try:
        yield
    finally:
        _again.drawn = outer


def draw_seed(subject: object = "") -> int:
    """A seed of 64 random bits: from torch's default generator, from `draws_by_layer`, or from a `DrawRecord`.

    A recomputation in backward gets the seed of the first pass.

    Args:
        subject: what is rounded, such as "fc1, input"; `draws_by_layer` and `DrawRecord` use it.
    """
    draws, record = _by_layer, _record
    if dispatch_modes() and new_tensors_are_fake():
        if get_proxy_mode() is not None:
            raise NotImplementedError(
                f"{subject or 'a tensor'}: stochastic rounding cannot be recorded by make_fx, which would store its "
                "seed as a constant. Use torch.compile or torch.export, or round to nearest."
            )
        return 0  # what is rounded has no numbers, and nobody may notice
    if _again.drawn is not None and _again.drawn[0] is subject:
        (_, seed), _again.drawn = _again.drawn, None
        return seed
    if draws is not None:
        return same_value(_drawn_seed, lambda: draws.next(str(subject)))
    drawn = same_seed(_drawn_seed)
    return drawn if record is None else same_value(DrawRecord, lambda: record.next(str(subject), drawn))


def _drawn_seed() -> int:
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(-(2**63), None))
    return _not_of_an_earlier_capture(seed) if _seeds_of_capture else seed


_seeds_of_capture: dict[tuple[torch.device, int], Tensor] = {}


def seed_for_device(seed: int, device: torch.device) -> Tensor:
    """A seed as a tensor [1] of int64 on a device, for kernels that take it by pointer. The host does not wait.

    While a CUDA graph is captured, a number of the host would be frozen in it, and every replay would round alike. The
    graph then draws from the generator of the device instead, which gives each replay other numbers. Calls with the
    same ``seed`` share one draw, so that a recomputation still rounds as the first pass did.

    Args:
        seed: what `draw_seed` has returned.
        device: device of the tensor that is rounded.
    """
    if device.type != "cuda":
        return on_device([seed], device, torch.int64)
    if not torch.cuda.is_current_stream_capturing():
        _seeds_of_capture.clear()
        return on_device([seed], device, torch.int64)
    _warn_of_capture()
    drawn = _seeds_of_capture.get((device, seed))
    if drawn is None:
        drawn = torch.empty(1, dtype=torch.int64, device=device).random_(-(2**63), None)
        _seeds_of_capture[device, seed] = drawn
    return drawn


def seeds_for_device(seeds: Sequence[int], device: torch.device) -> Tensor:
    """`seed_for_device` for several seeds: one tensor, and one copy unless a CUDA graph is captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.cat([seed_for_device(seed, device) for seed in seeds])
    _seeds_of_capture.clear()
    return on_device(seeds, device, torch.int64)


def _not_of_an_earlier_capture(seed: int) -> int:
    """A seed that was just drawn. An earlier graph may have had the same number, and must not share its draw."""
    for key in [key for key in _seeds_of_capture if key[1] == seed]:
        del _seeds_of_capture[key]
    return seed


def _warn_of_capture() -> None:
    warn(
        __name__,
        "stochastic rounding in a CUDA graph draws its seeds from the generator of the GPU, so that replays differ: "
        "its draws are not those of the same program without a graph",
    )
