"""Fused experts compute as a loop over experts whose products are separate linear layers, bit for bit."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.convert.projections import ConvertedProjections
from crossgrain.recipe import CustomRecipe, Float8CurrentScaling

from ..common.experts import Experts, looped, routed
from ..common.logs import warned

KINDS = {
    "plain": {},
    "transposed with biases": {"transposed": True, "bias": True},
    "without a gate": {"gate": False},
    "odd sizes": {"hidden": 24, "width": 20},
}
RECIPES = ["mxfp8", "nvfp4-plain", "fp8", "mxfp8-fwd-nvfp4-bwd, dgrad: nvfp4, wgrad: nvfp4(rht)", "fp8-block"]


def separate(experts: Experts, recipe: str) -> dict:
    """A converted nn.Linear for each product of each expert, with copies of the weights."""
    layers = {}
    for name in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj"):
        for expert, weight in enumerate(getattr(experts, name).detach()):
            weight = weight.t() if experts.is_transposed else weight
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=experts.has_bias)
            with torch.no_grad():
                layer.weight.copy_(weight)
                if experts.has_bias:
                    layer.bias.copy_(getattr(experts, f"{name}_bias")[expert])
            cg.convert(layer, recipe)
            layers[name, expert] = layer
    return layers


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_a_loop_over_linear_layers(kind, recipe):
    experts = Experts(**KINDS[kind])
    layers = separate(experts, recipe)
    hidden = torch.randn(37, experts.down_proj.shape[2 if experts.is_transposed else 1])
    chosen, weights = routed(37, 4)
    cg.convert(nn.ModuleDict({"experts": experts}), recipe)
    results = []

    def expected(*arguments):
        return looped(experts, *arguments, lambda name, expert, x: layers[name, expert](x))

    for compute in (experts, expected):
        x, scores = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        y = compute(x, chosen, scores)
        y.square().sum().backward()
        results.append([y, x.grad, scores.grad])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    for (name, expert), layer in layers.items():
        found = getattr(experts, name).grad[expert]
        found = found.t() if experts.is_transposed else found
        expected = torch.zeros_like(found) if layer.weight.grad is None else layer.weight.grad
        assert torch.equal(found, expected)
        if experts.has_bias and layer.bias.grad is not None:
            assert torch.equal(getattr(experts, f"{name}_bias").grad[expert], layer.bias.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_in_high_precision_it_is_the_same_module(kind):
    experts = Experts(**KINDS[kind])
    x = torch.randn(9, experts.down_proj.shape[2 if experts.is_transposed else 1])
    arguments = (x, *routed(9, 4))
    expected = experts(*arguments)
    cg.convert(experts, "mxfp8")
    assert isinstance(experts, Experts) and isinstance(experts, ConvertedProjections)
    with cg.autocast(enabled=False):
        torch.testing.assert_close(experts(*arguments), expected)
    assert not torch.equal(experts(*arguments), expected)
    cg.unconvert(experts)
    assert type(experts) is Experts and torch.equal(experts(*arguments), expected)


def test_weights_of_experts_without_tokens_are_not_quantized(monkeypatch):
    experts = Experts()
    cg.convert(experts, "mxfp8")
    made = []
    quantizer = cg.MXFP8Quantizer
    original = quantizer.make_planes
    monkeypatch.setattr(
        quantizer, "make_planes", lambda self, x, **how: made.append(x.shape) or original(self, x, **how)
    )
    experts(torch.randn(5, 32), torch.full((5, 1), 2), torch.ones(5, 1))
    assert made.count((96, 32)) == 1 and made.count((32, 64)) == 1  # the columns of down_proj are padded to blocks


def test_no_tokens_at_all():
    experts = Experts()
    cg.convert(experts, "nvfp4")
    y = experts(torch.randn(0, 32, requires_grad=True), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    assert y.shape == (0, 32)


def test_indices_beyond_the_last_expert_are_of_other_ranks():
    experts = Experts()
    cg.convert(experts, "mxfp8")
    x, (chosen, weights) = torch.randn(8, 32), routed(8, 4)
    elsewhere = chosen.clone()
    elsewhere[:, 1] = 4
    only_first = experts(x, chosen, weights * torch.tensor([1.0, 0.0]))
    # Rows are quantized alone in MXFP8; a product of fewer rows may add up in another order.
    torch.testing.assert_close(experts(x, elsewhere, weights), only_first)


def test_arguments_may_have_names():
    experts = Experts()
    cg.convert(experts, "mxfp8")
    x, (chosen, weights) = torch.randn(8, 32), routed(8, 4)
    assert torch.equal(experts(x, top_k_weights=weights, top_k_index=chosen), experts(x, chosen, weights))


def test_keys_parameters_and_optimizers_stay():
    experts = Experts(bias=True)
    keys, parameters = list(experts.state_dict()), list(experts.parameters())
    optimizer = torch.optim.AdamW(experts.parameters(), lr=0.1)
    cg.convert(experts, "mxfp8")
    before = [parameter.detach().clone() for parameter in parameters]
    experts(torch.randn(8, 32), *routed(8, 4)).sum().backward()
    optimizer.step()
    assert list(experts.state_dict()) == keys
    assert all(one is other for one, other in zip(experts.parameters(), parameters, strict=True))
    assert all(not torch.equal(new, old) for new, old in zip(parameters, before, strict=True))


def test_rules_are_for_each_projection():
    model = nn.ModuleDict({"experts": Experts(), "router": nn.Linear(32, 4)})
    report = cg.convert(model, "mxfp8; experts.down_proj: hp; type=grouped_linear: nonfinite: raise")
    assert report.formats == {"experts.gate_up_proj": "mxfp8", "experts.down_proj": "hp"}
    assert list(report.left) == ["router"] and "routers stay in high precision" in report.left["router"]
    built = model["experts"]._build_quantizers(report.recipe).details
    assert isinstance(built[0].weight, cg.MXFP8Quantizer) and isinstance(built[4].weight, cg.IdentityQuantizer)
    with pytest.raises(ValueError, match="'experts' matches no layer .* use 'experts.\\*'"):
        cg.convert(model, "mxfp8; experts: hp")


def test_a_part_of_them_cannot_be_skipped():
    model = nn.ModuleDict({"experts": Experts()})
    with pytest.raises(ValueError, match="matches only some of the layers experts.gate_up_proj, experts.down_proj"):
        cg.convert(model, "mxfp8", skip="experts.down_proj")
    assert type(model["experts"]) is Experts
    model["fc"] = nn.Linear(32, 32)
    assert cg.convert(model, "mxfp8", skip="experts.*").converted == ["fc"]


def test_copies_and_pickles_keep_class_and_recipe():
    experts = Experts()
    cg.convert(experts, "mxfp8")
    arguments = (torch.randn(8, 32), *routed(8, 4))
    expected = experts(*arguments)
    file = io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    for other in (copy.deepcopy(experts), torch.load(file, weights_only=False)):
        assert type(other) is type(experts) and other.gate_up_proj is not experts.gate_up_proj
        assert torch.equal(other(*arguments), expected)
        cg.unconvert(other)
        assert type(other) is Experts


def test_delayed_scaling_has_histories_of_each_expert():
    model = nn.ModuleDict({"experts": Experts()})
    cg.convert(model, "fp8-delayed")
    experts = model["experts"]
    arguments = (torch.randn(8, 32), *routed(8, 4))
    for _ in range(2):
        experts(*arguments).sum().backward()
    scales = experts.get_fp8_meta_tensors()["scaling_fwd"][0].view(2, 4, 2)  # projection, expert, tensor
    assert (scales[:, :3] != 1).all() and (scales[:, 3] == 1).all()  # nobody was sent to the last expert
    twin = nn.ModuleDict({"experts": Experts()})
    cg.convert(twin, "fp8-delayed")
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin["experts"](*arguments), experts(*arguments))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_gradients(reentrant):
    experts = Experts()
    cg.convert(experts, "nvfp4")
    chosen, weights = routed(12, 4)
    hidden, found = torch.randn(12, 32), []
    for recomputes in (False, True):
        experts.zero_grad()
        x = hidden.clone().requires_grad_()
        torch.manual_seed(3)
        if recomputes:
            y = torch.utils.checkpoint.checkpoint(experts, x, chosen, weights, use_reentrant=reentrant)
        else:
            y = experts(x, chosen, weights)
        y.square().sum().backward()
        found.append([y, x.grad, experts.gate_up_proj.grad, experts.down_proj.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_compiled_models_run_them_in_eager_mode():
    experts = Experts()
    cg.convert(experts, "mxfp8")
    arguments = (torch.randn(8, 32), *routed(8, 4))
    assert torch.equal(torch.compile(experts, backend="aot_eager")(*arguments), experts(*arguments))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="crossgrain: experts"):
        torch.compile(experts, backend="aot_eager", fullgraph=True)(*arguments)


def test_bf16_weights_and_activations():
    experts = Experts().bfloat16()
    cg.convert(experts, Float8CurrentScaling())
    y = experts(torch.randn(8, 32, dtype=torch.bfloat16), *routed(8, 4))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert experts.down_proj.grad.dtype == torch.bfloat16


def test_groups_of_a_custom_recipe_must_be_alike():
    experts, kinds = Experts(), iter(["mxfp8", "nvfp4", "mxfp4"] * 99)
    cg.convert(experts, CustomRecipe(lambda role: cg.quantizer_for(next(kinds))))
    with pytest.raises(ValueError, match="ConvertedExperts.gate_up_proj: grad_output quantizers of expert 0 and"):
        experts(torch.randn(8, 32), *routed(8, 4))


def test_parameters_of_another_kind_are_left_with_the_reason():
    experts = Experts()
    experts.gate_up_proj = nn.Parameter(torch.randn(4, 96))
    experts.config = SimpleNamespace()
    model = nn.ModuleDict({"experts": experts, "fc": nn.Linear(32, 32)})
    with warned("stay in high precision"):
        report = cg.convert(model, "mxfp8")
    assert report.left["experts.gate_up_proj"] == "gate_up_proj of a Experts is not a parameter [experts, out, in]"


def test_negative_numbers_of_experts_are_refused():
    experts = Experts()
    cg.convert(experts, "mxfp8")
    index, weights = routed(8, 4)
    index[3, 1] = -1
    with pytest.raises(ValueError, match="numbers of experts must not be negative, but 1 of 16 are"):
        experts(torch.randn(8, 32), index, weights)
