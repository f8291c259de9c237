"""Golden vectors on a device: the tests of `tests/kernels`, with inputs that are moved there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..common.golden_cases import INDEX, GoldenCase
from ..kernels import test_golden_hybrid_gemm, test_golden_planes
from .finding import Deadline, Finding, check_each

# What is compared with numpy inside of these tests, or concerns no kernel.
_PLANES_ONLY = ("test_nvfp4_special_values",)
_OF_THE_HOST = ("test_rotation_matrix", "test_gemm")


class CaseOnDevice(GoldenCase):
    """A golden case whose inputs are on a device.

    Args:
        file: the archive.
        entry: its entry in the index.
        device: the device.
    """

    def __init__(self, file: str, entry: dict[str, Any], device: torch.device) -> None:
        super().__init__(file, entry)
        self._device = device

    def tensor(self, field: str = "x") -> Tensor:
        return super().tensor(field).to(self._device)

    def check(self, field: str, actual: Any) -> None:
        super().check(field, actual.cpu() if isinstance(actual, Tensor) else actual)


def golden_checks(device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every golden case that kernels can be compared with, by name."""
    for module in (test_golden_planes, test_golden_hybrid_gemm):
        for name, test in vars(module).items():
            if not name.startswith("test_") or name in _OF_THE_HOST:
                continue
            for case in _cases(test, device):
                run = test_golden_planes.check_nvfp4_planes if name in _PLANES_ONLY else test
                yield case.id, lambda run=run, case=case: run(case)


def check_goldens(device: torch.device, deadline: Deadline) -> Finding:
    """Run every golden case with the kernels of a device."""
    return check_each(golden_checks(device), lambda check: check(), deadline)


def _cases(test: Any, device: torch.device) -> Iterator[CaseOnDevice]:
    for mark in getattr(test, "pytestmark", ()):
        if mark.args[0] == "case":
            for parameter in mark.args[1]:
                (case,) = parameter.values
                (entry,) = (each for each in INDEX[case.file] if each["case"] == case.name)
                yield CaseOnDevice(case.file, entry, device)
