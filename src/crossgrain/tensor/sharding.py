"""Sharded parameters: what FSDP2 (`torch.distributed.fsdp.fully_shard`) needs from a quantized tensor.

Each rank has some rows of a parameter as a quantized tensor. Before a layer runs, FSDP2 calls `pre_all_gather` on the
shard, gathers the bytes that it returns, and calls `post_all_gather`, which fills the whole parameter. That is the same
object with the same buffers every time, because autograd may have saved them; between uses their memory is freed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..formats import Format
from ..planes import Direction
from ..planes.transport import Shipment, kind_of, packed, rows_of_chunks, unpack
from ..runtime.collectives import joined_groups
from ..runtime.failures import communicate, telling_others
from ..runtime.host_and_device import on_device

if TYPE_CHECKING:
    from .storage import QuantizedTensorStorage
    from .tensor import QuantizedTensor

_BOTH = tuple(Direction)
_directions: ContextVar[tuple[Direction, ...]] = ContextVar("directions that a gather has to bring", default=_BOTH)


@contextmanager
def gathering(directions: Sequence[Direction]) -> Iterator[None]:
    """A context manager: only these directions are gathered inside."""
    token = _directions.set(tuple(directions))
    try:
        yield
    finally:
        _directions.reset(token)


def gathered_directions() -> tuple[Direction, ...]:
    """The directions that are gathered now."""
    return _directions.get()


class Gather(NamedTuple):
    """What `pre_all_gather` tells `post_all_gather`."""

    shipment: Shipment
    directions: tuple[Direction, ...]
    alone: bool = False  # nothing is gathered: the buffer belongs to the caller


def pre_all_gather(shard: QuantizedTensor, mesh: Any) -> tuple[tuple[Tensor], Gather]:
    """The bytes of this rank's shard, and how to read them."""
    alone = mesh is None
    group, rank, ranks = (None, 0, 1) if alone else (mesh.get_group(), mesh.get_local_rank(), mesh.size())
    shard._check_fresh()
    rows = rows_of_chunks(_agreed_counts(shard, group, ranks))
    if not alone:
        share_scales(shard, group)
    directions = gathered_directions()
    planes = shard._planes_that_travel(directions)
    if not planes:  # weights of a recipe with backward_override have only rows, which backward decodes
        directions = _BOTH
        planes = shard._planes_that_travel(directions)
    shipment = Shipment((rows[-1][1], *shard.shape[1:]), rows, tuple(kind_of(plane) for plane in planes))
    return (packed(planes, shipment, rank),), Gather(shipment, directions, alone)


def post_all_gather(
    shard: QuantizedTensor, gathered: Tensor, gather: Gather, dtype: torch.dtype, out: Any
) -> tuple[QuantizedTensor, list[Tensor]]:
    """Make the whole tensor from gathered bytes, or fill ``out`` again.

    Args:
        shard: the shard of this rank.
        gathered: the bytes of all shards [ranks, bytes].
        gather: the second result of `pre_all_gather`.
        dtype: nominal dtype of the tensor.
        out: the tensor of an earlier call; None to make one.

    Returns:
        The whole tensor, and its buffers.
    """
    if gather.alone and gathered.shape[0] > 1:  # without a mesh, the caller knows the ranks: they have equal shards
        (_, count), *_ = gather.shipment.rows
        rows = rows_of_chunks([count] * gathered.shape[0])
        shipment = gather.shipment._replace(shape=(rows[-1][1], *gather.shipment.shape[1:]), rows=rows)
        gather = gather._replace(shipment=shipment)
    if out is None:
        with torch.inference_mode(False):  # a weight that is first gathered for inference may be trained later
            whole = shard._empty_like(gather.shipment.shape, dtype)
        whole._get_quantizer().leave_group()
    else:
        whole = local_part(out)
    whole._shard = shard
    fill(whole, gathered.clone() if gather.alone else gathered, gather.shipment, gather.directions)
    return whole, buffers_of(whole)


def fill(whole: QuantizedTensorStorage, gathered: Tensor, shipment: Shipment, directions: Sequence[Direction]) -> None:
    """Write the planes of ``directions``. The memory of all other planes, and of ``gathered``, is freed."""
    buffers = tuple(buffer for buffer in buffers_of(whole) if not buffer.is_inference())
    with torch.no_grad(), _unsafe_preserve_version_counter(buffers):
        unpack(gathered, shipment, whole._planes_that_travel(directions))
        whole._derive_planes(directions)
    kept = {id(buffer) for plane in whole._planes_of(directions) for buffer in plane.buffers()}
    for buffer in buffers:
        if id(buffer) not in kept:
            buffer.untyped_storage().resize_(0)
    gathered.untyped_storage().resize_(0)


def buffers_of(whole: QuantizedTensorStorage) -> list[Tensor]:
    """The buffers of a tensor, each of them once."""
    return list({id(buffer): buffer for _, buffer in whole._buffers()}.values())


# ---- shards that belong together -------------------------------------------------------------------------


def share_scales(shard: QuantizedTensor, group: Any) -> None:
    """From now on, writes to ``shard`` use the largest amax of all shards."""
    shard._quantizer = shard._get_quantizer()
    reduce_over(shard._quantizer, group)
    shard._stand_alone()


def reduce_over(quantizer: Any, group: Any) -> None:
    """Make ``quantizer`` take the largest amaxes also over ``group``, in every direction."""
    for own in quantizer.plain_quantizers():
        before = own.amax_reduction_group if own.with_amax_reduction else None
        groups = joined_groups(group, before)
        if not own.with_amax_reduction or groups != before:  # setting an option clears the cache of a quantizer
            own.with_amax_reduction = True
            own.amax_reduction_group = groups


