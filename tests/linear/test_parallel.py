"""Linear layers that ranks share, against the whole layer in one process.

A sum over ranks adds up in another order than one GEMM. Numbers for which every sum is exact tell whether the
rest is the same; with random ones, whatever is not such a sum is compared bit for bit.
"""

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import recipe as recipes

from ..common.families import make_recipe
from ..common.ranks import run

RECIPES = {
    "none": None,
    "fp8_current": make_recipe("fp8_current"),
    "fp8_delayed": make_recipe("fp8_delayed"),
    "mxfp8": make_recipe("mxfp8"),
    "fp8_block": make_recipe("fp8_block"),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "hybrid": recipes.as_recipe("fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4(rht)"),
    "per_gemm": recipes.as_recipe("fprop: fp8, dgrad: fp8_block, wgrad: nvfp4"),
    "row_scaled": recipes.CustomRecipe(qfactory=recipes.zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory),
}


def exact_numbers(*shape, seed, four_bits):
    """Few bits, so that fp32 holds the sums of products of what any format makes of them.

    With an amax of 5.25 the global scale of NVFP4, 6 * 448 / amax, is a power of two: scaled sums are exact too.
    """
    generator = torch.Generator().manual_seed(seed)
    halvings = torch.randint(0, 3, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (5.25 if four_bits else 7.0) * signs * 0.5**halvings


def random_numbers(*shape, seed, four_bits):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.logspace(-1, 1, shape[0]).view(-1, 1)


def sizes(name, ranks):
    """M, K, N: each rank has whole blocks."""
    block = 128 if name in ("fp8_block", "per_gemm") else 32
    return (ranks * block,) * 2 + (2 * ranks * block,)


def tensors(name, numbers, ranks, shape=None):
    m, k, n = shape or sizes(name, ranks)
    shapes = ((m, k), (n, k), (n, 1), (m, n))
    four_bits = name in ("nvfp4", "hybrid", "row_scaled")
    x, w, b, dy = (numbers(*shape, seed=seed, four_bits=four_bits) for seed, shape in enumerate(shapes))
    return x, w, b.view(-1), dy


def step(layer, x, dy, recipe, **options):
    """Two steps, so that delayed scaling has a scale; results of the second."""
    for _ in range(2):
        x = x.detach().clone().requires_grad_()
        with cg.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, **options)
        layer.zero_grad()
        y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


def with_weights(layer, w, b):
    with torch.no_grad():
        layer.weight.copy_(w)
        layer.bias.copy_(b)
    return layer


def part(tensor, rank, ranks, dim):
    return tensor.chunk(ranks, dim)[rank].contiguous()


def shared_layer(rank, ranks, mode, sequence_parallel, w, b, **options):
    n, k = w.shape
    layer = cg.Linear(
        k, n, parallel_mode=mode, tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel, **options
    )
    if mode == "column":
        return with_weights(layer, part(w, rank, ranks, 0), part(b, rank, ranks, 0))
    return with_weights(layer, part(w, rank, ranks, 1), b)


def parts_of_step(rank, ranks, mode, sequence_parallel, x, dy):
    """x and dy of a rank."""
    if mode == "column":
        return part(x, rank, ranks, 0) if sequence_parallel else x, part(dy, rank, ranks, 1)
    return part(x, rank, ranks, 1), part(dy, rank, ranks, 0) if sequence_parallel else dy


def on_ranks(rank, ranks, mode, sequence_parallel, cases):
    found = {}
    for name, numbers in cases:
        x, w, b, dy = tensors(name, numbers, ranks)
        layer = shared_layer(rank, ranks, mode, sequence_parallel, w, b)
        x, dy = parts_of_step(rank, ranks, mode, sequence_parallel, x, dy)
        found[name, numbers.__name__] = step(layer, x, dy, RECIPES[name])
    return found


def put_together(parts, mode, sequence_parallel):
    """The results of the whole layer from those of the ranks."""
    cut = {"y": 1, "dx": None, "dw": 0, "db": 0} if mode == "column" else {"y": None, "dx": 1, "dw": 1, "db": None}
    if sequence_parallel:
        cut["dx" if mode == "column" else "y"] = 0
    whole = {}
    for key, dim in cut.items():
        pieces = [results[key] for results in parts]
        if mode == "row" and sequence_parallel and key == "db":
            whole[key] = sum(pieces)  # which is why the parameter is marked
        elif dim is None:
            assert all(torch.equal(piece, pieces[0]) for piece in pieces), key
            whole[key] = pieces[0]
        else:
            whole[key] = torch.cat(pieces, dim)
    return whole


def assert_whole(found, expected, summed, exact, what):
    for key, mine in found.items():
        if exact or key not in summed:
            assert torch.equal(mine, expected[key]), (what, key)
        else:  # of as many fp32 roundings as there are terms, few go the same way
            error = (mine - expected[key]).abs().max() / expected[key].abs().max()
            assert error < 1e-5, (what, key, error)


CASES = [(name, numbers) for name in RECIPES for numbers in (exact_numbers, random_numbers)]


def whole_step(name, numbers, ranks):
    x, w, b, dy = tensors(name, numbers, ranks)
    return step(with_weights(cg.Linear(*reversed(w.shape)), w, b), x, dy, RECIPES[name])


@pytest.fixture(scope="module")
def expected():
    """Of one process, which also loads the kernels, before it is forked."""
    return {(name, numbers): whole_step(name, numbers, 2) for name, numbers in CASES}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_two_ranks_compute_what_one_does(tmp_path, expected, mode, sequence_parallel):
    parts = run(on_ranks, 2, tmp_path, 2, mode, sequence_parallel, CASES)
    summed = {"column": {"dx"}, "row": {"y", "db"} if sequence_parallel else {"y"}}[mode]
    for name, numbers in CASES:
        found = put_together([results[name, numbers.__name__] for results in parts], mode, sequence_parallel)
        assert_whole(found, expected[name, numbers], summed, numbers is exact_numbers, (name, numbers.__name__))
