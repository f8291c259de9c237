"""`CrossgrainCallback` in the real `transformers.Trainer`: conversion, resumption bit for bit, evaluation, files."""

from __future__ import annotations

import json

import pytest
import torch

import crossgrain as cg

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which is not installed: make test-clients")

from safetensors.torch import load_file, save_file  # noqa: E402

from crossgrain.integrations.transformers import CrossgrainCallback, convert_from  # noqa: E402
from crossgrain.integrations.wrappers import is_converted  # noqa: E402

from ..common.logs import warned  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def model_of(kind="llama"):
    torch.manual_seed(0)
    if kind == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
        return transformers.MixtralForCausalLM(config)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def rows(count, seed):
    tokens = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer_of(directory, model, callback, **options):
    arguments = transformers.TrainingArguments(
        str(directory),
        **{
            "max_steps": 4,
            "save_steps": 2,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **options,
        },
    )
    callbacks = [callback] if callback else []
    return transformers.Trainer(
        model, arguments, train_dataset=rows(24, 1), eval_dataset=rows(4, 2), callbacks=callbacks
    )


def trained(directory, recipe, kind="llama", resume=None, **options):
    model = model_of(kind)
    trainer = trainer_of(directory, model, CrossgrainCallback(recipe), **options)
    trainer.train(resume_from_checkpoint=resume)
    return model


def assert_same(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


RECIPES = ["mxfp8", "nvfp4", "fp8-delayed"]
OPTIONS = {
    "plain": {},
    "everything": {"gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_is_resumed_ends_with_the_same_bits(recipe, options, tmp_path):
    whole = trained(tmp_path / "whole", recipe, **OPTIONS[options])
    resumed = trained(tmp_path / "resumed", recipe, resume=str(tmp_path / "whole/checkpoint-2"), **OPTIONS[options])
    assert_same(resumed, whole)
    assert any(key.endswith("_extra_state") for key in whole.state_dict()) == (recipe == "fp8-delayed")


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
def test_experts_are_resumed_too(recipe, tmp_path):
    """transformers saves them under the names of the original checkpoint, which its Trainer does not load."""
    whole = trained(tmp_path / "whole", recipe, "mixtral")
    assert any(".w1." in key for key in load_file(tmp_path / "whole/checkpoint-2/model.safetensors"))
    resumed = trained(tmp_path / "resumed", recipe, "mixtral", resume=str(tmp_path / "whole/checkpoint-2"))
    assert_same(resumed, whole)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4(sr)", "fp8-delayed"])
def test_evaluation_in_between_changes_nothing(recipe, tmp_path):
    without = trained(tmp_path / "without", recipe)
    between = trained(tmp_path / "with", recipe, eval_strategy="steps", eval_steps=1)
    assert_same(between, without)


def test_training_is_that_of_a_converted_model(tmp_path):
    model = model_of()
    report = cg.convert(model, "mxfp8", skip="first 1 blocks")
    trainer_of(tmp_path / "plain", model, None).train()
    other = model_of()
    callback = CrossgrainCallback("mxfp8", skip="first 1 blocks")
    trainer = trainer_of(tmp_path / "ours", other, callback)
    assert str(callback.report) == str(report)  # converted already
    trainer.train()
    assert_same(other, model)
    high = model_of()
    trainer_of(tmp_path / "high", high, None).train()
    assert not torch.equal(high.lm_head.weight, other.lm_head.weight)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.5}
    model = model_of("mixtral")
    trainer = trainer_of(tmp_path, model, CrossgrainCallback("fp8-delayed"), **options)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    again = transformers.MixtralForCausalLM.from_pretrained(best)
    convert_from(again, best)
    assert_same(again, model)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_saved_model_goes_on_where_it_was(kind, tmp_path):
    model = trained(tmp_path / "run", "fp8-delayed", kind)
    model.save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model/crossgrain.json").read_text())["recipe"] == str(
        cg.recipe.as_recipe("fp8-delayed")
    )
    again = type(model).from_pretrained(tmp_path / "model")  # plain: histories are passed over
    assert not is_converted(again)
    convert_from(again, tmp_path / "model")
    assert_same(again, model)
    tokens = torch.arange(32).view(2, 16)
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, again)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert_same(again, model)


def test_every_saver_takes_a_model_with_histories(tmp_path):
    model = model_of()
    cg.convert(model, "fp8-delayed")
    tokens = torch.arange(32).view(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    save_file(model.state_dict(), tmp_path / "file")
    again = model_of()
    cg.convert(again, "fp8-delayed")
    again.load_state_dict(load_file(tmp_path / "file"))
    assert_same(again, model)
    model.save_pretrained(tmp_path / "model")
    _, about = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16, output_loading_info=True)
    assert not about["missing_keys"] and not about["mismatched_keys"]
    assert all(key.endswith("_extra_state") for key in about["unexpected_keys"])


def test_what_is_not_in_a_saved_directory(tmp_path):
    model = trained(tmp_path / "run", "fp8-delayed")
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert (tmp_path / "model/model.safetensors.index.json").exists()
    again = type(model).from_pretrained(tmp_path / "model")
    convert_from(again, tmp_path / "model")
    assert_same(again, model)
    shard = sorted((tmp_path / "model").glob("*.safetensors"))[0]
    shard.unlink()
    fresh = model_of()
    with pytest.raises(FileNotFoundError, match=f"has no {shard.name}, which .*index.json names"):
        convert_from(fresh, tmp_path / "model")
    assert not is_converted(fresh)
    (tmp_path / "model/model.safetensors.index.json").unlink()
    with warned("no histories of delayed scaling"):
        convert_from(fresh, tmp_path / "model")


