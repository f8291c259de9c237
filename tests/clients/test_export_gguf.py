"""The gguf package reads what we export, and decodes it to our numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import kernels
from crossgrain.export.walk import quantized_weights
from crossgrain.files import DamagedFileError

from ..export.models import mlp

gguf = pytest.importorskip("gguf", reason="gguf is not installed: make test-clients")


def tensors_of(path) -> dict:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path / "model.gguf").tensors}


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4", "fprop: nvfp4(4over6), dgrad: hp, wgrad: hp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gguf_decodes_to_our_numbers(recipe, dtype, tmp_path):
    model = mlp(recipe, dtype=dtype)
    cg.export(model, tmp_path / "out", format="gguf")
    stored = tensors_of(tmp_path / "out")
    for weight in quantized_weights(model, None):
        tensor = stored[weight.name]
        assert tensor.tensor_type.name == ("MXFP4" if recipe == "mxfp4" else "NVFP4")
        assert tuple(tensor.shape[::-1]) == weight.shape
        ours = kernels.decode(weight._plane(), torch.float32).numpy()
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if recipe == "mxfp4":
            assert np.array_equal(found, ours)
        else:  # llama.cpp multiplies by the global scale afterwards; it is rounded once, and the product once more
            found = found * stored[f"{weight.name.removesuffix('.weight')}.scale"].data
            np.testing.assert_allclose(found, ours, rtol=2**-21)
    for name in ("0.bias", "2.weight", "2.bias"):
        tensor = stored[name]
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(plain, model.state_dict()[name].float().numpy())

    other = mlp(recipe, dtype=dtype)
    cg.load_exported(other, tmp_path / "out")
    x = torch.randn(4, 64, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))


def test_what_gguf_cannot_hold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="it is mxfp8 in fprop, and gguf holds mxfp4, nvfp4"):
        cg.export(mlp("mxfp8"), tmp_path / "out", format="gguf")
    with pytest.raises(ValueError, match="0.weight: GGUF has NVFP4 blocks of 64 numbers, and 96 columns"):
        cg.export(mlp("nvfp4", width=96), tmp_path / "out", format="gguf")
    long = nn.ModuleDict({"x" * 60: mlp("mxfp4")})
    with pytest.raises(ValueError, match="llama.cpp reads names of at most 63 bytes"):
        cg.export(long, tmp_path / "out", format="gguf")
    assert not list(tmp_path.iterdir())


def test_damaged_files_are_refused(tmp_path):
    cg.export(mlp("mxfp4"), tmp_path / "out", format="gguf")
    for name in ("manifest.json", "manifest.sha256"):
        (tmp_path / "out" / name).unlink()
    path = tmp_path / "out" / "model.gguf"
    whole = path.read_bytes()
    for damaged in (whole[:100], whole[: len(whole) // 2], b"GGUX" + whole[4:], b""):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match="truncated or not a GGUF file"):
            cg.load_exported(mlp("mxfp4"), tmp_path / "out")
    path.write_bytes(whole)
    cg.load_exported(mlp("mxfp4"), tmp_path / "out")
    empty = cg.export(mlp("mxfp4"), tmp_path / "empty", format="gguf")
    writer = gguf.GGUFWriter(empty.directory / "model.gguf", "crossgrain")
    writer.add_tensor("0.weight", np.zeros((0, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    for write in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, write)()
    with pytest.raises(ValueError, match="0.weight is not stored as blocks of mxfp4"):
        cg.load_exported(mlp("mxfp4"), tmp_path / "empty", verify=False)
    with pytest.raises(ValueError, match="0.weight .* not stored as blocks of nvfp4|has no tensor 0.scale"):
        cg.load_exported(mlp("nvfp4"), tmp_path / "out")
