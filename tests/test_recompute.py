"""Recomputation of activations: loss, every gradient and all that delayed scaling learns are those without it."""

import gc
import itertools
import weakref
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.replay import Tape

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
        return [value for state in extra for value in state.values() if isinstance(value, torch.Tensor)]

    def all(self):
        return [*self.seen, *self.learned(), torch.get_rng_state()]


def assert_same(again, plain):
    differ = [i for i, (a, b) in enumerate(zip(again, plain, strict=True)) if not torch.equal(a, b)]
    assert not differ, f"{len(differ)} of {len(plain)} differ: {differ}"


@cache
def without_recomputation(name, makers, **options):
    return Run(makers, RECIPES[name](), **options).train().all()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("function", "reentrant"), ALL, ids=NAMES)
def test_bits_are_those_without_recomputation(name, function, reentrant):
    again = Run(MODULES, RECIPES[name](), checkpoints(function, reentrant)).train().all()
    assert_same(again, without_recomputation(name, tuple(MODULES)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "bound"])
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
def test_wherever_the_recipe_comes_from(name, where, reentrant):
    makers = (Mlp, Grouped, Attention)
    again = Run(makers, RECIPES[name](), checkpoints("torch", reentrant), where=where).train().all()
    assert_same(again, without_recomputation(name, makers, where=where))


class Own(nn.Module):
    """Modules under a recipe of their own, before others and after them."""

    def __init__(self):
        super().__init__()
        self.own, self.last = cg.Linear(WIDTH, WIDTH), cg.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with cg.autocast(recipe="fp8"):
            x = self.own(x)
        x = self.last(x)
        with cg.autocast(enabled=False):
            return self.own(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
def test_autocasts_inside_of_what_is_recomputed(name, reentrant):
    again = Run([Own], RECIPES[name](), checkpoints("torch", reentrant)).train().all()
    assert_same(again, without_recomputation(name, (Own,)))


@pytest.mark.parametrize(("function", "reentrant"), ALL, ids=NAMES)
@pytest.mark.parametrize("name", ["delayed", "hybrid", "rounded_columns"])
def test_stochastic_rounding_does_not_need_the_generator_to_be_restored(name, function, reentrant):
    again = Run(WITHOUT_DROPOUT, RECIPES[name](), checkpoints(function, reentrant, preserve_rng_state=False))
    assert_same(again.train().all(), without_recomputation(name, tuple(WITHOUT_DROPOUT)))


def test_dropout_does():
    """What ``preserve_rng_state=False`` gives up: the same loss, but gradients through other masks."""
    loss, dx, *_ = (
        Run([Attention], RECIPES["mxfp8"](), checkpoints("torch", False, preserve_rng_state=False)).train().seen
    )
    plain_loss, plain_dx, *_ = without_recomputation("mxfp8", (Attention,))
    assert torch.equal(loss, plain_loss) and not torch.equal(dx, plain_dx)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "mxfp8", "hybrid", "delayed_in_a_hybrid"])
def test_weights_that_are_kept_quantized(name, reentrant):
    makers = (Mlp, Grouped, Operations)
    again = Run(makers, RECIPES[name](), checkpoints("torch", reentrant), quantized=True).train().all()
    assert_same(again, without_recomputation(name, makers, quantized=True))


# ---- passes in other orders ---------------------------------------------------------------------------


def microbatches(run):
    """The quantized weights of the first of three microbatches serve them all; backward in the order of a pipeline."""
    for _ in range(2):
        passes = [run.forward(is_first_microbatch=first) for first in (True, False, False)]
        for loss, x in reversed(passes):
            run.backward(loss, x)
        run.update()


def refreshed_in_between(run):
    """Each of two passes has made its copies of the weights again, with other scales, before backward runs."""
    one, other = run.forward(is_first_microbatch=True), run.forward(is_first_microbatch=True)
    run.backward(*one)
    third = run.forward(is_first_microbatch=False)
    run.backward(*other)
    run.backward(*third)
    run.update()


def validation_in_between(run):
    for _ in range(2):
        training = run.forward()
        with torch.no_grad():
            run.forward()
        run.forward()  # never followed by backward
        run.backward(*training)
        run.update()


def a_kept_graph(run):
    for _ in range(2):
        loss, x = run.forward()
        for retain_graph in (True, True, False):
            run.backward(loss, x, retain_graph=retain_graph)
        run.update()


def backward_in_another_autocast(run):
    for _ in range(2):
        training = run.forward()
        with cg.autocast(recipe=recipes.Float8CurrentScaling()):
            run.backward(*training)
        with cg.autocast(enabled=False):
            run.backward(*run.forward())
        run.update()


