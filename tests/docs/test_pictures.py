"""Pictures show what was measured, and pages say what the pictures show."""

from __future__ import annotations

import math
import re

import pytest

import crossgrain as cg
from docs.pictures import speed
from docs.pictures.__main__ import draw_all
from docs.pictures.measurements import DRAWS, READS, Measurements, averaged
from docs.pictures.style import IMAGES
from docs.pictures.tensors import Operands, relative_error, trained_operands
from tests.common.documentation import DOCS, ROOT


@pytest.fixture(scope="module")
def operands() -> list[Operands]:
    return trained_operands("tiny", steps=1)


def test_operands_are_those_of_each_gemm(operands):
    assert [each.layer for each in operands[:2]] == ["blocks.0.attention.qkv", "blocks.0.attention.proj"]
    for each in operands:
        (tokens, inputs), (outputs, _) = each.x.shape, each.weight.shape
        assert each.weight.shape == (outputs, inputs) and each.dy.shape == (tokens, outputs)
        assert each.dy.abs().sum() > 0


def test_an_error_is_that_of_the_plane(operands):
    x = operands[0].x
    decoded = cg.quantize(x, "mxfp4", rowwise=False).dequantize(direction=cg.COLUMNWISE)
    expected = float((decoded.double() - x.double()).norm() / x.double().norm())
    assert math.isclose(relative_error(x, "mxfp4", cg.COLUMNWISE), expected, rel_tol=1e-12)
    assert relative_error(x, "hp", cg.ROWWISE) == 0


def test_only_stochastic_rounding_averages_out(operands):
    gradient = operands[0].dy
    nearest, stochastic = averaged(gradient, "nvfp4"), averaged(gradient, "nvfp4(sr)")
    assert len({f"{value:.6g}" for value in nearest}) == 1 and len(nearest) == len(DRAWS)
    assert stochastic[0] > nearest[0] > 2 * stochastic[-1]


def test_every_plane_is_read_by_one_gemm():
    planes = {plane for pair in READS.values() for plane in pair}
    assert planes == {(name, way) for name in ("input", "weight", "grad_output") for way in (cg.ROWWISE, cg.COLUMNWISE)}


@pytest.mark.long
def test_a_model_is_measured(operands):
    found, shown = Measurements.of(operands), Measurements.load()
    assert found.planes.keys() == {name.replace("blocks.3", "blocks.1") for name in shown.planes}
    assert found.formats.keys() == shown.formats.keys() == found.directions.keys()
    assert all(0 < error < 100 for row in found.planes.values() for error in row)


def test_times_come_from_the_page():
    sizes, rows = speed.table(speed.PAGE.read_text(encoding="utf-8"))
    assert len(sizes) == 3 and len(rows) >= 5 and all(len(times) == 3 for _, times in rows)


def test_pictures_are_those_of_the_numbers(tmp_path):
    for path in draw_all(Measurements.load(), tmp_path):
        assert path.read_bytes() == (IMAGES / path.name).read_bytes(), "run: python -m docs.pictures"


def numbers_said(picture: str) -> list[str]:
    """All numbers with decimals in the alternative texts of a picture."""
    pages = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    texts = re.findall(rf"!\[([^\]]*)\]\([^)]*{picture}\.svg\)", pages)
    assert texts
    return [number for text in texts for number in re.findall(r"\d+\.\d+", text)]


def test_alternative_texts_say_what_was_measured():
    measured = Measurements.load()
    _, times = speed.table(speed.PAGE.read_text(encoding="utf-8"))
    shown = {
        "idea": [error for row in measured.planes.values() for error in row],
        "error-bits": list(measured.formats.values()),
        "rounding": [error for row in measured.rounding.values() for error in row],
        "speed": [time for _, row in times for time in row],
    }
    for picture, values in shown.items():
        for number in numbers_said(picture):
            digits = len(number.partition(".")[2])
            assert number in {f"{value:.{digits}f}" for value in values}, f"{picture}: {number}"


def test_directions_differ_as_the_page_says():
    measured = Measurements.load().directions
    page = (DOCS / "explanation" / "directions.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (\d+) % \|$", page, re.MULTILINE))
    assert said.keys() == {"mxint8", "mxfp6_e2m3", "mxfp4", "nvfp4", "mxfp8"}
    assert said == {name: f"{measured[name]:.0f}" for name in said}


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.name)
def test_pictures_have_no_background_and_load_nothing(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r'(href|src)="https?:', text) and "<image" not in text
    patch = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', text, re.DOTALL)
    assert patch is None or "fill: none" in patch[1] or "opacity: 0" in patch[1]
