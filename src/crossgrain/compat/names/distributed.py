"""Table of names: recomputation, collectives, random states, offloading."""

from __future__ import annotations

from .entries import Entry, these

_RECOMPUTE = "crossgrain.nn.activation_checkpoint"

DISTRIBUTED: dict[str, Entry] = {
    "transformer_engine.pytorch.distributed": {
        "*": ["crossgrain.distributed"],
        **these(
            _RECOMPUTE,
            "checkpoint",
            "in_fp8_activation_recompute_phase",
            "is_fp8_activation_recompute_enabled",
        ),
        **these("crossgrain.runtime.random_numbers", "CudaRNGStatesTracker"),
        **these(
            "crossgrain.compat.adapters.distributed",
            "activation_recompute_forward",
            "get_all_rng_states",
            "graph_safe_rng_available",
            "prepare_te_modules_for_fsdp",
            "set_all_rng_states",
        ),
    },
    "transformer_engine.pytorch.cpu_offload": "crossgrain.compat.cpu_offload",
    "transformer_engine.pytorch.cpu_offload_v1": "transformer_engine.pytorch.cpu_offload",
}
