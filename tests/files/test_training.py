"""Training checkpoints: a run that is resumed is the run that was not interrupted, bit for bit."""

import contextlib
import gc
import hashlib
import json
import os
import random

import numpy as np
import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import files
from crossgrain import recipe as recipes
from crossgrain.files import DamagedFileError
from crossgrain.optim import FusedAdam, FusedSGD, with_masters

from ..common.saved_models import assert_same_contents, contents, quantized_model

RECIPES = {
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",  # stochastic rounding: random states matter
    "hybrid": "mxfp8-fwd-nvfp4-bwd",
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "nested": "fp8-delayed, wgrad: hp",
}
OPTIMIZERS = {
    "adam": lambda p: FusedAdam(p, lr=0.01, master_weights=True),
    "adam_fp8": lambda p: FusedAdam(
        p, lr=0.01, master_weights=True, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16
    ),
    "sgd": lambda p: FusedSGD(p, lr=0.01, momentum=0.9),
    "masters_of_adamw": lambda p: with_masters(torch.optim.AdamW, p, lr=0.01),
}


class Run:
    """Whatever a training script has."""

    def __init__(self, recipe, optimizer="adam", seed=0, preserve=True):
        self.recipe = recipe
        self.model = quantized_model(recipe, preserve=preserve, seed=seed)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.tracker = cg.CudaRNGStatesTracker()
        self.tracker.add("model-parallel-rng", seed + 100)

    def objects(self):
        names = ("model", "optimizer", "scheduler", "tracker")
        return {name: getattr(self, name) for name in names}

    def step(self):
        x = torch.randn(32, 32) * (1 + random.random()) + float(np.random.rand())
        with self.tracker.fork():
            x = nn.functional.dropout(x, 0.1)
        with cg.autocast(recipe=self.recipe):
            self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def everything(self):
        return contents([*self.objects().values(), self.scheduler.get_last_lr(), self.tracker.get_states()])


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize(
    "recipe, optimizer",
    [*((recipe, "adam") for recipe in RECIPES), *(("hybrid", optimizer) for optimizer in OPTIMIZERS)],
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_resumed_run_goes_on_bit_for_bit(recipe, optimizer, after, tmp_path):
    """Also from before the first step, where masters are still to be made from the preserved values."""
    run = Run(RECIPES[recipe], optimizer)
    seed_everything(1)
    for _ in range(after):
        run.step()
    files.save_checkpoint(tmp_path, after, **run.objects())
    for _ in range(3):
        run.step()
    resumed = Run(RECIPES[recipe], optimizer, seed=7)
    resumed.step()
    resumed = Run(RECIPES[recipe], optimizer, seed=7)
    done = files.load_checkpoint(tmp_path, **resumed.objects())
    assert done.step == after
    for _ in range(3):
        resumed.step()
    assert_same_contents(resumed.everything(), run.everything())


def test_plain_models_resume_too(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 8))
        cg.convert(model, "nvfp4; 2: mxfp8")
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model, optimizer):
        model(torch.randn(32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    step(model, optimizer)
    recipe = model[0].bound_recipe
    files.save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer)
    step(model, optimizer)
    other, other_optimizer = make()
    done = files.load_checkpoint(tmp_path, model=other, optimizer=other_optimizer)
    assert done.recipe() == recipe
    step(other, other_optimizer)
    assert_same_contents(contents([other, other_optimizer]), contents([model, optimizer]))


def test_extras_recipe_and_parts(tmp_path):
    run = Run("mxfp8")
    recipe = recipes.NVFP4BlockScaling(disable_rht=True)
    extras = {"epoch": 3, "losses": [0.5, 0.25], "seen": torch.arange(3), "name": "run"}
    path = files.save_checkpoint(tmp_path, 12, recipe=recipe, extras=extras, **run.objects())
    assert path.name == "step-00000012"
    state = torch.get_rng_state()
    torch.manual_seed(99)
    model = quantized_model("mxfp8", seed=3)
    done = files.load_checkpoint(path, random_state=False, model=model)
    assert_same_contents(contents(model), contents(run.model))
    assert not torch.equal(torch.get_rng_state(), state)
    assert done.recipe().options() == recipe.options()
    assert done.extras["epoch"] == 3 and torch.equal(done.extras["seen"], extras["seen"])
    assert done.step == 12 and done.path == path
    with pytest.raises(ValueError, match="the checkpoint .* has no sampler; it has model, optimizer"):
        files.load_checkpoint(path, sampler=model)


def test_recipes_of_converted_models_travel_by_themselves(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    files.save_safetensors(model, tmp_path / "file")
    assert files.read_safetensors(tmp_path / "file").recipe() is None
    cg.convert(model, "mxfp8; 1: hp")
    files.save_safetensors(model, tmp_path / "file")
    assert files.read_safetensors(tmp_path / "file").recipe() == model[0].bound_recipe
    files.save_safetensors(model, tmp_path / "file", recipe=None)
    assert files.read_safetensors(tmp_path / "file").recipe() is None
    model[1].bound_recipe = cg.GemmRecipe.load("nvfp4")
    for save in (
        lambda: files.save_safetensors(model, tmp_path / "file"),
        lambda: files.save_checkpoint(tmp_path, 1, model=model),
    ):
        with pytest.raises(ValueError, match="bound to 2 different recipes.* Pass recipe= with the recipe to store"):
            save()


def test_the_last_few_are_kept_and_steps_go_up(tmp_path):
    model = nn.Linear(2, 2)
    for step in (1, 2, 10, 300):
        files.save_checkpoint(tmp_path, step, keep=2, model=model)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000300"]
    assert files.latest_checkpoint(tmp_path).name == "step-00000300"
    for step in (300, 299):
        with pytest.raises(
            FileExistsError, match=f"already has a checkpoint of step 300, so step {step} cannot be saved"
        ):
            files.save_checkpoint(tmp_path, step, keep=2, model=model)
    assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000300"]
    assert files.load_checkpoint(tmp_path / "step-00000010", model=model).step == 10


def test_nothing_to_load_and_requests_that_cannot_be_met(tmp_path):
    assert files.latest_checkpoint(tmp_path) is None
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        files.load_checkpoint(tmp_path, model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="keep must be the number of checkpoints to keep, at least 1, got 0"):
        files.save_checkpoint(tmp_path, 1, keep=0)
    with pytest.raises(TypeError, match="model is a int; an object to save needs state_dict"):
        files.save_checkpoint(tmp_path, 1, model=3)
    with pytest.raises(ValueError, match="'extras.*|'random' is a name that checkpoints use internally"):
        files.save_checkpoint(tmp_path, 1, random=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="at module scope"):
        files.save_checkpoint(tmp_path, 1, recipe=recipes.CustomRecipe(qfactory=lambda role: None))
    assert os.listdir(tmp_path) == []


class Payload:
    def __reduce__(self):
        return print, ("code ran",)


@pytest.mark.parametrize("root", ["step-run", "step-7x", "ü ☃"])
def test_directories_may_have_any_name(root, tmp_path):
    model = nn.Linear(2, 2)
    saved = files.save_checkpoint(tmp_path / root, 3, model=model)
    (tmp_path / root / "step-²").mkdir()
    (tmp_path / root / "step-00000009").write_text("no directory")
    os.symlink(saved.name, tmp_path / root / "best")
    for path in (tmp_path / root, saved, tmp_path / root / "best"):
        assert files.load_checkpoint(path, model=model).step == 3


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.0, TypeError), ("3", TypeError)])
def test_steps_that_could_not_be_found_again_are_refused(step, error, tmp_path):
    with pytest.raises(error, match=f"step must be .*, got {step!r}"):
        files.save_checkpoint(tmp_path / "run", step, model=nn.Linear(2, 2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_steps_of_any_kind_of_integer(step, tmp_path):
    files.save_checkpoint(tmp_path, step, model=nn.Linear(2, 2))
    assert files.load_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", "/outside", ""])
def test_objects_stay_in_their_checkpoint(name, tmp_path):
    with pytest.raises(ValueError, match="cannot be the name of a file"):
        files.save_checkpoint(tmp_path / "run", 0, **{name: nn.Linear(2, 2)})
    assert not list(tmp_path.iterdir())


def test_what_could_not_be_loaded_safely_is_not_saved(tmp_path, capsys):
    for extras in ({"x": Payload()}, {"lr": np.float64(1.0)}, {"f": print}):
        with pytest.raises(TypeError, match="extras cannot be saved: .* neither a tensor nor plain data"):
            files.save_checkpoint(tmp_path, 1, model=nn.Linear(2, 2), extras=extras)
    assert os.listdir(tmp_path) == []
    assert "code ran" not in capsys.readouterr().out


# ---- damage ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = Run(RECIPES["delayed"])
    run.step()
    return files.save_checkpoint(tmp_path_factory.mktemp("whole"), 5, **run.objects())


@pytest.fixture
def saved(whole, tmp_path):
    (tmp_path / whole.name).mkdir()
    for file in whole.iterdir():
        (tmp_path / whole.name / file.name).write_bytes(file.read_bytes())
    return tmp_path / whole.name


def refuses(path, error=DamagedFileError, match="."):
    run = Run(RECIPES["delayed"], seed=3)
    run.step()
    before, states = run.everything(), (torch.get_rng_state(), random.getstate())
    with pytest.raises(error, match=match):
        files.load_checkpoint(path, **run.objects())
    assert_same_contents(run.everything(), before)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


NAMES = ["model.pt", "optimizer.pt", "scheduler.pt", "tracker.pt", "extras.pt", "random.pt"]


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_missing_cut_off_or_changed(saved, name):
    file, content = saved / name, (saved / name).read_bytes()
    file.write_bytes(content[:-10])
    refuses(saved, match=f"{name} is damaged: it has {len(content) - 10} bytes instead of {len(content)}")
    for place in (0, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        with pytest.raises(
            DamagedFileError, match=f"{name} is damaged: its checksum differs from the one in the manifest"
        ):
            files.verify_checkpoint(saved)
    refuses(saved, match="checksum differs from the one in the manifest")
    file.unlink()
    refuses(saved, match=f"{name} is missing, but the manifest lists it")


def test_a_damaged_manifest(saved):
    manifest = saved / "manifest.json"
    content = manifest.read_bytes()
    for changed in (content[:-5], content.replace(b'"step": 5', b'"step": 6'), b""):
        manifest.write_bytes(changed)
        refuses(saved, match="manifest.json is damaged")
    manifest.unlink()
    refuses(saved, FileNotFoundError, "is not a checkpoint: it has no manifest.json")
    for text in ("x", "[1]"):
        manifest.write_text(text)
        (saved / "manifest.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n")
        refuses(saved, match="is not a manifest")


def reseal(path, **changes):
    from crossgrain.files.manifest import digest_of

    content = json.loads((path / "manifest.json").read_text())
    for name in content["files"]:
        content["files"][name] = {"size": (path / name).stat().st_size, "sha256": digest_of(path / name)}
    (path / "manifest.json").write_text(json.dumps({**content, **changes}))
    (path / "manifest.sha256").write_text(f"{digest_of(path / 'manifest.json')}  manifest.json\n")


def test_versions_of_tomorrow(saved):
    reseal(saved, version=2)
    refuses(saved, match="unknown version 2; this crossgrain reads version 1")


@pytest.mark.parametrize("changes", [{"step": None}, {"recipe": 7}, {"objects": None}, {"files": {}}, {"files": None}])
def test_manifests_that_lack_something_with_the_right_checksum(saved, changes):
    reseal(saved, **changes)
    missing = "model.pt, .*, extras.pt, random.pt" if changes == {"files": {}} else next(iter(changes))
    refuses(saved, match=f"the manifest of .* is incomplete: it lacks {missing}")


def test_payloads_with_the_right_checksum_are_not_run(saved, capsys):
    torch.save(Payload(), saved / "optimizer.pt")
    reseal(saved)
    refuses(saved, match="optimizer.pt cannot be loaded")
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "tracker", "random"])
def test_states_that_do_not_fit_leave_everything_as_it_was(saved, name):
    """Whichever it is, what was loaded before it is put back."""
    content = torch.load(saved / f"{name}.pt", weights_only=True)
    if name == "model":
        content["2.weight"] = torch.zeros(3, 3)
    elif name == "optimizer":
        content["param_groups"][0]["params"].append(99)
    elif name == "scheduler":
        content = [1]
    elif name == "tracker":
        content = {"states": {}}
    else:
        content["torch"] = content["torch"][:10]
    torch.save(content, saved / f"{name}.pt")
    reseal(saved)
    refuses(saved, Exception)


def test_another_recipe_is_refused_and_taken_on_request(tmp_path):
    run, other = Run("mxfp8"), Run("nvfp4")
    files.save_checkpoint(tmp_path, 1, model=run.model)
    before = other.everything()
    with pytest.raises(ValueError, match=r"0\.weight: the checkpoint has mxfp8, the model has nvfp4_2d"):
        files.load_checkpoint(tmp_path, model=other.model)
    assert_same_contents(other.everything(), before)
    files.load_checkpoint(tmp_path, model=other.model, requantize=True)


# ---- manifests that somebody has changed and sealed again ------------------------------------------------


def rewrite(directory, change):
    path = directory / "manifest.json"
    content = change(path.read_bytes())
    path.write_bytes(content)
    (directory / "manifest.sha256").write_bytes(hashlib.sha256(content).hexdigest().encode() + b"  manifest.json\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"\xff" + text,
        lambda text: b"[" * 100_000,
        lambda text: text.replace(b'"files": {', b'"files": {"' + b"a" * 1_000_000 + b'": {"size": 1, "sha256": ""},'),
        lambda text: text.replace(b'"files": {', b'"files": {"../other": {"size": 1, "sha256": ""},'),
        lambda text: text.replace(b'"files": {', b'"files": {"a\\u0000b": {"size": 1, "sha256": ""},'),
        lambda text: text.replace(b'"size"', b'"sise"'),
        lambda text: text.replace(b'"files"', b'"filez"'),
    ],
    ids=["no text", "nested", "a name of 1 MB", "a name elsewhere", "a name with a zero", "no sizes", "no files"],
)
def test_a_manifest_that_was_sealed_again_is_damaged(tmp_path, change):
    model = torch.nn.Linear(4, 4)
    path = files.save_checkpoint(tmp_path, 1, model=model)
    rewrite(path, change)
    with pytest.raises(files.DamagedFileError):
        files.load_checkpoint(path, model=model)
    with pytest.raises(files.DamagedFileError):
        files.verify_checkpoint(path)


def test_an_object_with_a_name_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be the name of a file in a checkpoint"):
        files.save_checkpoint(tmp_path, 1, **{"a" * 1_000_000: torch.nn.Linear(4, 4)})
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_sealed_again_with_other_bytes_is_damaged(tmp_path):
    """Whatever torch raises for it."""
    model = torch.nn.Linear(4, 4)
    path = files.save_checkpoint(tmp_path, 1, model=model)
    for content in (b"", b"PK\x03\x04" + b"\xff" * 100, b"\x80\x02}q\x00."):
        (path / "model.pt").write_bytes(content)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["model.pt"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        rewrite(path, lambda _, manifest=manifest: json.dumps(manifest).encode())
        with pytest.raises(files.DamagedFileError):
            files.load_checkpoint(path, model=model)


def test_an_interrupt_while_torch_completes_a_file_does_not_end_the_process(tmp_path, monkeypatch):
    """torch completes the file when its own object is freed. It aborts the process if that fails."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(torch.serialization._open_zipfile_writer_buffer, "__exit__", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            files.save_checkpoint(tmp_path, 1, model=nn.Linear(2, 2))
        gc.collect()
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert os.listdir(tmp_path) == []
