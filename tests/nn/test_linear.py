"""Linear: shapes, dtypes, options, what is made and what is saved."""

import copy
import math

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE
from crossgrain import recipe as recipes
from crossgrain.gemm import gemm

from ..common.families import (
    PLAIN,
    assert_same_step,
    make_hybrid_recipe,
    make_recipe,
    reference,
    run,
    sizes,
    without_randomness,
)

MXFP8 = recipes.MXFP8BlockScaling()
QUANTIZED = [name for name in PLAIN if name != "identity"]  # a layer of identities makes no planes


@pytest.fixture(params=list(PLAIN))
def recipe(request):
    return make_recipe(request.param)


@pytest.fixture
def made(monkeypatch):
    """Every (tensor size, rowwise, columnwise) that a layer quantizes."""
    seen = []
    inside = []

    def spy_on(cls):
        real = cls.make_planes

        def spy(quantizer, matrix, *, rowwise, columnwise):
            if not inside:  # the children of a hybrid make planes for it
                seen.append((tuple(matrix.shape), rowwise, columnwise))
            inside.append(quantizer)
            try:
                return real(quantizer, matrix, rowwise=rowwise, columnwise=columnwise)
            finally:
                inside.pop()

        monkeypatch.setattr(cls, "make_planes", spy)

    for cls in (cg.Quantizer, cg.HybridQuantizer, cg.IdentityQuantizer):
        spy_on(cls)
    return seen


# ---- shapes and dtypes --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_a_recipe_it_is_torchs_linear(dtype):
    layer = cg.Linear(20, 12, params_dtype=dtype)
    x, dy = sizes(6, 20, 12, dtype)
    for mine, theirs in zip(run(layer, x, None, dy), reference(layer, x, dy), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradients_in_double_precision():
    layer = cg.Linear(5, 4, params_dtype=torch.float64)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, x),
                                    (x, layer.weight, layer.bias))  # fmt: skip


@pytest.mark.parametrize("lead", [(), (1,), (32,), (2, 16), (2, 1, 4, 4), (0,), (2, 0, 3)])
def test_leading_dimensions(recipe, lead):
    """A tensor of any shape is its flattened matrix; none of its rows is a special case."""
    torch.manual_seed(0)
    layer = cg.Linear(64, 96)
    m = math.prod(lead)
    x, dy = sizes(m)
    seed = torch.get_rng_state()
    flat = run(layer, x, recipe, dy)
    torch.set_rng_state(seed)
    if recipe.delayed():  # a step later the scales are others
        recipe = make_recipe("fp8_delayed")
        layer_again = cg.Linear(64, 96)
        layer_again.load_state_dict({k: v for k, v in layer.state_dict().items() if "extra" not in k})
        layer = layer_again
        torch.set_rng_state(seed)
    shaped = run(layer, x.reshape(*lead, 64), recipe, dy.view(*lead, 96))
    assert shaped.y.shape == (*lead, 96) and shaped.dx.shape == (*lead, 64)
    assert torch.equal(shaped.y.reshape(m, 96), flat.y) and torch.equal(shaped.dx.reshape(m, 64), flat.dx)
    assert torch.equal(shaped.dw, flat.dw) and torch.equal(shaped.db, flat.db)
    if m == 0:
        assert not shaped.dw.any() and not shaped.db.any()


@pytest.mark.parametrize("k, n", [(0, 32), (32, 0), (0, 0), (1, 1), (33, 17)])
def test_any_number_of_features(recipe, k, n):
    layer = cg.Linear(k, n, init_method=lambda w: w.normal_() if w.numel() else w)
    x, dy = sizes(5, k, n)
    step = run(layer, x, recipe, dy)
    assert step.y.shape == (5, n) and step.dx.shape == (5, k) and step.dw.shape == (n, k)
    for mine, exact in zip(step, reference(layer, x, dy), strict=True):
        assert not mine.numel() or (mine - exact).norm() <= 0.5 * exact.norm() + 1e-6


