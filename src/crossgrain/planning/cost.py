"""`plan`: what a training run costs, on paper."""

from __future__ import annotations

from torch import nn

from ..recipe import GemmRecipe, Recipe
from .assumptions import assumptions
from .count import Count
from .devices import Device, device_of
from .models import Transformer
from .network import Network, network_of
from .result import Plan
from .setup import Setup

_DEFAULT_SEQUENCE = 2048


def plan(
    model: str | Transformer | nn.Module,
    recipe: GemmRecipe | str,
    *,
    gpus: int = 1,
    device: str | Device = "b200",
    sequence: int | None = None,
    batch: int = 1,
    micro_batches: int = 1,
    sharding: str = "fsdp",
    reshard_after_forward: bool = True,
    tensor_parallel: int = 1,
    parameters: str = "quantized",
    gather: str | None = None,
    dtype: str = "bf16",
    gradient_dtype: str | None = None,
    reduce_dtype: str | None = None,
    master: str = "fp32",
    moments: str | tuple[str, str] = "fp32",
    recompute: bool = False,
    gemm_efficiency: float = 1.0,
    wire_efficiency: float = 1.0,
) -> Plan:
    """What a training run would cost per GPU and step, on paper; its assumptions are part of the result.

    ``model``          a name (``llama3-70b``), dimensions (``llama3-8b, layers=16``), a `Transformer`, or a module
    ``recipe``         a preset, a line, a file or a `GemmRecipe`
    ``device``         a name, with numbers of your own if you like: ``b200, memory=192``
    ``sequence``       tokens of a sequence, ``batch`` sequences in a micro batch, ``micro_batches`` in a step
    ``sharding``       "fsdp" over all replicas, or "replicated"; ``tensor_parallel`` GPUs share each replica
    ``reshard_after_forward``  weights are gathered again for backward: rows in forward, columns in backward
    ``parameters``     "quantized" or "high_precision"; ``gather``: "planes" or "high_precision"
    ``dtype``          of activations and of parameters in high precision: fp32, bf16, fp16
    ``master``         fp32, fp16, remainder (16 bits that bf16 lacks) or none; ``moments``: fp32, bf16, fp16 or fp8
    ``recompute``      blocks keep their input alone and run forward again in backward
    ``gemm_efficiency``, ``wire_efficiency``  parts of the peaks that are reached
    """
    network = network_of(model)
    if isinstance(recipe, Recipe) and not isinstance(recipe, GemmRecipe):
        raise TypeError(f"a plan needs a recipe by GEMM, as in 'mxfp8' or GemmRecipe(...), not {type(recipe).__name__}")
    bound = GemmRecipe.load(recipe).for_model(network.module)
    setup = Setup(
        gpus=gpus,
        device=device_of(device),
        sequence=sequence if sequence is not None else network.context or _DEFAULT_SEQUENCE,
        batch=batch,
        micro_batches=micro_batches,
        sharding=sharding,
        reshard_after_forward=reshard_after_forward,
        tensor_parallel=tensor_parallel,
        parameters=parameters,
        gather=gather or ("planes" if parameters == "quantized" else "high_precision"),
        dtype=dtype,
        gradient_dtype=gradient_dtype or dtype,
        reduce_dtype=reduce_dtype or gradient_dtype or dtype,
        master=master,
        moments=(moments, moments) if isinstance(moments, str) else moments,
        recompute=recompute,
        gemm_efficiency=gemm_efficiency,
        wire_efficiency=wire_efficiency,
    )
    _check_cuts(network, setup)
    count = Count(network, bound, setup)
    count.add_all()
    notes = assumptions(network, setup, count.decoded, count.without_rate)
    title = recipe if isinstance(recipe, str) else str(recipe)
    return Plan(
        network.name,
        title,
        setup,
        count.numbers,
        count.memory(),
        count.wire(),
        count.work(),
        count.quantize(),
        notes,
        tuple(count.without_rate),
    )


def _check_cuts(network: Network, setup: Setup) -> None:
    """Raise if tensor parallelism, or recomputation, cannot do what is asked."""
    ranks = setup.tensor_parallel
    if setup.recompute and not network.block_input:
        raise ValueError(f"recompute: what the blocks of {network.name} start from is known for named models only")
    if ranks == 1:
        return
    if not any(layer.cut for layer in network.layers):
        raise ValueError(
            f"tensor_parallel={ranks}: which layers of {network.name} it cuts is known for transformers by "
            "dimensions only"
        )
    for layer in network.layers:
        size = {"outputs": layer.outputs, "inputs": layer.inputs}.get(layer.cut or "", 0)
        if size % ranks:
            raise ValueError(f"{layer.name}: {size} {layer.cut} do not divide by tensor_parallel={ranks}")
    for core in network.cores[:1]:
        if core.kv_heads % ranks:
            raise ValueError(f"{core.name}: {core.kv_heads} heads of keys do not divide by tensor_parallel={ranks}")
