"""Softmax with a sink, and the largest scores: against attention written out in float64.

Both sides are float64, so they differ by the order of sums only: 1e-10 leaves ample room. The sink of the reference is
a term of the denominator; that of the library is a column of scores.
"""

import copy

import pytest
import torch

import crossgrain as cg
from crossgrain import recipe as recipes

from ...common.attention_reference import batched, gradients, may_look, sequences
from ...common.transformer_reference import assert_same as assert_same_module
from ...common.transformer_reference import multihead

CLOSE = {"rtol": 0, "atol": 1e-10}
F64 = torch.float64


def core(softmax_type="learnable", fmt="bshd", **options):
    """A learnable offset is not zero here."""
    made = cg.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format=fmt, softmax_type=softmax_type, **options)
    if made.softmax_offset is not None:
        made.double()
        torch.nn.init.normal_(made.softmax_offset)
    return made


def sink_of(layer):
    return torch.zeros(4, dtype=F64) if layer.softmax_offset is None else layer.softmax_offset


def assert_same(mine, exact, layer, inputs):
    torch.testing.assert_close(mine, exact, **CLOSE)
    dy, wanted = torch.randn_like(exact), [*inputs, *layer.parameters()]
    torch.testing.assert_close(gradients(mine, dy, *wanted), gradients(exact, dy, *wanted), **CLOSE)


# ---- sinks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, sizes, window",
    [
        ("no_mask", (3, 7), None),
        ("causal", (5, 5), None),
        ("causal", (5, 5), (1, 0)),
        ("causal_bottom_right", (7, 3), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_masks_and_windows(softmax_type, kind, sizes, window):
    """Queries that see no key, as the first of 7 on 3 keys, look at the sink alone: output and gradients are 0."""
    layer = core(softmax_type, attn_mask_type=kind, window_size=window)
    q, k, v = sequences(2, *sizes)
    allowed = may_look(
        *sizes, causal="causal" in kind, bottom_right="right" in kind or kind == "no_mask", window=window or (-1, -1)
    )
    exact = batched(q, k, v, [allowed] * 2, sink=sink_of(layer))
    assert_same(layer(q, k, v), exact, layer, (q, k, v))
    assert not torch.allclose(exact, batched(q, k, v, [allowed] * 2), atol=1e-3)


@pytest.mark.parametrize("fmt", ["sbhd", "thd"])
def test_packed_and_padded_sequences(fmt):
    """Sequences of 3 and 5 tokens; the offset gets nothing from padding."""
    layer = core(fmt=fmt, attn_mask_type="padding_causal")
    q, k, v = sequences(2, 5, 5)
    lengths, cu = [3, 5], torch.tensor([0, 3, 8])
    allowed = [torch.zeros(5, 5, dtype=torch.bool) for _ in lengths]
    for one, n in zip(allowed, lengths, strict=True):
        one[:n, :n] = may_look(n, n, causal=True)
    exact = batched(q, k, v, allowed, sink=sink_of(layer))
    options = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    if fmt == "sbhd":
        assert_same(layer(*(x.transpose(0, 1) for x in (q, k, v)), **options).transpose(0, 1), exact, layer, (q, k, v))
    else:
        packed = (torch.cat([x[0, :3], x[1]]) for x in (q, k, v))
        assert_same(layer(*packed, **options), torch.cat([exact[0, :3], exact[1]]), layer, (q, k, v))


def test_off_by_one_is_a_learnable_offset_of_zero_that_is_no_parameter():
    one, two = core("off-by-one"), core()
    torch.nn.init.zeros_(two.softmax_offset)
    q, k, v = sequences(1, 5, 5)
    assert torch.equal(one(q, k, v), two(q, k, v))
    assert not list(one.parameters()) and "softmax_offset" not in one.state_dict()


@torch.no_grad()
def test_generating_gives_what_one_pass_gives():
    layer = core()
    q, k, v = sequences(1, 6, 6)
    params, parts = cg.InferenceParams(1, 6, num_heads_kv=2, head_dim_k=8, dtype=F64), []
    for i in range(6):
        params.pre_step({0: 1})
        parts.append(layer(*(x[:, i : i + 1] for x in (q, k, v)), inference_params=params))
    torch.testing.assert_close(torch.cat(parts, 1), layer(q, k, v), **CLOSE)


def test_ranks_that_share_heads_have_their_part_of_the_offset():
    whole, q, k, v = core(), *sequences(1, 5, 5)
    outputs = []
    for rank in range(2):
        part = core(tp_size=2)
        assert part.softmax_offset.shape == (2,)
        assert (part.softmax_offset.tensor_model_parallel, part.softmax_offset.partition_dim) == (True, 0)
        with torch.no_grad():
            part.softmax_offset.copy_(whole.softmax_offset[rank * 2 : rank * 2 + 2])
        outputs.append(part(q[:, :, rank * 2 : rank * 2 + 2], k[:, :, rank : rank + 1], v[:, :, rank : rank + 1]))
    torch.testing.assert_close(torch.cat(outputs, -1), whole(q, k, v), **CLOSE)


def test_state_dicts_and_the_meta_device():
    layer = core()
    assert "softmax_offset" in layer.state_dict()
    other = core()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.softmax_offset, layer.softmax_offset)
    assert torch.equal(copy.deepcopy(layer).softmax_offset, layer.softmax_offset)
    mha = cg.MultiheadAttention(16, 4, softmax_type="learnable", device="meta")
    assert mha.core_attention.softmax_offset.is_meta
    mha.core_attention.reset_parameters()
    assert mha.core_attention.softmax_offset.device.type == "cpu" and not mha.core_attention.softmax_offset.any()
    layer.reset_parameters(defer_init=True)
    assert layer.softmax_offset.any()
    layer.reset_parameters()
    assert not layer.softmax_offset.any()


@pytest.mark.parametrize("recipe", [None, "all: hp, attention: mxfp8"])
def test_recomputation_is_bitwise_the_same(recipe):
    layer = core(attention_dropout=0.5).float()
    q, k, v = sequences(1, 6, 6, dtype=torch.float32)
    dy, results, rng = torch.randn(1, 6, 32), [], torch.get_rng_state()
    for recompute in (False, True):
        torch.set_rng_state(rng)
        with cg.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(q, k, v, checkpoint_core_attention=recompute)
        results.append((y, *gradients(y, dy, q, k, v, layer.softmax_offset)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_multihead_attention(softmax_type):
    options = {"attention_dropout": 0.0, "params_dtype": F64, "qkv_format": "bshd", "num_gqa_groups": 2}
    mha = cg.MultiheadAttention(16, 4, softmax_type=softmax_type, **options).double()
    for parameter in mha.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 16, dtype=F64).requires_grad_()
    exact, _ = multihead(mha, x, [may_look(5, 5, causal=True)] * 2, sink=sink_of(mha.core_attention))
    assert_same_module(mha(x), exact + mha.proj.bias, mha, x)


def test_offset_stays_fp32_beside_inputs_of_low_precision():
    """bf16 has 8 bits: the output is rounded once, from fp32."""
    layer = core().float()
    q, k, v = (x.detach().bfloat16() for x in sequences(1, 5, 5, dtype=torch.float32))
    y = layer(q, k, v)
    exact = batched(*(x.double() for x in (q, k, v)), [may_look(5, 5, causal=True)], sink=sink_of(layer).double())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("flag", ["fp8_dpa", "fp8_mha"])
@pytest.mark.parametrize("make", [recipes.MXFP8BlockScaling, recipes.DelayedScaling], ids=["mxfp8", "fp8_delayed"])
def test_formats_of_a_recipe(make, flag):
    """FP8 rounds to 3 bits; the sink itself is not rounded."""
    layer = core().float()
    q, k, v = sequences(2, 6, 6, dtype=torch.float32)
    dy, wanted = torch.randn(2, 6, 32), (q, k, v, layer.softmax_offset)

    def step(recipe):
        with cg.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(q, k, v)
        return y.detach(), *gradients(y, dy, *wanted)

    exact, recipe = step(None), make(**{flag: True})
    for _ in range(3):  # histories fill
        rounded = step(recipe)
    for a, b in zip(rounded, exact, strict=True):
        assert 0 < (a - b).norm() / b.norm() < 0.15
    with cg.autocast(recipe=recipe):
        frozen = layer(*(x.detach() for x in (q, k, v)))
    if flag == "fp8_dpa" and make is recipes.MXFP8BlockScaling:  # without histories: the same bits
        assert torch.equal(gradients(frozen, dy, layer.softmax_offset)[0], rounded[-1])


def test_compiled():
    layer = core().float()
    q, k, v = (x.detach() for x in sequences(1, 5, 5, dtype=torch.float32))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))


