"""The two switches, and the names of the field."""

import enum

import pytest
import torch

import crossgrain as cg
from crossgrain import DType
from crossgrain.runtime.settings import Settings, settings


def test_override_restores_also_after_an_error():
    assert not settings.strict

    def fail_in_strict_mode():
        with settings.override(strict=True, compute_capability=(8, 9)):
            assert settings.strict
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_strict_mode()
    assert not settings.strict
    assert settings.compute_capability == (10, 0)


def test_unknown_settings_are_refused():
    with pytest.raises(TypeError, match="no such setting: colour"), settings.override(colour=1):
        pass


def test_dtype_numbers():
    expected = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6}
    expected |= {"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10}
    assert {dtype.name: int(dtype) for dtype in DType} == expected


def test_dtype_casts_from_ints_and_other_enums():
    class Theirs(enum.IntEnum):
        e4m3 = 7

    assert DType.cast(Theirs.e4m3) is DType.kFloat8E4M3
    assert DType.cast(8) is DType.kFloat8E5M2
    assert DType.cast(DType.kByte) is DType.kByte
    assert DType.kFloat8E4M3 == Theirs.e4m3
    assert hash(DType.kFloat8E4M3) == hash(Theirs.e4m3)
    with pytest.raises(ValueError, match="not a type of quantized elements"):
        _ = DType.kFloat32.element
    assert cg.MXFP8Quantizer(Theirs.e4m3).dtype is DType.kFloat8E4M3


def test_torch_dtypes_map_both_ways():
    assert cg.TE_DType[torch.bfloat16] is DType.kBFloat16
    assert all(cg.TE_DType_To_Torch[ours] is theirs for theirs, ours in cg.TE_DType.items())
    assert set(cg.TE_DType) >= {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.float32}


def test_importing_does_no_work():
    """No environment is read and nothing is compiled at import."""
    import subprocess
    import sys

    code = "import sys, crossgrain; assert not {'numba', 'matplotlib', 'rich', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("chosen", "device", "found"),
    [
        (None, None, (10, 0)),
        (None, (9, 0), (9, 0)),
        ("12.0", (9, 0), (12, 0)),
        ("9.0", None, (9, 0)),
    ],
)
def test_the_gpu_generation_comes_from_the_environment_or_the_device(chosen, device, found, monkeypatch):
    if chosen is not None:
        monkeypatch.setenv("CROSSGRAIN_COMPUTE_CAPABILITY", chosen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: device)
    assert Settings().compute_capability == found


def test_a_gpu_generation_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("CROSSGRAIN_COMPUTE_CAPABILITY", "hopper")
    with pytest.raises(ValueError, match=r"CROSSGRAIN_COMPUTE_CAPABILITY must be of the form 10.0, got 'hopper'"):
        _ = Settings().compute_capability
