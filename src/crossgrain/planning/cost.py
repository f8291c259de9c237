"""`plan`: estimate what a training run costs."""

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

_DEFAULT_SEQUENCE = 2048  # for modules, whose context is not known


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
    """Estimate what a training run costs per GPU and step. Nothing is run, and no GPU is needed.

    Args:
        model: a name (``llama3-70b``), a name with changed dimensions (``llama3-8b, layers=16``), dimensions
            (``layers=2, width=64, ...``), a `Transformer`, or a module, which may be on the meta device.
        recipe: a preset, a recipe in one line of text, the path of a file, or a `GemmRecipe`.
        gpus: number of GPUs.
        device: the GPU: a name, also with changed figures (``b200, memory=192``), or a `Device`.
        sequence: tokens of a sequence; by default the context of the model, or 2048.
        batch: sequences of a micro batch of one replica.
        micro_batches: micro batches of a step.
        sharding: "fsdp" divides parameters among all replicas; "replicated" keeps all of them on each.
        reshard_after_forward: with FSDP, free gathered weights after forward and gather them again for backward.
        tensor_parallel: number of GPUs that share each replica.
        parameters: "quantized" keeps weights quantized (`quantized_model_init`); "high_precision" keeps them in
            ``dtype`` (`convert`).
        gather: how FSDP sends weights: "planes" or "high_precision"; by default as they are kept.
        dtype: dtype of activations and of parameters in high precision: "fp32", "bf16" or "fp16".
        gradient_dtype: dtype in which gradients are stored; by default ``dtype``.
        reduce_dtype: dtype in which gradients are sent; by default ``gradient_dtype``.
        master: dtype of master weights: "fp32", "fp16", "remainder" (the 16 bits that bf16 does not have) or "none".
        moments: dtype of Adam's moments, or one for each of the two: "fp32", "bf16", "fp16" or "fp8".
        recompute: blocks keep only their input, and run forward again in backward.
        gemm_efficiency: the part of the peak rate that GEMMs reach, above 0 and at most 1.
        wire_efficiency: the part of the bandwidth that collectives reach, above 0 and at most 1.

    Returns:
        The plan, with its assumptions; print it.

    Raises:
        ValueError: an argument is wrong, or the model cannot be divided as asked.
        TypeError: the recipe or the model is of another type.

    Examples:
        >>> estimate = cg.plan("llama3-8b", "mxfp8", gpus=8, device="b200")
        >>> print(str(estimate).splitlines()[0])
        llama3-8b (8.03B parameters) on 8 x b200, fsdp, 65,536 tokens per step
    """
    network = network_of(model)
    if isinstance(recipe, Recipe) and not isinstance(recipe, GemmRecipe):
        raise TypeError(f"a plan needs a GemmRecipe or its text, such as 'mxfp8', got a {type(recipe).__name__}")
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
    """Raise ValueError if the model cannot be divided by tensor parallelism, or cannot be recomputed."""
    ranks = setup.tensor_parallel
    if setup.recompute and not network.block_input:
        raise ValueError(
            f"recompute=True is not possible for {network.name}: the size of the input of its blocks is not known. Use "
            "a model by name or by dimensions"
        )
    if ranks == 1:
        return
    if not any(layer.cut for layer in network.layers):
        raise ValueError(
            f"tensor_parallel={ranks} is not possible for {network.name}: it is not known which of its layers are "
            "divided. Use a model by name or by dimensions"
        )
    for layer in network.layers:
        size = {"outputs": layer.outputs, "inputs": layer.inputs}.get(layer.cut or "", 0)
        if size % ranks:
            raise ValueError(
                f"{layer.name}: {size} {layer.cut} cannot be divided evenly among tensor_parallel={ranks} GPUs"
            )
    for core in network.cores[:1]:
        if core.kv_heads % ranks:
            raise ValueError(
                f"{core.name}: {core.kv_heads} kv_heads cannot be divided evenly among tensor_parallel={ranks} GPUs"
            )
