"""Cross entropy in one process against torch, and over ranks against one process."""

import pytest
import torch

from crossgrain.nn.cross_entropy import parallel_cross_entropy

from ..common.ranks import run

SHAPE, CLASSES = (3, 5), 12


def case(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(*SHAPE, CLASSES, generator=generator) * 5).to(dtype)
    target = torch.randint(CLASSES, SHAPE, generator=generator)
    target[1, 2] = -100
    return logits, target, torch.rand(SHAPE, generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_torch(smoothing, dtype):
    logits, target, weights = case(dtype)
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    loss = parallel_cross_entropy(mine, target, smoothing)
    expected = torch.nn.functional.cross_entropy(
        theirs.float().flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
    ).view(SHAPE)
    assert loss.dtype == torch.float32 and loss[1, 2] == 0
    torch.testing.assert_close(loss, expected)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    assert mine.grad.dtype == dtype and not mine.grad[1, 2].any()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_mean_is_over_targets_that_count():
    logits, target, _ = case()
    loss = parallel_cross_entropy(logits, target, 0.0, True, None, -100, True)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, expected)
    other = parallel_cross_entropy(logits, target.masked_fill(target == -100, 4), ignore_idx=4, reduce_loss=True)
    kept = target.masked_fill(target == -100, 4)
    torch.testing.assert_close(
        other, torch.nn.functional.cross_entropy(logits.flatten(0, 1), kept.flatten(), ignore_index=4)
    )


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0], [-1e4, -1e4]])
    assert parallel_cross_entropy(logits, torch.tensor([0, 1])).tolist() == [0.0, pytest.approx(0.6931472)]
    with pytest.raises(ValueError, match=r"logits of shape \[2, 2\] need targets of shape \[2\], got \[3\]"):
        parallel_cross_entropy(logits, torch.tensor([0, 1, 1]))


@pytest.mark.parametrize("unknown, ignored", [(2, -100), (-1, -100), (-100, 0)])
def test_targets_that_are_no_classes_are_refused(unknown, ignored):
    with pytest.raises(ValueError, match=f"targets must be between 0 and 1, or ignore_idx={ignored}, got {unknown}"):
        parallel_cross_entropy(torch.randn(3, 2), torch.tensor([0, unknown, 1]), ignore_idx=ignored)


def _share(rank, ranks, smoothing):
    logits, target, weights = case()
    mine = logits.chunk(ranks, -1)[rank].clone().requires_grad_()
    loss = parallel_cross_entropy(mine, target, smoothing, False, torch.distributed.group.WORLD)
    (loss * weights).sum().backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ranks_share_the_classes(smoothing, tmp_path):
    logits, target, weights = case()
    logits.requires_grad_()
    loss = parallel_cross_entropy(logits, target, smoothing)
    (loss * weights).sum().backward()
    results = run(_share, 3, tmp_path, 3, smoothing)
    for part, (theirs, gradient) in zip(logits.grad.chunk(3, -1), results, strict=True):
        torch.testing.assert_close(theirs, loss.detach())  # sums over ranks add up in another order
        assert torch.equal(theirs, results[0][0])
        torch.testing.assert_close(gradient, part)
