"""Output heads, routers and adapters stay in high precision, unless somebody asks for them."""

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.convert.defaults import left_by_default
from crossgrain.planning import plan


class LoraLayer(nn.Module):
    """A linear layer with an adapter, as peft makes it."""

    adapter_layer_names = ("lora_A", "lora_B")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(32, 32)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 32, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LoraLayer(), Mixture()])
        self.embedding = nn.Embedding(64, 32)
        self.unembed = nn.Linear(32, 64, bias=False)
        self.unembed.weight = self.embedding.weight
        self.score = nn.Linear(32, 2)


STAYING = {
    "layers.0.lora_A.default": "adapter",
    "layers.0.lora_B.default": "adapter",
    "layers.1.gate": "router",
    "unembed": "output head",
    "score": "output head",
}


def linear_only(paths) -> dict:
    return {path: kind for path, kind in paths.items() if not path.endswith(("lora_A", "lora_B"))}


def test_what_stays():
    assert linear_only(left_by_default(Model())) == STAYING
    report = cg.convert(Model(), "mxfp8")
    assert list(report.left) == list(STAYING)
    assert report.left["score"] == (
        "by default, output heads stay in high precision; include='score' or a rule for it converts it"
    )
    assert report.converted == ["layers.0.base_layer", *(f"layers.1.experts.{i}" for i in range(4))]


def test_a_head_that_transformers_names():
    model = nn.ModuleDict({"fc": nn.Linear(4, 4), "proj_out": nn.Linear(4, 4)})
    model.get_output_embeddings = lambda: model["proj_out"]
    assert left_by_default(model) == {"proj_out": "output head"}
    model.get_output_embeddings = None
    assert left_by_default(model) == {}


class ParallelExperts(nn.Linear):
    pass


@pytest.mark.parametrize("name, experts", [("experts", nn.Linear), ("input_linear", ParallelExperts)])
def test_layers_inside_of_a_router_are_routers(name, experts):
    router = nn.ModuleDict({"norm": nn.LayerNorm(4), "classifier": nn.Linear(4, 4)})
    model = nn.Sequential(nn.ModuleDict({"router": router, name: experts(4, 4)}))
    assert left_by_default(model)["0.router.classifier"] == "router"
    assert f"0.{name}" not in left_by_default(model)


@pytest.mark.parametrize("path", ["classifier.out_proj", "lm_head.dense", "decoder.output_projection"])
def test_heads_that_are_modules_stay_as_a_whole(path):
    *parents, last = path.split(".")
    model: nn.Module = nn.ModuleDict({last: nn.Linear(4, 4)})
    for part in reversed(parents):
        model = nn.ModuleDict({part: model})
    assert left_by_default(model) == {path: "output head"}


@pytest.mark.parametrize("path", ["layers.0.head", "layers.3.attention.output", "gate", "router"])
def test_names_in_blocks_or_without_experts_mean_nothing(path):
    *parents, last = path.split(".")
    model: nn.Module = nn.ModuleDict({last: nn.Linear(4, 4)})
    for part in reversed(parents):
        model = nn.ModuleDict({part: model})
    assert not left_by_default(model)


@pytest.mark.parametrize(
    "recipe, include, converted",
    [
        ("mxfp8", ["score", "*.gate"], {"score", "layers.1.gate"}),
        ("mxfp8; score: nvfp4", (), {"score"}),
        ("mxfp8; *.lora_A.default: hp", (), {"layers.0.lora_A.default"}),
        ("mxfp8; *: nvfp4", (), set()),
        ("mxfp8; layers.0.*: nvfp4", (), set()),
        ("mxfp8", nn.ModuleDict, {"layers.0.lora_A.default", "layers.0.lora_B.default"}),
    ],
)
def test_asking_for_them(recipe, include, converted):
    report = cg.convert(Model(), recipe, include=include)
    assert set(STAYING) - set(report.left) == converted


def test_who_builds_a_head_of_our_layers_gets_it():
    model = nn.ModuleDict({"fc": nn.Linear(32, 32), "lm_head": cg.Linear(32, 32)})
    assert cg.convert(model, "mxfp8").bound == ["lm_head"]


def test_an_entry_of_include_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="'lm_head' matches no layer"):
        cg.convert(Model(), "mxfp8", include="lm_head")
    with pytest.raises(TypeError, match="include takes patterns, module types and functions, got int"):
        cg.convert(Model(), "mxfp8", include=[3])


def test_plan_has_the_same_default():
    model = nn.ModuleDict({"fc": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})
    options = {"gpus": 1, "device": "b200", "sequence": 64}
    default, asked = (plan(model, recipe, **options) for recipe in ("mxfp8", "mxfp8; lm_head: mxfp8"))
    hp = plan(model, "mxfp8; lm_head: hp", **options)
    assert default.memory == hp.memory != asked.memory


def test_adapters_train_while_the_base_is_frozen_and_quantized():
    model = LoraLayer()
    model.base_layer.requires_grad_(False)
    cg.convert(model, "mxfp8")
    x = torch.randn(5, 32, requires_grad=True)
    model(x).sum().backward()
    assert model.base_layer.weight.grad is None and model.lora_A["default"].weight.grad is not None
