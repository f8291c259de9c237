"""Sessions of nvdlfw_inspect for tests: a configuration, a logger that keeps numbers, and small models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import crossgrain as cg
from crossgrain.compat.debug import FEATURES
from crossgrain.linear import probe

debug_api = pytest.importorskip("nvdlfw_inspect.api", reason="nvdlfw-inspect is not installed: make test-clients")
from nvdlfw_inspect.logging import BaseLogger  # noqa: E402


class Kept(BaseLogger):
    """Keeps what is logged: ``kept["fc1_activation_max", 3]``."""

    def __init__(self):
        self.values = {}

    def log_scalar(self, name, value, iteration, **options):
        assert (name, iteration) not in self.values
        self.values[name, iteration] = float(value)

    def __getitem__(self, key):
        return self.values[key]

    def names(self):
        return {name for name, _ in self.values}

    def iterations(self, name):
        return [iteration for found, iteration in self.values if found == name]


@contextmanager
def session(features, folder: Path, layers=".*fc1$", feature_dirs=(), **options) -> Iterator[Kept]:
    """A session with features for some layers."""
    own = {name: {"enabled": True, **settings} for name, settings in features.items()}
    section = {"enabled": True, "layers": {"layer_name_regex_pattern": layers}, "transformer_engine": own}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"section": section}))
    kept = Kept()
    directories = [FEATURES, *feature_dirs]
    try:
        debug_api.initialize(
            str(path), feature_dirs=directories, log_dir=str(folder), statistics_logger=kept, **options
        )
        yield kept
    finally:
        debug_api.end_debug()
        assert probe.attach is None


class TwoLayers(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.fc1 = nn.Linear(64, 96, dtype=dtype)
        self.fc2 = nn.Linear(96, 32, dtype=dtype)

    def forward(self, x):
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


def converted(recipe, dtype=torch.float32):
    """A model with the layers fc1 and fc2. Rows and features are no multiples of blocks."""
    torch.manual_seed(0)
    model = TwoLayers(dtype)
    if recipe is not None:
        cg.convert(model, recipe)
    return model


def batch(rows=40, dtype=torch.float32, seed=1):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def trained(model, steps=2, x=None, step=lambda: None):
    """Losses and all gradients of some steps; the same random numbers every time."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for at in range(steps):
        inputs = (batch(seed=at) if x is None else x).clone().requires_grad_()
        y = model(inputs)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
        step()
        found += [y.detach(), inputs.grad, *(p.grad.clone() for p in model.parameters())]
    return found


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def plain(tensor):
    """The statistics of a tensor in torch's own words."""
    x = tensor.detach().double()
    magnitudes = x.abs()
    return {
        "min": x.min(),
        "max": x.max(),
        "mean": x.mean(),
        "std": x.std(),
        "l1_norm": x.norm(p=1),
        "l2_norm": x.norm(p=2),
        "cur_amax": magnitudes.max(),
        "dynamic_range": torch.log2(magnitudes.max()) - torch.log2(magnitudes[magnitudes > 0].min()),
    }
