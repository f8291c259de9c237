"""`Plan`: the result of `plan`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .setup import Setup


@dataclass(frozen=True)
class Memory:
    """Bytes of memory on one GPU.

    Attributes:
        weights: parameters, by format and direction.
        gradients: gradients.
        masters: master weights of the optimizer.
        moments: moments of the optimizer.
        saved_inputs: what linear layers save of their inputs for backward.
        saved_weights: planes that linear layers save of weights which are not kept quantized.
        saved_others: what everything between linear layers saves for backward.
        workspace: what exists only for some time, by kind.

    Examples:
        >>> estimate = cg.plan("llama3-8b", "mxfp8", gpus=8)
        >>> estimate.memory.gradients > 0
        True
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
        """States of the optimizer: masters and moments."""
        return self.masters + self.moments

    @property
    def activations(self) -> int:
        """Everything that is saved for backward."""
        return self.saved_inputs + self.saved_weights + self.saved_others

    @property
    def total(self) -> int:
        """All memory."""
        kept = sum(self.weights.values()) + self.gradients + self.optimizer
        return kept + self.activations + sum(self.workspace.values())


@dataclass(frozen=True)
class Traffic:
    """What one GPU receives in a step by one kind of collective: bytes, and seconds.

    Examples:
        >>> estimate = cg.plan("llama3-8b", "mxfp8", gpus=8)
        >>> [traffic.kind for traffic in estimate.wire]
        ['gather weights for forward', 'gather weights for backward', 'reduce-scatter gradients']
    """

    kind: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """The GEMMs of one name and format of one GPU in a step.

    Attributes:
        gemm: "fprop", "dgrad", "wgrad", or a pass of attention.
        format: the format of the operands.
        kind: the kind of elements that is multiplied: bf16 if the device cannot multiply the format.
        flops: number of operations.
        seconds: time.

    Examples:
        >>> estimate = cg.plan("llama3-8b", "mxfp8", gpus=8)
        >>> sorted({work.gemm for work in estimate.work if work.format == "mxfp8"})
        ['dgrad', 'fprop', 'wgrad']
    """

    gemm: str
    format: str
    kind: str
    flops: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What a training run costs per GPU and step. Print it to see a report.

    Attributes:
        model: name of the model.
        recipe: the recipe.
        setup: how the model is trained.
        parameters: number of parameters.
        memory: bytes of memory.
        wire: what a GPU receives.
        work: GEMMs.
        quantize_seconds: time of quantization.
        assumptions: the assumptions, in sentences.
        without_rate: formats for which no rate is published or given. They are counted as bf16.

    Examples:
        >>> estimate = cg.plan("llama3-8b", "mxfp8", gpus=8)
        >>> f"{estimate.parameters / 1e9:.2f}B"
        '8.03B'
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
        """Time of all GEMMs."""
        return sum(work.seconds for work in self.work)

    @property
    def compute_seconds(self) -> float:
        """Time of GEMMs and quantization."""
        return self.gemm_seconds + self.quantize_seconds

    @property
    def wire_seconds(self) -> float:
        """Time of all collectives."""
        return sum(traffic.seconds for traffic in self.wire)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a GPU receives."""
        return sum(traffic.bytes for traffic in self.wire)

    @property
    def seconds_in_turn(self) -> float:
        """Time of a step if nothing overlaps: compute, then the wire."""
        return self.compute_seconds + self.wire_seconds

    @property
    def seconds_together(self) -> float:
        """Time of a step if the wire overlaps completely with compute: the longer of the two."""
        return max(self.compute_seconds, self.wire_seconds)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, on all GPUs."""
        return self.setup.tokens * self.setup.micro_batches * self.setup.replicas

    @property
    def fits(self) -> bool:
        """Whether the memory of the device is enough."""
        return self.memory.total <= self.setup.device.memory * 1e9

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers."""
        derived = ["gemm_seconds", "compute_seconds", "wire_seconds", "wire_bytes", "seconds_in_turn"]
        derived += ["seconds_together", "tokens_per_step", "fits"]
        memory = {**asdict(self.memory), "total": self.memory.total}
        return {**asdict(self), "memory": memory, **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        from .report import as_text

        return as_text(self)
