"""Checks the built site: ``python -m docs.tools.check_site site``. It needs nothing but Python.

Every link within the site leads to a page, and to a place on it that is there; every picture is there and has an
alternative text; nothing is loaded from elsewhere. What the site's own tool reports is about its sources; this is about
what a reader gets.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself when it shows a page. Links that a reader may follow are not among them.
_LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "srcset"), ("video", "src")}
_LOADED_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "preconnect", "manifest"}


class _Page(HTMLParser):
    """What a page refers to, and the places that others may refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.without_text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and _LOADED_LINKS & set(values.get("rel", "").split()):
            self.loaded.append(values.get("href", ""))
        self.loaded += [value for name, value in values.items() if (tag, name) in _LOADED]
        if tag == "img" and not values.get("alt", "").strip():
            self.without_text.append(values.get("src", ""))


@cache
def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _problem(page: Path, site: Path, address: str) -> str | None:
    """What is wrong with an address on a page, if it is one of the site."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None
    target = page
    if parts.path:
        base = site if parts.path.startswith("/") else page.parent
        target = (base / unquote(parts.path).lstrip("/")).resolve()
        if target.is_dir():
            target /= "index.html"
        if not target.is_relative_to(site) or not target.exists():
            return "there is no such file"
    if parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in _read(target).places:
        return "there is no such place on the page"
    return None


def problems(site: Path) -> list[str]:
    """Everything that is wrong with a site, ``page: address: reason``."""
    site = site.resolve()
    found = []
    for path in sorted(site.rglob("*.html")):
        page, name = _read(path), path.relative_to(site)
        if name.name == "404.html":
            continue  # its links start at the top of a server
        for address in [*page.links, *page.loaded]:
            if problem := _problem(path, site, address):
                found.append(f"{name}: {address}: {problem}")
        found += [f"{name}: {each}: loaded from elsewhere" for each in page.loaded if urlsplit(each).netloc]
        found += [f"{name}: {each}: a picture without an alternative text" for each in page.without_text]
    for path in sorted(site.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        if "url(http" in text.replace('"', "").replace("'", "") or "@import" in text:
            found.append(f"{path.relative_to(site)}: loads something from elsewhere")
    return found


def main(site: str) -> int:
    """Print all problems; the number of pages if there are none."""
    found = problems(Path(site))
    pages = len(list(Path(site).rglob("*.html")))
    print("\n".join(found) if found else f"{pages} pages: links, places and pictures are there")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
