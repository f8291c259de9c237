"""The benchmarks run, and report every row they promise; what they measure depends on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import calls, first_use, groups, inspect, linear, models, others, products, small
from benchmarks.__main__ import QUICK_SHAPES, main
from benchmarks.timing import least_times
from crossgrain.formats import formats
from crossgrain.kernels.cpu.products import has_byte_dot_products

NAMES = {fmt.name for fmt in formats()} - {"identity"}  # as registered by the package alone
LAYERS = {"MXFP8", "NVFP4", "FP8 current", "FP8 delayed", "FP8 block", "MXFP8 forward, NVFP4 backward"}


@pytest.fixture
def quick(tmp_path, capsys):
    """What a quick run prints, and its JSON; a chart is drawn as well."""

    def run(*arguments: str) -> tuple[str, dict]:
        report, chart = tmp_path / "out" / "report.json", tmp_path / "out" / "chart.png"
        options = ("--quick", "--size", "128", "--repeats", "1", "--json", str(report), "--chart", str(chart))
        main([*arguments, *options])
        if "linear" in arguments or "kernels" in arguments:
            assert chart.read_bytes().startswith(b"\x89PNG")
        return capsys.readouterr().out, json.loads(report.read_text())

    return run


def test_kernels_of_every_format_in_every_direction(quick):
    threads = torch.get_num_threads()
    printed, report = quick("kernels")
    assert torch.get_num_threads() == threads
    timings = report["kernels"]["timings"]
    cases = {(timing["name"], timing["direction"]) for timing in timings}
    assert cases >= {(name, direction) for name in NAMES for direction in ("row", "column", "both")}
    assert ("mxfp8 | nvfp4 + RHT", "both") in cases
    assert all(timing["encode"] > 0 and timing["decode"] > 0 for timing in timings)
    assert report["environment"]["threads"] == 1
    assert report["environment"]["backend"] in printed
    assert all(name in printed for name in NAMES)


def test_models_by_all_recipes(quick):
    printed, report = quick("models")
    ours = {(t["model"], t["recipe"]) for t in report["models"] if t["library"] == "crossgrain"}
    assert ours >= {(model, recipe) for model in ("demo", "GPT") for recipe in models.RECIPES}
    assert all(t["ratio"] > 0 for t in report["models"])
    assert ("Llama" in printed) and ((models.NO_TRANSFORMERS in printed) == (find_spec("transformers") is None))


def test_threads_beside_one(quick):
    printed, report = quick("threads")
    assert [t["name"] for t in report["threads"]] == ["fp32", "MXFP8", "NVFP4", linear.HYBRID]
    assert "times faster" in printed and torch.get_num_threads() == 1


def test_small_calls(quick):
    printed, report = quick("small")
    assert {timing["name"] for timing in report["small"]} == set(small.quantizers())
    assert all(timing["quantize_us"] > 0 and timing["dequantize_us"] > 0 for timing in report["small"])
    assert "[64, 64]" in printed


def test_groups(quick):
    printed, report = quick("groups")
    cases = {(timing["name"], timing["experts"]) for timing in report["groups"]}
    assert cases == {(name, experts) for name in groups.quantizers() for experts in groups.EXPERTS}
    assert all(timing["one_by_one_ms"] > 0 and timing["together_ms"] > 0 for timing in report["groups"])
    assert "[128, 1024]" in printed
    assert sum(groups.uneven_sizes(4096, 64)) == 4096 and min(groups.uneven_sizes(4096, 64)) > 0


def test_bf16_products_that_would_end_the_process_are_left_out_with_a_reason(quick, monkeypatch):
    monkeypatch.setattr(products, "amx_problem", lambda: "they end the process")
    printed, report = quick("products", "--only", "bf16")
    assert report["products"] == [] and "bf16 by torch is left out: they end the process" in printed


def test_products(quick):
    printed, report = quick("products")
    rows = {(timing["format"], tuple(timing["shape"])) for timing in report["products"]}
    assert rows == {
        (name, shape) for name in (*products.FORMATS, products.BY_PANELS, products.BF16) for shape in QUICK_SHAPES
    }
    assert all(timing["ratio"] > 0 for timing in report["products"]) and "nvfp4" in printed


def test_layers_of_every_recipe_in_every_shape(quick):
    printed, report = quick("linear")
    rows = {(timing["library"], timing["name"], tuple(timing["shape"])) for timing in report["linear"]}
    assert rows == {("crossgrain", name, shape) for name in LAYERS for shape in QUICK_SHAPES}
    assert all(name in printed for name in LAYERS)


def test_targets_belong_to_layers_and_shapes_that_are_measured():
    assert linear.TARGETS.keys() <= linear.layers().keys() == LAYERS
    assert all(by_shape.keys() == set(linear.SHAPES) for by_shape in linear.TARGETS.values())


def test_a_selection_by_name(quick):
    _, report = quick("linear", "--only", "mxfp8")
    assert {timing["name"] for timing in report["linear"]} == {"MXFP8", linear.HYBRID}


def test_a_part_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["kernel"])
    assert "there is no part kernel" in capsys.readouterr().err


def test_without_torchao_one_line_says_how_to_get_it(quick, monkeypatch):
    monkeypatch.setattr(others, "installed", lambda: False)
    printed, report = quick("others")
    assert printed.splitlines()[-1] == others.HOW_TO_INSTALL
    assert report.keys() == {"environment"}


def test_conversions_stand_beside_a_clone():
    timings = others.run(128, {}, only="", repeats=1)
    assert [(t.library, t.name) for t in timings] == [
        ("torch", "clone"),
        ("crossgrain", "MXFP8"),
        ("crossgrain", "NVFP4"),
        ("crossgrain", "FP8 current"),
    ]
    assert len(others.rows(timings)) == 4


def test_with_torchao_its_rows_stand_beside_ours(quick):
    pytest.importorskip("torchao")
    printed, report = quick("others", "linear")
    for name in ("MXFP8", "NVFP4", "FP8 current"):
        assert {timing["library"] for timing in report["others"] if timing["name"] == name} == {"crossgrain", "torchao"}
    assert {t["name"] for t in report["linear"] if t["library"] == "torchao"} >= {"MXFP8", "FP8 current"}
    assert all(note in printed for note in report["notes"])


def test_what_another_library_cannot_do_is_a_note():
    def convert(x):
        raise RuntimeError("needs a GPU\nand a long explanation")

    notes: list[str] = []
    works = others._working({"a": len, "b": convert}, lambda what: what([]), notes)
    assert works == {"a": len}
    assert notes == ["torchao, convert: not on this machine: RuntimeError: needs a GPU"]


def test_what_an_inspector_costs(quick):
    printed, report = quick("inspect")
    cases = {(timing["recipe"], timing["what_if"]) for timing in report["inspect"]}
    assert cases == {(recipe, count) for recipe in inspect.RECIPES for count in (0, 2)}
    assert all(timing["step_seconds"] > 0 and timing["idle"] > 0 for timing in report["inspect"])
    assert "share" in printed


def test_what_the_first_step_compiles(quick):
    """In a process that has no compiled kernels, whatever this one has."""
    printed, report = quick("first-use")
    (timing,) = report["first_use"]
    assert timing["recipe"] == "mxfp8" and timing["seconds"] > 0.5 and "CPU seconds" in printed
    assert first_use.TARGETS.keys() <= {*first_use.RECIPES, first_use.EVERYTHING}


def test_slow_jobs_are_repeated_less_often():
    now, runs = 0.0, [0, 0]

    def job(index: int, takes: float) -> None:
        nonlocal now
        now += takes
        runs[index] += 1

    least = least_times([lambda: job(0, 1.0), lambda: job(1, 0.25)], repeats=10, clock=lambda: now)
    assert least == [1.0, 0.25]
    assert runs == [1 + 4, 1 + 10]  # one untimed run each; the first stops once it has used more than 3 s


# ---- calls of a step -----------------------------------------------------------------------------------

MOST_CALLS = {"MXFP8": (105, 65), "MXFP8 forward, NVFP4 backward": (110, 75), "NVFP4": (105, 75)}
DECODING = (250, 315)  # of NVFP4, on CPUs without dot products of bytes: it is decoded, not planned
MOST_FILES = 20


_STEPS = """
import json
from benchmarks import calls
from benchmarks.timing import one_thread
from tests.test_benchmarks import MOST_CALLS
from tests.test_layers import ROOMS

