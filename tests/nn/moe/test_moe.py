"""Routing and permutation of experts, against loops over tokens."""

import pytest
import torch

from crossgrain.nn.moe import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)

TOKENS, EXPERTS, WIDTH = 7, 4, 3


def routed():
    mask = torch.rand(TOKENS, EXPERTS) < 0.5
    mask[2] = False  # a token without expert
    mask[:, 1] = False  # an expert without token
    mask[0, 0] = mask[0, 3] = True
    return mask, torch.rand(TOKENS, EXPERTS) * mask


def by_expert(mask):
    """(token, expert) of each row."""
    return [(t, e) for e in range(EXPERTS) for t in range(TOKENS) if mask[t, e]]


@pytest.mark.parametrize("kind", [torch.bool, torch.int32])
def test_rows_are_sorted_by_expert_and_come_back(kind):
    mask, probs = routed()
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    rows, places = moe_permute(x, mask.to(kind))
    assert torch.equal(rows, torch.stack([x[t] for t, _ in by_expert(mask)]))
    back = moe_unpermute(rows, places, merging_probs=probs)
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))
    assert torch.equal(back[2], torch.zeros(WIDTH))
    torch.testing.assert_close(moe_unpermute(rows, places), x * mask.sum(1, keepdim=True))
    assert torch.equal(moe_unpermute(rows, places, probs=probs, restore_shape=x.shape), back)


@pytest.mark.parametrize("capacity", [None, 8])
def test_no_tokens(capacity):
    """Rows that are asked for without tokens are zeros, as on a rank to which no token is sent."""
    mask, x = torch.zeros(0, EXPERTS, dtype=torch.bool), torch.randn(0, WIDTH)
    options = {} if capacity is None else {"num_out_tokens": capacity}
    rows, places = moe_permute(x, mask, **options)
    assert torch.equal(rows, torch.zeros(capacity or 0, WIDTH))
    assert moe_unpermute(rows, places).shape == (0, WIDTH)


def test_gradients_reach_tokens_and_probabilities():
    mask, probs = routed()
    x, p = torch.randn(TOKENS, WIDTH, dtype=torch.float64), probs.to(torch.float64)

    def there_and_back(x, p):
        rows, permuted, places = moe_permute_with_probs(x, p, mask)
        return moe_unpermute(rows * permuted.unsqueeze(-1), places, merging_probs=p)

    leaves = [x.requires_grad_(), p.requires_grad_()]
    dy = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    got = torch.autograd.grad(there_and_back(*leaves), leaves, dy)
    expected = torch.autograd.grad(x * (p**2 * mask).sum(1, keepdim=True), leaves, dy)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_sums_over_experts_are_rounded_once():
    rows = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)
    places = torch.tensor([[0, 1, 2]])
    total = moe_unpermute(rows, places)
    assert total.dtype == torch.bfloat16 and total.item() == 1 + 2**-7  # step by step it would stay 1


def test_maps_of_indices():
    chosen = torch.tensor([[2, 0], [1, 2], [0, 2]])
    x, probs = torch.randn(3, WIDTH), torch.rand(3, 2)
    rows, places = moe_permute(x, chosen, map_type="index")
    assert torch.equal(rows, x[[0, 2, 1, 0, 1, 2]])
    back = moe_unpermute(rows, places, probs, map_type="index")
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))
    dropped, places = moe_permute(x, chosen, num_out_tokens=4, map_type="index")
    assert torch.equal(dropped, rows[:4])
    torch.testing.assert_close(moe_unpermute(dropped, places), x * torch.tensor([[2.0], [1.0], [1.0]]))
    with pytest.raises(ValueError, match="map_type must be 'mask' or 'index'"):
        moe_permute(x, chosen, map_type="other")


def test_probabilities_travel_with_rows():
    mask, probs = routed()
    x = torch.randn(TOKENS, WIDTH)
    rows, permuted, places = moe_permute_with_probs(x, probs, mask, num_out_tokens=int(mask.sum()) + 2)
    expected = torch.stack([probs[t, e] for t, e in by_expert(mask)])
    assert torch.equal(permuted[:-2], expected) and not permuted[-2:].any() and not rows[-2:].any()
    assert torch.equal(rows[:-2], moe_permute(x, mask)[0]) and torch.equal(places, moe_permute(x, mask)[1])


def test_experts_are_padded():
    mask, probs = routed()
    x = torch.randn(TOKENS, WIDTH)
    counts = mask.sum(0)
    rows, permuted, places, moved, padded = moe_permute_and_pad_with_probs(x, probs, mask, counts, 4)
    assert padded.tolist() == [-(-count // 4) * 4 for count in counts.tolist()] and len(rows) == padded.sum()
    plain = moe_permute(x, mask)[0].split(counts.tolist())
    for group, expected, count in zip(rows.split(padded.tolist()), plain, counts.tolist(), strict=True):
        assert torch.equal(group[:count], expected) and not group[count:].any()
    assert moved.tolist() == [int((padded - counts)[:e].sum()) for e in range(EXPERTS)]
    back = moe_unpermute(rows, places, merging_probs=probs, pad_offsets=moved)
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))
    assert permuted.shape == (len(rows),)
    assert moe_permute_and_pad_with_probs(x, probs, mask, counts, 1)[3] is None
    with pytest.raises(ValueError, match="tokens_per_expert is"):
        moe_permute_and_pad_with_probs(x, probs, mask, counts + 1, 4)


