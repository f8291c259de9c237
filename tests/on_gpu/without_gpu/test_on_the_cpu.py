"""Each check on the CPU: it passes, and it finds what is broken on purpose."""

from __future__ import annotations

import warnings

import pytest
import torch

from crossgrain import kernels
from crossgrain.gemm.native import machine
from crossgrain.kernels import REFERENCE
from crossgrain.kernels.choice import using_backend
from crossgrain.linear import function

from ...gpu.native.operands import B200, H100, twin_of
from .. import bandwidth, graphs, layer_planes, placement, products, same_bytes, training, waits
from ..finding import Deadline, Finding, attempted, check_each
from ..goldens import golden_checks

CPU = torch.device("cpu")
OTHER = torch.device("cpu", 0)  # the same device, under a name of its own
LONG = 1e6


class _Changed(type(REFERENCE)):  # type: ignore[misc]
    """The reference, after which something is changed."""

    name = "changed"

    def __init__(self, change) -> None:
        self._change = change

    def encode(self, x, targets, seed):
        super().encode(x, targets, seed)
        if x.numel():
            self._change(x, targets[0].plane)


def _flip_code(x, plane):
    plane.data.view(-1)[-1] ^= 1


def _write_beside(x, plane):
    memory = plane.data.untyped_storage()
    memory[plane.data.storage_offset() + plane.data.numel()] = 1


def _write_input(x, plane):
    x.untyped_storage()[0] ^= 1


def _bytes_found(backend) -> Finding:
    names = ["writing, mxfp8 + nvfp4_rht_sr", "writing, mxfp8, negated later", "reading, nvfp4_row_scaled"]
    names += ["groups, mxfp8 + nvfp4_rht_sr", "writing, nvfp4_rht_sr, part of rows", "swizzling [130, 9]"]
    checks = same_bytes.all_checks()
    through = same_bytes.ThroughDevice(backend, CPU)
    return check_each(((name, checks[name]) for name in names), lambda check: check(through), Deadline(LONG))


def test_bytes_of_the_reference_are_its_own():
    assert _bytes_found(REFERENCE) == Finding({"checked": 6, "not_reached": 0, "wrong": 0}, [])


@pytest.mark.parametrize(
    "change, said",
    [
        (_flip_code, "codes of the rowwise plane of mxfp8: 1 of"),
        (_write_beside, "bytes differ"),
        (_write_input, "written to memory that it should only read"),
    ],
)
def test_wrong_bytes_are_found(change, said):
    problems = _bytes_found(_Changed(change)).problems
    assert any(problem.startswith("writing, mxfp8 + nvfp4_rht_sr: ") and said in problem for problem in problems)


