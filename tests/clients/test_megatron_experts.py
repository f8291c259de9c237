"""Experts of Megatron's GPT, which are grouped layers, with all kinds of recipes, on one rank and divided among two."""

import os

import pytest
import torch

from ..common.logs import logged
from ..common.megatron_runs import NEVER_CLIPPED, STEPS, error_of_training, losses

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
GROUPED = {**EXPERTS, "add_bias_linear": False, "moe_grouped_gemm": True}
RECIPES = ["none", "tensorwise", "delayed", "blockwise", "mxfp8", "nvfp4", "hybrid"]
ORDER_OF_SUMS = 1e-6
FIRST = {"tensorwise": 1e-3, "nvfp4": 2e-3}  # one scale for the tokens that an expert has on a rank
OTHER_CODES = {"none": ORDER_OF_SUMS, "mxfp8": 1e-3, "blockwise": 1e-3, "delayed": 5e-3}
OTHER_CODES |= {"tensorwise": 1e-2, "nvfp4": 2e-2, "hybrid": 2e-2}


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_in_one_grouped_layer_compute_what_experts_one_by_one_do(recipe, megatron):
    [(grouped, one_by_one)] = megatron(both_kinds_of_experts, 1, recipe)
    assert grouped == one_by_one
    assert grouped[-1] < 0.8 * grouped[0]


def both_kinds_of_experts(rank, recipe):
    import small_gpt

    built = []
    for grouped in (True, False):
        config = {**EXPERTS, "add_bias_linear": False, "moe_grouped_gemm": grouped}
        # What is rounded at random follows the order in which experts are computed.
        os.environ["NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"] = "1"
        if recipe == "hybrid":
            config["fp8_quantizer_factory"] = "crossgrain.recipe.zoo.mxfp8_fwd_high_precision_bwd_factory"
        options = small_gpt.Options(recipe=recipe, config=config, clip_grad=NEVER_CLIPPED)
        built.append((*small_gpt.build(options), options))
    grouped, alone = (dict(model.named_parameters()) for model, _, _ in built)
    with torch.no_grad():
        for name, parameter in alone.items():
            before, is_expert, after = name.partition("experts.local_experts.")
            index, _, layer = after.partition(".")
            parameter.copy_(grouped[f"{before}experts.{layer}{index}" if is_expert else name])
    built[1][1].reload_model_params()
    return tuple([loss for loss, _ in small_gpt.run(*each, STEPS)] for each in built)


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_over_two_ranks_compute_what_all_of_them_on_each_do(recipe, megatron):
    """Gradients of an expert are added up in another order, in float32; later a few numbers get other codes."""
    (start, everywhere), _ = megatron(train_experts, 2, recipe, 1, None)
    for _, shared in megatron(train_experts, 2, recipe, 2, start):
        assert shared[0] == pytest.approx(everywhere[0], rel=FIRST.get(recipe, ORDER_OF_SUMS))
        assert shared == pytest.approx(everywhere, rel=OTHER_CODES[recipe])


def train_experts(rank, recipe, ranks, start):
    """The parameters at first, those of ``start`` if given, and losses."""
    import small_gpt

    config = {**GROUPED, "expert_model_parallel_size": ranks}
    options = small_gpt.Options(recipe=recipe, bf16=False, config=config, clip_grad=NEVER_CLIPPED)
    model, optimizer = small_gpt.build(options)
    first = rank * 4 // ranks if ranks > 1 else 0
    with torch.no_grad():
        for name, parameter in model.named_parameters() if start is not None else ():
            before, is_expert, index = name.partition(".weight") if ".experts." in name else (name, "", "")
            parameter.copy_(start[f"{before}.weight{first + int(index)}" if is_expert else name])
    optimizer.reload_model_params()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return parameters, [loss for loss, _ in small_gpt.run(model, optimizer, options, STEPS)]


@pytest.mark.parametrize(
    "ranks, recipe",
    [(1, "mxfp8"), (1, "nvfp4"), (1, "hybrid"), (2, "tensorwise"), (2, "blockwise"), (2, "nvfp4"), (2, "hybrid")],
)
def test_experts_kept_quantized_change_no_bit(ranks, recipe, megatron):
    plain, kept = (
        megatron(losses, ranks, {**kept_options(recipe, ranks), "quantized_parameters": on}) for on in (0, 1)
    )
    assert kept == plain


def kept_options(recipe, ranks):
    config = {**GROUPED, "expert_model_parallel_size": ranks}
    options = {"recipe": recipe, "layers": 1, "config": config, "clip_grad": NEVER_CLIPPED}
    return {**options, "distributed_optimizer": True, "quantized_parameters": True}


def test_experts_in_mxfp8_are_not_divided_while_megatron_sets_everything_else_to_zero(megatron):
    for kind, text in megatron(error_of_training, 2, kept_options("mxfp8", 2)):
        assert kind == "ValueError" and "sets all parameters but the experts to zero" in text
    for warned, zero in megatron(warnings_and_zeros, 2, kept_options("mxfp8", 2)):
        assert warned == 1 and zero == {False: True, True: False}


def warnings_and_zeros(rank, options):
    """How many optimizers warn, and whether all parameters are zero after a step: of experts (True) and others."""
    import small_gpt

    small_gpt._refuse_what_megatron_gets_wrong = lambda options: None
    given = small_gpt.Options(**options)
    with logged() as caught:
        model, optimizer = small_gpt.build(given)
    next(small_gpt.run(model, optimizer, given, 1))
    largest = {False: 0.0, True: 0.0}
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name
        largest[is_expert] = max(largest[is_expert], parameter.detach().float().abs().max().item())
    told = [record for record in caught if "experts are kept in MXFP8" in record.getMessage()]
    return len(told), {is_expert: value == 0 for is_expert, value in largest.items()}
