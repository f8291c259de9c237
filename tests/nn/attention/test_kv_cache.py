"""The cache of keys and values: generating step by step gives what one pass over the whole sequence gives."""

import pytest
import torch

import crossgrain as cg

F64 = torch.float64
# Attention over a cache sums in another order than attention over the whole sequence: float64 rounding.
CLOSE = {"rtol": 0, "atol": 1e-12}


def cache(**options):
    options = {"num_heads_kv": 2, "head_dim_k": 4, "dtype": F64, **options}
    return cg.InferenceParams(3, 12, **options)


def layers(fmt="bshd", **options):
    """Two layers, in a model each has a number."""
    shared = {"num_gqa_groups": 2, "params_dtype": F64, "attn_input_format": fmt, **options}
    made = [cg.TransformerLayer(16, 24, 4, layer_number=i + 1, **shared).eval() for i in range(2)]
    for layer in made:
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def run(model, x, angles, **options):
    for layer in model:
        x = layer(x, rotary_pos_emb=angles, **options)
    return x


@torch.no_grad()
@pytest.mark.parametrize("window", [None, (3, 0)], ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
@pytest.mark.parametrize("steps", [[1] * 9, [6, 1, 1, 1], [4, 5]], ids=str)
def test_steps_give_the_whole(steps, fmt, window):
    model, angles = layers(fmt, window_size=window), cg.RotaryPositionEmbedding(4)(12)
    x = torch.randn(2, 9, 16, dtype=F64) if fmt == "bshd" else torch.randn(9, 2, 16, dtype=F64)
    along = 1 if fmt == "bshd" else 0
    whole = run(model, x, angles)
    params, parts = cache(), []
    for part in x.split(steps, along):
        params.pre_step({7: part.shape[along], 3: part.shape[along]})
        parts.append(run(model, part, angles, inference_params=params))
    torch.testing.assert_close(torch.cat(parts, along), whole, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_sequences_of_many_lengths_come_and_go(fmt):
    """Prompts of 5 and 2 tokens; then one sequence ends, another begins and takes its place in the batch."""
    model, angles = layers(fmt), cg.RotaryPositionEmbedding(4)(12)
    texts = {name: torch.randn(length, 16, dtype=F64) for name, length in {0: 8, 1: 3, 2: 6}.items()}
    plain = layers("bshd")
    for mine, theirs in zip(plain, model, strict=True):
        mine.load_state_dict(theirs.state_dict())
    whole = {name: run(plain, text[None], angles)[0] for name, text in texts.items()}
    seen = dict.fromkeys(texts, 0)
    params = cache()
    for step in ({0: 5, 1: 2}, {0: 1, 1: 1}, {2: 4, 0: 1}, {0: 1, 2: 2}):
        params.pre_step(step)
        parts = [texts[name][seen[name] : seen[name] + count] for name, count in step.items()]
        if fmt == "thd":
            cu = torch.tensor([0, *step.values()]).cumsum(0)
            options = {"self_attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
            y = run(model, torch.cat(parts), angles, inference_params=params, **options)
            outputs = y.split(list(step.values()))
        else:
            padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=9.0)
            outputs = run(model, padded, angles, inference_params=params)
        for (name, count), output in zip(step.items(), outputs, strict=True):
            torch.testing.assert_close(output[:count], whole[name][seen[name] : seen[name] + count], **CLOSE)
            seen[name] += count
    assert seen == {0: 8, 1: 3, 2: 6}


@torch.no_grad()
def test_generation_in_formats():
    """The formats are those of the recipe: MXFP8 blocks lie along a token, so tokens do not depend on each other."""
    model = [layer.float() for layer in layers(fuse_qkv_params=True)]
    angles, x = cg.RotaryPositionEmbedding(4)(12), torch.randn(1, 6, 16)
    params = cache(dtype=torch.float32)
    with cg.autocast(recipe="mxfp8"):
        whole, parts = run(model, x, angles), []
        for part in x.split(1, 1):
            params.pre_step({0: 1})
            parts.append(run(model, part, angles, inference_params=params))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-2)


@torch.no_grad()
def test_a_cache_in_formats_forgets_what_was_in_its_place():
    """Old keys behind the end of a sequence, and padded queries, have no part in the scale of a tensor."""
    core = cg.DotProductAttention(4, 4, num_gqa_groups=2, qkv_format="bshd")
    q, k, v = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2, 4)
    results = []
    for used in (False, True):
        params = cache(dtype=torch.float32)
        with cg.autocast(recipe="all: hp, attention: fp8"):
            if used:
                params.pre_step({0: 3})
                core(q[:1] * 50, k[:1] * 50, v[:1] * 50, inference_params=params)
            params.pre_step({1: 2, 2: 3})  # sequence 1 takes the place of the longer sequence 0
            q[0, 2] = 50.0 if used else 0.0
            results.append(core(q, k, v, inference_params=params))
    assert torch.equal(results[0], results[1]) and not results[0][0, 2].any()


@torch.no_grad()
def test_cross_attention_is_not_cached_and_its_positions_begin_at_zero():
    options = {"attention_type": "cross", "attn_mask_type": "no_mask", "qkv_format": "bshd", "params_dtype": F64}
    mha, angles = cg.MultiheadAttention(16, 4, **options).eval(), cg.RotaryPositionEmbedding(4)(12)
    x, encoder_output = torch.randn(1, 5, 16, dtype=F64), torch.randn(1, 7, 16, dtype=F64)
    whole, params, parts = mha(x, encoder_output=encoder_output, rotary_pos_emb=angles), cache(), []
    for part in x.split(1, 1):
        params.pre_step({0: 1})
        parts.append(mha(part, encoder_output=encoder_output, rotary_pos_emb=angles, inference_params=params))
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


@torch.no_grad()
def test_reset_forgets():
    model, angles = layers(), cg.RotaryPositionEmbedding(4)(12)
    x, params = torch.randn(1, 4, 16, dtype=F64), cache()
    results = []
    for _ in range(2):
        params.reset()
        params.pre_step({0: 4})
        results.append(run(model, x, angles, inference_params=params))
    assert torch.equal(*results)


def test_errors():
    params = cache()
    core = cg.DotProductAttention(4, 4, num_gqa_groups=2, qkv_format="bshd")
    q, k = torch.randn(1, 2, 4, 4, dtype=F64), torch.randn(1, 2, 2, 4, dtype=F64)
    with pytest.raises(RuntimeError, match="pre_step"):
        core(q, k, k, inference_params=params)
    params.pre_step({0: 2})
    with pytest.raises(RuntimeError, match="no_grad"):
        core(q, k.requires_grad_(), k, inference_params=params)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="arbitrary"):
        core(q, k, k, torch.zeros(2, 2), attn_mask_type="arbitrary", inference_params=params)
    with torch.no_grad(), pytest.raises(ValueError, match="but the cache is for 2 heads of 4"):
        cg.DotProductAttention(4, 4, qkv_format="bshd")(q, q, q, inference_params=params)
    with torch.no_grad(), pytest.raises(ValueError, match="do not fit this step, in which the sequences get"):
        core(q[:, :1], k[:, :1], k[:, :1], inference_params=params)
    with pytest.raises(ValueError, match="sequence 0 has 2 tokens and cannot get 11 more"):
        params.pre_step({0: 11})
    with pytest.raises(ValueError, match="the step has 4 sequences, but the cache has room for max_batch_size=3"):
        params.pre_step(dict.fromkeys(range(4), 1))
    with pytest.raises(NotImplementedError, match="pages"):
        cache(is_paged=True)
