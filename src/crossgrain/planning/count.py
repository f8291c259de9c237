"""Sums of bytes, FLOPs and seconds over the layers of one GPU."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..planes import COLUMNWISE, ROWWISE
from ..recipe import GemmRecipe
from ..recipe.layer_formats import LayerFormats
from .layer_cost import Gemm, attention_cost, gathered_planes, layer_cost, makes_late
from .network import Core, LinearLayer, Network, unit_of
from .plane_bytes import (
    DTYPES,
    Gathered,
    buffer_bytes,
    master_bytes,
    moment_bytes,
    numbers_in_shards,
    planes_of,
)
from .price import price
from .result import Memory, Traffic, Work
from .setup import Setup


@dataclass
class _Unit:
    """What is gathered, reduced and recomputed together: a block, or everything outside of blocks."""

    forward: int = 0  # bytes of gathers
    backward: int = 0
    both: int = 0
    numbers: int = 0  # parameters
    saved: int = 0


@dataclass
class Count:
    """Sums over all layers for one GPU, before FSDP divides them."""

    network: Network
    recipe: GemmRecipe
    setup: Setup
    numbers: int = 0
    weights: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    masters: int = 0
    moments: int = 0
    saved: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    operands: int = 0
    quantized: int = 0
    parallel_bytes: int = 0
    units: dict[str, _Unit] = field(default_factory=lambda: defaultdict(_Unit))
    gemms: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))
    decoded: set[str] = field(default_factory=set)
    without_rate: dict[str, str] = field(default_factory=dict)  # formats, and the elements whose rates are missing
    _local_numbers: int = 0
    _reduced_numbers: int = 0

    def add_all(self) -> None:
        """Add all layers, attention cores, other parameters and saved tensors."""
        for layer in self.network.layers:
            self._add_layer(layer)
        for core in self.network.cores:
            self._add_core(core)
        setup = self.setup
        for parameter in self.network.plain:
            shape = parameter.shape
            if parameter.cut:
                shape = (math.ceil(shape[0] / setup.tensor_parallel), *shape[1:])
            self._add_parameter(unit_of(parameter.name), shape, False)
            self.numbers += math.prod(parameter.shape)
            self.weights[setup.dtype] += math.prod(shape) * setup.torch_dtype.itemsize
            self._add_gather(unit_of(parameter.name), *self._gathered_plain(shape))
            if parameter.is_embedding:  # each rank looks up tokens in its part, and the results are added
                self.parallel_bytes += 2 * setup.tokens * shape[1] * setup.torch_dtype.itemsize
        for kept in self.network.kept:
            size = kept.elements * setup.tokens * (kept.itemsize or setup.torch_dtype.itemsize)
            self._save("others", unit_of(kept.name), math.ceil(size / setup.tensor_parallel))

    # ---- layers --------------------------------------------------------------------------------

    def _stays(self, layer: LinearLayer) -> bool:
        """Whether a layer stays in high precision, because no rule of the recipe names it."""
        return layer.stays and not self.recipe.names_layer(layer.name, layer.module_type)

    def _add_layer(self, layer: LinearLayer) -> None:
        setup, dtype, ranks = self.setup, self.setup.torch_dtype, self.setup.tensor_parallel
        recipe = GemmRecipe.load("hp") if self._stays(layer) else self.recipe
        layer_formats = recipe.layer_formats(layer.name, layer.module_type).without_reasons()  # once for equal layers
        outputs = layer.outputs // (ranks if layer.cut == "outputs" else 1)
        inputs = layer.inputs // (ranks if layer.cut == "inputs" else 1)
        apart = 1 if layer.cut else ranks  # a layer that is not divided gets a part of the tokens
        tokens = math.ceil(setup.tokens * layer.share / apart)
        comes_quantized = setup.weights_come_quantized and not layer.tied  # a tied weight is kept as an embedding
        cost = layer_cost(layer_formats, recipe.backward_override, tokens, inputs, outputs, dtype, comes_quantized)
        unit = unit_of(layer.name)
        for gemm in cost.gemms:
            self._add_gemm(gemm, layer.copies, unit)
        cut_tokens = ranks if layer.cut == "outputs" else 1  # gathered for the GEMM, but each rank saves its part
        if not (cost.keeps_input_itself and self._keeps_output(layer.after)):
            self._save("inputs", unit, math.ceil(cost.saved_input * layer.copies / cut_tokens))
        self._save("weights", unit, cost.saved_weight * layer.copies)
        passes = 1 + (setup.recompute and unit != "")  # forward
        self.operands = max(self.operands, cost.operands * layer.copies)
        self.quantized += (cost.quantized_forward * passes + cost.quantized_backward) * layer.copies
        if layer.cut == "outputs":  # x in forward and again for wgrad, dx in backward
            self.parallel_bytes += (2 + passes) * setup.tokens * layer.inputs * dtype.itemsize
        elif layer.cut == "inputs":  # y in forward, dy in backward
            self.parallel_bytes += (1 + passes) * setup.tokens * layer.outputs * dtype.itemsize
        self.numbers += 0 if layer.tied else layer.inputs * layer.outputs * layer.copies
        if not layer.tied:
            self._add_weight(layer, layer_formats, (outputs, inputs), unit)

    def _keeps_output(self, core: str) -> bool:
        """Whether an attention core keeps its output in high precision."""
        return bool(core) and self.recipe.layer_formats(core, "dpa").format("attention", "o").value.format == "hp"

    def _add_weight(self, layer: LinearLayer, layer_formats: LayerFormats, shape: tuple[int, int], unit: str) -> None:
        setup, dtype = self.setup, self.setup.torch_dtype
        quantized = setup.parameters == "quantized" and not self._stays(layer)
        plain = math.prod(shape) * dtype.itemsize
        for _ in range(layer.copies):
            self._add_parameter(unit, shape, quantized)
        sizes = self._gathered_plain(shape)
        if setup.weights_come_quantized and not self._stays(layer):
            sizes = self._gathered_planes(layer, layer_formats, shape)
        self._add_gather(unit, *(size * layer.copies for size in sizes))
        if not quantized:
            self.weights[setup.dtype] += plain * layer.copies
            return
        rows, columns = planes_of(layer_formats, "weight", shape, dtype, (ROWWISE, COLUMNWISE))
        if rows.data is columns.data:
            name = setup.dtype if rows.format.is_identity else f"{rows.format.name}, one for both directions"
            self.weights[name] += buffer_bytes([rows, columns]) * layer.copies
            return
        for plane in (rows,) if makes_late(layer_formats, "weight") else (rows, columns):
            name = setup.dtype if plane.format.is_identity else plane.format.name
            direction = "columnwise" if plane is columns else "rowwise"
            self.weights[f"{name} {direction}"] += buffer_bytes([plane]) * layer.copies

    def _gathered_plain(self, shape: tuple[int, ...]) -> Gathered:
        size = numbers_in_shards(shape, self.setup.replicas) * self.setup.torch_dtype.itemsize
        return Gathered(size, size, size)

    def _gathered_planes(self, layer: LinearLayer, layer_formats: LayerFormats, shape: tuple[int, int]) -> Gathered:
        setup = self.setup
        try:
            return gathered_planes(
                layer_formats,
                self.recipe.backward_override,
                shape,
                setup.replicas,
                setup.torch_dtype,
                tokens=setup.tokens,
                kept_quantized=setup.parameters == "quantized",
            )
        except ValueError as error:
            raise ValueError(f"{layer.name}: its weight cannot be kept quantized: {error}") from error

    def _add_parameter(self, unit: str, shape: tuple[int, ...], quantized: bool) -> None:
        setup = self.setup
        self.units[unit].numbers += math.prod(shape)
        self._local_numbers += math.prod(shape)
        self._reduced_numbers += numbers_in_shards(shape, setup.replicas) if setup.is_sharded else math.prod(shape)
        self.masters += master_bytes(shape, setup.master, quantized, setup.torch_dtype)
        self.moments += sum(moment_bytes(shape, moment) for moment in setup.moments)

    def _add_gather(self, unit: str, forward: int, backward: int, both: int) -> None:
        self.units[unit].forward += forward
        self.units[unit].backward += backward
        self.units[unit].both += both

    def _add_core(self, core: Core) -> None:
        setup = self.setup
        core_formats = self.recipe.layer_formats(core.name, "dpa")
        ranks = setup.tensor_parallel
        heads, kv_heads = core.heads // ranks, core.kv_heads // ranks
        gemms, saved = attention_cost(
            core_formats, setup.tokens, setup.sequence, heads, kv_heads, core.channels, setup.torch_dtype
        )
        for gemm in gemms:
            self._add_gemm(gemm, 1, unit_of(core.name))
        self._save("others", unit_of(core.name), saved)

    def _save(self, kind: str, unit: str, size: int) -> None:
        self.units[unit].saved += size
        if not (self.setup.recompute and unit):
            self.saved[kind] += size

    def _add_gemm(self, gemm: Gemm, copies: int, unit: str) -> None:
        setup = self.setup
        again = 1 + (setup.recompute and unit != "" and gemm.name in ("fprop", "attention forward"))
        found = price(gemm, setup.device, setup.gemm_efficiency)
        if found.missing is not None:
            self.without_rate[gemm.format] = found.missing
        elif found.decoded:
            self.decoded.add(gemm.format)
        count = copies * again * setup.micro_batches
        total = self.gemms[gemm.name, gemm.format, found.kind]
        total[0] += gemm.flops * count
        total[1] += found.seconds * count

    # ---- results -------------------------------------------------------------------------------

    def _share(self, size: int) -> int:
        """The share of one GPU in what FSDP divides."""
        return math.ceil(size / self.setup.replicas) if self.setup.is_sharded else size

    def memory(self) -> Memory:
        """The memory of one GPU."""
        setup, gradient = self.setup, DTYPES[self.setup.gradient_dtype].itemsize
        others = self.saved["others"]
        if setup.recompute:
            blocks = sum(1 for unit in self.units if unit)
            size = self.network.block_input * setup.tokens * setup.torch_dtype.itemsize
            others += blocks * math.ceil(size / setup.tensor_parallel)
        return Memory(
            weights={name: self._share(size) for name, size in self.weights.items()},
            gradients=self._share(self._local_numbers * gradient),
            masters=self._share(self.masters),
            moments=self._share(self.moments),
            saved_inputs=self.saved["inputs"],
            saved_weights=self.saved["weights"],
            saved_others=others,
            workspace=dict(self._workspace(gradient)),
        )

    def _workspace(self, gradient: int) -> Iterator[tuple[str, int]]:
        setup, root = self.setup, self.units.get("", _Unit())
        blocks = [unit for name, unit in self.units.items() if name] or [_Unit()]
        if setup.is_sharded:
            gathered = root.both + sum(unit.both for unit in blocks)
            if setup.reshard_after_forward:
                most = max(max(unit.forward, self._backward_gather(unit)) for unit in blocks)
                gathered = root.both + 2 * most
            yield "gathered weights", gathered
            yield "gradients before they are reduced", max(unit.numbers for unit in [root, *blocks]) * gradient
        if setup.recompute:
            yield "one block, recomputed", max(unit.saved for unit in blocks)
        yield "operands of the largest layer", self.operands

    def _backward_gather(self, unit: _Unit) -> int:
        return unit.both if self.setup.recompute else unit.backward

    def wire(self) -> tuple[Traffic, ...]:
        """What one GPU receives in a step."""
        setup = self.setup
        found = []
        blocks, root = [unit for name, unit in self.units.items() if name], self.units.get("", _Unit())
        part = (setup.replicas - 1) / setup.replicas
        if setup.is_sharded:
            forward, backward = sum(unit.forward for unit in blocks), sum(map(self._backward_gather, blocks))
            if not setup.reshard_after_forward:
                forward, backward = sum(unit.both for unit in blocks), 0
            found.append(("gather weights for forward", (forward + root.both) * part * setup.micro_batches))
            found.append(("gather weights for backward", backward * part * setup.micro_batches))
        reduced = self._reduced_numbers * DTYPES[setup.reduce_dtype].itemsize * part
        if setup.is_sharded:
            found.append(("reduce-scatter gradients", reduced * setup.micro_batches))
        elif setup.replicas > 1:
            found.append(("all-reduce gradients", 2 * reduced))
        bandwidth = setup.bandwidth(setup.replicas, setup.tensor_parallel)
        traffic = [Traffic(kind, round(size), size / bandwidth) for kind, size in found if size]
        if setup.tensor_parallel > 1:
            size = self.parallel_bytes * setup.micro_batches * (1 - 1 / setup.tensor_parallel)
            seconds = size / setup.bandwidth(setup.tensor_parallel, 1)
            traffic.append(Traffic("activations (tensor parallel)", round(size), seconds))
        return tuple(traffic)

    def work(self) -> tuple[Work, ...]:
        """The GEMMs of one GPU in a step."""
        return tuple(
            Work(name, fmt, kind, int(flops), seconds) for (name, fmt, kind), (flops, seconds) in self.gemms.items()
        )

    def quantize(self) -> float:
        """Seconds that one GPU quantizes in a step."""
        return self.quantized * self.setup.micro_batches / (self.setup.device.bandwidth * 1e9)
