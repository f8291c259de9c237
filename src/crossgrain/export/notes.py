"""What users should know about an export before they serve it."""

from __future__ import annotations

from collections.abc import Mapping

# Layers that engines join to one matrix when they load a model, by the last part of their paths.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def notes_on_fused_layers(scales: Mapping[str, float]) -> list[str]:
    """Tell which layers have scales of their own although engines give them one in common.

    Args:
        scales: the number that scales each whole weight (amax or scale), by name of the weight.
    """
    different = []
    for name, scale in scales.items():
        parent, _, own = name.removesuffix(".weight").rpartition(".")
        for group in _FUSED:
            if own == group[0]:
                prefix = f"{parent}." if parent else ""
                others = [scales.get(f"{prefix}{other}.weight", scale) for other in group[1:]]
                different += [f"{prefix}{{{','.join(group)}}}"] if any(other != scale for other in others) else []
    if not different:
        return []
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    return [
        f"{different[0]}{more}: each of these layers has its own scale for the whole weight, as in training. Engines "
        "that join them to one matrix may use one scale for all, which changes numbers; vLLM then prints a warning. "
        "Formats without a scale for the whole tensor (mxfp8, mxfp4) have no such problem"
    ]
