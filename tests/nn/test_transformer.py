"""TransformerLayer against plain torch in float64: encoders, decoders, residuals, norms, dropout, paths."""

import pytest
import torch

import crossgrain as cg

from ..common.attention_reference import may_look
from ..common.transformer_reference import assert_same, transformer

F64 = torch.float64


def layer(**options):
    options = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": F64,
        "attn_input_format": "bshd",
        **options,
    }
    made = cg.TransformerLayer(16, 24, 4, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm_weight" in name))
    return made


def inputs(*shape):
    return torch.randn(*shape, dtype=F64).requires_grad_()


CAUSAL = [may_look(5, 5, causal=True)] * 2

OPTIONS = {
    "plain": {},
    "gqa": {"num_gqa_groups": 2, "fuse_qkv_params": True},
    "no bias": {"bias": False, "normalization": "RMSNorm"},
    "post": {"apply_residual_connection_post_layernorm": True},
    "output norm": {"output_layernorm": True},
    "wide heads": {"kv_channels": 6},
}


@pytest.mark.parametrize("options", [*OPTIONS.values(), {"parallel_attention_mlp": True}], ids=[*OPTIONS, "parallel"])
def test_encoder(options):
    made = layer(**options)
    x = inputs(2, 5, 16)
    assert_same(made(x), transformer(made, x, CAUSAL), made, x)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decoder(options):
    made = layer(layer_type="decoder", **options)
    x, encoder_output = inputs(2, 5, 16), inputs(2, 7, 16)
    exact = transformer(made, x, CAUSAL, encoder_output, [may_look(5, 7)] * 2)
    assert_same(made(x, encoder_output=encoder_output), exact, made, x, encoder_output)


def test_masks_of_both_attentions():
    made = layer(layer_type="decoder", self_attn_mask_type="padding", enc_dec_attn_mask_type="padding")
    x, encoder_output = inputs(2, 5, 16), inputs(2, 7, 16)
    lengths, lengths_encoder = torch.tensor([5, 3]), torch.tensor([2, 7])
    real, real_encoder = (torch.arange(n) < size[:, None] for n, size in ((5, lengths), (7, lengths_encoder)))
    mine = made(
        x,
        ~real[:, None, None],
        encoder_output=encoder_output,
        enc_dec_attn_mask=(~real[:, None, None], ~real_encoder[:, None, None]),
    )
    allowed, allowed_encoder = real[:, :, None] & real[:, None], real[:, :, None] & real_encoder[:, None]
    exact = transformer(made, x, allowed, encoder_output, allowed_encoder)
    assert_same(mine, exact, made, x, encoder_output)


@pytest.mark.parametrize("fmt", ["sbhd", "thd"])
def test_layouts_agree(fmt):
    made, x = layer(), inputs(2, 5, 16)
    angles = cg.RotaryPositionEmbedding(4)(5)
    expected = made(x, rotary_pos_emb=angles)
    other = layer(attn_input_format=fmt)
    other.load_state_dict(made.state_dict())
    if fmt == "sbhd":
        mine = other(x.transpose(0, 1), rotary_pos_emb=angles).transpose(0, 1)
    else:
        cu = torch.tensor([0, 5, 10])
        options = {"self_attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        mine = other(x.flatten(0, 1), rotary_pos_emb=angles, **options).view(2, 5, 16)
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10)


def test_windows_and_recomputation():
    made, x = layer(window_size=(2, 0)), inputs(2, 5, 16)
    exact = transformer(made, x, [may_look(5, 5, causal=True, window=(2, 0))] * 2)
    assert_same(made(x, checkpoint_core_attention=True), exact, made, x)
    exact = transformer(made, x, [may_look(5, 5, causal=True, window=(1, 0))] * 2)
    assert_same(made(x, window_size=(1, 0)), exact, made, x)


def test_hidden_dropout():
    """Half of what the two parts add is gone and the rest doubled; only while training."""
    made, x = layer(hidden_dropout=0.5, parallel_attention_mlp=True), inputs(4, 5, 16)
    added = (made(x) - x).detach()
    whole = (made.eval()(x) - x).detach()
    kept = added != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(added[kept], 2 * whole[kept])


@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
def test_paths_are_dropped_by_sample(fmt):
    made = layer(drop_path_rate=0.5, parallel_attention_mlp=True, attn_input_format=fmt)
    x = inputs(*((3, 40, 16) if fmt == "sbhd" else (40, 3, 16)))
    added, whole = (made(x) - x).detach(), (made.eval()(x) - x).detach()
    if fmt == "sbhd":
        added, whole = added.transpose(0, 1), whole.transpose(0, 1)
    dropped = added.abs().amax((1, 2)) == 0
    assert 8 < dropped.sum() < 32
    torch.testing.assert_close(added[~dropped], 2 * whole[~dropped])


def test_names():
    made = layer(name="layers.0", layer_type="decoder", output_layernorm=True)
    assert {name for name, _ in made.named_children()} == {
        "self_attention",
        "inter_attention",
        "layernorm_mlp",
        "layernorm",
    }
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([made])})
    for path, module in model.named_modules():
        if hasattr(module, "get_quantizer_roles"):
            assert module.name == path
    recipe = cg.recipe.GemmRecipe.load("all: mxfp8; *.inter_attention.key_value | *.fc2: hp; first 1 blocks: nvfp4")
    recipe.for_model(model)


def test_errors():
    x = torch.randn(2, 5, 16, dtype=F64)
    with pytest.raises(ValueError, match="layer_type is 'decoder': a decoder needs encoder_output"):
        layer(layer_type="decoder")(x)
    with pytest.raises(ValueError, match="layer_type must be"):
        layer(layer_type="both")
    with pytest.raises(ValueError, match="attn_input_format must be"):
        layer(attn_input_format="bhsd")
    with pytest.raises(ValueError, match="parallel_attention_mlp"):
        layer(parallel_attention_mlp=True, layer_type="decoder")
    with pytest.raises(NotImplementedError, match="drop_path_rate is not supported with attn_input_format='thd'"):
        layer(drop_path_rate=0.1, attn_input_format="thd")
    with pytest.raises(ValueError, match="tp_size=2 needs set_parallel_mode=True"):
        layer(tp_size=2, sequence_parallel=True)
    with pytest.raises(NotImplementedError, match="ub_overlap"):
        layer(ub_overlap_ag=True)
