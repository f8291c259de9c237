"""Random recipes for property tests, and a model to bind them to."""

from functools import cache

from hypothesis import strategies as st
from torch import nn

from crossgrain.gemm.operands import GEMMS, TENSORS
from crossgrain.recipe.format_spec import FormatSpec
from crossgrain.recipe.gemm_recipe import GemmRecipe
from crossgrain.recipe.layer_formats import ATTENTION, make_setting, make_settings
from crossgrain.recipe.rules import Blocks, Glob, Matcher, ModuleType, Rule

from .format_specs import any_spec


@cache  # a strategy that is made again for every example costs more than drawing from it
def spec_for(key: str) -> st.SearchStrategy[FormatSpec]:
    """A format that can stand at this key."""
    return any_spec().filter(lambda spec: _fits(key, spec))


def _fits(key: str, spec: FormatSpec) -> bool:
    try:
        make_setting(key, spec)
    except ValueError:
        return False
    return True


OPERANDS = [f"{gemm}.{tensor}" for gemm in GEMMS for tensor in GEMMS[gemm]] + [f"attention.{t}" for t in ATTENTION]
SOURCES = st.sampled_from(["original", "dequantized"])
PATHS = st.from_regex(r"[a-z*][a-z0-9_*?.\[\]-]{0,12}", fullmatch=True).filter(lambda path: path != "type")


def some(keys: list[str], max_size: int = 2) -> st.SearchStrategy[dict]:
    """A few of these keys, each with a format that fits."""
    chosen = st.lists(st.sampled_from(keys), unique=True, max_size=max_size)
    return chosen.flatmap(lambda keys: st.fixed_dictionaries({key: spec_for(key) for key in keys}))


def matchers() -> st.SearchStrategy[Matcher]:
    paths = st.lists(PATHS, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(Glob, paths),
        st.builds(Blocks, st.sampled_from(["first", "last"]), st.integers(1, 99), st.just(()) | paths),
        st.builds(ModuleType, st.sampled_from(["linear", "grouped_linear"])),
    )


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    settings = {**draw(some(["all", *GEMMS])), **draw(some(OPERANDS, 1))}
    if draw(st.booleans()) or not settings:
        settings["weight.source"] = draw(SOURCES)
    return Rule(draw(matchers()), make_settings(settings))


@st.composite
def recipes(draw: st.DrawFn) -> GemmRecipe:
    """Any recipe; most of them make no sense, which is what allow_mixed is for."""
    return GemmRecipe(
        **{gemm: draw(spec_for(gemm)) for gemm in GEMMS},
        operands=draw(some(OPERANDS)),
        sources=draw(st.dictionaries(st.sampled_from(TENSORS), SOURCES)),
        attention=draw(spec_for("attention")),
        rules=draw(st.lists(rules(), max_size=3)),
        blocks=draw(st.none() | PATHS),
        allow_mixed=True,
        backward_override=draw(st.sampled_from([None, "high_precision", "dequantized"])),
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q", "k")})
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


class Model(nn.Module):
    """layers.0 to layers.3, each with attn.q, attn.k, mlp.0, mlp.2; and head.lm."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(4), "lm": nn.Linear(4, 4)})
