"""torch.compile on a GPU: the custom operators know what they return there."""

import pytest

pytestmark = pytest.mark.xdist_group("fake_cuda")


def test_operators_return_what_their_fakes_say(told):
    for recipe, (fake, real) in told["shapes_of_operators"].items():
        assert len(real) > 1 and all(device == "cuda:0" for device, *_ in real), recipe
        assert fake == real, recipe
