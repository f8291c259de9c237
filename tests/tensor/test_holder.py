"""Aliases that have no plane in common, or no longer: what one of them writes, the others have missed."""

import pytest

import crossgrain as cg
from crossgrain.planes import COLUMNWISE, ROWWISE


def assert_stale(tensor, direction):
    with pytest.raises(RuntimeError, match=f"{direction.value} .* stale"):
        tensor.dequantize(direction=direction)


def test_a_write_to_an_alias_with_other_planes_makes_the_original_stale(x):
    q = cg.quantize(x, "nvfp4_2d", columnwise=False)
    alias = q.detach()
    alias.update_usage(rowwise_usage=False, columnwise_usage=True)
    alias.quantize_(x * 2)
    assert_stale(q, ROWWISE)
    q.quantize_(x * 3)
    q.dequantize()
    assert_stale(alias, COLUMNWISE)


@pytest.mark.parametrize("name", ["mxfp8", "fp8_block", "nvfp4"])
def test_aliases_that_kept_one_direction_each_notice_every_write_of_the_other(name, x):
    q = cg.quantize(x, name)
    rows, columns = q.detach(), q.detach()
    rows.update_usage(columnwise_usage=False)
    columns.update_usage(rowwise_usage=False)
    for factor in (2, 3):
        rows.quantize_(x * factor)
        rows.dequantize()
        assert_stale(columns, COLUMNWISE)
        assert_stale(q, COLUMNWISE)
        columns.quantize_(x * factor)
        columns.dequantize()
        assert_stale(rows, ROWWISE)
        assert_stale(q, ROWWISE)
    q.quantize_(x)
    for tensor in (q, rows, columns):
        tensor.dequantize()


def test_a_slice_that_is_stale_itself_makes_stale_what_misses_its_write(x):
    q = cg.quantize(x, "mxfp8")
    columns, part = q.detach(), q[:32]
    columns.update_usage(rowwise_usage=False)
    columns.quantize_(x * 2)
    part.update_usage(columnwise_usage=False)
    part.quantize_(x[:32] * 3)  # rows that are stale elsewhere stay so
    assert_stale(q, ROWWISE)
    assert_stale(q, COLUMNWISE)
    assert_stale(columns, COLUMNWISE)
