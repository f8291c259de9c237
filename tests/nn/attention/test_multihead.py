"""MultiheadAttention against plain torch in float64: layouts of weights and inputs, GQA, norms, positions, cross."""

import pytest
import torch

import crossgrain as cg
from crossgrain.nn import apply_rotary_pos_emb

from ...common.attention_reference import may_look
from ...common.transformer_reference import assert_same, multihead

F64 = torch.float64


def layer(**options):
    """16 channels in 4 heads, biases and norm weights that are not trivial."""
    options = {"attention_dropout": 0.0, "params_dtype": F64, "qkv_format": "bshd", **options}
    made = cg.MultiheadAttention(16, 4, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm_weight" in name))
    return made


def inputs(*shape):
    return torch.randn(*shape, dtype=F64).requires_grad_()


CAUSAL = [may_look(5, 5, causal=True)] * 2


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("input_layernorm", [True, False], ids=["norm", ""])
@pytest.mark.parametrize("groups", [None, 2, 1])
@pytest.mark.parametrize("weights", ["split", "fused", "interleaved"])
def test_self_attention(weights, groups, input_layernorm, bias):
    mha = layer(
        num_gqa_groups=groups,
        input_layernorm=input_layernorm,
        bias=bias,
        fuse_qkv_params=weights != "split",
        qkv_weight_interleaved=weights == "interleaved",
    )
    x = inputs(2, 5, 16)
    exact, _ = multihead(mha, x, CAUSAL)
    assert_same(mha(x), exact if mha.proj.bias is None else exact + mha.proj.bias, mha, x)


@pytest.mark.parametrize("input_layernorm", [True, False], ids=["norm", ""])
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("weights", ["split", "fused", "interleaved"])
def test_cross_attention(weights, groups, input_layernorm):
    mha = layer(
        attention_type="cross",
        attn_mask_type="no_mask",
        num_gqa_groups=groups,
        input_layernorm=input_layernorm,
        fuse_qkv_params=weights != "split",
        qkv_weight_interleaved=weights == "interleaved",
    )
    x, encoder_output = inputs(2, 5, 16), inputs(2, 7, 16)
    exact, _ = multihead(mha, x, [may_look(5, 7)] * 2, encoder_output)
    assert_same(mha(x, encoder_output=encoder_output), exact + mha.proj.bias, mha, x, encoder_output)


@pytest.mark.parametrize("weights", ["split", "fused", "interleaved"])
@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_values_may_have_other_channels_than_keys(attention_type, weights):
    """Queries and keys have 6 channels, values 10."""
    mha = layer(
        kv_channels=(6, 10),
        num_gqa_groups=2,
        attention_type=attention_type,
        attn_mask_type="no_mask",
        fuse_qkv_params=weights != "split",
        qkv_weight_interleaved=weights == "interleaved",
    )
    assert mha.proj.weight.shape == (16, 40)
    x = inputs(2, 5, 16)
    if attention_type == "self":
        exact, _ = multihead(mha, x, [may_look(5, 5)] * 2)
        assert_same(mha(x), exact + mha.proj.bias, mha, x)
    else:
        encoder_output = inputs(2, 7, 16)
        exact, _ = multihead(mha, x, [may_look(5, 7)] * 2, encoder_output)
        assert_same(mha(x, encoder_output=encoder_output), exact + mha.proj.bias, mha, x, encoder_output)


def test_other_channels_of_values_in_formats():
    """MXFP8 has 3 bits of mantissa. A cache has other channels of values, too."""
    mha = layer(kv_channels=(6, 10), num_gqa_groups=2, fuse_qkv_params=True, params_dtype=torch.float32)
    x = torch.randn(2, 5, 16).requires_grad_()
    with cg.autocast(recipe="all: mxfp8, attention: mxfp8"):
        y = mha(x)
    y.sum().backward()
    exact, _ = multihead(mha, x, CAUSAL)
    assert 0 < (y - exact - mha.proj.bias).norm() / exact.norm() < 0.15
    assert x.grad is not None and torch.isfinite(x.grad).all()
    params, parts = cg.InferenceParams(2, 5, 2, head_dim_k=6, dtype=torch.float32, head_dim_v=10), []
    with torch.no_grad():
        for i in range(5):
            params.pre_step({0: 1, 1: 1})
            parts.append(mha(x[:, i : i + 1], inference_params=params))
        torch.testing.assert_close(torch.cat(parts, 1), mha(x), rtol=0, atol=1e-5)


def test_names():
    names = {name for name, _ in layer(input_layernorm=True).named_parameters()}
    qkv = [
        f"layernorm_qkv.{part}_{kind}"
        for part in ("query", "key", "value", "layer_norm")
        for kind in ("weight", "bias")
    ]
    assert names == {*qkv, "proj.weight", "proj.bias"}
    fused = layer(fuse_qkv_params=True)
    assert {name for name, _ in fused.named_parameters()} == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}
    cross = {name.split(".")[0] for name, _ in layer(attention_type="cross").named_parameters()}
    assert cross == {"query_layer", "key_value", "proj"}
    named = layer(name="layers.0.attention", input_layernorm=True)
    for path, module in named.named_modules():
        if hasattr(module, "get_quantizer_roles"):
            assert module.name == f"layers.0.attention.{path}"
    unnamed = layer()
    cg.name_layers(torch.nn.ModuleDict({"a": unnamed}))
    assert [unnamed.qkv.name, unnamed.core_attention.name] == ["a.qkv", "a.core_attention"]


