"""safetensors: every format comes back bit for bit, damaged files are refused, and exports are plain."""

import json
import os

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

import crossgrain as cg
from crossgrain import files
from crossgrain.files import DamagedFileError
from crossgrain.optim import FusedAdam, with_masters
from crossgrain.recipe import read_extra_state

from ..common.quantizers import assert_same_bytes
from ..common.saved_models import EVERY_QUANTIZER, USAGES, assert_same_contents, contents, holder_of, quantized_model


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("name", EVERY_QUANTIZER)
def test_every_tensor_comes_back_bit_for_bit(name, usage, x, tmp_path):
    model = holder_of(name, x, usage)
    files.save_safetensors(model, tmp_path / "model.safetensors")
    loaded = files.read_safetensors(tmp_path / "model.safetensors").state_dict["weight"]
    assert type(loaded) is type(model.weight.data)
    assert (loaded.dtype, loaded.shape) == (model.weight.dtype, model.weight.shape)
    assert_same_bytes(loaded, model.weight.detach())
    assert_same_contents(contents(loaded), contents(model.weight.detach()))  # padding too
    torch.manual_seed(5)
    model.weight.data.quantize_(x * 2)
    torch.manual_seed(5)
    loaded.quantize_(x * 2)  # the quantizer travelled with all its options
    assert_same_bytes(loaded, model.weight.detach())


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp8_block", "fp8-mxfp8_2d-original", "mxfp8-fp8_e5m2-original"])
def test_transposed_copies_come_back(name, x, tmp_path):
    with cg.settings.override(non_tn_fp8_gemm=False):
        model = holder_of(name, x)
        files.save_safetensors(model, tmp_path / "file")
        loaded = files.read_safetensors(tmp_path / "file").state_dict["weight"]
        assert_same_contents(contents(loaded), contents(model.weight.detach()))


def test_other_ranks_slices_and_flat_views(tmp_path):
    whole = cg.quantize(torch.randn(4, 32, 64), "mxfp8")
    tensors = {"whole": whole, "part": whole[1:3], "flat": whole.view(-1), "own": whole[:1].clone()}
    tensors["ragged"] = cg.quantize(torch.randn(3, 5, 7), "fp8_block")
    files.save_safetensors(tensors, tmp_path / "file")
    for name, loaded in files.read_safetensors(tmp_path / "file").state_dict.items():
        assert loaded.shape == tensors[name].shape
        assert_same_bytes(loaded, tensors[name])


def test_formats_that_are_only_data_travel_in_the_file(x, tmp_path):
    mine = cg.Format("file_test_e3m2_64", cg.formats.E3M2, (1, 64), "e8m0_floor")
    tensor = cg.FormatQuantizer(mine)(x)
    files.save_safetensors({"w": tensor}, tmp_path / "file")
    loaded = files.read_safetensors(tmp_path / "file").state_dict["w"]
    assert loaded.planes()[0].format == mine
    assert_same_bytes(loaded, tensor)


def test_names_and_metadata_are_as_documented(x, tmp_path):
    model = nn.ModuleDict({"layer": holder_of("mxfp8-nvfp4_rht-original", x)})
    recipe = "mxfp8-fwd-nvfp4-bwd; *.lm_head: hp"
    files.save_safetensors(model, tmp_path / "file", recipe=recipe, metadata={"author": "me"})
    with safetensors.safe_open(tmp_path / "file", framework="pt") as file:
        assert sorted(file.keys()) == [
            "layer.bias",
            "layer.weight.columnwise.amax",
            "layer.weight.columnwise.data",
            "layer.weight.columnwise.scale",
            "layer.weight.rowwise.data",
            "layer.weight.rowwise.scale",
        ]
        metadata = file.metadata()
    assert metadata["format"] == "pt" and metadata["author"] == "me"
    assert metadata["crossgrain.version"] == "1"
    assert set(json.loads(metadata["crossgrain.state"])["formats"]) == {"mxfp8", "nvfp4", "nvfp4_rht"}
    file = files.read_safetensors(tmp_path / "file")
    assert file.recipe() == cg.GemmRecipe.load(recipe)
    assert file.metadata == {"format": "pt", "author": "me"}


def test_histories_of_delayed_scaling_are_plain_tensors(tmp_path):
    recipe = cg.recipe.DelayedScaling(amax_history_len=4)
    model, other = quantized_model(recipe), quantized_model(recipe, seed=1)
    for factor in (1, 3):
        with cg.autocast(recipe=recipe):
            model(torch.randn(32, 32) * factor).sum().backward()
    files.save_safetensors(model, tmp_path / "file", recipe=recipe)
    names = safetensors.torch.load_file(tmp_path / "file")
    assert read_extra_state(names["0._extra_state"])["forward.amax_history"].shape == (4, 3)
    files.load_safetensors(tmp_path / "file", other)
    assert_same_contents(contents(other), contents(model))


