"""A report in a real browser: the slider moves, recipes change, numbers are those of the data, nothing complains.

`make test-report` installs the browser. Screenshots are kept if CROSSGRAIN_SCREENSHOTS names a directory.
"""

import json
import os
import re
from pathlib import Path

import pytest

from crossgrain.lab import Sensitivity, write_report

from ...common.browser import Browser, missing
from . import samples
from .test_page import ODD

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("browser"),  # one process starts it
]

HERE = Path(__file__).parent
CONTRASTS = (HERE / "contrasts.js").read_text()  # texts whose contrast with what is behind them is below 4.5
CELLS = (HERE / "cells.js").read_text()  # what the cells of the heat map show


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reports")
    write_report(directory / "small.html", **samples.small_report())
    write_report(directory / "large.html", **samples.large_report())
    write_report(
        directory / "odd.html", samples.sensitivity(ODD), frontier=samples.frontier(samples.sensitivity(ODD), 4)
    )
    write_report(directory / "empty.html", Sensitivity("mxfp8", samples.FORMATS, interrupted=True))
    return directory


@pytest.fixture
def page(browser, reports, request):
    """The small report on a desktop, fresh."""
    browser.look_like()
    browser.open(reports / "small.html")
    yield browser
    assert browser.complaints() == []


def data_of(browser):
    return json.loads(browser.run("return document.getElementById('data').textContent"))


def kept(browser, name):
    if directory := os.environ.get("CROSSGRAIN_SCREENSHOTS"):
        Path(directory).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(directory) / f"{name}.png", whole=True)
        browser.print(Path(directory) / f"{name}.pdf")


# ---- slider ----------------------------------------------------------------------------------------------------------


def test_the_slider_changes_recipe_figures_and_marks(page):
    data = data_of(page)
    assert page.run("return Number(document.getElementById('slider').value)") == data["found"] == 14
    seen = set()
    for place in (14, 13, 12):
        point = data["points"][place]
        recipe = "".join(data["pieces"][number] for number in point["recipe"])
        assert page.run("return document.getElementById('recipe').value") == recipe
        assert page.text("#saving") == f"{100 * point['saving']:.3g} %"
        assert float(page.text("#predicted").split()[0]) == pytest.approx(point["predicted"][0], abs=5e-6)
        assert [cell["moved"] for cell in page.run(CELLS)] == [letter == "b" for letter in point["chosen"]]
        assert {cell["mark"] for cell in page.run(CELLS) if cell["moved"]} == {"▲"}  # a shape, not only a frame
        said = page.run("return document.getElementById('slider').getAttribute('aria-valuetext')")
        assert said.startswith(f"saves {page.text('#saving')}; predicted gap {page.text('#predicted').split()[0]} ±")
        seen.add(recipe)
        page.press("#slider", "Left")
    assert len(seen) == 3


def test_the_verified_gap_is_shown_where_there_is_one(page):
    assert page.text("#verified-here").split()[-4:] == ["not", "above", "the", "tolerance"]
    page.press("#slider", "Right")
    assert "not run" in page.text("#verified-here")


def test_the_recipe_is_copied(page):
    page.click("#copy")
    page.run("return new Promise(done => setTimeout(done, 0))")
    assert page.text("#copied") == "Copied."


def test_a_click_on_the_frontier_moves_the_slider(page):
    page.run("document.getElementById('frontier').scrollIntoView()")
    page.click("#frontier-chart svg")  # its middle
    assert page.run("return Number(document.getElementById('slider').value)") < 14


# ---- heat map --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("candidate", range(3))
def test_cells_show_the_numbers_of_the_data(page, candidate):
    data = data_of(page)
    label = data["candidates"][candidate]["label"]
    page.click(f"#candidate option:nth-child({candidate + 1})")
    for backward in ("noise", "bias"):
        page.click(f"input[value={backward}]")
        cells = page.run(CELLS)
        assert len(cells) == 27
        for at, cell in enumerate(cells):
            layer, gemm = at // 3, data["gemms"][at % 3]
            quantity = "loss" if gemm == "fprop" else backward
            mean, low, high = data["effects"][candidate][f"{gemm}.{quantity}"][layer]
            factor = 1e3 if quantity == "loss" else 1e2
            decimals = len(cell["mean"].partition(".")[2])
            assert float(cell["mean"]) == pytest.approx(factor * mean, abs=0.51 * 10**-decimals)
            assert float(cell["half"].removeprefix("± ")) == pytest.approx(
                factor * (high - low) / 2, abs=0.51 * 10**-decimals
            )
            assert data["layers"][layer][0] in cell["label"] and f"{gemm} in {label};" in cell["label"]


