"""Convolutions of patches and 1x1 are products of matrices; others are left, with the reason."""

import pytest
import torch
from torch import nn

import crossgrain as cg

from ..common.logs import warned

CASES = {
    "patches": (nn.Conv2d(3, 32, 4, 4), (2, 3, 17, 12)),
    "1x1": (nn.Conv2d(32, 48, 1, bias=False), (2, 32, 5, 3)),
    "1x1 with stride": (nn.Conv2d(32, 48, 1, stride=2), (2, 32, 5, 3)),
    "1-D": (nn.Conv1d(4, 32, 8, 8), (3, 4, 64)),
    "3-D": (nn.Conv3d(3, 32, (2, 4, 4), (2, 4, 4)), (1, 3, 4, 8, 8)),
    "without a batch": (nn.Conv2d(3, 32, 4, 4), (3, 8, 8)),
}


@pytest.mark.parametrize("case", CASES)
def test_in_high_precision_it_is_the_convolution(case):
    module, shape = CASES[case]
    x = torch.randn(shape)
    expected = module(x)
    cg.convert(module, "mxfp8")
    with cg.autocast(enabled=False):
        torch.testing.assert_close(module(x), expected)
    quantized = module(x)
    assert quantized.shape == expected.shape and not torch.equal(quantized, expected)
    cg.unconvert(module)
    assert torch.equal(module(x), expected)


def test_it_computes_as_a_linear_layer_of_the_patches():
    conv, linear = nn.Conv2d(3, 32, 4, 4), nn.Linear(48, 32)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.flatten(1))
        linear.bias.copy_(conv.bias)
    recipe = "mxfp8-fwd-nvfp4-bwd, dgrad: nvfp4, wgrad: nvfp4(rht)"
    for layer in (conv, linear):
        cg.convert(layer, recipe)
    x = torch.randn(2, 3, 8, 12, requires_grad=True)
    patches = nn.functional.unfold(x.detach(), 4, stride=4).transpose(1, 2).contiguous().requires_grad_()
    y, expected = conv(x).flatten(2).transpose(1, 2), linear(patches)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, [x, conv.weight, conv.bias], dy)
    others = torch.autograd.grad(expected, [patches, linear.weight, linear.bias], dy)
    folded = nn.functional.fold(others[0].transpose(1, 2), (8, 12), 4, stride=4)
    assert torch.equal(dx, folded) and torch.equal(dw.flatten(1), others[1]) and torch.equal(db, others[2])


@pytest.mark.parametrize(
    "module, reason",
    [
        (nn.Conv2d(4, 4, 3), "windows overlap or have gaps"),
        (nn.Conv2d(4, 4, 2, 2, dilation=2), "windows overlap or have gaps"),
        (nn.Conv2d(4, 4, 1, groups=2), "groups=2"),
        (nn.Conv2d(4, 4, 2, 2, padding=1), "padding"),
    ],
)
def test_other_convolutions_are_left_and_counted(module, reason):
    model = nn.Sequential(module, nn.Linear(4, 4))
    with warned(f"% of the multiply-adds with weights .* 0: .*{reason}"):
        report = cg.convert(model, "mxfp8")
    assert reason in report.left["0"] and report.converted == ["1"]
    with pytest.raises(ValueError, match=reason):
        cg.convert(model, "mxfp8", strict=True)
    assert cg.convert(model, "mxfp8", skip=nn.Conv2d, strict=True).left == {"0": "skip Conv2d"}


def test_inputs_that_are_too_small_or_flat_are_refused():
    module = nn.Conv2d(3, 32, 4, 4)
    cg.convert(module, "mxfp8")
    with pytest.raises(ValueError, match="is smaller than the kernel \\[4, 4\\]"):
        module(torch.randn(1, 3, 2, 8))
    with pytest.raises(ValueError, match="must have 3 or 4 dimensions, got \\[3, 8\\]"):
        module(torch.randn(3, 8))


def test_a_report_by_shapes_says_that_convolutions_count_too_little():
    def model():
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32)]
        return nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, padding=1), *head)

    said = "may be far off, because 2 convolutions counted as if applied in one place only: convert(..., inputs=...)"
    assert said in cg.convert(model(), "mxfp8").summary()
    assert "convolution" not in cg.convert(model(), "mxfp8", inputs=torch.randn(1, 3, 16, 16)).summary()
    assert "convolution" not in cg.convert(nn.Sequential(nn.Conv2d(3, 32, 4, 4)), "mxfp8").summary()  # patches
