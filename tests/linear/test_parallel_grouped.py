"""Grouped layers that ranks share, against whole ones in one process; what is exact is said in the tests of Linear."""

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import recipe as recipes
from crossgrain.distributed import TokenExchange

from ..common.ranks import error_of, run
from .test_parallel import RECIPES, assert_whole, exact_numbers, part, random_numbers

RANKS, GROUPS = 2, 3
SIZES = [20, 0, 44]
CUTS = {"column": {"y": 1, "dx": None, "dw": 1, "db": 1}, "row": {"y": None, "dx": 1, "dw": 2, "db": None}}
SUMMED = {"column": {"dx"}, "row": {"y"}}
MODES = pytest.mark.parametrize("mode", ["column", "row"])
MXFP8 = recipes.MXFP8BlockScaling()
OPTIONS = {
    "one parameter": {"single_grouped_weight": True, "single_grouped_bias": True},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "delayed": {"delay_wgrad_compute": True},
    "kept quantized": {},
    "empty": {},
    "bias beside": {"return_bias": True},
}


def tensors(name, numbers, sizes=SIZES):
    """x, weights, biases and dy of the whole layer."""
    k = n = RANKS * (128 if name in ("fp8_block", "per_gemm") else 32)
    shapes = ((sum(sizes), k), (GROUPS * n, k), (GROUPS * n, 1), (sum(sizes), n))
    four_bits = name in ("nvfp4", "hybrid", "row_scaled")
    x, w, b, dy = (numbers(*shape, seed=seed, four_bits=four_bits) for seed, shape in enumerate(shapes))
    return x, w.view(GROUPS, n, k), b.view(GROUPS, n), dy


def layer_with(w, b, k, n, **options):
    layer = cg.GroupedLinear(GROUPS, k, n, **options)
    with torch.no_grad():
        for names, values in ((layer.weight_names, w), (layer.bias_names, b)):
            for name, value in zip(names, [values] if len(names) == 1 else values, strict=True):
                getattr(layer, name).copy_(value)
                getattr(layer, name).main_grad = torch.zeros(value.shape)
    return layer


def shared_layer(rank, mode, w, b, **options):
    k, n = w.shape[2], w.shape[1]
    if mode == "column":
        w, b = part(w, rank, RANKS, 1), part(b, rank, RANKS, 1)
    else:
        w = part(w, rank, RANKS, 2)
    return layer_with(w, b, k, n, parallel_mode=mode, tp_group=dist.group.WORLD, **options)


def parts_of_step(rank, mode, x, dy):
    return (x, part(dy, rank, RANKS, 1)) if mode == "column" else (part(x, rank, RANKS, 1), dy)


def step(layer, x, dy, recipe, sizes=SIZES):
    """Two steps, so that delayed scaling has a scale; results of the second."""
    for _ in range(2):
        x = x.detach().clone().requires_grad_()
        layer.zero_grad()
        with cg.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, sizes)
        y, biases = y if layer.return_bias else (y, None)
        y.backward(dy)
        layer.backward_dw()
    weights = [getattr(layer, name) for name in layer.weight_names]
    dw = [weight.main_grad if layer.fuse_wgrad_accumulation else weight.grad for weight in weights]
    db = biases or [getattr(layer, name).grad for name in layer.bias_names]
    shapes = {"dw": (GROUPS, layer.out_features, layer.in_features), "db": (GROUPS, layer.out_features)}
    found = {"dw": torch.stack(list(dw)), "db": torch.stack([bias.detach() for bias in db])}
    return {"y": y.detach(), "dx": x.grad} | {key: value.view(shapes[key]) for key, value in found.items()}


def put_together(parts, mode):
    whole = {}
    for key, dim in CUTS[mode].items():
        pieces = [results[key] for results in parts]
        assert dim is not None or all(torch.equal(piece, pieces[0]) for piece in pieces), key
        whole[key] = pieces[0] if dim is None else torch.cat(pieces, dim)
    return whole


# ---- recipes -------------------------------------------------------------------------------------------


CASES = [(name, numbers) for name in RECIPES for numbers in (exact_numbers, random_numbers)]


@pytest.fixture(scope="module")
def expected():
    """Of one process, which also loads the kernels, before it is forked."""
    found = {}
    for name, numbers in CASES:
        x, w, b, dy = tensors(name, numbers)
        found[name, numbers] = step(layer_with(w, b, *w.shape[:0:-1]), x, dy, RECIPES[name])
    return found


def _shared(rank, mode):
    found = {}
    for name, numbers in CASES:
        x, w, b, dy = tensors(name, numbers)
        layer = shared_layer(rank, mode, w, b)
        found[name, numbers.__name__] = step(layer, *parts_of_step(rank, mode, x, dy), RECIPES[name])
    return found


@MODES
def test_two_ranks_compute_what_one_does(tmp_path, expected, mode):
    parts = run(_shared, RANKS, tmp_path, mode)
    for name, numbers in CASES:
        found = put_together([results[name, numbers.__name__] for results in parts], mode)
        assert_whole(found, expected[name, numbers], SUMMED[mode], numbers is exact_numbers, (name, numbers.__name__))


# ---- options -------------------------------------------------------------------------------------------


def sizes_of(name):
    return [0] * GROUPS if name == "empty" else SIZES


