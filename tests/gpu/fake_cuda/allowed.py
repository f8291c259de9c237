"""Where the host may wait for a GPU in a training step, and why. Everything else is an error."""

from __future__ import annotations

from .device import Wait

ALLOWED: dict[tuple[str, str], str] = {
    ("read", "convert/experts.py: _rows_of_experts"): "the rows of each expert are sizes of tensors",
    ("read", "distributed/experts.py: __init__"): "counts of a TokenExchange are sizes of tensors; lists do not wait",
    ("read", "nn/attention/context_parallel.py: _part"): "the longest part of a packed sequence is a size",
    ("read", "nn/attention/layout.py: of_sequences"): "the longest sequence is a size, unless max_seqlen is given",
    ("read", "nn/grouped_linear.py: checked_sizes"): "m_splits are sizes of tensors; lists do not wait",
    ("read", "nn/moe/permutation.py: _row_count"): "the number of rows is a size, unless num_out_tokens is given",
    ("read", "nn/moe/permutation.py: moe_permute_and_pad_with_probs"): "the number of padded rows is a size",
    ("read", "offload/record.py: write"): "offloading copies to the host, in a thread of its own",
    ("upload", "offload/record.py: read"): "offloading copies from the host, in a thread of its own",
    ("upload", "optim/masters.py: take_master"): "once: initial values in high precision are kept on the host",
    ("read", "quantizers/nonfinite.py: _refuse_nonfinite"): "nonfinite='raise' raises in the call that has found a NaN",
    ("read", "quantizers/parts.py: _seeds"): "ranks agree on a seed of stochastic rounding, which the host draws",
    ("read", "tensor/sharding.py: exchanged"): "once: ranks compare the shards of a weight that they will gather",
    ("upload", "recipe/extra_state.py: load_extra_state"): "once: histories of a checkpoint are loaded on first use",
}

REFERENCE = "kernels/reference"
"""The kernels of these runs upload tables in every call; on a GPU, others serve all built-in formats."""


def is_allowed(wait: Wait) -> bool:
    """Whether the host may wait here."""
    return wait.place.startswith(REFERENCE) or (wait.kind, wait.place) in ALLOWED
