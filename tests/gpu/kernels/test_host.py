"""The host code of the Triton backend: what is launched for which call, and that nothing is read from the device.

Tensors on "meta" have no numbers: an operation that would read one raises.
"""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import crossgrain as cg
from crossgrain.formats import get_format
from crossgrain.kernels import REFERENCE, GlobalScale, GroupedTarget, Target, Within, choice
from crossgrain.kernels.triton.backend import TritonBackend
from crossgrain.planes import COLUMNWISE, ROWWISE, Direction, Plane, empty_plane
from crossgrain.planes.groups import empty_groups

from ...common.logs import silent, warned
from .agreement import check_case
from .cases import CASES
from .formats import ALL, ENCODINGS, REFERENCE_ENCODINGS
from .group_cases import GROUP_CASES, GroupCase
from .recording import recording_backend

META = torch.device("meta")
UNAVAILABLE = r"Triton 3.6 or later, .* is not available, the slow reference .*crossgrain\[gpu\]"
PAIR = ((ROWWISE, "mxfp8"), (COLUMNWISE, "nvfp4_rht_sr"))


def written(
    backend: TritonBackend, x: torch.Tensor, planes: tuple[tuple[Direction, str], ...], within: Within | None = None
) -> list[Plane]:
    """Planes that a backend was asked to write."""
    targets = []
    for direction, name in planes:
        encoding = ALL[name](direction)
        plane = empty_plane(encoding.format, direction, x.shape, device=x.device)
        targets.append(Target(plane, encoding, within=within))
    targets = [target.with_amax(amax) for target, amax in zip(targets, backend.measure(x, targets), strict=True)]
    backend.encode(x, targets, 7)
    return [target.plane for target in targets]


def written_groups(backend: TritonBackend, x: torch.Tensor, case: GroupCase) -> None:
    targets = []
    for direction, encoding in case.encodings():
        planes = empty_groups(encoding.format, direction, case.heights, case.width, device=x.device)
        targets.append(GroupedTarget(planes, encoding))
    needed = [target for target in targets if target.needs_amax]
    amaxes = iter(backend.measure_groups(x, needed))
    targets = [target.with_amax(next(amaxes)) if target.needs_amax else target for target in targets]
    backend.encode_groups(x, targets, list(range(len(case.heights))))


# ---- launches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "planes, launches",
    [
        (PAIR, ["amax_kernel", "encode_kernel"]),
        (((ROWWISE, "mxfp8"), (COLUMNWISE, "mxfp8")), ["encode_kernel"]),
        (((ROWWISE, "nvfp4"), (COLUMNWISE, "nvfp4")), ["amax_kernel", "encode_kernel"]),
        (((ROWWISE, "fp8"), (COLUMNWISE, "nvfp4")), ["amax_kernel", "encode_kernel"]),
        (((ROWWISE, "nvfp4"), (COLUMNWISE, "nvfp4_rht")), ["amax_kernel", "amax_kernel", "encode_kernel"]),
        (((ROWWISE, "mxfp8"), (ROWWISE, "mxfp8_e5m2")), ["encode_kernel", "encode_kernel"]),
    ],
)
def test_planes_of_both_directions_take_one_launch(
    planes: tuple[tuple[Direction, str], ...], launches: list[str]
) -> None:
    backend, recorder = recording_backend()
    written(backend, torch.empty(64, 96, dtype=torch.bfloat16, device=META), planes)
    assert recorder.kernels() == launches
    assert {launch.device for launch in recorder.launches} == {META}


@pytest.mark.parametrize("name", ["groups, mxfp8 + nvfp4_rht_sr", "many groups, nvfp4_rht_sr", "one group, mxfp8"])
def test_all_groups_take_one_launch(name: str) -> None:
    case = GROUP_CASES[name]
    backend, recorder = recording_backend()
    written_groups(backend, torch.empty(sum(case.heights), case.width, dtype=torch.bfloat16, device=META), case)
    assert recorder.kernels().count("encode_kernel") == 1
    assert recorder.kernels().count("amax_kernel") == sum("nvfp4" in each for each in (*case.rows, *case.columns))
    assert recorder.launches[-1].arguments["GROUPED"]


def test_marks_of_all_groups_take_one_launch() -> None:
    """Also if the first group has no rows."""
    backend, recorder = recording_backend()
    planes = empty_groups(get_format("nvfp4"), ROWWISE, (0, 32, 0, 64), 64, device=torch.device("cpu"))
    backend.mark_groups(torch.ones(96, 64), planes, torch.ones(1, dtype=torch.int32))
    assert recorder.kernels() == ["mark_kernel"]


