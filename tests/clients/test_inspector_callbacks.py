"""`InspectorCallback` in the real Trainers of transformers and Lightning: it sees their steps, and changes no bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from crossgrain.lab import read_inspection
from crossgrain.quantizers import observer


def same(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    return [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


# ---- transformers --------------------------------------------------------------------------------------------


def trained_by_transformers(directory, looks, **options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-clients")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate: make test-clients")
    from crossgrain.integrations.transformers import CrossgrainCallback, InspectorCallback

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(64, (24, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    callbacks = [CrossgrainCallback("nvfp4")]
    if looks:
        callbacks.append(InspectorCallback(directory / "stats.jsonl", every=2, what_if=["mxfp8"]))
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "use_cpu": True, "save_strategy": "no"}
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, **quiet, **options}
    arguments = transformers.TrainingArguments(str(directory / "out"), **given)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)
    trainer.train()
    return model, callbacks[-1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1},
        {"gradient_checkpointing": True},
    ],
)
def test_transformers(tmp_path, options):
    plain, _ = trained_by_transformers(tmp_path, False, **options)
    seen, callback = trained_by_transformers(tmp_path, True, **options)
    assert same(plain, seen) and observer.observers == ()
    read = read_inspection(tmp_path / "stats.jsonl")
    assert read.steps == [0, 2] and read.end["steps"] == 4
    in_use = [record for record in read.at(2) if record["what_if"] is None]
    assert len({record["layer"] for record in in_use}) == 7
    assert len(in_use) == 7 * 6
    assert {record["calls"] for record in in_use} == {options.get("gradient_accumulation_steps", 1)}
    assert read.first_bad_step() is None is callback.inspector.first_bad_step()
    assert read.not_seen() == {} and list(read.not_quantized()) == ["lm_head"]


# ---- Lightning -----------------------------------------------------------------------------------------------


def fitted_by_lightning(directory, looks, *, fail_at=None, **options):
    pl = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed: make test-clients")
    from crossgrain.integrations.lightning import CrossgrainPrecision, InspectorCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def training_step(self, batch):
            if self.global_step == fail_at:
                raise ZeroDivisionError
            return self.body(batch[0]).square().mean()

        def validation_step(self, batch):
            self.body(batch[0])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4, generator=torch.Generator())
    module, callback = Module(), InspectorCallback(directory / "stats.jsonl", every=2) if looks else None
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        plugins=[CrossgrainPrecision("nvfp4")],
        callbacks=[callback] if looks else [],
        default_root_dir=directory,
        enable_checkpointing=False,
        **quiet,
        **options,
    )
    torch.manual_seed(3)
    trainer.fit(module, data, data)
    return module, callback


@pytest.mark.filterwarnings("ignore:.*:UserWarning:pytorch_lightning", "ignore::FutureWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(tmp_path, accumulate):
    plain, _ = fitted_by_lightning(tmp_path, False, accumulate_grad_batches=accumulate)
    seen, callback = fitted_by_lightning(tmp_path, True, accumulate_grad_batches=accumulate)
    assert same(plain, seen) and observer.observers == ()
    read = read_inspection(tmp_path / "stats.jsonl")
    assert read.steps == [0, 2] and read.end["steps"] == 4
    assert {record["calls"] for record in read.records} == {accumulate}
    assert {record["layer"] for record in read.records} == {"body.0", "body.2"}
    assert str(callback.inspector.report()).startswith("step 2: planes with the largest errors")


@pytest.mark.filterwarnings("ignore:.*:UserWarning:pytorch_lightning", "ignore::FutureWarning")
def test_a_run_of_lightning_that_fails_is_written_and_no_longer_observed(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fitted_by_lightning(tmp_path, True, fail_at=3)
    assert observer.observers == ()
    assert read_inspection(tmp_path / "stats.jsonl").end["steps"] == 3
