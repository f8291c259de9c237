"""`search` and `frontier`: the recipe with the least predicted harm for a saving, and the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...planning.devices import Device
from ..sensitivity.result import Sensitivity
from .costs import Costs
from .finder import Finder, Point, Rules
from .found import Found


def search(
    s: Sensitivity,
    *,
    saving: float | None = None,
    max_gap: float | None = None,
    bytes: Mapping[str, float] | None = None,
    device: str | Device = "b200",
    tokens: int | None = None,
    scale: float = 1,
    dtype: str = "bf16",
    rules: Rules = (),
    together: Iterable[str] = ("dgrad",),
) -> Found:
    """Choose a candidate, or the base, for each GEMM of each layer.

    The choice is the best one, not only a good one: effects and costs of sites are added, and the knapsack is solved
    exactly. Harm is the predicted gap in nats. What is not priced in nats decides only between choices with the same
    nats: of dgrad and wgrad without calibration, squared bias and noise.

    Args:
        s: what each candidate does at each site. Rules of its base are kept like ``rules``: what they decide stays.
        saving: save at least this share of the GEMM time that is saved if all free sites have their fastest candidate.
        max_gap: save as much time as possible with a predicted gap to high precision of at most so many nats per token;
            it is the sum over all sites, also of those that stay in the base.
        bytes: limits for bytes of the measured layers: "saved" for backward, and "gathered" as planes of weights in
            both passes of a step. Up to 1 it is a share of the bytes of the base, above 1 a number of bytes. No GEMM
            gets slower than in the base.
        device: the GPU whose published rates are used: a name, also with changed figures, or a `planning.Device`.
        tokens: rows of the input of most layers, in the run that is planned; those of other layers in proportion. None
            for those of the batches that were measured.
        scale: costs are those of layers with so many times the inputs and outputs. GEMMs of small models only wait for
            memory, so that formats hardly differ.
        dtype: dtype of what is in high precision: "bf16", "fp16" or "fp32".
        rules: rules of yours that are kept, as in a recipe: ``"lm_head: hp"``, ``"first 1 block: mxfp8"``.
        together: GEMMs of which all layers of a group (`LayerInfo.group`) get the same candidate. The effect of dgrad
            is measured for groups, so it cannot be divided.

    Returns:
        The recipe, with what it saves and what is predicted.

    Raises:
        ValueError: there is not exactly one target, it cannot be reached, no site can move, or an argument is wrong.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        >>> batches = [(torch.randn(32, 32), torch.randint(32, (32,))) for _ in range(2)]
        >>> def loss_fn(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> s = cg.lab.sensitivity(model, batches, loss_fn, candidates=["nvfp4"])
        >>> found = cg.lab.search(s, saving=0.8, device="b200", tokens=16384, rules=["2: mxfp8"])
        >>> _ = cg.convert(model, found.recipe)
    """
    finder = Finder(s, Costs(s, device, tokens, scale, dtype), rules, together)
    given = {"saving": saving, "max_gap": max_gap, "bytes": bytes}
    targets = [name for name, value in given.items() if value is not None]
    if len(targets) != 1:
        what = f"got {' and '.join(targets)}" if targets else "got none"
        raise ValueError(f"give one target: saving=0.8, max_gap=0.003 or bytes={{'saved': 0.6}}; {what}")
    if saving is not None:
        return finder.at_saving(saving)
    if max_gap is not None:
        return finder.within_gap(max_gap)
    assert bytes is not None
    return finder.within_bytes(bytes)


def frontier(
    s: Sensitivity,
    *,
    points: int = 60,
    device: str | Device = "b200",
    tokens: int | None = None,
    scale: float = 1,
    dtype: str = "bf16",
    rules: Rules = (),
    together: Iterable[str] = ("dgrad",),
) -> list[Point]:
    """The recipes of `search` for savings from 0 to 1, each of them the best one for its saving.

    Args:
        s: see `search`.
        points: number of savings to search for. Equal recipes are listed once.
        device: see `search`.
        tokens: see `search`.
        scale: see `search`.
        dtype: see `search`.
        rules: see `search`.
        together: see `search`.

    Raises:
        ValueError: see `search`; or ``points`` is below 2.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
        >>> batches = [(torch.randn(32, 32), torch.randint(32, (32,))) for _ in range(2)]
        >>> def loss_fn(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
        >>> s = cg.lab.sensitivity(model, batches, loss_fn, candidates=["nvfp4"])
        >>> points = cg.lab.frontier(s, points=3, scale=128)
        >>> points[-1].saving
        1.0
    """
    if points < 2:
        raise ValueError(f"a frontier needs at least 2 points, got {points}")
    finder = Finder(s, Costs(s, device, tokens, scale, dtype), rules, together)
    finder.check_that_time_can_be_saved()
    found: dict[tuple[int, ...], Point] = {}
    for number in range(points):
        solution = finder.solution_at(number / (points - 1))
        if tuple(solution.options) not in found:
            found[tuple(solution.options)] = finder.point(solution)
    return list(found.values())
