"""What the patch of FSDP2 needs of torch. What it does: tests/distributed/test_by_pass.py."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from crossgrain.runtime.torch_patches import fsdp_gathers


class State:
    def __init__(self, *groups):
        self._fsdp_param_groups = list(groups)


class Sharded:
    def __init__(self, state):
        self._get_fsdp_state = lambda: state


@pytest.mark.parametrize("name", fsdp_gathers._NEEDED)
def test_fsdp2_has_what_is_used(name):
    assert hasattr(FSDPParamGroup, name)


@pytest.mark.parametrize("sharded", [Sharded(object()), Sharded(State(object()))], ids=["no groups", "other groups"])
def test_an_fsdp2_that_is_not_as_known_is_refused(sharded):
    refusal = "gather_by_pass does not work with FSDP2 of torch .*Do not call gather_by_pass"
    with pytest.raises(NotImplementedError, match=refusal):
        fsdp_gathers._groups_of(sharded)
