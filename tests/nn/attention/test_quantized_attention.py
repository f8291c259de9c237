"""Attention in the formats of a recipe: against float64 on decoded operands, roles, hybrids, overrides, histories."""

from dataclasses import FrozenInstanceError

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, QuantizerRole
from crossgrain import recipe as recipes
from crossgrain.nn.attention.heads import decoded_heads, quantized_heads
from crossgrain.nn.attention.quantized_attention import AttentionCall, AttentionQuantizers, quantized_attention
from crossgrain.recipe import factories, zoo
from crossgrain.recipe.presets import PRESETS

from ...common.attention_reference import batched, gradients, may_look, sequences
from ...common.families import PLAIN, delayed_request
from ...common.families import hybrid_of as same_in_both
from ...common.quantizers import QUANTIZERS, hybrid_of

TENSORS = ("q", "k", "v", "s", "do", "dp")


def inputs(d=8, d_v=None):
    """[batch, heads, sequence, d], 4 heads on 2 groups, sizes that divide into no block."""
    made = sequences(2, 5, 7, d=d, dtype=torch.float32, d_v=d_v)
    return [x.detach().transpose(1, 2).requires_grad_() for x in made]


def attend(*arguments):
    return quantized_attention(*arguments).output


def by_hand(q, k, v, do, allowed, quantizers, sink=None):
    """The six GEMMs in float64, on what each plane decodes to; with a sink [heads], its gradient is the last result."""

    def both(x, name):
        made = quantized_heads(x.float(), quantizers[name], rowwise=True, columnwise=True)
        return (decoded_heads(made.plane(direction), x.shape).double() for direction in (ROWWISE, COLUMNWISE))

    def shared(x):
        return x.repeat_interleave(2, 1)

    def summed(x):
        return x.unflatten(1, (-1, 2)).sum(2)

    scale = q.shape[-1] ** -0.5
    (q_row, q_column), (k_row, k_column), (v_row, v_column) = both(q, "q"), both(k, "k"), both(v, "v")
    scores = q_row @ shared(k_row).transpose(-1, -2) * scale
    extra = 0 if sink is None else sink.exp()[:, None, None]
    sums = (scores.exp() * allowed).sum(-1, keepdim=True) + extra
    s = scores.exp() * allowed / sums
    s_row, s_column = both(s, "s")
    do_row, do_column = both(do, "do")
    dp = do_row @ shared(v_row).transpose(-1, -2)
    dp_row, dp_column = both(s * (dp - (dp * s).sum(-1, keepdim=True)), "dp")
    dsink = () if sink is None else (-(extra / sums * (dp * s).sum(-1, keepdim=True)).sum((0, 2, 3)),)
    return (
        s_row @ shared(v_column),
        dp_row @ shared(k_column) * scale,
        summed(dp_column.transpose(-1, -2) @ q_column.double()) * scale,
        summed(s_column.transpose(-1, -2) @ do_column),
        *dsink,
    )


HYBRIDS = {
    "mxfp8": lambda: QUANTIZERS["mxfp8"](),
    "nvfp4": lambda: QUANTIZERS["nvfp4"](),
    "fp8_block": lambda: QUANTIZERS["fp8_block"](),
    "mxfp8/nvfp4": lambda: hybrid_of("mxfp8", "nvfp4"),
    "nvfp4/fp8": lambda: hybrid_of("nvfp4", "fp8"),
    "fp8_block/mxfp8": lambda: hybrid_of("fp8_block", "mxfp8", "rowwise_dequantized"),
    "identity/nvfp4_rht": lambda: hybrid_of("identity", "nvfp4_rht"),
}


