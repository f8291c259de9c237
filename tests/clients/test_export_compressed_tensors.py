"""compressed-tensors and transformers, unmodified, read what we export, and compute with our numbers."""

from __future__ import annotations

import pytest
import torch

import crossgrain as cg
from crossgrain import kernels
from crossgrain.export.walk import quantized_weights

from ..common.tiny_models import tiny_llama
from ..export.models import read

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed: make test-clients")

from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationConfig  # noqa: E402

# Packed formats are decoded to bfloat16 by compressed-tensors, whatever the dtype of the model.
PACKED = ["nvfp4", "fprop: nvfp4(4over6), dgrad: hp, wgrad: hp", "mxfp4", "mxfp8", "nvfp4; first 1 block: mxfp8"]
WIDE = ["fp8", "fp8-block"]


def converted(recipe: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = tiny_llama(hidden_size=64, intermediate_size=128).to(dtype).eval()
    cg.convert(model, f"{recipe}; lm_head: hp")
    return model


def decoded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The numbers that the layers multiply, by name."""
    return {w.name: kernels.decode(w._plane(), torch.float32)[: w.shape[0]] for w in quantized_weights(model, None)}


def with_decoded_weights(model: torch.nn.Module) -> torch.nn.Module:
    """A plain float32 model with the numbers that the layers of ``model`` multiply, and its other parameters."""
    numbers = decoded(model)
    plain = tiny_llama(hidden_size=64, intermediate_size=128).eval()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(numbers[name] if name in numbers else model.get_parameter(name))
    return plain


@pytest.mark.parametrize("recipe", PACKED)
def test_transformers_computes_with_our_numbers(recipe, tmp_path):
    model = converted(recipe, torch.bfloat16)
    cg.export(model, tmp_path / "out", format="compressed-tensors", max_shard_bytes=50_000)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    ours = with_decoded_weights(model)
    parameters = dict(loaded.named_parameters())
    for name, weight in decoded(model).items():
        assert parameters[name].dtype == torch.bfloat16
        # They compute in float32, where NVFP4 differs by the roundings of its global scale, and round to bfloat16 at
        # the end: a number in the middle between two may then go either way.
        least, most = ((weight * (1 + side * 2**-21)).bfloat16() for side in (-1, 1))
        assert ((parameters[name] == least) | (parameters[name] == most)).all(), name
        assert torch.equal(parameters[name].float(), weight.bfloat16().float()) or "nvfp4" in recipe
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(parameters[name] if name in decoded(model) else parameter.bfloat16())
        found = loaded.float().eval()(input_ids=tokens).logits
        torch.testing.assert_close(found, ours(input_ids=tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", WIDE)
def test_transformers_computes_with_our_fp8_numbers(recipe, tmp_path):
    model = converted(recipe)
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        found = loaded(input_ids=tokens).logits
        torch.testing.assert_close(found, with_decoded_weights(model)(input_ids=tokens).logits, rtol=1e-5, atol=1e-6)
    parameters = dict(loaded.named_parameters())
    assert all(torch.equal(parameters[name], weight) for name, weight in decoded(model).items())


def test_without_decoding_at_load_the_first_call_decodes(tmp_path):
    model = converted("mxfp8", torch.bfloat16)
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    layer = loaded.model.layers[0].mlp.up_proj
    assert layer.weight.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        loaded(input_ids=torch.arange(8).view(1, 8))
    assert torch.equal(layer.weight.float(), decoded(model)["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp8", "fp8", "fp8-block"])
def test_compressed_tensors_decompresses_in_float32(recipe, tmp_path):
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    model = converted(recipe)
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    stored = read(tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out").quantization_config
    config = QuantizationConfig.model_validate(config)
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    for name, ours in decoded(model).items():
        local = {key.removeprefix(f"{name[: -len('weight')]}"): value for key, value in stored.items()}
        wanted = compressor.compression_param_names(scheme)
        assert all(part in local for part in wanted)
        if recipe != "nvfp4":
            found = compressor.decompress({part: local[part] for part in wanted}, scheme)["weight"]
            assert torch.equal(found.float(), ours)
            continue
        codes = unpack_fp4_from_uint8(local["weight_packed"], ours.shape[0], ours.shape[1], dtype=torch.float32)
        scale, whole = local["weight_scale"].float(), local["weight_global_scale"]
        found = dequantize(codes, scale, args=scheme.weights, dtype=torch.float32, global_scale=whole)
        # They divide by 2688 / amax, we multiply by amax and 1 / 2688: each rounds twice, by 2**-24.
        torch.testing.assert_close(found, ours, rtol=2**-21, atol=0)


def test_observed_inputs_become_quantized_activations(tmp_path):
    model = converted("nvfp4", torch.bfloat16)
    tokens = torch.arange(32).view(2, 16)
    cg.export(model, tmp_path / "out", format="compressed-tensors", inputs=[{"input_ids": tokens}])
    stored = read(tmp_path / "out")
    assert stored["model.layers.0.mlp.up_proj.input_global_scale"].shape == (1,)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        quantized = loaded(input_ids=tokens).logits.float()
        ours = model(input_ids=tokens).logits.float()
    # Activations are rounded to 4 bits on both sides, along other paths, so only their size is compared.
    assert (quantized - ours).norm() < 0.2 * ours.norm()


@pytest.mark.parametrize("head", ["hp", "mxfp8"])
def test_tied_heads(head, tmp_path):
    torch.manual_seed(0)
    model = tiny_llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=True).to(torch.bfloat16).eval()
    cg.convert(model, f"mxfp8; lm_head: {head}")
    report = cg.export(model, tmp_path / "out", format="compressed-tensors")
    assert bool(report.notes) == (head != "hp")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
    )
    expected = decoded(model).get("lm_head.weight", model.lm_head.weight.float())
    assert torch.equal(loaded.lm_head.weight.float(), expected)
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)

    other = tiny_llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=True).to(torch.bfloat16).eval()
    cg.convert(other, f"mxfp8; lm_head: {head}")
    cg.load_exported(other, tmp_path / "out")
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.equal(other(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_a_model_that_compressed_tensors_wrote_is_read(tmp_path):
    """What transformers saves after loading our export is loaded again, byte for byte."""
    model = converted("nvfp4", torch.bfloat16)
    cg.export(model, tmp_path / "out", format="compressed-tensors")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded.save_pretrained(tmp_path / "theirs")
    other = converted("nvfp4", torch.bfloat16)
    cg.load_exported(other, tmp_path / "theirs")
    for mine, theirs in zip(quantized_weights(model, None), quantized_weights(other, None), strict=True):
        a, b = mine.read(), theirs.read()
        assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
        # The amax comes back from a rounded reciprocal: two roundings of 2**-24.
        torch.testing.assert_close(a.amax, b.amax, rtol=2**-22, atol=0)


def test_conv1d_is_refused(tmp_path):
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    cg.convert(model, "mxfp8; lm_head: hp")
    for format in ("compressed-tensors", "modelopt"):
        with pytest.raises(ValueError, match="c_attn.weight.*(is a Conv1D|it is mxfp8)"):
            cg.export(model, tmp_path / "out", format=format)
