"""Checkpoints in shards: every format, from any number of ranks to any other, whole or not there."""

import hashlib
import json
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.spawn import ProcessExitedException

import crossgrain as cg
from crossgrain import files
from crossgrain.distributed import ColwiseParallel, RowwiseParallel, checkpoint, gather_quantized
from crossgrain.tensor.sharding import local_part

from ..common.planes import normal
from ..common.quantizers import PAIRS, QUANTIZERS, assert_same_bytes, hybrid_of
from ..common.ranks import bind, converted_model, digest, error_of, mesh_of, quantized_model, run, shard, train

PLAIN = ("fp8", "fp8_delayed", "fp8_block", "fp8_block_2d", "mxfp8", "mxfp8_2d", "mxfp4", "mxfp6_e2m3", "nvfp4_2d")
BY_ROW = "nvfp4_row_scaled"
EVERYTHING = [*((kind, 0) for kind in (*PLAIN, BY_ROW, "identity", *PAIRS)), ("fp8", 1), (BY_ROW, 1)]
SOME = [(("mxfp8", "nvfp4_rht"), 0), (("nvfp4", "fp8_block_2d"), 1), ("fp8_block", 0), ("fp8", 0)]
RANKS = (1, 2, 4, 3)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


# ---- every format ------------------------------------------------------------------------------------------


def wholes(kinds, numbers):
    """Tensors that 1, 2, 3 and 4 ranks can share in whole blocks, and the dimension that is cut."""
    found = {}
    for kind, dim in kinds:
        quantizer = QUANTIZERS[kind]() if isinstance(kind, str) else hybrid_of(*kind)
        long, short = (1536, 128) if "block" in str(kind) else (384, 64)
        found[f"{kind}:{dim}"] = quantizer(numbers(*((short, long) if dim else (long, short)))), dim
    return found


class Shards(nn.Module):
    """Parameters of which each rank has its part."""

    def __init__(self, tensors, ranks):
        super().__init__()
        mesh = mesh_of(ranks)
        for name, (whole, dim) in tensors.items():
            local = part(whole, dim, dist.get_rank(), ranks)
            stride = whole.stride()
            param = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=stride)
            self.register_parameter(name, nn.Parameter(param, requires_grad=False))


def part(whole, dim, rank, ranks):
    size = whole.shape[dim] // ranks
    return whole.narrow(dim, rank * size, size)


def _write(rank, ranks, root, everything, some):
    checkpoint.save(root / str(ranks), 1, everything=Shards(everything, ranks), some=Shards(some, ranks))


def _read(rank, ranks, root, tensors, others, name, writers):
    for count in writers:
        model = Shards(others, ranks)
        checkpoint.load(root / str(count), **{name: model})
        for own, (whole, dim) in tensors.items():
            assert_same_bytes(local_part(getattr(model, own)), part(whole, dim, rank, ranks)._clone())


def test_any_number_of_ranks_reads_what_any_other_has_written(tmp_path):
    """All kinds of formats and hybrids from 1 to 2 to 4 to 3 ranks, some of them from each to each."""
    everything, some = wholes(EVERYTHING, normal), wholes(SOME, normal)
    other_numbers, few_others = wholes(EVERYTHING, torch.zeros), wholes(SOME, torch.zeros)
    for at, ranks in enumerate(RANKS):
        run(_write, ranks, tmp_path, ranks, tmp_path, everything, some)
        if at:
            run(_read, ranks, tmp_path, ranks, tmp_path, everything, other_numbers, "everything", RANKS[at - 1 : at])
    for ranks in RANKS:
        run(_read, ranks, tmp_path, ranks, tmp_path, some, few_others, "some", RANKS)
    alone = nn.Module()
    for name, (whole, _) in other_numbers.items():
        alone.register_parameter(name, nn.Parameter(whole, requires_grad=False))
    checkpoint.load(tmp_path / "3", everything=alone)
    for name, (whole, _) in everything.items():
        assert_same_bytes(getattr(alone, name), whole)


# ---- training ----------------------------------------------------------------------------------------------

SIZES = {"hidden": 128, "width": 128}


def fused(model):
    return cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)


def adamw(model):
    return cg.optim.with_masters(torch.optim.AdamW, model.parameters(), lr=1e-2)


CASES = {"mxfp8-fwd-nvfp4-bwd": fused, "fp8-delayed": adamw, "nvfp4": fused}


def sharded(recipe, ranks):
    return shard(quantized_model(recipe, **SIZES), mesh_of(ranks))


def _interrupted(rank, root):
    found = {}
    for recipe, make in CASES.items():
        model = sharded(recipe, 2)
        optimizer = make(model)
        train(model, optimizer, 2)
        path = checkpoint.save(root / recipe, 2, model=model, optimizer=optimizer, extras={"seen": (1, 2.5)})
        assert path == files.latest_checkpoint(root / recipe)
        found[recipe] = train(model, optimizer, 2), digest(model)
    return found


