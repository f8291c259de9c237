"""Interrupts at random moments: nobody writes where they should not, and what was interrupted can be done again.

Every work is interrupted INTERRUPTS times (an environment variable), at moments that differ from run to run, every
second time once more while the first interrupt is on its way up. It runs in a process of its own, which is killed with
a traceback of all threads if it hangs.
"""

import copy
import faulthandler
import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import files, optim
from crossgrain.distributed import gather_by_pass
from crossgrain.gemm import gemm
from crossgrain.kernels.cpu import runtime
from crossgrain.planes import COLUMNWISE, ROWWISE
from crossgrain.tensor.sharding import local_part

from ..common.interrupts import Arena, interrupted, moments
from ..common.quantizers import QUANTIZERS, hybrid_of
from ..common.ranks import mesh_of, quantized_model, run, shard, train
from ..common.saved_models import assert_same_contents, contents

COUNT = int(os.environ.get("INTERRUPTS", "8"))
PATIENCE = 120 + COUNT  # seconds
SHAPE = (256, 256)
FORMATS = ("mxfp8", "nvfp4", "fp8", "fp8_block", "nvfp4_rht_sr", "mxfp8_2d", "nvfp4_4over6_mse", "mxfp6_e2m3")
RECIPES = ("mxfp8-fwd-nvfp4-bwd", "fp8", "nvfp4-1d-weight")


def attack(tmp_path, work, *cases):
    """Run ``work`` on each of the cases with one thread and with two, in a process of its own."""
    (hits,) = run(_attacked, 1, tmp_path, work, cases)
    total = 2 * COUNT * len(cases)
    assert hits >= total // 8, f"only {hits} of {total} interrupts came in time"


def _attacked(rank, work, cases):
    """The number of interrupts that came before the work was done."""
    runtime.ELEMENTS_PER_THREAD = 1 << 12
    faulthandler.dump_traceback_later(PATIENCE * len(cases), exit=True)
    hits = 0
    for os.environ["CROSSGRAIN_NUM_THREADS"] in ("1", "2"):
        hits += sum(work(*case) for case in cases)
    faulthandler.cancel_dump_traceback_later()
    return hits


# ---- quantizing ------------------------------------------------------------------------------------------


def _quantize(name):
    quantizer = hybrid_of("mxfp8", "nvfp4_rht") if name == "hybrid" else QUANTIZERS[name]()
    arena, x = Arena(1 << 21), torch.randn(SHAPE)
    q = quantizer(x)
    for tensor in (x, q):
        arena.adopt(tensor)

    def work():
        torch.manual_seed(5)
        q.quantize_(x)
        rows, columns = q.plane(ROWWISE), q.plane(COLUMNWISE)
        return [q.dequantize(), gemm("fprop", rows, rows), gemm("wgrad", columns, columns)]

    expected, bytes_of_q, bytes_of_x = work(), contents(q), x.clone()
    hits = 0
    for after in moments(work, COUNT):
        hits += interrupted(work, after, raises=1 + hits % 2)
        arena.check_canaries()
        arena.check_quiet()
        assert torch.equal(x, bytes_of_x)
        assert all(map(torch.equal, work(), expected))
        assert_same_contents(contents(q), bytes_of_q)
    return hits


def test_quantizing_and_multiplying(tmp_path):
    attack(tmp_path, _quantize, *[(name,) for name in (*FORMATS, "hybrid")])


# ---- optimizers ------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "FusedAdam": lambda params: optim.FusedAdam(params, lr=1e-2, master_weights=True, exp_avg_dtype=torch.float16),
    "FusedSGD": lambda params: optim.FusedSGD(params, lr=1e-2, momentum=0.9, master_weights=True),
    "with_masters": lambda params: optim.with_masters(torch.optim.AdamW, params, lr=1e-2),
}


def _step(name, recipe):
    torch.manual_seed(0)
    with cg.quantized_model_init(recipe=recipe):
        model = nn.Sequential(cg.Linear(128, 256), cg.Linear(256, 128, params_dtype=torch.bfloat16))
    params = list(model.parameters())
    arena = Arena(1 << 22)
    for param in params:
        param.grad = torch.randn_like(param.dequantize() if isinstance(param, cg.QuantizedTensor) else param)
        arena.adopt(param.grad)
        arena.adopt(param)
    gradients = [param.grad for param in params]
    optimizer = OPTIMIZERS[name](params)
    optimizer.step()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                arena.adopt(value)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def restore():
        model.load_state_dict(before[0])
        optimizer.load_state_dict(copy.deepcopy(before[1]))
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient

    def step():
        torch.manual_seed(5)
        optimizer.step()

    step()
    expected = contents([model, optimizer])
    hits = 0
    for after in moments(step, COUNT):
        restore()
        hits += interrupted(step, after, raises=1 + hits % 2)
        arena.check_canaries()
        arena.check_quiet()
        restore()
        step()
        assert_same_contents(contents([model, optimizer]), expected)
    return hits


def test_steps_of_optimizers(tmp_path):
    attack(tmp_path, _step, *zip(OPTIMIZERS, RECIPES, strict=True))


# ---- files -----------------------------------------------------------------------------------------------


def _model_of(seed):
    torch.manual_seed(seed)
    with cg.quantized_model_init(recipe="mxfp8-fwd-nvfp4-bwd"):
        return nn.Sequential(cg.Linear(64, 128), nn.LayerNorm(128), cg.Linear(128, 64))


