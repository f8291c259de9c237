"""Linear's parameters and state: construction, quantized weights, recipes that change, checkpoints, copies."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.recipe import factories, read_extra_state
from crossgrain.tensor.init_values import preserved_value

from ..common.families import PLAIN, assert_same_step, make_recipe, run, sizes, without_randomness
from ..common.quantizers import assert_same_bytes

MXFP8, NVFP4 = recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
DELAYED = recipes.DelayedScaling(amax_history_len=4)


def quantized_layer(recipe, preserve=False, **options):
    with cg.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=preserve):
        return cg.Linear(64, 96, **options)


def trained(recipe, steps=3, **options):
    layer = cg.Linear(64, 96, **options)
    for step in range(steps):
        x, dy = sizes()
        run(layer, x * (step + 1), recipe, dy)
    return layer


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_torch_save(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---- construction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("grad", [False, True])
def test_quantized_weights(family, grad):
    """Bitwise the training of a layer whose weight is what the quantized one was made from."""
    recipe = without_randomness(make_recipe(family))
    torch.manual_seed(1)
    plain = cg.Linear(64, 96)
    torch.manual_seed(1)
    with torch.set_grad_enabled(grad), cg.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = cg.Linear(64, 96)
    assert layer.primary_weights_in_fp8 and isinstance(layer.weight, cg.QuantizedTensor)
    assert isinstance(layer.weight, nn.Parameter) and not isinstance(layer.bias, cg.QuantizedTensor)
    assert layer.weight.get_usages() == {"rowwise": True, "columnwise": True}
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight)
    x, dy = sizes()
    assert_same_step(run(layer, x, recipe, dy), run(plain, x, recipe, dy))
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None


def test_weights_that_cannot_be_kept_quantized_are_refused_with_the_layers_name():
    with cg.quantized_model_init(recipe=MXFP8):
        with pytest.raises(ValueError, match=r"fc1: weight cannot be kept quantized: .*\[50, 64\]"):
            cg.Linear(64, 50, name="fc1")
        with pytest.raises(NotImplementedError, match="split into parameters"):
            cg.Linear(64, 96, parameters_split=("q", "k"))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_meta_device(quantized, empty):
    """A layer made without memory becomes what it was made to be."""
    torch.manual_seed(2)
    direct = quantized_layer(MXFP8, preserve=True) if quantized else cg.Linear(64, 96)
    with cg.quantized_model_init(enabled=quantized, recipe=MXFP8, preserve_high_precision_init_val=True):
        layer = cg.Linear(64, 96, device="meta")
    assert layer.weight.is_meta
    if empty:
        layer.to_empty(device="cpu")
    torch.manual_seed(2)
    layer.reset_parameters(defer_init=True)
    layer.reset_parameters()
    assert type(layer.weight) is type(direct.weight) and not layer.bias.any()
    x, dy = sizes()
    assert_same_step(run(layer, x, MXFP8, dy), run(direct, x, MXFP8, dy))
    if quantized:
        assert torch.equal(layer.weight.get_high_precision_init_val(), direct.weight.get_high_precision_init_val())


@pytest.mark.parametrize("quantized", [False, True])
def test_reset_parameters_keeps_the_parameters(quantized):
    layer = quantized_layer(MXFP8, preserve=True) if quantized else cg.Linear(64, 96)
    weight, bias, before = layer.weight, layer.bias, layer.weight.detach().clone()
    with torch.no_grad():
        bias.fill_(1.0)
    layer.reset_parameters()
    assert layer.weight is weight and layer.bias is bias and not bias.any()
    assert not torch.equal(
        layer.weight.dequantize() if quantized else layer.weight, before.dequantize() if quantized else before
    )
    if quantized:
        again = weight.detach().clone().copy_(weight.get_high_precision_init_val())
        assert_same_bytes(again, weight)


# ---- recipes that change ------------------------------------------------------------------------------


def test_stateless_weights_follow_the_recipe():
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    alone = {}
    for name in ("mxfp8", "nvfp4", "fp8_block", "fp8_current", "identity"):
        twin = copy.deepcopy(layer)
        alone[name] = run(twin, x, without_randomness(make_recipe(name)), dy)
    for name in [*alone, *reversed(alone)]:
        assert_same_step(run(layer, x, without_randomness(make_recipe(name)), dy), alone[name])


def test_options_of_a_recipe_changed_in_place_count():
    layer = cg.Linear(64, 96)
    x, dy = sizes()
    recipe = recipes.Float8CurrentScaling()
    first = run(layer, x, recipe, dy)
    recipe.backward_override = "high_precision"
    second = run(layer, x, recipe, dy)
    assert torch.equal(first.y, second.y) and not torch.equal(first.dw, second.dw)


def test_histories_survive_another_recipe_in_between():
    interrupted, plain = cg.Linear(64, 96), cg.Linear(64, 96)
    plain.load_state_dict(interrupted.state_dict())
    for _ in range(3):
        x, dy = sizes()
        assert_same_step(run(interrupted, x, DELAYED, dy), run(plain, x, DELAYED, dy))
        run(interrupted, 100 * x, MXFP8, dy)


def test_a_quantized_weight_of_another_format_is_refused_and_names_both():
    layer = quantized_layer(MXFP8, name="fc1")
    with cg.autocast(recipe=NVFP4), pytest.raises(RuntimeError) as error:
        layer(torch.randn(32, 64))
    for part in ("Recipe mismatch for fc1.weight", "MXFP8", "NVFP4BlockScaling", "requantize_"):
        assert part in str(error.value)
    x, dy = sizes()
    run(layer, x, MXFP8, dy)


@pytest.mark.parametrize("preserve", [False, True])
@pytest.mark.parametrize("target", [NVFP4, recipes.Float8CurrentScaling()], ids=["nvfp4", "fp8"])
def test_requantize(target, preserve):
    model = nn.Sequential(quantized_layer(MXFP8, preserve), nn.ReLU(), cg.Linear(96, 64))
    layer, plain = model[0], cg.Linear(64, 96)
    source = layer.weight.get_high_precision_init_val() if preserve else layer.weight.dequantize()
    with torch.no_grad():
        plain.weight.copy_(source)
    layer.weight.mark = "kept"
    old, layer.weight.grad = layer.weight, torch.ones(96, 64)
    replaced = cg.requantize_(model, target)
    assert replaced == {"0.weight": layer.weight} and layer.weight is not old
    assert layer.weight.mark == "kept" and torch.equal(layer.weight.grad, torch.ones(96, 64))
    layer.weight.grad = None
    assert not isinstance(model[2].weight, cg.QuantizedTensor)
    x, dy = sizes()
    assert_same_step(run(layer, x, target, dy), run(plain, x, target, dy))


def test_requantize_from_a_master_keeps_the_dtype():
    with cg.quantized_model_init(recipe=MXFP8):
        layer = cg.Linear(64, 96, params_dtype=torch.bfloat16)
    optimizer = cg.optim.FusedSGD([layer.weight], lr=0.1)
    layer.weight.grad = torch.ones(96, 64, dtype=torch.bfloat16)
    optimizer.step()
    cg.requantize_(layer, NVFP4, optimizer)
    assert layer.weight.dtype == torch.bfloat16
    master = optimizer.state[layer.weight]["master_param"]
    again = copy.deepcopy(layer.weight.detach()).quantize_(master)
    assert torch.equal(layer.weight.dequantize(), again.dequantize())


def test_requantize_in_place_where_the_class_stays():
    layer = quantized_layer(MXFP8)
    weight, value = layer.weight, layer.weight.dequantize()
    tiles = recipes.MXFP8BlockScaling(enable_2d_quantization=True)
    assert cg.requantize_(layer, tiles) == {}
    assert layer.weight is weight and weight.requires_grad
    expected = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3, with_2d_quantization=True)(value)
    assert_same_bytes(weight.detach(), expected)
    x, dy = sizes()
    run(layer, x, tiles, dy)


def test_requantize_does_not_go_back_to_the_initial_value_of_a_trained_weight():
    layer = quantized_layer(MXFP8, preserve=True)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(96, 64))
    trained_value = layer.weight.dequantize()
    cg.requantize_(layer, recipes.Float8CurrentScaling())
    assert (layer.weight.dequantize() - trained_value).norm() < 0.05 * trained_value.norm()


MAKE_OPTIMIZER = {
    "FusedAdam": lambda params, **options: cg.optim.FusedAdam(params, lr=0.1, master_weights=True, **options),
    "FusedAdam, fp16 masters": lambda params: cg.optim.FusedAdam(
        params, lr=0.1, master_weights=True, master_weight_dtype=torch.float16, exp_avg_dtype=torch.float16
    ),
    "with_masters": lambda params: cg.optim.with_masters(torch.optim.AdamW, params, lr=0.1),
}


@pytest.mark.parametrize("kind", MAKE_OPTIMIZER)
def test_requantize_takes_the_optimizer_along(kind):
    """Weights come from the masters, and go on with the moments that they had."""
    layer = quantized_layer(MXFP8)
    optimizer = MAKE_OPTIMIZER[kind](layer.parameters())
    layer.weight.grad = torch.randn(96, 64)
    optimizer.step()
    old, moment = layer.weight, optimizer.state[layer.weight]["exp_avg"]
    unscaled = getattr(optimizer, "get_unscaled_state", lambda weight, name: optimizer.state[weight][name])
    master = unscaled(old, "master_param").clone()
    cg.requantize_(layer, NVFP4, optimizer)
    assert layer.weight is not old and old not in optimizer.state
    assert any(param is layer.weight for param in optimizer.param_groups[0]["params"])
    assert optimizer.state[layer.weight]["exp_avg"] is moment
    assert torch.equal(unscaled(layer.weight, "master_param"), master)
    assert_same_bytes(layer.weight.detach(), layer.weight._get_quantizer().copy()(master))
    before = layer.weight.dequantize()
    optimizer.step()
    assert not torch.equal(layer.weight.dequantize(), before)


@pytest.mark.parametrize("kind", MAKE_OPTIMIZER)
def test_an_optimizer_that_was_not_told_of_new_parameters_refuses_to_go_on(kind):
    layer = quantized_layer(MXFP8)
    optimizer = MAKE_OPTIMIZER[kind](layer.parameters())
    cg.requantize_(layer, NVFP4)
    layer.weight.grad = torch.randn(96, 64)
    with pytest.raises(RuntimeError, match=r"MXFP8Tensor of shape \[96, 64\] that requantize_ has replaced"):
        optimizer.step()


def test_requantize_keeps_tied_weights_tied_and_changes_nothing_when_refused():
    first, second = (quantized_layer(MXFP8) for _ in range(2))
    second.weight = first.weight
    model = nn.Sequential(first, second)
    cg.requantize_(model, NVFP4)
    assert first.weight is second.weight and isinstance(first.weight, cg.NVFP4Tensor)

    def refusing(role):
        return factories.mxfp8_factory(role) if role and role.tensor_type == "weight" else factories.nvfp4_factory(role)

    weight = first.weight
    with pytest.raises(ValueError, match="fprop multiplies"):
        cg.requantize_(model, recipes.CustomRecipe(qfactory=refusing))
    assert first.weight is weight and isinstance(weight, cg.NVFP4Tensor)


# ---- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, MXFP8, NVFP4, recipes.Float8CurrentScaling()], ids=lambda r: type(r).__name__)
def test_without_histories_the_keys_are_torchs(recipe):
    layer, plain = trained(recipe), nn.Linear(64, 96)
    assert list(layer.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    layer.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(layer.weight, plain.weight)
    plain.load_state_dict(trained(recipe).state_dict(), strict=True)


def nested(role):
    request = cg.DelayedScalingRequest(amax_history_len=4)
    return cg.HybridQuantizer(rowwise_quantizer=request, columnwise_quantizer=request)


@pytest.mark.parametrize("recipe", [DELAYED, recipes.CustomRecipe(qfactory=nested)], ids=["delayed", "nested"])
@pytest.mark.parametrize("built", [False, True], ids=["new", "used"])
def test_histories_travel_with_the_state_dict(recipe, built):
    layer = trained(recipe)
    state = layer.state_dict()
    assert set(state) == {"weight", "bias", "_extra_state"}
    assert type(state["_extra_state"]) is torch.Tensor and state["_extra_state"].dtype == torch.uint8
    other = trained(recipe) if built else cg.Linear(64, 96)
    other.load_state_dict(through_torch_save(state), strict=True)
    assert torch.equal(other.state_dict()["_extra_state"], state["_extra_state"])  # also before the first forward
    for _ in range(2):
        x, dy = sizes()
        assert_same_step(run(layer, x, recipe, dy), run(other, x, recipe, dy))


@pytest.mark.parametrize("built", [False, True], ids=["new", "used"])
def test_the_dicts_of_earlier_versions_load(built):
    layer = trained(DELAYED)
    state = layer.state_dict()
    earlier = {**state, "_extra_state": read_extra_state(state["_extra_state"])}
    other = trained(DELAYED) if built else cg.Linear(64, 96)
    other.load_state_dict(through_torch_save(earlier), strict=True)
    assert torch.equal(other.state_dict()["_extra_state"], state["_extra_state"])
    x, dy = sizes()
    assert_same_step(run(layer, x, DELAYED, dy), run(other, x, DELAYED, dy))


def test_histories_wait_while_another_recipe_runs():
    layer, other = trained(DELAYED), cg.Linear(64, 96)
    other.load_state_dict(layer.state_dict())
    x, dy = sizes()
    run(other, x, MXFP8, dy)
    assert_same_step(run(layer, x, DELAYED, dy), run(other, x, DELAYED, dy))


def test_empty_extra_states_of_others_are_accepted():
    layer = cg.Linear(64, 96)
    for empty in (torch.empty(0, dtype=torch.uint8), None, {}):
        layer.load_state_dict({**nn.Linear(64, 96).state_dict(), "_extra_state": empty}, strict=True)
        assert layer.get_extra_state().numel() == 0


@pytest.mark.parametrize("recipe", [None, DELAYED], ids=["new", "delayed"])
def test_foreign_extra_states_are_refused_and_nothing_is_loaded(recipe):
    layer = trained(recipe, name="fc1")
    before = copy.deepcopy(layer.state_dict())
    pickled = torch.frombuffer(bytearray(pickle.dumps({"scale_fwd": 1})), dtype=torch.uint8)
    encoded = trained(DELAYED).state_dict()["_extra_state"]
    good = read_extra_state(encoded)
    short = {**good, "forward.scale": torch.ones(1), "forward.amax_history": torch.zeros(4, 1)}
    wrong = [encoded[:-4], encoded[:30], torch.cat((encoded, encoded)), encoded.float()]
    wrong += [pickled, pickle.dumps(1), {"version": 7}, {**good, "hook": "os.system"}, {**good, "forward.scale": [1.0]}]
    for extra in [*wrong, *([short] if recipe is DELAYED else [])]:
        with pytest.raises((RuntimeError, TypeError, ValueError), match="fc1"):
            layer.load_state_dict({**nn.Linear(64, 96).state_dict(), "_extra_state": extra})
    after = layer.state_dict()
    assert after.keys() == before.keys()
    assert torch.equal(after["weight"], before["weight"])


@pytest.mark.parametrize("family", [name for name in PLAIN if name != "identity"])
def test_quantized_weights_in_checkpoints(family):
    """Bit for bit; a high-precision checkpoint is quantized on the way in."""
    recipe = without_randomness(make_recipe(family))
    layer, other = quantized_layer(recipe), quantized_layer(recipe)
    other.load_state_dict(through_torch_save(layer.state_dict()), strict=True)
    assert_same_bytes(other.weight.detach(), layer.weight.detach())
    plain = nn.Linear(64, 96)
    other.load_state_dict(plain.state_dict(), strict=True)
    assert isinstance(other.weight, cg.QuantizedTensor)
    assert (other.weight.dequantize() - plain.weight).norm() < 0.2 * plain.weight.norm()


# ---- copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", PLAIN)
def test_copies_train_alike_and_apart(family, quantized, duplicate):
    recipe = without_randomness(make_recipe(family))
    layer = quantized_layer(recipe) if quantized else cg.Linear(64, 96)
    x, dy = sizes()
    run(layer, x, recipe, dy)
    twin, third = duplicate(layer), duplicate(layer)
    for _ in range(2):
        run(third, 50 * x, recipe, dy)  # must reach neither of the others
        x, dy = sizes()
        assert_same_step(run(layer, x, recipe, dy), run(twin, x, recipe, dy))
    with torch.no_grad():
        twin.weight.zero_()
    assert layer.weight.dequantize().any() if quantized else layer.weight.any()


@pytest.mark.parametrize("factory", [factories.mxfp8_factory, nested])
def test_a_layer_of_a_recipe_that_cannot_be_pickled_can_be_pickled(factory):
    recipe = recipes.CustomRecipe(qfactory=lambda role: factory(role))
    layer = quantized_layer(recipe)
    x, dy = sizes()
    run(layer, x, recipe, dy)
    twin = through_pickle(layer)
    assert_same_step(run(twin, x, recipe, dy), run(layer, x, recipe, dy))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle])
def test_waiting_gradients_are_not_copied(duplicate):
    layer = cg.Linear(64, 96, delay_wgrad_compute=True)
    x, dy = sizes()
    run(layer, x, MXFP8, dy)
    twin = duplicate(layer)
    assert layer.need_backward_dw() and not twin.need_backward_dw()
    twin.backward_dw()
    assert layer.weight.grad is None and twin.weight.grad is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, lambda layer: layer])
def test_quantized_weights_are_written_by_the_modules_own_quantizer(duplicate):
    """With delayed scaling, what an optimizer writes shows in the module's history, also in a copy."""
    layer = quantized_layer(DELAYED)
    x, dy = sizes()
    run(layer, x, DELAYED, dy)
    layer = duplicate(layer)
    run(layer, x, DELAYED, dy)
    with torch.no_grad():
        layer.weight.copy_(torch.full((96, 64), 7.0))
    assert layer._built.states["forward"].amax_history[0, 1] == 7.0


