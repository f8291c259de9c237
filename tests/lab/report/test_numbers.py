"""Numbers and texts are small, and nothing of them is lost."""

import json

import pytest

from crossgrain.lab.report.numbers import Pieces, short, thinned


def test_numbers_are_short():
    assert json.dumps([short(x) for x in (0.123456789, 1.0, -2e-9, float("nan"), float("inf"), None, 0.0)]) == (
        "[0.12346, 1, -2e-09, null, null, null, 0]"
    )


def test_pieces_of_texts_are_stored_once():
    pieces = Pieces()
    texts = ["mxfp8; a|b: fprop: nvfp4, dgrad: hp", "mxfp8; b|a: fprop: nvfp4", "", "|;, "]
    numbers = [pieces.numbers_of(text) for text in texts]
    assert ["".join(pieces.all[i] for i in found) for found in numbers] == texts
    assert len(pieces.all) == len(set(pieces.all)) < sum(map(len, numbers))


@pytest.mark.parametrize("points, most", [(0, 5), (1, 5), (5, 5), (6, 5), (1000, 200), (999, 200)])
def test_long_curves_are_thinned_and_keep_their_end(points, most):
    found = list(thinned(points, most))
    assert len(found) <= most and found == sorted(found)
    assert not points or found[-1] == points - 1
    assert points > most or found == list(range(points))
