"""Rotary positions: against complex numbers in float64, in all layouts, with offsets."""

import pytest
import torch

import crossgrain as cg
from crossgrain.nn import apply_rotary_pos_emb


def turned_by_complex_numbers(x, positions, channels, interleaved, base=10000.0):
    """x [sequence, heads, d] in float64: each pair of channels is a complex number."""
    x = x.to(torch.float64)
    turned, rest = x[..., :channels], x[..., channels:]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
    speed = base ** -(torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    angle = positions.to(torch.float64)[:, None, None] * speed
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    z = torch.view_as_real(z)
    z = z.flatten(-2) if interleaved else z.transpose(-1, -2).flatten(-2)
    return torch.cat((z, rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_against_complex_numbers(interleaved, percent):
    """fp32 angles: at position 50 an error of 50 · 2⁻²⁴ in the angle, as much in the result."""
    x = torch.randn(50, 3, 16)
    rope = cg.RotaryPositionEmbedding(16, percent, interleaved=interleaved)
    mine = apply_rotary_pos_emb(x[:, None], rope(50), interleaved=interleaved)[:, 0]
    exact = turned_by_complex_numbers(x, torch.arange(50), int(16 * percent), interleaved)
    torch.testing.assert_close(mine.double(), exact, rtol=0, atol=2e-5)


def test_products_depend_on_distances_only():
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)
    freqs = cg.RotaryPositionEmbedding(32)(64)

    def product(i, j):
        at = [apply_rotary_pos_emb(x, freqs, start_positions=torch.tensor([p])) for x, p in ((q, i), (k, j))]
        return (at[0] * at[1]).sum()

    torch.testing.assert_close(product(3, 7), product(40, 44), rtol=0, atol=1e-4)
    assert (product(3, 7) - product(3, 8)).abs() > 1e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts_agree(interleaved):
    x = torch.randn(7, 2, 3, 8)
    freqs = cg.RotaryPositionEmbedding(8, interleaved=interleaved)(9)
    sbhd = apply_rotary_pos_emb(x, freqs, interleaved=interleaved)
    bshd = apply_rotary_pos_emb(x.transpose(0, 1), freqs, "bshd", interleaved=interleaved)
    assert torch.equal(sbhd, bshd.transpose(0, 1))
    packed = torch.cat((x[:5, 0], x[:, 1]))
    thd = apply_rotary_pos_emb(packed, freqs, "thd", cu_seqlens=torch.tensor([0, 5, 12]), interleaved=interleaved)
    assert torch.equal(thd, torch.cat((sbhd[:5, 0], sbhd[:, 1])))


@pytest.mark.parametrize("fmt", ["sbhd", "bshd", "thd"])
def test_start_positions_are_a_slice_of_the_whole(fmt):
    x = torch.randn(8, 2, 3, 8)
    freqs = cg.RotaryPositionEmbedding(8)(8)
    whole = apply_rotary_pos_emb(x, freqs)
    part = torch.stack((x[4:6, 0], x[1:3, 1]), 1)
    expected = torch.stack((whole[4:6, 0], whole[1:3, 1]), 1)
    starts = torch.tensor([4, 1])
    if fmt == "sbhd":
        mine = apply_rotary_pos_emb(part, freqs, start_positions=starts)
    elif fmt == "bshd":
        mine = apply_rotary_pos_emb(part.transpose(0, 1), freqs, "bshd", start_positions=starts).transpose(0, 1)
    else:
        flat = part.transpose(0, 1).flatten(0, 1)
        mine = apply_rotary_pos_emb(flat, freqs, "thd", start_positions=starts, cu_seqlens=torch.tensor([0, 2, 4]))
        mine = mine.view(2, 2, 3, 8).transpose(0, 1)
    assert torch.equal(mine, expected)


def test_offset_and_interpolation():
    rope = cg.RotaryPositionEmbedding(8)
    torch.testing.assert_close(rope(4, offset=3), rope(7)[3:])
    half = cg.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2.0)
    torch.testing.assert_close(half(8)[::2], rope(4))
    long = cg.RotaryPositionEmbedding(8, seq_len_interpolation_factor=2.0, pretrained_max_position_embeddings=4)
    torch.testing.assert_close(long(8), half(8))
    torch.testing.assert_close(long(16)[::4], rope(4))  # 16 positions in the place of 4


def test_gradient_is_the_turn_back():
    x = torch.randn(5, 1, 2, 8, dtype=torch.float32, requires_grad=True)
    freqs = cg.RotaryPositionEmbedding(8)(5)
    dy = torch.randn(5, 1, 2, 8)
    apply_rotary_pos_emb(x, freqs).backward(dy)
    torch.testing.assert_close(x.grad, apply_rotary_pos_emb(dy, -freqs))


def test_dtypes_and_errors():
    freqs = cg.RotaryPositionEmbedding(8).to(torch.bfloat16)(300)
    assert freqs.dtype == torch.float32
    assert apply_rotary_pos_emb(torch.randn(2, 1, 1, 8, dtype=torch.bfloat16), freqs).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="position 4 has no angle"):
        apply_rotary_pos_emb(torch.randn(5, 1, 1, 8), freqs[:4])
    with pytest.raises(ValueError, match="must be even"):
        cg.RotaryPositionEmbedding(7)
    with pytest.raises(ValueError, match="cu_seqlens"):
        apply_rotary_pos_emb(torch.randn(5, 1, 8), freqs, "thd")


@pytest.mark.parametrize("fmt", ["sbhd", "bshd", "thd"])
def test_ranks_that_share_sequences_turn_their_chunks_as_the_whole_is_turned(fmt):
    """Two ranks; in thd two sequences of 4 and 8 tokens."""
    angles, cu = cg.RotaryPositionEmbedding(4)(8), torch.tensor([0, 4, 12])
    x = torch.randn({"sbhd": (8, 2, 3, 4), "bshd": (2, 8, 3, 4), "thd": (12, 3, 4)}[fmt])
    dim, options = fmt.index("t" if fmt == "thd" else "s"), {"cu_seqlens": cu} if fmt == "thd" else {}
    whole = cg.nn.apply_rotary_pos_emb(x, angles, fmt, **options)
    for rank, tokens in enumerate(
        ([0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]) if fmt == "thd" else ([0, 1, 6, 7], [2, 3, 4, 5])
    ):
        part = x.index_select(dim, torch.tensor(tokens))
        mine = cg.nn.apply_rotary_pos_emb(part, angles, fmt, cp_size=2, cp_rank=rank, **options)
        assert torch.equal(mine, whole.index_select(dim, torch.tensor(tokens)))


def test_what_ranks_cannot_share():
    angles = cg.RotaryPositionEmbedding(4)(8)
    with pytest.raises(NotImplementedError, match="start_positions"):
        cg.nn.apply_rotary_pos_emb(torch.randn(4, 1, 1, 4), angles, start_positions=torch.zeros(1), cp_size=2)
    with pytest.raises(ValueError, match="cannot be cut"):
        cg.nn.apply_rotary_pos_emb(torch.randn(3, 1, 1, 4), angles, cp_size=2)
