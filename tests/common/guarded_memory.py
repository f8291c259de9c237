"""Memory in which compiled kernels cannot go astray unseen.

Kernels work with bare addresses. In `guarded_child`, every buffer that they are given lies between canary bytes, and
beyond those between pages that nobody may touch, so that a read or a write there ends the child with a signal. Every
call of a kernel is checked: its addresses are in such buffers, their canaries are whole after it, and what it only
reads is unchanged. All calls go through ``runtime._compiled``, which is replaced by a `_GuardedKernels`.
"""

import ctypes
import faulthandler
import inspect
import mmap
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numba.core.dispatcher import Dispatcher

from crossgrain.kernels import workspaces
from crossgrain.kernels.cpu import (
    backend,
    columns,
    decode,
    decoders,
    few_rows,
    fingerprint,
    fp8_tiles,
    jobs,
    measure,
    nvfp4_columns,
    nvfp4_product,
    nvfp4_rows,
    nvfp4_tiles,
    places,
    products,
    programs,
    rows,
    runtime,
    support,
    transposed,
    turned,
)

PLACES = ("end", "start", "middle")  # where a buffer lies in its pages: at their end, at their start, at an odd address

_PAGE = mmap.PAGESIZE
_CANARY = 0xC3
_CANARIES = bytes([_CANARY]) * 2 * _PAGE
_PROT_NONE = 0
_LEAST_ADDRESS = 1 << 32  # sizes, steps and keys of random numbers are less

_MODULES = (
    columns,
    decode,
    few_rows,
    fingerprint,
    fp8_tiles,
    jobs,
    measure,
    nvfp4_columns,
    nvfp4_product,
    nvfp4_rows,
    nvfp4_tiles,
    programs,
    rows,
    transposed,
    turned,
)
_NVFP4_ROWS = {"codes", "scales", "scratch"}

# What each kernel may write to, by the names of its parameters; it only reads from all other addresses.
WRITTEN: dict[str, set[str]] = {
    "columns.mx_columns": {"codes", "scales", "row_codes", "row_scales", "scratch"},
    "columns.mx_tiles": {"row_codes", "row_scales", "column_codes", "column_scales"},
    "decode.block_rows": {"out"},
    "decode.mx_columns": {"out"},
    "decode.mx_rows": {"out"},
    "decode.nvfp4_rows": {"out", "table"},
    "decode.scaled": {"out"},
    "few_rows.multiply": {"out", "scratch"},  # its table is no guarded buffer
    "fingerprint.of_chunks": {"out"},
    "fp8_tiles.tiles": {"row_codes", "row_scales", "column_codes", "column_scales", "scratch"},
    "fp8_tiles.whole": {"row_codes", "column_codes", "scratch"},
    "jobs.jobs": {"results"},
    "measure.of_all": set(),
    "measure.of_columns": {"out"},
    "measure.of_rotated": set(),
    "measure.of_rows": {"out"},
    "nvfp4_columns.columns": {"codes", "scales", "row_codes", "row_scales", "scratch"},
    "nvfp4_product.multiply": {"out", "scratch"},
    "nvfp4_product.pack_left": {"out"},
    "nvfp4_product.pack_right": {"out"},
    "nvfp4_rows.block_rows": _NVFP4_ROWS,
    "nvfp4_rows.tile_rows": _NVFP4_ROWS,
    "nvfp4_tiles.both": {"row_codes", "row_scales", "codes", "scales", "scratch"},
    "programs.given_factor": {"factor", "other_factor", "scale"},
    "programs.joint_factor": {"factor"},
    "programs.note": {"out"},
    "programs.program": set(),  # its table is no guarded buffer; see `_lines`
    "programs.tensor_factor": {"factor", "other_factor", "scale"},
    "programs.two_level_scales": {"amax", "encode", "decode", "each_amax"},
    "programs.zeros": {"out"},
    "rows.cast": {"codes"},
    "rows.encode_rows": _NVFP4_ROWS,
    "rows.run": _NVFP4_ROWS,
    "transposed.encode_columns": _NVFP4_ROWS,
    "turned.decode_turned": {"out", "scratch"},
}

_protect = ctypes.CDLL(None, use_errno=True).mprotect
_protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def name_of(kernel: Any) -> str:
    return f"{kernel.py_func.__module__.rpartition('.')[2]}.{kernel.py_func.__name__}"


def all_kernels() -> set[str]:
    """The names of all kernels that Python calls; the others are compiled into them."""
    found = (value for module in _MODULES for value in vars(module).values() if isinstance(value, Dispatcher))
    return {name_of(each) for each in found if not each.targetoptions.get("forceinline")}


