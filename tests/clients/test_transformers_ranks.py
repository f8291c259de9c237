"""`CrossgrainCallback` in a `Trainer` on two ranks, started by torchrun."""

from __future__ import annotations

import re

import pytest

from ..common.torchrun import printed_by

pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which is not installed: make test-clients")


def digests(*arguments):
    printed = printed_by(2, "-m", "tests.clients.trainer_on_ranks", *map(str, arguments))
    return re.findall(r"DistributedDataParallel [0-9a-f]{64}", printed)


def test_ranks_have_the_same_model_also_when_they_resume(tmp_path):
    whole = digests("fp8-delayed", tmp_path / "whole")
    assert len(whole) == 2 and len(set(whole)) == 1
    assert (tmp_path / "whole/checkpoint-2/crossgrain.json").exists()
    assert digests("fp8-delayed", tmp_path / "resumed", tmp_path / "whole/checkpoint-2") == whole
