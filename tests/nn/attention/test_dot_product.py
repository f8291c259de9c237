"""DotProductAttention in high precision: masks, windows, layouts and GQA against attention written out in float64.

Both sides are float64, so they differ by the order of sums only: 1e-10 leaves ample room.
"""

import pytest
import torch

import crossgrain as cg
from crossgrain.nn.attention.masks import check_set_window_size

from ...common.attention_reference import batched, gradients, may_look, sequences

CLOSE = {"rtol": 0, "atol": 1e-10}


def core(fmt="bshd", **options):
    return cg.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format=fmt, **options)


def assert_same(mine, exact, inputs):
    torch.testing.assert_close(mine, exact, **CLOSE)
    dy = torch.randn_like(exact)
    torch.testing.assert_close(gradients(mine, dy, *inputs), gradients(exact, dy, *inputs), **CLOSE)


# ---- masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["sbhd", "bshd"])
@pytest.mark.parametrize("sizes", [(5, 5), (3, 7), (7, 3)], ids=str)
@pytest.mark.parametrize("window", [None, (2, 0), (0, 0), (-1, 0)], ids=str)
@pytest.mark.parametrize("kind", ["no_mask", "causal", "causal_bottom_right"])
def test_masks_and_windows(kind, window, sizes, fmt):
    """Of queries that see no key (more queries than keys, bottom right), output and gradients are 0."""
    q, k, v = sequences(2, *sizes)
    order = (lambda x: x.transpose(0, 1)) if fmt == "sbhd" else (lambda x: x)
    mine = order(core(fmt, attn_mask_type=kind, window_size=window)(*(order(x) for x in (q, k, v))))
    causal, bottom_right = "causal" in kind, kind != "causal"
    allowed = may_look(*sizes, causal=causal, bottom_right=bottom_right, window=window or (-1, -1))
    assert_same(mine, batched(q, k, v, [allowed] * 2), (q, k, v))


@pytest.mark.parametrize("window", [(1, 2), (-1, 1), (3, -1)], ids=str)
@pytest.mark.parametrize("bottom_right", [None, True, False])
def test_windows_to_both_sides(window, bottom_right):
    q, k, v = sequences(1, 4, 6)
    layer = core(attn_mask_type="no_mask", window_size=window, bottom_right_diagonal=bottom_right)
    allowed = may_look(4, 6, bottom_right=bottom_right is not False, window=window)
    assert_same(layer(q, k, v), batched(q, k, v, [allowed]), (q, k, v))


def test_arbitrary():
    q, k, v = sequences(2, 5, 6)
    excluded = torch.rand(2, 1, 5, 6) < 0.5
    excluded[1, 0, 2] = True  # one query sees nothing
    mine = core(attn_mask_type="arbitrary")(q, k, v, attention_mask=excluded)
    assert_same(mine, batched(q, k, v, [~excluded[0, 0], ~excluded[1, 0]]), (q, k, v))


LENGTHS_Q, LENGTHS_KV = [3, 5], [6, 2]


def allowed_with_padding(kind, lengths_q=LENGTHS_Q, lengths_kv=LENGTHS_KV, queries=5, keys=6, window=(-1, -1)):
    allowed = []
    for n, m in zip(lengths_q, lengths_kv, strict=True):
        one = torch.zeros(queries, keys, dtype=torch.bool)
        options = {"causal": "causal" in kind, "bottom_right": kind != "padding_causal", "window": window}
        one[:n, :m] = may_look(n, m, **options)
        allowed.append(one)
    return allowed


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def padding_mask(lengths, size):
    return (torch.arange(size) >= torch.tensor(lengths)[:, None])[:, None, None]


PADDING = ["padding", "padding_causal", "padding_causal_bottom_right"]


