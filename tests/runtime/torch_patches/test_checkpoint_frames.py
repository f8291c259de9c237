"""The functions of torch that are looked for on the call stack. What follows: `tests/nn/test_activation_checkpoint`."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

from crossgrain.runtime.torch_patches import checkpoint_frames


def test_torch_has_all_functions_that_are_looked_for():
    assert sorted(checkpoint_frames._functions().values()) == [
        "again",
        "engine",
        "first",
        "reentrant again",
        "reentrant first",
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_passes_of_a_checkpoint_are_seen(reentrant):
    seen = []

    def run(x):
        running = checkpoint_frames.running_checkpoints()
        seen.append((len(running.first), running.again is not None))
        return x * x

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant).sum().backward()
    assert seen == [(1, False), (0, True)]


def test_a_torch_with_other_functions_finds_nothing(monkeypatch):
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_hook")
    checkpoint_frames._functions.cache_clear()
    try:
        assert checkpoint_frames._functions() == {}
    finally:
        checkpoint_frames._functions.cache_clear()
