"""Compiled kernels know what is written in their own list, as full values; all else is the reference's."""

from dataclasses import replace

import pytest
import torch

from crossgrain import COLUMNWISE, ROWWISE
from crossgrain.formats import BUILT_IN, E2M1, E2M3, E3M2, E4M3, E5M2, Element, Format, TableElement, nvfp4_format
from crossgrain.formats.encoding import Encoding
from crossgrain.kernels import REFERENCE, Target
from crossgrain.kernels.cpu import backend as backend_module
from crossgrain.kernels.cpu import elements, known
from crossgrain.kernels.cpu.backend import CpuBackend
from crossgrain.kernels.cpu.known import is_known
from crossgrain.kernels.reference import ReferenceBackend
from crossgrain.planes import empty_plane

WITHOUT_KERNELS = {"mxint8", "nvfp4_ue5m3", "hifloat8", "identity"}
"""Built-in formats that the reference serves. Whoever writes a kernel for one takes it out here."""


def test_kernels_are_up_to_date_with_the_built_in_formats():
    """A change of a format's data alone makes it slow, not wrong; this is where that is noticed."""
    assert {fmt.name for fmt in BUILT_IN if not is_known(fmt)} == WITHOUT_KERNELS
    assert {fmt.name for fmt in known.FORMATS} == {fmt.name for fmt in BUILT_IN} - WITHOUT_KERNELS
    assert list(known.ELEMENTS.values()) == [E4M3, E5M2, E2M1, E2M3, E3M2]


def test_the_list_is_its_own():
    """Not the objects of ``formats``, which could change without anyone looking at the kernels."""
    assert not {id(element) for element in known.ELEMENTS.values()} & {id(e) for e in (E4M3, E5M2, E2M1, E2M3, E3M2)}


@pytest.mark.parametrize("mask", [0, 5, 0xD7E8])
def test_nvfp4_is_known_under_every_rotation(mask):
    assert is_known(nvfp4_format(rotation=mask))


class Noted(CpuBackend):
    """The CPU backend, which notes what it hands to the reference."""

    def __init__(self):
        self.handed_on = []


def _note(monkeypatch, backend):
    for name in ("encode", "decode", "decode_operand", "tensor_scale"):
        original = getattr(ReferenceBackend, name)

        def noting(self, *arguments, _name=name, _original=original):
            if self is backend:
                targets = arguments[1] if _name == "encode" else arguments[:1]
                if len(targets):
                    self.handed_on.append(_name)
            return _original(self, *arguments)

        monkeypatch.setattr(ReferenceBackend, name, noting)


OTHERS = {
    "another maximum": Format("fp8", replace(E4M3, max=240.0), ragged=True),
    "another bias": replace(BUILT_IN[6], element=replace(E4M3, bias=8, max=224.0)),
    "no NaN": replace(BUILT_IN[6], element=replace(E4M3, specials="none", max=480.0)),
    "another block": replace(BUILT_IN[6], block=(1, 64)),
    "another scale rule": replace(BUILT_IN[6], scale_rule="e8m0_floor"),
    "a table of the same name": replace(BUILT_IN[6], element=TableElement("e4m3", E4M3.values(), "away")),
    "another place for the largest": replace(BUILT_IN[0], amax_to=16.0),
    "another bound": replace(nvfp4_format(), scale_bound=128),
}


@pytest.mark.parametrize("direction", [ROWWISE, COLUMNWISE], ids=lambda direction: direction.value)
@pytest.mark.parametrize("name", OTHERS)
def test_a_known_name_with_other_data_is_handed_to_the_reference(name, direction, monkeypatch):
    fmt = OTHERS[name]
    assert fmt.name in {known_format.name for known_format in known.FORMATS} and not is_known(fmt)
    backend = Noted()
    _note(monkeypatch, backend)
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)) * 3
    made = {}
    for chosen in (REFERENCE, backend):
        target = Target(empty_plane(fmt, direction, x.shape, device=x.device), Encoding(fmt))
        target = target.with_amax(chosen.measure(x, [target])[0])
        chosen.encode(x, [target], None)
        made[chosen] = target.plane, chosen.decode(target.plane, torch.float32), chosen.decode_operand(target.plane)
        if fmt.block is None:
            made[chosen] += (chosen.tensor_scale(target),)
    for mine, theirs in zip(made[backend][1:], made[REFERENCE][1:], strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(made[backend][0].data, made[REFERENCE][0].data)
    assert {"encode", "decode", "decode_operand"} <= set(backend.handed_on)
    assert ("tensor_scale" in backend.handed_on) == (fmt.block is None)


def test_what_kernels_know_is_not_handed_on(monkeypatch):
    """Or else the test above would prove nothing."""
    backend = Noted()
    _note(monkeypatch, backend)
    fmt, x = BUILT_IN[0], torch.randn(64, 64)
    target = Target(empty_plane(fmt, ROWWISE, x.shape, device=x.device), Encoding(fmt))
    target = target.with_amax(backend.measure(x, [target])[0])
    backend.encode(x, [target], None)
    backend.decode_operand(target.plane)
    backend.tensor_scale(target)
    assert not backend.handed_on


def test_a_new_field_of_a_format_that_says_something_is_not_known(monkeypatch):
    """Whatever it is called: the whole value is compared."""
    for fmt in known.FORMATS:
        for field, value in {"name": "other", "ragged": not fmt.ragged, "rotation": 3, "scale_bound": 100}.items():
            try:
                changed = replace(fmt, **{field: value})
            except ValueError:
                continue
            assert not is_known(changed), changed


def test_a_tag_is_made_only_for_an_element_that_kernels_know():
    """A tag is only a name; inside of a kernel it would mean the element of that name."""
    assert elements.element_tag(E4M3).name == "e4m3"
    for other in (replace(E4M3, max=240.0), Element("e3m4", 3, 4, bias=3, max=31.0)):
        with pytest.raises(ValueError, match=f"kernels do not know the element '{other.name}' as it is here"):
            elements.element_tag(other)


def test_the_backend_is_the_one_that_is_used():
    assert backend_module.is_known is is_known
