"""State dicts: what may be loaded into what, by which rounding, and all or nothing."""

import copy
import io

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, files
from crossgrain import recipe as recipes
from crossgrain.optim import FusedAdam
from crossgrain.recipe import read_extra_state
from crossgrain.tensor.init_values import preserved_value

from ..common.quantizers import QUANTIZERS, assert_same_bytes, hybrid_of
from ..common.saved_models import EVERY_QUANTIZER, USAGES, assert_same_contents, contents, holder_of, quantized_model

MXFP8, NVFP4 = recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()


# ---- torch.save, of every format ---------------------------------------------------------------------


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name", EVERY_QUANTIZER)
def test_saved_loaded_mapped_and_assigned(name, usage, x, tmp_path):
    model = holder_of(name, x, usage)
    torch.save(model.state_dict(), tmp_path / "file")
    for options in ({}, {"mmap": True}, {"map_location": "cpu"}):
        state = torch.load(tmp_path / "file", weights_only=True, **options)
        for assign in (False, True):
            other = holder_of(name, x * 3, usage)
            files.load_state_dict(other, state, assign=assign)
            assert_same_contents(contents(other), contents(model))
            assert isinstance(other.weight, nn.Parameter) and other.weight.requires_grad
            with torch.no_grad():
                other.weight.copy_(x)  # also what is mapped from a file can be written, privately
    again = torch.load(tmp_path / "file", weights_only=True)
    assert_same_contents(contents(again), contents(model))
    meta = torch.load(tmp_path / "file", weights_only=True, map_location="meta", mmap=True)
    assert meta["weight"].is_meta and isinstance(meta["weight"], cg.QuantizedTensor)


@pytest.mark.parametrize("name", EVERY_QUANTIZER)
def test_a_model_on_the_meta_device_takes_a_file(name, x):
    model = holder_of(name, x)
    empty = copy.deepcopy(model).to("meta")
    files.load_state_dict(empty, model.state_dict(), assign=True)
    assert_same_contents(contents(empty), contents(model))
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    files.load_state_dict(empty, model.state_dict())
    assert_same_contents(contents(empty), contents(model))


# ---- high precision in and out -----------------------------------------------------------------------


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name", EVERY_QUANTIZER)
def test_high_precision_is_quantized_on_the_way_in_and_decoded_on_the_way_out(name, usage, x):
    plain = nn.Module()
    plain.weight, plain.bias = nn.Parameter(x * 5), nn.Parameter(torch.randn(3))
    model = holder_of(name, x, usage)
    torch.manual_seed(1)
    files.load_state_dict(model, plain.state_dict())
    torch.manual_seed(1)
    expected = holder_of(name, x * 5, usage)
    assert_same_bytes(model.weight.detach(), expected.weight.detach())
    files.load_state_dict(plain, model.state_dict())
    assert torch.equal(plain.weight, model.weight.dequantize())


def test_float32_is_quantized_as_it_is_whatever_the_nominal_dtype():
    with cg.quantized_model_init(recipe=MXFP8):
        layer = cg.Linear(32, 32, params_dtype=torch.bfloat16)
    plain = nn.Linear(32, 32)
    layer.load_state_dict(plain.state_dict())
    assert_same_bytes(layer.weight.detach(), cg.quantize(plain.weight.detach(), "mxfp8").to(torch.bfloat16))


def test_masters_begin_from_the_high_precision_that_was_loaded():
    """Where initial values are preserved; else from what the weight decodes to."""
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    for preserve in (True, False):
        model = quantized_model(MXFP8, preserve=preserve)
        files.load_state_dict(model, plain.state_dict())
        optimizer = FusedAdam(model.parameters(), lr=0.0, master_weights=True)
        model[0].weight.grad = torch.zeros(64, 32)
        optimizer.step()
        master = optimizer.state[model[0].weight]["master_param"]
        assert torch.equal(master, plain[0].weight if preserve else model[0].weight.dequantize())


# ---- one format into another -------------------------------------------------------------------------


