"""What crossgrain tells its users: by `logging`, under names that begin with "crossgrain", each thing once.

    warn(__name__, f"{self.layer}: its weight has a gradient, but the layer was never called")

No handler is installed. Where the user has configured none, Python writes warnings to stderr; a NullHandler would hide
them. Messages begin with "crossgrain: ", because that line on stderr has nothing else that says who speaks.

Deprecated names are the exception. They are for programmers, who look for a `DeprecationWarning`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .callers import levels_to_caller
from .torch_patches.compiler_marks import constant_in_graphs

# A long run may have new things to say for ever, for example about lengths of batches. The oldest are forgotten.
MOST_REMEMBERED = 1000

_told: OrderedDict[Hashable, None] = OrderedDict()
_lock = threading.RLock()  # the autograd engine has threads of its own; handlers of signals run inside of one
_withheld: ContextVar[list[str] | None] = ContextVar("withheld", default=None)


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)  # whoever held it is not in the child, which would wait for ever


@constant_in_graphs  # the compiler cannot trace calls of loggers: it calls this while it traces
def warn(name: str, text: str, subject: Hashable = None, *, once: bool = True) -> None:
    """Log a warning, once.

    Args:
        name: ``__name__`` of the module that warns: the name of the logger.
        text: what to say. It begins with the name of the layer, if it is about one.
        subject: what the warning is about, if the text has more in it, such as a number that changes. Another text
            about the same subject is not logged. None: the text.
        once: False to log it in any case, for callers that know themselves what they have said.
    """
    _tell(logging.WARNING, name, text, subject, once)


@constant_in_graphs
def inform(name: str, what: object) -> None:
    """Log what may be good to know, each time; it becomes a text if somebody listens. The default level hides it."""
    _tell(logging.INFO, name, what, None, once=False)


@contextmanager
def withheld() -> Iterator[list[str]]:
    """Context manager: warnings of this thread go to the list that it returns, and nowhere else.

    They are in the list also if they were logged before, and they do not count as logged.
    """
    texts: list[str] = []
    token = _withheld.set(texts)
    try:
        yield texts
    finally:
        _withheld.reset(token)


def forget() -> None:
    """Forget what was said, so that it is said again."""
    with _lock:
        _told.clear()


def _tell(level: int, name: str, text: object, subject: Hashable, once: bool) -> None:
    aside = _withheld.get()
    if aside is not None:
        aside.extend([str(text)] if level >= logging.WARNING else [])
        return
    logger, key = logging.getLogger(name), (name, text if subject is None else subject)
    if not logger.isEnabledFor(level) or (once and not _is_new(key)):
        return
    try:
        logger.log(level, "crossgrain: %s", text, stacklevel=levels_to_caller())
    except BaseException:  # of a handler that makes errors of warnings: the next attempt must fail as well
        if once:
            with _lock:
                _told.pop(key, None)
        raise


def _is_new(key: Hashable) -> bool:
    """Whether this was not said before. It is noted as said."""
    with _lock:
        if key in _told:
            return False
        _told[key] = None
        if len(_told) > MOST_REMEMBERED:
            _told.popitem(last=False)
        return True