@pytest.mark.parametrize("m, k, n", [(1, 64, 96), (20, 64, 96), (32, 40, 96), (32, 64, 50), (7, 33, 17)])
@pytest.mark.parametrize("family", ["mxfp8", "nvfp4", "fp8_block", "fp8_current"])
def test_padding_is_exact(family, m, k, n):
    """The same numbers as a layer of whole blocks that is padded with zeros by hand."""
    block = 128 if family == "fp8_block" else 32
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # only the order of summation may differ
    recipe = without_randomness(make_recipe(family))  # random bits depend on the position
    layer = cg.Linear(k, n)
    x, dy = sizes(m, k, n)
    nn.init.normal_(layer.bias)
    big_m, big_k, big_n = (math.ceil(size / block) * block for size in (m, k, n))
    padded = cg.Linear(big_k, big_n)
    with torch.no_grad():
        for target, source in ((padded.weight, layer.weight), (padded.bias, layer.bias)):
            target.zero_()[tuple(slice(size) for size in source.shape)] = source
    big_x, big_dy = torch.zeros(big_m, big_k), torch.zeros(big_m, big_n)
    big_x[:m, :k], big_dy[:m, :n] = x.detach(), dy
    small, big = run(layer, x, recipe, dy), run(padded, big_x.requires_grad_(), recipe, big_dy)
    torch.testing.assert_close(small.y, big.y[:m, :n], **tolerance)
    torch.testing.assert_close(small.dx, big.dx[:m, :k], **tolerance)
    torch.testing.assert_close(small.dw, big.dw[:n, :k], **tolerance)
    torch.testing.assert_close(small.db, big.db[:n], **tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast_sets_the_activation_dtype(recipe, dtype):
    """fp32 parameters and inputs: the numbers are those of an input that was cast by hand."""
    layer = cg.Linear(64, 96)
    twin = copy.deepcopy(layer)  # with a history of its own
    x, dy = sizes()
    seed = torch.get_rng_state()
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype), cg.autocast(recipe=recipe):
        y = layer(x)
        y.backward(dy.to(dtype))  # also inside, where autocast would reach the GEMMs of backward
    assert y.dtype == dtype and x.grad.dtype == torch.float32 and layer.weight.grad.dtype == torch.float32
    mine = (y.detach(), x.grad.to(dtype), layer.weight.grad.clone(), layer.bias.grad.clone())
    torch.set_rng_state(seed)
    by_hand = run(twin, x.detach().to(dtype).requires_grad_(), recipe, dy.to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(mine, by_hand, strict=True))


def test_layouts_of_the_input_do_not_matter(recipe):
    layer = cg.Linear(64, 96)
    twin = copy.deepcopy(layer)  # with a history of its own
    row = torch.randn(1, 64)
    _, dy = sizes()
    for strided in (
        row.expand(32, 64),
        torch.randn(64, 32).t(),
        torch.randn(32, 128)[:, ::2],
        torch.randn(32, 96)[:, 8:72],
    ):
        seed = torch.get_rng_state()
        x = strided.detach().requires_grad_()
        with cg.autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy.t().contiguous().t())
        mine = (y.detach(), x.grad, layer.weight.grad.clone())
        layer.zero_grad()
        torch.set_rng_state(seed)
        plain = run(twin, strided.contiguous().requires_grad_(), recipe, dy)
        assert all(torch.equal(a, b) for a, b in zip(mine, plain[:3], strict=True))


def test_wrong_inputs_name_the_layer():
    layer = cg.Linear(64, 96, name="fc1")
    for wrong in (torch.randn(4, 63), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"fc1: the last dimension of the input .* must be 64"):
            layer(wrong)