def test_rules_reach_the_parts():
    recipe = cg.recipe.GemmRecipe.load("all: mxfp8; *.proj: hp; type=dpa: attention: mxfp8")
    mha = layer(name="0", params_dtype=torch.float32, fuse_qkv_params=True)
    recipe.for_model(torch.nn.Sequential(mha))
    x = torch.randn(2, 8, 16)
    with cg.autocast(recipe=recipe):
        mha(x)
    assert isinstance(mha.qkv.quantizers["scaling_fwd"][0], cg.MXFP8Quantizer)
    assert isinstance(mha.proj.quantizers["scaling_fwd"][0], cg.IdentityQuantizer)
    assert all(isinstance(q, cg.MXFP8Quantizer) for q in mha.core_attention.quantizers["scaling_fwd"])


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_what_is_returned(normalization):
    mha = layer(return_bias=True, return_layernorm_output=True, input_layernorm=True, normalization=normalization)
    x = inputs(2, 5, 16)
    y, bias, normalized = mha(x)
    exact, exact_normalized = multihead(mha, x, CAUSAL)
    assert bias is mha.proj.bias
    torch.testing.assert_close(normalized, exact_normalized)
    torch.testing.assert_close(y, exact)
    with pytest.raises(ValueError, match="needs input_layernorm=True"):
        layer(return_layernorm_output=True)


