"""Choices whose effects cannot be told apart are ties, if the target is reached with either."""

from __future__ import annotations

from crossgrain.lab import search
from crossgrain.lab.sensitivity.result import Site

from .made import BASE, NEAREST, SR, loss, noise, sensitivity


def pairs(s, **target):
    return {(str(tie.moved), str(tie.other), tie.unit) for tie in search(s, **target).ties}


def test_sites_with_overlapping_effects_are_ties() -> None:
    s = sensitivity({"a": 0.001, "b": 0.0011, "c": 0.03})  # half widths are a tenth; the base has a tenth of it
    assert pairs(s, saving=7 / 9) == {("a fprop", "b fprop", "nats")}
    assert not pairs(s, saving=8 / 9)  # a and b have moved, and c is far
    for label in (BASE, SR, NEAREST):
        s.effects[Site("b", "fprop")][label] = loss(0.0011 if label != BASE else 0.00011, half=1e-6)
        s.effects[Site("a", "fprop")][label] = loss(0.001 if label != BASE else 0.0001, half=1e-6)
    assert not pairs(s, saving=7 / 9)


def test_an_exchange_that_misses_the_target_is_no_tie() -> None:
    s = sensitivity({"a": 0.001, "b": 0.0011}, sizes={"b": (4096, 2048)})
    large = search(s, saving=16 / 18)  # only the larger layer saves enough
    assert large.chosen[Site("a", "fprop")] != BASE
    assert not [tie for tie in large.ties if tie.moved == Site("a", "fprop")]


def test_backward_that_is_not_priced_is_compared_by_bias() -> None:
    s = sensitivity({"a": 0.001, "b": 0.001})
    found = search(s, saving=0.5)
    assert found.ties and {tie.unit for tie in found.ties} == {"bias"}
    assert all(tie.moved.gemm != "fprop" and tie.other.gemm != "fprop" for tie in found.ties)
    for name, bias in (("a", 1e-4), ("b", 1e-2)):
        for gemm in ("dgrad", "wgrad"):
            for label in (SR, NEAREST):
                s.effects[Site(name, gemm)][label] = noise(0.01, bias, half=1e-6)
            s.effects[Site(name, gemm)][BASE] = noise(0.001, 1e-5, half=1e-6)
    ties = search(s, saving=1 / 3).ties  # both backward GEMMs of a
    assert not ties


def test_ties_in_nats_with_calibration() -> None:
    s = sensitivity({"a": 0.01, "b": 0.03}, backward=0.01, calibration={"dgrad": 0.1, "wgrad": 0.1})
    found = search(s, saving=0.5)
    assert {tie.unit for tie in found.ties} == {"nats"}
    assert {tie.moved.gemm for tie in found.ties} <= {"dgrad", "wgrad"}