def assert_near(mine, exact, names):
    for name, a, b in zip(names, mine, exact, strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error < 1e-2, f"{name}: {error}"
        assert ((a.double() - b).abs() < 1e-5).float().mean() > 0.8, name


@pytest.mark.parametrize("make", HYBRIDS.values(), ids=HYBRIDS)
@pytest.mark.parametrize(
    "d, d_v, sink", [(8, 8, False), (32, 32, False), (32, 16, True)], ids=["8", "32", "32-16-sink"]
)
def test_each_gemm_reads_its_planes(make, d, d_v, sink):
    """fp32 against float64 sums differ by 1e-6, which moves a few operands to a neighbouring code: of FP4 those
    are a sixth apart, so one in a hundred such steps is the most that may be seen."""
    q, k, v = inputs(d, d_v)
    allowed = may_look(5, 7, causal=True, bottom_right=True)
    quantizers = {name: make() for name in TENSORS}
    sinks = [torch.randn(4).requires_grad_()] if sink else []
    call = AttentionCall(AttentionQuantizers(**quantizers), scale=d**-0.5)
    o = attend(q, k, v, allowed, call, *(x.view(1, -1, 1, 1) for x in sinks))
    do = torch.randn_like(o)
    mine = (o, *gradients(o, do, q, k, v, *sinks))
    exact = by_hand(
        *(x.detach().double() for x in (q, k, v)), do.double(), allowed, quantizers, *(x.double() for x in sinks)
    )
    assert_near(mine, exact, ("o", "dq", "dk", "dv", "dsink")[: 4 + sink])


# Roles that differ in both directions: each of the six GEMMs multiplies another pair of formats.
BY_ROLE = [
    {"qkv": ("mxfp8", "nvfp4"), "s": ("fp8", "mxfp8"), "do": ("nvfp4", "fp8_block"), "dp": ("mxfp8", "fp8_e5m2")},
    {"qkv": ("nvfp4", "fp8"), "s": ("mxfp8", "identity"), "do": ("fp8_e5m2", "mxfp8"), "dp": ("identity", "nvfp4")},
]


@pytest.mark.parametrize("by_role", BY_ROLE, ids=["a", "b"])
def test_hybrids_by_role_reach_the_gemms_of_their_direction(by_role):
    """As above, through a module and a factory."""
    layer = cg.DotProductAttention(4, 32, num_gqa_groups=2, qkv_format="bshd", attn_mask_type="causal_bottom_right")

    def factory(role):
        return hybrid_of(*by_role.get(role.tensor_type, ("identity", "identity")))

    q, k, v = inputs(32)
    with cg.autocast(recipe=recipes.CustomRecipe(qfactory=factory, fp8_dpa=True)):
        o = layer(*(x.transpose(1, 2) for x in (q, k, v))).view(2, 5, 4, 32).transpose(1, 2)
    do = torch.randn_like(o)
    quantizers = {name: hybrid_of(*by_role["qkv" if name in "qkv" else name]) for name in TENSORS}
    exact = by_hand(
        *(x.detach().double() for x in (q, k, v)),
        do.double(),
        may_look(5, 7, causal=True, bottom_right=True),
        quantizers,
    )
    assert_near((o, *gradients(o, do, q, k, v)), exact, ("o", "dq", "dk", "dv"))


def test_identity_is_attention_in_high_precision():
    """fp32 sums of a few numbers against float64."""
    q, k, v = sequences(2, 5, 7, dtype=torch.float32)
    call = AttentionCall(AttentionQuantizers(*(cg.IdentityQuantizer() for _ in TENSORS)), scale=8**-0.5)
    allowed = may_look(5, 7, causal=True)
    allowed[3] = False
    y = attend(*(x.transpose(1, 2) for x in (q, k, v)), allowed, call).transpose(1, 2).flatten(2)
    exact = batched(*(x.double() for x in (q, k, v)), [allowed] * 2)
    dy = torch.randn_like(y)
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-6)
    for mine, theirs in zip(gradients(y, dy, q, k, v), gradients(exact, dy.double(), q, k, v), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


def test_dropout_in_quantized_attention():
    """The mask of the forward pass is that of the backward pass: gradients of a linear function of v are exact."""
    q, k, v = inputs()
    call = AttentionCall(AttentionQuantizers(*(cg.IdentityQuantizer() for _ in TENSORS)), scale=0.3, dropout=0.5)

    def dropped(q, v):
        torch.manual_seed(5)
        return attend(q, k, v, None, call)

    do = torch.randn(2, 4, 5, 8)
    dq, dv = gradients(dropped(q, v), do, q, v)
    other = torch.randn_like(v)
    torch.testing.assert_close((dropped(q, other) * do).sum(), (other * dv).sum(), rtol=1e-4, atol=1e-4)
    step = torch.randn_like(q) * 1e-2
    with torch.no_grad():
        up, down = dropped(q + step, v), dropped(q - step, v)
    torch.testing.assert_close(((up - down) * do).sum() / 2, (dq * step).sum(), rtol=1e-2, atol=1e-4)


def test_gradients_do_not_depend_on_which_others_are_wanted():
    q, k, v = inputs(32)
    do = torch.randn(2, 4, 5, 32)
    call = AttentionCall(AttentionQuantizers(*(hybrid_of("mxfp8", "nvfp4") for _ in TENSORS)), scale=0.2)
    whole = gradients(attend(q, k, v, None, call), do, q, k, v)
    for wanted in ((0,), (1,), (2,), (0, 1), (1, 2)):
        some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((q, k, v))]
        mine = gradients(attend(*some, None, call), do, *(some[i] for i in wanted))
        assert all(torch.equal(a, whole[i]) for i, a in zip(wanted, mine, strict=True))


