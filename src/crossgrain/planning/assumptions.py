"""The assumptions of a plan, in sentences."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .network import Network
from .setup import Setup


def assumptions(
    network: Network, setup: Setup, decoded: Collection[str], without_rate: Mapping[str, str]
) -> tuple[str, ...]:
    """List the assumptions of a plan.

    Args:
        network: the model.
        setup: how it is trained.
        decoded: formats that the GPU cannot multiply without decoding.
        without_rate: formats without a published rate, and their elements.
    """
    device, ranks = setup.device, setup.tensor_parallel
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in device.teraflops)
    found = [
        f"Each GPU ({device.name}) has {device.memory:g} GB of memory with {device.bandwidth:g} GB/s. Its dense peak "
        f"rates in TFLOP/s are {rates}. The {device.node} GPUs of a node are connected with {device.link:g} GB/s each "
        f"way, nodes with {device.network:g} GB/s per GPU. These are published figures, not measurements.",
        *network.notes,
        _high_precision(network),
        f"GEMMs run at {setup.gemm_efficiency:.0%} of the peak rate of their elements, or at the bandwidth of the "
        "memory if that takes longer. Quantization reads its input once, or twice if it needs the amax of the whole "
        "tensor first, and writes the planes. Norms, activation functions, routing, the loss and the optimizer take no "
        "time.",
    ]
    found += [
        f"No rate is published for {fmt}: its operands are decoded to bf16, and its GEMMs run at the rate of bf16. If "
        f"you know the rate at which this GPU multiplies {kind}, pass it: device '{_base_name(setup)}, "
        f"{kind}=<TFLOP/s>'."
        for fmt, kind in sorted(without_rate.items())
    ]
    if decoded:
        formats = " and ".join(sorted(decoded))
        found.append(f"Operands in {formats} are not multiplied natively by this GPU, so they are decoded to bf16.")
    found += _parameters(setup)
    found += _collectives(setup)
    if ranks > 1:
        found.append(
            f"Tensor parallelism over {ranks} GPUs divides qkv and the first layers of the MLP by outputs, the layers "
            "after them by inputs, the embedding and lm_head by the vocabulary, and everything between by tokens. "
            f"Activations are sent in {setup.dtype}: they are gathered before the first layers and scattered after the "
            "second, in both passes, and gathered once more for wgrad."
        )
    if setup.recompute:
        found.append("Blocks keep only their input, and run forward again in backward, one block at a time.")
    found.append(
        f"One micro batch of {setup.batch} x {setup.sequence} tokens is computed at a time, and all its saved tensors "
        "are kept until backward. Allocators, fragmentation, workspaces of kernels, logits beyond one fp32 copy and "
        "checkpoints take no memory."
    )
    return tuple(found)


def _base_name(setup: Setup) -> str:
    return setup.device.name.removesuffix(" (changed)")


def _high_precision(network: Network) -> str:
    staying = dict.fromkeys(
        "routers" if layer.name.endswith("router") else layer.name for layer in network.layers if layer.stays
    )
    rest = f", and so are {', '.join(staying)} and attention, unless the recipe has a rule for them" if staying else ""
    return f"Embeddings, norms and biases are in high precision{rest}."


def _parameters(setup: Setup) -> list[str]:
    if setup.parameters == "quantized":
        kept = "Weights of linear layers are kept quantized, in both directions, and layers use them as they are."
    else:
        kept = f"Weights are kept in {setup.dtype}."
        kept += (
            " Each rank quantizes its part before it sends it."
            if setup.weights_come_quantized
            else " Layers quantize them in every micro batch, and keep the plane that backward reads."
        )
    first, second = setup.moments
    moments = f"moments in {first}" if first == second else f"moments in {first} and {second}"
    masters = {
        "none": "no masters",
        "remainder": "masters as the 16 bits that bf16 does not have (fp32 for quantized weights)",
    }.get(setup.master, f"masters in {setup.master} (of parameters that are not fp32)")
    return [f"{kept} Adam has {masters} and {moments}. Gradients are stored in {setup.gradient_dtype}."]


def _collectives(setup: Setup) -> list[str]:
    if setup.replicas == 1:
        return []
    ring = (
        f"In rings over {setup.replicas} GPUs each GPU receives everything except its own part, at "
        f"{setup.bandwidth(setup.replicas, setup.tensor_parallel) / 1e9:g} GB/s: the network bandwidth of all GPUs of "
        "a ring that are in one node, but at most that of their link."
    )
    if setup.sharding == "replicated":
        return [f"Gradients are all-reduced once per step, in {setup.reduce_dtype}. {ring}"]
    what = "as planes" if setup.weights_come_quantized else f"in {setup.dtype}"
    if setup.reshard_after_forward:
        directions = ": rowwise planes for forward, columnwise for backward" if setup.weights_come_quantized else ""
        if setup.weights_come_quantized and setup.recompute:
            directions = ": rowwise planes for forward, both directions for backward, which runs forward again"
        passes = (
            f"before forward and again before backward{directions}. Two blocks are gathered at a time, and parameters "
            "outside of blocks stay gathered"
        )
    else:
        passes = "once for both passes, and keeps them until backward"
    return [
        f"FSDP gathers weights {what}, in every micro batch, {passes}. Gradients are reduce-scattered in every micro "
        f"batch, in {setup.reduce_dtype}. All shards have the same size. {ring}"
    ]
