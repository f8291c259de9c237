"""Nothing half written is ever seen: a process killed at any stage, and a disk that is full at any stage."""

import errno
import itertools
import os
import random
import signal
import time

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import files
from crossgrain.files import durable
from crossgrain.optim import FusedAdam

from ..common.saved_models import assert_same_contents, contents, quantized_model


def model_of(step):
    torch.manual_seed(step)
    return nn.Linear(3, 3)


STAGES = [(os, "mkdir"), (torch, "save"), (os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink")]


def stop_at(number, stop, monkeypatch=None, after=False):
    """Replace all calls that touch the disk: the one of that number stops; returns those made."""
    made = []
    for module, name in STAGES:
        real = getattr(module, name)

        def call(*args, real=real, name=name, **options):
            made.append(name)
            if len(made) - 1 == number and not after:
                stop()
            mine = len(made) - 1
            result = real(*args, **options)
            if mine == number and after:
                stop()
            return result

        if monkeypatch is None:
            setattr(module, name, call)  # in a process that ends here
        else:
            monkeypatch.setattr(module, name, call)
    return made


def run_in_child(work):
    """Whether it ended by itself."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_at_every_stage_leaves_the_last_whole_checkpoint(after, tmp_path):
    files.save_checkpoint(tmp_path, 1, model=model_of(1))
    files.save_checkpoint(tmp_path, 2, model=model_of(2))
    step, number, found = 3, 0, []
    while True:

        def work(step=step, number=number):
            stop_at(number, kill, after=after)
            files.save_checkpoint(tmp_path, step, keep=2, model=model_of(step))

        ended = run_in_child(work)
        latest = int(files.latest_checkpoint(tmp_path).name[5:])
        assert latest in (step - 1, step)
        for path in tmp_path.glob("step-*"):
            files.verify_checkpoint(path)  # older ones are whole too, or gone
        model = nn.Linear(3, 3)
        assert files.load_checkpoint(tmp_path, model=model).step == latest
        assert_same_contents(contents(model), contents(model_of(latest)))
        found.append(latest - step)
        step, number = latest + 1, number + 1
        if ended:
            break
    # Until the rename the old one is the last, from there on the new one: what is not at the end is never both.
    assert found == sorted(found) and found[0] == -1 and found[-1] == 0
    assert number > 12, "the stages were really reached"
    assert [name for name in os.listdir(tmp_path) if not name.startswith("step-")] == [], "remains are cleared away"


def test_a_full_disk_at_every_stage_is_an_error_and_leaves_nothing(tmp_path):
    files.save_checkpoint(tmp_path, 1, model=model_of(1))
    before = sorted(os.listdir(tmp_path))

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    for number in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            stop_at(number, full, patch)
            with pytest.raises(OSError, match="No space left"):
                files.save_checkpoint(tmp_path, 2, model=model_of(2))
        files.verify_checkpoint(tmp_path)
        if files.latest_checkpoint(tmp_path).name == "step-00000002":
            break  # the last thing that can fail is to bring the name to the disk, when it is there
        assert sorted(os.listdir(tmp_path)) == before
    assert number > 10


def test_a_disk_that_fills_up_while_torch_writes(tmp_path):
    """torch itself would only say that a position is unexpected."""
    resource = pytest.importorskip("resource")

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(OSError, match="File too large"):
            files.save_checkpoint(tmp_path, 1, model=nn.Linear(300, 300))

    assert run_in_child(work)
    assert os.listdir(tmp_path) == []


def test_everything_is_on_the_disk_before_the_name_and_the_name_after(tmp_path, monkeypatch):
    order = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        order.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])
        real_fsync(descriptor)

    def rename(a, b):
        order.append("rename")
        real_rename(a, b)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    files.save_checkpoint(tmp_path, 1, model=model_of(1))
    at = order.index("rename")
    names = {"model.pt", "extras.pt", "random.pt", "manifest.json", "manifest.sha256"}
    assert set(order[: at - 1]) == names
    assert order[at - 1].startswith(".writing-") and order[at + 1 :] == [tmp_path.name]


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half():
        with durable.whole_file(path) as temporary:
            temporary.write_text("half of the n")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]
    with durable.whole_file(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["file"]


def test_remains_of_the_dead_are_removed_and_those_of_the_living_left(tmp_path):
    beside = durable.temporary_beside(tmp_path / "step-1").name
    own = str(os.getpid())
    mine, elsewhere = tmp_path / beside, tmp_path / beside.replace(durable._host(), "another0")
    before_me = tmp_path / beside.replace(durable._token(), "00000000")
    init = tmp_path / beside.replace(own, "1")
    dead = tmp_path / beside.replace(own, "999999999")
    for path in (mine, elsewhere, before_me, init, dead):
        path.mkdir()
        (path / "half").write_text("")
    durable.remove_remains(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, elsewhere.name, init.name}


def test_an_attempt_that_left_its_directory_behind_does_not_block_the_next(tmp_path, monkeypatch):
    """A second interrupt may come while the first one's remains are being removed."""
    with monkeypatch.context() as patched:
        patched.setattr(durable.shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(KeyboardInterrupt), durable.whole_directory(tmp_path / "step-1") as left:
            raise KeyboardInterrupt
    with durable.whole_directory(tmp_path / "step-1") as temporary:
        (temporary / "file").write_text("new")
    assert left.is_dir() and (tmp_path / "step-1" / "file").read_text() == "new"


# ---- the kill test -----------------------------------------------------------------------------------

KILLS = 50
MOST_KILLS = 400
RECIPE = "mxfp8-fwd-nvfp4-bwd"  # with stochastic rounding: random states count


class Run:
    def __init__(self):
        self.model = quantized_model(RECIPE, preserve=True)[:1]
        self.optimizer = FusedAdam(self.model.parameters(), lr=0.01, master_weights=True)

    def train(self):
        with cg.autocast(recipe=RECIPE):
            self.model(torch.randn(32, 32)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train_and_save(self, root, step, report):
        """What a training script does, for ever."""
        while True:
            os.write(report, b"-")
            self.train()
            step += 1
            files.save_checkpoint(root, step, keep=2, model=self.model, optimizer=self.optimizer, recipe=RECIPE)
            os.write(report, b"+")


def test_fifty_kills_lose_nothing(tmp_path):
    """After each kill the last checkpoint that was reported is there, or a newer one, and it is what an
    uninterrupted run has at that step, bit for bit - though this run was interrupted up to fifty times."""
    Run().train()  # kernels are loaded now
    reference = Run()
    torch.manual_seed(11)
    start = time.perf_counter()
    files.save_checkpoint(tmp_path, 0, model=reference.model, optimizer=reference.optimizer)
    reference.train()
    duration = min(time.perf_counter() - start, 0.2)  # of a step and its checkpoint, as a first guess
    state = torch.get_rng_state()
    history = [contents(Run().model), contents(reference.model)]
    delays, interrupted = random.Random(5), 0
    step, run = 0, Run()
    files.load_checkpoint(tmp_path, model=run.model, optimizer=run.optimizer)
    for kill in range(MOST_KILLS):
        if kill >= KILLS and step > 5 and interrupted > 5:  # it got on, and was caught in the act
            break
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                run.train_and_save(tmp_path, step, writing)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            begun = pipe.read(1)
            time.sleep(delays.uniform(0.0, 1.5 * duration))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            reported = (begun + pipe.read()).count(b"+")
        assert os.WIFSIGNALED(status), "the child failed by itself"
        duration *= 0.9 if reported else 1.2  # however busy the machine is, about one checkpoint is written
        interrupted += any(name.startswith(".writing-") for name in os.listdir(tmp_path))

        newest = int(files.latest_checkpoint(tmp_path).name[5:])
        assert newest in (step + reported, step + reported + 1)
        step = newest
        torch.set_rng_state(state)
        while len(history) <= step:
            reference.train()
            history.append(contents(reference.model))
        state = torch.get_rng_state()
        assert files.load_checkpoint(tmp_path, model=run.model, optimizer=run.optimizer).step == step
        assert_same_contents(contents(run.model), history[step])
    else:
        pytest.fail(f"after {MOST_KILLS} kills only {step} checkpoints were written, {interrupted} interrupted")