def of_options(name, make):
    x, w, b, dy = tensors("mxfp8", exact_numbers, sizes_of(name))
    with cg.quantized_model_init(name == "kept quantized", recipe=MXFP8):
        layer, x, dy = make(x, w, b, dy, OPTIONS[name])
    return step(layer, x, dy, MXFP8, sizes_of(name))


def _options(rank, mode):
    def make(x, w, b, dy, options):
        return shared_layer(rank, mode, w, b, **options), *parts_of_step(rank, mode, x, dy)

    collectives, reduce = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kinds: collectives.append(args) or reduce(*args, **kinds)
    try:
        found = {name: of_options(name, make) for name in OPTIONS}
    finally:
        dist.all_reduce = reduce
    return found, len(collectives)


@MODES
def test_options(tmp_path, mode):
    def make(x, w, b, dy, options):
        return layer_with(w, b, *w.shape[:0:-1], **options), x, dy

    alone = {name: of_options(name, make) for name in OPTIONS}
    parts = run(_options, RANKS, tmp_path, mode)
    for name, whole in alone.items():
        found = put_together([results[name] for results, _ in parts], mode)
        assert all(torch.equal(found[key], whole[key]) for key in whole), name
    assert [count for _, count in parts] == [2 * len(OPTIONS)] * RANKS, "one sum in each step, whatever the groups"


KEPT = [(name, packed) for name in ("fp8_current", "nvfp4", "hybrid") for packed in (False, True)]


def kept(name, packed, make):
    x, w, b, dy = tensors(name, random_numbers)
    with cg.quantized_model_init(recipe=RECIPES[name]):
        layer, x, dy = make(x, w, b, dy, {"single_grouped_weight": packed})
    assert isinstance(getattr(layer, layer.weight_names[0]), cg.QuantizedTensor)
    return step(layer, x, dy, RECIPES[name])


def _kept(rank, mode):
    def make(x, w, b, dy, options):
        return shared_layer(rank, mode, w, b, **options), *parts_of_step(rank, mode, x, dy)

    return {case: kept(*case, make) for case in KEPT}


@MODES
def test_weights_that_are_kept_quantized_have_scales_of_the_whole(tmp_path, mode):
    def make(x, w, b, dy, options):
        return layer_with(w, b, *w.shape[:0:-1], **options), x, dy

    alone = {case: kept(*case, make) for case in KEPT}
    parts = run(_kept, RANKS, tmp_path, mode)
    for case, whole in alone.items():
        assert_whole(put_together([results[case] for results in parts], mode), whole, SUMMED[mode], False, case)


def test_which_part_a_rank_has():
    column = cg.GroupedLinear(2, 8, 12, parallel_mode="column", tp_size=2)
    assert (column.in_features, column.out_features) == (8, 6)
    assert column.weight1.shape == (6, 8) and column.bias1.shape == (6,)
    assert column.weight1.tensor_model_parallel and column.weight1.partition_dim == column.bias1.partition_dim == 0
    packed = {"single_grouped_weight": True, "single_grouped_bias": True}
    column = cg.GroupedLinear(2, 8, 12, parallel_mode="column", tp_size=2, **packed)
    assert column.weight.shape == (2, 6, 8) and column.weight.partition_dim == column.bias.partition_dim == 1
    row = cg.GroupedLinear(2, 8, 12, parallel_mode="row", tp_size=2, **packed)
    assert row.weight.shape == (2, 12, 4) and row.weight.partition_dim == 2
    assert row.bias.shape == (2, 12) and not hasattr(row.bias, "partition_dim")


def test_what_cannot_be_shared():
    with pytest.raises(ValueError, match="tp_size=2 needs a parallel_mode, 'row' or 'column'"):
        cg.GroupedLinear(2, 8, 8, tp_size=2)
    with pytest.raises(NotImplementedError, match="ranks do not share rows of groups"):
        cg.GroupedLinear(2, 8, 8, tp_size=2, parallel_mode="column", sequence_parallel=True)
    with pytest.raises(ValueError, match="in_features=9 cannot be divided evenly among tp_size=2"):
        cg.GroupedLinear(2, 9, 8, tp_size=2, parallel_mode="row")
    waiting = cg.GroupedLinear(1, 8, 8, tp_size=2, parallel_mode="row")
    with pytest.raises(RuntimeError, match="call set_tensor_parallel_group"):
        waiting(torch.randn(2, 4), [2])


def _tokens(rank):
    """Of a row-parallel layer a rank has some columns of the tokens: no other rank could make their scales."""
    layers = {mode: cg.GroupedLinear(1, 64, 64, parallel_mode=mode, tp_group=dist.group.WORLD) for mode in CUTS}
    alone = dist.new_group([rank], use_local_synchronization=True)
    with cg.autocast(recipe=recipes.as_recipe("mxfp8, input.source: dequantized")):
        column, row = (layers[mode].token_quantizer() for mode in ("column", "row"))
        sent = TokenExchange([5], alone).dispatch(exact_numbers(5, 64, seed=0, four_bits=False), column)
        y = layers["column"](sent, [5])
        refused = error_of(lambda: TokenExchange([5], alone).dispatch(torch.randn(5, 32), row))
    return list(y.shape), refused


def test_quantized_tokens(tmp_path):
    for shape, refused in run(_tokens, RANKS, tmp_path):
        assert shape == [5, 32]
        assert refused[0] == "ValueError" and "reduced over other ranks" in refused[1]
