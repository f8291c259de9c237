"""Models that are trained with and without checkpoints, by many recipes, and all that they give and learn."""

from contextlib import nullcontext
from functools import cache, partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.recipe import read_extra_state

WIDTH, ROWS = 64, 32
FUNCTIONS = {"torch": torch_checkpoint, "ours": cg.checkpoint}
ALL = [(function, reentrant) for function in FUNCTIONS for reentrant in (False, True)]
NAMES = [f"{function}-{'reentrant' if reentrant else 'hooks'}" for function, reentrant in ALL]


def rounded_columns(role):
    """MXFP8 forward, NVFP4 with stochastic rounding backward, also of inputs: planes that no_grad leaves out."""
    rounded = cg.NVFP4Quantizer(stochastic_rounding=True)
    if role is not None and role.tensor_type.startswith("grad"):
        return rounded
    return cg.HybridQuantizer(rowwise_quantizer=cg.MXFP8Quantizer(cg.DType.kFloat8E4M3), columnwise_quantizer=rounded)


def delayed_columns_of_rows(role):
    """Histories of what the rows decode to, which no_grad leaves out."""
    delayed = cg.DelayedScalingRequest(amax_history_len=3)
    if role is not None and role.tensor_type.startswith("grad"):
        return delayed
    return cg.HybridQuantizer(
        rowwise_quantizer=cg.MXFP8Quantizer(cg.DType.kFloat8E4M3),
        columnwise_quantizer=delayed,
        columnwise_source="rowwise_dequantized",
    )


RECIPES = {
    "mxfp8": recipes.MXFP8BlockScaling,
    "fp8_current": recipes.Float8CurrentScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=3),
    "delayed_most_recent": lambda: recipes.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    "hybrid": lambda: recipes.as_recipe("fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)"),
    "rounded_columns": lambda: recipes.CustomRecipe(qfactory=rounded_columns),
    "delayed_columns": lambda: recipes.as_recipe("fprop: mxfp8, dgrad: fp8(delayed), wgrad: fp8(delayed)"),
    "delayed_columns_of_rows": lambda: recipes.CustomRecipe(qfactory=delayed_columns_of_rows),
    "delayed_in_a_hybrid": lambda: recipes.as_recipe("fprop: fp8(delayed), dgrad: mxfp8, wgrad: mxfp8"),
}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_linear = cg.LayerNormLinear(WIDTH, WIDTH)
        self.mlp = cg.LayerNormMLP(WIDTH, 2 * WIDTH, checkpoint=True)
        self.out = cg.Linear(WIDTH, WIDTH)

    def forward(self, x, **options):
        return self.out(self.mlp(self.norm_linear(x, **options), **options), **options)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = cg.GroupedLinear(2, WIDTH, WIDTH)

    def forward(self, x, **options):
        return self.experts(x, [ROWS // 2, ROWS // 2], **options)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = cg.TransformerLayer(
            WIDTH, 2 * WIDTH, 2, hidden_dropout=0.1, attention_dropout=0.1, self_attn_mask_type="causal"
        )

    def forward(self, x, **options):
        return self.layer(x.view(ROWS // 2, 2, WIDTH), **options).view(ROWS, WIDTH)


class Odd(nn.Module):
    """Sizes that are no multiples of blocks."""

    def __init__(self):
        super().__init__()
        self.inner = cg.Linear(WIDTH, 40)
        self.outer = cg.Linear(40, WIDTH)

    def forward(self, x, **options):
        return torch.cat([self.outer(self.inner(x[:27], **options), **options), x[27:]])


class Operations(nn.Module):
    def __init__(self):
        super().__init__()
        self.ops = cg.ops.Sequential(cg.ops.Linear(WIDTH, WIDTH), cg.ops.GELU(), cg.ops.Linear(WIDTH, WIDTH))

    def forward(self, x, is_first_microbatch=None):
        return self.ops(x)


MODULES = [lambda: cg.Linear(WIDTH, WIDTH), Mlp, Odd, Grouped, Attention, Operations]
WITHOUT_DROPOUT = [Mlp, Grouped, Operations]


def direct(function, *args, **options):
    return function(*args)


def checkpoints(function, reentrant, **options):
    return partial(FUNCTIONS[function], use_reentrant=reentrant, **options)


class Run:
    """A model of blocks, each of which is checkpointed. All that it gave and learned is in ``all()``.

    ``where``  the autocast is outside of the checkpoints or inside, or there is none and modules are bound
    """

    def __init__(self, makers, recipe, checkpoint=direct, *, quantized=False, where="outside"):
        torch.manual_seed(3)
        with cg.quantized_model_init(enabled=quantized, recipe=recipe):
            self.model = nn.ModuleList([make() for make in makers])
        self.checkpoint, self.recipe, self.where = checkpoint, recipe, where
        for module in self.model.modules():
            if where == "bound" and hasattr(module, "bound_recipe"):
                module.bound_recipe = recipe
        self.data = torch.Generator().manual_seed(5)
        self.calls, self.seen = 0, []

    def context(self, where):
        return cg.autocast(recipe=self.recipe) if where == self.where else nullcontext()

    def block(self, module, options, x):
        with self.context("inside"):
            return module(x, **options)

    def forward(self, **options):
        """The loss of a new input, larger from call to call, so that no two scales are alike; and the input."""
        self.calls += 1
        x = y = (torch.randn(ROWS, WIDTH, generator=self.data) * 1.7**self.calls).requires_grad_()
        with self.context("outside"):
            for module in self.model:
                y = self.checkpoint(partial(self.block, module, options), y)
        return y.square().mean(), x

    def backward(self, loss, x, **options):
        loss.backward(**options)
        self.seen += [loss.detach(), x.grad.clone()]

    def update(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    self.seen.append(parameter.grad)
                    parameter.copy_(parameter - 0.01 * parameter.grad.sign())
                parameter.grad = None

    def train(self, steps=2, **options):
        for _ in range(steps):
            self.backward(*self.forward(**options))
            self.update()
        return self

    def learned(self):
        extra = [extra for key, extra in self.model.state_dict().items() if key.endswith("_extra_state")]
        return [
            value for state in extra for value in read_extra_state(state).values() if isinstance(value, torch.Tensor)
        ]

    def all(self):
        return [*self.seen, *self.learned(), torch.get_rng_state()]


def assert_same(again, plain):
    differ = [i for i, (a, b) in enumerate(zip(again, plain, strict=True)) if not torch.equal(a, b)]
    assert not differ, f"{len(differ)} of {len(plain)} differ: {differ}"


@cache
def without_recomputation(name, makers, **options):
    return Run(makers, RECIPES[name](), **options).train().all()
