"""`crossgrain.integrations.accelerate.prepare` with the real accelerate, against a plain loop, bit for bit."""

from __future__ import annotations

import pytest
import torch

import crossgrain as cg

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make test-clients")

from crossgrain.integrations.accelerate import prepare  # noqa: E402

from ..common.llama import llama  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_state():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def step(model, optimizer, backward, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()


def batches(count=4):
    return torch.randint(32, (count, 2, 16), generator=torch.Generator().manual_seed(1))


def plain(recipe, dtype):
    model = llama()
    cg.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(2)
    for tokens in batches():
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def prepared(recipe, **options):
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *prepare(accelerator, recipe, model, optimizer)


def assert_same(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-delayed"])
def test_training_is_that_of_a_plain_loop(recipe, dtype):
    accelerator, model, optimizer = prepared(recipe, mixed_precision="bf16" if dtype else "no")
    torch.manual_seed(2)
    for tokens in batches():
        step(model, optimizer, accelerator.backward, tokens)
    assert_same(accelerator.unwrap_model(model), plain(recipe, dtype))


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
def test_a_state_that_is_loaded_goes_on_with_the_same_bits(recipe, tmp_path):
    accelerator, model, optimizer = prepared(recipe)
    torch.manual_seed(2)
    for tokens in batches()[:2]:
        step(model, optimizer, accelerator.backward, tokens)
    accelerator.save_state(tmp_path)
    for tokens in batches()[2:]:
        step(model, optimizer, accelerator.backward, tokens)
    again, other, its_optimizer = prepared(recipe)
    again.load_state(tmp_path)
    for tokens in batches()[2:]:
        step(other, its_optimizer, again.backward, tokens)
    assert_same(other, model)


def test_another_recipe_is_refused_unless_it_is_intended(tmp_path):
    accelerator, *_ = prepared("mxfp8")
    accelerator.save_state(tmp_path)
    other, *_ = prepared("nvfp4")
    with pytest.raises(ValueError, match="made with recipe '.*mxfp8.*', and it is '.*nvfp4.*' now"):
        other.load_state(tmp_path)
    intended = accelerate.Accelerator(cpu=True)
    prepare(intended, "nvfp4", llama(), allow_other_recipe=True)
    intended.load_state(tmp_path)


def test_what_cannot_be_converted_is_refused():
    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="no model to convert"):
        prepare(accelerator, "mxfp8", optimizer)
    model = accelerator.prepare(model)
    with pytest.raises(RuntimeError, match="LlamaForCausalLM can no longer be converted: it has been prepared before"):
        prepare(accelerator, "mxfp8", model, optimizer)
