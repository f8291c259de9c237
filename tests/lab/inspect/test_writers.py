"""Where records go: files of JSON lines, TensorBoard as its own program reads it, Weights & Biases."""

import builtins
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.lab import Inspector, JsonlWriter, TensorBoardWriter, WandbWriter, read_inspection
from crossgrain.lab.inspect import writers


def trained(to, steps=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    cg.convert(model, "nvfp4(sr)")
    x = torch.randn(32, 32, requires_grad=True)
    with Inspector(model, to, every=1, what_if="mxfp8") as look:
        for _ in range(steps):
            model(x).square().mean().backward()
            look.step()
    return look


def test_a_file_has_a_header_all_records_and_an_end(tmp_path):
    path = tmp_path / "new" / "stats.jsonl"
    look = trained(path)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["header", *(["plane"] * 24 + ["look"]) * 2, "end"]
    read = read_inspection(path)
    assert read.steps == [0, 1] and len(read.records) == 48
    # JSON has no numbers as keys.
    assert json.loads(json.dumps(look.report().records)) == read.at(1)
    assert read.end["steps"] == 2 and read.header["what_if"] == {"mxfp8": "fprop: mxfp8, dgrad: mxfp8, wgrad: mxfp8"}
    assert read.not_seen() == look.report().not_seen() == {}


def test_several_writers_get_the_same(tmp_path):
    trained([tmp_path / "a.jsonl", JsonlWriter(tmp_path / "b.jsonl")])
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()


def test_numbers_that_json_does_not_have_are_null(tmp_path):
    writer = JsonlWriter(tmp_path / "stats.jsonl")
    writer.begin({"a": float("nan"), "b": [float("inf"), 1], "c": {1: 2.5}})
    assert writer.path.read_text() == '{"a":null,"b":[null,1],"c":{"1":2.5}}\n'


def test_each_rank_has_its_own_file(tmp_path, monkeypatch):
    monkeypatch.setattr(writers.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(writers.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(writers.dist, "get_rank", lambda: 3)
    assert JsonlWriter(tmp_path / "stats.jsonl").path == tmp_path / "stats.rank3.jsonl"


def test_tensorboard_reads_what_was_written(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    look = trained(TensorBoardWriter(tmp_path / "board"))
    board = events.EventAccumulator(str(tmp_path / "board"), size_guidance={"histograms": 0})
    board.Reload()
    last = {writers.tag_of(record): record for record in look.report().records}
    tags = board.Tags()
    for tag, record in last.items():
        scalar = board.Scalars(f"{tag}/snr_db")
        assert [point.step for point in scalar] == [0, 1]
        assert scalar[-1].value == pytest.approx(record["snr_db"], rel=1e-6)  # stored in float32
        assert f"{tag}/block_error 99%" in tags["scalars"]
        histogram = board.Histograms(f"{tag}/log2 of scales")[-1].histogram_value
        assert histogram.num == sum(record["scale_histogram"].values())
        assert (histogram.min, histogram.max) == (record["scale_log2_min"], record["scale_log2_max"])
        buckets = {limit - 0.5: count for limit, count in zip(histogram.bucket_limit, histogram.bucket, strict=True)}
        assert {e: n for e, n in buckets.items() if n} == {float(e): n for e, n in record["scale_histogram"].items()}
    assert "0/grad_output/rowwise/noise" in tags["scalars"]
    assert "what if mxfp8/0/input/rowwise/relative_error" in tags["scalars"]
    assert "crossgrain inspect/text_summary" in tags["tensors"]


def test_a_summary_writer_of_the_caller_stays_open(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as board:
        trained(TensorBoardWriter(board), steps=1)
        board.add_scalar("mine", 1.0, 0)


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in that keeps what it is given."""
    logged = []
    run = SimpleNamespace(
        logged=logged, config={}, summary={}, log=lambda values, step=None: logged.append((step, values))
    )
    run.config = SimpleNamespace(update=lambda values, allow_val_change: vars(run.config).update(values))
    module = ModuleType("wandb")
    module.run, module.Histogram = run, lambda np_histogram: np_histogram
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_gets_curves_and_histograms(wandb):
    look = trained(WandbWriter())
    run = wandb.run
    assert [step for step, _ in run.logged] == [0, 1]
    for record in look.report().records:
        tag = writers.tag_of(record)
        values = run.logged[-1][1]
        assert values[f"{tag}/relative_error"] == record["relative_error"]
        counts, edges = values[f"{tag}/log2 of scales"]
        assert sum(counts) == sum(record["scale_histogram"].values()) and len(edges) == len(counts) + 1
    assert run.config.crossgrain_inspect["every"] == 1
    assert run.summary["crossgrain_inspect"]["steps"] == 2


def test_a_program_that_counts_for_itself_gets_no_step(wandb):
    trained(WandbWriter(log_steps=False), steps=1)
    step, values = wandb.run.logged[0]
    assert step is None and values["crossgrain/step"] == 0


def test_without_a_run_it_says_what_to_do(wandb):
    wandb.run = None
    with pytest.raises(RuntimeError, match="call wandb.init before"):
        WandbWriter()


@pytest.mark.parametrize("writer, package", [(TensorBoardWriter, "tensorboard"), (WandbWriter, "wandb")])
def test_a_missing_package_is_named_with_the_extra(writer, package, monkeypatch):
    real = builtins.__import__

    def refuse(name, *arguments, **options):
        if name in ("torch.utils.tensorboard", "wandb"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=f"pip install 'crossgrain\\[{package}\\]'"):
        writer("somewhere") if package == "tensorboard" else writer()
