"""The scripts that users run first do run, and show what they say they show."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from crossgrain.formats import formats

ROOT = Path(__file__).parent.parent
NAMES = {fmt.name for fmt in formats()}  # as registered by the package alone, before any test adds some


def run(
    script: str, *arguments: str | Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the script prints when it is run as a program, in this process, on a terminal of 100 columns."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "100")
    runpy.run_path(str(ROOT / script), run_name="__main__")
    return capsys.readouterr().out


def test_quickstart_stores_both_directions(monkeypatch, capsys):
    printed = run("examples/quickstart.py", monkeypatch=monkeypatch, capsys=capsys)
    assert "{'rowwise': True, 'columnwise': True}" in printed
    assert "rowwise: 8.25 bits per element" in printed
    assert "columnwise: 8.25 bits per element" in printed


@pytest.fixture
def demo(tmp_path, monkeypatch, capsys):
    """The rows of the demo's table by format, and the picture it drew."""
    printed = run(
        "examples/formats.py", "--size", "128", "--out", tmp_path / "out", monkeypatch=monkeypatch, capsys=capsys
    )
    assert max(map(len, printed.splitlines())) <= 100
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows}, tmp_path / "out" / "formats.png"


def test_demo_measures_every_format_and_the_variants_of_nvfp4(demo):
    table, _ = demo
    variants = {"nvfp4 + RHT", "nvfp4 + SR", "nvfp4 + RHT + SR", "nvfp4 + 4-over-6"}
    assert table.keys() >= NAMES | variants
    assert table["identity"] == ["16.00", "0", "exact", "0", "exact"]


def test_demo_finds_more_bits_closer_to_the_matrix(demo):
    table, _ = demo
    for snr in (2, 4):
        four, six, eight = (float(table[name][snr]) for name in ("mxfp4", "mxfp6_e2m3", "mxfp8"))
        assert 10 < four < six < eight < 40


def test_demo_draws_a_picture(demo):
    _, picture = demo
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[start : start + 4]) for start in (16, 20))
    assert width > 1000
    assert height > 1000
    assert len(content) > 20_000


def test_gradient_error_of_each_gemm(monkeypatch, capsys):
    printed = run("examples/gradient_error.py", monkeypatch=monkeypatch, capsys=capsys)
    rows = [line.split() for line in printed.splitlines() if line.startswith(("nvfp4 ", "mxfp8 ", "fp8 "))]
    found = {(name, gemms): [float(cell) for cell in cells] for name, gemms, *cells in rows}
    assert found.keys() == {
        (name, gemms) for name in ("nvfp4", "mxfp8", "fp8") for gemms in ("fprop", "dgrad", "wgrad", "all")
    }
    for (name, gemms), (error, cosine, input_error, input_cosine) in found.items():
        assert 0 < error < 1 and 0.5 < cosine <= 1 and 0.5 < input_cosine <= 1
        assert (input_error == 0) == (gemms == "wgrad")  # what the input gets does not go through wgrad
        assert error <= found[name, "all"][0]
        if name != "nvfp4":
            assert error < found["nvfp4", gemms][0]


def test_a_compiled_gpt_computes_as_in_eager(monkeypatch, capsys):
    printed = run("examples/compile_gpt.py", "--backend", "aot_eager", monkeypatch=monkeypatch, capsys=capsys)
    torch.compiler.reset()
    losses = re.findall(r"loss ([\d.]+), in eager ([\d.]+)", printed)
    assert len(losses) == 4 and all(compiled == eager for compiled, eager in losses)


def test_offloading_moves_the_bytes_and_changes_no_loss(monkeypatch, capsys):
    printed = run(
        "examples/offload.py",
        "--width",
        "64",
        "--layers",
        "2",
        "--min-bytes",
        "1",
        monkeypatch=monkeypatch,
        capsys=capsys,
    )
    rows = re.findall(r"(\w+) +kept +([\d.]+) MiB, stored +([\d.]+) MiB, .* losses (.*)", printed)
    (_, in_memory, nothing, losses), *moved = rows
    assert [row[0] for row in rows] == ["memory", "host", "file"]
    assert float(in_memory) > 0 and float(nothing) == 0
    for _, kept, stored, same in moved:
        assert float(kept) == 0 and 0 < float(stored) <= float(in_memory)
        assert same == losses


def test_a_run_with_everything_happening_is_the_run_left_alone(monkeypatch, capsys):
    options = ("--steps", "36", "--validate", "5", "--resume", "6")
    printed = run("examples/soak.py", *options, monkeypatch=monkeypatch, capsys=capsys)
    assert "36 steps twice, 5 resumes, and every loss the same" in printed


def test_mixture_of_experts_has_an_expert_without_tokens(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    printed = run("examples/moe.py", "--steps", "2", monkeypatch=monkeypatch, capsys=capsys)
    assert len(re.findall(r"step \d: loss 0\.\d{6}\n", printed)) == 2
    assert re.search(r"first rank: \[\d+, 0, ", printed)


def test_the_lab_is_compared_with_the_truth(tmp_path, monkeypatch, capsys):
    arguments = ("--layers", "1", "--width", "32", "--steps", "2", "--parts", "forward", "--out", tmp_path)
    printed = run("examples/lab_truth.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert '"pearson"' in printed and (tmp_path / "1x32x2" / "truth.json").exists()
