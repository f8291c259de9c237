"""`Setup`: how and on what a model is trained: everything that a plan depends on, except the model and the recipe."""

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
    """How and on what a model is trained. The fields are arguments of `crossgrain.planning.plan`."""

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
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} cannot be {value!r}{did_you_mean(str(value), choices)}")
        if not isinstance(self.moments, tuple | list) or len(self.moments) != 2:
            raise ValueError(f"moments must be one dtype for both moments, or a pair of dtypes, got {self.moments!r}")
        for moment in self.moments:
            if moment not in MOMENTS:
                raise ValueError(f"moments cannot be {moment!r}{did_you_mean(moment, MOMENTS)}")
        for name in ("gemm_efficiency", "wire_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        self._check_together()

    def _check_together(self) -> None:
        if self.gpus % self.tensor_parallel:
            raise ValueError(
                f"{self.gpus} GPUs cannot be divided into groups of tensor_parallel={self.tensor_parallel}"
            )
        if self.parameters == "quantized" and self.master == "none":
            raise ValueError(
                "parameters='quantized' cannot be used with master='none': without masters, updates would be lost by "
                "rounding"
            )
        if self.parameters == "quantized" and self.gather == "high_precision":
            raise ValueError(
                "parameters='quantized' cannot be used with gather='high_precision': quantized parameters are gathered "
                "as planes"
            )
        if self.sequence * self.batch % self.tensor_parallel:
            raise ValueError(
                f"{self.sequence * self.batch} tokens (sequence x batch) cannot be divided evenly among "
                f"tensor_parallel={self.tensor_parallel} GPUs, which divide the tokens between the linear layers"
            )

    @property
    def replicas(self) -> int:
        """Number of groups of GPUs that get different data. FSDP divides parameters among them."""
        return self.gpus // self.tensor_parallel

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP divides parameters."""
        return self.sharding == "fsdp" and self.replicas > 1

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch of one replica."""
        return self.sequence * self.batch

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of activations and of parameters in high precision."""
        return DTYPES[self.dtype]

    @property
    def weights_come_quantized(self) -> bool:
        """Whether layers get quantized weights, so that they neither quantize them nor save planes of them."""
        return self.parameters == "quantized" or (self.is_sharded and self.gather == "planes")

    def bandwidth(self, ranks: int, apart: int) -> float:
        """Bytes per second that each GPU receives in a collective.

        A ring passes through every node once, and uses the network of all its GPUs in the node.

        Args:
            ranks: number of GPUs in the collective.
            apart: distance between their ranks.
        """
        device = self.device
        in_node = max(1, device.node // apart)
        gigabytes = device.link if ranks <= in_node else min(device.link, in_node * device.network)
        return gigabytes * 1e9 * self.wire_efficiency
