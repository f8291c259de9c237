"""A model is converted in place: it computes by the recipe, and everything else about it stays."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain.convert.layers import ConvertedConv1D, ConvertedLinear
from crossgrain.recipe import MXFP8BlockScaling, read_extra_state

from ..common.logs import warned


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.fc2(functional.gelu(self.fc1(x)))


class Model(nn.Module):
    """Two blocks between an embedding and a head that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LAYERS = ["blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2", "head"]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(48, (2, 16))


def gradients(model, tokens):
    loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def same(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


# ---- what it computes ------------------------------------------------------------------------------------


def test_a_converted_model_computes_as_one_that_was_built_of_our_layers(model, tokens):
    ours = copy.deepcopy(model)
    for path in LAYERS:
        old = ours.get_submodule(path)
        new = cg.Linear(old.in_features, old.out_features, bias=old.bias is not None)
        new.weight, new.bias = old.weight, old.bias
        ours.set_submodule(path, new)
    cg.convert(model, "mxfp8-fwd-nvfp4-bwd, dgrad: nvfp4, wgrad: nvfp4(rht)", include="head")
    with cg.autocast(recipe="mxfp8-fwd-nvfp4-bwd, dgrad: nvfp4, wgrad: nvfp4(rht)"):
        expected = gradients(ours, tokens)
    assert same(gradients(model, tokens), expected)


def test_an_autocast_overrides_the_bound_recipe(model, tokens):
    plain = gradients(copy.deepcopy(model), tokens)
    cg.convert(model, "mxfp8")
    mxfp8 = gradients(model, tokens)
    with cg.autocast(enabled=False):
        high_precision = gradients(model, tokens)
    with cg.autocast(recipe="fp8"):
        fp8 = gradients(model, tokens)
    torch.testing.assert_close(high_precision, plain)
    assert not same(mxfp8, plain) and not same(fp8, mxfp8)
    assert same(gradients(model, tokens), mxfp8)


def test_rules_reach_layers_by_their_paths(model, tokens):
    report = cg.convert(model, "mxfp8; first 1 block: fp8; head: hp")
    assert report.converted == LAYERS and not report.left
    gradients(model, tokens)
    quantizers = {path: model.get_submodule(path).quantizers["scaling_fwd"][1] for path in LAYERS}
    assert isinstance(quantizers["blocks.0.fc2"], cg.Float8CurrentScalingQuantizer)
    assert isinstance(quantizers["blocks.1.fc2"], cg.MXFP8Quantizer)
    assert isinstance(quantizers["head"], cg.IdentityQuantizer)


def test_recipe_classes_are_bound_as_they_are(model, tokens):
    cg.convert(model, recipe := MXFP8BlockScaling(), include="head")
    found = gradients(model, tokens)
    assert model.head.bound_recipe is recipe and model.head.name == "head"
    cg.convert(model, "mxfp8", include="head")
    assert same(gradients(model, tokens), found)


def test_delayed_scaling_learns_without_an_autocast(model, tokens):
    cg.convert(model, "fp8-delayed", include="head")
    for _ in range(2):
        gradients(model, tokens)
    scale = read_extra_state(model.head.get_extra_state())["forward.scale"]
    assert torch.all(scale[:2] != 1)


@torch.no_grad()
def test_transformer_layers_of_torch_have_no_way_around_the_recipe():
    """In inference torch reads the weights directly, unless that is prevented."""
    x, padding = torch.randn(2, 8, 32), torch.zeros(2, 8, dtype=torch.bool)
    padding[1, 6:] = True
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    before = model.eval()(x, src_key_padding_mask=padding)[~padding]
    report = cg.convert(model, "nvfp4-plain")
    assert not report.left and report.quantized_share == 1
    trained = model.train()(x, src_key_padding_mask=padding)[~padding]
    assert torch.equal(model.eval()(x, src_key_padding_mask=padding)[~padding], trained)
    assert not torch.allclose(trained, before, atol=1e-3)
    cg.unconvert(model)
    assert torch.equal(model(x, src_key_padding_mask=padding)[~padding], before)


# ---- what stays ------------------------------------------------------------------------------------------


def test_parameters_names_flags_and_hooks_stay(model, tokens):
    model.blocks[0].fc1.requires_grad_(False)
    model.blocks[1].eval()
    model.head.to(torch.bfloat16)
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(module))
    model.head.note = "mine"
    modules, keys = dict(model.named_modules()), list(model.state_dict())
    flags = {path: module.training for path, module in modules.items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))

    cg.convert(model, "mxfp8")

    assert dict(model.named_modules()) == modules  # the very same objects
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == parameters.keys() and all(after[name] is parameters[name] for name in after)
    assert list(model.state_dict()) == keys
    assert {path: module.training for path, module in model.named_modules()} == flags
    assert not model.blocks[0].fc1.weight.requires_grad and model.head.weight.dtype == torch.bfloat16
    assert model.head.note == "mine" and isinstance(model.head, nn.Linear)
    model.head(torch.randn(4, 32, dtype=torch.bfloat16))
    assert seen == [model.head]