def test_another_format_is_refused_by_name_and_nothing_changes():
    source, model = quantized_model(MXFP8), quantized_model(NVFP4, seed=1)
    before = contents(model)
    message = (
        r"0\.weight: the checkpoint has mxfp8, the model has nvfp4_2d, so its rowwise plane would be rounded a second "
        r"time; 2\.weight: .*requantize=True"
    )
    with pytest.raises(ValueError, match=message):
        files.load_state_dict(model, source.state_dict())
    with pytest.raises(ValueError, match=r"0\.weight: the checkpoint has mxfp8, the model has nvfp4_2d"):
        model.load_state_dict(source.state_dict())
    assert_same_contents(contents(model), before)


@pytest.mark.parametrize("way", ["argument", "setting"])
def test_another_format_is_decoded_and_rounded_on_request(way):
    source, model = quantized_model(MXFP8), quantized_model(NVFP4, seed=1)
    if way == "argument":
        files.load_state_dict(model, source.state_dict(), requantize=True)
    else:
        with cg.settings.override(requantize_on_load=True):
            model.load_state_dict(source.state_dict())
    expected = cg.quantize(source[0].weight.dequantize(), "nvfp4_2d")
    assert_same_bytes(model[0].weight.detach(), expected.detach())
    assert not cg.settings.requantize_on_load


def test_operations_refuse_too():
    def op(recipe):
        with cg.quantized_model_init(recipe=recipe):
            return cg.ops.Linear(64, 64)

    source, model = op(MXFP8), op(NVFP4)
    with pytest.raises(ValueError, match="weight: the checkpoint has mxfp8"):
        model.load_state_dict(source.state_dict())
    model = op(MXFP8)
    model.load_state_dict(source.state_dict())
    assert_same_bytes(model.weight.detach(), source.weight.detach())


def test_assigned_parameters_keep_their_format_and_the_next_step_says_so():
    source, model = quantized_model(MXFP8), quantized_model(NVFP4)
    files.load_state_dict(model, source.state_dict(), assign=True)
    assert isinstance(model[0].weight, cg.MXFP8Tensor)
    with pytest.raises(RuntimeError, match="Recipe mismatch for first.weight"), cg.autocast(recipe=NVFP4):
        model(torch.randn(32, 32))


FORMATS = ["mxfp8", "nvfp4", "nvfp4_2d", "nvfp4_rht", "fp8", "fp8_e5m2", "fp8_block_2d", "mxfp4", "identity"]


@pytest.mark.parametrize("into", FORMATS)
@pytest.mark.parametrize("name", FORMATS)
def test_all_pairs_of_formats(name, into, x):
    """Equal formats take bytes, high precision is rounded once; all else asks."""
    source, model = holder_of(name, x), holder_of(into, x * 2)
    rounds_twice = name != into and "identity" not in (name, into)
    before = contents(model)
    if rounds_twice:
        with pytest.raises(ValueError, match=f"weight: the checkpoint has .*{name}.*, the model has .*{into}"):
            files.load_state_dict(model, source.state_dict())
        assert_same_contents(contents(model), before)
    files.load_state_dict(model, source.state_dict(), requantize=rounds_twice)
    if name == into:
        assert_same_bytes(model.weight.detach(), source.weight.detach())
    else:
        assert_same_bytes(model.weight.detach(), QUANTIZERS[into]()(source.weight.detach().dequantize()))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4_rht", "fp8", "fp8_block", "fp8_delayed", "mxfp4"])
def test_a_format_and_the_hybrid_of_twice_that_format_hold_the_same_bytes(name, x):
    plain, hybrid = QUANTIZERS[name]()(x), hybrid_of(name, name)(x)
    for source, target in ((plain, hybrid_of(name, name)(x * 3)), (hybrid, QUANTIZERS[name]()(x * 3))):
        holder, model = nn.Module(), nn.Module()
        holder.weight, model.weight = nn.Parameter(source), nn.Parameter(target)
        files.load_state_dict(model, holder.state_dict())
        for direction in (ROWWISE, COLUMNWISE):
            mine, theirs = model.weight.plane(direction), source.plane(direction)
            if mine is not None and theirs is not None:
                assert torch.equal(mine.operand_codes(), theirs.operand_codes())
                assert torch.equal(mine.operand_scales(), theirs.operand_scales())


