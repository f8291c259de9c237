"""Quantized tensors by themselves: made, decoded, written, sliced, gathered from shards."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.quantizers.grouped_tensor import GroupedTensor

from ....common.quantizers import QUANTIZERS, hybrid_of
from .common import DTYPE, Results, Run, Step

_SHARDED = ("fp8", "fp8_block", "mxfp8", "nvfp4", "nvfp4_2d")


def _values(device: str, rows: int = 128) -> Tensor:
    return torch.randn(rows, 256).to(DTYPE).to(device)


def _planes(tensor: Any) -> Results:
    """All bytes of a quantized tensor."""
    return dict(tensor._buffers())


def _life(device: str, name: str) -> Step:
    """A tensor is made, read in both directions, written as a whole, and copied."""
    x, y = _values(device), _values(device)

    def step() -> Results:
        made = QUANTIZERS[name]()(x)
        found = {f"first {key}": buffer.clone() for key, buffer in _planes(made).items()}
        found |= {direction.value: made.dequantize(direction=direction) for direction in cg.Direction}
        made.copy_(y)
        made.mul_(2)
        found |= _planes(made.clone())
        return found

    return step


def _sliced(device: str, name: str) -> Step:
    """Bytes of a slice come back to it: its scale, which belongs to the whole, is compared."""
    x = _values(device)

    def step() -> Results:
        made = cg.quantizer_for(name)(x)
        kept = made[:64].clone()
        made[:64].copy_(kept)
        return _planes(made)

    return step


def _gathered(device: str, name: str) -> Step:
    """What FSDP2 does with two shards, without ranks."""
    whole = QUANTIZERS[name]()(_values(device, 256))
    shards = [whole._sliced(0, 0, 128).clone(), whole._sliced(0, 128, 256).clone()]

    def step() -> Results:
        sent = [shard.fsdp_pre_all_gather(None) for shard in shards]
        bytes_of_all = torch.cat([own for (own,), _ in sent])
        arrived, _ = shards[0].fsdp_post_all_gather((bytes_of_all,), sent[0][1], DTYPE)
        return _planes(arrived)

    return step


def _flagged(device: str, make: Any, is_set: bool) -> Step:
    """A write that a flag prevents, or not."""
    x, y = _values(device), _values(device)
    flag = torch.full((1,), float(is_set)).to(device)

    def step() -> Results:
        quantizer = make()
        made = quantizer(x)
        made.quantize_(y, noop_flag=flag)
        statistics = {f"statistic {at}": each for at, each in enumerate(quantizer.statistics())}
        return _planes(made) | statistics

    return step


def _named(device: str, name: str) -> Step:
    """Memory on the device by its name without a number, which a tensor on it is written to."""
    x = _values(device)

    def step() -> Results:
        made = cg.quantizer_for(name).make_empty(x.shape, dtype=DTYPE, device=device)
        made.quantize_(x)
        return _planes(made)

    return step


def _grouped(device: str) -> Step:
    x = _values(device, 96)

    def step() -> Results:
        group = GroupedTensor.make_grouped_tensor_with_shapes(
            2, [(32, 256), (64, 256)], cg.MXFP8Quantizer(cg.DType.kFloat8E4M3), x.device, DTYPE
        )
        group.quantize(list(x.split([32, 64])))
        assert group.first_dims is not None and group.tensor_offsets is not None
        found = {"rows": group.first_dims, "offsets": group.tensor_offsets}
        for at, member in enumerate(group.dequantize().quantized_tensors):
            found[f"member {at}"] = member
        return found

    return step


_FLAGGED = {
    "mxfp8": QUANTIZERS["mxfp8"],
    "hybrid": partial(hybrid_of, "mxfp8", "nvfp4"),
    "identity": cg.IdentityQuantizer,
}

RUNS: dict[str, Run] = {
    **{f"tensors life {name}": partial(_life, name=name) for name in QUANTIZERS if "delayed" not in name},
    **{f"tensors slice {name}": partial(_sliced, name=name) for name in ("fp8", "nvfp4", "mxfp8")},
    **{f"tensors gather {name}": partial(_gathered, name=name) for name in _SHARDED},
    **{
        f"tensors flag {name} {is_set}": partial(_flagged, make=make, is_set=is_set)
        for name, make in _FLAGGED.items()
        for is_set in (False, True)
    },
    **{f"tensors named {name}": partial(_named, name=name) for name in ("fp8", "mxfp8", "nvfp4")},
    "tensors group": _grouped,
}
SHORT = [name for name in RUNS if not name.startswith("tensors life")] + ["tensors life fp8", "tensors life nvfp4"]
