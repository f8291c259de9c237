"""Connect the extra inputs and outputs of a sequence to the caller, or to each other through named channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .op import BasicOperation


class Port(NamedTuple):
    """An extra input or output: its channel, if any, and whether the caller provides or gets it."""

    channel: str | None
    public: bool


class Wiring:
    """The extra inputs and outputs of all basic operations of a sequence.

    A fused operation that consists of both the writer and a reader of a channel passes the tensor on by itself: it gets
    None for the extra input, may return None for the extra output, and adds up the gradients.
    """

    def __init__(self, ops: Sequence[BasicOperation]) -> None:
        self.inputs = [[_input_port(op, i) for i in range(op.num_extra_inputs)] for op in ops]
        self.outputs = [[_output_port(op, i) for i in range(op.num_extra_outputs)] for op in ops]
        self._check(ops)
        self._writers = {port.channel: i for i, ports in enumerate(self.outputs) for port in ports if port.channel}
        self.num_public_inputs = sum(port.public for ports in self.inputs for port in ports)

    def _check(self, ops: Sequence[BasicOperation]) -> None:
        """Raise unless every channel has one operation that writes it, before all operations that read it."""
        known: set[str] = set()
        for index, op in enumerate(ops):
            for port in self.inputs[index]:
                if port.channel is not None and port.channel not in known:
                    raise ValueError(
                        f"{type(op).__name__} at position {index} reads the channel {port.channel!r}, but no earlier "
                        "operation of the sequence writes to it"
                    )
            for port in self.outputs[index]:
                if port.channel is not None and port.channel in known:
                    raise ValueError(
                        f"{type(op).__name__} at position {index} writes to the channel {port.channel!r}, but an "
                        "earlier operation of the sequence writes to it already"
                    )
                known |= {port.channel} if port.channel is not None else set()

    def passes_inside(self, port: Port, indices: Sequence[int]) -> bool:
        """Whether the writer of a port's channel is one of the operations ``indices``, which are fused."""
        return port.channel is not None and self._writers[port.channel] in indices

    def check_left_out(self, name: str, index: int, output: int, indices: Sequence[int]) -> None:
        """Raise RuntimeError if an extra output that a fused operation has left out is needed outside of it.

        Args:
            name: class of the fused operation.
            index: position of the basic operation.
            output: number of its extra output.
            indices: positions of the basic operations that are fused.
        """
        port = self.outputs[index][output]
        readers = [i for i, ports in enumerate(self.inputs) if port.channel in [each.channel for each in ports]]
        if port.public:
            raise RuntimeError(f"extra output {output} of operation {index} is public, but {name} returned None for it")
        if any(reader not in indices for reader in readers):
            raise RuntimeError(
                f"extra output {output} of operation {index} is read by an operation outside its forward fusion, but "
                f"{name} returned None for it"
            )

    def public_inputs(self, tensors: Sequence[Tensor]) -> list[list[Tensor | None]]:
        """The extra inputs of the caller, for each operation; None for those that come from a channel."""
        if len(tensors) != self.num_public_inputs:
            raise ValueError(f"the sequence takes {self.num_public_inputs} extra inputs, but {len(tensors)} were given")
        given = iter(tensors)
        return [[next(given) if port.public else None for port in ports] for ports in self.inputs]


def _input_port(op: BasicOperation, index: int) -> Port:
    channel = op._extra_input_channels.get(index)
    return Port(channel, public=channel is None)


def _output_port(op: BasicOperation, index: int) -> Port:
    return Port(*op._extra_output_channels.get(index, (None, True)))
