"""A directory is complete or not there."""

import os

import pytest
import torch

import crossgrain as cg
from crossgrain.export import directory as directory_module
from crossgrain.export import writing

from .models import mlp, read

FORMAT = {"format": "compressed-tensors"}


def test_an_existing_directory_is_not_touched(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("text")
    for overwrite, message in ((False, "exists already"), (True, "is not the directory of an export")):
        with pytest.raises(FileExistsError, match=message):
            cg.export(mlp("mxfp8"), out, **FORMAT, overwrite=overwrite)
    assert [path.name for path in out.iterdir()] == ["mine"]
    with pytest.raises(FileExistsError, match="exists already"):
        cg.export(mlp("mxfp8"), out / "mine", **FORMAT)


def test_a_training_checkpoint_is_not_overwritten(tmp_path):
    model = mlp("mxfp8")
    path = cg.files.save_checkpoint(tmp_path / "run", 1, model=model)
    with pytest.raises(FileExistsError, match="is not the directory of an export"):
        cg.export(model, path, **FORMAT, overwrite=True)
    cg.files.verify_checkpoint(path)


def test_an_export_is_replaced_when_the_new_one_is_complete(tmp_path, monkeypatch):
    out = tmp_path / "out"
    first, second = mlp("mxfp8"), mlp("mxfp8")
    cg.export(first, out, **FORMAT)
    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_json", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            cg.export(second, out, **FORMAT, overwrite=True)
    assert torch.equal(read(out)["2.bias"], first[2].bias) and [path.name for path in tmp_path.iterdir()] == ["out"]
    cg.export(second, out, **FORMAT, overwrite=True)
    assert torch.equal(read(out)["0.bias"], second[0].bias)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
@pytest.mark.parametrize("where", ["_write_shard", "write_json", "write_manifest"])
def test_an_interrupted_export_leaves_nothing(error, where, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise error("stopped")

    monkeypatch.setattr(directory_module, where, fail)
    with pytest.raises(error):
        cg.export(mlp("mxfp8"), tmp_path / "deep" / "out", **FORMAT, max_shard_bytes=4000)
    assert not list((tmp_path / "deep").iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path):
    from crossgrain.files import durable

    left = tmp_path / f".writing-{durable._host()}-999999999-abcdef01-out"
    left.mkdir()
    cg.export(mlp("mxfp8"), tmp_path / "out", **FORMAT)
    assert os.listdir(tmp_path) == ["out"]