_KERNELS_GIVEN = ("run", "address", "runner", "decoder")  # parameters that are addresses of other kernels


def _kernel_at(address: int) -> Any:
    """The kernel that another one is given to call."""
    return next(key[0] for key, found in runtime._addresses.items() if found == address)


@lru_cache
def _parameters(kernel: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kernel.py_func).parameters)


class Region:
    """A buffer between canaries and forbidden pages."""

    def __init__(self, size: int, item: int, place: str) -> None:
        odd = 32 + item
        pages = -(-(size + (odd if place == "middle" else 0)) // _PAGE)
        self._map = mmap.mmap(-1, (pages + 2) * _PAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        inside = np.frombuffer(self._map, np.uint8, pages * _PAGE, _PAGE)
        inside[:] = _CANARY
        start = {"end": pages * _PAGE - size, "start": 0, "middle": odd}[place]
        self._before, self.bytes, self._after = np.split(inside, (start, start + size))
        self.begin = base + _PAGE + start
        self.end = self.begin + size
        for forbidden in (base, base + (pages + 1) * _PAGE):
            assert _protect(forbidden, _PAGE, _PROT_NONE) == 0

    def problem(self) -> str | None:
        for side, canary in (("before", self._before), ("after", self._after)):
            if canary.tobytes() != _CANARIES[: len(canary)]:
                changed = np.flatnonzero(canary != _CANARY)
                distance = len(canary) - changed[-1] if side == "before" else changed[0] + 1
                return f"wrote {distance} bytes {side} a buffer of {len(self.bytes)} bytes"
        return None


class Guard:
    """Allocates regions, and checks every call of a kernel against them.

    Attributes:
        seen: the names of all kernels that were called.
    """

    def __init__(self, note: mmap.mmap) -> None:
        self.seen: set[str] = set()
        self._note = note  # the kernel that runs, for the parent of a child that dies in it
        self._regions: list[Region] = []
        self._place = PLACES[0]
        self._make = {name: getattr(torch, name) for name in ("empty", "zeros")}

    @contextmanager
    def buffers_at(self, place: str) -> Iterator[None]:
        """Give new memory to kernels, also what they would reuse, and forget it at the end."""
        self._place, self._regions = place, []
        support._scratch, decoders._tables, workspaces._buffers = (
            support._Scratch(),
            decoders._Tables(),
            workspaces._Buffers(),
        )
        products.scale_values.cache_clear()
        decoders._decoders.clear()  # which have kernels without a guard, as have products
        products._entries.clear()
        support.ONE = support.numbers(1.0)
        yield
        for region in self._regions:
            problem = region.problem()
            assert problem is None, f"a kernel {problem}, which was not a buffer of its call"

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in guarded memory."""
        return self._new("empty", tuple(tensor.shape), dtype=tensor.dtype).copy_(tensor)

    def _new(self, name: str, *args: Any, **options: Any) -> torch.Tensor:
        like = self._make[name](*args, **options)
        if like.device.type != "cpu" or like.numel() == 0:
            return like
        flat = torch.from_numpy(self._region(like.numel() * like.element_size(), like.element_size()).bytes)
        made = flat.view(like.dtype).view(like.shape)
        return made.zero_() if name == "zeros" else made

    def _new_array(self, shape: Any, dtype: Any) -> np.ndarray:
        size, item = int(np.prod(shape)), np.dtype(dtype).itemsize
        return self._region(size * item, item).bytes.view(dtype).reshape(shape)

    def _region(self, size: int, item: int) -> Region:
        self._regions.append(Region(size, item, self._place))
        return self._regions[-1]

    def install(self) -> None:
        """Guard all that kernels are given from here on. There is no way back: this is for a child."""
        for name in self._make:
            setattr(torch, name, partial(self._new, name))
        runtime.np = SimpleNamespace(**{**vars(np), "empty": self._new_array})
        runtime._compiled = _GuardedKernels(self, runtime._compiled)
        readable = backend.readable_memory
        backend.readable_memory = lambda x: x if readable(x) is x else self.copy(readable(x))
        make_numbers = places.Numbers.__init__
        places.Numbers.__init__ = lambda numbers, memory, sizes=None: make_numbers(
            numbers, self.copy(torch.as_tensor(memory, dtype=torch.float32)), sizes
        )
        make_scale_values = products.scale_values.__wrapped__
        products.scale_values = lru_cache(lambda: self.copy(make_scale_values()))
        backend._STREAM_FROM = 1  # small results are written past the caches too, if they are aligned
        runtime.ELEMENTS_PER_THREAD = 256

    def call(self, kernel: Any, entry: Callable[..., Any], *given: Any) -> Any:
        read, written = self._regions_of(kernel, given)
        before = [(region, region.bytes.copy()) for region in read if region not in written]
        name = name_of(kernel)
        self._note[: len(name) + 1] = name.encode() + b"\0"
        result = entry(*given)
        for region in (*read, *written):
            problem = region.problem()
            assert problem is None, f"the kernel {name} {problem}"
        for region, bytes_ in before:
            assert np.array_equal(region.bytes, bytes_), f"the kernel {name} changed what it should only read"
        return result

    def _regions_of(
        self, kernel: Any, given: tuple[Any, ...], inside: range = range(0)
    ) -> tuple[list[Region], list[Region]]:
        """What a call reads and writes. ``inside`` are addresses in the table of a program."""
        name = name_of(kernel)
        self.seen.add(name)
        if kernel is programs.program:
            return self._regions_of_program(*given)
        read: list[Region] = []
        written: list[Region] = []
        for parameter, value in zip(_parameters(kernel), given, strict=True):
            if kernel is few_rows.multiply and parameter == "table":
                continue
            if parameter in _KERNELS_GIVEN and value:
                self.seen.add(name_of(_kernel_at(value)))
            elif type(value) is int and value >= _LEAST_ADDRESS and value not in inside:
                region = next((each for each in reversed(self._regions) if each.begin <= value < each.end), None)
                assert region is not None, f"{parameter} of the kernel {name} is not the address of a guarded buffer"
                (written if parameter in WRITTEN[name] else read).append(region)
        if kernel is jobs.jobs:
            for of_job in self._jobs(*given):
                read, written = ([*mine, *more] for mine, more in zip((read, written), of_job, strict=True))
        return read, written

    def _regions_of_program(self, table: int, first: int, last: int, tag: Any) -> tuple[list[Region], list[Region]]:
        """What the lines of a program read and write."""
        words = ctypes.cast(table, ctypes.POINTER(ctypes.c_int64))
        lines = [words[at * programs.LINE : (at + 1) * programs.LINE] for at in range(last)]
        size = jobs.SLOT + max(line[3] for line in lines)
        read: list[Region] = []
        written: list[Region] = []
        for runner, kernel, arguments, _, _ in lines[first:]:
            kinds, tags = next(key[-1] for key, found in runtime._addresses.items() if found == runner).split(":")
            start = arguments // jobs.SLOT
            values = [words[start + at] if kind == "i" else None for at, kind in enumerate(kinds)]
            given = (*values, *[None] * int(tags))
            found = self._regions_of(_kernel_at(kernel), given, range(table, table + size))
            read, written = [*read, *found[0]], [*written, *found[1]]
        return read, written

    def _jobs(
        self, address: int, table: int, count: int, step: int, results: int, work: Any
    ) -> Iterator[tuple[list, list]]:
        """The regions of each job in a table."""
        kinds, tags = work.name.split(":")
        lines = np.ctypeslib.as_array(ctypes.cast(table, ctypes.POINTER(ctypes.c_int64)), (count, step // jobs.SLOT))
        for line in lines:
            values = [int(value) if kind == "i" else None for value, kind in zip(line, kinds, strict=True)]
            yield self._regions_of(_kernel_at(address), (*values, *[None] * int(tags)))


class _GuardedKernels(dict):
    """Machine code by kernel and tags, all of whose calls go through a guard."""

    def __init__(self, guard: Guard, compiled: dict) -> None:
        super().__init__(compiled)
        self._guard = guard

    def get(self, key: tuple, default: Any = None) -> Any:
        return self[key] if super().get(key) is not None else default

    def __getitem__(self, key: tuple) -> Any:
        return partial(self._guard.call, key[0], super().__getitem__(key))


def guarded_child(work: Callable[[Guard], None]) -> None:
    """Run ``work`` in a forked process, with a guard over all kernels.

    What it computes before, unguarded, compiles kernels that the child has then. Raises AssertionError if it fails, or
    if the child touches forbidden memory.
    """
    note = mmap.mmap(-1, _PAGE)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            faulthandler.disable()
            torch.set_num_threads(1)  # the threads that OpenMP waits for are not here
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            guard = Guard(note)
            guard.install()
            work(guard)
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(writing, text.encode()[-60_000:])
            os._exit(1 if text else 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        kernel = bytes(note).partition(b"\0")[0].decode()
        ended = signal.Signals(os.WTERMSIG(status)).name
        raise AssertionError(f"the kernel {kernel} touched memory outside of its buffers ({ended})")
    if status:
        raise AssertionError(f"of the guarded child:\n{text}")
