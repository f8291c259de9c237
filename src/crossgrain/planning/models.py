"""Transformers by their dimensions: models with names, and your own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from ..recipe.syntax import did_you_mean
from .settings_text import settings_of

LAB = "lab-"  # the GPTs of `crossgrain train` have the names lab-tiny and so on


@dataclass(frozen=True)
class Transformer:
    """The dimensions of a decoder-only transformer.

    Args:
        layers: number of blocks.
        width: features of a token between blocks.
        heads: heads of queries.
        mlp: features inside the MLP.
        vocab: size of the vocabulary.
        kv_heads: heads of keys and values; 0 for as many as ``heads``.
        head_width: features of a head; 0 for width / heads.
        gated: the MLP has a gate, so its first layer has two matrices (SwiGLU).
        experts: number of MLPs among which tokens are distributed; 0 for one MLP.
        active: number of experts that each token is sent to.
        tied: the output layer uses the weight of the embedding.
        biases: linear layers and norms have biases, and positions are learned, as in GPT-2.
        context: default length of sequences.

    Raises:
        ValueError: the dimensions do not fit together.

    Examples:
        >>> small = cg.planning.Transformer(layers=2, width=64, heads=2, mlp=256, vocab=1000)
        >>> cg.plan(small, "mxfp8").parameters
        259392
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
                raise ValueError(f"{name} of a transformer must be at least 1, got {getattr(self, name)}")
        for name in ("kv_heads", "head_width", "experts", "active"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} of a transformer must be 0 or more, got {getattr(self, name)}")
        if self.heads % self.key_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.key_heads}")
        if not self.head_width and self.width % self.heads:
            raise ValueError(f"width={self.width} must be a multiple of heads={self.heads}, or set head_width")
        if self.experts and not 1 <= self.active <= self.experts:
            raise ValueError(
                f"active, the number of experts of each token, must be between 1 and experts={self.experts}, got "
                f"{self.active}"
            )

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def channels(self) -> int:
        """Features of one head."""
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
    """The names of all models that `plan` knows.

    Examples:
        >>> cg.planning.model_names()[:3]
        ['gpt2', 'gpt2-xl', 'llama3-8b']
    """
    from ..gpt.training import PRESETS

    return [*MODELS, *(f"{LAB}{size}" for size in PRESETS)]


def transformer_of(text: str) -> Transformer:
    """Return a transformer from text.

    Args:
        text: a name (``llama3-8b``), a name with changed dimensions (``llama3-8b, layers=16``), or dimensions
            (``layers=2, width=64, heads=2, mlp=256, vocab=256``).

    Raises:
        ValueError: there is no such model or dimension, or a dimension is missing.
    """
    known = [field.name for field in fields(Transformer)]
    name, values = settings_of(text, known, known, "model")
    for flag in ("gated", "tied", "biases"):
        if flag in values:
            values[flag] = bool(values[flag])
    if name is not None:
        if name not in MODELS:
            raise ValueError(f"there is no model {name!r}{did_you_mean(name, model_names())}")
        return replace(MODELS[name], **values)
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise ValueError(
            f"model {text!r}: {missing[0]} is missing; add it, as in {missing[0]}={getattr(MODELS['gpt2'], missing[0])}"
        )
    return Transformer(**values)