def test_shared_tensors_are_kept_once(tmp_path):
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    files.save_safetensors(model, tmp_path / "file")
    assert list(safetensors.torch.load_file(tmp_path / "file")) == ["embed.weight"]
    state = files.read_safetensors(tmp_path / "file").state_dict
    assert torch.equal(state["head.weight"], model["head"].weight)


def test_the_same_memory_with_other_signs_is_another_tensor(tmp_path):
    real, complex_ = torch.tensor([1.0, 2.0]), torch.tensor([1 + 2j, 3 - 1j])
    state = {"a": real, "b": torch._neg_view(real), "c": complex_, "d": complex_.conj()}
    files.save_safetensors(state, tmp_path / "signs.safetensors")
    loaded = files.read_safetensors(tmp_path / "signs.safetensors").state_dict
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_plain_files_of_others_are_read(tmp_path):
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "file")
    model = quantized_model(cg.recipe.MXFP8BlockScaling())
    files.load_safetensors(tmp_path / "file", model)
    expected = cg.quantize(plain[0].weight.detach(), "mxfp8")
    assert_same_bytes(model[0].weight.detach(), expected)


def test_names_like_paths_are_only_names_and_the_header_keeps_its_own(tmp_path):
    path = tmp_path / "names.safetensors"
    files.save_safetensors({"../../weight": torch.ones(1), "": torch.zeros(2)}, path)
    assert sorted(files.read_safetensors(path).state_dict) == ["", "../../weight"]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with pytest.raises(ValueError, match="__metadata__ could not be read again"):
        files.save_safetensors({"__metadata__": torch.ones(1)}, path)


def test_names_that_would_collide_are_refused(x, tmp_path):
    with pytest.raises(ValueError, match="two tensors would be called w.rowwise.data"):
        files.save_safetensors({"w": cg.quantize(x, "mxfp8"), "w.rowwise.data": torch.ones(2)}, tmp_path / "file")
    with pytest.raises(ValueError, match="on the meta device"):
        files.save_safetensors({"w": torch.ones(2, device="meta")}, tmp_path / "file")
    with pytest.raises(TypeError, match="w is a list"):
        files.save_safetensors({"w": [1]}, tmp_path / "file")
    with pytest.raises(ValueError, match="reserved for crossgrain"):
        files.save_safetensors({}, tmp_path / "file", metadata={"crossgrain.x": "1"})
    assert os.listdir(tmp_path) == []


# ---- damage ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    model = quantized_model("mxfp8-fwd-nvfp4-bwd")
    files.save_safetensors(model, tmp_path / "file", recipe="mxfp8-fwd-nvfp4-bwd")
    return tmp_path / "file"


def refuses(path, match="."):
    model = quantized_model("mxfp8-fwd-nvfp4-bwd", seed=1)
    before = contents(model)
    with pytest.raises(DamagedFileError, match=match):
        files.load_safetensors(path, model)
    assert_same_contents(contents(model), before)


def test_a_file_that_was_cut_off_is_refused_and_nothing_changes(saved):
    whole = saved.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        refuses(saved, "file is truncated or not a safetensors file")