def test_an_optimizer_made_before_trains_the_converted_model(model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cg.convert(model, "mxfp8")
    losses = []
    for _ in range(8):
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.head.weight is model.embedding.weight


def test_a_layer_that_is_used_twice_is_converted_once():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    assert cg.convert(model, "mxfp8").converted == ["a"]
    assert model["b"][0] is shared and isinstance(shared, ConvertedLinear)


def test_a_single_layer_can_be_the_model():
    layer = nn.Linear(32, 32)
    assert "the model itself" in str(cg.convert(layer, "mxfp8"))
    layer(torch.randn(2, 32)).sum().backward()


def test_resetting_parameters_is_that_of_torch():
    converted, plain = nn.Linear(32, 32), nn.Linear(32, 32)
    cg.convert(converted, "mxfp8")
    for layer in (converted, plain):
        torch.manual_seed(0)
        layer.reset_parameters()
    assert torch.equal(converted.weight, plain.weight) and torch.equal(converted.bias, plain.bias)


def test_meta_models_can_be_converted_before_they_have_memory():
    with torch.device("meta"):
        model = Model()
    cg.convert(model, "mxfp8")
    model.to_empty(device="cpu")
    model.load_state_dict(Model().state_dict())
    assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


# ---- copies and files ------------------------------------------------------------------------------------


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_compute_the_same(model, tokens, copied):
    cg.convert(model, "mxfp8; head: hp")
    expected = gradients(model, tokens)
    other = copied(model)
    assert same(gradients(other, tokens), expected)
    assert other.head.weight is other.embedding.weight
    assert cg.unconvert(other) == LAYERS and isinstance(model.head, ConvertedLinear)


def test_state_dicts_go_both_ways(model, tokens):
    plain = Model()
    cg.convert(model, "mxfp8")
    plain.load_state_dict(model.state_dict())
    other = Model()
    cg.convert(other, "mxfp8")
    other.load_state_dict(plain.state_dict())
    assert same(gradients(other, tokens), gradients(model, tokens))


# ---- again, and back -------------------------------------------------------------------------------------


def test_converting_again_binds_the_new_recipe(model, tokens):
    other = copy.deepcopy(model)
    cg.convert(model.blocks[0], "fp8")  # a part first: its layers have other paths
    report = cg.convert(model, "mxfp8; blocks.0.fc1: hp", skip="head")
    assert report.bound == LAYERS[:2] and report.converted == LAYERS[2:4] and list(report.left) == ["head"]
    cg.convert(other, "mxfp8; blocks.0.fc1: hp", skip="head")
    assert same(gradients(model, tokens), gradients(other, tokens))


def test_layers_that_are_skipped_later_become_plain_again(model):
    cg.convert(model, "mxfp8", include="head")
    assert isinstance(model.head, ConvertedLinear)
    cg.convert(model, "mxfp8", skip=["head"])
    assert type(model.head) is nn.Linear and isinstance(model.blocks[0].fc1, ConvertedLinear)


def test_unconvert_leaves_no_trace(model, tokens):
    before = gradients(model, tokens)
    state = {path: set(vars(module)) for path, module in model.named_modules()}
    cg.convert(model, "fp8-delayed", include="head")
    gradients(model, tokens)
    assert cg.unconvert(model) == LAYERS
    assert {path: set(vars(module)) for path, module in model.named_modules()} == state
    assert all(type(model.get_submodule(path)) is nn.Linear for path in LAYERS)
    assert same(gradients(model, tokens), before)
    assert cg.unconvert(model) == []


def test_a_layer_that_was_parametrized_after_it_was_converted_goes_back():
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(3, 32)
    expected = model(x)
    cg.convert(model, "mxfp8")
    nn.utils.parametrizations.weight_norm(model[0])
    other = copy.deepcopy(model)
    assert cg.unconvert(model) == ["0"]
    torch.testing.assert_close(model(x), expected)  # the norm of the weight is divided out and multiplied again
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear
    assert isinstance(other[0], ConvertedLinear) and not torch.equal(other(x), expected)


def test_our_own_layers_are_bound_and_stay(tokens):
    model = nn.Sequential(cg.Linear(32, 32), nn.Linear(32, 32))
    report = cg.convert(model, "mxfp8; 0: fp8")
    assert report.bound == ["0"] and report.converted == ["1"]
    assert cg.unconvert(model) == ["1"]
    assert type(model[0]) is cg.Linear and model[0].bound_recipe is None


# ---- what is left, and mistakes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "skip, left",
    [
        ("head", ["head"]),
        ("*.fc1|head", ["blocks.0.fc1", "blocks.1.fc1", "head"]),
        ("last 1 block", ["blocks.1.fc1", "blocks.1.fc2"]),
        (Block, LAYERS[:4]),
        (lambda path, module: module.out_features == 48, ["head"]),
        (["head", Block], LAYERS),
    ],
    ids=["path", "globs", "blocks", "type", "function", "several"],
)
def test_skip(model, skip, left):
    report = cg.convert(model, "mxfp8", skip=skip, include="head")
    assert list(report.left) == left and report.converted == [path for path in LAYERS if path not in left]
    assert all(type(model.get_submodule(path)) is nn.Linear for path in left)


