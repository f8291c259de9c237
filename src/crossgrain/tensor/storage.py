"""The quantized storage: reading, writing, usages and saving of planes, without being a torch.Tensor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from .. import kernels
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, same_codes_in_both
from ..runtime.settings import settings
from .holder import Epoch, PlaneHolder
from .row_shards import assign_gathered, extract_shard, shard_field_names

if TYPE_CHECKING:
    from .protocol import TensorQuantizer


def copy_plane(mine: Plane, theirs: Plane) -> None:
    """Copy the bytes of a plane into another of the same format and shape."""
    mine.operand_codes().copy_(theirs.operand_codes())
    if mine.scale is not None and theirs.scale is not None:
        mine.operand_scales().copy_(theirs.operand_scales())
    if mine.amax is not None and theirs.amax is not None:
        mine.amax.copy_(theirs.amax)


class QuantizedTensorStorage(PlaneHolder):
    """Up to two planes of one logical tensor, and the quantizer that can make them again."""

    _strict_decodes_rowwise_only: ClassVar[bool] = False
    _missing_plane_error: ClassVar[type[Exception]] = RuntimeError

    _raw_data: Tensor | None = None  # by which codes of other ranks arrive: the buffer of `replace_raw_data`
    _place: int = 0  # among the weights of an optimizer, the same on all ranks: see `optim.gathered_codes.note_place`

    # ---- reading and writing -------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None, direction: Direction | None = None) -> Tensor:
        """The high-precision tensor, from ``direction`` or, by default, rowwise if present."""
        return self._decoded(self._dtype if dtype is None else dtype, direction)

    def _decoded(self, dtype: torch.dtype, direction: Direction | None) -> Tensor:
        return kernels.decode(self._readable_plane(direction), dtype).view(self._shape)

    def _readable_plane(self, direction: Direction | None) -> Plane:
        plane = next(iter(self.planes()), None) if direction is None else self.plane(direction)
        if plane is None:
            what = "any" if direction is None else f"its {direction.value}"
            raise RuntimeError(f"{type(self).__name__} of shape {list(self._shape)} does not hold {what} data")
        if settings.strict and self._strict_decodes_rowwise_only and plane.transposed:
            raise NotImplementedError(
                f"strict mode: {type(self).__name__} cannot be dequantized from columnwise data alone"
            )
        return plane

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Self:
        """Requantize in place: every plane that is present is written. A non-zero flag does nothing."""
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Copy the bytes of ``src``, which must be of the same class, formats and shape."""
        src = self._apart(src)
        if type(src)._storage_class() is not self._storage_class():
            raise TypeError(f"copy_from_storage: cannot copy {type(src).__name__} to {type(self).__name__}")
        pairs = []
        for plane in self.planes():
            other = src.plane(plane.direction)
            if other is None:
                raise RuntimeError(f"copy_from_storage: the source has no {plane.direction.value} plane")
            if other.format != plane.format or other.shape != plane.shape:
                raise RuntimeError(
                    f"copy_from_storage: {plane.direction.value} plane of {other.format.name} {list(other.shape)} "
                    f"does not fit {plane.format.name} {list(plane.shape)}"
                )
            pairs.append((plane, other))
        self._copy_planes(pairs)

    def _copy_bytes_from(self, src: QuantizedTensorStorage) -> bool:
        """Copy what ``src`` has in our formats as bytes; make the rest from it. False: nothing fits.

        A plane that ``src`` lacks is derived from its other plane where that is exact, else quantized
        from its values: no plane is ever left as it was.
        """
        src = self._apart(src)
        pairs, rest = [], []
        for plane in self.planes():
            theirs = src.plane(plane.direction) or src._derivable(plane.direction)
            if theirs is not None and theirs.format == plane.format and theirs.shape == plane.shape:
                pairs.append((plane, theirs))
            else:
                rest.append(plane)
        if not pairs:
            return False
        self._check_scales_shared(pairs)
        if rest:
            self._get_quantizer().encode_planes(src.dequantize().to(self.device), self, rest)
        self._copy_planes(pairs)
        return True

    def _apart(self, src: QuantizedTensorStorage) -> QuantizedTensorStorage:
        """``src``, or a copy if it lies in the same memory: parts of one tensor may overlap."""
        mine = {buffer.untyped_storage().data_ptr() for _, buffer in self._buffers()}
        overlaps = any(buffer.untyped_storage().data_ptr() in mine for _, buffer in src._buffers())
        return src._clone() if overlaps and self.device.type != "meta" else src

    def _copy_planes(self, pairs: Sequence[tuple[Plane, Plane]]) -> None:
        """Copy bytes between planes of equal formats, into this tensor."""
        self._check_scales_shared(pairs)
        for _, theirs in pairs:
            theirs.check_readable()
        for mine, theirs in pairs:
            copy_plane(mine, theirs)
        self._mark_written()

    def _check_scales_shared(self, pairs: Sequence[tuple[Plane, Plane]]) -> None:
        """Bytes may be copied into a slice only under the per-tensor scale that it shares."""
        for mine, theirs in pairs:
            shared, other = mine.scale_across(self._cut_axes), theirs.scale_across(self._cut_axes)
            if shared is not None and other is not None and not torch.equal(shared, other.to(shared.device)):
                self._refuse_slice_write(mine)

    def _refuse_slice_write(self, plane: Plane) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: the {plane.direction.value} plane of this slice of shape {list(self._shape)} "
            f"shares its per-tensor {plane.format.name} scale with the tensor it was cut from; writing here would "
            "change the scale under the rest. Clone the slice, or write the whole tensor."
        )

    def _clone(self) -> Self:
        new = self._empty_like()
        pairs = zip(new.planes(), self.planes(), strict=True)
        new._copy_planes(list(pairs))
        return new

    # ---- usages --------------------------------------------------------------------------------

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Keep (None), drop (False) or have (True) each direction.

        A missing direction is made from the other where that is exact (per-tensor scales, square
        tiles); otherwise this raises, and nothing has changed.
        """
        wanted = {ROWWISE: rowwise_usage, COLUMNWISE: columnwise_usage}
        made = {
            direction: self._synthesise(direction)
            for direction, want in wanted.items()
            if want and self.plane(direction) is None
        }
        for direction, want in wanted.items():
            if want is False:
                self._set_plane(direction, None)
        for plane in made.values():
            self._adopt_plane(plane)

    def _reset_caches(self) -> None:
        """Free what is a copy of other data; most formats keep no copies."""

    def _derivable(self, direction: Direction) -> Plane | None:
        """The missing plane of ``direction`` made from the other one, where that is exact."""
        source = self.plane(direction.other)
        if source is None or not same_codes_in_both(source.format, self._formats[direction]):
            return None
        return kernels.transposed_plane(source, self._plane_tensor_shape(), self._stores_transposed(direction))

    def _synthesise(self, direction: Direction) -> Plane:
        """The missing plane of ``direction``: the same numbers as in the other, under the same scales."""
        refused = settings.strict and not self._strict_synthesises(direction)
        plane = None if refused else self._derivable(direction)
        if plane is None:
            source, fmt = self.plane(direction.other), self._formats[direction]
            have = "nothing" if source is None else f"only {source.format.name} {direction.other.value} data"
            raise self._missing_plane_error(
                f"{type(self).__name__} of shape {list(self._shape)}: {direction.value} usage requested, but there is "
                f"{have}, from which {fmt.name} {direction.value} data cannot be made. Request it when quantizing."
            )
        return plane

    def _strict_synthesises(self, direction: Direction) -> bool:
        """Whether Transformer Engine would make this direction from the other."""
        return False

    # ---- saving for backward -------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Self]:
        """Hand out the buffers and forget them: ``(buffers, self)``."""
        buffers = [getattr(self, name) for name in self._buffer_names]
        for name in self._buffer_names:
            setattr(self, name, None)
        # From here on autograd guards the buffers, or they come back as copies: later writes are not ours.
        self._epochs = {direction: Epoch(epoch.number) for direction, epoch in self._epochs.items()}
        return buffers, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take the buffers back from the front of ``tensors``; returns the rest."""
        count = len(self._buffer_names)
        if len(tensors) < count:
            raise RuntimeError(f"{type(self).__name__} has {count} buffers, but only {len(tensors)} tensors were saved")
        for name, buffer in zip(self._buffer_names, tensors[:count], strict=True):
            setattr(self, name, buffer)
        return tensors[count:]

    def clear(self) -> None:
        """Free the memory of the buffers, also for others that share them. Scales shared by many stay."""
        for plane in self.planes():
            shared = plane.scale if plane.format.block is None else None
            for buffer in plane.buffers():
                if buffer is not shared:
                    buffer.data = buffer.new_empty(0)

    # ---- shards --------------------------------------------------------------------------------

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Names of the buffers that a gather of shards moves, in order."""
        return shard_field_names(self)

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """This shard's buffers, ready to be concatenated along their first dimension, and how to read them."""
        return extract_shard(self)

    def fsdp_assign_gathered(self, buffers: Sequence[Tensor], meta: dict[str, Any]) -> None:
        """Become the whole: take planes from the concatenated buffers of all shards."""
        assign_gathered(self, buffers, meta)

    def _planes_that_travel(self, directions: Sequence[Direction]) -> list[Plane]:
        """The planes from which all that serve ``directions`` can be had: not those that follow from another."""
        own = {plane.direction: plane for plane in self.planes()}
        if len(own) == 2 and len(directions) == 2 and self._derivable_formats():
            return [own[ROWWISE]]
        return self._planes_of(directions)

    def _planes_of(self, directions: Sequence[Direction]) -> list[Plane]:
        """The planes, with buffers of their own, that ``directions`` are read from."""
        own = {plane.direction: plane for plane in self.planes()}
        found = []
        for direction in directions:
            plane = own.get(direction)
            if plane is None and self.plane(direction) is not None:
                plane = own[direction.other]  # which serves both
            if plane is not None and plane not in found:
                found.append(plane)
        return found

    def _derivable_formats(self) -> bool:
        """Whether the bytes of one direction follow from those of the other."""
        return same_codes_in_both(self._formats[ROWWISE], self._formats[COLUMNWISE])

    def _derive_planes(self, directions: Sequence[Direction]) -> None:
        """Fill what serves ``directions`` and did not travel."""
        travelled = self._planes_that_travel(directions)
        for plane in self._planes_of(directions):
            if all(plane.data is not other.data for other in travelled):
                made = kernels.transposed_plane(travelled[0], self._plane_tensor_shape(), plane.transposed)
                if plane.scale is not None:
                    plane.scale.zero_()  # its padding: the memory may be new
                copy_plane(plane, made)

    def _note_zeros(self) -> None:
        self._made_of_zeros = True

    def _stand_alone(self) -> None:
        """Be a tensor of its own: what it was cut from is gone, or was only padding."""
        self._cut_axes = ()

    # ---- the quantizer -------------------------------------------------------------------------

    def update_quantizer(self, quantizer: TensorQuantizer) -> None:
        """Use another quantizer for future writes. The bytes stay as they are."""
        if self._quantizer is None:
            raise RuntimeError(f"{type(self).__name__} has no quantizer that could be updated")
        if self._quantizer is not quantizer:
            warnings.warn(
                f"the quantizer of a {type(self).__name__} is replaced: future writes may differ", stacklevel=2
            )
        self._quantizer = quantizer

    def _get_quantizer(self) -> TensorQuantizer:
        if self._quantizer is not None:
            known: TensorQuantizer = self._quantizer
            return known
        quantizer = self._build_default_quantizer()
        quantizer.set_usage(**self.get_usages())
        return quantizer

    def _build_default_quantizer(self) -> TensorQuantizer:
        """A quantizer that writes these planes' formats, for tensors that were built by hand."""
        raise NotImplementedError

    def __repr__(self) -> str:
        held = ", ".join(f"{plane.direction.value}={plane.format.name}" for plane in self.planes()) or "no data"
        return f"{type(self).__name__}({held}, shape={list(self._shape)}, dtype={self._dtype})"
