"""Pictures are drawn from tensors of a model; here of one that has hardly been trained."""

from __future__ import annotations

import math
import re

import pytest

import crossgrain as cg
from docs.pictures import idea, speed
from docs.pictures.__main__ import draw_all
from docs.pictures.style import IMAGES
from docs.pictures.tensors import Operands, relative_error, trained_operands


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


def test_every_plane_is_read_by_one_gemm():
    planes = [plane for *_, pair in idea.READS for plane in pair]
    assert sorted(planes, key=str) == sorted(
        [(name, way) for name in ("input", "weight", "grad_output") for way in (cg.ROWWISE, cg.COLUMNWISE)], key=str
    )


def test_times_come_from_the_page():
    sizes, rows = speed.table(speed.PAGE.read_text(encoding="utf-8"))
    assert len(sizes) == 3 and len(rows) >= 5 and all(len(times) == 3 for _, times in rows)


@pytest.mark.long
def test_all_pictures_are_drawn(operands, tmp_path):
    for path in draw_all(operands, tmp_path):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("<?xml") and len(text) > 10_000
        assert (IMAGES / path.name).exists()


@pytest.mark.parametrize("path", sorted(IMAGES.glob("*.svg")), ids=lambda path: path.name)
def test_pictures_have_no_background_and_load_nothing(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r'(href|src)="https?:', text) and "<image" not in text
    patch = re.search(r'<g id="patch_1">\s*<path [^>]*style="([^"]*)"', text, re.DOTALL)
    assert patch is None or "fill: none" in patch[1] or "opacity: 0" in patch[1]
