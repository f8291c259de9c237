"""Files of an Inspector are read again, and shown as a table."""

import json

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain.lab import Inspector, read_inspection


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    model[0].a_layer_with_a_very_long_name = nn.Linear(64, 64)
    cg.convert(model, "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)")
    x = torch.randn(32, 32, requires_grad=True)
    with Inspector(model, tmp_path / "stats.jsonl", every=2, what_if=["nvfp4", "mxfp8"]) as look:
        for _ in range(4):
            hidden = model[0].a_layer_with_a_very_long_name(model[0](x))
            model[1](hidden).square().mean().backward()
            look.step()
    return tmp_path / "stats.jsonl"


def test_the_table_has_the_largest_errors_of_each_gemm_first_in_80_columns(path):
    text = read_inspection(path).text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "step 2: planes with the largest errors, by GEMM"
    rows = [line.split() for line in lines if line.startswith(("fprop", "dgrad", "wgrad"))]
    assert [row[0] for row in rows] == ["fprop"] * 6 + ["dgrad"] * 6 + ["wgrad"] * 6
    for some in (rows[:6], rows[6:12], rows[12:]):
        ratios = [float(row[4]) for row in some]
        assert ratios == sorted(ratios)
    shown = [r for r in read_inspection(path).at() if (r["gemm"], r["layer"], r["tensor"]) == ("wgrad", "1", "input")]
    (row,) = [row for row in rows if row[:3] == ["wgrad", "1", "x"]]
    assert [row[4], row[8], row[9]] == [f"{record['snr_db']:.1f}" for record in shown]  # in use, A and B
    assert "A: signal-to-noise ratio, if it were nvfp4" in lines and "first bad step: none" in lines
    assert any("…h_a_very_long_name x  mxfp8" in line for line in lines)


def test_fewer_rows_are_shown_on_request_and_it_says_so(path):
    text = read_inspection(path).text(step=0, top=2)
    assert text.count("... and 4 with smaller errors") == 3 and text.startswith("step 0")


def test_a_step_without_a_look_is_refused(path):
    with pytest.raises(ValueError, match="there was no look at step 1; there was one at 0, 2"):
        read_inspection(path).at(1)


def test_of_several_runs_the_last_is_read(path):
    one = path.read_text()
    path.write_text(one + one.replace('"every":2', '"every":7'))
    read = read_inspection(path)
    assert read.header["every"] == 7 and read.steps == [0, 2] and read.runs == 2
    assert "The file has 2 runs; this is the last." in str(read)


def test_a_file_of_a_program_that_was_killed_is_read_up_to_there(path):
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    read = read_inspection(path)
    assert read.cut and read.end is None and read.records
    assert "The file ends within a line" in str(read)


def test_a_file_that_is_still_written_is_read(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    read = read_inspection(path)
    assert read.end is None and not read.cut and read.to_dict()["finished"] is False


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "it has no header"),
        ("hello\n", "line 1 is not JSON"),
        ('{"kind":"plane"}\n', "line 1 is not a header, and none came before"),
        ("[1]\n", "line 1 is not a header"),
        ('{"kind":"header","file_version":99}\n', "line 1 has version 99, not 1"),
        ('{"kind":"header","file_version":1}\n{"kind":"song"}\n', "line 2 is of no known kind"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_inspection(path)


def test_one_look_is_plain_data(path):
    found = read_inspection(path).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["steps"] == [0, 2] and found["first_bad_step"] is None and len(found["records"]) == 54


def test_an_inspector_that_saw_nothing_says_so():
    model = nn.Linear(4, 4)
    look = Inspector(model)
    assert "nothing was seen" in str(look.report())
