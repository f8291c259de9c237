"""Transformers by their dimensions: those with names, and your own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..recipe.syntax import did_you_mean
from .settings_text import settings_of

LAB = "lab-"  # the GPTs that `crossgrain train` trains are called lab-tiny and so on


@dataclass(frozen=True)
class Transformer:
    """A decoder-only transformer.

    ``kv_heads``   heads of keys and values (0: as many as ``heads``)
    ``head_width`` channels of a head (0: width / heads)
    ``mlp``        width inside the MLP; ``gated``: two matrices lead into it (SwiGLU), else one
    ``experts``    MLPs of which each token goes to ``active``; 0: one MLP for all
    ``tied``       the output layer uses the weight of the embedding
    ``biases``     linear layers and norms have biases, and places are learned (as in GPT-2)
    ``context``    sequence length unless said
    """

    layers: int
    width: int
    heads: int
    mlp: int
    vocab: int
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = True
    experts: int = 0
    active: int = 0
    tied: bool = False
    biases: bool = False
    context: int = 8192

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "mlp", "vocab", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"a transformer has {name} of at least 1, not {getattr(self, name)}")
        for name in ("kv_heads", "head_width", "experts", "active"):
            if getattr(self, name) < 0:
                raise ValueError(f"a transformer has {name} of 0 or more, not {getattr(self, name)}")
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.key_heads} kv_heads evenly")
        if not self.head_width and self.width % self.heads:
            raise ValueError(f"a width of {self.width} does not divide into {self.heads} heads; say head_width")
        if self.experts and not 1 <= self.active <= self.experts:
            raise ValueError(f"of {self.experts} experts a token goes to 1 to {self.experts}, not to {self.active}")

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def channels(self) -> int:
        """Of one head."""
        return self.head_width or self.width // self.heads


MODELS = {
    "gpt2": Transformer(12, 768, 12, 3072, 50257, gated=False, tied=True, biases=True, context=1024),
    "gpt2-xl": Transformer(48, 1600, 25, 6400, 50257, gated=False, tied=True, biases=True, context=1024),
    "llama3-8b": Transformer(32, 4096, 32, 14336, 128256, kv_heads=8),
    "llama3-70b": Transformer(80, 8192, 64, 28672, 128256, kv_heads=8),
    "llama3-405b": Transformer(126, 16384, 128, 53248, 128256, kv_heads=8),
    "mixtral-8x7b": Transformer(32, 4096, 32, 14336, 32000, kv_heads=8, experts=8, active=2),
    "mixtral-8x22b": Transformer(56, 6144, 48, 16384, 32768, kv_heads=8, experts=8, active=2),
}

_NEEDED = ("layers", "width", "heads", "mlp", "vocab")


def model_names() -> list[str]:
    from ..lab.training import PRESETS

    return [*MODELS, *(f"{LAB}{size}" for size in PRESETS)]


def transformer_of(text: str) -> Transformer:
    """``"llama3-8b"``, ``"llama3-8b, layers=16"``, or ``"layers=2, width=64, heads=2, mlp=256, vocab=256"``."""
    known = [field.name for field in fields(Transformer)]
    name, values = settings_of(text, known, known, "model")
    for flag in ("gated", "tied", "biases"):
        if flag in values:
            values[flag] = bool(values[flag])
    if name is not None:
        if name not in MODELS:
            raise ValueError(f"no model {name!r}{did_you_mean(name, model_names())}")
        return replace(MODELS[name], **values)
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise ValueError(
            f"model {text!r}: {missing[0]} is not said, as in {missing[0]}={getattr(MODELS['gpt2'], missing[0])}"
        )
    return Transformer(**values)
