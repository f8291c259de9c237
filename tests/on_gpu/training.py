"""Training on a device and on the CPU from the same state: losses, and the results of every kind of run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import crossgrain as cg

from ..gpu.fake_cuda.runs import RUNS, SHORT
from ..gpu.fake_cuda.runs.common import Results, Run
from .finding import Deadline, Finding, check_each
from .layer_planes import batch, converted_gpt

LOSS_TOLERANCE = 0.02
"""Nats. Two runs differ by the order of sums, which moves some numbers over the border between two codes. On the CPU,
weights that are perturbed by a rounding of fp32 move losses of these runs by up to 0.004, while they fall by 2.4."""

RESULT_TOLERANCE = 0.3
"""Relative error of a result. Where a sum is rounded to another bf16 number, what follows may get other scales and
codes. On the CPU, moving 0.03 % of the results of GEMMs to a neighbour in bf16 gives errors of up to 0.08. A wrong
scale, operand or layout gives errors of about 1."""

SMALL = 1e-3
"""Results that are smaller than this share of the largest one of a run are measured by that share. Gradients of biases
of keys, for instance, are 0 but for roundings."""

STEPS = 8


def check_losses(preset: str, device: torch.device, steps: int = STEPS) -> Finding:
    """Train a small GPT on both, and compare the loss of every step."""
    here, there = (losses(preset, on, steps) for on in (torch.device("cpu"), device))
    largest = max(abs(a - b) for a, b in zip(here, there, strict=True))
    found = Finding({"cpu": here, "device": there, "largest_difference": largest})
    if not largest <= LOSS_TOLERANCE:
        found.problems.append(f"losses differ by up to {largest:.4f} nats, more than {LOSS_TOLERANCE}")
    return found


def losses(preset: str, device: torch.device, steps: int) -> list[float]:
    """The losses of training steps on one batch, so that they fall. Layers draw the same numbers on every device."""
    model = converted_gpt(preset).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, following = (each.to(device) for each in batch())
    found: list[Tensor] = []
    with cg.draws_by_layer(3), sdpa_kernel(SDPBackend.MATH):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model.loss(text, following)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
    return [float(loss) for loss in found]


def check_runs(device: torch.device, deadline: Deadline, names: list[str] | None = None) -> Finding:
    """Run every way through the library on both, and compare all results. The short list comes first."""
    ordered = [*SHORT, *(name for name in RUNS if name not in SHORT)] if names is None else names
    errors: dict[str, float] = {}

    def check(run: tuple[str, Run]) -> None:
        errors[run[0]] = _largest_error(run[1], device)

    found = check_each(((name, (name, RUNS[name])) for name in ordered), check, deadline)
    found.numbers["largest_errors"] = dict(sorted(errors.items(), key=lambda each: -each[1])[:5])
    found.numbers["exact"] = sum(error == 0 for error in errors.values())
    return found


def _largest_error(run: Run, device: torch.device) -> float:
    expected, results = results_of(run, "cpu"), results_of(run, device.type)
    assert results.keys() == expected.keys(), "other results than on the CPU"
    floor = SMALL * max(float(each.double().norm()) for each in expected.values())
    largest = 0.0
    for name, result in results.items():
        assert result.device.type == device.type, f"{name} is on {result.device}"
        assert result.dtype == expected[name].dtype, f"{name} is {result.dtype}"
        error = _error(result.cpu(), expected[name], floor)
        assert error <= RESULT_TOLERANCE, f"{name} has a relative error of {error:.3g}"
        largest = max(largest, error)
    return largest


def results_of(run: Run, device_type: str) -> Results:
    """The results of a run, with the same random numbers on every device."""
    torch.manual_seed(1)
    step = run(device_type)
    torch.manual_seed(2)
    with sdpa_kernel(SDPBackend.MATH):
        return step()


def _error(result: Tensor, expected: Tensor, floor: float) -> float:
    if torch.equal(result, expected):
        return 0.0
    wide = expected.double()
    return float((result.double() - wide).norm() / max(float(wide.norm()), floor))
