"""`CrossgrainPrecision`, a precision plugin for Lightning's `Trainer`, and `InspectorCallback`.

    trainer = Trainer(plugins=CrossgrainPrecision("mxfp8", skip="head"), callbacks=InspectorCallback("stats.jsonl"))
    trainer.fit(module, data)

The package is `lightning` or `pytorch_lightning`: the one that the program has imported first.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ..convert import ConvertReport, convert
from ..files.random_state import get_random_state, set_random_state
from ..lab.inspect import Inspector
from ..lab.inspect.inspector import Where
from ..recipe import Recipe, as_recipe
from .conversion import Choices, Conversion
from .inspection import InspectedTraining
from .needs import not_installed

try:
    if "lightning.pytorch" in sys.modules:
        from lightning.pytorch.callbacks import Callback
        from lightning.pytorch.plugins.precision import Precision
    else:
        from pytorch_lightning.callbacks import Callback
        from pytorch_lightning.plugins.precision import Precision
except ImportError as error:
    raise not_installed("pytorch_lightning", "lightning", error) from error

_KEY = "crossgrain"  # in checkpoints
_EXTRA_STATE = "_extra_state"  # torch's name


class CrossgrainPrecision(Precision):
    """Converts the module of a Lightning `Trainer`, and keeps recipe, histories and random states in its checkpoints.

    The module is converted when the Trainer sets it up, before its optimizers are made and before it is wrapped. Every
    call of ``training_step`` is one step of delayed scaling.

    In checkpoints, the histories of delayed scaling lie beside the weights, under the key "crossgrain", so that
    ``load_from_checkpoint`` and a Trainer without the plugin read them too. Checkpoints with
    ``save_weights_only=True``, for which Lightning does not ask plugins, have them among the weights: load these into
    a module that `crossgrain.convert` has converted. Stochastic rounding draws random numbers, so the states of the
    generators are kept too, unless there are several processes. So a run that is resumed
    goes on bit for bit, if it gets the same batches: Lightning may begin an epoch anew.

    Args:
        recipe: a recipe, the name of a preset, a one-line recipe or a file, as for `crossgrain.convert`.
        skip: layers not to convert, as for `crossgrain.convert`. Names begin with the attribute of the LightningModule.
        include: layers to convert that are not by default, as for `crossgrain.convert`.
        norms: convert norms too.
        autocast: the dtype of a `torch.autocast` around each step, such as ``torch.bfloat16``; None for none.
        allow_other_recipe: resume also if the checkpoint was made with another recipe, or with none.

    Attributes:
        report: what `crossgrain.convert` has done; None before.
    """

    precision = "32-true"

    def __init__(
        self,
        recipe: Recipe | str,
        *,
        skip: Choices = (),
        include: Choices = (),
        norms: bool = False,
        autocast: torch.dtype | None = None,
        allow_other_recipe: bool = False,
    ) -> None:
        self.recipe = as_recipe(recipe)
        self.conversion = Conversion.of(self.recipe, skip, include, norms)
        self.report: ConvertReport | None = None
        self._choices: dict[str, Any] = {"skip": skip, "include": include, "norms": norms}
        self._autocast = autocast
        self._allow_other_recipe = allow_other_recipe
        self._module: nn.Module | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module in place. Lightning calls this."""
        self.report = convert(module, self.recipe, **self._choices)
        self._module = module
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of forward and of each step."""
        if self._autocast is None:
            return nullcontext()
        device = "cpu" if self._module is None else next(self._module.parameters()).device.type
        return torch.autocast(device, self._autocast)

    # ---- checkpoints ---------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add recipe and histories. Lightning calls this."""
        weights = checkpoint["state_dict"]
        histories = {key: weights.pop(key) for key in list(weights) if key.endswith(_EXTRA_STATE)}
        checkpoint[_KEY] = {"conversion": self.conversion.plain(), "histories": histories}
        if not _has_ranks():  # of several processes, only one writes the checkpoint
            checkpoint[_KEY]["random"] = get_random_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the recipe and load histories and random states, after the weights. Lightning calls this."""
        saved = checkpoint.get(_KEY)
        self.conversion.check_same(
            None if saved is None else Conversion.from_plain(saved["conversion"]), self._allow_other_recipe
        )
        if saved is None:
            return
        if "random" in saved and not _has_ranks():
            set_random_state(saved["random"])
        if not saved["histories"] or not self.recipe.may_keep_histories():
            return
        assert self._module is not None  # it is set up before
        unknown = self._module.load_state_dict(saved["histories"], strict=False).unexpected_keys
        if unknown:
            raise ValueError(
                f"the checkpoint has histories of layers that the module does not have: {', '.join(unknown[:5])}"
            )


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class InspectorCallback(Callback):
    """Looks at all tensors that a module quantizes, every few optimizer steps of a Lightning `Trainer`.

    Steps are counted as ``trainer.global_step`` counts them, also after a resumption. Validation is not looked at.

    Args:
        to: where to write, as for `crossgrain.lab.Inspector`.
        **options: further arguments of the Inspector: ``every``, ``what_if``, ``rows``, ``draws``, ``layers``.

    Raises:
        ValueError: an argument is wrong.
    """

    def __init__(self, to: Where = None, **options: Any) -> None:
        super().__init__()
        self._training = InspectedTraining(to, options)
        self._steps = 0

    @property
    def inspector(self) -> Inspector | None:
        """The Inspector of the run, with its report; None before training begins."""
        return self._training.inspector

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to look. Lightning calls this."""
        self._steps = trainer.global_step
        self._training.begin(pl_module, self._steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """End a step, unless gradients are only accumulated. Lightning calls this."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._training.end_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the run. Lightning calls this."""
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End a run that fails. Lightning calls this."""
        self._training.end(failed=True)
