"""Columns that are made from rows, with the rows or late: the same bits, other memory and other work."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels, ops

from ..common.quantizers import assert_same_bytes, hybrid_of

FORMATS = {
    "hp backward": "fprop: nvfp4, dgrad: hp, wgrad: hp",
    "mxfp8 backward": "fprop: nvfp4(row_scaled), dgrad: mxfp8, wgrad: mxfp8",
    "nvfp4 backward": "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)",
    "fp8": "all: fp8",
}
LAYERS = {
    "Linear": lambda: cg.Linear(64, 96),
    "LayerNormLinear": lambda: cg.LayerNormLinear(64, 96),
    "LayerNormMLP": lambda: cg.LayerNormMLP(64, 96),
    "GroupedLinear": lambda: Grouped(),
    "ops": lambda: ops.Sequential(ops.Linear(64, 96), ops.GELU()),
}


class Grouped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = cg.GroupedLinear(2, 64, 96)

    def forward(self, x):
        return self.experts(x, [15, len(x) - 15])


def at_once(formats):
    return f"{formats}, input.source: dequantized, weight.source: dequantized"


def late(formats):
    return f"{formats}, input.source: dequantized_late, weight.source: dequantized_late"


def trained(make, recipe, *, kept=False, microbatches=1, run=None, **options):
    """Outputs, gradients and weights of two steps, and the bytes that the first forward saves."""
    torch.manual_seed(0)
    with cg.quantized_model_init(enabled=kept, recipe=recipe):
        model = make()
    optimizer = cg.optim.FusedAdam(model.parameters(), lr=0.01, master_weights=kept)
    run, found, saved = run or (lambda model, x, **options: model(x, **options)), [], []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    for _ in range(2):
        batches = [torch.randn(40 if not kept else 64, 64, requires_grad=True) for _ in range(microbatches)]
        for number, x in enumerate(batches):
            if options.get("cached"):
                options["is_first_microbatch"] = number == 0
            given = {key: value for key, value in options.items() if key != "cached"}
            with cg.autocast(recipe=recipe), saved_tensors_hooks(pack, lambda tensor: tensor):
                y = run(model, x, **given)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found, sum(saved)


def assert_same(ones, others):
    assert len(ones) == len(others) > 0
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert torch.equal(one, other), f"result {number} differs"


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("layer", LAYERS)
def test_late_columns_give_the_same_bits(layer, formats):
    make, formats = LAYERS[layer], FORMATS[formats]
    assert_same(trained(make, late(formats))[0], trained(make, at_once(formats))[0])


@pytest.mark.parametrize(
    "options",
    [
        {"kept": True},
        {"cached": True, "microbatches": 3},
        {"run": lambda model, x: checkpoint(model, x, use_reentrant=False)},
        {"run": lambda model, x: checkpoint(model, x, use_reentrant=True)},
    ],
    ids=["kept", "cached", "recomputed", "recomputed by reentering"],
)
@pytest.mark.parametrize("formats", FORMATS)
def test_late_columns_of_weights_that_are_kept_cached_or_recomputed_give_the_same_bits(formats, options):
    formats = FORMATS[formats]
    ones = trained(LAYERS["Linear"], late(formats), **options)[0]
    assert_same(ones, trained(LAYERS["Linear"], at_once(formats), **options)[0])


def test_late_columns_give_the_same_bits_when_compiled():
    formats = FORMATS["mxfp8 backward"]
    ones = trained(lambda: torch.compile(cg.Linear(64, 96), backend="aot_eager"), late(formats))[0]
    assert_same(ones, trained(LAYERS["Linear"], at_once(formats))[0])


def test_only_rows_are_saved():
    formats = FORMATS["hp backward"]
    saved = {source.__name__: trained(LAYERS["Linear"], source(formats))[1] // 2 for source in (late, at_once)}
    rows, outputs, inputs = 40, 96, 64
    made = [cg.quantize(torch.randn(size, inputs), "nvfp4", columnwise=False) for size in (rows, outputs)]
    planes = [quantized.plane(ROWWISE) for quantized in made]
    assert saved["late"] == sum(buffer.nbytes for plane in planes for buffer in plane.buffers())
    assert saved["at_once"] == (rows + outputs) * inputs * 4
    assert saved["late"] * 6 < saved["at_once"]


def encoded_columns(monkeypatch, recipe, **options):
    """How many columnwise planes of the weight are encoded in two steps."""
    counted, encode = [], kernels.encode

    def spy(x, targets, *args, **kwargs):
        counted.extend(target for target in targets if target.plane.shape == (96, 64))
        return encode(x, targets, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "plan", lambda *_: None)
        patch.setattr(kernels, "encode", spy)
        trained(LAYERS["Linear"], recipe, **options)
    return sum(target.plane.direction is COLUMNWISE for target in counted)


def test_a_cached_weight_makes_late_columns_once_for_all_microbatches(monkeypatch):
    """In each of two steps with three microbatches; a weight that is not cached makes them in every backward."""
    recipe = late(FORMATS["mxfp8 backward"])
    assert encoded_columns(monkeypatch, recipe, cached=True, microbatches=3) == 2
    assert encoded_columns(monkeypatch, recipe, microbatches=3) == 6
    assert encoded_columns(monkeypatch, recipe, kept=True, microbatches=3) == 6
    # Made with the rows: by the initialization and by the writes of two steps.
    assert encoded_columns(monkeypatch, at_once(FORMATS["mxfp8 backward"]), kept=True, microbatches=3) == 3


def test_validation_makes_no_late_columns(monkeypatch):
    recipe = late(FORMATS["mxfp8 backward"])
    layer = cg.Linear(64, 96)
    with torch.no_grad(), cg.autocast(recipe=recipe):
        layer(torch.randn(32, 64), is_first_microbatch=True)
    (copy,) = layer._weight_cache.copies().values()
    assert copy.get_usages() == {"rowwise": True, "columnwise": False}


def test_backward_can_run_twice():
    layer, x = cg.Linear(64, 96), torch.randn(32, 64, requires_grad=True)
    with cg.autocast(recipe=late(FORMATS["mxfp8 backward"])):
        y = layer(x)
    y.sum().backward(retain_graph=True)
    dx, dw = x.grad.clone(), layer.weight.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * dx)
    assert torch.equal(layer.weight.grad, 2 * dw)


def test_a_tensor_of_a_late_quantizer_has_rows_until_columns_are_asked_for():
    x = torch.randn(64, 64)
    q = hybrid_of("nvfp4", "mxfp8", "rowwise_dequantized_late")(x)
    assert q.get_usages() == {"rowwise": True, "columnwise": False}
    q.update_usage(columnwise_usage=True)
    assert_same_bytes(q, hybrid_of("nvfp4", "mxfp8", "rowwise_dequantized")(x))
    q.quantize_(x * 2)
    assert_same_bytes(q, hybrid_of("nvfp4", "mxfp8", "rowwise_dequantized")(x * 2))


def test_gradients_have_no_late_columns():
    with pytest.raises(ValueError, match="grad_output.source cannot be dequantized_late.*Use dequantized"):
        cg.GemmRecipe.load("mxfp8, grad_output.source: dequantized_late")
    recipe = cg.recipe.CustomRecipe(lambda role: hybrid_of("mxfp8", "mxfp8", "rowwise_dequantized_late"))
    refused = pytest.raises(ValueError, match="the quantizer of grad_output .*_late.* Use 'rowwise_dequantized'")
    for layer in (cg.Linear(64, 64), ops.Linear(64, 64)):
        with refused, cg.autocast(recipe=recipe):
            layer(torch.randn(64, 64))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("mxfp8, dgrad: nvfp4, dgrad.weight: nvfp4(sr), weight.source: dequantized_late", "rounds stochastically"),
        ("all: fp8(delayed), input.source: dequantized_late", "history of amaxes"),
    ],
)
def test_late_columns_that_would_have_other_bytes_are_refused(line, why):
    with pytest.raises(ValueError, match=f"late.* {why}.*Use 'rowwise_dequantized'"), cg.autocast(recipe=line):
        cg.Linear(64, 64)(torch.randn(64, 64, requires_grad=True))
