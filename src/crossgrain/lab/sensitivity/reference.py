"""The model in high precision: which layers run, how large they are, and how gradients of batches vary."""

from __future__ import annotations

import hashlib

from torch import Tensor

from ...linear.observer import BackwardOperands, observe_backward
from .groups import Grouping, groups_of
from .labels import Labels
from .result import LayerInfo
from .run import Run
from .sketch import batch_variance
from .tokens import tokens_of, unit_note

_NEARLY_SURE = 0.05  # nats; predictions were off by a factor of hundreds at 0.0002


class _Look:
    """An observer that notes sizes: rows of one batch, and widths and weights over all batches."""

    def __init__(self, run: Run) -> None:
        self.rows: dict[str, int] = {}
        self.widths: dict[str, tuple[int, int]] = {}
        self.weights: dict[str, set[int]] = {}
        self._lent = run.lent

    def __call__(self, operands: BackwardOperands) -> None:
        layer, weight = operands.layer, operands.weight
        shown = operands.x if operands.x is not None else weight
        if layer not in self._lent.module_types or shown is None or not self._lent.owns(weight):
            return
        self.rows[layer] = self.rows.get(layer, 0) + operands.dy.shape[0]
        self.widths[layer] = (int(shown.shape[-1]), int(operands.dy.shape[-1]))
        place = weight.data_ptr() if isinstance(weight, Tensor) else 0
        self.weights.setdefault(layer, set()).add(place)


def measure_reference(run: Run, grouping: Grouping) -> None:
    """Fill in losses, layers, and the variance of a batch's gradient.

    Raises:
        ValueError: no layer was seen, or all batches have the same gradient.
    """
    look, losses, squares, sketches = _Look(run), [], [], []
    notes: list[str | None] = []
    for at, batch in enumerate(run.batches):
        look.rows.clear()
        labels = Labels()
        with observe_backward(look), labels:
            losses.append(run.backward(at))
        if not look.rows:
            raise ValueError(
                "no linear layer of this model was seen in its backward pass. loss_fn must call the model that it "
                "gets, and layers in float64, and layers inside of a compiled function, are not seen"
            )
        kinds = run.lent.module_types
        run.token_counts.append(tokens_of(batch, run.tokens, labels, losses[-1], look.rows, kinds))
        run.label_counts.append(labels.size if labels.count else 0)
        notes.append(None if run.tokens is not None else unit_note(run.token_counts[-1], labels))
        square, sketch = run.square_and_sketch(run.take_gradients())
        squares.append(square)
        sketches.append(sketch)
        run.progress.add(1, "high precision")
    result = run.result
    run.has_labels = all(run.label_counts)
    if said := next(filter(None, notes), None):  # of the first batch; others may have other numbers
        run.say(said)
    result.loss = sum(losses) / len(losses)
    result.gradient_variance = batch_variance(squares, sketches)
    if not result.gradient_variance > 0:
        raise ValueError("all batches have the same gradient, so noise has no unit: pass batches of different data")
    if run.has_labels and result.loss < _NEARLY_SURE:
        run.say(
            f"the loss is {result.loss:.2g}: a model that is nearly sure of its data has hardly any curvature, so "
            "effects of fprop are far too small. Only paired training shows the gap (lab.verify)"
        )
    if not run.has_labels:
        run.say(
            "loss_fn calls neither cross_entropy nor nll_loss of torch with labels, so fprop is measured with the "
            "gradients of the data. Its numbers are too large for a model that does not fit the data well"
        )
    _note_layers(run, look, grouping)
    run.losses = losses
    told = (losses, squares, run.token_counts, run.seed, run.weights.note, list(result.layers.items()))
    result.fingerprint = hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def _note_layers(run: Run, look: _Look, grouping: Grouping) -> None:
    kinds, result = run.lent.module_types, run.result
    seen = [layer for layer in kinds if layer in look.widths]
    groups = {layer: group for group, layers in groups_of(seen, grouping).items() for layer in layers}
    for layer in seen:
        experts = run.lent.experts(layer, len(look.weights[layer]))
        result.layers[layer] = LayerInfo(
            kinds[layer], *look.widths[layer], look.rows.get(layer, 0), experts, groups[layer]
        )
    result.left_out.update(run.lent.left_out)
    never = [layer for layer in kinds if layer not in look.widths]
    result.left_out.update(dict.fromkeys(never, "its backward pass did not run in these batches"))
