"""`CrossgrainPrecision` in the real Lightning `Trainer`, against a plain loop, bit for bit."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import crossgrain as cg

pl = pytest.importorskip("pytorch_lightning", reason="pytorch-lightning is not installed: make test-clients")

from crossgrain.integrations.lightning import CrossgrainPrecision  # noqa: E402

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:pytorch_lightning", "ignore::FutureWarning")


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.body(x))

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 0:
            torch.manual_seed(2)

    def training_step(self, batch):
        # By step: Lightning does not go on with the same batch when it resumes.
        return self(BATCHES[self.global_step]).square().mean()

    def validation_step(self, batch):
        self.log("error", self(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


BATCHES = torch.randn(6, 4, 32, generator=torch.Generator().manual_seed(1))


def data():
    # With a generator of its own, which draws the seeds of its workers: none of the random numbers of training.
    data = torch.utils.data.TensorDataset(BATCHES[:3].flatten(0, 1))
    return torch.utils.data.DataLoader(data, batch_size=4, generator=torch.Generator())


def trainer(directory, plugin, steps=6, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        plugins=[plugin] if plugin else [],
        default_root_dir=directory,
        **{"enable_checkpointing": False, **quiet, **options},
    )


def loop(recipe, dtype=None):
    module = Module()
    cg.convert(module, recipe, skip="head")
    optimizer = module.configure_optimizers()
    torch.manual_seed(2)
    for x in BATCHES:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = module(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module


def fitted(directory, recipe, ckpt_path=None, steps=6, **options):
    module = Module()
    plugin = CrossgrainPrecision(recipe, skip="head", **options)
    this = trainer(directory, plugin, steps)
    this.fit(module, data(), ckpt_path=ckpt_path)
    return module, this


def assert_same(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-delayed"])
def test_training_is_that_of_a_plain_loop(recipe, dtype, tmp_path):
    module, this = fitted(tmp_path, recipe, autocast=dtype)
    assert_same(module, loop(recipe, dtype=dtype))
    assert type(this.precision_plugin) is CrossgrainPrecision
    assert list(this.precision_plugin.report.left) == ["head"]
    assert not torch.equal(module.head.weight, loop("hp").head.weight)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-delayed"])
def test_a_run_that_is_resumed_ends_with_the_same_bits(recipe, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    whole = Module()
    plugin = CrossgrainPrecision(recipe, skip="head")
    trainer(tmp_path, plugin, callbacks=[saver], enable_checkpointing=True).fit(whole, data())
    resumed, this = fitted(tmp_path, recipe, ckpt_path=tmp_path / "step=3.ckpt")
    assert this.global_step == 6
    assert_same(resumed, whole)
    Module.load_from_checkpoint(tmp_path / "step=3.ckpt")  # strict: the keys are those of torch


def test_histories_are_there_when_a_checkpoint_is_tested(tmp_path):
    module, this = fitted(tmp_path, "fp8-delayed")
    this.save_checkpoint(tmp_path / "whole.ckpt")
    other = Module()
    trainer(tmp_path, CrossgrainPrecision("fp8-delayed", skip="head")).validate(
        other, data(), ckpt_path=tmp_path / "whole.ckpt", verbose=False
    )
    assert_same(other, module)


def test_another_recipe_is_refused_unless_it_is_intended(tmp_path):
    _, this = fitted(tmp_path, "mxfp8", steps=3)
    this.save_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(ValueError, match="made with recipe '.*mxfp8.*', and it is '.*nvfp4.*' now"):
        fitted(tmp_path, "nvfp4", ckpt_path=tmp_path / "half.ckpt")
    fitted(tmp_path, "nvfp4", ckpt_path=tmp_path / "half.ckpt", allow_other_recipe=True)
    plain = trainer(tmp_path, None, 3)
    plain.fit(Module(), data())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match="made without crossgrain"):
        fitted(tmp_path, "mxfp8", ckpt_path=tmp_path / "plain.ckpt")


def test_histories_of_other_layers_are_refused(tmp_path):
    _, this = fitted(tmp_path, "fp8-delayed", steps=3)
    this.save_checkpoint(tmp_path / "half.ckpt")
    checkpoint = torch.load(tmp_path / "half.ckpt", weights_only=True)
    checkpoint["crossgrain"]["histories"]["other._extra_state"] = torch.empty(0, dtype=torch.uint8)
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="histories of layers that the module does not have: other._extra_state"):
        fitted(tmp_path, "fp8-delayed", ckpt_path=tmp_path / "other.ckpt")
