"""Files and memory: bounded, given back whatever happens, and errors that say what was wanted where."""

import errno
import functools
import gc
import itertools
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
import torch.multiprocessing as mp

import crossgrain as cg
from crossgrain.offload import store as stores
from crossgrain.offload.extents import Extents

PAGE = 4096


def open_files(directory):
    """Of this process, also those without a name; and the sizes of them."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(directory)):
                found.append(os.stat(f"/proc/self/fd/{descriptor}").st_size)
        except OSError:  # that of the listing itself
            continue
    return found


def run(x, layers=3):
    """Each layer saves its output."""
    for _ in range(layers):
        x = (x * 1.01).exp()
    return x


def inputs(size=PAGE // 4):
    return torch.linspace(-1, 0, size).requires_grad_()


# ---- extents -----------------------------------------------------------------------------------------


def test_extents_are_used_again_and_the_end_comes_back():
    extents = Extents()
    a, b, c, d = (extents.take(10) for _ in range(4))
    assert (a, b, c, d, extents.end) == (0, 10, 20, 30, 40)
    extents.give_back(a, 10)
    extents.give_back(c, 10)
    assert extents.take(11) == 40
    assert extents.take(10) == 0
    extents.give_back(b, 10)
    assert extents.take(15) == 10, "b and c are one"
    extents.give_back(40, 11)
    assert extents.end == 40
    extents.give_back(d, 10)
    assert extents.end == 25


def test_extents_never_overlap():
    generator = torch.Generator().manual_seed(0)
    extents, taken = Extents(), {}
    for _ in range(2000):
        number = int(torch.randint(1000, (), generator=generator))
        if taken and number < 480:
            offset = list(taken)[number % len(taken)]
            extents.give_back(offset, taken.pop(offset))
        else:
            size = number % 7 + 1
            offset = extents.take(size)
            assert all(offset + size <= other or offset >= other + room for other, room in taken.items())
            taken[offset] = size
        assert extents.end == max((offset + size for offset, size in taken.items()), default=0)
        free = extents._free
        assert sum(taken.values()) + sum(size for _, size in free) == extents.end
        assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(free))


# ---- given back --------------------------------------------------------------------------------------


def test_files_have_no_name_and_shrink_as_backward_goes(tmp_path):
    x = inputs()
    offload = cg.offload(tmp_path, min_bytes=0, prefetch=0)
    with offload:
        y = run(x)
    offload.wait()
    assert os.listdir(tmp_path) == []
    assert open_files(tmp_path) == [3 * PAGE] and offload.stats.used == 3 * PAGE
    sizes = []
    stats = type(offload).stats.fget
    note = functools.partial(lambda of, _: sizes.append(stats(of).used), offload)
    y.grad_fn.next_functions[0][0].register_prehook(note)
    y.sum().backward()
    offload.wait()
    assert sizes == [2 * PAGE], "the last exp has its bytes back when the one before it runs"
    assert open_files(tmp_path) == [0]
    del offload, y, note
    assert open_files(tmp_path) == []


def test_a_graph_that_is_dropped_gives_back_all(tmp_path):
    offload = cg.offload(tmp_path, min_bytes=0)
    with offload:
        y = run(inputs())
    del y
    offload.wait()
    assert offload.stats.used == 0 and open_files(tmp_path) == [0]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_give_back_all(where, kind, tmp_path):
    x = inputs()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                raise kind("stop")
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            raise kind("stop")

    offload = cg.offload(tmp_path, min_bytes=0)

    def train():
        with offload:
            y = run(Fails.apply(run(x)))
        y.sum().backward()

    with pytest.raises(kind, match="stop"):
        train()
    gc.collect()
    offload.wait()
    assert offload.stats.used == 0 and open_files(tmp_path) == [0]
    with offload:
        run(x).sum().backward()  # still good
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


SCRIPT = """
import os, signal, sys, torch, crossgrain as cg
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
offload = cg.offload(sys.argv[1], min_bytes=0)
x = torch.ones(4096, requires_grad=True)
with offload:
    y = x
    for _ in range(8):
        y = (y * 0.5).exp()
    offload.wait()
    print(offload.stats.used, flush=True)
    sys.stdin.read()
