"""The check of the built site finds what is wrong; a site that `make docs` has built is tried in a browser."""

from __future__ import annotations

import time

import pytest

from docs.tools.check_site import main, problems
from tests.common.browser import Browser, missing
from tests.common.documentation import ROOT

SITE = ROOT / "site"
GOOD = """<html><body id="top"><h1 id="a">A</h1><a href="b.html#c">b</a><a href="#a">a</a><a href="https://x.org">x</a>
<img src="p.svg" alt="a picture"><script src="s.js"></script></body></html>"""


@pytest.fixture
def site(tmp_path):
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "b.html").write_text('<html><body><a id="c" href="a.html">a</a></body></html>')
    (tmp_path / "p.svg").touch()
    (tmp_path / "s.js").touch()
    return tmp_path


def test_a_good_site_has_no_problems(site, capsys):
    assert problems(site) == []
    assert main(str(site)) == 0
    assert "2 pages" in capsys.readouterr().out


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("b.html#c", "c.html", "c.html: there is no such file"),
        ("b.html#c", "../outside.html", "there is no such file"),
        ("b.html#c", "b.html#d", "b.html#d: there is no such place"),
        ('"#a"', '"#b"', "#b: there is no such place"),
        ("p.svg", "q.svg", "q.svg: there is no such file"),
        ("a picture", " ", "p.svg: a picture without an alternative text"),
        ('"s.js"', '"https://x.org/s.js"', "loaded from elsewhere"),
        ("<img", '<link rel="stylesheet" href="//x.org/font.css"><img', "loaded from elsewhere"),
    ],
)
def test_what_is_wrong_is_found(site, old, new, problem):
    assert old in GOOD
    (site / "a.html").write_text(GOOD.replace(old, new, 1))
    (found,) = problems(site)
    assert found.startswith("a.html: ") and problem in found
    assert main(str(site)) == 1


def test_a_style_that_loads_something_is_found(site):
    (site / "s.css").write_text("@font-face { src: url('https://x.org/font') }")
    assert problems(site) == ["s.css: loads something from elsewhere"]


def test_a_site_without_pages_is_none(tmp_path):
    assert main(str(tmp_path)) == 1


@pytest.mark.skipif(not SITE.exists(), reason="`make docs` builds the site")
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.xdist_group("browser")
def test_the_search_works_from_the_disk():
    root = "[...document.querySelectorAll('*')].find(each => each.shadowRoot).shadowRoot"
    with Browser() as browser:
        browser.look_like(scheme="dark")
        browser.open(SITE / "index.html")
        browser.click(".md-search__button")
        typed = "const box = {}.querySelector('input'); box.value = 'rotation'; box.dispatchEvent(new Event('input'))"
        deadline = time.monotonic() + 30
        while "results" not in (found := browser.run(f"return {root}.textContent")) and time.monotonic() < deadline:
            browser.run(typed.format(root))
        assert "Formats" in found
        assert browser.complaints() == []
        loaded = browser.run("return performance.getEntriesByType('resource').map(each => each.name)")
        assert [address for address in loaded if not address.startswith("file:")] == []