def test_the_map_is_one_stop_of_the_tab_key_and_arrows_move_in_it(page):
    stops = page.run("return [...document.querySelectorAll('#heat button')].filter(b => b.tabIndex === 0).length")
    assert stops == 1
    page.press("#heat button[tabindex='0']", "Down", "Down", "Right")
    assert "blocks.0.attention.proj, dgrad" in page.run("return document.activeElement.ariaLabel")
    assert "blocks.0.attention.proj, dgrad" in page.text("#tip")
    page.press("#heat button[tabindex='0']", "Up", "Left")
    assert "blocks.0.attention.qkv, fprop" in page.run("return document.activeElement.ariaLabel")


def test_enter_opens_details_and_escape_goes_back(page):
    page.press("#heat button[tabindex='0']", "Down", "Right")
    page.press("#heat button[tabindex='0']", "Enter")
    assert page.text("#details-title") == "blocks.0.attention.qkv, dgrad"
    shown = page.text("#details-body")
    data = data_of(page)
    written = [float(word.replace("−", "-")) for word in re.findall(r"(\S+) ± \d", shown)]
    expected = [data["effects"][i][f"dgrad.{quantity}"][0] for quantity in ("noise", "bias") for i in range(3)]
    assert len(written) == 6
    for number, (mean, low, high) in zip(written, expected, strict=True):
        assert number == pytest.approx(mean, abs=0.05 * (high - low))  # two digits of half of the interval are shown
    assert "dy, rowwise" in shown and "W, columnwise" in shown and "nvfp4(sr)" in shown and "kurtosis" in shown
    assert page.run("return document.querySelectorAll('#details-body > figure rect').length") == 28
    page.press("#close", "Escape")
    assert page.run("return document.getElementById('details').open") is False
    assert "blocks.0.attention.qkv, dgrad" in page.run("return document.activeElement.ariaLabel")


def test_curves_can_be_hidden(page):
    before = page.run("return document.querySelectorAll('#gaps-chart .curve').length")
    page.click("#gaps-legend input")
    assert page.run("return document.querySelectorAll('#gaps-chart .curve').length") == before - 1 == 2


# ---- how it looks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize(
    "kind, size",
    [
        ("light", {"width": 1360}),
        ("dark", {"width": 1360, "scheme": "dark"}),
        ("phone", {"width": 390, "height": 844, "phone": True, "scale": 2}),
        ("phone-dark", {"width": 390, "height": 844, "phone": True, "scale": 2, "scheme": "dark"}),
    ],
)
def test_text_is_readable_and_nothing_is_wider_than_the_window(browser, reports, name, kind, size):
    browser.look_like(**size)
    browser.open(reports / f"{name}.html")
    assert browser.run(CONTRASTS) == {}
    widths = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1] == size["width"]
    kept(browser, f"{name}-{kind}")
    assert browser.complaints() == []


def test_blocks_of_a_large_model_are_closed_and_can_be_opened(browser, reports):
    browser.look_like()
    browser.open(reports / "large.html")
    count = (
        "return [...document.querySelectorAll('#heat tr:not(.block)')].filter(row => row.checkVisibility()).length - 1"
    )
    assert browser.run(count) == 0
    browser.press("#heat button[tabindex='0']", "Down")
    browser.press("#heat button[tabindex='0']", "Enter")
    assert browser.run(count) == 7 and browser.run("return document.activeElement.ariaExpanded") == "true"
    browser.click("#expand")
    assert browser.run(count) == 224
    browser.click("#collapse")
    assert browser.run(count) == 0
    assert browser.complaints() == []


def test_paper_shows_the_whole_recipe_and_no_controls(page, tmp_path):
    parts = ("#recipe-printed", "#recipe", "#slider", "#copy")
    visible = "return [...arguments].map(part => document.querySelector(part).checkVisibility())"
    assert page.run(visible, *parts) == [False, True, True, True]
    page.devtools("Emulation.setEmulatedMedia", media="print")
    assert page.run(visible, *parts) == [True, False, False, False]
    assert page.run(
        "return document.getElementById('recipe-printed').textContent === document.getElementById('recipe').value"
    )
    page.devtools("Emulation.setEmulatedMedia", media="")
    page.print(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_without_javascript_tables_are_shown(browser, reports):
    browser.look_like()
    browser.scripts(False)
    try:
        browser.open(reports / "small.html")
        shown = browser.text("noscript")
        assert "What nvfp4 costs at each site" in shown and "blocks.1.mlp.fc2" in shown
        assert not browser.run("return document.getElementById('map').checkVisibility()")
    finally:
        browser.scripts(True)


# ---- what could break it ---------------------------------------------------------------------------------------------


def test_odd_names_are_only_text(browser, reports):
    browser.look_like()
    browser.open(reports / "odd.html")
    names = browser.run("return [...document.querySelectorAll('#heat tbody th')].map(cell => cell.textContent)")
    assert names == ODD and browser.run("return document.scripts.length") == 3
    assert browser.complaints() == []


def test_a_measurement_without_layers_can_be_opened(browser, reports):
    browser.look_like()
    browser.open(reports / "empty.html")
    assert not browser.run("return document.getElementById('budget').checkVisibility()")
    assert "stopped early" in browser.text(".lead") and browser.complaints() == []
