"""What a page shows without JavaScript."""

from crossgrain.lab import Sensitivity
from crossgrain.lab.intervals import with_spread
from crossgrain.lab.report.numbers import short

from . import samples


def test_without_javascript_there_are_tables_of_all_numbers(written):
    result = samples.sensitivity()
    page = written(sensitivity=result)
    for effects in result.effects.values():
        for effect in effects.values():
            for value in filter(None, vars(effect).values()):
                assert with_spread(short(value.mean), (short(value.high) - short(value.low)) / 2) in page.cells


def test_what_may_be_claimed_is_in_the_page(written):
    arguments = samples.small_report()
    source = written(**arguments).source
    assert "found: from this start, on this data, the mean gap to high precision" in source
    assert "The final loss of a longer training" in source
    alone = written(sensitivity=arguments["sensitivity"]).source
    assert "no paired runs are in this report" in alone and "The final loss" in alone


def test_what_was_left_out_and_notes_are_in_the_page(written):
    result = samples.sensitivity()
    result.left_out["blocks.0.norm"], result.interrupted = "it has no weight <matrix>", True
    result.notes.append("a note & more")
    source = written(sensitivity=result).source
    assert "blocks.0.norm: it has no weight &lt;matrix&gt;" in source and "a note &amp; more" in source
    assert "The measurement was stopped early" in source


def test_a_measurement_that_was_stopped_at_once_can_be_shown(written):
    page = written(sensitivity=Sensitivity("mxfp8", samples.FORMATS, interrupted=True))
    assert page.data["layers"] == [] and page.data["points"] == []
