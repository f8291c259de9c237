"""Which tokens each rank has, and the batches that are cut for it."""

import pytest
import torch

from crossgrain.nn.attention import (
    chunks,
    generate_positional_ids_for_cp,
    get_batch_on_this_cp_rank,
    pad_thd_sequences_for_cp,
)
from crossgrain.nn.attention.chunks import tokens_of_rank, whole_positions


def by_loops(sizes, rank, ranks):
    """Chunk ``rank`` of 2 · ranks from the start of each sequence, then the same from its end."""
    tokens, start = [], 0
    for size in sizes:
        length = size // (2 * ranks)
        for chunk in (rank, 2 * ranks - 1 - rank):
            tokens += range(start + chunk * length, start + (chunk + 1) * length)
        start += size
    return tokens


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[12], [12, 24], [24, 0, 12]], ids=str)
def test_tokens(sizes, ranks):
    starts = torch.tensor([0, *sizes]).cumsum(0)
    found = [tokens_of_rank(starts, rank, ranks).tolist() for rank in range(ranks)]
    assert found == [by_loops(sizes, rank, ranks) for rank in range(ranks)]
    assert sorted(token for tokens in found for token in tokens) == list(range(sum(sizes)))
    if len(sizes) == 1:
        places = torch.arange(sizes[0] // ranks)
        assert [whole_positions(places, len(places), rank, ranks).tolist() for rank in range(ranks)] == found


@pytest.fixture
def two_ranks(monkeypatch):
    """This process is rank 1 of 2."""
    monkeypatch.setattr(chunks, "group_size", lambda group: 2)
    monkeypatch.setattr(chunks, "group_rank", lambda group: 1)


@pytest.mark.parametrize("fmt, dim", [("bshd", 1), ("sbhd", 0)])
def test_a_batch(two_ranks, fmt, dim):
    tokens, positions = torch.randint(99, (8, 8)), torch.arange(8).expand(8, 8)
    mine, labels, places = get_batch_on_this_cp_rank(None, tokens, None, positions, qvk_format=fmt)
    assert labels is None
    assert torch.equal(mine, tokens.narrow(dim, 2, 4)) and torch.equal(places, positions.narrow(dim, 2, 4))
    other, _, _ = get_batch_on_this_cp_rank(None, tokens, None, None, qvk_format=fmt, cp_rank=0)
    assert torch.equal(other, torch.cat((tokens.narrow(dim, 0, 2), tokens.narrow(dim, 6, 2)), dim))


def test_packed_sequences(two_ranks):
    """Sequences of 3 and 5 tokens are padded to 4 and 8; each rank has two chunks of both."""
    tokens, labels, cu = torch.arange(10, 18), torch.arange(20, 28), torch.tensor([0, 3, 8], dtype=torch.int32)
    padded, padded_labels, starts = pad_thd_sequences_for_cp(tokens[None], labels, cu, 4, padding_token_id=9)
    assert starts.tolist() == [0, 4, 12] and starts.dtype == torch.int32
    assert padded.tolist() == [10, 11, 12, 9, 13, 14, 15, 16, 17, 9, 9, 9]
    assert padded_labels.tolist() == [20, 21, 22, -100, 23, 24, 25, 26, 27, -100, -100, -100]
    positions = generate_positional_ids_for_cp(cu, 4)
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    mine = get_batch_on_this_cp_rank(starts, padded[None], padded_labels, positions)
    assert [x.tolist() for x in mine] == [[[11, 12, 15, 16, 17, 9]], [21, 22, 25, 26, 27, -100], [1, 2, 2, 3, 4, 5]]


def test_errors(two_ranks):
    x = torch.zeros(1, 6)
    with pytest.raises(ValueError, match=r"sequences of \[6\] tokens cannot be cut into 2 equal chunks for each of 2"):
        get_batch_on_this_cp_rank(None, x, None, None, qvk_format="bshd")
    with pytest.raises(ValueError, match="qvk_format must be one of"):
        get_batch_on_this_cp_rank(None, x, None, None, qvk_format="bhsd")
    with pytest.raises(ValueError, match="needs cu_seqlens_padded"):
        get_batch_on_this_cp_rank(None, x, None, None)
    with pytest.raises(ValueError, match=r"shape \[1, 6\], but cu_seqlens_padded ends at 8 tokens"):
        get_batch_on_this_cp_rank(torch.tensor([0, 8]), x, None, None)
