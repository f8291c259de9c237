"""What a validation step does must not change how training goes on.

A weight that is kept quantized lives through steps with and without gradients and through changes of the
recipe. A step without gradients needs no columnwise data. If it said so to the weight, the next write
would leave the columnwise data as it was, and the backward pass after that would read stale numbers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import crossgrain as cg
from crossgrain import ops
from crossgrain.ops.basic import linear as linear_module
from crossgrain.recipe import CustomRecipe, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

from ...common.ops_cases import RECIPES, assert_same, quantized

SIZES = torch.tensor([32, 0, 32])
KINDS = ["linear", "grouped", "single_grouped"]


class LiteralQuantizer(cg.MXFP8Quantizer):
    """Writes just the directions of its usages, as quantizers elsewhere do."""

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        planes = [plane for plane in dst.planes() if self.get_usages()[plane.direction.value]]
        self.encode_planes(src, dst, planes)
        return dst


def _literal_factory(role: object) -> cg.Quantizer:
    return LiteralQuantizer(cg.DType.kFloat8E4M3)


def _literal_hybrid_factory(role: object) -> cg.Quantizer:
    return cg.HybridQuantizer(
        rowwise_quantizer=cg.MXFP8Quantizer(cg.DType.kFloat8E4M3),
        columnwise_quantizer=cg.MXFP8Quantizer(cg.DType.kFloat8E5M2),
    )


ALL_RECIPES: dict[str, Callable[[], Recipe]] = {
    **RECIPES,
    "literal": lambda: CustomRecipe(qfactory=_literal_factory),
    "hybrid_mxfp8_twice": lambda: CustomRecipe(qfactory=_literal_hybrid_factory),
}


class Model(torch.nn.Module):
    """Two layers of a kind, and a place for what follows from it in the way they are called."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.block = ops.Sequential(ops.Linear(width, width), ops.GELU(), ops.Linear(width, width, bias=False))
        else:
            single = kind == "single_grouped"
            self.block = ops.Sequential(
                *(ops.GroupedLinear(3, width, width, single_grouped_weight=single) for _ in range(2))
            )

    def forward(self, x: Tensor) -> Tensor:
        extras = () if self.kind == "linear" else (SIZES, SIZES)
        return self.block(x, *extras)

    def weights(self) -> list[Any]:
        return [p for p in self.parameters() if isinstance(p, cg.QuantizedTensor)]


def write_in_place(weight: Any, master: Tensor) -> None:
    weight.quantize_(master)


def make_anew(weight: Any, master: Tensor) -> None:
    """An optimizer that has the weight's quantizer make new bytes."""
    weight.data = weight._get_quantizer()(master)


def train(
    recipe: Callable[[], Recipe],
    kind: str,
    *,
    validate: Callable[[Model, Tensor], None],
    write: Callable[[Any, Tensor], None] = write_in_place,
    no_grad_init: bool = False,
    init_recipe: Callable[[], Recipe] | None = None,
) -> list[Tensor]:
    """Three steps of gradient descent on master weights; the losses, and the masters at the end.

    Validation runs before each forward pass and between each backward pass and its optimizer step.
    """
    width = 128 if isinstance(recipe(), Float8BlockScaling) else 64  # parts of a single weight are whole blocks
    torch.manual_seed(7)
    with cg.quantized_model_init(recipe=(init_recipe or recipe)()), torch.set_grad_enabled(not no_grad_init):
        model = Model(kind, width)
    for parameter in model.parameters():
        parameter.requires_grad_()
    weights = model.weights()
    assert len(weights) == {"linear": 2, "grouped": 6, "single_grouped": 2}[kind]
    masters = [weight.dequantize().detach().float() for weight in weights]
    results = []
    for step in range(3):
        torch.manual_seed(100 + step)
        x = torch.randn(64, width)
        validate(model, x)
        with quantized(recipe()):
            loss = model(x).square().mean()
        loss.backward()
        results.append(loss.detach())
        validate(model, x)
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                master -= 10.0 * weight.grad
                write(weight, master)
        model.zero_grad()
    return results + masters


def _validation(recipe: Callable[[], Recipe], context: Callable[[], Any]) -> Callable[[Model, Tensor], None]:
    def validate(model: Model, x: Tensor) -> None:
        with context(), quantized(recipe()), torch.random.fork_rng():
            model(x)

    return validate


