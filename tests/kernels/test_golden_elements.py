"""element_casts.npz: casts of single numbers, decode tables, E8M0 scales, the stochastic table."""

import numpy as np
import torch

from crossgrain.formats import E2M1, E4M3, E5M2, get_element
from crossgrain.kernels.reference.elements import element_values, round_stochastically, round_to_nearest
from crossgrain.kernels.reference.scaling import e8m0_reciprocal, e8m0_round_up, e8m0_up_scales, e8m0_value

from ..common.golden_cases import ALL_IDS, INDEX, archive, assert_same_bits, golden, parametrized_ids
from ..recipe import test_amax_history
from . import test_golden_hybrid_gemm, test_golden_planes

ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def test_every_golden_case_is_run_exactly_once():
    modules = map(vars, (test_golden_planes, test_golden_hybrid_gemm, test_amax_history))
    ids = [case_id for names in (globals(), *modules) for case_id in parametrized_ids(names)]
    assert len(ids) == len(set(ids))
    assert set(ids) == ALL_IDS


def test_the_index_describes_the_archives_completely():
    for file, cases in INDEX.items():
        described = {f"{case['case']}/{field}": spec for case in cases for field, spec in case["fields"].items()}
        stored = {key: [str(array.dtype), list(array.shape)] for key, array in archive(file).items()}
        assert stored == described, file


@golden("element_casts.npz", lambda case: case.name == "all_bf16")
def test_casts_of_all_bf16_numbers(case):
    x = case.tensor().to(torch.float32)
    for element in (E4M3, E5M2):
        codes = round_to_nearest(x, element)
        case.check(f"{element.name}_sat", codes)
        # ml_dtypes without a clamp overflows to NaN or Inf. It has the same code wherever its result is finite, and
        # where it is not, the input is not finite or beyond the last number that rounds to the maximum.
        native = torch.from_numpy(case.input(f"{element.name}_native"))
        finite = element_values(native, element).isfinite()
        assert_same_bits(codes[finite], native[finite].numpy())
        assert not (x[~finite].abs() <= element.max).any()
        assert (finite & (x.abs() > element.max)).any(), "numbers beyond the maximum that still round to it"
    case.check("e2m1_code", round_to_nearest(x, E2M1))
    case.check("e8m0_up", e8m0_round_up(x.abs()))
    case.assert_complete()


@golden("element_casts.npz", lambda case: case.name == "fp32_boundaries")
def test_casts_at_rounding_boundaries(case):
    x = case.tensor()
    case.check("e4m3_sat", round_to_nearest(x, E4M3))
    case.check("e5m2_sat", round_to_nearest(x, E5M2))
    case.check("e2m1_code", round_to_nearest(x, E2M1))
    case.assert_complete()


@golden("element_casts.npz", lambda case: case.name == "e8m0_scale_from_amax")
def test_e8m0_scale_from_amax(case):
    amax = case.tensor("amax")
    for element in (E4M3, E5M2):
        scales = e8m0_up_scales(amax, element)
        case.check(f"byte_{element.name}", scales.stored)
        assert_same_bits(scales.factor, e8m0_reciprocal(scales.stored).numpy())
    case.assert_complete()


@golden("element_casts.npz", lambda case: case.name == "decode_tables")
def test_decode_tables(case):
    for name in ("e4m3", "e5m2", "e2m1"):
        element = get_element(name)
        codes = ALL_BYTES[: 1 << element.bits]
        case.check(name, element_values(codes, element))
        case.check(name, np.array(element.values(), dtype=np.float32))
    case.check("e8m0", e8m0_value(ALL_BYTES))
    case.check("e8m0", np.array(get_element("e8m0").values(), dtype=np.float32))
    case.check("e8m0_reciprocal", e8m0_reciprocal(ALL_BYTES))
    case.assert_complete()


@golden("element_casts.npz", lambda case: case.name == "e2m1_stochastic")
def test_stochastic_rounding_with_every_random_byte(case):
    x = case.tensor()
    codes = round_stochastically(x[:, None].expand(-1, 256), E2M1, ALL_BYTES.expand(len(x), -1))
    case.check("code", codes)
    case.check("value", element_values(codes, E2M1))
    case.assert_complete()