def test_chunks_are_sorted():
    x, probs = torch.randn(6, WIDTH), torch.rand(6)
    sizes, order = torch.tensor([1, 0, 3, 2]), torch.tensor([3, 1, 0, 2])
    expected = [4, 5, 0, 1, 2, 3]
    assert torch.equal(moe_sort_chunks_by_index(x, sizes, order), x[expected])
    rows, permuted = moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert torch.equal(rows, x[expected]) and torch.equal(permuted, probs[expected])
    with pytest.raises(ValueError, match="do not add up to the 6 rows"):
        moe_sort_chunks_by_index(x, sizes + 1, order)


def test_what_does_not_fit_is_refused():
    mask, probs = routed()
    x = torch.randn(TOKENS, WIDTH)
    rows, places = moe_permute(x, mask)
    with pytest.raises(ValueError, match=f"has {len(rows)} rows, but num_out_tokens is 1"):
        moe_permute(x, mask, num_out_tokens=1)
    with pytest.raises(ValueError, match="for 7 tokens, but the input has 6"):
        moe_permute(x[:-1], mask)
    with pytest.raises(ValueError, match=r"merging_probs \[7, 3\]"):
        moe_unpermute(rows, places, merging_probs=probs[:, :3])
    with pytest.raises(ValueError, match="give one of them"):
        moe_unpermute(rows, places, merging_probs=probs, probs=probs)
    with pytest.raises(ValueError, match="restore_shape"):
        moe_unpermute(rows, places, restore_shape=(6, WIDTH))


# ---- the router -----------------------------------------------------------------------------------------------


def test_maps_that_lose_tokens_are_refused():
    tokens = torch.randn(3, 8)
    with pytest.raises(ValueError, match="negative numbers of experts"):
        moe_permute(tokens, torch.tensor([[0, 1], [-1, 2], [1, 2]]), map_type="index")
    for index in ([1], [1, 1], [0, 2], [0, 1, 1]):
        with pytest.raises(ValueError, match="each of 2 chunks once"):
            moe_sort_chunks_by_index(tokens, torch.tensor([2, 1]), torch.tensor(index))


def route(logits, topk=2, pre=False, groups=None, group_topk=None, scale=None, score="softmax", bias=None):
    return fused_topk_with_score_function(logits, topk, pre, groups, group_topk, scale, score, bias)


@pytest.mark.parametrize("pre", [False, True])
def test_softmax_before_or_after_the_choice(pre):
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    probs, chosen = route(logits, pre=pre, scale=2.5)
    for t in range(TOKENS):
        best = logits[t].topk(2).indices
        kept = torch.softmax(logits[t], -1)[best] if pre else torch.softmax(logits[t][best], -1)
        torch.testing.assert_close(probs[t][best], 2.5 * kept)
        assert sorted(chosen[t].nonzero().flatten().tolist()) == sorted(best.tolist())
    assert torch.equal(probs != 0, chosen)
    (gradient,) = torch.autograd.grad(probs.square().sum(), logits)
    assert (gradient != 0).all() if pre else not gradient[~chosen].any()


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_a_bias_is_for_the_choice_alone(score):
    logits, bias = torch.randn(TOKENS, EXPERTS), torch.tensor([10.0, 0.0, 0.0, 0.0])
    probs, chosen = route(logits, score=score, bias=bias)
    scores = torch.sigmoid(logits) if score == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    assert chosen[:, 0].all() and torch.equal(chosen.sum(1), torch.full((TOKENS,), 2))
    kept = scores * chosen
    torch.testing.assert_close(probs, kept / kept.sum(1, keepdim=True))
    alone, chosen = route(logits, topk=1, score=score)
    assert torch.equal(alone, scores * chosen)  # nothing to divide by


def test_groups_of_experts_are_chosen_first():
    logits = torch.tensor([[5.0, 0.0, 3.0, 2.5, 4.0, -9.0]])
    _, chosen = route(logits, topk=2, groups=3, group_topk=1, score="sigmoid")
    assert chosen.tolist() == [[False, False, True, True, False, False]]  # the best pair of neighbours
    _, chosen = route(logits, topk=2, groups=3, group_topk=2, score="sigmoid")
    assert chosen.tolist() == [[True, False, False, False, True, False]]


@pytest.mark.parametrize(
    "topk, groups, group_topk", [(2, 3, 3), (1, 3, 2), (5, 3, 2), (4, 3, 1), (2, 4, 1), (2, None, 1), (6, 3, 4)]
)
def test_groups_that_cannot_be_ranked_are_refused(topk, groups, group_topk):
    with pytest.raises(ValueError, match="cannot be chosen"):
        route(torch.randn(4, 6), topk=topk, groups=groups, group_topk=group_topk)


def test_low_precision_logits_are_routed_in_float32():
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.bfloat16)
    probs, chosen = route(logits)
    wide, same = route(logits.float())
    assert probs.dtype == torch.bfloat16 and torch.equal(probs, wide.to(torch.bfloat16)) and torch.equal(chosen, same)
    with pytest.raises(ValueError, match="sigmoid and sqrtsoftplus"):
        route(logits, bias=torch.zeros(EXPERTS))
    with pytest.raises(ValueError, match="softmax, sigmoid and sqrtsoftplus, got 'tanh'"):
        route(logits, score="tanh")


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_the_loss_that_balances_experts(score):
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    chosen, scores = fused_compute_score_for_moe_aux_loss(logits, 2, score)
    torch.testing.assert_close(scores.sum(1), torch.ones(TOKENS))
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, logits.topk(2).indices, True))
    loss = fused_moe_aux_loss(scores, chosen.sum(0), TOKENS, EXPERTS, 2, 0.1)
    expected = (
        0.1 * EXPERTS * sum((chosen[:, e].sum() / (TOKENS * 2)) * (scores[:, e].sum() / TOKENS) for e in range(EXPERTS))
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert logits.grad.abs().max() > 0