def _resumed(rank, root, ranks):
    found = {}
    for recipe, make in CASES.items():
        model = sharded(recipe, ranks)
        optimizer = make(model)
        done = checkpoint.load(root / recipe, model=model, optimizer=optimizer)
        assert (done.step, done.extras, done.recipe()) == (2, {"seen": (1, 2.5)}, cg.recipe.as_recipe(recipe))
        found[recipe] = train(model, optimizer, 2), digest(model)
    return found


def test_training_goes_on_as_if_nothing_had_happened(tmp_path):
    """Losses and all bytes, with masters, moments and histories; on as many ranks and on one."""
    uninterrupted = run(_interrupted, 2, tmp_path, tmp_path)
    assert run(_resumed, 2, tmp_path, tmp_path, 2) == uninterrupted
    assert run(_resumed, 1, tmp_path, tmp_path, 1) == uninterrupted[:1]


def _in_high_precision(rank, root, ranks, saves):
    model = converted_model("mxfp8", **SIZES)
    gather_quantized(model)
    shard(model, mesh_of(ranks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if saves:
        train(model, optimizer, 2)
        checkpoint.save(root, 2, model=model, optimizer=optimizer)
    else:
        checkpoint.load(root, model=model, optimizer=optimizer)
    return train(model, optimizer, 2), digest(model)


def test_weights_that_are_gathered_quantized(tmp_path):
    root = tmp_path / "run"
    saved = run(_in_high_precision, 2, tmp_path, root, 2, True)
    assert run(_in_high_precision, 1, tmp_path, root, 1, False) == saved[:1]


def _tensor_parallel(rank, root, ranks, saves):
    model = converted_model("mxfp8-fwd-nvfp4-bwd", **SIZES)[:3]
    parallelize_module(model, mesh_of(ranks), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if saves:
        train(model, optimizer, 2)
        checkpoint.save(root, 2, model=model, optimizer=optimizer)
    else:
        checkpoint.load(root, model=model, optimizer=optimizer)
    state = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    tensors = [*model.parameters(), *(value for value in state if value.dim())]
    return [(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).tolist() for tensor in tensors]


def test_tensor_parallel_layers(tmp_path):
    root = tmp_path / "run"
    saved = run(_tensor_parallel, 2, tmp_path, root, 2, True)
    for ranks in (1, 4):
        assert run(_tensor_parallel, ranks, tmp_path, root, ranks, False) == saved[:1] * ranks


def _in_the_background(rank, root):
    model = sharded("mxfp8-fwd-nvfp4-bwd", 2)
    optimizer = fused(model)
    train(model, optimizer, 1)
    then = digest(model)
    pending = checkpoint.async_save(root, 1, model=model, optimizer=optimizer)
    losses = train(model, optimizer, 2)
    path = pending.wait()
    assert pending.done()
    assert path == files.latest_checkpoint(root)
    assert digest(model) != then
    again = sharded("mxfp8-fwd-nvfp4-bwd", 2)
    optimizer = fused(again)
    checkpoint.load(root, model=again, optimizer=optimizer)
    return digest(again) == then, train(again, optimizer, 2) == losses


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    assert run(_in_the_background, 2, tmp_path, tmp_path / "run") == [(True, True)] * 2


# ---- whole or not there ------------------------------------------------------------------------------------


def _die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def _killed(rank, root, who, where):
    model = sharded("mxfp8", 2)
    checkpoint.save(root, 1, model=model)
    if rank == who:
        setattr(*where, _die)
    checkpoint.save(root, 2, model=model)


@pytest.mark.parametrize(
    ("who", "where"),
    [
        (1, (checkpoint._Writer, "write_data")),
        (0, (checkpoint, "write_manifest")),
        (0, (checkpoint, "publish_directory")),
    ],
    ids=["while shards are written", "after the shards", "before the name is given"],
)
def test_killed_while_saving(tmp_path, who, where):
    root = tmp_path / "run"
    with pytest.raises(ProcessExitedException):
        run(_killed, 2, tmp_path, root, who, where)
    remains = [path.name for path in root.iterdir()]
    assert len(remains) == 2, "the second one was begun"
    assert files.latest_checkpoint(root).name == "step-00000001"
    model = quantized_model("mxfp8", **SIZES)
    for param in model.parameters():
        param.data.zero_()
    checkpoint.load(root, model=model)
    assert digest(model) == digest(quantized_model("mxfp8", **SIZES))
    checkpoint.save(root, 2, model=model, keep=1)
    assert [path.name for path in root.iterdir()] == ["step-00000002"]


def _full_disk(rank, root):
    def fail(*_):
        raise OSError("no space left")

    model = sharded("mxfp8", 2)
    checkpoint.write_manifest = fail
    pending = checkpoint.async_save(root, 1, model=model)
    errors = error_of(lambda: checkpoint.save(root, 2, model=model)), error_of(pending.wait)
    dist.barrier()
    return *errors, os.listdir(root)


def test_what_goes_wrong_is_raised_on_all_ranks_and_nothing_is_left(tmp_path):
    for saved, waited, remains in run(_full_disk, 2, tmp_path, tmp_path / "run"):
        assert saved == waited == ("OSError", "rank 0: OSError: no space left")
        assert remains == []


def test_damaged_files_are_noticed(tmp_path):
    model = quantized_model("mxfp8", **SIZES)
    path = checkpoint.save(tmp_path, 1, model=model)
    shards = next(path.glob("*.distcp"))
    shards.write_bytes(shards.read_bytes()[:-1])
    with pytest.raises(files.DamagedFileError, match="distcp is damaged"):
        checkpoint.load(tmp_path, model=model)


# ---- what is refused ---------------------------------------------------------------------------------------


def named_factory(role):
    return cg.quantizer_for("mxfp8")


def test_functions_of_recipes_have_to_have_names(tmp_path):
    model = quantized_model("mxfp8", **SIZES)
    bind(model, cg.recipe.CustomRecipe(qfactory=lambda role: cg.quantizer_for("mxfp8")))
    with pytest.raises(ValueError, match="module"):
        checkpoint.save(tmp_path, 1, model=model)
    assert list(tmp_path.iterdir()) == []
    bind(model, cg.recipe.CustomRecipe(qfactory=named_factory))
    checkpoint.save(tmp_path, 1, model=model)
    done = checkpoint.load(tmp_path, model=model)
    assert done.recipe(import_functions=True).qfactory is named_factory


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: quantized_model("nvfp4", **SIZES), "rowwise mxfp8, columnwise mxfp8, the model rowwise nvfp4_2d"),
        (lambda: converted_model("mxfp8", **SIZES), "rowwise mxfp8, columnwise mxfp8, the model float32"),
        (lambda: quantized_model("mxfp8", hidden=64, width=128), r"shape \[128, 128\], the model \[64, 128\]"),
    ],
    ids=["another format", "high precision", "another shape"],
)
def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path, model, text):
    checkpoint.save(tmp_path, 1, model=quantized_model("mxfp8", **SIZES))
    model = model()
    before = digest(model)
    with pytest.raises(ValueError, match=f"model.0.weight: the checkpoint h(olds|as) {text}"):
        checkpoint.load(tmp_path, model=model)
    assert digest(model) == before


