"""Formats are data: immutable, comparable, picklable, printable - and enough to define a new one."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.formats import (
    E2M1,
    E4M3,
    E5M2,
    IDENTITY,
    Element,
    Format,
    ScaleLayout,
    format_table,
    formats,
    fp8_block_format,
    fp8_format,
    get_element,
    get_format,
    mxfp8_format,
    nvfp4_format,
    register_format,
    registry,
)
from crossgrain.formats.encoding import Encoding
from crossgrain.planes import COLUMNWISE, ROWWISE, empty_plane

from ..common.golden_cases import encoded

EVERY_FORMAT = pytest.mark.parametrize("fmt", list(formats()), ids=lambda fmt: fmt.name)


@pytest.fixture
def scratch_registry(monkeypatch):
    """Registrations of a test do not outlive it."""
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))


@EVERY_FORMAT
def test_a_format_is_frozen(fmt):
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.layout.pad = (2, 2)


@EVERY_FORMAT
def test_a_format_survives_pickling_and_copying(fmt):
    for copied in (pickle.loads(pickle.dumps(fmt)), copy.copy(fmt), copy.deepcopy(fmt)):
        assert copied == fmt
        assert hash(copied) == hash(fmt)
        assert copied.element == fmt.element


def test_formats_are_usable_as_keys():
    by_format = {fmt: fmt.name for fmt in formats()}
    assert len(by_format) == len(list(formats()))
    assert by_format[mxfp8_format()] == "mxfp8"
    assert nvfp4_format(rotation=0) != nvfp4_format(rotation=1)


@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda element: element.name)
def test_an_element_is_frozen_and_survives_pickling(element):
    assert pickle.loads(pickle.dumps(element)) == element
    with pytest.raises(dataclasses.FrozenInstanceError):
        element.bias = 0


@pytest.mark.parametrize(
    "element",
    [Element("e3m4", 3, 4, bias=3, max=31.0), dataclasses.replace(E4M3, max=240.0)],
    ids=["new name", "known name with another maximum"],
)
def test_a_new_element_survives_pickling(element):
    assert pickle.loads(pickle.dumps(element)) == element


def test_all_formats_fit_on_one_screen():
    lines = format_table().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    for fmt in formats():
        assert sum(line.split()[0] == fmt.name for line in lines) == 1
        assert str(fmt) in lines


def test_registry_finds_by_name_and_passes_formats_through():
    assert get_format("mxfp8") == mxfp8_format()
    unregistered = nvfp4_format(rotation=3)
    assert get_format(unregistered) is unregistered


def test_registry_errors_name_what_there_is():
    with pytest.raises(KeyError, match=r"no format 'mxfp5'.*mxfp4"):
        get_format("mxfp5")
    with pytest.raises(KeyError, match=r"there is no element 'e9m9'.*e4m3"):
        get_element("e9m9")


def test_a_name_means_one_format(scratch_registry):
    known = get_format("mxfp4")
    assert register_format(known) is known
    with pytest.raises(ValueError, match="already registered as 'mxfp4'"):
        register_format(dataclasses.replace(known, block=(1, 64)))
    assert get_format("mxfp4") == known


def test_sub_byte_codes_need_a_transposed_column_plane():
    with pytest.raises(ValueError, match=r"4 bits.*transposed"):
        Format("bad", E2M1, (1, 32), "e8m0_floor", transposes=False)


@pytest.mark.parametrize("options", [{"scale_rule": "two_level"}, {"scale_rule": "fp32", "global_amax": "tensor"}])
def test_two_level_scales_and_a_global_amax_go_together(options):
    with pytest.raises(ValueError, match="scale_rule='two_level' and a global_amax must be used together"):
        Format("bad", E4M3, (1, 32), **options)


@pytest.mark.parametrize(
    "options, complaint",
    [
        (
            {"block": (16, 16), "scale_rule": "two_level", "global_amax": "row"},
            "global_amax='row' needs blocks of one row.*16 rows share",
        ),
        ({"block": (16, 16), "ragged": True, "layout": ScaleLayout(replicated=True)}, "replicated.*whole blocks"),
        ({"block": (1, 32), "ragged": True, "rotation": 3}, "rotation.*whole blocks"),
    ],
)
def test_formats_that_nothing_could_encode_are_refused(options, complaint):
    with pytest.raises(ValueError, match=f"format 'bad': .*{complaint}"):
        Format("bad", E4M3, **options)


def test_scales_of_single_rows_may_be_ragged_and_replicated():
    """One row repeated once is itself."""
    fmt = Format("plain", E4M3, (1, 32), layout=ScaleLayout(replicated=True), ragged=True)
    x = torch.randn(5, 40)
    plane = encoded(x, Encoding(fmt), ROWWISE)
    assert torch.equal(plane.data, encoded(x, Encoding(dataclasses.replace(fmt, layout=ScaleLayout())), ROWWISE).data)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"scale_bound": 300}, "448 or 256"),
        ({"row_scaled": True, "two_d": True}, "row_scaled and two_d cannot be combined"),
        ({"rotation": 0, "two_d": True}, "rotation"),
        ({"rotation": 0, "row_scaled": True}, "rotation"),
    ],
)
def test_impossible_nvfp4_variants_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        nvfp4_format(**options)


@pytest.mark.parametrize(
    "fmt, stochastic", [(nvfp4_format(), True), (nvfp4_format(rotation=0), False)], ids=["SR", "RHT"]
)
def test_four_over_six_excludes_stochastic_rounding_and_rotation(fmt, stochastic):
    with pytest.raises(ValueError, match="4-over-6"):
        Encoding(fmt, stochastic=stochastic, four_over_six="MSE")


def test_which_formats_determine_one_direction_from_the_other():
    symmetric = {fmt.name for fmt in formats() if fmt.is_symmetric}
    assert symmetric >= {"fp8", "fp8_block_2d", "mxfp8_2d", "nvfp4_2d", "identity"}
    assert not symmetric & {"fp8_block", "mxfp8", "nvfp4", "nvfp4_row_scaled", "mxfp4", "mxfp6_e2m3"}


@pytest.mark.parametrize(
    "name, bits",
    [
        ("fp8", 8),
        ("fp8_block", 8.25),
        ("fp8_block_2d", 8 + 32 / 128**2),
        ("mxfp8", 8.25),
        ("nvfp4", 4.5),
        ("mxfp4", 4.25),
    ],
)
def test_bits_per_element_are_the_bytes_of_a_plane(name, bits):
    """On a shape without padding, the claim is what `empty_plane` really allocates (per-tensor scalars aside)."""
    fmt, shape = get_format(name), (512, 512)
    assert fmt.bits_per_element == bits
    plane = empty_plane(fmt, ROWWISE, shape, device=torch.device("cpu"))
    stored = plane.data.nbytes + (plane.scale.nbytes if fmt.block else 0)
    assert stored * 8 / (512 * 512) == bits


NEW_ELEMENT = Element("e3m4", 3, 4, bias=3, max=31.0)
NEW_FORMATS = [
    Format("mxfp8_64", E4M3, (1, 64), "e8m0_up", transposes=False),
    Format("mxfp8_e3m4", NEW_ELEMENT, (1, 32), "e8m0_floor", transposes=False),
    Format("fp8_tile_8x16", E5M2, (8, 16), "fp32", ScaleLayout(pad=(2, 4), transposed=True)),
    Format("fp4_row_8", E2M1, (1, 8), "two_level", global_amax="row"),
]


@pytest.mark.parametrize("fmt", NEW_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=lambda direction: direction.value)
def test_a_new_format_needs_no_code(scratch_registry, fmt, direction):
    register_format(fmt)
    assert fmt.name in format_table()
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    plane = encoded(x, Encoding(get_format(fmt.name)), direction)
    decoded = kernels.decode(plane, torch.float32)
    assert decoded.shape == x.shape

    # Every decoded number is, of all that its scale offers, the one nearest to the input.
    operand, rows, length = (x if direction is ROWWISE else x.t()), fmt.block[0], fmt.block[1]
    scale = block_scales(plane).repeat_interleave(rows, 0).repeat_interleave(length, 1).double()
    choices = torch.tensor(sorted(set(fmt.element.values())), dtype=torch.float64)
    choices = choices[choices.isfinite()]
    best = (operand.double().unsqueeze(-1) - scale.unsqueeze(-1) * choices).abs().amin(-1)
    mine = (operand.double() - kernels.decode_operand(plane).double()).abs()
    np.testing.assert_allclose(mine, best, rtol=0, atol=1e-6)


def block_scales(plane):
    """What one code unit of each block is worth, from the stored bytes and the definition of each rule."""
    stored = plane.operand_scales()
    if plane.format.scale_rule == "fp32":
        return stored
    if plane.format.scale_rule.startswith("e8m0"):
        return 2.0 ** (stored.double() - 127)
    values = torch.tensor([E4M3.value(code) for code in stored.flatten().tolist()]).view(stored.shape)
    return values * plane.amax.view(-1, 1) / (plane.format.element.max * plane.format.scale_bound)


def test_families_are_named_by_their_element():
    assert fp8_format().name == "fp8" and fp8_format(E5M2).name == "fp8_e5m2"
    assert fp8_block_format(E5M2, two_d=True).name == "fp8_block_2d_e5m2"
    assert IDENTITY.is_identity and not fp8_format().is_identity
