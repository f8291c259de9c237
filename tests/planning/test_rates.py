"""Formats that no rate is published for: named in the report, counted as bf16, and priced once a rate is given."""

import pytest
from typer.testing import CliRunner

import crossgrain as cg
from crossgrain.formats import E4M3, Element, Format, ScaleLayout, registry
from crossgrain.planning.devices import DEVICES, Device, device_of, known_kinds
from crossgrain_command.app import app

MODEL = "layers=2, width=256, heads=4, mlp=512, vocab=1024, context=128"


def plan(recipe, device="b200"):
    return cg.plan(MODEL, f"{recipe}; lm_head: hp", device=f"{device}, bandwidth=1e9", sequence=1024)


@pytest.mark.parametrize("fmt, element", [("mxint8", "int8"), ("hifloat8", "hifloat8")])
def test_what_has_no_published_rate_is_named_and_not_priced_as_fp8(fmt, element):
    made = plan(f"all: {fmt}")
    assert made.work[0].kind == "bf16"
    assert made.work[0].seconds == pytest.approx(made.work[0].flops / 1e12 / DEVICES["b200"].rate("bf16"))
    assert made.without_rate == (fmt,) and made.to_dict()["without_rate"] == (fmt,)
    (sentence,) = (text for text in made.assumptions if f"No rate is published for {fmt}" in text)
    assert f"device 'b200, {element}=<TFLOP/s>'" in sentence
    assert f"\nno published rate for {fmt}: counted as bf16" in str(made)


@pytest.mark.parametrize("device", ["b200", "h100"])
def test_a_rate_that_is_given_is_used(device):
    made = plan("all: mxint8", f"{device}, int8=3000")
    assert made.work[0].kind == "int8" and not made.without_rate
    assert made.work[0].seconds == pytest.approx(made.work[0].flops / 3000e12)
    assert not any("No rate" in text or "natively" in text for text in made.assumptions)
    assert "no published rate" not in str(made)


def test_formats_with_published_rates_say_nothing_of_it():
    for recipe in ("mxfp8", "nvfp4", "fp8", "fp8_block", "all: mxfp4", "all: mxfp6_e3m2"):
        made = plan(recipe)
        assert not made.without_rate and not any("No rate" in text for text in made.assumptions)


def test_an_element_that_someone_registered_has_no_rate_either(monkeypatch):
    monkeypatch.setattr(registry, "_FORMATS", dict(registry._FORMATS))
    e3m4 = Element("e3m4", 3, 4, bias=3, max=31.0)
    cg.register_format(Format("mxfp8_e3m4", e3m4, (1, 32), "e8m0_up", ScaleLayout(pad=(128, 4)), transposes=False))
    made = plan("all: mxfp8_e3m4, fprop.input: mxfp8")
    assert set(made.without_rate) == {"mxfp8 x mxfp8_e3m4", "mxfp8_e3m4"}
    assert "e3m4" in known_kinds() and not plan("all: mxfp8_e3m4", "b200, e3m4=1").without_rate
    same_name = Element("e4m3", 4, 3, bias=8, max=E4M3.max / 2, specials="nan")
    cg.register_format(
        Format("mxfp8_shifted", same_name, (1, 32), "e8m0_up", ScaleLayout(pad=(128, 4)), transposes=False)
    )
    assert plan("all: mxfp8_shifted").without_rate == ("mxfp8_shifted",)


def test_a_rate_for_no_element_is_refused():
    with pytest.raises(ValueError, match="int9"):
        device_of("b200, int9=3000")
    b200 = DEVICES["b200"]
    with pytest.raises(ValueError, match="no kind of element 'int9'; did you mean 'int8'"):
        Device("x", (*b200.teraflops, ("int9", 1.0)), (), 1, 1, 1, 1)


def test_the_command_says_it_at_the_head_of_the_assumptions():
    arguments = ["plan", "--model", MODEL, "-r", "all: mxint8"]
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "no published rate for mxint8: counted as bf16 (see the assumptions)" in shown.stdout
    both = CliRunner(env={"COLUMNS": "100"}).invoke(app, [*arguments, "-r", "mxfp8"])
    assert both.stdout.count("no published rate for mxint8") == 1
