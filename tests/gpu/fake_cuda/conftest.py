"""The compiled device, and what the short runs and all facts have told."""

from pathlib import Path
from typing import Any

import pytest

from .build import built_library, why_not_built
from .facts import FACTS
from .program import ran
from .runs import SHORT

LONG_FACTS = ("compiled_models",)


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled device; tests that need it are skipped with a reason where it cannot be compiled."""
    reason = why_not_built()
    if reason is not None:
        pytest.skip(reason)
    cache = getattr(request.config, "cache", None)  # there is none with -p no:cacheprovider
    return built_library(tmp_path_factory.mktemp("device") if cache is None else cache.mkdir("fake_cuda"))


@pytest.fixture(scope="session")
def told(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the short runs and the facts have told, by name."""
    names = [*SHORT, *(name for name in FACTS if name not in LONG_FACTS)]
    return ran(names, library, tmp_path_factory.mktemp("fake_cuda"))