# ---- what is made -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED, indirect=True)
@pytest.mark.parametrize("x_grad", [False, True])
@pytest.mark.parametrize("w_grad", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_no_plane_is_made_that_no_gemm_reads(recipe, made, x_grad, w_grad, grad):
    layer = cg.Linear(64, 96)
    layer.weight.requires_grad_(w_grad)
    x, dy = sizes()
    x = x.detach().requires_grad_(x_grad)
    # A copy that is kept for later calls of a frozen weight has both directions.
    not_kept = cg.settings.override(reuse_unchanged_weights=False)
    with not_kept, torch.set_grad_enabled(grad), cg.autocast(recipe=recipe):
        y = layer(x)
    assert made == [((32, 64), True, grad and w_grad), ((96, 64), True, grad and x_grad)]
    del made[:]
    if grad:
        y.backward(dy)
        assert made == ([((32, 96), x_grad, w_grad)] if x_grad or w_grad else [])
        assert (x.grad is not None) == x_grad and (layer.weight.grad is not None) == w_grad
        assert layer.bias.grad is not None


def test_requires_grad_may_change_between_steps(recipe):
    layer = cg.Linear(64, 96)
    twin = copy.deepcopy(layer)  # with a history of its own
    x, dy = sizes()
    rng = torch.get_rng_state()
    for w_grad, x_grad in ((False, True), (True, False), (True, True)):
        torch.set_rng_state(rng)
        both = run(twin, x, recipe, dy)
        layer.weight.requires_grad_(w_grad)
        torch.set_rng_state(rng)
        step = run(layer, x.detach().requires_grad_(x_grad), recipe, dy)
        assert torch.equal(step.y, both.y)
        assert step.dx is None if not x_grad else torch.equal(step.dx, both.dx)
        assert step.dw is None if not w_grad else torch.equal(step.dw, both.dw)


BYTES_PER_ELEMENT = {
    "mxfp8": 1.03125,
    "nvfp4": 0.5625,
    "fp8_current": 1.0,
    "fp8_delayed": 1.0,
    "fp8_block": 1.0127,
}  # its weight in tiles


@pytest.mark.parametrize("family", BYTES_PER_ELEMENT)
@pytest.mark.parametrize("hybrid", [False, True])
def test_saves_one_plane_of_each_operand(family, hybrid):
    """Of x [M, K] and W [N, K] together; anything else that were saved would show."""
    m, k, n = 256, 512, 384
    saved = []
    layer = cg.Linear(k, n)
    recipe = make_hybrid_recipe(family) if hybrid else make_recipe(family)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        cg.autocast(recipe=recipe),
    ):
        y = layer(torch.randn(m, k, requires_grad=True))
    per_element = sum(t.numel() * t.element_size() for t in saved) / (m * k + n * k)
    assert per_element == pytest.approx(BYTES_PER_ELEMENT[family], abs=0.01)
    weight_bytes = sum(t.untyped_storage().nbytes() for t in saved) / (m * k + n * k)
    assert weight_bytes == pytest.approx(BYTES_PER_ELEMENT[family], abs=0.02)  # no view keeps a larger buffer alive
    # What the graph holds besides would be invisible to hooks: there is none.
    held = [value for value in vars(y.grad_fn).values() if isinstance(value, torch.Tensor)]
    assert all(value is layer.weight for value in held)


def test_no_grad_saves_nothing(recipe):
    saved = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        torch.no_grad(),
        cg.autocast(recipe=recipe),
    ):
        y = cg.Linear(64, 96)(torch.randn(32, 64, requires_grad=True))
    assert not saved and not y.requires_grad


# ---- options ------------------------------------------------------------------------------------------


def test_return_bias(recipe):
    layer = cg.Linear(64, 96, return_bias=True)
    nn.init.normal_(layer.bias)
    x, _ = sizes()
    with torch.no_grad(), cg.autocast(recipe=recipe):
        y, bias = layer(x)
        layer.return_bias, layer.apply_bias = False, True
        added = layer(x)
    assert bias is layer.bias
    torch.testing.assert_close(y + bias, added)


@pytest.mark.parametrize("recipe", QUANTIZED, indirect=True)
@pytest.mark.parametrize("save_original", [False, True])
def test_save_original_input_gives_the_same_gradients(recipe, made, save_original):
    layer = cg.Linear(64, 96, save_original_input=save_original)
    x, dy = sizes()
    if recipe.delayed():
        if save_original:
            with (
                cg.autocast(recipe=recipe),
                pytest.raises(ValueError, match="DelayedScaling recipe is not supported with save_original_input"),
            ):
                layer(x)
        return
    recipe = without_randomness(recipe)
    step = run(layer, x, recipe, dy)
    assert made[0] == ((32, 64), True, not save_original)
    assert made[3:] == ([((32, 64), False, True)] if save_original else [])
    layer.save_original_input = False
    assert_same_step(step, run(layer, x, recipe, dy))


