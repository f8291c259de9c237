"""The layout of NVIDIA ModelOpt, which vLLM, SGLang and TensorRT-LLM load: NVFP4 and FP8 weights.

| format | tensors of ``layer`` |
|---|---|
| NVFP4 | ``weight`` uint8 [out, in/2], ``weight_scale`` E4M3 [out, in/16], ``weight_scale_2``, ``input_scale`` fp32 |
| FP8 | ``weight`` E4M3 [out, in], ``weight_scale`` fp32 [], ``input_scale`` fp32 [] |

Readers multiply by ``weight_scale_2``. ``input_scale`` is the amax of the inputs divided by the largest number of the
format; without observed inputs, NVFP4 is stored as weight-only (``W4A16_NVFP4``), and FP8 is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..convert.layers import ConvertedConv1D
from ..formats import Format
from ..runtime.version import PACKAGE_VERSION
from .checks import FP8, NVFP4, kind_of, refuse
from .contents import Contents
from .layout import Layout, amax_from, as_e4m3, expect, expect_one, global_decode_scale
from .walk import Bytes

_LARGEST = {NVFP4: 6.0 * 448.0, FP8: 448.0}
_SMALLEST = 1e-12  # an amax of zero would give a scale of zero, by which readers divide


class ModelOpt(Layout):
    """The layout of NVIDIA ModelOpt."""

    name = "modelopt"
    kinds: ClassVar[frozenset[str]] = frozenset({NVFP4, FP8})

    def check(self, contents: Contents) -> None:
        super().check(contents)
        kinds = {name: kind_of(weight.format) for name, weight in contents.weights.items() if weight.format}
        first = next(iter(kinds))
        problems = [
            f"{name}: it is {kind} in fprop, but {first} is {kinds[first]}, and modelopt has one format for all layers"
            for name, kind in kinds.items()
            if kind != kinds[first]
        ]
        problems += [
            f"{name}: it is a Conv1D, whose weight is [in, out]; modelopt knows only nn.Linear"
            for name, weight in contents.weights.items()
            if isinstance(weight.module, ConvertedConv1D)
        ]
        unseen = [name for name in kinds if name not in contents.input_amaxes]
        if unseen and (kinds[first] == FP8 or len(unseen) < len(kinds)):
            problems += [
                f"{name}: modelopt stores a scale for the input of this layer, and none was observed. Pass "
                "inputs= with some batches"
                for name in unseen
            ]
        refuse(problems, self.name)
        if unseen and not problems:
            contents.notes.append(
                "no inputs were observed, so no input_scale is written, and the model is stored as weight-only "
                "(W4A16_NVFP4); pass inputs= with some batches for NVFP4 activations"
            )

    def tensors(self, name: str, found: Bytes, contents: Contents) -> dict[str, Tensor]:
        kind = kind_of(found.format)
        if kind == NVFP4:
            stored = {
                name: found.codes,
                f"{name}_scale": as_e4m3(found.scales),
                f"{name}_scale_2": global_decode_scale(found).reshape(()),
            }
        else:
            stored = {name: as_e4m3(found.codes), f"{name}_scale": found.scales.reshape(())}
        amax = contents.input_amaxes.get(name)
        if amax is not None:
            scale = torch.tensor(max(amax, _SMALLEST)) / _LARGEST[kind or ""]
            stored[f"{contents.layer(name)}.input_scale"] = scale
        return stored

    def files(self, contents: Contents) -> dict[str, Mapping[str, Any]]:
        kind = kind_of(next(weight.format for weight in contents.weights.values() if weight.format))
        observed = bool(contents.input_amaxes)
        producer = {"name": "crossgrain", "version": PACKAGE_VERSION}
        algorithm = "FP8" if kind == FP8 else "NVFP4" if observed else "W4A16_NVFP4"
        numbers: dict[str, Any] = {"dynamic": False, "num_bits": 8 if kind == FP8 else 4, "type": "float"}
        about: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
        if kind == NVFP4:
            numbers["group_size"] = about["group_size"] = 16
        about["exclude_modules"] = contents.left
        group = {"weights": numbers, "targets": ["Linear"]}
        if observed:
            group["input_activations"] = dict(numbers)
        quantization = {
            "config_groups": {"group_0": group},
            "ignore": contents.left,
            "quant_algo": algorithm,
            "producer": producer,
            "quant_method": "modelopt",
        }
        return {
            "config.json": {**contents.config, "quantization_config": quantization},
            "hf_quant_config.json": {"producer": producer, "quantization": about},
        }

    def describes(self, directory: Path, config: Mapping[str, Any]) -> bool:
        given = config.get("quantization_config", {}).get("quant_method")
        return given == "modelopt" or (given is None and (directory / "hf_quant_config.json").is_file())

    def consumed(self, name: str, fmt: Format) -> list[str]:
        return [name, f"{name}_scale", *([f"{name}_scale_2"] if kind_of(fmt) == NVFP4 else [])]

    def read(self, name: str, stored: Mapping[str, Tensor], fmt: Format, amax: float | None) -> Bytes:
        codes, scales = stored[name], stored[f"{name}_scale"]
        if kind_of(fmt) == FP8:
            expect(name, codes, torch.float8_e4m3fn, tuple(codes.shape))
            scales = expect_one(f"{name}_scale", scales).reshape(1, 1)
            return Bytes(codes.view(torch.uint8), scales, None, fmt, (codes.shape[0], codes.shape[1]))
        expect(name, codes, torch.uint8, tuple(codes.shape))
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        expect(f"{name}_scale", scales, torch.float8_e4m3fn, (rows, columns // 16))
        given = expect_one(f"{name}_scale_2", stored[f"{name}_scale_2"])
        found = amax_from(given, fmt, amax, reciprocal=False)
        return Bytes(codes, scales.view(torch.uint8), found, fmt, (rows, columns))
