"""What a plan says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .setup import Setup


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    ``weights``         by format and direction
    ``saved_inputs``    by linear layers, for backward; ``saved_weights``: planes of weights that are not kept quantized
    ``saved_others``    by everything between linear layers
    ``workspace``       what exists for a moment, by what it is
    """

    weights: dict[str, int]
    gradients: int
    masters: int
    moments: int
    saved_inputs: int
    saved_weights: int
    saved_others: int
    workspace: dict[str, int]

    @property
    def optimizer(self) -> int:
        return self.masters + self.moments

    @property
    def activations(self) -> int:
        return self.saved_inputs + self.saved_weights + self.saved_others

    @property
    def total(self) -> int:
        kept = sum(self.weights.values()) + self.gradients + self.optimizer
        return kept + self.activations + sum(self.workspace.values())


@dataclass(frozen=True)
class Traffic:
    """What arrives at one GPU in a step by one kind of collective."""

    kind: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """GEMMs of one name and format in a step, on one GPU; ``kind``: the elements that are
    multiplied, bf16 where the device does not multiply the format as it is.
    """

    gemm: str
    format: str
    kind: str
    flops: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What a run costs per GPU and step; ``print`` it.

    ``without_rate``       formats that no rate is published or given for; they are counted as bf16
    ``seconds_in_turn``    compute, then the wire: nothing overlaps
    ``seconds_together``   the longer of the two: all of it overlaps
    """

    model: str
    recipe: str
    setup: Setup
    parameters: int
    memory: Memory
    wire: tuple[Traffic, ...]
    work: tuple[Work, ...]
    quantize_seconds: float
    assumptions: tuple[str, ...]
    without_rate: tuple[str, ...] = ()

    @property
    def gemm_seconds(self) -> float:
        return sum(work.seconds for work in self.work)

    @property
    def compute_seconds(self) -> float:
        return self.gemm_seconds + self.quantize_seconds

    @property
    def wire_seconds(self) -> float:
        return sum(traffic.seconds for traffic in self.wire)

    @property
    def wire_bytes(self) -> int:
        return sum(traffic.bytes for traffic in self.wire)

    @property
    def seconds_in_turn(self) -> float:
        return self.compute_seconds + self.wire_seconds

    @property
    def seconds_together(self) -> float:
        return max(self.compute_seconds, self.wire_seconds)

    @property
    def tokens_per_step(self) -> int:
        return self.setup.tokens * self.setup.micro_batches * self.setup.replicas

    @property
    def fits(self) -> bool:
        """Whether all of it is less than the device's memory."""
        return self.memory.total <= self.setup.device.memory * 1e9

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        derived = ["gemm_seconds", "compute_seconds", "wire_seconds", "wire_bytes", "seconds_in_turn"]
        derived += ["seconds_together", "tokens_per_step", "fits"]
        memory = {**asdict(self.memory), "total": self.memory.total}
        return {**asdict(self), "memory": memory, **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        from .report import as_text

        return as_text(self)