# ---- the recipe in checkpoints ---------------------------------------------------------------------------


def test_another_recipe_is_refused_unless_it_is_intended(tmp_path):
    trained(tmp_path / "run", "mxfp8")
    checkpoint = str(tmp_path / "run/checkpoint-2")
    assert json.loads((tmp_path / "run/checkpoint-2/crossgrain.json").read_text())["recipe"] == str(
        cg.recipe.as_recipe("mxfp8")
    )
    with pytest.raises(ValueError, match="made with recipe '.*mxfp8.*', and it is '.*nvfp4.*' now.*allow_other_recipe"):
        trained(tmp_path / "other", "nvfp4", resume=checkpoint)
    trainer = trainer_of(tmp_path / "skip", model_of(), CrossgrainCallback("mxfp8", skip="first 1 blocks"))
    with pytest.raises(ValueError, match=r"made with skip \[\], and it is \['first 1 blocks'\] now"):
        trainer.train(resume_from_checkpoint=checkpoint)
    callback = CrossgrainCallback("nvfp4", allow_other_recipe=True)
    trainer_of(tmp_path / "intended", model_of(), callback).train(resume_from_checkpoint=checkpoint)


def test_a_checkpoint_of_another_training_is_refused_unless_it_is_intended(tmp_path):
    trainer_of(tmp_path / "run", model_of(), None).train()
    checkpoint = str(tmp_path / "run/checkpoint-2")
    with pytest.raises(ValueError, match="made without crossgrain"):
        trained(tmp_path / "other", "mxfp8", resume=checkpoint)
    callback = CrossgrainCallback("mxfp8", allow_other_recipe=True)
    trainer_of(tmp_path / "intended", model_of(), callback).train(resume_from_checkpoint=checkpoint)


def test_the_trainer_can_restore_the_callback(tmp_path):
    whole = trained(tmp_path / "run", "fp8-delayed")
    model = model_of()
    callback = CrossgrainCallback("fp8-delayed", log_every=0)
    options = {"restore_callback_states_from_checkpoint": True}
    trainer = trainer_of(tmp_path / "resumed", model, callback, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert_same(model, whole)


# ---- late conversion -------------------------------------------------------------------------------------


def test_a_callback_that_is_added_later_converts_when_training_begins(tmp_path):
    expected = trained(tmp_path / "run", "fp8-delayed")
    model, callback = model_of(), CrossgrainCallback("fp8-delayed")
    trainer = trainer_of(tmp_path / "late", model, None)
    trainer.add_callback(callback)
    assert callback.report is None
    trainer.train()
    assert_same(model, expected)
    late = trainer_of(tmp_path / "resumed", model_of(), None)
    late.add_callback(CrossgrainCallback("fp8-delayed"))
    with pytest.raises(RuntimeError, match="histories.*callbacks= of the Trainer"):
        late.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))


class Follows(transformers.TrainerCallback):
    def __init__(self, conversion):
        self.conversion = conversion

    def on_step_end(self, *args, **kwargs):
        self.conversion.step()


@pytest.mark.parametrize("change", [cg.unconvert, lambda model: cg.convert(model, "nvfp4")])
def test_a_model_that_was_changed_after_its_conversion_is_converted_again(change, tmp_path):
    expected = trained(tmp_path / "run", "mxfp8")
    model = model_of()
    trainer = trainer_of(tmp_path / "changed", model, CrossgrainCallback("mxfp8"))
    change(model)
    trainer.train()
    assert_same(model, expected)


@pytest.mark.parametrize(
    "schedule", ["nvfp4; last 25 % of steps: mxfp8", "fp8-delayed; from step 3: mxfp8", "nvfp4; from step 2: hp"]
)
def test_a_schedule_is_followed_and_resumed(schedule, tmp_path):
    whole = trained(tmp_path / "whole", schedule)
    model = model_of()
    conversion = cg.ScheduledConversion(model, schedule, 4)
    first = str(conversion.phase.recipe)
    trainer_of(tmp_path / "plain", model, Follows(conversion)).train()
    assert_same(whole, model)
    resumed = trained(tmp_path / "resumed", schedule, resume=str(tmp_path / "whole/checkpoint-2"))
    assert_same(resumed, whole)
    constant = trained(tmp_path / "constant", first)
    assert not torch.equal(whole.lm_head.weight, constant.lm_head.weight)
    state = json.loads((tmp_path / "whole/checkpoint-2/crossgrain.json").read_text())["schedule"]
    assert (state["steps_done"], state["total_steps"]) == (2, 4)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole/checkpoint-4")
    assert convert_from(again, tmp_path / "whole/checkpoint-4").recipe == conversion.report.recipe


def test_a_schedule_of_another_length_is_refused(tmp_path):
    schedule = "nvfp4; last 25 % of steps: mxfp8"
    trained(tmp_path / "whole", schedule)
    with pytest.raises(ValueError, match="total_steps=4, but here it is 6"):
        trained(tmp_path / "longer", schedule, resume=str(tmp_path / "whole/checkpoint-2"), max_steps=6)


def test_statistics_are_logged(tmp_path):
    model, callback = model_of(), CrossgrainCallback("fp8-delayed", log_every=2)
    trainer = trainer_of(tmp_path, model, callback)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert ["crossgrain/quantized_share" in entry for entry in logs] == [True, False, True, False]
    assert logs[0]["crossgrain/quantized_share"] == round(callback.report.quantized_share, 4)
    assert "crossgrain/saturated" in logs[2] and 0 <= logs[2]["crossgrain/saturated"] < 1