# ---- recipes ------------------------------------------------------------------------------------------


def core(**options):
    return cg.DotProductAttention(4, 8, num_gqa_groups=2, qkv_format="bshd", **options)


def run(layer, recipe, seed=0, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    q, k, v = sequences(2, 6, 6, dtype=dtype)
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(q, k, v, **options)
    dy = torch.randn_like(y)
    return y.detach(), *gradients(y, dy, q, k, v)


RECIPES = {
    "mxfp8": lambda **flags: recipes.MXFP8BlockScaling(**flags),
    "fp8_current": lambda **flags: recipes.Float8CurrentScaling(**flags),
    "fp8_delayed": lambda **flags: recipes.DelayedScaling(amax_history_len=4, **flags),
    "nvfp4": lambda **flags: recipes.NVFP4BlockScaling(**flags),
    "nvfp4_linear_fp8_dpa": lambda **flags: recipes.CustomRecipe(qfactory=zoo.nvfp4_linear_fp8_dpa_factory, **flags),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flag", ["fp8_dpa", "fp8_mha"])
@pytest.mark.parametrize("family", RECIPES)
def test_recipes(family, flag, dtype):
    layer = core()
    exact = run(layer, None, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(run(layer, RECIPES[family](), dtype=dtype), exact, strict=True))
    recipe = RECIPES[family](**{flag: True})
    for _ in range(3):  # histories fill
        rounded = run(layer, recipe, dtype=dtype)
    for a, b in zip(rounded, exact, strict=True):
        assert a.dtype == dtype
        assert 0 < (a - b).norm() / b.norm() < (0.4 if family == "nvfp4" else 0.12)


ZOO = [getattr(zoo, name) for name in dir(zoo) if name.endswith("_factory") and name != "quantizer_factory"]


@pytest.mark.parametrize("flag", ["fp8_dpa", "fp8_mha"])
@pytest.mark.parametrize("factory", ZOO, ids=lambda factory: factory.__name__)
def test_every_factory_of_the_zoo(factory, flag):
    """Errors are those of the coarsest format of the factory: 8 bits, or 4."""
    layer, recipe = core(), recipes.CustomRecipe(qfactory=factory, **{flag: True})
    exact = run(layer, None)
    for _ in range(2):
        rounded = run(layer, recipe)
    for a, b in zip(rounded, exact, strict=True):
        assert 0 < (a - b).norm() / b.norm() < 0.4


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset):
    """Attention is exact unless the preset has formats for it; a format can be added to every preset."""
    exact, alone = run(core(), None), run(core(), preset)
    assert torch.equal(alone[0], exact[0]) == ("attention" not in PRESETS[preset].line)
    with_formats = run(core(), f"{preset}, attention: mxfp8, attention.s: nvfp4")
    expected = run(core(), "all: hp, attention: mxfp8, attention.s: nvfp4")
    assert all(torch.equal(a, b) for a, b in zip(with_formats, expected, strict=True))
    assert not torch.equal(with_formats[0], exact[0])


def test_recipes_that_refuse():
    with pytest.raises(AssertionError, match="FP8 block scaling does not support quantized attention"):
        recipes.Float8BlockScaling(fp8_dpa=True)
    with pytest.raises(FrozenInstanceError, match="to quantize attention, add 'attention: mxfp8'"):
        recipes.as_recipe("mxfp8").fp8_dpa = True


def test_what_leaves_is_rounded_with_fp8_mha_only():
    one = run(core(), recipes.Float8CurrentScaling(fp8_dpa=True))
    both = run(core(), recipes.Float8CurrentScaling(fp8_mha=True))
    for unrounded, rounded, dtype in zip(one, both, ["E4M3", *["E5M2"] * 3], strict=True):
        quantizer = cg.Float8CurrentScalingQuantizer(cg.DType[f"kFloat8{dtype}"])
        assert torch.equal(quantizer(unrounded).dequantize(), rounded)
        assert not torch.equal(unrounded, rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", PLAIN)
def test_hybrid_of_one_format_is_bitwise_that_format(family, dtype):
    """Over three steps, with histories."""
    factory, steps = PLAIN[family][1] or delayed_request, []
    for made in (factory, same_in_both(factory)):
        layer, recipe = core(), recipes.CustomRecipe(qfactory=made, fp8_mha=True)
        steps.append([run(layer, recipe, seed, dtype) for seed in range(3)])
    for plain, hybrid in zip(*steps, strict=True):
        assert all(torch.isfinite(result).all() for result in plain)
        assert all(torch.equal(a, b) for a, b in zip(plain, hybrid, strict=True))


@pytest.mark.parametrize("family", ["mxfp8", "fp8_current"])
def test_padding_has_no_part_in_scales(family):
    """A padded batch full of garbage, and packed tokens: each token gets the same bits."""
    recipe = RECIPES[family](fp8_mha=True)
    q, k, v = (x.detach() for x in sequences(2, 6, 6, dtype=torch.float32))
    lengths = [6, 4]
    cu = torch.tensor([0, 6, 10])
    options = {"attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    packed = [torch.cat([x[i, :n] for i, n in enumerate(lengths)]) for x in (q, k, v)]
    for x in (q, k, v):
        x[1, 4:] = 1e4
    with cg.autocast(recipe=recipe):
        padded = core()(q, k, v, **options)
        tokens = core()(*packed, qkv_format="thd", **options)
    assert torch.equal(tokens, torch.cat([padded[i, :n] for i, n in enumerate(lengths)]))


def test_lines():
    exact = run(core(), None)
    assert all(torch.equal(a, b) for a, b in zip(run(core(), "all: mxfp8"), exact, strict=True))
    mine = run(core(), "all: hp, attention: mxfp8")
    theirs = run(core(), recipes.CustomRecipe(qfactory=factories.mxfp8_factory, fp8_mha=True))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    only_s = run(core(), "all: hp, attention.s: mxfp8")
    assert not torch.equal(only_s[0], exact[0]) and not torch.equal(only_s[0], mine[0])
    torch.testing.assert_close(only_s[1], exact[1], rtol=1e-3, atol=1e-5)  # dq does not depend on the rounded s
    run(core(), "nvfp4-fp8-attention")


def test_rules_reach_an_attention_core_by_its_name():
    line = "all: hp, attention: mxfp8; *.1.core: attention: hp"
    one, other = core(name="layers.0.core"), core(name="layers.1.core")
    assert not torch.equal(run(one, line)[0], run(core(), None)[0])
    for a, b in zip(run(other, line), run(core(), None), strict=True):
        assert torch.equal(a, b)


def test_roles():
    layer = core(name="layers.0.core")
    qkv, s, do, dp = (QuantizerRole("dpa", tensor, "layers.0.core") for tensor in ("qkv", "s", "do", "dp"))
    output, grad_input = (QuantizerRole("", "", f"layers.0.core.dpa_{end}") for end in ("output", "grad_input"))
    assert layer.get_quantizer_roles(fwd=True, num_quantizers=9) == [qkv] * 3 + [output] * 3 + [s] * 3
    assert layer.get_quantizer_roles(fwd=False, num_quantizers=6) == [grad_input] * 2 + [do] * 2 + [dp] * 2
    mine = QuantizerRole("linear", "input", "layers.0.proj")
    layer.output_quantizer_role = layer.grad_input_quantizer_role = mine
    assert layer.get_quantizer_roles(fwd=True, num_quantizers=9)[3:6] == [mine] * 3
    assert layer.get_quantizer_roles(fwd=False, num_quantizers=6)[:2] == [mine] * 2
    with pytest.raises(ValueError, match="has 9 slots for quantizers"):
        layer.get_quantizer_roles(fwd=True, num_quantizers=3)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override(override):
    """Backward multiplies the inputs as they are, or as forward had them, around the softmax of the forward pass."""
    recipe = recipes.MXFP8BlockScaling(fp8_dpa=True, backward_override=override)
    mine = run(core(), recipe)
    assert torch.equal(mine[0], run(core(), recipes.MXFP8BlockScaling(fp8_dpa=True))[0])
    torch.manual_seed(0)
    originals = [x.detach().transpose(1, 2) for x in sequences(2, 6, 6, dtype=torch.float32)]
    dy = torch.randn(2, 6, 32).view(2, 6, 4, 8).transpose(1, 2)

    def decoded(x, direction):
        made = quantized_heads(x, QUANTIZERS["mxfp8"](), rowwise=True, columnwise=True)
        return decoded_heads(made.plane(direction), x.shape)

    rounded = [decoded(x, d) for x, d in zip(originals, (ROWWISE, ROWWISE, COLUMNWISE), strict=True)]
    q, k, v = originals if override == "high_precision" else rounded
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = rounded[0] @ rounded[1].repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5
    s = torch.softmax(scores.masked_fill(~may_look(6, 6, causal=True), -torch.inf), -1)
    p = s if override == "high_precision" else decoded(s, ROWWISE)
    dp = dy @ v.transpose(-1, -2)
    ds = s * (dp - (dp * s).sum(-1, keepdim=True)) * 8**-0.5
    of_groups = (x.transpose(-1, -2) @ y for x, y in ((ds, q), (p, dy)))
    exact = (ds @ k, *(x.unflatten(1, (2, 2)).sum(2) for x in of_groups))
    for a, b in zip(mine[1:], exact, strict=True):
        torch.testing.assert_close(a, b.transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_histories_are_kept_in_the_state_dict_and_validation_leaves_no_trace():
    recipe = RECIPES["fp8_delayed"](fp8_mha=True)
    one, two = core(), core()
    for step in range(3):
        run(one, recipe, step)
        run(two, recipe, step)
        q, k, v = sequences(2, 6, 6, dtype=torch.float32)
        with torch.no_grad(), cg.autocast(recipe=recipe):
            two(q * 100, k, v)
    state = one.state_dict()
    assert [str(key) for key in state] == ["_extra_state"]
    for mode, used in {"forward": [0, 1, 2, 3, 6], "backward": [0, 2, 4]}.items():
        scale = one._learned[mode].scale
        assert [i for i, value in enumerate(scale) if value != 1] == used
    assert all(torch.equal(a, b) for a, b in zip(run(one, recipe, 9), run(two, recipe, 9), strict=True))
    three = core()
    three.load_state_dict(two.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(run(three, recipe, 10), run(two, recipe, 10), strict=True))


@pytest.mark.parametrize("family", ["fp8_delayed", "nvfp4"])
def test_recomputation_is_bitwise_the_same(family):
    """With dropout, stochastic rounding of gradients and scales that change between the passes."""
    results = []
    for recompute in (False, True):
        layer, recipe = core(attention_dropout=0.3), RECIPES[family](fp8_dpa=True)
        results.append([run(layer, recipe, step, checkpoint_core_attention=recompute) for step in range(3)])
    for plain, again in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_calibration_takes_statistics_and_rounds_nothing():
    layer, recipe = core(), RECIPES["fp8_delayed"](fp8_dpa=True)
    q, k, v = sequences(2, 6, 6, dtype=torch.float32)
    with cg.autocast(enabled=False, calibrating=True, recipe=recipe):
        y = layer(q, k, v)
    torch.testing.assert_close(y, core()(q, k, v))
    history = layer._learned["forward"].amax_history
    for slot, x in enumerate((q, k, v)):
        assert history[:, slot].max() == x.abs().max()