def test_groups_at_different_places_of_something_larger_are_not_written_together() -> None:
    case = GROUP_CASES["groups, mxfp8 + nvfp4_rht_sr"]
    x = torch.empty(sum(case.heights), case.width, dtype=torch.bfloat16, device=META)
    backend, recorder = recording_backend()
    targets = []
    for direction, name, within in ((ROWWISE, "mxfp8_sr", None), (COLUMNWISE, "mxfp8_sr", Within(4, 0, 64))):
        encoding = ALL[name](direction)
        planes = empty_groups(encoding.format, direction, case.heights, case.width, device=META)
        targets.append(GroupedTarget(planes, encoding, within=within))
    backend.encode_groups(x, targets, [0] * len(case.heights))
    assert [launch.arguments["top"] for launch in recorder.launches] == [0, 4]


@pytest.mark.parametrize("name", [name for name in ENCODINGS if "rotated_rows_scaled" not in name])
def test_every_encoding_has_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to the reference, in both directions and in decoding; but amaxes of rotated rows are."""
    monkeypatch.setattr("crossgrain.kernels.reference.encode.operand_of", None)
    monkeypatch.setattr("crossgrain.kernels.reference.decode.decode_operand", None)
    backend, recorder = recording_backend()
    x = torch.empty(128, 128, dtype=torch.bfloat16, device=META)
    planes = written(backend, x, ((ROWWISE, name), (COLUMNWISE, name)))
    assert recorder.kernels().count("encode_kernel") == 1
    recorder.launches.clear()
    for plane in planes:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            backend.decode(plane, dtype)
        backend.decode_operand(plane)
        backend.decode_bf16(plane)
    assert recorder.kernels() == ["decode_kernel"] * 10


@pytest.mark.parametrize("name", [*REFERENCE_ENCODINGS, "mxfp8 of fp64", "nvfp4_rht_sr within, at an odd place"])
def test_the_reference_serves_what_has_no_kernel(name: str) -> None:
    backend, recorder = recording_backend()
    case = replace(CASES[name], amax=3.0)  # because nothing is measured here
    check_case(backend, case, read=name in REFERENCE_ENCODINGS and "philox" not in name)
    assert "encode_kernel" not in recorder.kernels() and "decode_kernel" not in recorder.kernels()


def test_amaxes_that_are_not_one_after_the_other_are_left_to_the_reference() -> None:
    x = torch.randn(64, 32)
    encoding = ALL["nvfp4_row_scaled"](ROWWISE)
    backend, recorder = recording_backend()
    plane = empty_plane(encoding.format, ROWWISE, x.shape, device=x.device)
    spread = torch.zeros(128)
    for apart in (replace(plane, amax=spread[::2]), replace(plane, amax=None)):
        backend.encode(x, [Target(apart, encoding, x.abs().amax(1))], None)
    backend.encode(x, [Target(plane, encoding, spread[::2].copy_(x.abs().amax(1)))], None)
    assert torch.equal(backend.decode(replace(plane, amax=spread[::2]), x.dtype), REFERENCE.decode(plane, x.dtype))
    assert not recorder.launches


def test_codes_in_rows_that_do_not_begin_at_words_are_left_to_the_reference() -> None:
    x = torch.randn(32, 32)
    encoding = ALL["nvfp4"](ROWWISE)
    backend, recorder = recording_backend()
    plane = empty_plane(encoding.format, ROWWISE, x.shape, device=x.device)
    odd = replace(plane, data=torch.zeros(32, 18, dtype=torch.uint8)[:, :16])
    for each in (odd, plane):
        backend.encode(x, [Target(each, encoding, x.abs().max().view(1))], None)
    assert recorder.kernels() == ["encode_kernel"]  # for the other one


# ---- nothing is read, nothing is launched ------------------------------------------------------------


def test_no_call_reads_a_number_of_the_device() -> None:
    backend, recorder = recording_backend()
    x = torch.empty(64, 96, dtype=torch.bfloat16, device=META)
    for plane in written(backend, x, PAIR):
        backend.decode(plane, torch.float32)
        backend.decode_operand(plane)
        assert plane.scale is not None
        backend.swizzle_scales(plane.operand_scales())
    product, out = torch.empty(64, 32, device=META), torch.empty(64, 32, dtype=torch.bfloat16, device=META)
    scale = GlobalScale(torch.empty(1, device=META), 0.5)
    backend.epilogue(product, out, scale, None, 1.0, torch.empty(32, device=META), 0.5)
    backend.joint_scale(scale, scale, 2.0, product)
    backend.amax(x)
    written_groups(backend, torch.empty(256, 32, dtype=torch.bfloat16, device=META), GROUP_CASES["groups, fp8 + fp8"])
    assert set(recorder.kernels()) == {
        "amax_kernel", "encode_kernel", "decode_kernel", "swizzle_kernel", "epilogue_kernel", "joint_scale_kernel",
    }  # fmt: skip


def test_traced_tensors_launch_nothing() -> None:
    backend, recorder = recording_backend()
    with FakeTensorMode():
        x = torch.empty(64, 96, dtype=torch.bfloat16)
        row, column = written(backend, x, PAIR)
        assert backend.decode(row, torch.float32).shape == backend.decode(column, torch.float32).shape == (64, 96)
        assert backend.decode_operand(column).shape == (96, 64)
        out = torch.empty(64, 96)
        backend.epilogue(out, out, None, None, 2.0, None, None)
        assert backend.joint_scale(None, None, 2.0, out).shape == (2,)
        assert backend.swizzle_scales(torch.empty(3, 5, dtype=torch.uint8)).shape == (128, 8)
        assert backend.amax(x).shape == (1,)
        written_groups(backend, torch.empty(256, 32), GROUP_CASES["groups, fp8 + fp8"])
    assert not recorder.launches


def test_empty_tensors_launch_nothing() -> None:
    backend, recorder = recording_backend()
    for shape in ((0, 32), (32, 0)):
        written(backend, torch.empty(shape, dtype=torch.bfloat16), ((ROWWISE, "fp8"), (COLUMNWISE, "mxfp8")))
    backend.epilogue(torch.empty(0, 5), torch.empty(0, 5), None, None, 2.0, None, None)
    assert not recorder.launches and torch.equal(backend.amax(torch.empty(0, 3)), torch.zeros(1))


# ---- large tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("length, wide", [(1 << 14, False), (1 << 26, True)])
def test_long_rows_have_offsets_of_64_bits(length: int, wide: bool, turned: bool) -> None:
    """Also of codes, whose rows are long even if those of the input are not, because it is stored by columns."""
    backend, recorder = recording_backend()
    x = torch.empty((length, 128) if turned else (128, length), dtype=torch.bfloat16, device=META)
    row, column = written(backend, x.t() if turned else x, ((ROWWISE, "mxfp8"), (COLUMNWISE, "mxfp8")))
    backend.decode(row, torch.float32)
    backend.decode(column, torch.float32)
    backend.epilogue(torch.empty(x.shape, device=META), x, None, None, 2.0, None, None)
    backend.amax(x)
    found = {launch.kernel: launch.arguments["WIDE"] for launch in recorder.launches}
    del found["amax_kernel"]  # of a contiguous tensor in rows of its own
    assert found == dict.fromkeys(("encode_kernel", "decode_kernel", "epilogue_kernel"), wide)


@pytest.mark.parametrize(
    "shape, within, wide",
    [
        ((1 << 15, 1 << 15), None, False),
        ((1 << 16, 1 << 15), None, True),
        ((32, 32), Within(1 << 16, 0, 1 << 15), True),
        ((32, 32), Within(0, 1 << 31, 1 << 32), True),
        ((32, 32), Within(64, 64, 4096), False),
    ],
)
def test_random_words_are_counted_in_64_bits_where_32_do_not_suffice(
    shape: tuple[int, int], within: Within | None, wide: bool
) -> None:
    backend, recorder = recording_backend()
    x = torch.empty(shape, dtype=torch.bfloat16, device=META)
    written(backend, x, ((ROWWISE, "mxfp8_sr"), (COLUMNWISE, "nvfp4_rht_sr")), within)
    passed = recorder.launches[-1].arguments
    assert passed["ROW"].wide_counter is passed["COLUMN"].wide_counter is wide
    written(backend, x, ((ROWWISE, "mxfp8"),), within)
    assert not recorder.launches[-1].arguments["ROW"].wide_counter  # nothing is counted


# ---- choosing ----------------------------------------------------------------------------------------


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Triton is installed, and no backend was chosen yet."""
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("crossgrain.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(choice, "_triton", None)
    monkeypatch.setattr(choice, "serving", {})


@pytest.mark.usefixtures("without_triton")
def test_without_triton_the_reference_serves_gpus_with_one_warning() -> None:
    with warned(UNAVAILABLE):
        assert cg.get_backend("cuda") == "reference"
    with silent():
        assert cg.get_backend("cuda") == "reference"
    assert cg.get_backend("cpu") == "cpu"


@pytest.mark.usefixtures("without_triton")
def test_an_old_triton_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))  # which lacks names
    with warned(UNAVAILABLE):
        assert cg.get_backend("cuda") == "reference"


@pytest.mark.usefixtures("without_triton")
def test_without_triton_it_cannot_be_chosen() -> None:
    with pytest.raises(RuntimeError, match=r"'triton' needs Triton, which is not installed: .*crossgrain\[gpu\]"):
        cg.set_backend("triton")
    assert choice._chosen == "auto"


def test_gpus_have_the_triton_backend() -> None:
    assert cg.get_backend("cuda") == "triton"
    with choice.using_backend("triton"):
        assert (cg.get_backend("cuda"), cg.get_backend("cpu"), cg.get_backend("meta")) == ("triton", "cpu", "reference")
    with choice.using_backend("reference"):
        assert cg.get_backend("cuda") == "reference"


def test_triton_is_not_imported_before_a_tensor_on_a_gpu_needs_it() -> None:
    code = """
import sys, torch, crossgrain as cg
cg.quantize(torch.empty(32, 32, device="meta"), "mxfp8")
assert not [name for name in sys.modules if name.startswith("crossgrain.kernels.triton")]
assert cg.get_backend("cuda") == "triton" and "crossgrain.kernels.triton.backend" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
