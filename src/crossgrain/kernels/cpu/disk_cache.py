"""numba's cache on disk, made harmless: where it is damaged or cannot be used, kernels are compiled instead.

numba puts the files beside the sources, or into the user's cache directory where it may not write there,
and raises at whatever is wrong with them.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile

_warned = False


def cached_on_disk(dispatcher: Any) -> Any:
    """``dispatcher``, with its machine code kept for the next process if there is a place for it."""
    try:
        dispatcher._cache = _KernelCache(dispatcher.py_func)
    except Exception as error:
        _warn_once(error)
    return dispatcher


class _KernelCache(FunctionCache):
    """Never raises: what cannot be loaded is compiled, what cannot be saved is not."""

    def __init__(self, py_func):
        super().__init__(py_func)
        locator = self._impl.locator
        self._cache_file = _CheckedFile(self._cache_path, self._impl.filename_base, locator.get_source_stamp())

    def load_overload(self, sig, target_context):
        try:
            found = super().load_overload(sig, target_context)
            if found is not None and found.signature.args != sig:
                raise ValueError(f"the index of {self._name} leads to other machine code")
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
    """Files that end with a checksum: machine code with a flipped bit would still load, and run."""

    def _dump(self, obj):
        data = super()._dump(obj)
        return data + _checksum(data)  # numba unpickles the index, and does not look behind the end of a pickle

    def _load_data(self, name):
        content = Path(self._data_path(name)).read_bytes()
        data, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
        if _checksum(data) != checksum:
            raise ValueError(f"{self._data_path(name)} is damaged")
        return pickle.loads(data)

    def _load_index(self):
        """An index that cannot be read is written anew."""
        try:
            return dict(super()._load_index())
        except Exception as error:
            _warn_once(error)
            return {}


_CHECKSUM_BYTES = hashlib.sha256().digest_size


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _warn_once(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"crossgrain: the cache of compiled kernels on disk cannot be used, they are compiled instead: {error!r}",
            stacklevel=3,
        )
