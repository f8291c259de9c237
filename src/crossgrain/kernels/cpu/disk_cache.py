"""numba's cache on disk, made safe: if it is damaged or cannot be used, kernels are compiled instead.

numba puts the files beside the sources, or into the user's cache directory if it cannot write there, and raises errors
if something is wrong with them.
"""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

from ...runtime.logs import warn


def cached_on_disk(dispatcher: Any) -> Any:
    """Let a kernel save its machine code on disk for other processes, if possible. Returns the kernel."""
    try:
        dispatcher._cache = _KernelCache(dispatcher.py_func)
    except Exception as error:
        _warn_once(error)
    return dispatcher


class _KernelCache(FunctionCache):
    """A cache that never raises: what cannot be loaded is compiled, and what cannot be saved is not saved."""

    def __init__(self, py_func):
        super().__init__(py_func)
        locator = self._impl.locator
        self._cache_file = _CheckedFile(self._cache_path, self._impl.filename_base, locator.get_source_stamp())

    def load_overload(self, sig, target_context):
        try:
            found = super().load_overload(sig, target_context)
            if found is not None and found.signature.args != sig:
                raise ValueError(f"the index of {self._name} refers to other machine code")
            return found
        except Exception as error:
            _warn_once(error)
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn_once(error)


class _CheckedFile(IndexDataCacheFile):
    """Files that end with a checksum: damaged machine code would be loaded and run without it."""

    def _dump(self, obj):
        data = super()._dump(obj)
        return data + _checksum(data)  # numba unpickles the index, and ignores what follows the pickle

    def _load_data(self, name):
        content = Path(self._data_path(name)).read_bytes()
        data, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if _checksum(data) != checksum:
            raise ValueError(f"{self._data_path(name)} is damaged")
        return pickle.loads(data)

    def _load_index(self):
        """Load the index. If it cannot be read, it is empty, and will be written again."""
        try:
            return dict(super()._load_index())
        except Exception as error:
            _warn_once(error)
            return {}


_CHECKSUM_BYTES = hashlib.sha256().digest_size


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _warn_once(error: Exception) -> None:
    warn(
        __name__,
        f"the cache of compiled kernels on disk cannot be used, so kernels are compiled again: {error!r}",
        subject="cache",
    )
