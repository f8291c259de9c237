"""The golden vectors as parametrized cases, and the few helpers that all tests share.

A test receives a `GoldenCase`, takes its inputs with `input`, compares with `check`, and ends with
`assert_complete`: a field of the archive that nobody looked at is an error, not an omission.
"""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from crossgrain import kernels
from crossgrain.kernels import Target
from crossgrain.planes import empty_plane

DIRECTORY = Path(__file__).parent / "golden"
INDEX = {entry["file"]: entry["cases"] for entry in json.loads((DIRECTORY / "index.json").read_text())["files"]}
ALL_IDS = {f"{file.removesuffix('.npz')}/{case['case']}" for file, cases in INDEX.items() for case in cases}


class GoldenCase:
    """One case of one file: its parameters, its arrays, and which of them have been used."""

    def __init__(self, file, entry):
        self.file, self.name = file, entry["case"]
        self.id = f"{file.removesuffix('.npz')}/{self.name}"
        self.fields = entry["fields"]
        self.parameters = {key: value for key, value in entry.items() if key not in ("case", "fields")}
        self._unused = set(self.fields)

    def __getitem__(self, parameter):
        return self.parameters[parameter]

    def get(self, parameter, default=None):
        return self.parameters.get(parameter, default)

    def __contains__(self, field):
        return field in self.fields

    def input(self, field):
        """An array that goes into the code under test."""
        self._unused.discard(field)
        return archive(self.file)[f"{self.name}/{field}"]

    def tensor(self, field="x"):
        """An input as a torch tensor; 16-bit floats are stored as their bit patterns."""
        array = self.input(field)
        if array.dtype != np.uint16:
            return torch.from_numpy(array)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self["x_dtype"]]
        return torch.from_numpy(array.view(np.int16)).view(dtype)

    def check(self, field, actual):
        """``actual`` equals the golden array bit for bit (of NaNs: that they are NaNs)."""
        assert_same_bits(actual, self.input(field), f"{self.id}/{field}")

    def check_if_present(self, field, actual):
        if field in self:
            self.check(field, actual)

    def assert_complete(self):
        assert not self._unused, f"{self.id}: never looked at {sorted(self._unused)}"

    def __repr__(self):
        return self.id


@lru_cache
def archive(file):
    with np.load(DIRECTORY / file) as arrays:
        return dict(arrays)


def golden(file, only=lambda case: True):
    """Parametrize ``case`` with the cases of ``file``, all or those that ``only`` accepts."""
    cases = [GoldenCase(file, entry) for entry in INDEX[file]]
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in cases if only(case)])


def parametrized_ids(names):
    """Ids of the golden cases that the tests among a module's ``names`` run on."""
    tests = [test for name, test in names.items() if name.startswith("test_")]
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", ()) if mark.args[0] == "case"]
    return [parameter.id for mark in marks for parameter in mark.args[1]]


def assert_same_bits(actual, expected, what=""):
    """Same dtype, shape and bits; NaNs may differ in sign and payload."""
    actual, expected = as_array(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    if actual.dtype.kind == "f":
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(actual), nan, err_msg=f"{what}: NaNs")
        bits = np.dtype(f"u{actual.dtype.itemsize}")
        actual, expected = (np.where(nan, 0, np.ascontiguousarray(a).view(bits)) for a in (actual, expected))
    np.testing.assert_array_equal(actual, expected, err_msg=what)


def as_array(values):
    """numpy array of a tensor; bf16 and fp16 as bit patterns, which is how the archives hold them."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    if values.dtype in (torch.bfloat16, torch.float16):
        return values.contiguous().view(torch.int16).numpy().view(np.uint16)
    return values.numpy()


def encoded(x, encoding, direction, *, seed=None, scale=None):
    """A plane of ``x``; measured and encoded in one go."""
    plane = empty_plane(encoding.format, direction, x.shape, device=x.device)
    targets = kernels.measure(x, [Target(plane, encoding, scale=scale)])
    kernels.encode(x, targets, seed)
    return plane