def test_a_direction_that_the_checkpoint_lacks():
    """Made where that is exact: square tiles, columns that come from rows by definition. Else it is asked for."""
    x = torch.randn(128, 256)
    for name in ("mxfp8_2d", "nvfp4_2d", "fp8", "mxfp8-nvfp4_rht-rowwise_dequantized"):
        model = holder_of(name, x * 2)
        files.load_state_dict(model, holder_of(name, x, "rowwise").state_dict())
        assert_same_bytes(model.weight.detach(), holder_of(name, x).weight.detach())
    for name in ("mxfp8", "nvfp4", "mxfp8-nvfp4_rht-original"):
        with pytest.raises(ValueError, match="has rowwise .*so its columnwise plane would be rounded"):
            files.load_state_dict(holder_of(name, x * 2), holder_of(name, x, "rowwise").state_dict())


# ---- all or nothing ----------------------------------------------------------------------------------


def spoiled(state, how):
    state = dict(state)
    if how == "missing":
        del state["2.bias"]
    elif how == "unexpected":
        state["3.bias"] = torch.zeros(1)
    elif how == "shape":
        state["2.bias"] = torch.zeros(7)
    elif how == "no tensor":
        state["2.bias"] = "zeros"
    elif how == "extra state":
        state["2._extra_state"] = {**read_extra_state(state["2._extra_state"]), "forward.scale": torch.full((3,), -1.0)}
    elif how == "pickled extra state":
        state["2._extra_state"] = torch.arange(10, dtype=torch.uint8)
    elif how == "impossible shape":
        state["2.weight"] = torch.zeros(31, 64)
    return state


DAMAGES = ["missing", "unexpected", "shape", "no tensor", "extra state", "pickled extra state", "impossible shape"]
DELAYED = recipes.DelayedScaling(amax_history_len=4)


def trained(recipe, seed, steps=2):
    model = quantized_model(recipe, preserve=True, seed=seed)
    for _ in range(steps):
        with cg.autocast(recipe=recipe):
            model(torch.randn(32, 32)).sum().backward()
    return model


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_load_that_fails_leaves_the_model_as_it_was(how, used, assign):
    source, model = trained(DELAYED, 0), trained(DELAYED, 1, steps=2 * used)
    parameters = dict(model.named_parameters())
    preserved = preserved_value(model[0].weight)
    before, twin = contents(model), copy.deepcopy(model)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        files.load_state_dict(model, spoiled(source.state_dict(), how), assign=assign)
    assert_same_contents(contents(model), before)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert preserved_value(model[0].weight) is preserved
    x = torch.randn(32, 32)
    outputs = []
    for each in (model, twin):  # histories and all that goes with them
        with cg.autocast(recipe=DELAYED):
            outputs.append(each(x))
            outputs[-1].sum().backward()
    assert torch.equal(*outputs)
    assert_same_contents(contents(model), contents(twin))


def test_plain_torch_would_have_changed_it():
    source, model = trained(DELAYED, 0), trained(DELAYED, 1)
    before = contents(model)
    with pytest.raises(RuntimeError):
        model.load_state_dict(spoiled(source.state_dict(), "shape"))
    assert any(not torch.equal(before[key], value) for key, value in contents(model).items())


