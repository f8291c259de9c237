"""Several GPUs, streams, compiled layers."""

from __future__ import annotations

import pytest
import torch

from .placement import COMPILED, ON_DEVICES, check_compiled, check_device, check_stream

pytestmark = pytest.mark.usefixtures("triton_backend")


@pytest.mark.parametrize("recipe", ON_DEVICES)
def test_a_stream_that_is_not_the_default_one(gpu, tell, recipe):
    tell(check_stream(recipe, gpu))


@pytest.mark.parametrize("recipe", ON_DEVICES)
def test_a_device_that_is_not_the_current_one(gpu, tell, recipe):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one GPU")
    if torch.cuda.get_device_capability(0) != torch.cuda.get_device_capability(1):
        pytest.skip("the GPUs are of different kinds, whose GEMMs round differently")
    tell(check_device(recipe, torch.device("cuda", 1), torch.device("cuda", 0)))


@pytest.mark.parametrize("recipe", COMPILED)
def test_a_compiled_layer(gpu, tell, recipe):
    tell(check_compiled(recipe, gpu))
