"""`WeightShard`: a high-precision shard of a weight that is quantized before FSDP2 gathers it.

A layer quantizes its weight before every use. If FSDP2 keeps the weight in shards, each rank can quantize its own rows
instead, using amaxes of all ranks, and the quantized bytes travel. What arrives is, bit for bit, what the layer would
have made from the whole weight. The shards themselves, gradients and optimizer states stay in high precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..kernels.partial import needs_neighbours
from ..linear.gathered_weight import GatheredWeight
from ..linear.padding import known_format, padded_matrix
from ..planes import ROWWISE, Direction
from ..planes.transport import Rows, Shipment, kind_of, packed
from ..quantizers.base import Quantizer
from ..runtime.failures import telling_others
from ..tensor import QuantizedTensorStorage
from ..tensor.sharding import Gather, buffers_of, fill, gathered_directions, reduce_over
from .split_blocks import fill_split_blocks, quantized_window

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class WeightLayout:
    """How a layer quantizes its weight.

    Attributes:
        layer: name of the layer, for messages.
        quantizer: quantizer of the weight.
        shape: shape of the whole weight.
        padded: shape in which it is quantized.
        directions: the directions that the layer's GEMMs read.
    """

    layer: str
    quantizer: Quantizer
    shape: tuple[int, int]
    padded: tuple[int, int]
    directions: tuple[Direction, ...]

    def block_rows(self) -> int:
        """The number of rows that a shard must be a multiple of to end between blocks, in every direction."""
        formats = [(direction, known_format(self.quantizer, direction)) for direction in self.directions]
        along_m = [fmt.block_rows if d is ROWWISE else fmt.block_length for d, fmt in formats if fmt is not None]
        return math.lcm(*along_m)

    def own_rows(self, ranks: int) -> list[Rows]:
        """The rows of the weight that each rank has, as FSDP2 cuts it."""
        rows = self.shape[0]
        each = -(-rows // ranks)
        return [(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)]

    def cuts_between_blocks(self, own: Sequence[Rows]) -> bool:
        block = self.block_rows()
        return all(stop % block == 0 or stop == self.shape[0] for _, stop in own)

    def needs_neighbours(self) -> bool:
        """Whether a code depends on all numbers of its block, not only on the block's amax."""
        return any(needs_neighbours(self.quantizer.encoding(direction)) for direction in self.directions)

    def known(self, own: Sequence[Rows]) -> tuple[Rows, ...] | None:
        """The rows whose codes each rank can compute; None if it can compute all that it sends."""
        return None if self.cuts_between_blocks(own) or self.needs_neighbours() else tuple(self.with_padding(own))

    def with_padding(self, own: Sequence[Rows]) -> list[Rows]:
        """The rows of each rank including rows of padding, which belong to the rank with the last rows."""
        return [(start, self.padded[0] if start < stop == self.shape[0] else stop) for start, stop in own]

    def windows(self, ranks: int) -> list[Rows]:
        """The rows that each rank sends: its own, extended to whole blocks; the last rank adds the padding."""
        block, found = self.block_rows(), []
        for start, stop in self.own_rows(ranks):
            if start == stop:
                found.append((self.padded[0], self.padded[0]))
            else:
                end = self.padded[0] if stop == self.shape[0] else -(-stop // block) * block
                found.append((start // block * block, min(end, self.padded[0])))
        return found


class WeightShard(Tensor):
    """A plain tensor that knows how to be gathered quantized. Operations act on ``_plain``; aliases stay aliases."""

    _plain: Tensor
    gather_layout: WeightLayout

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[WeightShard], values: Tensor, layout: WeightLayout) -> WeightShard:
        new = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=int(values.storage_offset()),
            dtype=values.dtype,
            device=values.device,
        )
        new._plain, new.gather_layout = values.detach(), layout
        return new

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        owners: dict[int, WeightShard] = {}

        def plain(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            owners[id(value._plain)] = value
            return value._plain

        result = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if func._schema.is_mutable:
            return tree_map(lambda value: owners.get(id(value), value), result)
        if func not in _STAY_SHARDS:
            return result
        layout = next(iter(owners.values())).gather_layout
        return tree_map(lambda value: cls(value, layout) if isinstance(value, Tensor) else value, result)

    # ---- FSDP2 ---------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], Gather]:
        """Hook of FSDP2: quantize this shard and return the bytes to send."""
        layout, ranks, rank, group = self.gather_layout, mesh.size(), mesh.get_local_rank(), mesh.get_group()
        wanted = gathered_directions()
        directions = tuple(direction for direction in layout.directions if direction in wanted) or layout.directions
        own, windows = layout.own_rows(ranks), layout.windows(ranks)
        start, stop = own[rank]
        if tuple(self.shape) != (stop - start, layout.shape[1]):
            raise RuntimeError(
                f"{layout.layer}: rank {rank} of {ranks} should have rows {start} to {stop} of the weight "
                f"{list(layout.shape)}, but its shard is {list(self.shape)}: shard the weight along its first dimension"
            )
        with torch.no_grad(), telling_others(layout.layer):
            shard = self._quantized(own, windows, rank, group, directions)
        planes = shard._planes_that_travel(directions)
        shipment = Shipment(layout.padded, tuple(windows), tuple(kind_of(plane) for plane in planes), layout.known(own))
        return (packed(planes, shipment, rank),), Gather(shipment, directions)

    def _quantized(
        self, own: Sequence[Rows], windows: Sequence[Rows], rank: int, group: Any, directions: Sequence[Direction]
    ) -> QuantizedTensorStorage:
        layout, (first, last), (start, stop) = self.gather_layout, windows[rank], own[rank]
        before = torch.nn.functional.pad(self._plain, (0, 0, start - first if stop > start else 0, 0))
        matrix = padded_matrix(before, last - first, layout.padded[1])
        quantizer = layout.quantizer.storing(**{direction.value: direction in directions for direction in Direction})
        if len(own) > 1:
            reduce_over(quantizer, group)
        if layout.known(own) is not None:
            return quantized_window(matrix, quantizer, own, first, rank, group)
        if not layout.cuts_between_blocks(own):
            cuts = [stop for _, stop in own if stop != layout.shape[0]]
            fill_split_blocks(matrix, cuts, layout.block_rows(), first, group)
        made: QuantizedTensorStorage = quantizer.quantize(matrix)
        return made

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor], metadata: Gather, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[GatheredWeight, list[Tensor]]:
        """Hook of FSDP2: return the whole quantized weight and its buffers. If ``out`` is given, it is filled again."""
        layout = self.gather_layout
        if out is None:
            make = layout.quantizer.storing(
                **{direction.value: direction in layout.directions for direction in Direction}
            )
            with torch.inference_mode(False):  # a weight that is first gathered for inference may be trained later
                quantized = make._made(layout.padded, self._plain.dtype, self._plain.device)
                weight = GatheredWeight(layout.shape, param_dtype, quantized, layout.quantizer)
        else:
            weight = getattr(out, "_local_tensor", out)
        fill(weight.quantized, outputs[0], metadata.shipment, metadata.directions)
        return weight, buffers_of(weight.quantized)

    # ---- a tensor like others ------------------------------------------------------------------

    @property
    def data(self) -> Self:
        with torch.no_grad():
            return cast(Self, self.detach())

    @data.setter
    def data(self, value: Tensor) -> None:
        # torch's setter moves shape, dtype and device, but knows nothing of the plain tensor.
        new = type(self)(getattr(value, "_plain", value), self.gather_layout)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self._plain = new._plain

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)(self._plain.clone(), self.gather_layout)
        if getattr(self, "_is_param", False):
            new = torch.nn.Parameter(new, self.requires_grad)  # type: ignore[assignment]
        memo[id(self)] = new
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle it as a plain tensor."""
        plain: Any = self._plain
        if getattr(self, "_is_param", False):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        reduced: tuple[Any, ...] = plain.__reduce_ex__(protocol)
        return reduced

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._plain!r}, layer={self.gather_layout.layer!r})"


_STAY_SHARDS = frozenset(
    (
        aten.detach.default,
        aten.alias.default,
        aten.view.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.as_strided.default,
        aten.new_zeros.default,
        aten.new_empty.default,
        aten.empty_like.default,
        aten.clone.default,
        aten._to_copy.default,
        aten._pin_memory.default,
    )
)
