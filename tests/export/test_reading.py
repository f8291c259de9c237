"""Files that somebody has damaged or forged are refused, with the reason."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import crossgrain as cg
from crossgrain.files import DamagedFileError

from ..common.saved_models import assert_same_contents
from .models import bytes_of, mlp

INDEX = "model.safetensors.index.json"


@pytest.fixture
def out(tmp_path):
    """An export in three shards, without the manifest that would notice every change."""
    cg.export(mlp("nvfp4"), tmp_path / "out", format="compressed-tensors", max_shard_bytes=6000)
    for name in ("manifest.json", "manifest.sha256"):
        (tmp_path / "out" / name).unlink()
    return tmp_path / "out"


def refused(directory, match, error=DamagedFileError):
    model = mlp("nvfp4")
    before = bytes_of(model)
    with pytest.raises(error, match=match):
        cg.load_exported(model, directory)
    assert_same_contents(bytes_of(model), before)


def change_index(out, change):
    index = json.loads((out / INDEX).read_text())
    change(index)
    (out / INDEX).write_text(json.dumps(index))


def test_without_a_manifest_it_loads(out):
    assert cg.load_exported(mlp("nvfp4"), out) == ["0.weight", "3.weight"]


def test_a_modified_file_is_noticed_by_the_manifest(tmp_path):
    cg.export(mlp("nvfp4"), tmp_path / "out", format="compressed-tensors")
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(tmp_path / "out", "its checksum differs")
    assert cg.load_exported(mlp("nvfp4"), tmp_path / "out", verify=False)
    file.unlink()
    refused(tmp_path / "out", "model.safetensors is missing")


def test_a_missing_shard(out):
    next(out.glob("model-00002*")).unlink()
    refused(out, "the shard model-00002-of-00003.safetensors is missing")


def test_a_truncated_shard(out):
    shard = next(out.glob("model-00001*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    refused(out, "truncated or not a safetensors file")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x.bin", "a\0.safetensors"]
)
def test_a_path_out_of_the_directory(out, name):
    change_index(out, lambda index: index["weight_map"].update({"0.bias": name}))
    refused(out, "which cannot be a file of this directory")


def test_an_index_that_does_not_fit(out, tmp_path):
    shutil.copytree(out, tmp_path / "copy")
    change_index(out, lambda index: index["weight_map"].update(ghost="model-00001-of-00003.safetensors"))
    refused(out, "says that 'ghost' is in|is missing")
    change_index(tmp_path / "copy", lambda index: index["weight_map"].pop("0.bias"))
    refused(tmp_path / "copy", "does not list '0.bias' where it is")


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ("[1]", "must hold a JSON object"),
        ('{"weight_map": NaN}', "NaN is not a number in JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("{", "is not a valid JSON file"),
        ("[" * 100000, "is not a valid JSON file"),
        ("\x00\xff", "is not a valid JSON file"),
    ],
)
def test_an_index_that_is_no_index(out, text, message):
    (out / INDEX).write_text(text)
    refused(out, message)


@pytest.mark.parametrize(
    "config, message, error",
    [
        ('{"quantization_config": {"quant_method": "gptq"}}', "quantized by the method 'gptq'", ValueError),
        ('{"quantization_config": 3}', "quantization_config must be an object", DamagedFileError),
        ('{"quantization_config": {"quant_method": "modelopt"}}', "has no tensor 0.weight", DamagedFileError),
        ('{"quantization_config": {"quant_method": "mxfp4"}}', "nvfp4_2d in this model, which gpt-oss", ValueError),
        ("{}", "has no tensor 0.weight", DamagedFileError),
        ('{"x": Infinity}', "Infinity is not a number", DamagedFileError),
    ],
)
def test_another_config(out, config, message, error):
    (out / "config.json").write_text(config)
    refused(out, message, error)


def rewritten(out, change):
    """All tensors in one file, after a change."""
    tensors = {}
    for shard in out.glob("*.safetensors"):
        tensors.update(load_file(shard))
        shard.unlink()
    (out / INDEX).unlink()
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("0.weight_packed", torch.zeros(128, 30, dtype=torch.uint8), "0.weight_scale has dtype"),
        ("0.weight_packed", torch.zeros(128 * 32, dtype=torch.uint8), "it must be a matrix"),
        ("0.weight_packed", torch.zeros(128, 32, dtype=torch.int8), "0.weight has dtype torch.int8"),
        ("0.weight_packed", torch.zeros(0, 0, dtype=torch.uint8), "0.weight_scale has dtype"),
        ("0.weight_scale", torch.zeros(128, 4), "0.weight_scale has dtype torch.float32"),
        ("0.weight_global_scale", torch.zeros(1), "must be a finite number above 0, got 0.0"),
        ("0.weight_global_scale", torch.tensor([torch.nan]), "must be a finite number above 0"),
        ("0.weight_global_scale", torch.ones(2), "must be one float32 number"),
        ("0.bias", torch.zeros(3), r"0.bias has shape \[3\]"),
        ("0.bias", torch.zeros(128, dtype=torch.int32), "0.bias is torch.int32"),
        ("0.bias", torch.zeros(128).to(torch.float8_e4m3fn), "0.bias is torch.float8_e4m3fn"),
        ("0.extra", torch.zeros(3), "no place for: 0.extra"),
        ("../../evil", torch.zeros(3), "no place for: ../../evil"),
        ("0.weight_zero_point", torch.zeros(3), "no place for: 0.weight_zero_point"),
    ],
)
def test_tensors_that_do_not_fit(out, name, value, message):
    rewritten(out, lambda tensors: tensors.update({name: value}))
    refused(out, message, ValueError)


def test_scales_that_are_not_numbers(out):
    def change(tensors):
        tensors["0.weight_scale"].view(torch.uint8)[3, 1] = 0x7F

    rewritten(out, change)
    refused(out, "0.weight .* holds NaNs or infinities", ValueError)


def test_a_missing_tensor(out):
    rewritten(out, lambda tensors: tensors.pop("3.weight_global_scale"))
    refused(out, "has no tensor 3.weight_global_scale")


def forged(path, header, body=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.mark.parametrize(
    "header, body",
    [
        # two tensors in the same bytes, one beyond the end, a hole, and a header that never ends
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            bytes(6),
        ),
        ({"a": {"dtype": "U8", "shape": [400], "data_offsets": [0, 400]}}, bytes(4)),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, bytes(8)),
        ({"a": {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}}, bytes(8)),
        (b"{" * 1000, b""),
    ],
)
def test_a_forged_header(out, header, body):
    rewritten(out, lambda tensors: None)
    forged(out / "model.safetensors", header, body)
    refused(out, "truncated or not a safetensors file")


@pytest.mark.parametrize("text", ["[]", "3", "{", '{"0.weight": "x"}', '{"0.weight": 3}', '{"0.weight": "nan"}'])
def test_forged_amaxes(out, text):
    rewritten(out, lambda tensors: None)
    save_file(load_file(out / "model.safetensors"), out / "model.safetensors", {"crossgrain.amax": text})
    refused(out, "amax")


def test_an_amax_of_another_tensor_is_not_believed(out):
    rewritten(out, lambda tensors: None)
    tensors = load_file(out / "model.safetensors")
    save_file(tensors, out / "model.safetensors", {"crossgrain.amax": json.dumps({"0.weight": (7.0).hex()})})
    model = mlp("nvfp4")
    cg.load_exported(model, out)
    expected = torch.tensor([2688.0]) / tensors["0.weight_global_scale"]
    assert torch.equal(model[0].weight.plane(cg.ROWWISE).amax, expected)