@pytest.mark.parametrize(
    "skip, message",
    [
        ("haed", "'haed' matches no layer of this Model; near misses: head"),
        ("blocks.0", "blocks.0 is not a layer; use 'blocks.0.\\*' for the layers inside it"),
        (nn.Conv2d, "no linear layer is a Conv2d or inside one; this Model has modules of the types Block, Embedding"),
    ],
)
def test_a_skip_that_matches_nothing_is_a_mistake(model, skip, message):
    with pytest.raises(ValueError, match=message):
        cg.convert(model, "mxfp8", skip=[skip])
    assert type(model.head) is nn.Linear


def test_a_layer_with_two_paths_is_skipped_by_either():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, nn.Linear(32, 32)])})
    report = cg.convert(model, "mxfp8", skip="b.0")
    assert list(report.left) == ["a"] and report.converted == ["b.1"] and type(shared) is nn.Linear
    assert list(cg.convert(model, "mxfp8", skip="b.*").left) == ["a", "b.1"]


def test_rules_name_a_layer_with_two_paths_by_the_first():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    with pytest.raises(
        ValueError,
        match="'b.0' matches no layer of this ModuleDict: b.0 is another path of the layer a; rules use",
    ):
        cg.convert(model, "mxfp8; b.0: hp")
    assert type(shared) is nn.Linear


def test_operations_are_bound_as_well():
    layer = cg.ops.Linear(32, 32)
    model = nn.ModuleDict({"block": cg.ops.Sequential(layer, cg.ops.GELU()), "last": nn.Linear(32, 16)})
    x = torch.randn(32, 32)
    plain = model["block"](x)
    report = cg.convert(model, "mxfp8")
    assert "block.0" in report.bound and report.converted == ["last"] and layer.name == "block.0"
    with cg.autocast(recipe=MXFP8BlockScaling()):
        wanted = model["block"](x)
    assert torch.equal(model["block"](x), wanted) and not torch.equal(plain, wanted)
    assert cg.convert(model, "mxfp8", skip="block.0").left
    cg.unconvert(model)
    assert torch.equal(model["block"](x), plain)


def test_a_dtype_that_cannot_be_quantized_is_refused_by_name(model, tokens):
    cg.convert(model, "mxfp8")
    with pytest.raises(TypeError, match=r"blocks.0.fc1: the weight is torch.float64, .* without a recipe"):
        model.double()(tokens)
    with cg.autocast(enabled=False):
        assert model(tokens).dtype == torch.float64


def test_a_skip_of_another_kind_is_refused(model):
    with pytest.raises(TypeError, match="patterns, module types and functions, got int"):
        cg.convert(model, "mxfp8", skip=[3])


def test_nothing_has_changed_if_the_recipe_does_not_fit(model, tokens):
    cg.convert(model.blocks, "mxfp8")
    with pytest.raises(ValueError, match="'lm_head' matches no layer"):
        cg.convert(model, "nvfp4; lm_head: hp", skip=["blocks.0.fc1"])
    assert model.blocks[0].fc1.name == "0.fc1" and isinstance(model.blocks[0].fc1, ConvertedLinear)
    assert type(model.head) is nn.Linear