def test_the_two_kinds_of_checkpoints_are_told_apart(tmp_path):
    model = quantized_model("mxfp8", **SIZES)
    checkpoint.save(tmp_path / "shards", 1, model=model)
    files.save_checkpoint(tmp_path / "files", 1, model=model)
    with pytest.raises(ValueError, match="load it with crossgrain.distributed.checkpoint.load"):
        files.load_checkpoint(tmp_path / "shards", model=model)
    with pytest.raises(ValueError, match="load it with crossgrain.files.load_checkpoint"):
        checkpoint.load(tmp_path / "files", model=model)


def _disagreeing(rank, root):
    model = sharded("nvfp4", 2)
    plain = nn.Linear(4, 4)
    plain.weight.data.fill_(rank)
    unsharded = error_of(lambda: checkpoint.save(root, 1, model=plain))
    local_part(model[0].weight).planes()[0].amax.fill_(rank + 1)
    scales = error_of(lambda: checkpoint.save(root, 1, model=model))
    failed = error_of(lambda: checkpoint.save(root, 1, model=plain, extras={"open": object()} if rank else None))
    replicated = shard(quantized_model("mxfp8", **SIZES), mesh_of(2, 1))
    local_part(replicated[0].weight).planes()[0].data[0, 0] = rank
    replicas = error_of(lambda: checkpoint.save(root, 1, model=replicated))
    return unsharded, scales, failed, replicas, root.exists()


def test_ranks_have_to_agree_about_what_only_one_of_them_writes(tmp_path):
    found = run(_disagreeing, 2, tmp_path, tmp_path / "run")
    for rank, (unsharded, scales, failed, replicas, exists) in enumerate(found):
        assert "model.weight: rank 1 and rank 0 hold the same part of it with different values" in unsharded[1]
        assert (
            "model.0.weight.rowwise.amax: rank 1 and rank 0 hold the same part of it with different values" in scales[1]
        )
        assert "extras.open cannot be saved: a object is neither" in failed[1]
        assert failed[0] == ("TypeError" if rank else "RuntimeError")
        assert (
            "model.0.weight.rowwise.data: rank 1 and rank 0 hold the same part of it with different values"
            in replicas[1]
        )
        assert not exists


