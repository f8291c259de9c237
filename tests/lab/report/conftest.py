"""Reports that are written and read again."""

import pytest

from crossgrain.lab import write_report

from .pages import Page


@pytest.fixture
def written(tmp_path):
    def write(**arguments):
        write_report(tmp_path / "report.html", **arguments)
        return Page(tmp_path / "report.html")

    return write
