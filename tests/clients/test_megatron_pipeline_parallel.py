"""Two ranks that have other layers of Megatron's GPT compute what one does, bit for bit where nothing is random."""

import pytest
import torch

from ..common.megatron_runs import NEVER_CLIPPED, STEPS, losses

OPTIONS = {"clip_grad": NEVER_CLIPPED, "layers": 4, "microbatches": 2}  # norms are added up in another order
PIPELINES = {"one by one": {"pipeline_parallel": 2}, "interleaved": {"pipeline_parallel": 2, "virtual_stages": 2}}
ZOO = "crossgrain.recipe.zoo."
NOT_RANDOM = {
    "delayed": {},
    "mxfp8": {},
    "hybrid": {"fp8_quantizer_factory": f"{ZOO}mxfp8_fwd_high_precision_bwd_factory"},
    "nvfp4": {"fp4_recipe": "custom", "fp4_quantizer_factory": f"{ZOO}nvfp4_row_scaled_fwd_mxfp8_bwd_factory"},
}


@pytest.mark.parametrize("recipe", NOT_RANDOM)
def test_stages_compute_what_one_rank_does(recipe, megatron):
    options = {**OPTIONS, "recipe": recipe, "config": NOT_RANDOM[recipe]}
    [(start, alone)] = megatron(train_stages, 1, options, None)
    for pipeline in PIPELINES.values():
        assert megatron(train_stages, 2, {**options, **pipeline}, start) == [alone, alone]


@pytest.mark.parametrize("recipe", ["nvfp4", "hybrid"])
def test_gradients_that_are_rounded_at_random_are_rounded_differently_by_stages(recipe, megatron):
    """Ranks draw numbers of their own: only what comes before the first gradient has the same bits."""
    options = {**OPTIONS, "recipe": recipe}
    [(start, alone)] = megatron(train_stages, 1, options, None)
    for found in megatron(train_stages, 2, {**options, **PIPELINES["one by one"]}, start):
        assert found[0] == alone[0]
        assert found == pytest.approx(alone, rel=0.02)


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "hybrid"])
def test_weights_kept_quantized_change_no_bit(recipe, pipeline, megatron):
    options = {**OPTIONS, **PIPELINES[pipeline], "recipe": recipe, "distributed_optimizer": True}
    plain, kept = (megatron(losses, 2, {**options, "quantized_parameters": on}) for on in (False, True))
    assert kept == plain


def train_stages(rank, options, start):
    """The parameters at first, those of ``start`` if given, by their names in the whole model, and losses."""
    import small_gpt

    given = small_gpt.Options(**options)
    model, optimizer = small_gpt.build(given)
    parameters = {}
    for stage in model:
        layers = unwrapped(stage).decoder.layers
        for name, parameter in unwrapped(stage).named_parameters():
            before, is_layer, after = name.partition("decoder.layers.")
            index, _, rest = after.partition(".")
            whole = f"{before}{is_layer}{layers[int(index)].layer_number}.{rest}" if is_layer else name
            parameters[whole] = parameter
    with torch.no_grad():
        for name, parameter in parameters.items() if start is not None else ():
            parameter.copy_(start[name])
    optimizer.reload_model_params()
    first = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    found = [loss for loss, _ in small_gpt.run(model, optimizer, given, STEPS)]
    return (first, found) if start is None else found


def unwrapped(stage):
    while hasattr(stage, "module"):
        stage = stage.module
    return stage