@pytest.mark.parametrize("window", [(-1, -1), (1, 0)], ids=str)
@pytest.mark.parametrize("by", ["mask", "cu_seqlens"])
@pytest.mark.parametrize("kind", PADDING)
def test_padding(kind, by, window):
    q, k, v = sequences(2, 5, 6)
    layer = core(attn_mask_type=kind, attention_type="cross", window_size=window)
    if by == "mask":
        mine = layer(q, k, v, attention_mask=(padding_mask(LENGTHS_Q, 5), padding_mask(LENGTHS_KV, 6)))
    else:
        mine = layer(q, k, v, cu_seqlens_q=offsets(LENGTHS_Q), cu_seqlens_kv=offsets(LENGTHS_KV))
    assert_same(mine, batched(q, k, v, allowed_with_padding(kind, window=window)), (q, k, v))


@pytest.mark.parametrize("gaps", [False, True], ids=["", "gaps"])
@pytest.mark.parametrize("kind", PADDING)
def test_packed_tokens(kind, gaps):
    """thd gives each token what it gets in a padded batch, and 0 in the gaps between sequences."""
    q, k, v = sequences(2, 5, 6)
    starts_q, starts_kv = ([0, 5, 12], [0, 7, 10]) if gaps else (offsets(LENGTHS_Q), offsets(LENGTHS_KV))

    def packed(x, lengths, starts):
        out = torch.randn(int(starts[-1]), *x.shape[2:], dtype=x.dtype)  # gaps are full of garbage
        for i, n in enumerate(lengths):
            out[int(starts[i]) : int(starts[i]) + n] = x[i, :n]
        return out

    options = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_kv": offsets(LENGTHS_KV)}
    if gaps:
        options |= {"cu_seqlens_q_padded": torch.tensor(starts_q), "cu_seqlens_kv_padded": torch.tensor(starts_kv)}
    layer = core("thd", attn_mask_type=kind)
    mine = layer(
        packed(q, LENGTHS_Q, starts_q), packed(k, LENGTHS_KV, starts_kv), packed(v, LENGTHS_KV, starts_kv), **options
    )
    exact = batched(q, k, v, allowed_with_padding(kind))
    expected = torch.zeros(int(starts_q[-1]), 32, dtype=torch.float64)
    for i, n in enumerate(LENGTHS_Q):
        expected[int(starts_q[i]) : int(starts_q[i]) + n] = exact[i, :n]
    assert_same(mine, expected, (q, k, v))


def test_types_and_windows_given_in_the_call_win():
    q, k, v = sequences(1, 4, 4)
    layer = core(attn_mask_type="no_mask")
    assert torch.equal(layer(q, k, v, attn_mask_type="causal"), core(attn_mask_type="causal")(q, k, v))
    windowed = core(attn_mask_type="causal", window_size=(1, 0))(q, k, v)
    assert torch.equal(layer(q, k, v, attn_mask_type="causal", window_size=(1, 0)), windowed)
    flipped = layer(*(x.transpose(0, 1) for x in (q, k, v)), qkv_format="sbhd")
    assert torch.equal(flipped.transpose(0, 1), layer(q, k, v))


# ---- sizes, scale, dropout ----------------------------------------------------------------------------


def test_scale_and_channels_of_values():
    layer = cg.DotProductAttention(2, (8, 4), qkv_format="bshd", attn_mask_type="no_mask", softmax_scale=0.1)
    q, k, v = (torch.randn(1, 3, 2, d, dtype=torch.float64) for d in (8, 8, 4))
    torch.testing.assert_close(layer(q, k, v), batched(q, k, v, [may_look(3, 3)], scale=0.1), **CLOSE)


def test_dropout_only_in_training_and_from_the_tracker():
    tracker = cg.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    layer = core(attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    q, k, v = sequences(1, 6, 6)
    before = torch.get_rng_state()
    states = tracker.get_states()
    one, two = layer(q, k, v), layer(q, k, v)
    assert not torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), before)
    tracker.set_states(states)
    assert torch.equal(layer(q, k, v), one)
    plain = core()
    assert torch.equal(layer.eval()(q, k, v), plain(q, k, v))