def test_requantize_passes_no_quantized_parameter_over():
    with cg.quantized_model_init(recipe="mxfp8"):
        model = nn.ModuleDict({"ours": cg.Linear(64, 64), "op": cg.ops.Linear(64, 64)})
    before = model["ours"].weight
    with pytest.raises(TypeError, match="op.*weight is a quantized parameter of a"):
        cg.requantize_(model, "nvfp4")
    assert model["ours"].weight is before and type(before) is cg.MXFP8Tensor


def test_quantizers_can_be_built_before_the_first_forward():
    for build in (
        lambda layer: layer.set_meta_tensor(True, recipes.MXFP8BlockScaling()),
        lambda layer: layer.init_fp8_metadata(),
    ):
        layer = cg.Linear(64, 64)
        assert layer.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
        with cg.autocast(recipe=recipes.MXFP8BlockScaling()):
            build(layer)
        assert [type(q) for q in layer.quantizers["scaling_fwd"]] == [cg.MXFP8Quantizer] * 3


def test_pickled_extra_states_that_hold_nothing_are_passed_over():
    pickled = pickle.dumps({"recipe": recipes.MXFP8BlockScaling(), "extra_fp8_variables": {}})
    state = {**nn.Linear(64, 96).state_dict(), "_extra_state": torch.frombuffer(bytearray(pickled), dtype=torch.uint8)}
    for layer in (trained(MXFP8), trained(DELAYED), trained(None)):
        before = layer.get_extra_state()
        layer.load_state_dict(state)
        assert torch.equal(layer.weight, state["weight"]) and torch.equal(layer.get_extra_state(), before)


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_other_pickled_extra_states_are_refused_and_never_unpickled(allowed, monkeypatch, capsys):
    class Payload:
        def __reduce__(self):
            return print, ("code ran",)

    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", allowed)
    for data in (pickle.dumps(Payload()), b"not a pickle"):
        state = {
            **nn.Linear(64, 96).state_dict(),
            "_extra_state": torch.frombuffer(bytearray(data), dtype=torch.uint8),
        }
        for layer in (trained(MXFP8), trained(DELAYED), trained(None)):
            weight = layer.weight.clone()
            with pytest.raises(RuntimeError, match="Linear: the extra state is a pickle.*Remove this _extra_state"):
                layer.load_state_dict(state)
            assert torch.equal(layer.weight, weight)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [b"bytes", "text", [1], torch.ones(()), torch.ones(3)])
