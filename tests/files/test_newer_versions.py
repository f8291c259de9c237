"""Pickles and files of a version of crossgrain that knows more about formats than the one that reads them."""

import dataclasses
import io
import json
import pickle

import pytest
import torch

import crossgrain as cg
from crossgrain.files.description import format_from, plain_format, plain_quantizer, quantizer_from
from crossgrain.files.safetensors_file import read_safetensors, save_safetensors
from crossgrain.formats import E4M3, Element, Format, NewerVersionError, ScaleLayout, TableElement, formats, written
from crossgrain.formats.written import changed_fields, from_fields

safetensors = pytest.importorskip("safetensors")

EVERY_FORMAT = pytest.mark.parametrize("fmt", list(formats()), ids=lambda fmt: fmt.name)


def newer(cls: type, field: str, default: object, **values: object):
    """A value of what ``cls`` may be in a later version, with one field more."""
    made = dataclasses.make_dataclass(cls.__name__, [(field, object, default)], bases=(cls,), frozen=True, eq=False)
    written._KINDS[cls.__name__] = cls  # this version stays what it is
    return made(**values)


FP8 = {"name": "fp8_new", "element": E4M3, "ragged": True}


@EVERY_FORMAT
def test_only_what_says_something_is_written(fmt):
    plain = json.loads(json.dumps(plain_format(fmt), allow_nan=False))  # strict JSON, also with NaN in a table
    assert format_from(plain) == fmt
    defaults = {f.name: f.default for f in dataclasses.fields(Format) if f.default is not dataclasses.MISSING}
    assert not [name for name, value in plain.items() if name in defaults and value == defaults[name]]
    assert from_fields("Format", changed_fields(fmt)) == fmt


def test_a_new_field_at_its_default_is_read_by_those_that_do_not_know_it():
    for element in (E4M3, newer(Element, "ties", "even", **changed_fields(E4M3))):
        fmt = newer(Format, "later", None, **{**FP8, "element": element})
        assert "later" not in plain_format(fmt) and "ties" not in plain_format(fmt)["element"]
        assert format_from(plain_format(fmt)) == Format(**FP8)
        loaded = pickle.loads(pickle.dumps(fmt))
        assert type(loaded) is Format and loaded == Format(**FP8)


@pytest.mark.parametrize(
    "value, field, what",
    [
        (newer(Element, "ties", "even", **changed_fields(E4M3), ties="away"), "ties", "the element 'e4m3'"),
        (newer(Format, "later", None, **FP8, later=3), "later", "the format 'fp8_new'"),
        (newer(ScaleLayout, "order", 0, order=1), "order", "a ScaleLayout"),
        (
            newer(TableElement, "note", 0, name="t", table=tuple(map(float, range(256))), note=1),
            "note",
            "the element 't'",
        ),
    ],
    ids=["element", "format", "layout", "table"],
)
def test_a_new_field_that_says_something_is_an_error_that_names_it(value, field, what):
    message = rf"{what}.* {field} = .*cannot be read.*{field} is a field .*does not know.*written by a newer version"
    with pytest.raises(NewerVersionError, match=message):
        pickle.loads(pickle.dumps(value))
    if isinstance(value, Format):
        plain = plain_format(value)
    else:
        place = "layout" if isinstance(value, ScaleLayout) else "element"
        plain = plain_format(Format(**{"name": "fp8_new", "element": E4M3, place: value, "ragged": True}))
    with pytest.raises(NewerVersionError, match=message):
        format_from(plain)


def test_a_kind_of_value_that_is_new_is_named_too():
    with pytest.raises(NewerVersionError, match="a Codebook cannot be read.*written by a newer version"):
        from_fields("Codebook", {})


def test_a_quantized_tensor_of_a_newer_version_in_torch_load():
    q = cg.quantize(torch.randn(4, 4), Format(**FP8))
    for later in (None, 3):
        q._formats = dict.fromkeys(cg.Direction, newer(Format, "later", None, **FP8, later=later))
        q._quantizer.format = q._formats[cg.ROWWISE]
        file = io.BytesIO()
        torch.save(q, file)
        file.seek(0)
        if later is None:
            assert torch.load(file, weights_only=True)._formats[cg.ROWWISE] == Format(**FP8)
        else:
            with pytest.raises(NewerVersionError, match="later is a field"):
                torch.load(file, weights_only=True)


def test_a_safetensors_file_of_a_newer_version(tmp_path):
    path = tmp_path / "model.safetensors"
    q = cg.quantize(torch.randn(4, 4), Format(**FP8))
    for later in (None, 3):
        q._formats = dict.fromkeys(cg.Direction, newer(Format, "later", None, **FP8, later=later))
        q._quantizer.format = q._formats[cg.ROWWISE]
        save_safetensors({"w": q}, path)
        if later is None:
            assert torch.equal(read_safetensors(path).state_dict["w"].dequantize(), q.dequantize())
        else:
            with pytest.raises(NewerVersionError, match=r"model.safetensors: the format 'fp8_new' with later = 3"):
                read_safetensors(path)


@EVERY_FORMAT
def test_what_was_written_before_is_still_read(fmt):
    """All fields in a file, and values called with all of them in order in a pickle."""
    if isinstance(fmt.element, TableElement) or fmt.scale_element != E4M3:
        return  # there were none

    later = ["amax_to", "scale_element"]  # fields that were not written yet

    def all_of(value, without=()):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name not in without}

    plain = {**all_of(fmt, later), "layout": all_of(fmt.layout)}
    plain["element"] = None if fmt.element is None else all_of(fmt.element)
    assert format_from(json.loads(json.dumps(plain))) == fmt

    class Before:
        def __init__(self, cls, arguments):
            self.called = cls, arguments

        def __reduce__(self):
            return self.called

    element = None if fmt.element is None else Before(Element, tuple(all_of(fmt.element).values()))
    layout = Before(ScaleLayout, tuple(all_of(fmt.layout).values()))
    arguments = tuple({**all_of(fmt, later), "element": element, "layout": layout}.values())
    assert pickle.loads(pickle.dumps(Before(Format, arguments))) == fmt


def test_a_quantizer_that_was_written_before_an_option_was_added_has_its_default():
    plain = plain_quantizer(cg.NVFP4Quantizer(stochastic_rounding=True))
    assert plain["options"].pop("random_source") == "hash"
    assert quantizer_from(plain) == cg.NVFP4Quantizer(stochastic_rounding=True)
    del plain["options"]["with_rht"]
    with pytest.raises(ValueError, match="the file describes a NVFP4Quantizer with options"):
        quantizer_from(plain)
