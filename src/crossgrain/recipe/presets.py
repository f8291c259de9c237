"""Recipes by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A recipe in one line, and what it is in another."""

    line: str
    description: str


_ATTENTION_SCORES = "delayed(history=1, algo=most_recent)"

PRESETS: dict[str, Preset] = {
    "hp": Preset("all: hp", "no quantization at all: the baseline"),
    "fp8": Preset("all: fp8(e5m2)", "FP8 with a scale per tensor from its own amax; gradients in E5M2"),
    "fp8-delayed": Preset("all: fp8(e5m2, delayed)", "the same with scales from the amaxes of earlier steps"),
    "fp8-block": Preset("all: fp8_block(2d)", "FP8 in blocks of 1x128, weights in tiles of 128x128"),
    "mxfp8": Preset("all: mxfp8", "MXFP8 E4M3 in all three GEMMs"),
    "mxfp8-2d": Preset("all: mxfp8(2d)", "the same with weights in tiles of 32x32: one set of numbers for both passes"),
    "mxfp4": Preset("all: mxfp4(sr)", "MXFP4 in all three GEMMs, gradients rounded at random"),
    "nvfp4": Preset(
        "all: nvfp4(2d, rht, sr)", "NVFP4 training: tiled weights, rotated wgrad, gradients rounded at random"
    ),
    "nvfp4-plain": Preset("all: nvfp4", "NVFP4 without any of these"),
    "nvfp4-1d-weight": Preset(
        "all: nvfp4(rht, sr), weight.source: dequantized",
        "NVFP4 with 1x16 weight blocks; the backward weight is made from the forward one",
    ),
    "mxfp8-fwd-nvfp4-bwd": Preset(
        "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr), weight.source: dequantized",
        "precise forward, cheap backward",
    ),
    "nvfp4-fwd-mxfp8-bwd": Preset(
        "fprop: nvfp4(row_scaled), dgrad: mxfp8, wgrad: mxfp8, input.source: dequantized, weight.source: dequantized",
        "cheap forward with an amax per row; the backward sees the forward's numbers in MXFP8",
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
    "nvfp4-fp8-attention": Preset(
        f"all: nvfp4(2d, rht, sr), attention: fp8(e5m2), attention.s: fp8({_ATTENTION_SCORES}), "
        f"attention.dp: fp8(e5m2, {_ATTENTION_SCORES})",
        "NVFP4 linear layers around an FP8 attention core",
    ),
}


def preset_table() -> str:
    """All presets on one screen."""
    return "\n".join(f"{name:<20} {preset.description}\n{'':<20} {preset.line}" for name, preset in PRESETS.items())