def test_every_flipped_byte_is_noticed(saved):
    """A hundred places spread over header and data."""
    whole = bytearray(saved.read_bytes())
    for place in range(3, len(whole), len(whole) // 100):
        changed = bytearray(whole)
        changed[place] ^= 0x10
        saved.write_bytes(changed)
        with pytest.raises(DamagedFileError):
            files.read_safetensors(saved)


def rewritten(path, change, **about):
    """The same file with another description, and the checksum that belongs to it."""
    from crossgrain.files.safetensors_file import _digest

    with safetensors.safe_open(path, framework="pt") as file:
        buffers, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    state = json.loads(metadata["crossgrain.state"])
    change(state, buffers)
    metadata = {**metadata, "crossgrain.state": json.dumps(state), **about}
    del metadata["crossgrain.sha256"]
    metadata["crossgrain.sha256"] = _digest(buffers, metadata)
    safetensors.torch.save_file(buffers, path, metadata)


def test_rewriting_without_a_change_is_accepted(saved):
    rewritten(saved, lambda state, buffers: None)
    files.load_safetensors(saved, quantized_model("mxfp8-fwd-nvfp4-bwd"))


def test_unknown_versions_are_refused(saved):
    rewritten(saved, lambda state, buffers: None, **{"crossgrain.version": "2"})
    refuses(saved, "unknown version '2' of crossgrain's naming scheme; this crossgrain reads version 1")


WEIGHT = "0.weight"
TAMPERING = {
    "another class": lambda s, b: s["tensors"][WEIGHT].update({"class": "Linear"}),
    "a class of the system": lambda s, b: s["tensors"][WEIGHT]["quantizer"].update({"class": "os.system"}),
    "another option": lambda s, b: s["tensors"][WEIGHT]["quantizer"]["options"].update(surprise=1),
    "an option less": lambda s, b: s["tensors"][WEIGHT]["quantizer"]["options"].pop("columnwise_source"),
    "another shape": lambda s, b: s["tensors"][WEIGHT]["children"]["rowwise"].update(layout=[64, 64]),
    "no shape": lambda s, b: s["tensors"][WEIGHT]["children"]["rowwise"].update(layout=None),
    "another dtype": lambda s, b: s["tensors"][WEIGHT].update(dtype="load"),
    "another format": lambda s, b: s["tensors"][WEIGHT]["children"]["rowwise"]["formats"].update(rowwise="nvfp4"),
    "another meaning of a format": lambda s, b: s["formats"]["mxfp8"].update(block=[1, 64]),
    "an impossible format": lambda s, b: s["formats"]["mxfp8"].update(name="mine", scale_rule="run"),
    "another child": lambda s, b: s["tensors"][WEIGHT]["children"].update(third=s["tensors"]["2.weight"]),
    "a buffer less": lambda s, b: b.pop("0.weight.rowwise.scale"),
    "a shorter buffer": lambda s, b: b.update({"0.weight.rowwise.scale": b["0.weight.rowwise.scale"][:1].clone()}),
    "another kind of buffer": lambda s, b: b.update({"0.weight.rowwise.data": b["0.weight.rowwise.data"].float()}),
    "an alias of nothing": lambda s, b: s["aliases"].update({"a": "nothing"}),
    "a name twice": lambda s, b: s["aliases"].update({"0.bias": "2.bias"}),
    "no formats": lambda s, b: s.pop("formats"),
}


@pytest.mark.parametrize("how", TAMPERING)
def test_a_description_that_is_wrong_is_refused_even_with_the_right_checksum(saved, how):
    rewritten(saved, TAMPERING[how])
    refuses(saved, "is inconsistent: its tensors do not fit its metadata")


def test_a_missing_file_is_not_a_damaged_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        files.read_safetensors(tmp_path / "nothing")


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(*_):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        files.save_safetensors(quantized_model("mxfp8", seed=2), saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["file"]


# ---- plain exports -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd"])
def test_exports_are_the_decoded_model(recipe, dtype, tmp_path):
    model = quantized_model(recipe)
    files.export_plain(model, tmp_path / "file", dtype=dtype)
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype)
    exported = safetensors.torch.load_file(tmp_path / "file")
    plain.load_state_dict(exported)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.dtype == dtype
        values = mine.dequantize(dtype=dtype) if isinstance(mine, cg.QuantizedTensor) else mine.to(dtype)
        assert torch.equal(theirs, values)


@pytest.mark.parametrize("kind", ["fused", "with_masters"])
def test_masters_are_exported_on_request(kind, tmp_path):
    model = quantized_model("mxfp8", preserve=True)
    initial = model[0].weight.get_high_precision_init_val()
    make = {
        "fused": lambda: FusedAdam(model.parameters(), lr=0.0, master_weights=True),
        "with_masters": lambda: with_masters(torch.optim.SGD, model.parameters(), lr=0.0),
    }
    optimizer = make[kind]()
    with pytest.raises(ValueError, match="has no master weights"):
        files.export_plain(model, tmp_path / "file", optimizer=optimizer)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    files.export_plain(model, tmp_path / "file", dtype=torch.float32, optimizer=optimizer)
    exported = safetensors.torch.load_file(tmp_path / "file")
    assert torch.equal(exported["0.weight"], initial)
    assert not torch.equal(exported["0.weight"], model[0].weight.dequantize())
    assert torch.equal(exported["0.bias"], model[0].bias)


def test_exports_leave_histories_out_and_integers_alone(tmp_path):
    recipe = cg.recipe.DelayedScaling()
    model = quantized_model(recipe)
    model.register_buffer("count", torch.tensor(7))
    with cg.autocast(recipe=recipe):
        model(torch.randn(32, 32)).sum().backward()
    files.export_plain(model, tmp_path / "file")
    exported = safetensors.torch.load_file(tmp_path / "file")
    assert set(exported) == {"0.weight", "0.bias", "2.weight", "2.bias", "count"}
    assert exported["count"].dtype == torch.int64


def test_numbers_beyond_the_range_are_not_exported(tmp_path):
    model = nn.Linear(2, 2)
    model.weight.data.fill_(1e6)
    with pytest.raises(ValueError, match="weight holds numbers beyond the range of float16"):
        files.export_plain(model, tmp_path / "file", dtype=torch.float16)
    assert os.listdir(tmp_path) == []
