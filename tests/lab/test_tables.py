"""Tables of plain text."""

from crossgrain.lab.tables import aligned

ROWS = [["name", "a", "long one"], ["x", "1.25", "3"]]


def test_columns_are_as_wide_as_their_widest_cell():
    assert aligned(ROWS) == ["name  a     long one", "x     1.25  3"]
    assert aligned(ROWS, numbers=True) == ["name     a  long one", "x     1.25         3"]
