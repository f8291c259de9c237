"""Presets: recipes that have a name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A recipe in one line, and a description."""

    line: str
    description: str


_ATTENTION_SCORES = "delayed(history=1, algo=most_recent)"

PRESETS: dict[str, Preset] = {
    "hp": Preset("all: hp", "no quantization: the baseline"),
    "fp8": Preset("all: fp8(e5m2)", "FP8 with one scale per tensor, from its own amax; gradients in E5M2"),
    "fp8-delayed": Preset("all: fp8(e5m2, delayed)", "as fp8, but with scales from the amaxes of earlier steps"),
    "fp8-block": Preset("all: fp8_block(2d)", "FP8 in blocks of 1x128, weights in tiles of 128x128"),
    "mxfp8": Preset("all: mxfp8", "MXFP8 E4M3 in all three GEMMs"),
    "mxfp8-2d": Preset(
        "all: mxfp8(2d)", "as mxfp8, but weights in tiles of 32x32, so that both passes use the same numbers"
    ),
    "mxfp4": Preset("all: mxfp4(sr)", "MXFP4 in all three GEMMs, gradients rounded stochastically"),
    "nvfp4": Preset(
        "all: nvfp4(2d, rht, sr)", "NVFP4 training: weights in tiles, wgrad rotated, gradients rounded stochastically"
    ),
    "nvfp4-plain": Preset("all: nvfp4", "NVFP4 without tiles, rotation and stochastic rounding"),
    "nvfp4-1d-weight": Preset(
        "all: nvfp4(rht, sr), weight.source: dequantized",
        "NVFP4 with weights in blocks of 1x16; the weight of backward is made from that of forward",
    ),
    "mxfp8-fwd-nvfp4-bwd": Preset(
        "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr), weight.source: dequantized",
        "MXFP8 forward, cheap NVFP4 backward",
    ),
    "nvfp4-fwd-mxfp8-bwd": Preset(
        "fprop: nvfp4(row_scaled), dgrad: mxfp8, wgrad: mxfp8, input.source: dequantized, weight.source: dequantized",
        "cheap NVFP4 forward with an amax per row; backward has the numbers of forward in MXFP8",
    ),
    "nvfp4-fwd-hp-bwd": Preset(
        "fprop: nvfp4(row_scaled), dgrad: hp, wgrad: hp, input.source: dequantized, weight.source: dequantized",
        "quantization-aware training: the exact gradient of an NVFP4 forward",
    ),
    "mxfp8-fwd-hp-bwd": Preset(
        "fprop: mxfp8, dgrad: hp, wgrad: hp, input.source: dequantized, weight.source: dequantized",
        "quantization-aware training: the exact gradient of an MXFP8 forward",
    ),
    "hp-fwd-mxfp8-bwd": Preset("fprop: hp, dgrad: mxfp8, wgrad: mxfp8", "exact forward, MXFP8 backward"),
    "mxfp4-qat-weights": Preset(
        "fprop: mxfp4, fprop.input: hp, dgrad: hp, wgrad: hp, weight.source: dequantized_late, allow_mixed: true",
        "quantization-aware training of MXFP4 weights alone, as those of gpt-oss",
    ),
    "mxfp4-qat": Preset(
        "fprop: mxfp4, dgrad: hp, wgrad: hp, input.source: dequantized_late, weight.source: dequantized_late",
        "quantization-aware training of MXFP4 weights and activations",
    ),
    "nvfp4-qat-weights": Preset(
        "fprop: nvfp4, fprop.input: hp, dgrad: hp, wgrad: hp, weight.source: dequantized_late, allow_mixed: true",
        "quantization-aware training of NVFP4 weights alone",
    ),
    "nvfp4-qat": Preset(
        "fprop: nvfp4, dgrad: hp, wgrad: hp, input.source: dequantized_late, weight.source: dequantized_late",
        "quantization-aware training of NVFP4 weights and activations",
    ),
    "nvfp4-fp8-attention": Preset(
        f"all: nvfp4(2d, rht, sr), attention: fp8(e5m2), attention.s: fp8({_ATTENTION_SCORES}), "
        f"attention.dp: fp8(e5m2, {_ATTENTION_SCORES})",
        "NVFP4 linear layers around an FP8 attention core",
    ),
}

SCHEDULES: dict[str, Preset] = {
    "nvfp4-late-hp": Preset(
        "nvfp4; last 18 % of steps: hp", "NVFP4 training, and all GEMMs in high precision for the last part"
    ),
    "nvfp4-late-hp-fwd": Preset(
        "nvfp4; last 18 % of steps: fprop: hp",
        "NVFP4 training with a forward in high precision for the last part; dgrad and wgrad stay NVFP4",
    ),
}
"""Presets that change during training. 18 % is where the report on pretraining in NVFP4 switched, for a learning rate
that decays in about the last fifth of the run."""


def schedule_name(word: str) -> str | None:
    """The name of the preset of a schedule that a word means, in capitals or not; None if there is none."""
    return next((name for name in (word, word.lower()) if name in SCHEDULES), None)


def preset_name(word: str) -> str | None:
    """The name of the preset that a word means, in capitals or not; None if there is none."""
    return next((name for name in (word, word.lower()) if name in PRESETS), None)


def preset_table() -> str:
    """All presets as text, two lines for each; those of schedules are the last.

    Examples:
        >>> print(" ".join(cg.recipe.preset_table().splitlines()[0].split()))
        hp no quantization: the baseline
    """
    return "\n".join(
        f"{name:<20} {preset.description}\n{'':<20} {preset.line}" for name, preset in {**PRESETS, **SCHEDULES}.items()
    )
