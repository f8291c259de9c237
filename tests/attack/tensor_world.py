"""Quantized tensors with their models: how they are made, viewed, cut and checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import crossgrain as cg
from crossgrain.tensor.decoded_view import DecodedView

from . import transcription as tr
from .programs import World
from .tensor_checks import check_plane
from .tensor_model import COLUMN, DIRECTIONS, ROW, TensorModel, empty_plane

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = [name for name in tr.FORMATS if name != "mxfp8_e5m2"]
PAIRS = [
    ("mxfp8", "nvfp4"),
    ("nvfp4", "mxfp8"),
    ("fp8", "mxfp8"),
    ("mxfp8", "fp8_e5m2"),
    ("mxfp8", "mxfp4"),
    ("nvfp4_2d", "fp8_block"),
    ("mxfp8_2d", "nvfp4"),
    ("mxfp8", "identity"),
    ("identity", "mxfp8"),
    ("identity", "fp8"),
    ("fp8_e5m2", "identity"),
]
MOST_LIVE = 6


class Live(NamedTuple):
    """A tensor of the library, and what it must be."""

    tensor: Any
    model: TensorModel


class LiveTensors(World):
    """Quantized tensors by name with their models, and the actions that make tensors and aliases of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.live: dict[str, Live] = {}
        self.one_buffer = self.draw.random() < 0.5
        self.theme = self._theme()
        self.shape = self._shape(self.theme)
        self.stack = ExitStack()
        self.stack.enter_context(cg.settings.override(non_tn_fp8_gemm=self.one_buffer))
        self.note(f"settings.non_tn_fp8_gemm = {self.one_buffer}")
        self.do_new()

    def close(self) -> None:
        self.stack.close()

    # ---- making tensors --------------------------------------------------------------------------------------

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random numbers with what is awkward: zero blocks, outliers, other magnitudes, rarely Inf and NaN."""
        generator = torch.Generator().manual_seed(self.draw.getrandbits(32))
        x = torch.randn(shape, generator=generator) * 2.0 ** self.draw.choice([0, 0, 0, -8, 6, -30])
        kind = self.draw.random()
        flat = x.view(-1)
        if kind < 0.3:
            flat[: self.draw.choice([16, 128])] = 0
        elif kind < 0.5:
            flat[self.draw.randrange(flat.numel())] = 1000.0
        elif kind < 0.6:
            flat[self.draw.randrange(flat.numel())] = self.draw.choice([float("inf"), float("nan"), -0.0, 1e-40])
        return x.to(dtype)

    def _theme(self) -> list[tuple[str, str]]:
        """Formats of both directions that have something to do with each other, so that copies find equal ones."""
        row, column = self.draw.choice([*((name, name) for name in PLAIN), *PAIRS])
        if row == column:
            return [(row, row), self.draw.choice(PAIRS)]
        return [(row, column), (row, column), (row, row), (column, column), (column, row)]

    def _shape(self, formats: list[tuple[str, str]]) -> tuple[int, ...]:
        """A shape that all of these formats can have; some can have partial blocks."""
        blocks = [tr.FORMATS[name] for pair in formats for name in pair]
        ragged = all(fmt.ragged for fmt in blocks)
        large = any(fmt.block and fmt.block[1] == 128 for fmt in blocks)
        sizes = (128, 256, 200 if ragged else 224) if large else (32, 64, 96)
        shape = (self.draw.choice(sizes), self.draw.choice(sizes))
        return (2, *shape) if self.draw.random() < 0.2 else shape

    def do_new(self) -> None:
        """A new tensor."""
        row, column = self.draw.choice(self.theme)
        shape = self.shape if self.draw.random() < 0.7 else self._shape([(row, column)])
        formats = {ROW: tr.FORMATS[row], COLUMN: tr.FORMATS[column]}
        dtype = self.draw.choice(DTYPES)
        hybrid = row != column or (self.draw.random() < 0.2 and row != "identity")
        derives = hybrid and self.draw.random() < 0.4
        usage = self.draw.choice([(True, True)] * 3 + [(True, False), (False, True)])
        x = self.values(shape, dtype)
        quantizer = quantizer_of(row, column, hybrid, derives)
        quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
        tensor = quantizer(x.clone())
        model = self._modelled(shape, dtype, formats, usage, hybrid, derives)
        model.write(x)
        name = self.keep(tensor, model)
        what = f"hybrid({row}, {column}{', columns from rows' if derives else ''})" if hybrid else row
        self.note(f"{name} = {what} of {list(shape)} {short(dtype)}, usages {usage}")

    def _modelled(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        formats: dict[str, tr.Format],
        usage: tuple[bool, bool],
        hybrid: bool,
        derives: bool,
    ) -> TensorModel:
        return modelled(shape, dtype, formats, usage, hybrid, derives, self.one_buffer)

    def keep(self, tensor: Any, model: TensorModel, suffix: str = "") -> str:
        """Add a tensor under the name of the step; forget another one if there are too many."""
        name = f"t{self.step.number}{suffix}" if self.step.number >= 0 else "t"
        self.live[name] = Live(tensor, model)
        if len(self.live) > MOST_LIVE:
            gone = self.pick(other for other in self.live if other != name)
            del self.live[gone]
            self.note(f"del {gone}")
        return name

    def any(self) -> tuple[str, Live]:
        name = self.pick(self.live)
        return name, self.live[name]

    # ---- aliases ---------------------------------------------------------------------------------------------

    def do_alias(self) -> None:
        """The same tensor again, or in another shape."""
        name, (tensor, model) = self.any()
        how = self.draw.choice(["detach", "data", "view", "flat", "reshape"])
        if not model.planes:
            return
        if how in ("detach", "data"):
            made, new = tensor.detach() if how == "detach" else tensor.data, model.alias()
            kept = self.keep(made, new)
            self.note(f"{kept} = {name}.{how}")
            return
        shape = self._other_shape(model, how)
        wanted = model.viewed(shape)
        if wanted is None and how == "reshape" and model.cut and all(p.memory.loose for p in model.planes.values()):
            return  # torch makes a copy where memory cannot be viewed
        method = "view" if how == "flat" else how
        self.note(f"t{self.step.number} = {name}.{method}{shape}")
        refusal = None if wanted is not None else "its blocks lie along the last dimension"
        # Codes and scales of a slice may lie in memory in a way that torch cannot view.
        made = self.attempt(
            lambda: getattr(tensor, method)(shape), refusal, perhaps=bool(model.cut) and wanted is not None
        )
        if made is not None:
            assert wanted is not None
            self.keep(made, wanted)

    def _other_shape(self, model: TensorModel, how: str) -> tuple[int, ...]:
        count, columns = int(np.prod(model.shape)), model.matrix[1]
        # Plain numbers that are made from rows do not know, in a flat view, how long the rows would be.
        if how == "flat" and not (model.derives and not model.formats[COLUMN].element):
            return (count,)
        last = columns if self.draw.random() < 0.7 else self.draw.choice([16, 32, 64])
        if count % last:
            last = columns
        rows = count // last
        lead = self.draw.choice([1, 2, 4])
        return (lead, rows // lead, last) if rows % lead == 0 and self.draw.random() < 0.7 else (rows, last)

    def do_cut(self) -> None:
        """A slice, or pieces of a split."""
        name, (tensor, model) = self.any()
        if not model.planes or (model.flat and not any(plane.format.element for plane in model.planes.values())):
            return
        dim = self.draw.choice([0, len(model.shape) - 1, self.draw.randrange(len(model.shape))])
        size = model.shape[dim]
        unit = self.draw.choice([16, 32, 64, 128, 1, size // 2 or 1])
        if self.draw.random() < 0.3:
            self._split(name, tensor, model, dim, unit)
            return
        start = self.draw.randrange(0, max(size, 1), unit)
        stop = min(size, start + unit * self.draw.choice([1, 1, 2]))
        if 0 < dim < len(model.shape) - 1 and model.slice_problem(dim, start, stop) is None:
            return  # plain numbers that are not a run of rows
        self.note(f"t{self.step.number} = {name}.narrow({dim}, {start}, {stop - start})")
        index = (slice(None),) * dim + (slice(start, stop),)
        if model.slice_problem(dim, start, stop):
            self._decoded(lambda: [tensor[index]], model, [index])
            return
        made = self.attempt(lambda: tensor[index], None)
        if made is not None:
            whole = (start, stop) == (0, size)
            self.keep(made, model.alias() if whole else model.sliced(dim, start, stop))

    def _split(self, name: str, tensor: Any, model: TensorModel, dim: int, unit: int) -> None:
        size = model.shape[dim]
        if 0 < dim < len(model.shape) - 1 and unit < size and model.slice_problem(dim, 0, unit) is None:
            return
        cuts = [(start, min(start + unit, size)) for start in range(0, size, unit)]
        self.note(f"t{self.step.number}... = {name}.split({unit}, {dim})")
        if any(model.slice_problem(dim, *cut) for cut in cuts):
            self._decoded(
                lambda: tensor.split(unit, dim), model, [(slice(None),) * dim + (slice(*cut),) for cut in cuts]
            )
            return
        made = self.attempt(lambda: tensor.split(unit, dim), None)
        for index in self.draw.sample(range(len(cuts)), min(2, len(cuts))) if made is not None else ():
            whole = cuts[index] == (0, size)
            self.keep(made[index], model.alias() if whole else model.sliced(dim, *cuts[index]), f"_{index}")

    def _decoded(self, cut: Callable[[], Any], model: TensorModel, indices: list[tuple[slice, ...]]) -> None:
        """Pieces that planes cannot represent: their numbers, decoded, and no way to write to them."""
        first = ROW if ROW in model.planes else COLUMN
        problem, perhaps = model.read_problem([first])
        pieces = self.attempt(cut, problem, perhaps=perhaps)
        if pieces is None:
            return
        whole = model.decoded()
        for piece, index in zip(pieces, indices, strict=True):
            plain = piece.dequantize() if isinstance(piece, cg.QuantizedTensor) else piece.clone()
            torch.testing.assert_close(plain, whole[index], rtol=0, atol=0, equal_nan=True)
            if isinstance(piece, DecodedView):
                self.attempt(lambda piece=piece: piece.mul_(2), "it is a decoded copy")

    # ---- checking --------------------------------------------------------------------------------------------

    def check(self) -> None:
        for name, (tensor, model) in self.live.items():
            assert tuple(tensor.shape) == model.shape, f"{name} has shape {list(tensor.shape)}"
            assert tensor.dtype == model.dtype, f"{name} has dtype {tensor.dtype}"
            for direction in DIRECTIONS:
                check_plane(f"{name}, {direction}", tensor, model, direction)
            for plane in model.planes.values():
                plane.memory.suspect = plane.memory.is_behind()


def modelled(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    formats: dict[str, tr.Format],
    usage: tuple[bool, bool],
    hybrid: bool,
    derives: bool,
    one_buffer: bool,
) -> TensorModel:
    """The model of a new tensor, before anything is written; ``one_buffer`` is the setting ``non_tn_fp8_gemm``."""
    matrix = (int(np.prod(shape[:-1])), shape[-1])
    model = TensorModel(shape, dtype, formats, {}, np.zeros(matrix, np.int64), hybrid, derives)
    per_tensor = formats[ROW].block is None
    model.one_buffer = not hybrid and per_tensor and (one_buffer or not formats[ROW].element)
    for direction, wanted in zip(DIRECTIONS, usage, strict=True):
        fmt = formats[direction]
        if not wanted and not model.one_buffer:
            continue
        if model.one_buffer and direction == COLUMN:
            model.planes[COLUMN] = model.planes[ROW]
            continue
        loose = fmt.block is None and (one_buffer or direction == ROW)
        model.planes[direction] = empty_plane(fmt, direction, model.truth, dtype, loose)
    both = model.planes.get(ROW), model.planes.get(COLUMN)
    if not hybrid and per_tensor and both[0] is not None and both[1] is not None:
        both[1].scales = both[0].scales
    return model


def quantizer_of(row: str, column: str, hybrid: bool, derives: bool) -> cg.Quantizer:
    if not hybrid:
        return cg.quantizer_for(row)
    return cg.HybridQuantizer(
        rowwise_quantizer=cg.quantizer_for(row),
        columnwise_quantizer=cg.quantizer_for(column),
        columnwise_source="rowwise_dequantized" if derives else "original",
    )


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