def test_shards_have_every_case_once():
    names = list(same_bytes.all_checks())
    assert len(names) > 700 and sorted(name for shard in range(8) for name in names[shard::8]) == sorted(names)
    assert same_bytes.check_bytes(REFERENCE, CPU, Deadline(LONG), 3, len(names) // 2).numbers["checked"] in (2, 3)


def test_golden_vectors_are_compared(monkeypatch):
    checks = list(golden_checks(CPU))
    assert len(checks) > 150
    some = [(name, check) for name, check in checks if name.startswith(("hybrid/", "nvfp4/special"))]
    assert check_each(some, lambda check: check(), Deadline(LONG)).problems == []
    right = kernels.encode
    monkeypatch.setattr(kernels, "encode", lambda x, targets, *rest: right(x * 2, targets, *rest))
    assert len(check_each(some, lambda check: check(), Deadline(LONG)).problems) >= len(some) // 2


def test_planes_of_a_step(monkeypatch):
    found = layer_planes.check_planes("mxfp8-fwd-nvfp4-bwd", OTHER)
    assert found.problems == [] and found.numbers["buffers_compared"] > 100
    planes = layer_planes._planes_of

    def changed(call, device):
        made = planes(call, device)
        if device == OTHER:
            made[-1].buffers["codes"][0, 0] ^= 1
        return made

    monkeypatch.setattr(layer_planes, "_planes_of", changed)
    problems = layer_planes.check_planes("mxfp8", OTHER).problems
    assert "blocks.0.attention.qkv, grad_output columnwise mxfp8: 1 of 49152 codes differ" in problems


def test_losses(monkeypatch):
    assert training.check_losses("nvfp4", OTHER, steps=1).numbers["largest_difference"] == 0
    monkeypatch.setattr(training, "losses", lambda preset, device, steps: [5.0 + 0.03 * (device == OTHER)])
    assert "losses differ by up to 0.0300 nats" in training.check_losses("nvfp4", OTHER).problems[0]


def test_losses_that_are_not_numbers(monkeypatch):
    monkeypatch.setattr(training, "losses", lambda preset, device, steps: [float("nan")])
    assert training.check_losses("nvfp4", OTHER).problems


def test_runs(monkeypatch):
    found = training.check_runs(CPU, Deadline(LONG), ["Linear hybrid", "experts router"])
    assert found.problems == [] and found.numbers["exact"] == 2
    results, given = training.results_of, iter((1.0, 1.4))
    monkeypatch.setattr(
        training,
        "results_of",
        lambda run, on: {
            name: result * factor for factor in [next(given)] for name, result in results(run, on).items()
        },
    )
    assert "relative error of 0.4" in training.check_runs(CPU, Deadline(LONG), ["Linear mxfp8"]).problems[0]


@pytest.mark.parametrize("family, gpu", [("mxfp8", B200), ("fp8", H100), ("nvfp4_rotated", B200)])
def test_products(family, gpu):
    with twin_of(gpu):
        found = products.check_products(family, CPU)
        assert found.problems == []
        assert all(told["route"] == "native" and told["native_error_of_bound"] <= 1 for told in found.numbers.values())


def test_wrong_products_are_found(monkeypatch):
    with twin_of(B200):
        right = machine.run
        monkeypatch.setattr(machine, "run", lambda call: right(call) * 1.001)
        problems = products.check_products("mxfp8", CPU).problems
    assert [problem.split()[:2] for problem in problems] == [[gemm, "native"] for gemm in ("fprop", "dgrad", "wgrad")]


def test_native_products_can_be_demanded():
    with twin_of(B200):
        found = products.check_forced(CPU)
    assert found.problems == [] and found.numbers["mxfp8"] == "native"
    assert "fprop multiplies input rowwise" in found.numbers["fp8_block"]


@pytest.mark.filterwarnings("ignore:called a synchronizing")
def test_waits(monkeypatch):
    assert waits.check_waits(CPU, Deadline(LONG), ["Linear mxfp8"]).problems == []
    gemm = function.gemm

    def reading(*arguments, **options):
        warnings.warn("called a synchronizing CUDA operation (function)", stacklevel=1)
        return gemm(*arguments, **options)

    monkeypatch.setattr(function, "gemm", reading)
    with using_backend("reference"):  # on a CPU, kernels would multiply in one call with the rest
        (problem,) = waits.check_waits(CPU, Deadline(LONG), ["Linear mxfp8"]).problems
    assert "the host waits in linear/function.py: " in problem
    assert waits.is_allowed("nn/grouped_linear.py: checked_sizes") and not waits.is_allowed("nn/base.py: forward")


def test_a_step_for_graphs():
    step = graphs._Step("hybrid", CPU)
    step.run()
    first = step.copies()
    step.run()
    assert graphs._differing(first, step.copies()) == ["dx", "dW"], "it rounds stochastically in backward"
    assert "CUDA" in attempted(lambda: graphs.check_graph("mxfp8", CPU)).problems[0]


@pytest.mark.parametrize("name", ["mxfp8 both", "mxfp8 rowwise, nvfp4 columnwise rotated stochastic"])
def test_bandwidth(name):
    with using_backend("reference"):
        numbers = bandwidth.check_bandwidth(name, CPU, size=128, repeats=1).numbers
    assert {"copy_gb_per_second", "encode_share_of_copy", "decode columnwise_gb_per_second"} <= numbers.keys()
    assert all(rate > 0 for rate in numbers.values())


def test_places():
    assert placement.check_stream("nvfp4", CPU).problems == []
    assert placement.check_device("hybrid", CPU, OTHER).problems == []
    assert placement.check_device("mxfp8", OTHER, CPU).problems == ["results that are not on cpu:0: y, dx, dW"]


@pytest.mark.long
def test_compiled_layers():
    assert placement.check_compiled("hybrid", CPU, "aot_eager").problems == []


def test_other_results_are_found(monkeypatch):
    step = placement._step
    monkeypatch.setattr(placement, "_step", lambda recipe, device: step(recipe if device == CPU else "fp8", CPU))
    assert placement.check_device("mxfp8", CPU, OTHER).problems == [
        "cpu while cpu:0 is current: other results, y, dx, dW"
    ]