# ---- largest scores -----------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_largest_scores_of_heads(softmax_type):
    """Only pairs that a query may see count, and the sink does not."""
    layer = core(softmax_type, return_max_logit=True)
    q, k, v = sequences(2, 5, 5)
    with torch.no_grad():
        q[:, 0] = k[:, 4].repeat_interleave(2, 1) * 9  # the largest scores, of pairs that may not be seen
    y, largest = layer(q, k, v)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) * 8**-0.5
    seen = scores.masked_fill(~may_look(5, 5, causal=True), -torch.inf)
    torch.testing.assert_close(largest, seen.amax((0, 2, 3)).detach(), **CLOSE)
    assert not torch.allclose(largest, scores.amax((0, 2, 3)))
    assert not largest.requires_grad
    sink = None if softmax_type == "vanilla" else sink_of(layer)
    assert_same(y, batched(q, k, v, [may_look(5, 5, causal=True)] * 2, sink=sink), layer, (q, k, v))


def test_largest_scores_of_quantized_attention():
    """They are those that the softmax sees: of the rounded queries and keys."""
    layer = cg.DotProductAttention(2, 32, qkv_format="bshd", attn_mask_type="no_mask", return_max_logit=True)
    q, k, v = sequences(1, 4, 4, heads=2, groups=2, d=32, dtype=torch.float32)
    with cg.autocast(recipe=recipes.MXFP8BlockScaling(fp8_dpa=True)):
        y, largest = layer(q, k, v, checkpoint_core_attention=True)
    y.sum().backward()
    rounded = (cg.quantize(x.detach().reshape(8, 32), "mxfp8", columnwise=False).dequantize() for x in (q, k))
    a, b = (x.view(1, 4, 2, 32) for x in rounded)
    expected = torch.einsum("bqhd,bkhd->bhqk", a, b).amax((0, 2, 3)) * 32**-0.5
    torch.testing.assert_close(largest, expected, rtol=1e-6, atol=0)
    assert q.grad is not None and not largest.requires_grad