def test_extra_states_that_are_neither_bytes_nor_dicts_are_refused(value):
    with pytest.raises(TypeError, match="the extra state must be a tensor of bytes.*Remove the key"):
        cg.Linear(64, 96).set_extra_state(value)


@pytest.mark.parametrize("recipe", [recipes.DelayedScaling, recipes.Float8CurrentScaling])
def test_quantizers_follow_the_layer_to_another_device_but_not_to_meta(recipe, monkeypatch):
    layer = cg.Linear(32, 32)
    first = layer._build_quantizers(recipe())
    assert layer._build_quantizers(recipe()) is first
    assert layer.to("meta")._build_quantizers(recipe()) is first
    assert {q.scale.device.type for slots in first.quantizers.values() for q in slots} == {"cpu"}
    monkeypatch.setattr(cg.Linear, "_device", lambda self: torch.device("meta"))  # the only other one everywhere
    moved = layer._build_quantizers(recipe())
    assert {q.scale.device.type for slots in moved.quantizers.values() for q in slots} == {"meta"}


def test_histories_move_along():
    old, new = (recipes.RecipeState.create(recipes.DelayedScaling(), mode="forward", device=d) for d in ("cpu", "meta"))
    old.amax_history[0] = 3.0
    assert new.inherit_state_from(old) and new.amax_history.device.type == "meta"
    assert not recipes.RecipeState.create(recipes.DelayedScaling(), mode="forward").inherit_state_from(new), (
        "there is nothing in it"
    )
    assert old.fits(recipes.DelayedScaling(), device="cpu") and not old.fits(recipes.DelayedScaling(), device="meta")