def _no_validation(model: Model, x: Tensor) -> None:
    """Training alone."""


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_validation_does_not_change_training(recipe: str, kind: str, context: Callable[[], Any]) -> None:
    make = ALL_RECIPES[recipe]
    alone = train(make, kind, validate=_no_validation)
    assert_same(train(make, kind, validate=_validation(make, context)), alone)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8", "fp8_block", "hybrid_mxfp8_nvfp4"])
def test_models_made_without_gradients_train_alike(recipe: str) -> None:
    make = ALL_RECIPES[recipe]
    alone = train(make, "linear", validate=_no_validation)
    validated = train(make, "linear", validate=_validation(make, torch.no_grad), no_grad_init=True)
    assert_same(validated, alone)


# Another recipe of the same class for validation: quantizers are built anew there, and again for training.
RESETS: dict[str, tuple[Callable[[], Recipe], Callable[[], Recipe]]] = {
    "mxfp8": (MXFP8BlockScaling, lambda: MXFP8BlockScaling(fp8_format=cg.recipe.FP8Format.HYBRID)),
    "nvfp4": (NVFP4BlockScaling, lambda: NVFP4BlockScaling(disable_stochastic_rounding=True)),
    "fp8_block": (Float8BlockScaling, lambda: Float8BlockScaling(use_f32_scales=True)),
    "literal": (ALL_RECIPES["literal"], lambda: CustomRecipe(qfactory=lambda role: _literal_factory(role))),
    "hybrid": (
        ALL_RECIPES["hybrid_mxfp8_twice"],
        lambda: CustomRecipe(qfactory=lambda role: _literal_hybrid_factory(role)),
    ),
}


@pytest.mark.parametrize("write", [write_in_place, make_anew])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RESETS)
def test_recipes_may_be_reset_in_between(recipe: str, kind: str, write: Callable[[Any, Tensor], None]) -> None:
    """Every validation step resets the recipe, every training step resets it again."""
    make, other = RESETS[recipe]
    alone = train(make, kind, validate=_no_validation, write=_by_training_recipe(make, write))
    validate = _validation(other, torch.no_grad)
    assert_same(train(make, kind, validate=validate, write=_by_training_recipe(make, write)), alone)


def _by_training_recipe(
    recipe: Callable[[], Recipe], write: Callable[[Any, Tensor], None]
) -> Callable[[Any, Tensor], None]:
    """Casts are by the recipe that was used last: it is training's that masters are written by."""

    def written(weight: Any, master: Tensor) -> None:
        weight._quantizer = _like(recipe(), weight._quantizer)
        write(weight, master)

    return written


def _like(recipe: Recipe, quantizer: cg.Quantizer) -> cg.Quantizer:
    state = cg.recipe.RecipeState.create(
        recipe, mode="forward", num_quantizers=2, roles=[cg.QuantizerRole("linear", t) for t in ("input", "weight")]
    )
    made = state.make_quantizers()[1]
    made.set_usage(**quantizer.get_usages())
    return made


@pytest.mark.parametrize("write", [write_in_place, make_anew])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RESETS)
def test_the_first_step_may_be_validation(recipe: str, kind: str, write: Callable[[Any, Tensor], None]) -> None:
    """The recipe changes in a step without gradients, and stays for all that follow."""
    make, other = RESETS[recipe]
    alone = train(make, kind, validate=_no_validation, write=write, init_recipe=other)
    validate = _validation(make, torch.no_grad)
    assert_same(train(make, kind, validate=validate, write=write, init_recipe=other), alone)


