"""The layout of compressed-tensors, which vLLM and transformers load: NVFP4, MXFP4, MXFP8 and FP8 weights.

| format | tensors of ``layer`` |
|---|---|
| NVFP4 | ``weight_packed`` uint8 [out, in/2], ``weight_scale`` E4M3 [out, in/16], ``weight_global_scale`` fp32 [1] |
| MXFP4 | ``weight_packed`` uint8 [out, in/2], ``weight_scale`` uint8 (E8M0) [out, in/32] |
| MXFP8 | ``weight`` E4M3 [out, in], ``weight_scale`` uint8 (E8M0) [out, in/32] |
| FP8 | ``weight`` E4M3 [out, in], ``weight_scale`` fp32: [1], or one per block |

The global scale of NVFP4 is the one that multiplies when encoding; readers divide by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..convert.layers import ConvertedConv1D
from ..formats import Format
from .checks import FP8, FP8_ROWS, FP8_TILES, MXFP4, MXFP8, NVFP4, kind_of, refuse
from .contents import Contents
from .layout import Layout, amax_from, as_e4m3, expect, expect_one, global_encode_scale
from .walk import Bytes

_FORMATS = {
    NVFP4: "nvfp4-pack-quantized",
    MXFP4: "mxfp4-pack-quantized",
    MXFP8: "mxfp8-quantized",
    FP8: "float-quantized",
    FP8_ROWS: "float-quantized",
    FP8_TILES: "float-quantized",
}


class CompressedTensors(Layout):
    """The layout of compressed-tensors."""

    name = "compressed-tensors"
    kinds: ClassVar[frozenset[str]] = frozenset(_FORMATS)

    def check(self, contents: Contents) -> None:
        super().check(contents)
        refuse(
            [
                f"{name}: it is a Conv1D, whose weight is [in, out]; {self.name} knows only nn.Linear"
                for name, weight in contents.weights.items()
                if isinstance(weight.module, ConvertedConv1D)
            ],
            self.name,
        )

    def tensors(self, name: str, found: Bytes, contents: Contents) -> dict[str, Tensor]:
        kind = kind_of(found.format)
        amax = contents.input_amaxes.get(name)
        layer = contents.layer(name)
        if kind == NVFP4:
            stored = {
                f"{name}_packed": found.codes,
                f"{name}_scale": as_e4m3(found.scales),
                f"{name}_global_scale": global_encode_scale(found),
            }
            if amax is not None:
                stored[f"{layer}.input_global_scale"] = torch.tensor([448.0 * 6.0]) / max(amax, _SMALLEST)
            return stored
        if kind == MXFP4:
            return {f"{name}_packed": found.codes, f"{name}_scale": found.scales}
        stored = {name: as_e4m3(found.codes), f"{name}_scale": found.scales}
        if kind == FP8:
            stored[f"{name}_scale"] = found.scales.reshape(1)
            if amax is not None:
                stored[f"{layer}.input_scale"] = torch.tensor([max(amax, _SMALLEST)]) / 448.0
        return stored

    def files(self, contents: Contents) -> dict[str, Mapping[str, Any]]:
        by_kind: dict[str, list[str]] = {}
        for name, weight in contents.weights.items():
            assert weight.format is not None
            by_kind.setdefault(kind_of(weight.format) or "", []).append(contents.layer(name))
        groups = {}
        for i, (kind, layers) in enumerate(by_kind.items()):
            groups[f"group_{i}"] = {
                "targets": ["Linear"] if len(by_kind) == 1 else layers,
                "weights": _weights(kind),
                "input_activations": _activations(kind, bool(contents.input_amaxes)),
                "output_activations": None,
                "format": _FORMATS[kind],
            }
        formats = {group["format"] for group in groups.values()}
        quantization = {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": contents.left,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
        return {"config.json": {**contents.config, "quantization_config": quantization}}

    def describes(self, directory: Path, config: Mapping[str, Any]) -> bool:
        return bool(config.get("quantization_config", {}).get("quant_method") == self.name)

    def consumed(self, name: str, fmt: Format) -> list[str]:
        kind = kind_of(fmt)
        if kind == NVFP4:
            return [f"{name}_packed", f"{name}_scale", f"{name}_global_scale"]
        return [f"{name}_packed" if kind == MXFP4 else name, f"{name}_scale"]

    def read(self, name: str, stored: Mapping[str, Tensor], fmt: Format, amax: float | None) -> Bytes:
        kind = kind_of(fmt)
        packed = kind in (NVFP4, MXFP4)
        codes = stored[f"{name}_packed" if packed else name]
        rows, columns = codes.shape[0], codes.shape[1] * (2 if packed else 1)
        scales = stored[f"{name}_scale"]
        blocks = columns // max(fmt.block_length, 1)
        expect(name, codes, torch.uint8 if packed else torch.float8_e4m3fn, tuple(codes.shape))
        found_amax = None
        if kind == NVFP4:
            scales = expect(f"{name}_scale", scales, torch.float8_e4m3fn, (rows, blocks)).view(torch.uint8)
            given = expect_one(f"{name}_global_scale", stored[f"{name}_global_scale"])
            found_amax = amax_from(given, fmt, amax, reciprocal=True)
        elif kind in (MXFP4, MXFP8):
            expect(f"{name}_scale", scales, torch.uint8, (rows, blocks))
        elif kind == FP8:
            scales = expect_one(f"{name}_scale", scales).reshape(1, 1)
        else:
            grid = (math.ceil(rows / fmt.block_rows), math.ceil(columns / fmt.block_length))
            expect(f"{name}_scale", scales, torch.float32, grid)
        return Bytes(codes.view(torch.uint8), scales, found_amax, fmt, (rows, columns))


_SMALLEST = 1e-12  # an amax of zero would give an infinite scale


def _weights(kind: str) -> dict[str, Any]:
    common: dict[str, Any] = {"type": "float", "symmetric": True, "dynamic": False, "observer": None}
    if kind == NVFP4:
        scale = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return {**common, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, **scale}
    if kind in (MXFP4, MXFP8):
        scale = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        return {**common, "num_bits": 4 if kind == MXFP4 else 8, "strategy": "group", "group_size": 32, **scale}
    if kind == FP8:
        return {**common, "num_bits": 8, "strategy": "tensor"}
    if kind == FP8_ROWS:
        return {**common, "num_bits": 8, "strategy": "group", "group_size": 128}
    return {**common, "num_bits": 8, "strategy": "block", "block_structure": [128, 128]}


def _activations(kind: str, observed: bool) -> dict[str, Any] | None:
    """How inputs are quantized when the model is served: not at all, unless they were observed."""
    if not observed:
        return None
    weights = _weights(kind)
    if kind == NVFP4:
        return {**weights, "dynamic": "local"}
    if kind == FP8:
        return weights
    weights.pop("block_structure", None)
    return {**weights, "dynamic": True, **({"strategy": "group", "group_size": 128} if kind == FP8_TILES else {})}
