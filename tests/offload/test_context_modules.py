"""Training with offloading is training without it, bit for bit, for every module and recipe; and all bytes leave."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch

import crossgrain as cg
from crossgrain import ops
from crossgrain import recipe as recipes

from ..common.modules import FAMILIES, HYBRIDS, assert_same, recipe_named, step

M, K = 32, 64

MODULES = {
    # After an activation, because graphs hold on to inputs that are leaves: there would be nothing to offload.
    "Linear": (lambda: torch.nn.Sequential(torch.nn.GELU(), cg.Linear(K, 96)), {}),
    "Linear of parts": (lambda: cg.Linear(K, 96, parameters_split=("q", "k", "v")), {}),
    "LayerNormLinear": (lambda: cg.LayerNormLinear(K, 96), {}),
    "LayerNormMLP": (lambda: cg.LayerNormMLP(K, 128, activation="swiglu"), {}),
    "recomputed MLP": (lambda: torch.nn.Sequential(torch.nn.GELU(), cg.LayerNormMLP(K, 128, checkpoint=True)), {}),
    "GroupedLinear": (lambda: cg.GroupedLinear(2, K, 96), {"m_splits": [16, 16]}),
    "ops.Sequential": (
        lambda: ops.Sequential(ops.RMSNorm(K), ops.Linear(K, 128), ops.SwiGLU(), ops.Linear(K, K)),
        {},
    ),
    "MultiheadAttention": (lambda: cg.MultiheadAttention(K, 4, attention_dropout=0.0), {}),
}


def inputs(name):
    x = torch.randn(16, 2, K) if "Attention" in name else torch.randn(M, K)
    return x.requires_grad_()


def steps(module, x, recipe, context, **options):
    """Two of them, so that delayed scaling has learned something."""
    torch.manual_seed(7)
    found = []
    for _ in range(2):
        with context():
            found.append(step(module, x, recipe, **options))
    return found


def check_same(name, recipe, where):
    make, options = MODULES[name]
    module, x = make(), inputs(name)
    twin = copy.deepcopy(module)
    offload = cg.offload(where, min_bytes=0)
    for mine, theirs in zip(
        steps(module, x, recipe, lambda: offload, **options),
        steps(twin, x, recipe, nullcontext, **options),
        strict=True,
    ):
        assert_same(mine, theirs)
    offload.wait()
    assert offload.stats.stored > 0 and offload.stats.kept == 0
    assert offload.stats.used == 0, "the graphs are gone"


@pytest.mark.parametrize("recipe", [*FAMILIES, *HYBRIDS])
@pytest.mark.parametrize("name", MODULES)
def test_every_module_trains_alike(name, recipe, tmp_path):
    check_same(name, recipe_named(recipe), tmp_path)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "mxfp8-fwd-nvfp4-bwd"])
@pytest.mark.parametrize("name", MODULES)
def test_in_host_memory_and_in_high_precision(name, recipe):
    check_same(name, None if recipe is None else recipe_named(recipe), "host")


@pytest.mark.parametrize("family", [recipes.Float8CurrentScaling, recipes.MXFP8BlockScaling])
def test_quantized_attention_trains_alike(family, tmp_path):
    check_same("MultiheadAttention", family(fp8_dpa=True), tmp_path)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-fwd-nvfp4-bwd", "fp8_delayed"])
def test_weights_that_are_kept_quantized_stay(recipe, tmp_path):
    """Backward reads them from the parameter: storing them would free nothing."""
    with cg.quantized_model_init(recipe=recipe_named(recipe)):
        module = cg.Linear(K, 96)
    x = inputs("Linear")
    found = []
    for context in (cg.offload(tmp_path, min_bytes=0), nullcontext()):
        torch.manual_seed(7)
        with context:
            found.append(step(copy.deepcopy(module), x, recipe_named(recipe)))
    assert_same(*found)
    offload = cg.offload(tmp_path, min_bytes=0)
    with offload, cg.autocast(recipe=recipe_named(recipe)):
        y = module(x)
    x_alone = sum(buffer.nbytes for buffer in y.grad_fn.saved_tensors[:3] if buffer is not None)
    assert offload.stats.stored == x_alone


def test_cached_weights_stay(tmp_path):
    module, x = cg.Linear(K, 96), inputs("Linear")
    stored = []
    for options in ({}, {"is_first_microbatch": True}, {"is_first_microbatch": False}):
        offload = cg.offload(tmp_path, min_bytes=0)
        with offload, cg.autocast(recipe="mxfp8"):
            module(x, **options)
        stored.append(offload.stats.stored)
    assert stored[1] == stored[2] < stored[0]


def test_high_precision_weights_stay(tmp_path):
    module = cg.Linear(K, 96, bias=False)
    offload = cg.offload(tmp_path, min_bytes=0)
    with offload:
        module(torch.randn(M, K))
        torch.nn.functional.linear(torch.randn(M, K), module.weight)
    assert offload.stats.stored == 2 * M * K * 4


@pytest.mark.parametrize("recipe", ["mxfp8-fwd-nvfp4-bwd", "fp8_current", None])
@pytest.mark.parametrize("name", MODULES)
def test_no_saved_byte_bypasses_the_hooks(name, recipe, tmp_path):
    """After forward, memory holds the parameters, x and y, and nothing of their size besides."""
    make, options = MODULES[name]
    module = make()
    x = inputs(name)
    owned = [x, *module.parameters(), *module.buffers()]

    def forward():
        with cg.autocast(enabled=recipe is not None, recipe=recipe and recipe_named(recipe)):
            return module(x, **options)

    forward()  # makes the workspaces of the kernels
    gc.freeze()  # what is here already is not looked at
    offload = cg.offload(tmp_path, min_bytes=64)
    with offload:
        y = forward()
    offload.wait()
    new = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    gc.unfreeze()
    addresses = {tensor.untyped_storage().data_ptr() for tensor in [y, *owned]}
    left = [
        (list(tensor.shape), tensor.dtype)
        for tensor in new
        if tensor.untyped_storage().data_ptr() not in addresses
        and tensor.untyped_storage().nbytes() >= M * K // 2
        and tensor.shape != torch.get_rng_state().shape  # which recomputation keeps
    ]
    assert not left