def _save_safetensors(parent):
    folder = Path(tempfile.mkdtemp(dir=parent))
    path = folder / "model.safetensors"
    models, hits, turn = [_model_of(0), _model_of(1)], 0, 0
    holds = [contents(model) for model in models]
    files.save_safetensors(models[0], path)

    for after in moments(lambda: files.save_safetensors(models[0], path), COUNT):
        new = 1 - turn
        hit = interrupted(lambda new=new: files.save_safetensors(models[new], path), after, raises=1 + hits % 2)
        hits += hit
        found = contents(files.read_safetensors(path).state_dict)
        turn = next(
            which for which in (turn, new) if found.keys() == holds[which].keys() and _equal(found, holds[which])
        )
        assert hit or turn == new, "a save that was not interrupted is done"
    files.save_safetensors(models[0], path)
    assert_same_contents(contents(files.read_safetensors(path).state_dict), holds[0])
    return hits


def _save_checkpoint(parent):
    folder = Path(tempfile.mkdtemp(dir=parent))
    model = _model_of(0)
    optimizer = optim.FusedAdam(model.parameters(), master_weights=True)
    other, step, hits = _model_of(1), 0, 0
    files.save_checkpoint(folder, step, model=model, optimizer=optimizer)

    def timed():
        nonlocal step
        step += 1
        files.save_checkpoint(folder, step, model=model, optimizer=optimizer, keep=2)

    for after in moments(timed, COUNT):
        old, step = step, step + 1
        seed = step
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)))

        def save(step=step):
            files.save_checkpoint(folder, step, model=model, optimizer=optimizer, extras={"seed": step}, keep=2)

        hit = interrupted(save, after, raises=1 + hits % 2)
        hits += hit
        files.verify_checkpoint(folder)
        loaded = files.load_checkpoint(folder, model=other)
        assert loaded.step in (old, step) and (hit or loaded.step == step)
        if loaded.step == step:
            assert loaded.extras == {"seed": seed}
            assert_same_contents(contents(other), contents(model))
        else:
            step = old
    step += 1
    files.save_checkpoint(folder, step, model=model, optimizer=optimizer, keep=1)
    assert [path.name for path in folder.glob("step-*")] == [f"step-{step:08d}"]
    return hits


def _equal(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("save", [_save_safetensors, _save_checkpoint])
def test_saving_files(tmp_path, save):
    """A file is the old one or the new one."""
    attack(tmp_path, save, (tmp_path,))


def _load_checkpoint(parent):
    folder = Path(tempfile.mkdtemp(dir=parent))
    model, other = _model_of(0), _model_of(1)
    optimizers = [optim.FusedAdam(each.parameters(), master_weights=True) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        for param in each.parameters():
            param.grad = torch.ones(param.shape)
        optimizer.step()
    mine, theirs = contents([model, optimizers[0]]), contents([other, optimizers[1]])
    files.save_checkpoint(folder / "mine", 1, model=model, optimizer=optimizers[0])
    files.save_checkpoint(folder / "theirs", 1, model=other, optimizer=optimizers[1])

    def load(name):
        files.load_checkpoint(folder / name, model=model, optimizer=optimizers[0])

    hits = 0
    for after in moments(lambda: load("mine"), COUNT):
        load("mine")
        hit = interrupted(lambda: load("theirs"), after)
        hits += hit
        found = contents([model, optimizers[0]])
        assert _equal(found, mine) or _equal(found, theirs), "half of a checkpoint was loaded"
        assert hit or _equal(found, theirs)
    return hits


def test_loading_a_checkpoint(tmp_path):
    """All of it is loaded, or nothing."""
    attack(tmp_path, _load_checkpoint, (tmp_path,))


# ---- sharded weights -------------------------------------------------------------------------------------


def _gather(recipe):
    model = shard(quantized_model(recipe, hidden=256, width=128), mesh_of(1))
    arena = Arena(1 << 22)
    shards = [p for p in (local_part(p) for p in model.parameters()) if isinstance(p, cg.QuantizedTensor)]
    assert shards
    for each in shards:
        arena.adopt(each)
    mesh, wholes = mesh_of(1), [None] * len(shards)

    def gather():
        for at, each in enumerate(shards):
            (sent,), how = each.fsdp_pre_all_gather(mesh)
            received = torch.empty_like(sent)
            torch.distributed.all_gather_into_tensor(received, sent)
            made = each.fsdp_post_all_gather((received,), how, each.dtype, out=wholes[at])
            if wholes[at] is None:
                wholes[at] = made[0]

    gather()
    expected, sent = [contents(whole) for whole in wholes], [contents(each) for each in shards]
    hits = 0
    for after in moments(gather, COUNT):
        hits += interrupted(gather, after, raises=1 + hits % 2)
        arena.check_canaries()
        arena.check_quiet()
        gather()
        for found, whole in zip(expected, wholes, strict=True):
            assert_same_contents(contents(whole), found)
        for found, each in zip(sent, shards, strict=True):
            assert_same_contents(contents(each), found)
    return hits


def test_gathering_shards(tmp_path):
    attack(tmp_path, _gather, *[(recipe,) for recipe in RECIPES])


def _train_in_shards():
    """FSDP2 itself may be in the middle of anything then, so it is a new model that must train as ever."""
    mesh = mesh_of(1)

    def trained():
        model = shard(quantized_model("mxfp8-fwd-nvfp4-bwd"), mesh)
        gather_by_pass(model)
        return train(model, optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True), steps=2)

    expected, hits = trained(), 0
    for after in moments(trained, COUNT):
        hits += interrupted(trained, after, raises=1 + hits % 2)
        assert trained() == expected
    return hits


def test_training_in_shards(tmp_path):
    attack(tmp_path, _train_in_shards, ())