@pytest.mark.parametrize("why", ["derived", "delayed", "delayed columns"])
def test_save_original_input_is_off_where_backward_could_not_make_the_same_plane(made, why):
    def factory(role):
        row, column = (cg.MXFP8Quantizer(cg.DType.kFloat8E4M3) for _ in range(2))
        if role is None or role.tensor_type != "input":
            if why != "derived":
                return cg.DelayedScalingRequest()
            return cg.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)
        if why == "delayed":
            return cg.DelayedScalingRequest()
        if why == "derived":
            noisy = cg.FormatQuantizer("mxfp4", stochastic_rounding=True)
            return cg.HybridQuantizer(
                rowwise_quantizer=noisy, columnwise_quantizer=column, columnwise_source="rowwise_dequantized"
            )
        request = cg.DelayedScalingRequest()
        return cg.HybridQuantizer(rowwise_quantizer=request, columnwise_quantizer=request)

    layer = cg.Linear(64, 96, save_original_input=True)
    x, _ = sizes()
    with (
        cg.autocast(recipe=recipes.CustomRecipe(qfactory=factory)),
        pytest.warns(match="Ignoring save_original_input=True"),
    ):
        layer(x)
    assert made[0] == ((32, 64), True, True)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k, n", [(64, 96), (40, 50)])
@pytest.mark.parametrize("delay", [False, True])
def test_fused_accumulation(k, n, delay, main_dtype):
    layer = cg.Linear(k, n, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    plain = cg.Linear(k, n)
    plain.load_state_dict(layer.state_dict())
    before = torch.randn(n, k).to(main_dtype)
    layer.weight.main_grad = before.clone()
    x, dy = sizes(32, k, n)
    step = run(layer, x, MXFP8, dy)
    if delay:
        assert torch.equal(layer.weight.main_grad, before)
        layer.backward_dw()
    expected = run(plain, x, MXFP8, dy)
    assert step.dw is None and torch.equal(step.dx, expected.dx) and torch.equal(step.db, expected.db)
    torch.testing.assert_close(layer.weight.main_grad, (before.float() + expected.dw).to(main_dtype))
    layer.weight.main_grad.fill_(float("nan"))
    layer.weight.overwrite_main_grad = True
    run(layer, x, MXFP8, dy)
    if delay:
        layer.backward_dw()
    assert torch.equal(layer.weight.main_grad, expected.dw.to(main_dtype))
    layer.weight.grad_added_to_main_grad = False
    step = run(layer, x, MXFP8, dy)
    if delay:
        layer.backward_dw()
    assert layer.weight.grad_added_to_main_grad
    dummy = layer.weight.grad if delay else step.dw
    assert dummy.shape == (n, k) and not dummy.any()


def test_fused_accumulation_needs_somewhere_to_add_to():
    layer = cg.Linear(64, 96, fuse_wgrad_accumulation=True, name="fc1")
    x, dy = sizes()
    with pytest.raises(
        RuntimeError,
        match="fc1: fuse_wgrad_accumulation adds .* to weight.main_grad, but the weight has no main_grad",
    ):
        run(layer, x, MXFP8, dy)


def test_delayed_wgrad(recipe):
    layer = cg.Linear(64, 96, delay_wgrad_compute=True)
    plain = cg.Linear(64, 96)
    plain.load_state_dict(layer.state_dict())
    calls = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    total = torch.zeros(96, 64)
    assert not layer.need_backward_dw()
    for _ in range(3):
        x, dy = sizes()
        rng = torch.get_rng_state()
        with cg.autocast(recipe=recipe):
            layer(x).backward(dy)
        torch.set_rng_state(rng)
        total += run(plain, x, recipe, dy).dw
    assert layer.weight.grad is None and layer.need_backward_dw()
    layer.backward_dw()
    assert not layer.need_backward_dw() and calls == [1]
    torch.testing.assert_close(layer.weight.grad, total)
    layer.backward_dw()
    assert calls == [1]


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_split_parameters_are_one_gemm(fuse, delay):
    split = cg.Linear(
        64, 96, parameters_split={"q": 32, "kv_": 64}, fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay
    )
    assert [name for name, _ in split.named_parameters()] == ["q_weight", "q_bias", "kv_weight", "kv_bias"]
    whole = cg.Linear(64, 96)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([split.q_weight, split.kv_weight]))
        for part in (split.q_weight, split.kv_weight):
            part.main_grad = torch.zeros_like(part)
    x, dy = sizes()
    expected = run(whole, x, MXFP8, dy)
    for first in (True, False):
        with cg.autocast(recipe=MXFP8):
            y = split(x, is_first_microbatch=first)
        y.backward(dy)
        split.backward_dw()
        assert torch.equal(y, expected.y)
        for part, rows in zip((split.q_weight, split.kv_weight), expected.dw.split([32, 64]), strict=True):
            assert torch.equal(part.main_grad if fuse else part.grad, rows)
            part.grad, part.main_grad = None, torch.zeros_like(part)
        assert torch.equal(torch.cat([split.q_bias.grad, split.kv_bias.grad]), expected.db)
        split.zero_grad()
    with pytest.raises(ValueError, match="do not add up to 96"):
        cg.Linear(64, 96, parameters_split={"q": 32, "kv": 32})