def test_names_are_restored_if_too_much_would_be_left():
    class Other(nn.Linear):
        pass

    model = nn.ModuleDict({"part": nn.Sequential(nn.Linear(32, 32)), "other": Other(32, 320)})
    cg.convert(model["part"], "mxfp8")
    with pytest.raises(ValueError, match="stay in high precision"):
        cg.convert(model, "mxfp8", strict=True)
    assert model["part"][0].name == "0"


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="this GELU has no linear layer to convert$"):
        cg.convert(nn.GELU(), "mxfp8")
    with pytest.raises(
        ValueError, match="this Sequential has no linear layer to convert: 0: a convolution whose windows"
    ):
        cg.convert(nn.Sequential(nn.Conv2d(1, 1, 3)), "mxfp8")


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_the_report_says_what_was_left_and_why(model):
    model.scaled = Scaled(32, 32)
    model.double = nn.Linear(32, 32, dtype=torch.float64)
    model.patched = nn.Linear(32, 32)
    model.patched.forward = model.patched.forward  # as wrappers do that put hooks around it
    with warned("24 % of the multiply-adds with weights of this Model stay in high precision"):
        report = cg.convert(model, "mxfp8; blocks.1.fc2: hp", skip=["head"])
    scaled = (
        "Scaled is a subclass of nn.Linear, which may compute something else; if it calls F.linear with its weight, "
        "crossgrain.register_layer(Scaled, crossgrain.OwnForward('weight')) converts it"
    )
    double = "its weight has dtype torch.float64; only float32, bfloat16 and float16 can be quantized"
    patched = "its forward was replaced on the object, so converting it would have no effect"
    assert report.left == {"head": "skip 'head'", "scaled": scaled, "double": double, "patched": patched}
    assert str(report).splitlines() == [
        "recipe: fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8; blocks.1.fc2: hp",
        "48 % of the multiply-adds with weights (of a token, by shapes) are quantized",
        "converted 3 layers (48 %) to mxfp8: blocks.0-1.fc1, blocks.0.fc2",
        "left 1 layer (16 %): blocks.1.fc2: the recipe keeps it in high precision",
        "left 1 layer (12 %): head: skip 'head'",
        f"left 1 layer (8 %): scaled: {scaled}",
        f"left 1 layer (8 %): double: {double}",
        f"left 1 layer (8 %): patched: {patched}",
    ]


def test_a_quantized_model_init_around_convert_changes_nothing(model):
    with cg.quantized_model_init(recipe="mxfp8"):
        cg.convert(model, "mxfp8")
    assert type(model.head.weight) is nn.Parameter


@pytest.mark.parametrize("cls", [ConvertedLinear, ConvertedConv1D])
def test_converted_layers_are_not_made_directly(cls):
    with pytest.raises(TypeError, match="is what crossgrain.convert makes from .* cannot be created directly"):
        cls()


# ---- training --------------------------------------------------------------------------------------------


def train(model, validate: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        tokens = torch.randint(48, (2, 16), generator=torch.Generator().manual_seed(step))
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if validate:
            model.eval()
            with torch.no_grad():
                model(100 * tokens % 48)
            model.train()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-delayed", "mxfp8-fwd-nvfp4-bwd", "nvfp4-fwd-hp-bwd"])
def test_validation_between_steps_changes_nothing(model, recipe):
    cg.convert(model, recipe)
    other = copy.deepcopy(model)
    assert same(train(model, validate=True), train(other, validate=False))


# ---- norms -------------------------------------------------------------------------------------------------


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]


def test_norms_become_ours_on_request_and_go_back():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.RMSNorm(64, eps=1e-6))
    keys, before = list(model.state_dict()), [type(norm) for norm in norms_of(model)]
    report = cg.convert(model, "hp", norms=True)
    assert len(report.norms) == len(before) > 0 and "norm" in str(report)
    assert all(isinstance(norm, cg.LayerNorm | cg.RMSNorm) for norm in norms_of(model))
    assert list(model.state_dict()) == keys
    model(torch.randn(4, 64)).sum().backward()
    assert all(norm.weight.grad is not None for norm in norms_of(model))
    cg.convert(model, "hp")
    assert [type(norm) for norm in norms_of(model)] == before
    cg.convert(model, "hp", norms=True)
    cg.unconvert(model)
    assert [type(norm) for norm in norms_of(model)] == before
    assert "zero_centered_gamma" not in vars(norms_of(model)[0])


@pytest.mark.parametrize("make", [nn.LayerNorm, lambda size: nn.RMSNorm(size, eps=1e-6)], ids=["LayerNorm", "RMSNorm"])
def test_a_converted_norm_computes_what_it_did(make):
    torch.manual_seed(0)
    plain = nn.Sequential(make(64), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    expected = plain[0](x)
    cg.convert(plain, "hp", norms=True)
    # Both compute in fp32, with sums in another order: a few units in the last place.
    torch.testing.assert_close(plain[0](x), expected, rtol=1e-5, atol=1e-6)


def test_norms_that_ours_do_not_compute_stay():
    left = [nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8, bias=False), nn.RMSNorm(8)]
    model = nn.Sequential(*left, nn.Linear(8, 8))
    assert cg.convert(model, "hp", norms=True).norms == []
    assert [type(module) for module in model[:3]] == [nn.LayerNorm, nn.LayerNorm, nn.RMSNorm]
