"""Inside torch.jit.trace and torch.func, what quantizes says in one sentence that it cannot."""

import pytest
import torch
from torch import nn

import crossgrain as cg

FUNC = r"cannot run inside the transforms of torch.func .*functional_call works"


def converted():
    model = nn.Sequential(nn.Linear(32, 32))
    cg.convert(model, "mxfp8")
    return model


def operations():
    return cg.ops.Sequential(cg.ops.Linear(32, 32))


def grouped():
    layer = cg.GroupedLinear(2, 32, 32)
    return lambda x: layer(x, [32, 32])


def attention():
    core = cg.DotProductAttention(2, 16)
    core.bound_recipe = cg.recipe.as_recipe("hp, attention: fp8")
    return lambda x: core(*[x.view(32, 2, 2, 16)] * 3)


MAKERS = {
    "Linear": lambda: cg.Linear(32, 32),
    "converted": converted,
    "operations": operations,
    "GroupedLinear": grouped,
    "LayerNormLinear": lambda: cg.LayerNormLinear(32, 32),
    "RMSNorm": lambda: cg.RMSNorm(32),
    "attention": attention,
    "quantizer": lambda: cg.quantizer_for("mxfp8"),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_transforms_of_torch_func_are_refused_in_words(maker):
    work, x = MAKERS[maker](), torch.randn(2, 64, 32)
    with pytest.raises(NotImplementedError, match=FUNC):
        torch.vmap(work)(x)
    with pytest.raises(NotImplementedError, match=FUNC):
        torch.func.grad(lambda x: work(x).float().sum())(x[0])


@pytest.mark.parametrize("maker", ["Linear", "converted", "operations"])
def test_recording_is_refused_in_words(maker):
    with pytest.raises(NotImplementedError, match=r"cannot be recorded by torch.jit.trace.*torch.compile"):
        torch.jit.trace(MAKERS[maker](), (torch.randn(64, 32),))


def test_functional_call_works():
    layer, x = converted(), torch.randn(64, 32)
    changed = {name: 2 * parameter.detach() for name, parameter in layer.named_parameters()}
    y = torch.func.functional_call(layer, changed, (x,))
    assert torch.equal(y, 2 * layer(x))
