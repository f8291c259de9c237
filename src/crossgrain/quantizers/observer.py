"""See every plane that is made: `observe` calls a function with what was quantized and with what became of it.

    def look(event: PlanesMade) -> None:
        for made in event.made:
            print(event.layer, event.tensor, made.encoding.format.name, made.directions)

    with observe(look):
        model(x).sum().backward()

An observer changes nothing: planes are complete when it is called, and what it does has no part in what follows.
Without observers, quantizing asks one global variable whether there are any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..formats.encoding import Encoding
from ..kernels import Target
from ..planes import Direction, Plane
from ..runtime.passes import Pass, current_pass
from .subject import Subject


@dataclass(frozen=True, eq=False)
class MadePlane:
    """One plane that was made.

    Attributes:
        target: the plane, its encoding, and the amax and scale that it was encoded with. Encoding the source again to
            another plane, with the rest of this target and the same seed, gives the same bytes, unless ranks have parts
            of the tensor.
        directions: the directions in which GEMMs read the plane. One plane may serve both.
    """

    target: Target
    directions: tuple[Direction, ...]

    @property
    def plane(self) -> Plane:
        """The plane."""
        return self.target.plane

    @property
    def encoding(self) -> Encoding:
        """How its bytes were chosen."""
        return self.target.encoding


@dataclass(frozen=True, eq=False)
class PlanesMade:
    """A matrix was encoded. Source and planes are those that training uses: read them, and do not keep them for long.

    Attributes:
        subject: which tensor of which layer it is. It is empty if no layer asked for the planes.
        source: the matrix [M, K] that was encoded, with the zeros that a layer adds up to whole blocks. If
            ``subject.from_rows``, the decoded rowwise plane.
        made: the planes.
        seed: the seed of stochastic rounding; None if nothing was rounded stochastically.
        recomputed: the planes were made once more, with the same bytes, by a checkpoint in backward.
        training: a backward pass may follow, or is running. False for a forward pass without gradients.
        all_groups: the rows are those of all groups of a grouped layer, not only of ``subject.group``.
        complete: all codes were written. False if other ranks write the rest (`quantize_master_weights`); numbers of
            the source that they have are then zero.
    """

    subject: Subject
    source: Tensor
    made: tuple[MadePlane, ...]
    seed: int | None = None
    recomputed: bool = False
    training: bool = True
    all_groups: bool = False
    complete: bool = True

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.subject.layer

    @property
    def tensor(self) -> str:
        """ "input", "weight", "grad_output", ..."""
        return self.subject.tensor

    @property
    def group(self) -> int | None:
        """The group of a grouped layer; None for all of them, or if there are none."""
        return None if self.all_groups else self.subject.group


class ObserverError(RuntimeError):
    """An observer raised an error. It is the ``__cause__`` of this one."""


class _Observer:
    def __init__(self, callback: Callable[[PlanesMade], None], name: str) -> None:
        self.callback = callback
        self.name = name
        self.error: Exception | None = None
        self.failed_at = ""


observers: tuple[_Observer, ...] = ()  # of all threads: backward may run in threads of autograd
_lock = threading.Lock()
_telling = threading.local()
_training: ContextVar[bool] = ContextVar("crossgrain_observed_training", default=True)
_all_groups: ContextVar[bool] = ContextVar("crossgrain_observed_groups", default=False)


@contextmanager
def observe(callback: Callable[[PlanesMade], None], name: str | None = None) -> Iterator[None]:
    """Context manager: call a function whenever planes are made, in any thread of the process.

    The function is called after the planes are complete and NaNs and infinities were dealt with. It may be called by
    several threads at once. Planes that it makes itself, and planes without memory (of the meta device, or while a
    graph is traced), are not reported. If it raises, it is not called again, and the error is raised when the context
    ends: raised at once, it could leave a tensor half written.

    Args:
        callback: the function.
        name: name of the observer in messages; by default that of the function.

    Raises:
        ObserverError: the function raised an error.
    """
    global observers
    mine = _Observer(callback, name or str(getattr(callback, "__qualname__", type(callback).__name__)))
    with _lock:
        observers = (*observers, mine)
    try:
        yield
    finally:
        _leave(mine)
    if mine.error is not None:
        raise ObserverError(
            f"the observer {mine.name} raised {type(mine.error).__name__} when it was shown {mine.failed_at}, and was "
            f"not called again: {mine.error}"
        ) from mine.error


def _leave(observer: _Observer) -> None:
    global observers
    with _lock:
        observers = tuple(other for other in observers if other is not observer)


def tell(
    subject: Subject,
    source: Tensor,
    made: Sequence[tuple[Target, Sequence[Direction]]],
    seed: int | None = None,
    *,
    complete: bool = True,
) -> None:
    """Show planes that were just made to all observers. Code that makes planes asks `observers` before it calls this.

    Args:
        subject: which tensor of which layer it is.
        source: the matrix that was encoded.
        made: the targets that were encoded, and the directions in which each plane is read.
        seed: the seed of stochastic rounding.
        complete: all codes were written.
    """
    if getattr(_telling, "busy", False):  # an observer makes planes of its own
        return
    if source.is_meta or isinstance(source, FakeTensor):
        return
    event = PlanesMade(
        subject,
        source.detach(),
        tuple(MadePlane(target, tuple(directions)) for target, directions in made),
        seed,
        current_pass().recomputes,
        _training.get(),
        _all_groups.get(),
        complete,
    )
    _telling.busy = True
    try:
        for observer in observers:
            try:
                with torch.no_grad():
                    observer.callback(event)
            except Exception as error:
                observer.error, observer.failed_at = error, str(subject) or f"a tensor of shape {list(source.shape)}"
                _leave(observer)
    finally:
        _telling.busy = False


@contextmanager
def noting_gradients(step: AbstractContextManager[None], this: Pass) -> Iterator[None]:
    """A context manager around ``step``, the forward of a layer in a pass: events say whether a backward may follow."""
    token = _training.set(this.trains)
    try:
        with step:
            yield
    finally:
        _training.reset(token)


@contextmanager
def of_all_groups() -> Iterator[None]:
    """A context manager: what is quantized inside are the rows of all groups of a grouped layer."""
    token = _all_groups.set(True)
    try:
        yield
    finally:
        _all_groups.reset(token)
