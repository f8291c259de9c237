"""What a plan takes for granted, in sentences."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .network import Network
from .setup import Setup


def assumptions(
    network: Network, setup: Setup, decoded: Collection[str], without_rate: Mapping[str, str]
) -> tuple[str, ...]:
    device, ranks = setup.device, setup.tensor_parallel
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in device.teraflops)
    found = [
        f"Each GPU ({device.name}) has {device.memory:g} GB of memory at {device.bandwidth:g} GB/s and multiplies at a "
        f"dense peak of (TFLOP/s) {rates}; nodes of {device.node} GPUs are linked at {device.link:g} GB/s each way, "
        f"nodes at {device.network:g} GB/s per GPU. These are published figures, not measurements.",
        *network.notes,
        _high_precision(network),
        f"GEMMs reach {setup.gemm_efficiency:.0%} of the peak of their elements, or the bandwidth of the memory if "
        "that takes longer. Quantization reads its input once, or twice where an amax of the whole tensor comes "
        "first, and writes the planes. Norms, activation functions, routing, the loss and the optimizer take no time.",
    ]
    found += [
        f"No rate is published for {fmt}: its operands are counted as decoded to bf16, its GEMMs at the rate of bf16. "
        f"If you know at what rate this GPU multiplies {kind}, pass it: device '{_base_name(setup)}, {kind}=<TFLOP/s>'."
        for fmt, kind in sorted(without_rate.items())
    ]
    if decoded:
        formats = " and ".join(sorted(decoded))
        found.append(f"Operands in {formats} are not multiplied natively by this GPU: they are decoded to bf16 first.")
    found += _parameters(setup)
    found += _collectives(setup)
    if ranks > 1:
        found.append(
            f"Tensor parallelism over {ranks} GPUs cuts qkv and the way into the MLP by outputs, the way back by "
            f"inputs, the embedding and lm_head by vocabulary, and everything between by tokens; activations travel in "
            f"{setup.dtype}: gathered for the first and scattered after the second, in both passes, and gathered once "
            "more for wgrad."
        )
    if setup.recompute:
        found.append("Blocks keep their input alone and run forward again in backward, one at a time.")
    found.append(
        f"One micro batch of {setup.batch} x {setup.sequence} tokens is in flight at a time, and saved tensors are "
        "held until backward of the whole model. Allocators, fragmentation, kernels' own workspaces, logits beyond "
        "one fp32 copy and checkpoints take no memory."
    )
    return tuple(found)


def _base_name(setup: Setup) -> str:
    return setup.device.name.removesuffix(" (changed)")


def _high_precision(network: Network) -> str:
    staying = dict.fromkeys(
        "routers" if layer.name.endswith("router") else layer.name for layer in network.layers if layer.stays
    )
    rest = f"; so are {', '.join(staying)} and attention, unless the recipe names them" if staying else ""
    return f"Embeddings, norms and biases are in high precision{rest}."


def _parameters(setup: Setup) -> list[str]:
    if setup.parameters == "quantized":
        kept = "Weights of linear layers are kept quantized, in both directions; layers use them as they are."
    else:
        kept = f"Weights are kept in {setup.dtype}."
        kept += (
            " Each rank quantizes its part before it is sent."
            if setup.weights_come_quantized
            else " Layers quantize them in every micro batch and keep the plane that backward reads."
        )
    first, second = setup.moments
    moments = f"moments in {first}" if first == second else f"moments in {first} and {second}"
    masters = {
        "none": "no masters",
        "remainder": "masters as the 16 bits that bf16 lacks (quantized weights: fp32)",
    }.get(setup.master, f"masters in {setup.master} (of what is not fp32 itself)")
    return [f"{kept} Adam has {masters} and {moments}. Gradients are held in {setup.gradient_dtype}."]


def _collectives(setup: Setup) -> list[str]:
    if setup.replicas == 1:
        return []
    ring = (
        f"Rings over {setup.replicas} GPUs bring each of them all but its own part, at "
        f"{setup.bandwidth(setup.replicas, setup.tensor_parallel) / 1e9:g} GB/s: the network of all GPUs of a ring "
        "that are in one node, at most their link."
    )
    if setup.sharding == "replicated":
        return [f"Gradients are all-reduced once in a step, in {setup.reduce_dtype}. {ring}"]
    what = "as planes" if setup.weights_come_quantized else f"in {setup.dtype}"
    if setup.reshard_after_forward:
        directions = ": rows for forward, columns for backward" if setup.weights_come_quantized else ""
        if setup.weights_come_quantized and setup.recompute:
            directions = ": rows for forward, both directions for backward, which runs forward again"
        passes = (
            f"before forward and again before backward{directions}; two blocks are gathered at a time, and what is "
            "outside of blocks stays gathered"
        )
    else:
        passes = "once for both passes, and stay until backward"
    return [
        f"FSDP gathers weights {what}, in every micro batch, {passes}. Gradients are reduce-scattered in every micro "
        f"batch, in {setup.reduce_dtype}. Shards are even. {ring}"
    ]
