"""A GGUF file, the format of llama.cpp: MXFP4 and NVFP4 weights, everything else in high precision.

    MXFP4   blocks of 32 numbers: the E8M0 scale, and 16 bytes; byte j has the codes j (low half) and j + 16
    NVFP4   blocks of 64 numbers: four E4M3 scales, and four times 8 bytes; byte j has the codes j and j + 8

The global scale of an NVFP4 tensor ``layer.weight`` is a tensor of its own, ``layer.scale``, by which llama.cpp
multiplies. The file holds tensors under the names of the model, and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..formats import Format
from .checks import MXFP4, NVFP4, kind_of, refuse
from .contents import Contents
from .layout import AMAX, Layout, amax_from, expect_one, global_decode_scale
from .walk import Bytes

FILE = "model.gguf"
_LONGEST_NAME = 63  # bytes of a tensor's name that llama.cpp reads


class Gguf(Layout):
    """A GGUF file."""

    name = "gguf"
    kinds: ClassVar[frozenset[str]] = frozenset({MXFP4, NVFP4})

    def check(self, contents: Contents) -> None:
        gguf = gguf_package()
        super().check(contents)
        problems = []
        for name, weight in contents.weights.items():
            assert weight.format is not None
            if kind_of(weight.format) != NVFP4:
                continue
            if not hasattr(gguf.GGMLQuantizationType, "NVFP4"):
                problems.append(f"{name}: the installed gguf package does not know NVFP4; install a newer one")
            elif weight.shape[1] % 64:
                problems.append(
                    f"{name}: GGUF has NVFP4 blocks of 64 numbers, and {weight.shape[1]} columns are not a multiple"
                )
        problems += [
            f"{name}: llama.cpp reads names of at most {_LONGEST_NAME} bytes; pass rename="
            for name in (*contents.weights, *contents.plain)
            if len(name.encode()) > _LONGEST_NAME
        ]
        refuse(problems, self.name)
        contents.notes.append(
            "the GGUF file has the tensors under the model's own names and no tokenizer. To serve it with llama.cpp, "
            "export as modelopt and run llama.cpp's convert_hf_to_gguf.py, or pass rename= and add the metadata"
        )

    def files(self, contents: Contents) -> dict[str, Mapping[str, Any]]:
        return {"config.json": contents.config}

    def describes(self, directory: Path, config: Mapping[str, Any]) -> bool:
        return (directory / FILE).is_file()

    def write(
        self,
        directory: Path,
        contents: Contents,
        read: Iterable[tuple[str, Bytes]],
        about: Callable[[], str | None],
    ) -> None:
        """Write the file. Blocks are kept in memory until all are known, because their sizes come first.

        Args:
            directory: where to write.
            contents: what is exported.
            read: the quantized weights, by name.
            about: what to store about amaxes; called when all weights have been read.
        """
        gguf = gguf_package()
        architecture = str(contents.config.get("model_type") or "crossgrain")
        writer = gguf.GGUFWriter(directory / FILE, architecture)
        types = gguf.GGMLQuantizationType
        for name, found in read:
            kind = kind_of(found.format)
            if kind == MXFP4:
                writer.add_tensor(name, mxfp4_blocks(found).numpy(), raw_dtype=types.MXFP4)
            else:
                writer.add_tensor(name, nvfp4_blocks(found).numpy(), raw_dtype=types.NVFP4)
                writer.add_tensor(scale_name(name), global_decode_scale(found).numpy())
        for name in contents.plain:
            _add_plain(writer, name, contents.plain_tensor(name), types)
        text = about()
        if text is not None:
            writer.add_string(AMAX, text)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()

    def consumed(self, name: str, fmt: Format) -> list[str]:
        return [name, *([scale_name(name)] if kind_of(fmt) == NVFP4 else [])]

    def read(self, name: str, stored: Mapping[str, Tensor], fmt: Format, amax: float | None) -> Bytes:
        blocks = stored[name]
        size = 17 if kind_of(fmt) == MXFP4 else 36
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % size or not blocks.numel():
            raise ValueError(f"{name} is not stored as blocks of {kind_of(fmt)}: {blocks.dtype} {list(blocks.shape)}")
        if kind_of(fmt) == MXFP4:
            return _mxfp4_from(blocks, fmt)
        given = expect_one(scale_name(name), stored[scale_name(name)])
        return _nvfp4_from(blocks, fmt, amax_from(given, fmt, amax, reciprocal=False))


def scale_name(name: str) -> str:
    """The name of the global scale of an NVFP4 tensor."""
    return f"{name.removesuffix('.weight')}.scale"


def gguf_package() -> Any:
    """The package gguf; an ImportError says how to install it."""
    try:
        import gguf
    except ImportError:
        raise ImportError(
            "reading and writing GGUF files needs the package gguf: pip install 'crossgrain[gguf]'"
        ) from None
    return gguf


def _add_plain(writer: Any, name: str, tensor: Tensor, types: Any) -> None:
    if tensor.dtype == torch.bfloat16:
        raw = tensor.contiguous().view(torch.uint8)
        writer.add_tensor(name, (raw if tensor.dim() else raw.reshape(2)).numpy(), raw_dtype=types.BF16)
        return
    if tensor.dtype not in (torch.float32, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {tensor.dtype}, which a GGUF file cannot hold")
    writer.add_tensor(name, tensor.reshape(1).numpy() if tensor.dim() == 0 else tensor.numpy())


# ---- blocks ----------------------------------------------------------------------------------------------


def _unpacked(codes: Tensor) -> Tensor:
    """[rows, bytes] with two codes per byte, the low half first, as [rows, codes]."""
    return torch.stack([codes & 0x0F, codes >> 4], dim=-1).reshape(codes.shape[0], -1)


def _packed(codes: Tensor) -> Tensor:
    pairs = codes.reshape(codes.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def mxfp4_blocks(found: Bytes) -> Tensor:
    """The blocks of a weight, uint8 [out, in/32 · 17]."""
    rows, columns = found.shape
    codes = _unpacked(found.codes).reshape(rows, columns // 32, 2, 16)
    halves = codes[:, :, 0] | (codes[:, :, 1] << 4)
    return torch.cat([found.scales.unsqueeze(-1), halves], dim=-1).reshape(rows, -1)


def _mxfp4_from(blocks: Tensor, fmt: Format) -> Bytes:
    rows = blocks.shape[0]
    parts = blocks.reshape(rows, -1, 17)
    halves = parts[..., 1:]
    codes = torch.stack([halves & 0x0F, halves >> 4], dim=2).reshape(rows, -1)
    return Bytes(_packed(codes), parts[..., 0].contiguous(), None, fmt, (rows, parts.shape[1] * 32))


def nvfp4_blocks(found: Bytes) -> Tensor:
    """The blocks of a weight, uint8 [out, in/64 · 36]."""
    rows, columns = found.shape
    codes = _unpacked(found.codes).reshape(rows, columns // 64, 4, 2, 8)
    halves = (codes[:, :, :, 0] | (codes[:, :, :, 1] << 4)).reshape(rows, columns // 64, 32)
    scales = found.scales.reshape(rows, columns // 64, 4)
    return torch.cat([scales, halves], dim=-1).reshape(rows, -1)


def _nvfp4_from(blocks: Tensor, fmt: Format, amax: Tensor) -> Bytes:
    rows = blocks.shape[0]
    parts = blocks.reshape(rows, -1, 36)
    halves = parts[..., 4:].reshape(rows, -1, 4, 8)
    codes = torch.stack([halves & 0x0F, halves >> 4], dim=3).reshape(rows, -1)
    scales = parts[..., :4].reshape(rows, -1)
    return Bytes(_packed(codes), scales.contiguous(), amax, fmt, (rows, parts.shape[1] * 64))