def another_recipe_in_between(run):
    """Quantizers are built anew; histories stay."""
    for _ in range(2):
        training = run.forward()
        recipe, run.recipe = run.recipe, recipes.MXFP8BlockScaling()
        run.backward(*run.forward())
        run.recipe = recipe
        run.backward(*training)
        run.update()


ORDERS = [
    microbatches,
    refreshed_in_between,
    validation_in_between,
    a_kept_graph,
    backward_in_another_autocast,
    another_recipe_in_between,
]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
@pytest.mark.parametrize("order", ORDERS)
def test_passes_in_any_order(order, name, reentrant):
    results = []
    for checkpoint in (direct, checkpoints("torch", reentrant)):
        run = Run([lambda: cg.Linear(WIDTH, WIDTH), Mlp], RECIPES[name](), checkpoint)
        order(run)
        results.append(run.all())
    assert_same(*results)


def nested(outer, inner):
    """A checkpoint with one inside, and something after that."""

    def twice(function, x):
        def checkpointed(x):
            return torch_checkpoint(function, x, use_reentrant=inner).sin()

        return torch_checkpoint(checkpointed, x, use_reentrant=outer)

    return twice


def not_nested(function, x):
    return function(x).sin()


NESTED = list(itertools.product([False, True], repeat=2))


@pytest.mark.parametrize(("outer", "inner"), NESTED)
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
def test_checkpoints_in_checkpoints(name, outer, inner):
    kinds = (nested(outer, inner), not_nested)
    assert_same(*(Run([Mlp, Attention], RECIPES[name](), kind).train().all() for kind in kinds))


@pytest.mark.parametrize("make", [lambda: cg.Linear(WIDTH, WIDTH), Attention], ids=["linear", "attention"])
@pytest.mark.parametrize(("outer", "inner"), NESTED)
def test_a_layer_in_several_checkpoints_takes_one_step(outer, inner, make):
    """The backward pass of a reentrant checkpoint is a part of the one around it, however deep it is."""
    results = []
    for kind in (nested(outer, inner), not_nested):
        run = Run([make], recipes.DelayedScaling(amax_history_len=3, fp8_dpa=True), kind)
        run.model = nn.ModuleList([*run.model] * 2)
        results.append(run.train(3).all())
    assert_same(*results)


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("name", ["delayed", "hybrid"])
def test_all_blocks_in_one_checkpoint(name, early_stop):
    """A recomputation stops where backward has all it needs, or goes on to the end."""
    results = []
    for checkpoint in (direct, checkpoints("torch", False)):
        run = Run([Mlp, Mlp], RECIPES[name](), checkpoint)
        run.model = nn.ModuleList([nn.Sequential(*run.model)])
        with set_checkpoint_early_stop(early_stop):
            results.append(run.train().all())
    assert_same(*results)


class Mixed(nn.Module):
    """Modules with operations between them, which a policy decides about."""

    def __init__(self):
        super().__init__()
        self.first, self.plain, self.last = cg.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Mlp()

    def forward(self, x):
        ones = torch.ones(3, dtype=torch.float32, device=x.device)  # as delayed scaling makes some, but only once
        return self.last(self.plain(self.first(x).sin() * ones[0]).cos())


@pytest.mark.parametrize("name", ["delayed", "hybrid", "mxfp8"])
@pytest.mark.parametrize("save", ["matrix products", "everything"])
def test_selective_checkpoints(name, save):
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        saves = save == "everything" or op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    makers = (Mixed, Grouped, Operations)
    again = Run(makers, RECIPES[name](), checkpoints("ours", False, context_fn=contexts)).train().all()
    assert torch.ops.aten.addmm.default in asked
    assert_same(again, without_recomputation(name, makers))


def converted(name):
    """A model of torch's whose layer is called twice in each step."""
    model = Twice()
    cg.convert(model, RECIPES[name]())
    return model


class Twice(nn.Module):
    checkpoint = staticmethod(direct)

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in (self.layer, self.layer, self.head):
            x = self.checkpoint(lambda x, layer=layer: layer(x).relu() * 3, x)
        return x


@pytest.mark.parametrize(("function", "reentrant"), ALL, ids=NAMES)
@pytest.mark.parametrize("name", ["delayed", "delayed_in_a_hybrid", "hybrid"])
def test_converted_models(name, function, reentrant):
    results = []
    for checkpoint in (checkpoints(function, reentrant), direct):
        run = Run([partial(converted, name)], None, where="bound")
        run.model[0].checkpoint = checkpoint
        results.append(run.train().all())
    assert_same(*results)


# ---- what is refused, and what is left behind ---------------------------------------------------------