with one_thread():
    steps = {name: calls.step_of(calls.RECIPES[name]) for name in MOST_CALLS}
told = {
    name: [[len(walk.calls), walk.files, [str(call) for call in walk.upward(ROOMS)]] for walk in step]
    for name, step in steps.items()
}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def steps():
    """For each recipe, of forward and backward: number of calls, files, and calls that turn back.

    In a process of their own: where other tests have made formats that are equal, but not the same object, caches
    compare them, which are calls, too.
    """
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MOST_CALLS)
def test_a_step_of_a_linear_layer_takes_few_calls_and_never_turns_back(name, steps):
    """Of all Python code. Rooms call rooms below them: nothing is handed down to be called back."""
    (forward_calls, *_), (backward_calls, *_) = steps[name]
    decodes = "NVFP4" in name and not has_byte_dot_products()
    forward, backward = DECODING if decodes else MOST_CALLS[name]
    assert 0 < forward_calls <= forward and 0 < backward_calls <= backward, (forward_calls, backward_calls)
    for _, files, upward in steps[name]:
        assert not upward
        assert len(files) <= MOST_FILES + decodes, files


def test_the_counts_are_printed_with_the_walk(capsys):
    calls.main(["--recipe", "mxfp8", "--walk"])
    printed = capsys.readouterr().out
    assert "Python calls of one Linear" in printed
    assert "forward  linear/function.py" in printed and "gradients  linear/function.py" in printed


def test_sensitivity(quick):
    printed, report = quick("sensitivity", "--only", "mxfp8")
    (timing,) = report["sensitivity"]
    assert timing["candidate"] == "mxfp8" and timing["one_pass"] > 0 and timing["dgrad"] > 0
    assert "fprop and wgrad, all sites" in printed
