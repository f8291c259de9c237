"""A report is one file that loads nothing, and which no name can break."""

import re

import pytest

from crossgrain.lab import write_report

from . import samples

LOADING = ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "background", "formaction")


# ---- one file --------------------------------------------------------------------------------------------------------


def test_it_loads_nothing(written):
    page = written(**samples.small_report())
    addresses = [value for _, attributes in page.elements for name, value in attributes.items() if name in LOADING]
    assert addresses and all(address.startswith("#") or address == "data:," for address in addresses)
    policies = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert len(policies) == 1 and "default-src 'none'" in policies[0]  # browsers refuse what this test may overlook
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(|\bimport ", page.source)


def test_672_sites_take_at_most_a_megabyte(tmp_path):
    arguments = samples.large_report()
    assert len(list(arguments["sensitivity"].sites())) == 672 and len(arguments["frontier"]) == 60
    write_report(tmp_path / "report.html", **arguments)
    assert (tmp_path / "report.html").stat().st_size <= 1_000_000


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="not measured"):
        write_report(
            path,
            samples.sensitivity(),
            frontier=[{**samples.frontier(samples.sensitivity(), 2)[0], "chosen": {99: "nvfp4"}}],
        )
    assert path.read_text() == "old"


# ---- names that could break it ---------------------------------------------------------------------------------------

ODD = ["</script><script>broken()</script>", "a<!--b", "]]>", "quote\"' & <b>", "ünï\u2028çødé", "$title", "x" * 200]


def test_odd_names_are_only_text(written):
    result = samples.sensitivity(ODD)
    page = written(sensitivity=result, title='A <b>"title"</b> & $style', distributions=samples.distributions(ODD[:1]))
    assert len(page.scripts) == 3 and "b" not in [tag for tag, _ in page.elements]
    assert [layer[0] for layer in page.data["layers"]] == ODD
    assert page.data["title"] == 'A <b>"title"</b> & $style'
    assert "<!--" not in page.scripts[1] and "</" not in page.scripts[1]