"""


def test_ctrl_c_ends_the_process_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert int(process.stdout.readline()) == 8 * 4096 * 4
        assert os.listdir(tmp_path) == [], "not even a process that is killed leaves something"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert os.listdir(tmp_path) == []


def test_places_that_die_while_the_store_is_busy_are_given_back_by_it(tmp_path):
    store = stores.DirectoryStore(tmp_path)
    place = store.reserve(10)
    with store._lock:
        del place
        assert store.used == PAGE
    store.reserve(10)
    assert store.used == 0


# ---- limits and full disks ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "directory"])
def test_a_limit_raises_before_anything_is_written(where, tmp_path):
    place = tmp_path if where == "directory" else "host"
    offload = cg.offload(place, min_bytes=0, limit_bytes=2 * PAGE)
    x = inputs()
    name = "host memory" if where == "host" else str(tmp_path)
    with (
        pytest.raises(
            cg.OffloadError,
            match=f"offload to {name}: storing {PAGE} bytes more would exceed the limit of {2 * PAGE} bytes",
        ),
        offload,
    ):
        run(x)
    gc.collect()
    offload.wait()
    assert offload.stats.used == 0
    with offload:
        y = run(x, layers=2)
    y.sum().backward()


def test_what_is_over_the_limit_stays_in_memory_on_request(tmp_path):
    x = inputs()
    (expected,) = torch.autograd.grad(run(x).sum(), x)
    offload = cg.offload(tmp_path, min_bytes=0, limit_bytes=2 * PAGE, over_limit="keep")
    with offload:
        y = run(x)
    assert offload.stats[:3] == (2 * PAGE, 0, PAGE)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_what_a_reader_maps_is_not_handed_out_again(tmp_path):
    store = stores.DirectoryStore(tmp_path)
    place = store.reserve(PAGE)
    store.write(place, torch.full((PAGE,), 7, dtype=torch.uint8))
    pages = store.read(place, PAGE)
    del place
    other = store.reserve(PAGE)
    store.write(other, torch.zeros(PAGE, dtype=torch.uint8))
    assert other.offset == PAGE and bool((pages == 7).all())
    del pages
    assert store.reserve(PAGE).offset == 0


def test_a_file_that_grew_in_part_shrinks_again(tmp_path, monkeypatch):
    store = stores.DirectoryStore(tmp_path)

    def grows_in_part(descriptor, start, more):
        os.ftruncate(descriptor, start + more // 2)
        full()

    monkeypatch.setattr(stores.os, "posix_fallocate", grows_in_part)
    with pytest.raises(cg.OffloadError, match="No space left"):
        store.reserve(4 * PAGE)
    assert open_files(tmp_path) == [0]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("over_limit", ["raise", "keep"])
def test_a_full_disk_is_an_error_where_room_is_asked_for(over_limit, tmp_path, monkeypatch):
    offload = cg.offload(tmp_path, min_bytes=0, over_limit=over_limit)
    x = inputs()
    with offload:
        y = run(x)
    offload.wait()
    monkeypatch.setattr(stores.os, "posix_fallocate", full)
    message = f"{tmp_path}: {PAGE} bytes could not be stored.*No space left"
    with pytest.raises(cg.OffloadError, match=message) as caught, offload:
        run(x)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert offload.stats.used == 3 * PAGE and open_files(tmp_path) == [3 * PAGE]
    del y
    assert open_files(tmp_path) == [0]


@pytest.mark.parametrize("noticed", ["pack", "exit", "wait", "unpack"])
def test_a_write_that_fails_in_the_worker_raises_in_the_training_thread(noticed, tmp_path, monkeypatch):
    monkeypatch.setattr(stores.os, "pwrite", full)
    offload = cg.offload(tmp_path, min_bytes=0)
    x = inputs()
    message = f"{tmp_path}: {PAGE} bytes could not be stored.*No space left"
    held = []

    def train():
        with offload:
            held.append(run(x, layers=1))
            if noticed in ("pack", "exit"):
                offload._engine._worker.submit(int).result()
            if noticed == "pack":
                held.append(run(x, layers=1))
        if noticed == "wait":
            offload.wait()
        offload._engine._worker.submit(int).result()
        held[0].sum().backward()

    with pytest.raises(cg.OffloadError, match=message):
        train()
    assert len(held) == 1
    if noticed != "unpack":
        with pytest.raises(cg.OffloadError, match=message):
            held[0].sum().backward()
    assert x.grad is None
    for record in offload._engine._in_order.values():
        failure = record.failure
        assert failure.__traceback__ is None and failure.__cause__.__traceback__ is None, "frames hold the record"
    del record, failure
    held.clear()
    offload._engine._worker.submit(int).result()
    gc.collect()
    assert offload.stats.used == 0 and open_files(tmp_path) == [0]


def test_the_limit_of_the_system_for_files(tmp_path):
    """A real refusal, not one that was put in."""
    offload = cg.offload(tmp_path, min_bytes=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = 1 << 20
    x = inputs(size)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 4 * 2, hard))
        message = rf"{size * 4} bytes could not be stored \({size * 8} are in use\): "
        with pytest.raises(cg.OffloadError, match=message), offload:
            run(x)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()
    offload.wait()
    assert open_files(tmp_path) == [0]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(stores.os, "pwrite", lambda file, data, at: write(file, data[:1000], at))
    offload = cg.offload(tmp_path, min_bytes=0)
    x = inputs()
    with offload:
        y = run(x)
    offload.wait()
    monkeypatch.undo()
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, run(x))))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"where": "there/is/none"}, "offload to there/is/none: this directory does not exist"),
        ({"min_bytes": -1}, "min_bytes must be >= 0, got -1"),
        ({"pending": 0}, "pending must be >= 1, got 0"),
        ({"limit_bytes": -1}, "limit_bytes must be >= 0, got -1"),
        ({"over_limit": "drop"}, "over_limit must be 'raise' or 'keep', got 'drop'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises((ValueError, NotADirectoryError), match=message):
        cg.offload(**options)


# ---- forks -------------------------------------------------------------------------------------------


def _child(_, held, results):
    y, x, offload = held
    messages = []
    for attempt in (functools.partial(torch.autograd.grad, y.sum(), x), offload.__enter__):
        try:
            attempt()
        except cg.OffloadError as error:
            messages.append(str(error))
    held.clear()
    del y, offload, attempt
    gc.collect()
    results.extend(messages)


def test_a_fork_leaves_the_files_of_its_parent_alone(tmp_path):
    x = inputs()
    offload = cg.offload(tmp_path, min_bytes=0)
    with offload:
        y = run(x)
    offload.wait()
    with mp.get_context("fork").Manager() as manager:
        messages = manager.list()
        mp.start_processes(_child, args=([y, x, offload], messages), nprocs=1, start_method="fork")
        assert [
            f"was set up in process {os.getpid()} and cannot be used in its forked child" in m for m in messages
        ] == [True, True]
    assert open_files(tmp_path) == [3 * PAGE]
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, run(x))))


def _drop(_, held):
    held.clear()


def test_places_that_die_in_a_fork_are_still_in_use(tmp_path):
    store = stores.DirectoryStore(tmp_path)
    held = [store.reserve(PAGE)]
    mp.start_processes(_drop, args=(held,), nprocs=1, start_method="fork")
    assert open_files(tmp_path) == [PAGE]