@pytest.mark.parametrize("fmt", ["sbhd", "thd"])
def test_layouts_agree(fmt):
    mha = layer(rotary_pos_interleaved=True)
    x = inputs(2, 5, 16)
    angles = cg.RotaryPositionEmbedding(4, interleaved=True)(5)
    expected = mha(x, rotary_pos_emb=angles)
    if fmt == "sbhd":
        mine = mha(x.transpose(0, 1), rotary_pos_emb=angles, qkv_format="sbhd").transpose(0, 1)
    else:
        cu = torch.tensor([0, 5, 10])
        options = {"attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        mine = mha(x.flatten(0, 1), rotary_pos_emb=angles, qkv_format="thd", **options).view(2, 5, 16)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_norms_of_heads_and_positions(kind, before):
    """fp32 angles on both sides; norms differ from torch's by the order of sums."""
    mha = layer(qk_norm_type=kind, qk_norm_before_rope=before)
    angles = cg.RotaryPositionEmbedding(4)(5)

    def normalized(x, module):
        if kind == "L2Normalization":
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        if kind == "RMSNorm":
            return torch.nn.functional.rms_norm(x, (4,), module.weight, 1e-6)
        return torch.nn.functional.layer_norm(x, (4,), module.weight, module.bias, 1e-6)

    def change(q, k):
        if before:
            q, k = normalized(q, mha.q_norm), normalized(k, mha.k_norm)
        q, k = (apply_rotary_pos_emb(x, angles, "bshd") for x in (q, k))
        return (q, k) if before else (normalized(q, mha.q_norm), normalized(k, mha.k_norm))

    x = inputs(2, 5, 16)
    exact, _ = multihead(mha, x, CAUSAL, change_heads=change)
    mine = mha(x, rotary_pos_emb=angles)
    torch.testing.assert_close(mine, exact + mha.proj.bias, rtol=0, atol=1e-6)


def test_padding_and_microbatches():
    mha = layer(attn_mask_type="padding_causal", params_dtype=torch.float32, fuse_qkv_params=True)
    x = torch.randn(2, 5, 16)
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = True
    full = mha(x, attention_mask=mask)
    short = mha(x[1:, :3], attention_mask=mask[1:, ..., :3])
    torch.testing.assert_close(full[1, :3], short[0], rtol=0, atol=1e-6)
    with cg.autocast(recipe="mxfp8"):
        one = mha(x, attention_mask=mask, is_first_microbatch=True)
        two = mha(x, attention_mask=mask, is_first_microbatch=False)
    assert torch.equal(one, two) and mha.qkv._fp8_workspaces


def test_errors():
    x = torch.randn(2, 5, 16, dtype=F64)
    with pytest.raises(ValueError, match="self attention was called with encoder_output"):
        layer()(x, encoder_output=x)
    with pytest.raises(ValueError, match="cross attention was called without encoder_output"):
        layer(attention_type="cross")(x)
    with pytest.raises(ValueError, match="qk_norm_type must be"):
        layer(qk_norm_type="BatchNorm")
    with pytest.raises(ValueError, match="evenly"):
        cg.MultiheadAttention(16, 3)
    with pytest.raises(ValueError, match="tp_size=2 needs set_parallel_mode=True"):
        layer(tp_size=2)
    with pytest.raises(TypeError, match="no option 'window'"):
        layer(window=3)
    with cg.quantized_model_init(recipe="mxfp8"), pytest.raises(NotImplementedError, match="split"):
        layer(params_dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"input_layernorm": True}, {"layernorm_linear_qkv", "proj"}),
        ({}, {"linear_qkv", "proj"}),
        ({"attention_type": "cross", "input_layernorm": True}, {"layernorm_linear_q", "linear_kv", "proj"}),
        ({"attention_type": "cross"}, {"linear_q", "linear_kv", "proj"}),
    ],
)
@pytest.mark.parametrize("named", ["by hand", "by path"])
def test_factories_see_the_names_of_transformer_engine_and_rules_those_of_the_model(options, names, named):
    seen = set()

    def factory(role):
        if role is not None and role.module_type == "linear":
            seen.add(role.name)
        return cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)

    layer = cg.MultiheadAttention(64, 4, name="tl2.attn" if named == "by hand" else None, **options)
    model = torch.nn.ModuleDict({"tl2": torch.nn.ModuleDict({"attn": layer})})
    cg.name_layers(model)
    x = torch.randn(32, 2, 64)
    more = {"encoder_output": x} if "attention_type" in options else {}
    with cg.autocast(recipe=cg.recipe.CustomRecipe(qfactory=factory)):
        layer(x, **more)
    assert seen == {f"tl2.attn.{name}" for name in names}
    assert cg.recipe.QuantizerRole("linear", "input", "tl2.attn.proj") in layer.proj._roles("forward")
    paths = [name for name, module in model.named_modules() if isinstance(module, (cg.Linear, cg.LayerNormLinear))]
    recipe = cg.recipe.GemmRecipe.load(f"all: nvfp4; {paths[0]}: mxfp8").for_model(model)
    assert {row.layer for row in recipe.explain(model).rows if row.format == "mxfp8"} == {paths[0]}
    with cg.autocast(recipe=recipe):
        layer(x, **more)
    first = model.get_submodule(paths[0])
    assert isinstance(first.quantizers["scaling_fwd"][0], cg.MXFP8Quantizer)
