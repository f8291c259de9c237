"""After a warm-up nothing is left to compile."""

from collections.abc import Iterator

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, kernels
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import Target, warmup
from crossgrain.kernels.cpu import runtime
from crossgrain.planes import empty_plane

from ..common.quantizers import QUANTIZERS

pytestmark = pytest.mark.xdist_group("warm-up")  # which takes minutes, and is done once


@pytest.fixture(scope="module")
def warm() -> Iterator[set]:
    """All kernels that a warm-up finds in a process that has used none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_compiled", {})
        steps = list(warmup.warm_up())
        assert [step.number for step in steps] == list(range(len(steps)))
        assert steps[-1].total == len(steps)
        yield set(runtime._compiled)


def names(kernels_):
    return sorted(f"{key[0].py_func.__name__}{list(key[1:])}" for key in kernels_)


@pytest.mark.parametrize("usages", [(True, False), (False, True), (True, True)], ids=["row", "column", "both"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_no_quantizer_compiles_anything_after_a_warm_up(name, usages, warm):
    with_nan = torch.randn(1024, 1152)
    with_nan[3, 5] = torch.nan
    for one_buffer in (True, False):
        with cg.settings.override(non_tn_fp8_gemm=one_buffer):
            quantizer = QUANTIZERS[name]()
            quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
            for x in (with_nan, torch.randn(256, 384), torch.randn(2, 64, 128, dtype=torch.bfloat16)):
                q = quantizer(x)
                for plane in q.planes():
                    kernels.decode(plane, x.dtype)
                    kernels.decode_operand(plane)
                    if kernels.can_multiply(plane, plane):
                        kernels.multiply(plane, plane, torch.empty([plane.operand_shape[0]] * 2))
    assert not names(set(runtime._compiled) - warm)


@pytest.mark.parametrize("row", ["mxfp8", "mxfp8_e5m2", "fp8", "nvfp4_rht_sr", "fp8_block"])
@pytest.mark.parametrize("column", ["mxfp8", "mxfp8_e5m2", "fp8", "nvfp4_rht_sr", "nvfp4", "mxfp4"])
def test_no_pair_of_formats_compiles_anything_after_a_warm_up(row, column, warm):
    x = torch.randn(128, 256, dtype=torch.bfloat16)
    targets = [
        Target(empty_plane(encoding.format, direction, x.shape, device=x.device), encoding)
        for name, direction in ((row, ROWWISE), (column, COLUMNWISE))
        for encoding in [QUANTIZERS[name]().encoding(direction)]
    ]
    kernels.encode(x, kernels.measure(x, targets), seed=1)
    assert not names(set(runtime._compiled) - warm)


def test_all_tests_of_the_warm_up_go_to_one_worker(request):
    """Otherwise each worker would compile everything."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("tests are not handed out by group here")
    assert request.node.nodeid.endswith("@warm-up")


def test_every_format_and_option_is_warmed_up():
    used = warmup.uses()
    assert {use.encoding.format.name for use in used} >= {fmt.name for fmt in cg.formats.formats()} - {"identity"}
    for name, make in QUANTIZERS.items():
        if "identity" not in name:
            encodings = [make().encoding(direction) for direction in (ROWWISE, COLUMNWISE)]
            for encoding in (Encoding(e.format, e.stochastic, e.power_of_two, 0.0, e.four_over_six) for e in encodings):
                assert any(use.encoding == encoding for use in used), name
