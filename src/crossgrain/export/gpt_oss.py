"""The layout of gpt-oss checkpoints: experts in MXFP4, everything else in high precision.

A stack of experts ``experts.gate_up_proj`` [experts, out, in] is stored as

    experts.gate_up_proj_blocks   uint8 [experts, out, in/32, 16]   two codes per byte, the low half first
    experts.gate_up_proj_scales   uint8 [experts, out, in/32]       E8M0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..formats import Format
from .checks import MXFP4, refuse
from .contents import Contents
from .layout import Layout, expect
from .walk import Bytes


class GptOss(Layout):
    """The layout of gpt-oss checkpoints."""

    name = "gpt-oss"
    names_of_files = False  # a stack is stored whole, under the name of its parameter
    kinds: ClassVar[frozenset[str]] = frozenset({MXFP4})

    def check(self, contents: Contents) -> None:
        super().check(contents)
        refuse(
            [
                f"{name}: gpt-oss stores only stacks of experts quantized, and this is a layer of its own"
                for name, weight in contents.weights.items()
                if weight.part.place is None
            ],
            self.name,
        )

    def stacks(self, contents: Contents) -> Iterator[tuple[str, list[str]]]:
        """The stacks by the key of their parameter, with the names of their weights in order."""
        found: dict[str, list[str]] = {}
        for name, weight in contents.weights.items():
            found.setdefault(weight.key, []).append(name)
        yield from found.items()

    def stacked(self, key: str, experts: list[Bytes]) -> dict[str, Tensor]:
        """The two tensors of a stack."""
        rows, columns = experts[0].shape
        blocks = torch.stack([each.codes.view(rows, columns // 32, 16) for each in experts])
        return dict(zip(self.stack_names(key), (blocks, torch.stack([each.scales for each in experts])), strict=True))

    def files(self, contents: Contents) -> dict[str, Mapping[str, Any]]:
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": contents.left}
        return {"config.json": {**contents.config, "quantization_config": quantization}}

    def describes(self, directory: Path, config: Mapping[str, Any]) -> bool:
        return bool(config.get("quantization_config", {}).get("quant_method") == "mxfp4")

    def stack_names(self, key: str) -> list[str]:
        """The names of the two tensors of a stack."""
        return [f"{key}_blocks", f"{key}_scales"]

    def read_expert(self, key: str, index: int, stored: Mapping[str, Tensor], fmt: Format) -> Bytes:
        """The bytes of one expert."""
        blocks, scales = stored[f"{key}_blocks"], stored[f"{key}_scales"]
        if blocks.dim() != 4 or blocks.shape[-1] != 16 or not index < blocks.shape[0]:
            raise ValueError(f"{key}_blocks must be [experts, out, in/32, 16], got {list(blocks.shape)}")
        expect(f"{key}_blocks", blocks, torch.uint8, tuple(blocks.shape))
        expect(f"{key}_scales", scales, torch.uint8, tuple(blocks.shape[:-1]))
        rows, groups = blocks.shape[1], blocks.shape[2]
        return Bytes(blocks[index].reshape(rows, groups * 16), scales[index], None, fmt, (rows, groups * 32))
