"""Planes of a weight that follow from its rows, when the codes of the rows come from several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..planes import COLUMNWISE, ROWWISE, Plane, same_codes_in_both
from ..quantizers.hybrid_tensor import HybridQuantizedTensorStorage
from ..tensor import QuantizedTensor, QuantizedTensorStorage
from ..tensor.holder import next_write_number
from ..tensor.storage import copy_plane


def columns_made_from_rows(weight: Any) -> QuantizedTensorStorage | None:
    """The columnwise child of a hybrid that is made from its rowwise child."""
    if not isinstance(weight, HybridQuantizedTensorStorage):
        return None
    quantizer, children = weight._get_quantizer(), weight._children()
    derived = quantizer.derives_columns and len(children) == 2
    return children[COLUMNWISE] if derived else None


def make_columns_from_rows(weight: Any, columns: QuantizedTensorStorage) -> None:
    """Write them from what the rowwise child decodes to."""
    quantizer = weight._get_quantizer()
    rows = weight._children()[ROWWISE]._decoded(weight.dtype, None)
    quantizer._write_together(rows.reshape(weight.shape), {COLUMNWISE: columns})


def _transposed_columns(weight: QuantizedTensorStorage) -> Plane | None:
    """The columnwise plane that holds the same codes as the rowwise one."""
    planes = {plane.direction: plane for plane in weight.planes()}
    row, column = planes.get(ROWWISE), planes.get(COLUMNWISE)
    if isinstance(weight, HybridQuantizedTensorStorage) or row is None or column is None:
        return None
    return column if same_codes_in_both(row.format, column.format) else None


def leave_for_processing(weight: QuantizedTensor, manual: bool) -> None:
    """Codes of other ranks will come into the rows behind our back: no old columns may be read."""
    if _transposed_columns(weight) is None:
        return
    if manual:
        weight._epochs[ROWWISE].number = next_write_number()
    else:
        weight.update_usage(columnwise_usage=False)


_places = itertools.count(1)


def note_place(weight: QuantizedTensorStorage) -> None:
    """To be called for the same weights in the same order on all ranks."""
    if not weight._place:
        weight._place = next(_places)


def post_all_gather_processing(model_weights: Any) -> None:
    """Make what follows from the rows, after codes of all ranks have been gathered into them.

    Weights may come in any order, as from a set: amaxes are reduced over tensor parallel ranks in the order in which
    `replace_raw_data` and `quantize_master_weights` have seen them.

    Columns with the same codes as the rows are transposed, columns of hybrids with
    ``columnwise_source="rowwise_dequantized"`` are quantized again: if they round stochastically, ranks agree
    only where their random states do. Other weights are left alone.
    """
    several = isinstance(model_weights, Iterable) and not isinstance(model_weights, Tensor)
    weights = [w for w in (model_weights if several else [model_weights]) if isinstance(w, QuantizedTensorStorage)]
    with torch.no_grad():
        for weight in sorted(weights, key=lambda weight: weight._place):
            _process(weight)


def _process(weight: QuantizedTensorStorage) -> None:
    columns, transposed = columns_made_from_rows(weight), _transposed_columns(weight)
    if columns is not None:
        assert isinstance(weight, HybridQuantizedTensorStorage)
        with weight._writing():
            make_columns_from_rows(weight, columns)
    elif transposed is not None:
        made = weight._derivable(COLUMNWISE)
        assert made is not None
        copy_plane(transposed, made)
        weight._mark_written()
    elif weight._quantizer is not None and weight._quantizer.columnwise_usage and not weight.get_usages()["columnwise"]:
        derivable = not isinstance(weight, HybridQuantizedTensorStorage) and weight._derivable(COLUMNWISE)
        if derivable:
            weight.update_usage(columnwise_usage=True)


def replace_raw_data(tensor: QuantizedTensorStorage, new_raw_data: Tensor) -> None:
    """Move the codes of ``tensor`` into ``new_raw_data``, which it uses from now on: the rows if it has any.

    ``new_raw_data`` is as large as these codes, or has a byte for each number of ``tensor``. Codes of 4 bits do not
    fit into the latter; they stay where they are. What other ranks write arrives by this buffer alone, so
    `quantize_master_weights` writes all of a weight whose other planes do not follow from it (`is_written_whole`).
    """
    holder = _holder_of_rows(tensor)
    plane = holder.planes()[0]
    if new_raw_data.shape == plane.data.shape and new_raw_data.dtype == plane.data.dtype:
        new = new_raw_data.detach()
        new.copy_(plane.data)
        setattr(holder, holder._plane_buffers[plane.direction].data, new)
    elif new_raw_data.shape != tensor.shape or new_raw_data.dtype != torch.uint8:
        raise ValueError(
            f"replace_raw_data: the {plane.direction.value} codes of a {type(tensor).__name__} of shape "
            f"{list(tensor.shape)} are {plane.data.dtype} {list(plane.data.shape)}, the new buffer is "
            f"{new_raw_data.dtype} {list(new_raw_data.shape)}"
        )
    tensor._raw_data = new_raw_data
    note_place(tensor)


def _holder_of_rows(tensor: QuantizedTensorStorage) -> QuantizedTensorStorage:
    """Of a hybrid, its rowwise child; its columnwise one if that is all it has."""
    if isinstance(tensor, HybridQuantizedTensorStorage):
        tensor = next(iter(tensor._children().values()), tensor)
    if not isinstance(tensor, QuantizedTensorStorage) or not tensor._plane_buffers or not tensor.planes():
        raise TypeError(f"replace_raw_data: a {type(tensor).__name__} has no plane of its own")
    return tensor


def is_written_whole(weight: QuantizedTensorStorage) -> bool:
    """Whether codes of other ranks do not arrive in all planes: `replace_raw_data` was given a buffer of some."""
    if weight._raw_data is None:
        return False
    first, *others = weight.planes()
    follows = columns_made_from_rows(weight) is not None or _transposed_columns(weight) is not None
    return first.data.data_ptr() != weight._raw_data.data_ptr() or (bool(others) and not follows)