class ByHand(torch.autograd.Function):
    """A checkpoint of somebody's own."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        y.backward(dy)
        return None, x.grad


@pytest.mark.parametrize("where", ["bound", "outside", "inside"])
def test_other_recomputations_of_delayed_scaling_are_refused(where):
    run = Run([lambda: cg.Linear(WIDTH, WIDTH)], RECIPES["delayed"](), ByHand.apply, where=where)
    with pytest.raises(RuntimeError, match=r"Use crossgrain.checkpoint|use crossgrain.checkpoint"):
        run.train()


def test_modules_that_did_not_run_the_first_time_are_refused():
    layers = [cg.Linear(WIDTH, WIDTH), cg.Linear(WIDTH, WIDTH)]
    takes_turns = itertools.cycle(layers)

    def changes(x):
        with cg.autocast(recipe=RECIPES["delayed"]()):
            return next(takes_turns)(x)

    y = torch_checkpoint(changes, torch.randn(ROWS, WIDTH, requires_grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError, match="has to run the same modules in the same order"):
        y.sum().backward()


def test_a_validation_is_no_step_of_a_reentrant_checkpoint():
    """Its first pass has no gradients either, even where an argument wants some."""
    run = Run([Mlp], RECIPES["delayed"](), checkpoints("torch", True), where="bound")
    run.train(1)
    learned = [value.clone() for value in run.learned()]
    with torch.no_grad():
        run.forward()
    run.checkpoint = lambda function, x: torch_checkpoint(function, x.detach(), use_reentrant=True)
    with pytest.warns(UserWarning, match="None of the inputs"):
        run.forward()
    assert_same(run.learned(), learned)


def test_nothing_is_noted_outside_of_checkpoints_and_notes_go_with_the_graph():
    made = []
    original = Tape.__init__

    def counted(self, outside):
        original(self, outside)
        made.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__init__", counted)
        Run([Mlp], RECIPES["delayed"]()).train(1)
        inside = len(made)
        run = Run([Mlp], RECIPES["delayed"](), checkpoints("torch", False))
        loss, x = run.forward()
    assert inside == 1 and len(made) == 3  # LayerNormMLP(checkpoint=True) is one
    run.backward(loss, x)
    del loss, x
    gc.collect()
    assert not any(tape() for tape in made)


# ---- crossgrain.checkpoint ----------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_states_of_a_tracker_are_replayed(reentrant):
    results = []
    for recomputes in (True, False):
        tracker = cg.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 7)
        states = partial(lambda tracker: tracker, tracker)
        checkpoint = checkpoints("ours", reentrant, get_rng_state_tracker=states) if recomputes else direct

        def dropped(x, tracker=tracker):
            with tracker.fork():
                return torch.nn.functional.dropout(x, 0.5).square()

        x = torch.linspace(1, 2, 64).requires_grad_()
        for _ in range(2):
            checkpoint(dropped, x).sum().backward()
        results.append([x.grad, *tracker.get_states().values()])
    assert_same(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_keyword_arguments_get_gradients(reentrant):
    x, scale = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    cg.checkpoint(
        lambda x, *, scale, power: (x * scale) ** power, x, scale=scale, power=2, use_reentrant=reentrant
    ).sum().backward()
    assert torch.allclose(x.grad, 2 * x * scale**2) and torch.allclose(scale.grad, 2 * scale * x**2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_bias_that_is_returned_is_still_the_parameter(reentrant):
    """As an output of a reentrant checkpoint it would have a history, of which it is a part."""
    layer, x = cg.Linear(32, 32, return_bias=True), torch.randn(8, 32, requires_grad=True)
    grads = []
    for again in (False, True):
        y, bias = cg.checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        assert layer.bias.is_leaf
        layer.zero_grad()
        (y + bias).square().sum().backward()
        grads.append([layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))


def test_activations_are_not_distributed():
    with pytest.raises(ValueError, match="needs the tp_group"):
        cg.checkpoint(torch.sin, torch.ones(2), distribute_saved_activations=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_phases_can_be_asked_for(reentrant):
    seen, in_hooks = [], []

    def function(x):
        seen.append((cg.is_fp8_activation_recompute_enabled(), cg.in_fp8_activation_recompute_phase()))
        y = x.sin()
        if y.requires_grad:
            y.register_hook(lambda grad: in_hooks.append(cg.in_fp8_activation_recompute_phase()))
        return y.cos()

    x = torch.ones(4, requires_grad=True)
    with cg.autocast(recipe="mxfp8"):
        function(x)
        y = cg.checkpoint(function, x, use_reentrant=reentrant)
    y.sum().backward()
    function(x)
    assert seen == [(False, False), (True, False), (True, True), (False, False)]
    assert in_hooks == [False]  # also in the backward pass of a reentrant one, which is inside of it