@pytest.mark.parametrize("write", [write_in_place, make_anew])
@pytest.mark.parametrize("kind", KINDS)
def test_the_guard_is_what_keeps_training_right(
    kind: str, write: Callable[[Any, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above without the guard: the weight gets the usages of a step without gradients and keeps them.

    Bytes that are made anew lack the columnwise plane, which is noticed; those that are written in place leave
    it as it was, and training goes wrong without a word.
    """
    make, other = RESETS["literal"]
    alone = train(make, kind, validate=_no_validation, write=write, init_recipe=other)
    monkeypatch.setattr(linear_module, "keep_usages", lambda quantizer, weight: None)
    validate = _validation(make, torch.no_grad)
    if write is make_anew:
        with pytest.raises(RuntimeError, match="has no columnwise plane, which dgrad reads"):
            train(make, kind, validate=validate, write=write, init_recipe=other)
    else:
        stale = train(make, kind, validate=validate, write=write, init_recipe=other)
        assert not all(torch.equal(a, b) for a, b in zip(stale, alone, strict=True))


# ---- the rules one by one ------------------------------------------------------------------------------


def _quantized_linear() -> ops.BasicLinear:
    with cg.quantized_model_init(recipe=MXFP8BlockScaling()):
        return ops.BasicLinear(32, 32)


@pytest.mark.parametrize("rowwise, columnwise", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("grad", [True, False])
def test_usages_are_carried_over_unchanged(rowwise: bool, columnwise: bool, grad: bool) -> None:
    op = _quantized_linear()
    weight: Any = op.weight
    weight._quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    planes, before = weight.get_usages(), weight._quantizer
    with torch.set_grad_enabled(grad):
        op.reset_recipe_state(recipe=MXFP8BlockScaling(fp8_format=cg.recipe.FP8Format.HYBRID))
    assert weight._quantizer is not before
    assert weight._quantizer.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
    assert weight.get_usages() == planes == {"rowwise": True, "columnwise": True}


def test_the_weight_gets_a_complete_copy() -> None:
    op = _quantized_linear()
    op.reset_recipe_state(recipe=MXFP8BlockScaling(margin=1))
    own, weight = op.get_quantizer("forward", 1), op.weight
    assert weight._quantizer is not own
    assert type(weight._quantizer) is type(own) and weight._quantizer.dtype == own.dtype
    assert not weight._quantizer.internal
    op.pre_fuser_forward(requires_grad=False)
    assert not own.columnwise_usage and weight._quantizer.columnwise_usage


def test_bytes_are_not_requantized() -> None:
    op = _quantized_linear()
    before = [buffer.clone() for _, buffer in op.weight._buffers()]
    pointers = [buffer.data_ptr() for _, buffer in op.weight._buffers()]
    with torch.no_grad(), quantized(MXFP8BlockScaling(margin=1)):
        op(torch.randn(32, 32))
    assert_same([buffer for _, buffer in op.weight._buffers()], before)
    assert [buffer.data_ptr() for _, buffer in op.weight._buffers()] == pointers


def test_future_writes_are_by_the_new_recipe() -> None:
    """What is cast from now on may differ, what is there stays: a tensor decodes without its quantizer."""
    with cg.quantized_model_init(recipe=Float8BlockScaling()):
        op = ops.BasicLinear(128, 128)
    decoded = op.weight.dequantize().clone()
    op.reset_recipe_state(recipe=Float8BlockScaling(use_f32_scales=True))
    assert torch.equal(op.weight.dequantize(), decoded)
    value = torch.randn(128, 128)
    with torch.no_grad():
        op.weight.copy_(value)
    wanted = op.get_quantizer("forward", 1)(value)
    assert torch.equal(op.weight.dequantize(), wanted.dequantize())


def test_a_missing_direction_is_named() -> None:
    """Data that cannot be derived is not made up from rounded numbers."""
    op = _quantized_linear()
    op.weight.update_usage(columnwise_usage=False)
    x = torch.randn(32, 32, requires_grad=True)
    with quantized(MXFP8BlockScaling()), torch.no_grad():
        op(x)
    with quantized(MXFP8BlockScaling()), pytest.raises(RuntimeError, match="no columnwise plane, which dgrad reads"):
        op(x)


def test_usages_of_a_pass_are_not_disturbed_by_another() -> None:
    """Gradients that are handed on are quantized as the forward pass of that backward pass asked for."""
    torch.manual_seed(0)
    block = ops.Sequential(ops.Linear(32, 32, bias=False), ops.GELU(), ops.Linear(32, 32, bias=False))
    x = torch.randn(32, 32, requires_grad=True)

    def grads(interrupt: bool) -> list[Tensor]:
        with quantized(MXFP8BlockScaling()):
            y = block(x)
            if interrupt:
                with torch.no_grad():
                    block(x)
        return list(torch.autograd.grad(y.square().sum(), [x, *block.parameters()]))

    assert_same(grads(True), grads(False))