@pytest.mark.parametrize("layer_type", [cg.Linear, cg.ops.BasicLinear], ids=lambda kind: kind.__module__)
def test_what_others_have_said_of_a_quantized_weight_survives_conversions(layer_type):
    """torch exchanges the parameter with a new one."""
    with cg.quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
        layer = layer_type(64, 64)
    weight = layer.weight
    weight.sequence_parallel, value = True, weight.get_high_precision_init_val()
    nn.Sequential(layer).bfloat16()
    assert layer.weight is weight and weight.dtype == torch.bfloat16
    assert weight.sequence_parallel and weight.get_high_precision_init_val() is value
    assert torch.equal(preserved_value(weight), value)


def test_the_rank_may_be_said_before_the_layer_is_made():
    class Column(cg.Linear):
        def __init__(self):
            self.tp_rank = 3
            super().__init__(32, 32)

    assert Column().tp_rank == 3 and cg.Linear(32, 32).tp_rank == 0


# ---- whatever changes a recipe or a role is noticed ---------------------------------------------------------


class _AnotherOption(recipes.MXFP8BlockScaling):
    def options(self):
        return {**super().options(), "elsewhere": _ELSEWHERE[0]}


_ELSEWHERE = [0]


@pytest.mark.parametrize(
    "change",
    [
        lambda recipe, layer: setattr(recipe, "fp8_format", recipes.FP8Format.HYBRID),
        lambda recipe, layer: vars(recipe).update(fp8_format=recipes.FP8Format.HYBRID),
        lambda recipe, layer: _ELSEWHERE.__setitem__(0, _ELSEWHERE[0] + 1),
        lambda recipe, layer: setattr(layer, "name", "another"),
        lambda recipe, layer: setattr(
            layer, "get_quantizer_roles", lambda *, fwd, num_quantizers: [None] * num_quantizers
        ),
    ],
    ids=["set", "vars", "options", "name", "roles"],
)
def test_quantizers_are_built_again_when_anything_they_follow_from_has_changed(change):
    layer, recipe = cg.Linear(64, 64), _AnotherOption()
    x = torch.randn(32, 64)
    for _ in range(3):
        with cg.autocast(recipe=recipe):
            layer(x)
    before = layer._built.quantizers
    with cg.autocast(recipe=recipe):
        layer(x)
    assert layer._built.quantizers is before
    change(recipe, layer)
    with cg.autocast(recipe=recipe):
        layer(x)
    assert layer._built.quantizers is not before


def _backward_does_not_pair_up(role):
    """MXFP8 operands of fprop, which dgrad and wgrad would multiply by NVFP4."""
    if role is not None and role.tensor_type == "grad_output":
        return cg.NVFP4Quantizer()
    return cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)


@pytest.mark.parametrize("make", [cg.Linear, cg.ops.BasicLinear])
def test_weights_kept_quantized_for_inference_need_only_operands_of_fprop(make):
    recipe = cg.recipe.CustomRecipe(qfactory=_backward_does_not_pair_up)
    with pytest.raises(ValueError, match="dgrad"), cg.quantized_model_init(recipe=recipe):
        make(32, 32)
    with torch.no_grad(), cg.quantized_model_init(recipe=recipe):
        layer = make(32, 32)
    x = torch.randn(32, 32)
    with torch.no_grad(), cg.autocast(recipe=recipe):
        assert layer(x).shape == (32, 32)
    with pytest.raises(ValueError, match="dgrad"), cg.autocast(recipe=recipe):
        layer(x)