@pytest.mark.parametrize("family", ["mxfp8", "fp8_current", "nvfp4"])
def test_quantized_output_and_gradient(family):
    recipe = make_recipe(family)
    layer, after = cg.Linear(64, 96), cg.Linear(96, 64)
    x, _ = sizes()
    x = x.detach().requires_grad_()
    with cg.autocast(recipe=recipe):
        y = layer(x, fp8_output=True)
        assert isinstance(y, cg.QuantizedTensor) and y.grad_fn is not None
        plain = layer(x)
        torch.testing.assert_close(y.dequantize(), plain, rtol=0.2, atol=plain.abs().max().item() / 6)
        after(y, fp8_grad=True).sum().backward()
    assert x.grad.isfinite().all() and layer.weight.grad.abs().sum() > 0
    with pytest.raises(RuntimeError, match="fp8_output and fp8_grad need a recipe"):
        layer(x, fp8_output=True)


def test_a_quantized_input_is_used_as_it_is_where_it_fits(made):
    layer = cg.Linear(64, 96)
    _, dy = sizes()
    x = cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)(torch.randn(32, 64)).requires_grad_()
    with cg.autocast(recipe=MXFP8):
        y = layer(x)
    assert [shape for shape, *_ in made] == [(96, 64)]
    y.backward(dy)
    w, g = (cg.MXFP8Quantizer(cg.DType.kFloat8E4M3)(t) for t in (layer.weight.detach(), dy))
    assert torch.equal(y, gemm("fprop", x.plane(ROWWISE), w.plane(ROWWISE)))
    assert torch.equal(layer.weight.grad, gemm("wgrad", g.plane(COLUMNWISE), x.plane(COLUMNWISE)))
    assert x.grad is not None and x.get_usages() == {"rowwise": True, "columnwise": True}
    not_kept = cg.settings.override(reuse_unchanged_weights=False)
    with not_kept, torch.no_grad(), cg.autocast(recipe=recipes.NVFP4BlockScaling()):
        layer(x)
    assert made[-2:] == [((32, 64), True, False), ((96, 64), True, False)]


def test_options_of_other_hardware_are_refused_when_they_are_on():
    cg.Linear(4, 4, ub_overlap_ag=False, ub_name="fc1", symmetric_ar_type=None)
    with pytest.raises(NotImplementedError, match="ub_overlap_ag"):
        cg.Linear(4, 4, ub_overlap_ag=True)
    with pytest.raises(TypeError, match="no option 'sequential'"):
        cg.Linear(4, 4, sequential=True)
    with pytest.raises(ValueError, match="tp_size=2 needs a parallel_mode"):
        cg.Linear(4, 4, tp_size=2)
