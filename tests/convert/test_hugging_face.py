"""Models of Hugging Face train after one line; they are built from tiny configurations, nothing is downloaded."""

import copy

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.convert.layers import ConvertedConv1D

from ..common.tiny_models import tiny_llama

transformers = pytest.importorskip("transformers")


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": tiny_llama, "gpt2": gpt2}


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(64, (2, 16))


@pytest.fixture(params=MODELS)
def model(request) -> nn.Module:
    return MODELS[request.param]()


def losses(model: nn.Module, tokens: torch.Tensor, steps: int = 6) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("recipe", ["mxfp8; lm_head: hp", "nvfp4; first 1 block: mxfp8; lm_head: hp", "fp8-delayed"])
def test_training_follows_high_precision(model, tokens, recipe):
    exact = losses(copy.deepcopy(model), tokens)
    keys = list(model.state_dict())
    report = cg.convert(model, recipe)
    layers = 2 * 7 if model.config.model_type == "llama" else 2 * 4
    assert len(report.converted) == layers + ("lm_head" in recipe)  # a rule that names the head asks for it
    found = losses(model, tokens)
    assert found[-1] < found[0]
    assert found != exact and found == pytest.approx(exact, rel=0.05)
    assert [key for key in model.state_dict() if not key.endswith("_extra_state")] == keys


def test_in_high_precision_it_is_the_same_model(model, tokens):
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        cg.convert(model, "mxfp8")
        with cg.autocast(enabled=False):
            torch.testing.assert_close(model(input_ids=tokens).logits, before)
        cg.unconvert(model)
        assert torch.equal(model(input_ids=tokens).logits, before)


def test_conv1d_computes_as_a_linear_layer_with_the_transposed_weight():
    conv = transformers.pytorch_utils.Conv1D(48, 32)
    linear = nn.Linear(32, 48)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias.normal_())
    for layer in (conv, linear):
        cg.convert(layer, "mxfp8-fwd-nvfp4-bwd, dgrad: nvfp4, wgrad: nvfp4(rht)")
    assert isinstance(conv, ConvertedConv1D) and conv.weight.shape == (32, 48)
    x, dy = torch.randn(3, 5, 32, requires_grad=True), torch.randn(3, 5, 48)
    results = []
    for layer in (conv, linear):
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)])
    results[1][2] = results[1][2].t()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    cg.unconvert(conv)
    assert type(conv) is transformers.pytorch_utils.Conv1D and conv.nf == 48


def test_it_generates(model, tokens):
    cg.convert(model, "mxfp8")
    assert model.generate(tokens[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 7)


def test_pretrained_files_have_the_usual_keys(model, tokens, tmp_path):
    cg.convert(model, "mxfp8")
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)
    cg.unconvert(model)
    with torch.no_grad():
        torch.testing.assert_close(plain(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-delayed"])
def test_recomputation_in_backward_gives_the_same_gradients(model, tokens, recipe, reentrant):
    cg.convert(model, recipe)
    results = []
    for recomputes in (False, True):
        twin = copy.deepcopy(model).train()
        torch.manual_seed(4)
        if recomputes:
            twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        for _ in range(3):
            twin.zero_grad()
            loss = twin(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        results.append([loss, *(parameter.grad for parameter in twin.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_it_compiles_to_the_numbers_of_eager(model, tokens):
    cg.convert(model, "mxfp8; lm_head: hp")
    torch.compiler.reset()
    results = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(*results)
    torch.compiler.reset()
