"""Quantized weights under torch's own dcp.save and dcp.load, on any number of ranks."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import crossgrain as cg
from crossgrain.distributed.checkpoint import ModelState, OptimizerState

from ..common.logs import silent
from ..common.quantizers import assert_same_bytes
from ..common.ranks import digest, mesh_of, quantized_model, run, shard, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

CASES = {
    "mxfp8-fwd-nvfp4-bwd": lambda model: cg.optim.FusedAdam(model.parameters(), lr=1e-2, master_weights=True),
    "fp8-delayed": lambda model: cg.optim.with_masters(torch.optim.AdamW, model.parameters(), lr=1e-2),
    "nvfp4": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "fp8": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}
ROWS = 384  # in whole blocks for 1, 2, 3 and 4 ranks


def made(recipe, ranks):
    model = shard(quantized_model(recipe, hidden=ROWS, width=ROWS), mesh_of(ranks))
    return model, CASES[recipe](model)


def states(model, optimizer):
    return {"model": ModelState(model), "optimizer": OptimizerState(optimizer)}


def saved(rank, root):
    found = {}
    for recipe in CASES:
        model, optimizer = made(recipe, 2)
        train(model, optimizer, 2)
        dcp.save(states(model, optimizer), checkpoint_id=root / recipe)
        found[recipe] = digest(model), train(model, optimizer, 2)
    return found


def loaded(rank, root, ranks):
    found = {}
    for recipe in CASES:
        model, optimizer = made(recipe, ranks)
        before = digest(model)
        state = states(model, optimizer)
        state["optimizer"].state_dict()  # begins a copy of the optimizer, with a step
        assert digest(model) == before
        assert not optimizer.state
        dcp.load(state, checkpoint_id=root / recipe)
        found[recipe] = digest(model), train(model, optimizer, 2)
    return found


def test_any_number_of_ranks_goes_on_with_the_same_bytes(tmp_path):
    """Losses are sums over ranks, which another number of ranks adds up in another order: only digests are compared."""
    before = run(saved, 2, tmp_path, tmp_path)
    assert run(loaded, 2, tmp_path, tmp_path, 2) == before
    for ranks in (1, 3, 4):
        for found in run(loaded, ranks, tmp_path, tmp_path, ranks):
            assert {recipe: bits for recipe, (bits, _) in found.items()} == {
                recipe: bits for recipe, (bits, _) in before[0].items()
            }


def kept(recipe, seed=0):
    torch.manual_seed(seed)
    with cg.quantized_model_init(recipe=recipe):
        return nn.Sequential(cg.Linear(64, 64))


def test_another_format_is_refused_before_anything_changes(tmp_path):
    dcp.save({"model": ModelState(kept("all: mxfp8"))}, checkpoint_id=tmp_path)
    model = kept("all: nvfp4", seed=1)
    before = model[0].weight.clone()
    with pytest.raises(CheckpointException, match="Size mismatch .* for model.0.weight.rowwise.data"):
        dcp.load({"model": ModelState(model)}, checkpoint_id=tmp_path)
    assert_same_bytes(model[0].weight, before)
    fresh = kept("all: mxfp8", seed=1)
    dcp.load({"model": ModelState(fresh)}, checkpoint_id=tmp_path)
    assert_same_bytes(fresh[0].weight, kept("all: mxfp8")[0].weight)


def test_elements_of_the_same_size_are_told_apart(tmp_path):
    """E4M3 and E5M2 have planes of the same names and sizes: only the description tells which they are."""
    state = ModelState(kept("fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8")).state_dict()
    other = ModelState(_e5m2())
    with pytest.raises(ValueError, match=r"the checkpoint does not fit the model: 0.weight: .*mxfp8.*mxfp8_e5m2"):
        other.load_state_dict(state)


def _e5m2():
    def factory(role):
        return cg.MXFP8Quantizer(cg.DType.kFloat8E5M2)

    with cg.quantized_model_init(recipe=cg.recipe.CustomRecipe(qfactory=factory)):
        return nn.Sequential(cg.Linear(64, 64))


def test_a_state_of_somebody_else_is_refused():
    model = kept("all: mxfp8")
    with pytest.raises(ValueError, match="was not saved by crossgrain.distributed.checkpoint.ModelState"):
        ModelState(model).load_state_dict({"weight": torch.zeros(1)})


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
        lambda params: torch.optim.Rprop(params, lr=0.1),
    ],
)
def test_an_optimizer_that_was_saved_before_its_first_step_begins_as_a_new_one(make, tmp_path):
    results = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = make(model.parameters())
        (dcp.load if resumes else dcp.save)({"optimizer": OptimizerState(optimizer)}, checkpoint_id=tmp_path)
        assert not optimizer.state
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
        results.append(model.weight)
    assert torch.equal(*results)


@pytest.mark.parametrize("case", ["mxfp8-fwd-nvfp4-bwd", "fp8-delayed"])
def test_masters_begin_with_preserved_initial_values_also_if_saved_before_the_first_step(case, tmp_path):
    masters = []
    for call in (None, dcp.save, dcp.load):  # neither saving nor loading makes a difference
        torch.manual_seed(5 if call is dcp.load else 0)
        with cg.quantized_model_init(recipe="all: mxfp8", preserve_high_precision_init_val=True):
            model = nn.Sequential(cg.Linear(32, 32, bias=False))
        optimizer = CASES[case](model)
        if call is not None:
            call(states(model, optimizer), checkpoint_id=tmp_path)
        for _ in range(2):
            model[0].weight.grad = torch.ones(32, 32)
            optimizer.step()
        masters.append(optimizer.state[model[0].weight]["master_param"])
    assert torch.equal(masters[0], masters[1])
    assert torch.equal(masters[0], masters[2])


def test_looking_at_the_state_of_an_optimizer_warns_of_nothing():
    model = kept("all: mxfp8")
    with silent():
        OptimizerState(torch.optim.AdamW(model.parameters(), lr=0.1)).state_dict()


def test_a_plain_model_and_a_used_optimizer(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    dcp.save(states(model, optimizer), checkpoint_id=tmp_path)
    wanted = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.step()
    dcp.load(states(model, optimizer), checkpoint_id=tmp_path)
    for name, value in wanted[0].items():
        assert torch.equal(model.state_dict()[name], value)
    for index, state in wanted[1]["state"].items():
        for name, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][index][name], value)