@pytest.mark.parametrize("name", EVERY_QUANTIZER)
def test_every_tensor_is_put_back(name, x):
    model, source = holder_of(name, x), holder_of(name, x * 2)
    before, twin = contents(model), copy.deepcopy(model)
    state = {"weight": (x * 7).float(), "bias": torch.zeros(4)}  # written before the bias is found not to fit
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        files.load_state_dict(model, state)
    assert_same_contents(contents(model), before)
    assert_same_bytes(model.weight.detach(), twin.weight.detach())  # fresh, in its formats
    for each in (model, twin):
        torch.manual_seed(2)
        files.load_state_dict(each, {"weight": x.float(), "bias": torch.zeros(3)})
    assert_same_contents(contents(model), contents(twin))
    files.load_state_dict(model, source.state_dict())
    assert_same_contents(contents(model), contents(source))


TOO_LONG = {"bias": torch.zeros(4)}


def test_what_a_write_notes_in_a_quantizer_is_put_back(x):
    for name in ("fp8_delayed", "fp8_delayed-mxfp4_sr-original"):
        model = holder_of(name, x)
        quantizer = model.weight._quantizer
        quantizer = getattr(quantizer, "rowwise_quantizer", quantizer)
        seen = quantizer.amax.clone()
        with pytest.raises(RuntimeError, match="size mismatch for bias"):
            files.load_state_dict(model, {"weight": x.float() * 9, **TOO_LONG})
        assert torch.equal(quantizer.amax, seen)


def test_formats_that_a_write_changes_are_put_back(x):
    model = holder_of("mxfp8", x)
    model.weight._quantizer = cg.MXFP8Quantizer(cg.DType.kFloat8E5M2)
    decoded = model.weight.dequantize()
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        files.load_state_dict(model, {"weight": x.float() * 9, **TOO_LONG})
    assert torch.equal(model.weight.dequantize(), decoded)


def test_preserved_values_are_put_back():
    model = quantized_model(MXFP8, preserve=True)
    preserved = preserved_value(model[0].weight)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 33))
    with pytest.raises(RuntimeError, match="size mismatch for 2"):
        files.load_state_dict(model, plain.state_dict())
    assert preserved is not None and preserved_value(model[0].weight) is preserved


def test_random_numbers_that_were_drawn_are_put_back():
    recipe = recipes.CustomRecipe(qfactory=lambda role: cg.NVFP4Quantizer(stochastic_rounding=True))
    with cg.quantized_model_init(recipe=recipe):
        model = nn.Sequential(cg.Linear(32, 32), cg.Linear(32, 32))
    state = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    state["1.weight"] = torch.randn(3, 3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="size mismatch"):
        files.load_state_dict(model, state)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plane_that_was_stale_is_stale_again(x):
    model = holder_of("mxfp8", x)
    alias = model.weight.detach()
    alias.update_usage(columnwise_usage=False)
    alias.quantize_(x * 2)
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        files.load_state_dict(model, {"weight": x.float(), "bias": torch.zeros(4)})
    with pytest.raises(RuntimeError, match="stale"):
        model.weight.dequantize(direction=COLUMNWISE)
    files.load_state_dict(model, {"weight": x.float(), "bias": torch.zeros(3)})
    model.weight.dequantize(direction=COLUMNWISE)


def test_operations_are_put_back_with_their_histories():
    op, source = cg.ops.Linear(32, 32), cg.ops.Linear(32, 32)
    for each in (op, source):
        with cg.autocast(recipe=DELAYED):
            each(torch.randn(32, 32)).sum().backward()
    before = contents(op)
    with pytest.raises(RuntimeError, match="size mismatch"):
        files.load_state_dict(op, {**source.state_dict(), "bias": torch.zeros(3)})
    assert_same_contents(contents(op), before)


# ---- payloads ----------------------------------------------------------------------------------------


class Payload:
    def __reduce__(self):
        return print, ("code ran",)


def test_payloads_are_refused_by_torch_and_never_run(x, capsys):
    quantizer = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)
    quantizer.surprise = Payload()
    for poisoned in ({"w": quantizer(x)}, {"_extra_state": Payload()}, {"w": cg.quantize(x, "mxfp8"), "x": Payload()}):
        file = io.BytesIO()
        torch.save(poisoned, file)
        file.seek(0)
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(file, weights_only=True)
    assert "code ran" not in capsys.readouterr().out
