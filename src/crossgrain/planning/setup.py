"""How a model is trained, on what: everything that a plan depends on but the model and the recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..recipe.syntax import did_you_mean
from .devices import Device
from .plane_bytes import DTYPES, MASTERS, MOMENTS

SHARDINGS = ("fsdp", "replicated")
PARAMETERS = ("quantized", "high_precision")
GATHERS = ("planes", "high_precision")

_CHOICES = {
    "sharding": SHARDINGS,
    "parameters": PARAMETERS,
    "gather": GATHERS,
    "dtype": tuple(DTYPES),
    "gradient_dtype": tuple(DTYPES),
    "reduce_dtype": tuple(DTYPES),
    "master": MASTERS,
}


@dataclass(frozen=True)
class Setup:
    """See `crossgrain.planning.plan`."""

    gpus: int
    device: Device
    sequence: int
    batch: int
    micro_batches: int
    sharding: str
    reshard_after_forward: bool
    tensor_parallel: int
    parameters: str
    gather: str
    dtype: str
    gradient_dtype: str
    reduce_dtype: str
    master: str
    moments: tuple[str, str]
    recompute: bool
    gemm_efficiency: float
    wire_efficiency: float

    def __post_init__(self) -> None:
        for name in ("gpus", "sequence", "batch", "micro_batches", "tensor_parallel"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is a whole number from 1 up, not {value!r}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}: no {value!r}{did_you_mean(str(value), choices)}")
        if not isinstance(self.moments, tuple | list) or len(self.moments) != 2:
            raise ValueError(f"moments is one choice for both or a pair of them, not {self.moments!r}")
        for moment in self.moments:
            if moment not in MOMENTS:
                raise ValueError(f"moments: no {moment!r}{did_you_mean(moment, MOMENTS)}")
        for name in ("gemm_efficiency", "wire_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is a part of the peak, from 0 to 1, not {getattr(self, name)}")
        self._check_together()

    def _check_together(self) -> None:
        if self.gpus % self.tensor_parallel:
            raise ValueError(
                f"{self.gpus} GPUs cannot be divided into groups of tensor_parallel={self.tensor_parallel}"
            )
        if self.parameters == "quantized" and self.master == "none":
            raise ValueError("quantized parameters need masters: updates of them alone would round away")
        if self.parameters == "quantized" and self.gather == "high_precision":
            raise ValueError("quantized parameters are gathered as planes, not in high precision")
        if self.sequence * self.batch % self.tensor_parallel:
            raise ValueError(
                f"{self.sequence * self.batch} tokens (sequence x batch) do not divide by "
                f"tensor_parallel={self.tensor_parallel}, which also cuts what is between the linear layers"
            )

    @property
    def replicas(self) -> int:
        """Groups that see other data: what FSDP shards over."""
        return self.gpus // self.tensor_parallel

    @property
    def is_sharded(self) -> bool:
        return self.sharding == "fsdp" and self.replicas > 1

    @property
    def tokens(self) -> int:
        """Of a micro batch of one replica."""
        return self.sequence * self.batch

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def weights_come_quantized(self) -> bool:
        """So that no layer quantizes its weight, or keeps a plane of it for backward."""
        return self.parameters == "quantized" or (self.is_sharded and self.gather == "planes")

    def bandwidth(self, ranks: int, apart: int) -> float:
        """Bytes per second at which a collective of ``ranks`` GPUs, ``apart`` from each other, brings data to each.

        Rings pass through every node once and use the network of all GPUs of the ring that are in it.
        """
        device = self.device
        in_node = max(1, device.node // apart)
        gigabytes = device.link if ranks <= in_node else min(device.link, in_node * device.network)
        return gigabytes * 1e9 * self.wire_efficiency
