"""`QuantizedTensorStorage`: planes that can be read, written, dropped and saved, without a torch.Tensor around them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from .. import kernels
from ..formats import Format
from ..planes import COLUMNWISE, ROWWISE, Direction, Plane, same_codes_in_both
from ..runtime.host_and_device import require
from ..runtime.logs import warn
from ..runtime.settings import settings
from ..runtime.strict import refuse_if_strict
from .holder import PlaneHolder, copied_epochs
from .row_shards import assign_gathered, extract_shard, shard_field_names

if TYPE_CHECKING:
    from .protocol import TensorQuantizer


def copy_plane(mine: Plane, theirs: Plane) -> None:
    """Copy the bytes of a plane to another plane of the same format and shape."""
    mine.operand_codes().copy_(theirs.operand_codes())
    if mine.scale is not None and theirs.scale is not None:
        mine.operand_scales().copy_(theirs.operand_scales())
    if mine.amax is not None and theirs.amax is not None:
        mine.amax.copy_(theirs.amax)


class QuantizedTensorStorage(PlaneHolder):
    """Up to two planes of one tensor, and the quantizer that writes them.

    It is the base class of quantized tensors, and what quantizers with ``internal=True`` return.

    Examples:
        >>> quantizer = cg.quantizer_for("mxfp8")
        >>> quantizer.internal = True  # planes without a torch.Tensor around them
        >>> storage = quantizer(torch.ones(32, 32))
        >>> isinstance(storage, torch.Tensor), isinstance(storage, cg.QuantizedTensorStorage)
        (False, True)
        >>> storage.dequantize().sum()
        tensor(1024.)
    """

    _strict_decodes_rowwise_only: ClassVar[bool] = False
    _missing_plane_error: ClassVar[type[Exception]] = RuntimeError

    _raw_data: Tensor | None = None  # the buffer of `replace_raw_data`, in which codes of other ranks arrive
    _place: int = 0  # index among the weights of an optimizer, the same on all ranks: `optim.gathered_codes.note_place`

    # ---- reading and writing -------------------------------------------------------------------

    def dequantize(self, *, dtype: torch.dtype | None = None, direction: Direction | None = None) -> Tensor:
        """Decode to a plain tensor in high precision.

        Args:
            dtype: dtype of the result; by default the nominal dtype.
            direction: decode the plane of this direction; by default the rowwise plane if there is one.

        Raises:
            RuntimeError: the tensor does not have the plane, or the plane is stale.
        """
        return self._decoded(self._dtype if dtype is None else dtype, direction)

    def _decoded(self, dtype: torch.dtype, direction: Direction | None) -> Tensor:
        return kernels.decode(self._readable_plane(direction), dtype).view(self._shape)

    def _readable_plane(self, direction: Direction | None) -> Plane:
        plane = next(iter(self.planes()), None) if direction is None else self.plane(direction)
        if plane is None:
            what = "any" if direction is None else f"its {direction.value}"
            raise RuntimeError(
                f"cannot decode this {type(self).__name__} of shape {list(self._shape)}: it does not hold {what} data"
            )
        if self._strict_decodes_rowwise_only and plane.transposed:
            refuse_if_strict(
                "columns of NVFP4 alone", f"{type(self).__name__} cannot be dequantized from columnwise data alone"
            )
        return plane

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Self:
        """Quantize other values into this tensor, in place. All planes that it has are written.

        Args:
            tensor: the new values, of the same shape.
            noop_flag: a float32 tensor with one number; if it is not zero, nothing is written.

        Returns:
            This tensor.
        """
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def copy_from_storage(self, src: QuantizedTensorStorage) -> None:
        """Copy the bytes of another tensor of the same class, formats and shape.

        Raises:
            TypeError: ``src`` is of another class.
            RuntimeError: ``src`` does not have a plane that this tensor has, or has it in another format or shape.
        """
        src = self._apart(src)
        if type(src)._storage_class() is not self._storage_class():
            raise TypeError(f"copy_from_storage: cannot copy {type(src).__name__} to {type(self).__name__}")
        pairs = []
        for plane in self.planes():
            other = src.plane(plane.direction)
            if other is None:
                raise RuntimeError(
                    f"copy_from_storage: the source has no {plane.direction.value} plane, which the destination has"
                )
            if other.format != plane.format or other.shape != plane.shape:
                raise RuntimeError(
                    f"copy_from_storage: cannot copy the {plane.direction.value} plane: the source has "
                    f"{other.format.name} of shape {list(other.shape)}, the destination has {plane.format.name} of "
                    f"shape {list(plane.shape)}"
                )
            pairs.append((plane, other))
        self._copy_planes(pairs)

    def _copy_bytes_from(self, src: QuantizedTensorStorage) -> bool:
        """Copy the planes that ``src`` has in the same formats as bytes, and make the others from ``src``.

        A plane that ``src`` does not have is made from its other plane if that is exact; otherwise its values are
        quantized.

        Returns:
            False if no plane fits; then nothing is written. Otherwise all planes are written.
        """
        src = self._apart(src)
        pairs, rest = [], []
        for plane in self.planes():
            theirs = src._plane_for(plane.direction, plane.format)
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
        """``src``, or a copy if it is in the same memory: slices of one tensor may overlap."""
        mine = {buffer.untyped_storage().data_ptr() for _, buffer in self._buffers()}
        overlaps = any(buffer.untyped_storage().data_ptr() in mine for _, buffer in src._buffers())
        return src._clone() if overlaps and self.device.type != "meta" else src

    def _copy_planes(self, pairs: Sequence[tuple[Plane, Plane]]) -> None:
        """Copy bytes to planes of this tensor from planes of the same formats."""
        self._check_scales_shared(pairs)
        for _, theirs in pairs:
            theirs.check_readable()
        for mine, theirs in pairs:
            copy_plane(mine, theirs)
        self._mark_written()

    def _check_scales_shared(self, pairs: Sequence[tuple[Plane, Plane]]) -> None:
        """Raise if a slice would get bytes with another per-tensor scale than that of its whole tensor."""
        for mine, theirs in pairs:
            shared, other = mine.scale_across(self._cut_axes), theirs.scale_across(self._cut_axes)
            if shared is None or other is None or shared.is_set_to(other):
                continue
            refusal = self._slice_write_refusal(mine)
            if shared.shape != other.shape:
                raise RuntimeError(refusal)
            require((shared == other.to(shared.device)).all(), refusal, partial(str, refusal), RuntimeError)

    def _refuse_slice_write(self, plane: Plane) -> None:
        raise RuntimeError(self._slice_write_refusal(plane))

    def _slice_write_refusal(self, plane: Plane) -> str:
        return (
            f"{type(self).__name__}: the {plane.direction.value} plane of this slice of shape {list(self._shape)} "
            f"shares its per-tensor {plane.format.name} scale with the tensor that it is a slice of; writing to it "
            "would change the scale under the rest. Clone the slice, or write the whole tensor. To load checkpoints of "
            "torch.distributed.checkpoint on other ranks, use crossgrain.distributed.checkpoint.ModelState."
        )

    def _clone(self) -> Self:
        new = self._empty_like()
        pairs = zip(new.planes(), self.planes(), strict=True)
        new._copy_planes(list(pairs))
        return new

    # ---- usages --------------------------------------------------------------------------------

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Add or drop directions.

        A missing direction is made from the other one if that is exact: with per-tensor scales or square tiles.

        Args:
            rowwise_usage: True to have the rowwise plane, False to drop it, None to leave it as it is.
            columnwise_usage: the same for the columnwise plane.

        Raises:
            RuntimeError: a missing direction cannot be made. Nothing has changed then.
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
        """Free copies of other data. Most formats have none."""

    def _derivable(self, direction: Direction) -> Plane | None:
        """The missing plane of ``direction``, made from the other plane; None if that is not exact."""
        source = self.plane(direction.other)
        if source is None or not same_codes_in_both(source.format, self._formats[direction]):
            return None
        return kernels.transposed_plane(source, self._plane_tensor_shape(), self._stores_transposed(direction))

    def _plane_for(self, direction: Direction, fmt: Format) -> Plane | None:
        """The plane of ``direction``, in any format; if it is missing, made from the other one if that is exact.

        Args:
            direction: the direction.
            fmt: the format in which a missing plane is made.
        """
        own = self.plane(direction)
        source = self.plane(direction.other) if own is None else None
        if source is None or not same_codes_in_both(source.format, fmt):
            return own
        return kernels.transposed_plane(source, source.shape, direction is COLUMNWISE and fmt.transposes)

    def _synthesise(self, direction: Direction) -> Plane:
        """The missing plane of ``direction``, with the numbers and scales of the other. Raises if it is impossible."""
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
        """Whether Transformer Engine can make this direction from the other."""
        return False

    # ---- saving for backward -------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[list[Tensor | None], Self]:
        """Take the buffers out of this object: ``(buffers, self)``. `restore_from_saved` puts them back."""
        buffers = [getattr(self, name) for name in self._buffer_names]
        for name in self._buffer_names:
            setattr(self, name, None)
        # Autograd checks the buffers from here on, or they come back as copies: later writes to them do not count here.
        self._epochs = copied_epochs(self._epochs)
        return buffers, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Put back buffers from the front of ``tensors``.

        Returns:
            The tensors that are left.

        Raises:
            RuntimeError: there are fewer tensors than buffers.
        """
        count = len(self._buffer_names)
        if len(tensors) < count:
            raise RuntimeError(
                f"{type(self).__name__} needs {count} saved buffers, but only {len(tensors)} tensors are left"
            )
        for name, buffer in zip(self._buffer_names, tensors[:count], strict=True):
            setattr(self, name, buffer)
        return tensors[count:]

    def clear(self) -> None:
        """Free the memory of the buffers, also for objects that share them. Per-tensor scales are kept."""
        for plane in self.planes():
            shared = plane.scale if plane.format.block is None else None
            for buffer in plane.buffers():
                if buffer is not shared:
                    buffer.data = buffer.new_empty(0)

    # ---- shards --------------------------------------------------------------------------------

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """Names of the buffers that are gathered, in their order."""
        return shard_field_names(self)

    def fsdp_extract_buffers(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The buffers of this shard, to be concatenated along their first dimension, and how to read them."""
        return extract_shard(self)

    def fsdp_assign_gathered(self, gathered: Sequence[Tensor], meta: dict[str, Any]) -> None:
        """Fill this tensor from the concatenated buffers of all shards.

        Args:
            gathered: the gathered buffers, in the order of `fsdp_buffer_fields`.
            meta: the second result of `fsdp_extract_buffers`.
        """
        assign_gathered(self, gathered, meta)

    def _planes_that_travel(self, directions: Sequence[Direction]) -> list[Plane]:
        """The planes to send for ``directions``: not those that can be made from another one."""
        own = {plane.direction: plane for plane in self.planes()}
        if len(own) == 2 and len(directions) == 2 and self._derivable_formats():
            return [own[ROWWISE]]
        return self._planes_of(directions)

    def _planes_of(self, directions: Sequence[Direction]) -> list[Plane]:
        """The planes with own buffers that are read for ``directions``."""
        own = {plane.direction: plane for plane in self.planes()}
        found = []
        for direction in directions:
            plane = own.get(direction)
            if plane is None and self.plane(direction) is not None:
                plane = own[direction.other]  # it is used for both directions
            if plane is not None and plane not in found:
                found.append(plane)
        return found

    def _derivable_formats(self) -> bool:
        """Whether the bytes of one direction can be made from those of the other."""
        return same_codes_in_both(self._formats[ROWWISE], self._formats[COLUMNWISE])

    def _derive_planes(self, directions: Sequence[Direction]) -> None:
        """Fill the planes of ``directions`` that were not sent."""
        travelled = self._planes_that_travel(directions)
        for plane in self._planes_of(directions):
            if all(plane.data is not other.data for other in travelled):
                made = kernels.transposed_plane(travelled[0], self._plane_tensor_shape(), plane.transposed)
                if plane.scale is not None:
                    plane.scale.zero_()  # for the padding: the memory may be uninitialised
                copy_plane(plane, made)

    def _note_zeros(self) -> None:
        self._made_of_zeros = True

    def _stand_alone(self) -> None:
        """Stop being a slice: the larger tensor no longer exists, or was only padding."""
        self._cut_axes = ()

    # ---- the quantizer -------------------------------------------------------------------------

    def update_quantizer(self, quantizer: TensorQuantizer) -> None:
        """Use another quantizer for later writes. The bytes stay as they are.

        Raises:
            RuntimeError: the tensor has no quantizer.
        """
        if self._quantizer is None:
            raise RuntimeError(f"this {type(self).__name__} has no quantizer that could be replaced")
        if self._quantizer is not quantizer:
            warn(__name__, f"the quantizer of a {type(self).__name__} is replaced: later writes may give other bytes")
        self._quantizer = quantizer

    def _get_quantizer(self) -> TensorQuantizer:
        if self._quantizer is not None:
            known: TensorQuantizer = self._quantizer
            return known
        quantizer = self._build_default_quantizer()
        quantizer.set_usage(**self.get_usages())
        return quantizer

    def _build_default_quantizer(self) -> TensorQuantizer:
        """A quantizer for the formats of the planes, if the tensor was created without one."""
        raise NotImplementedError

    def __repr__(self) -> str:
        held = ", ".join(f"{plane.direction.value}={plane.format.name}" for plane in self.planes()) or "no data"
        return f"{type(self).__name__}({held}, shape={list(self._shape)}, dtype={self._dtype})"