def follow_quantizer(weight: QuantizedTensor, quantizer: Any) -> None:
    """From now on, ``quantizer`` writes ``weight``, and also the shard that it was gathered from."""
    weight._quantizer = quantizer
    if weight._shard is not None:
        groups = weight._shard._quantizer.plain_quantizers()[0].amax_reduction_group
        weight._shard._quantizer = quantizer.copy()
        reduce_over(weight._shard._quantizer, groups)


def local_part(tensor: Any) -> Any:
    """The part of a DTensor that this rank has, as the tensor with the numbers. Other tensors are returned as is."""
    part = getattr(tensor, "_local_tensor", tensor)
    return getattr(part, "_plain", part)


def is_sharded(param: Any) -> bool:
    """Whether this rank may have only a part of ``param``: a DTensor."""
    return hasattr(param, "_local_tensor")


def cut_along(placement: Any) -> int | None:
    """The dimension that a placement of a DTensor divides among ranks; None if each rank has everything."""
    dim: int | None = getattr(placement, "dim", None)  # is_shard() is False for what FSDP2 divides a second time
    return dim


def own_part(whole: Tensor, mesh: Any, placements: Sequence[Any]) -> Tensor:
    """The part of ``whole`` that this rank has in a DTensor with these placements."""
    part = whole.detach()
    cuts = [(at, dim) for at, placement in enumerate(placements) if (dim := cut_along(placement)) is not None]
    if any(hasattr(placement, "split_factor") for placement in placements):
        cuts.reverse()  # FSDP2, whose mesh dimensions come first, divided what a tensor-parallel rank has
    for at, dim in cuts:
        each = -(-part.shape[dim] // mesh.size(at))
        start = min(each * mesh.get_local_rank(at), part.shape[dim])
        part = part.narrow(dim, start, min(each, part.shape[dim] - start))
    return part


def sharded_like(value: Tensor, param: Tensor) -> Tensor:
    """Make a DTensor from the part of this rank, distributed like ``param``. Without a DTensor, return ``value``."""
    if not is_sharded(param):
        return value
    from torch.distributed.tensor import DTensor  # imported late: it takes long, and not everybody needs it

    sharded: Any = param
    return DTensor.from_local(
        value, sharded.device_mesh, sharded.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def write_shard(param: Any, values: Tensor) -> None:
    """Requantize the part of ``param`` that this rank has, with scales of the whole. All ranks must call it."""
    shard = local_part(param)
    if not is_sharded(param):
        shard.quantize_(values)
        return
    with telling_others(f"a shard of a {type(shard).__name__} of shape {list(param.shape)}"):
        share_scales(shard, shard_groups(param))
        shard.quantize_(values)


def shard_groups(param: Any) -> Any:
    """The ranks with the other parts of a DTensor: one process group, or several. None if each rank has everything."""
    if not is_sharded(param):
        return None
    cut = [at for at, placement in enumerate(param.placements) if cut_along(placement) is not None]
    return joined_groups(*(param.device_mesh.get_group(at) for at in cut))


def _agreed_counts(shard: QuantizedTensor, group: Any, ranks: int) -> list[int]:
    """The number of rows of each rank's shard. All ranks raise if a shard cannot be gathered, or has other planes.

    The ranks exchange this once for each shard, and again when it is replaced.
    """
    kinds = [kind_of(plane) for plane in shard.planes()]
    asked = (shard.shape, kinds)
    known: tuple[Any, list[int]] | None = shard.__dict__.get("_known_shards")
    if known is not None and known[0] == asked:
        return known[1]
    problem = why_not_sharded(shard._get_quantizer(), [kind.format for kind in kinds])
    held = str([(kind.format, kind.direction, kind.transposed) for kind in kinds])
    found = exchanged([shard.shape[0], problem is not None, zlib.crc32(held.encode())], group, ranks, shard.device)
    if problem is not None:
        raise NotImplementedError(problem)
    if any(refused for _, refused, _ in found):
        raise RuntimeError(
            f"another rank cannot gather its shard of a {type(shard).__name__}; see the error of that rank"
        )
    if any(other != found[0][2] for _, _, other in found):
        raise RuntimeError(
            f"the shards of a {type(shard).__name__} have different planes on different ranks; this rank has {held}"
        )
    counts = [count for count, _, _ in found]
    shard.__dict__["_known_shards"] = (asked, counts)
    return counts


def exchanged(numbers: Sequence[int], group: Any, ranks: int, device: torch.device) -> list[list[int]]:
    """Exchange a few numbers: the lists of all ranks."""
    own = [int(number) for number in numbers]
    if ranks == 1:
        return [own]
    mine = on_device(own, device)
    theirs = [torch.empty_like(mine) for _ in range(ranks)]
    communicate(torch.distributed.all_gather, theirs, mine, group=group)
    return [other.tolist() for other in theirs]


def why_not_sharded(quantizer: Any, formats: Sequence[Format]) -> str | None:
    """Why shards of a weight would not have the bytes of the whole weight; None if they have."""
    if not formats:
        return "a sharded weight must consist of planes, but this one has none"
    for fmt in formats:
        if fmt.global_amax == "row":
            return (
                f"a sharded weight cannot be in the format {fmt.name}: it has an amax for every row, which would be "
                "that of one shard in one direction and of all shards in the other"
            )
    for own in quantizer.plain_quantizers():
        directions = [direction for direction, used in own.get_usages().items() if used]
        if any(own.encoding(Direction(direction)).stochastic for direction in directions):
            return (
                f"a sharded weight cannot be rounded stochastically ({type(own).__name__}): ranks and passes would get "
                "different numbers"
            )
    return None
