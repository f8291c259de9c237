"""fprop and wgrad of all sites from passes in high precision.

When the backward pass of a layer begins, its x, W and dy are known. From these follows what its GEMMs would have given
in other formats:

    fprop   the loss of token t changes by <dy_t, e_t>, where e is the error of y. To second order, the loss rises by
            T/2 · Σ_t <dy_t, e_t>², for a loss that is the mean over T tokens, and labels that the model itself draws.
            The first order, Σ_t <dy_t, e_t> with the labels of the data, is what this rounding of the weights happens
            to do at this checkpoint; training removes it in a few steps, so it is kept apart
    wgrad   the error of dW itself, with the labels of the data

So there are two passes for each batch, whatever the number of sites and candidates is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...linear.observer import BackwardOperands, observe_backward
from ...quantizers.base import Quantizer
from ...quantizers.subject import Subject
from ..intervals import estimate
from .candidates import Candidate
from .labels import Labels
from .quantized_gemms import QuantizedOperands
from .result import Effect
from .run import Run
from .sketch import common_part, inner_products, scaled

UNITS = 2  # the passes themselves, in forward and backward passes,
UNITS_OF_A_CANDIDATE = 3  # and about what the errors of a candidate take


def measure_in_one_pass(run: Run, candidates: list[Candidate]) -> None:
    """Measure fprop and wgrad of all sites for all candidates."""
    found: list[dict[Place, BatchErrors]] = []
    try:
        for at in range(len(run.batches) if candidates else 0):
            observer = OnePass(run, candidates)
            for observer.drawn in (True, False) if run.has_labels else (False,):
                with observe_backward(observer), Labels(run.seed + at if observer.drawn else None):
                    run.backward(at, same_loss=not observer.drawn)
            observer.finish(run.label_counts[at])
            found.append(observer.found)
            for layer, reason in observer.unseen.items():
                run.result.left_out.setdefault(layer, reason)
            run.progress.add(UNITS + UNITS_OF_A_CANDIDATE * len(candidates), "fprop and wgrad")
    finally:  # also of the batches before Ctrl-C
        for candidate in candidates if found else ():
            for layer, info in run.result.layers.items():
                place = (candidate.label, layer)
                by_batch = [batch.get(place, BatchErrors()) for batch in found]  # experts may have no rows in a batch
                _note(run, candidate, layer, info.module_type, by_batch, seen=any(place in batch for batch in found))


def _note(run: Run, candidate: Candidate, layer: str, kind: str, by_batch: list[BatchErrors], *, seen: bool) -> None:
    """Note the effects of a candidate in a layer. What was not seen is not noted: no effect is not an effect of 0."""
    if not candidate.quantizes(layer, kind, "fprop"):
        run.note(layer, "fprop", candidate, Effect(run.exact(), first=run.exact()))
    elif seen:
        losses = [tokens / 2 * each.squares for tokens, each in zip(run.token_counts, by_batch, strict=False)]
        first = estimate([each.first for each in by_batch])
        run.note(layer, "fprop", candidate, Effect(estimate(losses), first=first))
    if not candidate.quantizes(layer, kind, "wgrad"):
        run.note(layer, "wgrad", candidate, Effect(noise=run.exact(), bias=run.exact()))
        return
    sketches = [each.sketch for each in by_batch if each.sketch is not None]
    if len(sketches) >= 2:
        unit = 1 / run.result.gradient_variance
        noise = estimate([each.noise * unit for each in by_batch])
        bias = scaled(common_part(inner_products(sketches)), unit)
        run.note(layer, "wgrad", candidate, Effect(noise=noise, bias=bias))


@dataclass
class BatchErrors:
    """What one batch says about one candidate in one layer.

    Attributes:
        changes: <dy_t, e_t> of fprop for each row of the input, with drawn labels, by call.
        squares: Σ_t <dy_t, e_t>². Rows of the same label, and calls with the same rows, are added before squaring.
        first: Σ_t <dy_t, e_t>, with the labels of the data.
        noise: the squared error of dW, weighed as the optimizer does.
        sketch: the sketch of that error.
    """

    changes: list[Tensor] = field(default_factory=list)
    squares: float = 0.0
    first: float = 0.0
    noise: float = 0.0
    sketch: Tensor | None = None


Place = tuple[str, str]  # label of a candidate, and layer


class OnePass:
    """An observer of one batch: computes the errors of all candidates in every layer.

    Args:
        run: the measurement.
        candidates: the formats.

    Attributes:
        drawn: this pass has labels that the model has drawn.
        found: the errors by label of the candidate and layer.
        unseen: layers of which something could not be measured, and why.
    """

    def __init__(self, run: Run, candidates: list[Candidate]) -> None:
        self.drawn = False
        self.found: dict[Place, BatchErrors] = {}
        self.unseen: dict[str, str] = {}
        self._run, self._candidates = run, candidates
        self._quantizers: dict[Place, dict[str, Quantizer]] = {}

    def __call__(self, operands: BackwardOperands) -> None:
        layer = operands.layer
        kind = self._run.lent.module_types.get(layer)
        if kind is None or not operands.dy.shape[0] or not self._run.lent.owns(operands.weight):
            return
        forward = [candidate for candidate in self._candidates if candidate.quantizes(layer, kind, "fprop")]
        backward = [candidate for candidate in self._candidates if candidate.quantizes(layer, kind, "wgrad")]
        backward = [] if self.drawn else backward  # gradients of drawn labels are not those of training
        matrices = operands.matrices() if forward or backward else None
        if matrices is None:
            if forward or backward:
                self.unseen[layer] = "its weight consists of several parameters, and its input needs no gradient"
            return
        x, weight, dy = matrices
        with torch.no_grad():
            y = x @ weight.T if forward else x
            for candidate in forward:
                errors = self.found.setdefault((candidate.label, layer), BatchErrors())
                read = QuantizedOperands(self._quantizers_of(candidate, layer, kind), x, weight, dy)
                changes = read.fprop().sub_(y).mul_(dy).sum(1).double()
                if self.drawn or not self._run.has_labels:
                    errors.changes.append(changes)
                if not self.drawn:
                    errors.first += float(changes.sum())
            weighed = self._root(layer, operands) if backward else None
            if weighed is None:
                return
            name, root = weighed
            dw = dy.T @ x
            for candidate in backward:
                errors = self.found.setdefault((candidate.label, layer), BatchErrors())
                read = QuantizedOperands(self._quantizers_of(candidate, layer, kind), x, weight, dy)
                self._note_wgrad(errors, name, operands, read.wgrad().sub_(dw).div_(root))

    def finish(self, labels: int) -> None:
        """Add up what belongs together: a batch has so many labels (0: not known).

        Rows of one label have a common error of the loss, as the tokens of a sentence that is classified. They follow
        one another, as in a batch [samples, tokens]. Rows of groups of experts do not.
        """
        for (_, layer), errors in self.found.items():
            single = self._run.lent.module_types[layer] != "grouped_linear"
            by_rows: dict[int, Tensor] = {}
            for changes in errors.changes:
                rows = len(changes)
                if single and labels and rows > labels and rows % labels == 0:
                    changes = changes.view(labels, -1).sum(1)
                    self._run.say(
                        f"{rows // labels} rows of a layer have a common label: their effects are added before squaring"
                    )
                if single and rows in by_rows:
                    by_rows[rows] = by_rows[rows] + changes
                elif single:
                    by_rows[rows] = changes
                else:
                    errors.squares += float(changes.square().sum())
            errors.squares += sum(float(changes.square().sum()) for changes in by_rows.values())
            errors.changes.clear()

    def _quantizers_of(self, candidate: Candidate, layer: str, kind: str) -> dict[str, Quantizer]:
        place = (candidate.label, layer)
        made = self._quantizers.get(place)
        if made is None:
            made = self._quantizers[place] = candidate.quantizers(layer, kind)
            for tensor, quantizer in made.items():
                for plain in quantizer.plain_quantizers():
                    plain.subject = Subject(layer, tensor)  # by which its seeds are drawn
        return made

    def _root(self, layer: str, operands: BackwardOperands) -> tuple[str, Tensor] | None:
        """Name of the parameter, and what the error of dW is divided by; None if it is not measured."""
        found = self._run.lent.parameter_of(layer, operands.weight)
        if found is None:
            self.unseen[layer] = "it is not known to which parameter its weight belongs, so wgrad is not measured"
            return None
        name, parameter = found
        if name not in self._run.lent.trained:
            self.unseen[layer] = "its weight is frozen, so training has no wgrad here"
            return None
        root = self._run.weights.root(parameter)
        if root is None:
            self.unseen[layer] = "the optimizer has no second moments of its weight, so wgrad is not measured"
            return None
        return name, root if root.dim() == 0 else self._run.lent.part_like(root, parameter, operands.weight)

    def _note_wgrad(self, errors: BatchErrors, name: str, operands: BackwardOperands, error: Tensor) -> None:
        errors.noise += float(error.double().square().sum())
        if errors.sketch is None:
            errors.sketch = self._run.sketches.empty(error.device)
        offset = operands.weight.storage_offset() if isinstance(operands.weight, Tensor) else 0
        self._run.sketches.add(errors.sketch, f"{name}, {offset}", error)