@pytest.mark.parametrize("tracked", [False, True], ids=["", "tracker"])
def test_recomputation_is_bitwise_the_same(tracked):
    tracker = cg.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    layer = core(attention_dropout=0.5, get_rng_state_tracker=(lambda: tracker) if tracked else None)
    q, k, v = sequences(1, 6, 6)
    dy = torch.randn(1, 6, 32, dtype=torch.float64)
    results, states, rng = [], tracker.get_states(), torch.get_rng_state()
    for recompute in (False, True):
        tracker.set_states(states)
        torch.set_rng_state(rng)
        y = layer(q, k, v, checkpoint_core_attention=recompute)
        after = tracker.get_states()
        results.append((y, *gradients(y, dy, q, k, v)))
        assert all(torch.equal(state, after[name]) for name, state in tracker.get_states().items())
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"cp_group": [object(), object()]}, NotImplementedError, r"a2a\+p2p"),
        (
            {"cp_group": object(), "cp_comm_type": "ring"},
            ValueError,
            "cp_comm_type must be one of p2p, all_gather, a2a",
        ),
        ({"softmax_type": "learned"}, ValueError, "softmax_type must be one of"),
        ({"tp_size": 3}, ValueError, "tp_size"),
        ({"attn_mask_type": "casual"}, ValueError, "attn_mask_type must be one of"),
        ({"qkv_format": "bhsd"}, ValueError, "qkv_format must be one of"),
        ({"num_gqa_groups": 3}, ValueError, "evenly"),
        ({"window_size": (2, 2)}, ValueError, "to the right"),
        ({"window_size": (-2, 0)}, ValueError, "window_size must be"),
    ],
)
def test_refused_options(options, error, words):
    with pytest.raises(error, match=words):
        cg.DotProductAttention(**{"num_attention_heads": 4, "kv_channels": 8, "attn_mask_type": "causal", **options})


def test_refused_calls():
    q, k, v = sequences(2, 5, 5)
    layer = core()
    for option in ({"alibi_slopes": torch.ones(4)}, {"core_attention_bias_type": "alibi"}, {"fp8_output": True}):
        with pytest.raises(NotImplementedError):
            layer(q, k, v, **option)
    with pytest.raises(ValueError, match="keys must be bshd with 2 heads of 8"):
        layer(q, q, v)
    with pytest.raises(ValueError, match="needs an attention_mask, or cu_seqlens"):
        layer(q, k, v, attn_mask_type="padding")
    with pytest.raises(ValueError, match=r"\[batch, 1, 1, sequence\]"):
        layer(q, k, v, attn_mask_type="padding", attention_mask=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="needs a padding mask"):
        layer(q[0], k[0], v[0], qkv_format="thd")
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(q[0], k[0], v[0], qkv_format="thd", attn_mask_type="padding")
    cu = torch.tensor([0, 9])
    with pytest.raises(ValueError, match="goes beyond the last"):
        layer(q[0], k[0], v[0], qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=cu, cu_seqlens_kv=cu)


def test_lengths_that_do_not_fit_the_batch_are_refused():
    q, k, v = sequences(2, 5, 5)
    for lengths in ([5], [5, 6]):
        cu = offsets(lengths)
        with pytest.raises(ValueError, match="do not fit a batch of 2 sequences of at most 5 tokens"):
            core()(q, k, v, attn_mask_type="padding", cu_seqlens_q=cu, cu_seqlens_kv=cu)


def test_what_is_in_the_padding_does_not_matter():
    """Not even NaN."""
    q, k, v = (x.detach() for x in sequences(2, 5, 6))
    options = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_kv": offsets(LENGTHS_KV), "attn_mask_type": "padding"}
    clean = core()(q, k, v, **options)
    q[0, 3:], k[1, 2:], v[1, 2:] = torch.nan, torch.nan, torch.inf
    assert torch.equal(core()(q, k, v, **options), clean)


def test_window_sizes():
    assert check_set_window_size("causal") == (-1, 0)
    assert check_set_window_size("causal", (3, -1)) == (3, 0)
    assert check_set_window_size("no_mask") == (-1, -1)
    assert check_set_window_size("padding", (3, 2)) == (3, 2)


def test_padding_causal_has_two_spellings():
    q, k, v = sequences(1, 4, 4)
    options = {"cu_seqlens_q": offsets([3]), "cu_seqlens_kv": offsets([3])}
    a, b = (core(attn_mask_type=kind)(q, k, v, **options) for kind in ("padding,causal", "padding_causal"))
    assert torch.equal(a, b)
