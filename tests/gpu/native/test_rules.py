"""Every rule of `gemm.native.rules`, with its reason, and that the twin of ``scaled_mm`` has the same rules."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

import crossgrain as cg
from crossgrain.formats import (
    BUILT_IN,
    E4M3,
    E5M2,
    Format,
    ScaleLayout,
    fp8_block_format,
    fp8_format,
    get_format,
    mxfp8_format,
    nvfp4_format,
)
from crossgrain.gemm.native import Gpu, explain, needs_epilogue, refuses, route, scaled_call
from crossgrain.gemm.native.scaled_call import run
from crossgrain.planes import ROWWISE, empty_plane, shape_problem

from .operands import B200, H100
from .twin import Refused, Twin

FP8, FP8_E5M2, MX, MX_E5M2 = fp8_format(), fp8_format(E5M2), mxfp8_format(), mxfp8_format(E5M2)
ROWS, TILES = fp8_block_format(), fp8_block_format(two_d=True)
NVFP4, ROTATED = nvfp4_format(), nvfp4_format(rotation=0xD7E8)
SHAPE = (64, 128, 256)  # rows, summed, columns


def operands(a, b, shape=SHAPE):
    rows, inner, columns = shape
    cpu = torch.device("cpu")
    options = {"device": cpu, "dtype": torch.bfloat16}
    return empty_plane(a, ROWWISE, (rows, inner), **options), empty_plane(b, ROWWISE, (columns, inner), **options)


RULES = [
    # formats
    (get_format("identity"), FP8, SHAPE, B200, "the first operand is identity: it is not quantized"),
    (
        FP8,
        get_format("hifloat8"),
        SHAPE,
        B200,
        "the second operand is hifloat8: tensor cores do not know hifloat8 numbers",
    ),
    (
        get_format("nvfp4_row_scaled"),
        NVFP4,
        SHAPE,
        B200,
        "the first operand is nvfp4_row_scaled: scaled_mm takes one scale for the whole tensor, not one for each row",
    ),
    (
        NVFP4,
        get_format("nvfp4_ue5m3"),
        SHAPE,
        B200,
        "the second operand is nvfp4_ue5m3: tensor cores read block scales in E4M3, not in ue5m3",
    ),
    (
        get_format("mxfp4"),
        get_format("mxfp4"),
        SHAPE,
        B200,
        "the first operand is mxfp4: torch multiplies MXFP4 only in builds with MSLK, which cannot be asked for, and "
        "its shape function refuses the scales that its kernel needs",
    ),
    (get_format("mxfp6_e3m2"), MX, SHAPE, B200, "the first operand is mxfp6_e3m2: torch has no dtype for 6 bits"),
    (
        Format("mxfp8_64", E4M3, (1, 64), "e8m0_up", ScaleLayout(pad=(128, 4))),
        MX,
        SHAPE,
        B200,
        "the first operand is mxfp8_64: scaled_mm has no blocks of 1x64 with such scales",
    ),
    (
        Format("mxfp8_tiles", E4M3, (32, 32), "e8m0_up", ScaleLayout(pad=(128, 4))),
        MX,
        SHAPE,
        B200,
        "the first operand is mxfp8_tiles: scaled_mm has no blocks of 32x32 with such scales",
    ),
    # pairs
    (TILES, TILES, SHAPE, H100, "scaled_mm multiplies tiles of 128x128 by blocks of 1x128, but not tiles by tiles"),
    (MX, FP8, SHAPE, B200, "scaled_mm cannot multiply MXFP8 by FP8 with a scale per tensor"),
    (NVFP4, ROTATED, SHAPE, B200, "the operands are rotated differently, so they have to be decoded"),
    # hardware
    (FP8, FP8, SHAPE, Gpu((10, 0), has_kernels=False), "this build of torch has no scaled_mm for GPUs"),
    (
        FP8,
        FP8,
        SHAPE,
        Gpu((8, 6)),
        "FP8 with a scale per tensor needs compute capability 8.9 or from 9.0 on, this is compute capability 8.6",
    ),
    (
        ROWS,
        ROWS,
        SHAPE,
        B200,
        "FP8 in blocks of 1x128: scaled_mm has blocks of 128 only for compute capability 9.0, this is compute "
        "capability 10.0",
    ),
    (
        ROWS,
        ROWS,
        SHAPE,
        Gpu((9, 0), cuda=(12, 8)),
        "FP8 in blocks of 1x128 needs a torch that was built for CUDA 12.9, this one was for CUDA 12.8",
    ),
    (MX, MX, SHAPE, H100, "MXFP8 needs compute capability 10.0, this is compute capability 9.0"),
    (NVFP4, NVFP4, SHAPE, H100, "NVFP4 needs compute capability 10.0, this is compute capability 9.0"),
    (
        NVFP4,
        NVFP4,
        SHAPE,
        Gpu((10, 0), cuda=(12, 6)),
        "NVFP4 needs a torch that was built for CUDA 12.8, this one was for CUDA 12.6",
    ),
    (
        FP8,
        FP8,
        SHAPE,
        Gpu((9, 4), "gfx942"),
        "gfx942 multiplies FP8 numbers of another kind (fnuz) than those that are stored (OCP)",
    ),
    (FP8, FP8, SHAPE, Gpu((9, 0), "gfx90a"), "FP8 with a scale per tensor: scaled_mm does not know gfx90a"),
    (
        MX,
        MX,
        SHAPE,
        Gpu((9, 5), "gfx950"),
        "MXFP8: on AMD GPUs only FP8 with a scale per tensor is multiplied natively, this is gfx950",
    ),
    # elements
    (FP8_E5M2, FP8_E5M2, SHAPE, H100, "cuBLASLt cannot multiply E5M2 by E5M2"),
    (MX_E5M2, MX_E5M2, SHAPE, B200, "cuBLASLt cannot multiply E5M2 by E5M2"),
    (ROWS, fp8_block_format(E5M2), SHAPE, H100, "scaled_mm takes blocks of 128 only in E4M3"),
    # sizes
    (FP8, FP8, (0, 128, 256), H100, "there is nothing to multiply: [0, 128] by [128, 256]"),
    (FP8, FP8, (64, 120, 256), H100, "it sums over 120 numbers, and rows must have a multiple of 16: 16 bytes"),
    (NVFP4, NVFP4, (64, 144, 256), B200, "it sums over 144 numbers, and rows must have a multiple of 32: 16 bytes"),
    (FP8, FP8, (64, 128, 200), H100, "the result has 200 columns, and their number must be a multiple of 16"),
    (ROWS, ROWS, (64, 144, 256), H100, "it sums over 144 numbers, and scaled_mm wants whole blocks of 128"),
    (
        ROWS,
        ROWS,
        (66, 128, 256),
        H100,
        "the result has 66 rows, and FP8 in blocks of 1x128 must be a multiple of 4 there",
    ),
    (
        ROWS,
        TILES,
        (64, 128, 192),
        H100,
        "the result has 192 columns, and FP8 in tiles of 128x128 must be a multiple of 128 there",
    ),
]


@pytest.mark.parametrize(("a", "b", "shape", "gpu", "reason"), RULES, ids=[reason[-60:] for *_, reason in RULES])
def test_what_is_refused_is_refused_for_this_reason(a, b, shape, gpu, reason):
    assert refuses(*operands(a, b, shape), gpu) == reason


ALLOWED = [
    (FP8, FP8, (1, 16, 16), Gpu((8, 9))),
    (FP8, FP8_E5M2, SHAPE, H100),
    (FP8, FP8, SHAPE, Gpu((12, 0))),
    (FP8_E5M2, FP8_E5M2, SHAPE, Gpu((9, 5), "gfx950")),
    (ROWS, ROWS, (4, 128, 16), H100),
    (ROWS, TILES, SHAPE, H100),
    (TILES, ROWS, (128, 128, 16), H100),
    (MX, MX, (1, 32, 16), B200),
    (MX, MX_E5M2, SHAPE, B200),
    (mxfp8_format(two_d=True), MX, SHAPE, Gpu((12, 0))),
    (NVFP4, nvfp4_format(two_d=True), (16, 32, 16), B200),
    (ROTATED, ROTATED, SHAPE, Gpu((10, 3))),
]


@pytest.mark.parametrize(("a", "b", "shape", "gpu"), ALLOWED)
def test_what_is_allowed(a, b, shape, gpu):
    assert refuses(*operands(a, b, shape), gpu) is None


PAIRS = [
    *itertools.product((FP8, FP8_E5M2), repeat=2),
    *itertools.product((ROWS, TILES, fp8_block_format(E5M2)), repeat=2),
    *itertools.product((MX, MX_E5M2), repeat=2),
    (NVFP4, NVFP4),
]
SHAPES = ((128, 128, 128), (4, 256, 16), (132, 384, 256), (66, 128, 48), (128, 160, 48), (16, 16, 16), (8, 32, 8))


def is_taken(planes, gpu):
    """Whether the twin multiplies two operands."""
    twin = Twin(gpu.capability)
    try:
        run(scaled_call(*planes, torch.float32), twin.new_interface, twin.old_interface)
    except Refused:
        return False
    return True


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=lambda fmt: fmt.name)
def test_the_rules_are_those_of_the_twin(a, b):
    """What is not refused is multiplied, and what the twin would take is not refused."""
    for rows, inner, columns in SHAPES:
        if shape_problem(a, ROWWISE, (rows, inner)) is not None:
            continue
        planes = operands(a, b, (rows, inner, columns))
        for buffer in (*planes[0].buffers(), *planes[1].buffers()):
            buffer.zero_()
        for gpu in (Gpu((8, 0)), Gpu((8, 9)), H100, B200):
            assert is_taken(planes, gpu) == (refuses(*planes, gpu) is None), (rows, inner, columns, str(gpu))


def test_operands_must_be_on_one_gpu():
    a, b = operands(FP8, FP8)
    away = replace(b, data=b.data.to("meta"))
    assert refuses(a, away, B200) == "the operands are on different devices, cpu and meta"
    assert refuses(a, b, None) == "the operands are on the device cpu, which is not a GPU"


EPILOGUES = [
    (FP8, torch.float32, None, {"accumulate": True}, "scaled_mm cannot add to a result"),
    (MX, torch.float32, None, {"alpha": 2.0}, "scaled_mm has no factor for MXFP8"),
    (MX, torch.float64, None, {}, "scaled_mm has no results in torch.float64"),
    (MX, torch.float32, torch.zeros(4), {}, "scaled_mm takes no bias with a result in torch.float32"),
    (
        MX,
        torch.bfloat16,
        torch.zeros(4),
        {},
        "scaled_mm would round the bias from torch.float32 to the dtype of the result, torch.bfloat16",
    ),
    (MX, torch.float16, torch.zeros(8).half()[::2], {}, "scaled_mm reads the bias as contiguous memory"),
    (
        ROWS,
        torch.bfloat16,
        torch.zeros(4).bfloat16(),
        {},
        "it is not known whether cuBLASLt adds a bias to products of blocks of 128",
    ),
    (FP8, torch.bfloat16, torch.zeros(4).bfloat16(), {"alpha": 2.0}, None),
    (NVFP4, torch.float32, None, {"alpha": 2.0}, None),
    (ROWS, torch.bfloat16, None, {}, None),
]


@pytest.mark.parametrize(("fmt", "dtype", "bias", "options", "reason"), EPILOGUES)
def test_what_scaled_mm_leaves_to_the_epilogue(fmt, dtype, bias, options, reason):
    assert needs_epilogue(fmt, dtype, bias, **options) == reason


# ---- what is told to users ----------------------------------------------------------------------------


def test_a_hybrid_recipe_is_explained_for_each_generation():
    formats = {"input": (MX, NVFP4), "weight": (MX, NVFP4), "grad_output": NVFP4}
    found = {gpu: explain(formats, 4096, 1024, 1024, gpu) for gpu in (Gpu((8, 0)), H100, B200)}
    assert [str(way) for way in found[B200].values()] == ["native"] * 3
    assert str(found[H100]["fprop"]) == (
        "decoded to bf16: MXFP8 needs compute capability 10.0, this is compute capability 9.0"
    )
    assert found[Gpu((8, 0))]["wgrad"].operands == "bf16"
    with cg.settings.override(native_gemms=False):
        assert str(explain(formats, 4096, 1024, 1024, B200)["dgrad"]) == (
            "decoded to bf16: settings.native_gemms is False"
        )


@pytest.mark.parametrize("fmt", BUILT_IN, ids=lambda fmt: fmt.name)
def test_every_format_has_a_route_in_every_gemm(fmt):
    formats = dict.fromkeys(("input", "weight", "grad_output"), fmt)
    for gpu in (Gpu((7, 5)), Gpu((8, 0)), H100, B200, Gpu((9, 4), "gfx942")):
        for way in explain(formats, 256, 128, 384, gpu).values():
            assert way.is_native == (way.reason is None)
            assert way.is_native or re.search(r"\w", way.reason)


def test_the_dtype_of_decoded_operands():
    a, b = operands(MX, MX)
    assert route(a, b, H100).operands == "bf16"
    assert route(a, b, Gpu((7, 5))).operands == "fp32"  # without bf16 tensor cores
    assert route(*operands(ROWS, ROWS), B200).operands == "fp32"  # scales of 24 bits
    assert route(*operands(NVFP4, ROTATED), H100).operands == "fp32"  # the rotation must be undone
    with cg.settings.override(gemm_operand_dtype=torch.float32):
        assert route(a, b, H100).operands == "fp32"
        assert route(a, b, B200).is_native
