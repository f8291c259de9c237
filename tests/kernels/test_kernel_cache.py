"""What compiled code on disk is valid for: the sources of kernels, and the data of the elements that it is made for."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from crossgrain.formats import Element
from crossgrain.kernels.cpu import known, tags

from ..common.copied_package import copied_package


@pytest.fixture
def key_of(monkeypatch):
    """The type of a tag, which is part of the key of all that is compiled for it, if elements were these."""

    def find(tag: str, **changed: Element) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(known, "ELEMENTS", {**known.ELEMENTS, **changed})
            patch.setattr(tags, "NAMED_IN_KERNELS", tuple(known.ELEMENTS[e.name] for e in tags.NAMED_IN_KERNELS))
            patch.setattr(tags, "SOURCE_DIGEST", tags._source_digest())
            return tags.TagType(tag).name

    return find


E5M2_CHANGED, E3M2_CHANGED = replace(known.E5M2, max=49152.0), replace(known.E3M2, bias=4, max=14.0)


def test_the_data_of_an_element_is_in_the_key_of_its_kernels_and_of_no_others(key_of):
    assert key_of("e5m2") == tags.TagType("e5m2").name
    assert key_of("e5m2", e5m2=E5M2_CHANGED) != key_of("e5m2")
    assert key_of("e5m2", e3m2=E3M2_CHANGED) == key_of("e5m2")
    for other in ("e4m3", "e2m1", "e2m3", "bf16", "yes", "e8m0_up"):
        assert key_of(other, e5m2=E5M2_CHANGED) == key_of(other)


def test_elements_that_kernels_name_themselves_are_in_every_key(key_of):
    """Any kernel may scale blocks by E4M3 and write E2M1, whatever its tags say: that is NVFP4."""
    assert {"E4M3_TAG", "E2M1_TAG"} == {f"{element.name.upper()}_TAG" for element in tags.NAMED_IN_KERNELS}
    for element in tags.NAMED_IN_KERNELS:
        assert key_of("yes", **{element.name: replace(element, specials="ieee")}) != key_of("yes")


def test_what_follows_from_an_element_is_in_its_digest(monkeypatch):
    """Kernels use it, and the code that works it out is not one of their sources."""
    before = known.data_digest(known.E5M2)
    monkeypatch.setattr(Element, "nan_code", property(lambda self: 0x7E))
    assert known.data_digest(known.E5M2) != before


def test_no_kernel_names_an_element_that_is_not_in_every_key():
    named = {f"{element.name.upper()}" for element in tags.NAMED_IN_KERNELS}
    folder = Path(tags.__file__).parent
    for path in folder.glob("*.py"):
        if path.stem in (*tags.CALLERS, *tags.DATA, "tags"):
            continue
        text = path.read_text()
        for element in known.ELEMENTS.values():
            uses = f"known.{element.name.upper()}" in text or f"{element.name.upper()}_TAG" in text
            assert not uses or element.name.upper() in named, path
        assert "formats import" not in text or "from ...formats import Element\n" in text, path


COMPILE = """
import torch, crossgrain as cg
from crossgrain.kernels.cpu import measure, rows
assert cg.get_backend() == "cpu"
q = cg.quantize(torch.randn(64, 64), "{name}", columnwise=False)
print(sum(sum(d.stats.cache_hits.values()) for d in (measure.of_all, rows.cast)),
      sum(sum(d.stats.cache_misses.values()) for d in (measure.of_all, rows.cast)))
"""


@pytest.fixture
def package(tmp_path):
    return copied_package(tmp_path)


def found_and_compiled(package: Path, name: str) -> list[int]:
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "NUMBA_CACHE_DIR": str(package.parent / "cache")}
    code = COMPILE.format(name=name)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    return [int(word) for word in result.stdout.split()]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_editing_a_format_leaves_compiled_kernels_valid(package):
    assert found_and_compiled(package, "fp8") == [0, 2]
    edit(
        package / "formats" / "element.py",
        'E3M2 = Element("e3m2", 3, 2, bias=3',
        'E3M2 = Element("e3m2", 3, 2, bias=3 + 0',
    )
    edit(package / "formats" / "mxint8.py", "(1, 32)", "(1, 64)")
    edit(
        package / "kernels" / "cpu" / "known.py",
        '"e5m2", 5, 2, bias=15, max=57344.0',
        '"e5m2", 5, 2, bias=15, max=49152.0',
    )
    assert found_and_compiled(package, "fp8") == [2, 0]