def _refused_late(rank, root):
    model = sharded("nvfp4", 2)
    checkpoint.save(root, 1, model=model)
    other = sharded("nvfp4", 2)
    train(other, fused(other), 1)
    other.extra = nn.Parameter(torch.zeros(1))
    before = digest(other)
    return error_of(lambda: checkpoint.load(root, model=other)), digest(other) == before, digest(model) != before


def test_a_model_that_refuses_its_state_is_as_before(tmp_path):
    for error, unchanged, differs in run(_refused_late, 2, tmp_path, tmp_path / "run"):
        assert 'Missing key(s) in state_dict: "extra"' in error[1]
        assert unchanged
        assert differs


# ---- torch's own functions ---------------------------------------------------------------------------------


def _plain_torch(rank, root, recipe, ranks, saves):
    model = sharded(recipe, ranks)
    if saves:
        train(model, fused(model), 1)
        dcp.save(model.state_dict(), checkpoint_id=root)
        return digest(model)
    try:
        dcp.load(model.state_dict(), checkpoint_id=root)
    except CheckpointException as refused:
        return str(refused)
    return digest(model)


def test_torch_saves_quantized_parameters_and_refuses_what_it_cannot_put_together(tmp_path):
    """Without our help: shards of the same rows; others where nothing is shared by the whole tensor."""
    for recipe, another in (("mxfp8", None), ("nvfp4", "shares its per-tensor nvfp4_2d scale")):
        root = tmp_path / recipe
        saved = run(_plain_torch, 2, tmp_path, root, recipe, 2, True)
        assert run(_plain_torch, 2, tmp_path, root, recipe, 2, False) == saved
        (found,) = run(_plain_torch, 1, tmp_path, root, recipe, 1, False)
        assert found == saved[0] if another is None else another in found


# ---- torch's own functions into other formats ------------------------------------------------------------


def test_torchs_load_into_another_format_is_refused_unless_asked_for(tmp_path):
    """It copies tensor by tensor, which would decode and round all numbers a second time."""

    def made(recipe):
        with cg.quantized_model_init(recipe=recipe):
            return torch.nn.Sequential(cg.Linear(64, 64))

    saved, other, same = made("mxfp8"), made("nvfp4"), made("mxfp8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nothing is distributed
        dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
        before = other[0].weight.dequantize()
        with pytest.raises(CheckpointException, match="the checkpoint has mxfp8, the model has nvfp4"):
            dcp.load(other.state_dict(), checkpoint_id=tmp_path)
        assert torch.equal(other[0].weight.dequantize(), before)
        with cg.settings.override(requantize_on_load=True):
            dcp.load(other.state_dict(), checkpoint_id=tmp_path)
        dcp.load(same.state_dict(), checkpoint_id=tmp_path)
    assert torch.equal(same[0].weight.dequantize(), saved[0].weight.dequantize())
    other[0].weight.data.copy_(saved[0].weight)  # whoever copies means it


# ---- forged manifests --------------------------------------------------------------------------------------


def forged(directory, change):
    """A checkpoint of one process whose manifest says something else, under a seal that fits."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    path = checkpoint.save(directory, 1, model=model, optimizer=optimizer)
    content = json.loads((path / "manifest.json").read_text())
    change(content["shards"])
    text = json.dumps(content)
    (path / "manifest.json").write_text(text)
    (path / "manifest.sha256").write_text(hashlib.sha256(text.encode()).hexdigest())
    return path, model, optimizer


def weight_in(shards):
    return dict(shards["model"]["mapping"])["weight"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda shards: weight_in(shards).pop("dtype"), "KeyError: 'dtype'"),
        (lambda shards: weight_in(shards).update(tensor=[2**40, 2**20]), "does not fit into files of [0-9]+ bytes"),
        (lambda shards: shards.pop("extras"), "it says nothing about extras"),
        (lambda shards: shards.update(model={"mapping": 3}), "TypeError"),
    ],
)
def test_a_manifest_that_describes_no_checkpoint_is_refused(tmp_path, change, message):
    path, model, optimizer = forged(tmp_path, change)
    with pytest.raises(files.DamagedFileError, match=message):
        checkpoint.load(path, model=model, optimizer=optimizer)


def test_a_state_that_lacks_what_an_optimizer_needs_is_refused(tmp_path):
    path, model, optimizer = forged(tmp_path, lambda shards: shards.update(optimizer={"mapping": []}))
    with pytest.raises(
        ValueError, match="the saved state of optimizer does not fit this SGD: KeyError: 'param_groups'"
    ):
        checkpoint.load(path, model=model, optimizer=optimizer)
