"""In inference, and if they are frozen, weights are quantized once, and again after any change."""

import copy

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.quantizers.base import Quantizer

from ..common.experts import Experts, routed

SHAPE = (128, 256)  # without padding in every format


@pytest.fixture
def made(monkeypatch) -> list:
    """The shapes of all matrices that are quantized."""
    shapes: list = []
    for name in ("make_planes", "quantize"):
        for cls in (Quantizer, cg.HybridQuantizer):
            if name in vars(cls):
                original = getattr(cls, name)

                def counted(self, x, *args, original=original, **kwargs):
                    shapes.append(tuple(x.shape))
                    return original(self, x, *args, **kwargs)

                monkeypatch.setattr(cls, name, counted)
    return shapes


def layer(recipe="mxfp8") -> nn.Module:
    made = nn.Linear(SHAPE[1], SHAPE[0])
    cg.convert(made, recipe)
    return made


RECIPES = ["mxfp8", "nvfp4", "fp8", "fp8-block", "mxfp8-fwd-nvfp4-bwd", "nvfp4-fwd-mxfp8-bwd"]


@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_inference_quantizes_the_weight_once(recipe, made):
    one, x = layer(recipe), torch.randn(3, 256)
    with cg.settings.override(reuse_unchanged_weights=False):
        expected = one(x)
    made.clear()
    results = [one(x)]
    assert SHAPE in made
    made.clear()
    results += [one(x) for _ in range(2)]
    assert SHAPE not in made
    assert all(torch.equal(y, expected) for y in results)


def through_data(weight):
    weight.data.mul_(1.5)


def other_data(weight):
    weight.data = weight.data.flip(0).clone()


def through_numpy(weight):
    weight.detach().numpy()[0, 0] += 0.5


def in_place(weight):
    weight[3, 5] = 7.0


def by_optimizer(weight):
    weight.grad = torch.randn_like(weight)
    torch.optim.AdamW([weight], lr=0.1).step()


def one_bit(weight):
    weight.data.view(torch.int32)[0, 0] ^= 1 << 20


CHANGES = [through_data, other_data, through_numpy, in_place, by_optimizer, one_bit]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("frozen", [False, True], ids=["inference", "frozen"])
def test_no_change_is_missed(change, frozen):
    one, x = layer(), torch.randn(3, 256)
    one.weight.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        before = one(x)
        with torch.no_grad():
            change(one.weight)
        fresh = copy.deepcopy(one)
        assert not fresh._weight_cache.unchanged.copies
        after = one(x)
        assert torch.equal(after, fresh(x)) and not torch.equal(after, before)


@torch.no_grad()
def test_the_same_memory_read_by_columns_is_another_weight():
    one, x = nn.Linear(64, 64), torch.randn(3, 64)
    cg.convert(one, "mxfp8")
    one(x)
    one.weight.data = one.weight.data.t()
    assert torch.equal(one(x), copy.deepcopy(one)(x))


@torch.no_grad()
def test_weights_out_of_a_stack_do_not_pile_up():
    one, x, stack = layer(), torch.randn(3, 256), torch.randn(4, *SHAPE)
    for weight in stack:
        y = torch.func.functional_call(one, {"weight": weight}, (x,))
        assert torch.equal(y, torch.func.functional_call(copy.deepcopy(one), {"weight": weight}, (x,)))
    assert len(one._weight_cache.unchanged.copies) == 1


@torch.no_grad()
def test_loading_and_other_recipes_are_seen(made):
    one, other, x = layer(), layer(), torch.randn(3, 256)
    one(x)
    one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x))
    cg.convert(one, "nvfp4")
    cg.convert(other, "nvfp4")
    with cg.settings.override(reuse_unchanged_weights=False):
        expected = other(x)
    assert torch.equal(one(x), expected)


def test_training_drops_the_copies_of_a_validation(made):
    one, x = layer(), torch.randn(32, 256)
    with torch.no_grad():
        one(x)
    assert one._weight_cache.unchanged.copies
    made.clear()
    one(x).sum().backward()
    assert not one._weight_cache.unchanged.copies and SHAPE in made


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_are_quantized_once_while_others_train(recipe, made):
    one, x = layer(recipe), torch.randn(32, 256)
    one.weight.requires_grad_(False)
    results = []
    for reuse in (False, True, True):
        with cg.settings.override(reuse_unchanged_weights=reuse):
            made.clear()
            torch.manual_seed(0)
            own = x.clone().requires_grad_()
            y = one(own)
            y.square().sum().backward()
            results.append([y, own.grad, SHAPE in made])
    assert [quantized for *_, quantized in results] == [True, True, False]
    assert all(torch.equal(results[0][i], other[i]) for other in results[1:] for i in (0, 1))


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fprop: nvfp4, fprop.weight: nvfp4(sr), dgrad: nvfp4, wgrad: nvfp4"])
@torch.no_grad()
def test_what_would_be_other_bytes_is_quantized_in_every_call(recipe, made):
    one, x = layer(recipe), torch.randn(32, 256)
    for _ in range(2):
        made.clear()
        one(x)
        assert SHAPE in made


@torch.no_grad()
def test_the_setting_switches_it_off(made):
    one, x = layer(), torch.randn(3, 256)
    with cg.settings.override(reuse_unchanged_weights=False):
        for _ in range(2):
            made.clear()
            one(x)
            assert SHAPE in made
    assert not one._weight_cache.unchanged.copies


def test_the_first_pass_of_a_checkpoint_is_training(made):
    one, x = layer(), torch.randn(32, 256, requires_grad=True)
    torch.utils.checkpoint.checkpoint(one, x, use_reentrant=True).sum().backward()
    assert not one._weight_cache.unchanged.copies


@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_each_expert_has_a_copy_of_its_own(made, transposed):
    experts = Experts(transposed=transposed)
    cg.convert(experts, "mxfp8")
    x, routing = torch.randn(6, 32), routed(6, 4)
    first = experts(x, *routing)
    made.clear()
    assert torch.equal(experts(x, *routing), first) and (96, 32) not in made
    experts.gate_up_proj.data[0].mul_(2)
    second = experts(x, *routing)
    assert made.count((96, 32)) == 1 and not torch.equal(second, first)
    assert torch.equal(second, copy.deepcopy(experts)(x, *routing))


@torch.no_grad()
def test_attention_keeps_the_parts_of_its_weight_apart(made):
    module, x = nn.MultiheadAttention(32, 2), torch.randn(5, 2, 32)
    cg.convert(module, "mxfp8")
    y = torch.randn(5, 2, 32)
    first = module(x, y, y)[0]
    made.clear()
    assert torch.equal(module(x, y, y)[0], first) and (32, 32) not in made


def test_copies_are_not_pickled_or_deep_copied():
    one = layer()
    with torch.no_grad():
        one(torch.randn(3, 256))
    assert not copy.deepcopy(one)._weight_cache.unchanged.copies
