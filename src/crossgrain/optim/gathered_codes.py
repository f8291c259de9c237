"""Make the planes of a weight that follow from its rows, after the codes of the rows were gathered from all ranks."""

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
    """The columnwise child of a hybrid if it is made from the rowwise child; otherwise None."""
    if not isinstance(weight, HybridQuantizedTensorStorage):
        return None
    quantizer, children = weight._get_quantizer(), weight._children()
    derived = quantizer.derives_columns and len(children) == 2
    return children[COLUMNWISE] if derived else None


def make_columns_from_rows(weight: Any, columns: QuantizedTensorStorage) -> None:
    """Quantize the columns from the decoded rowwise child."""
    quantizer = weight._get_quantizer()
    rows = weight._children()[ROWWISE]._decoded(weight.dtype, None)
    quantizer._write_together(rows.reshape(weight.shape), {COLUMNWISE: columns})


def _transposed_columns(weight: QuantizedTensorStorage) -> Plane | None:
    """The columnwise plane if it holds the same codes as the rowwise plane; otherwise None."""
    planes = {plane.direction: plane for plane in weight.planes()}
    row, column = planes.get(ROWWISE), planes.get(COLUMNWISE)
    if isinstance(weight, HybridQuantizedTensorStorage) or row is None or column is None:
        return None
    return column if same_codes_in_both(row.format, column.format) else None


def leave_for_processing(weight: QuantizedTensor, manual: bool) -> None:
    """Mark or drop old columns, because codes of other ranks will be gathered into the rows later."""
    if _transposed_columns(weight) is None:
        return
    if manual:
        weight._epochs[ROWWISE].note(next_write_number())
    else:
        weight.update_usage(columnwise_usage=False)


_places = itertools.count(1)


def note_place(weight: QuantizedTensorStorage) -> None:
    """Number the weights. Must be called for the same weights in the same order on all ranks."""
    if not weight._place:
        weight._place = next(_places)


def post_all_gather_processing(model_weights: Any) -> None:
    """Update columnwise planes that follow from the rows. Call it after gathering the codes of all ranks.

    Columns that have the same codes as the rows are transposed from them. Columns of hybrids with
    ``columnwise_source="rowwise_dequantized"`` are quantized from the decoded rows; if they round stochastically, ranks
    get the same result only if their random states are equal. Other weights are not changed.

    Args:
        model_weights: a weight, or an iterable of weights in any order, even a set. Amaxes are reduced over
            tensor-parallel ranks in the order of the earlier calls of `replace_raw_data` and `quantize_master_weights`.
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
    """Move the codes of a quantized tensor into another buffer, which it uses from now on.

    The rowwise codes are moved, or the columnwise codes if there are no rows. Optimizers use it to gather codes in a
    buffer of their own. Since only this buffer is gathered, `quantize_master_weights` writes a weight completely on
    every rank if its other planes do not follow from it (`is_written_whole`).

    Args:
        tensor: the quantized tensor.
        new_raw_data: a buffer of the dtype and shape of the codes, or uint8 with one byte for each number of
            ``tensor``. Codes of 4 bits are not moved to the latter; they stay where they are.

    Raises:
        ValueError: the buffer has neither of these sizes.
        TypeError: the tensor has no planes.
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
            f"{list(tensor.shape)} are {plane.data.dtype} {list(plane.data.shape)}, but the new buffer is "
            f"{new_raw_data.dtype} {list(new_raw_data.shape)}"
        )
    tensor._raw_data = new_raw_data
    note_place(tensor)


def _holder_of_rows(tensor: QuantizedTensorStorage) -> QuantizedTensorStorage:
    """The tensor that holds the rows: of a hybrid its rowwise child, or its columnwise child if it has no other."""
    if isinstance(tensor, HybridQuantizedTensorStorage):
        tensor = next(iter(tensor._children().values()), tensor)
    if not isinstance(tensor, QuantizedTensorStorage) or not tensor._plane_buffers or not tensor.planes():
        raise TypeError(f"replace_raw_data: a {type(tensor).__name__} has no planes, so it has no codes to move")
    return tensor


def is_written_whole(weight: QuantizedTensorStorage) -> bool:
    """Whether gathering the buffer of `replace_raw_data` would not update all planes, so that each rank writes all."""
    if weight._raw_data is None:
        return False
    first, *others = weight.planes()
    follows = columns_made_from_rows(weight) is not None or _transposed_columns(weight) is not None
    return first.data.data_ptr() != weight._raw_data.data_ptr() or (bool(others) and not follows)
