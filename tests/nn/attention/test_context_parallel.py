"""Sequences that are shared by 2 and by 4 ranks: outputs and gradients are those of one process.

Most cases are float64, and differ from one process by the order of sums only: 1e-12 of numbers around 1 leaves ample
room. Each number of ranks is started once, and computes all cases.
"""

import copy
import functools
import re

import pytest
import torch
import torch.distributed as dist

import crossgrain as cg
from crossgrain import recipe as recipes

from ...common import ranks
from ...common.attention_reference import batched, gradients, may_look

pytestmark = pytest.mark.xdist_group("context_parallel")  # the ranks are started once

HOW = ["p2p", "all_gather", "a2a"]
SUM_ORDER = {"rtol": 0, "atol": 1e-12}
THD = torch.tensor([0, 8, 24])  # two sequences of 8 and 16 tokens, of which 7 and 11 are real
REAL = torch.tensor([0, 7, 18])
BY_LENGTH = {"cu_seqlens_q": torch.tensor([0, 16, 27]), "cu_seqlens_kv": torch.tensor([0, 16, 27])}
PACKED = {"cu_seqlens_q": REAL, "cu_seqlens_kv": REAL, "cu_seqlens_q_padded": THD, "cu_seqlens_kv_padded": THD}

# By name: options of the layer, and of the call. Sequences have 16 tokens, 8 heads on 4 groups.
CASES = {
    "causal": ({}, {}),
    "no mask, sbhd": ({"attn_mask_type": "no_mask", "qkv_format": "sbhd"}, {}),
    "window": ({"window_size": (3, 0)}, {}),
    "window to both sides": ({"attn_mask_type": "no_mask", "window_size": (2, 1)}, {}),
    "bottom right": ({"attn_mask_type": "causal_bottom_right"}, {}),
    "off-by-one": ({"softmax_type": "off-by-one", "attn_mask_type": "no_mask"}, {}),
    "learnable": ({"softmax_type": "learnable"}, {}),
    "padding": ({"attn_mask_type": "padding_causal"}, BY_LENGTH),
    "padding at the end": ({"attn_mask_type": "padding_causal_bottom_right", "qkv_format": "sbhd"}, BY_LENGTH),
    "packed": ({"attn_mask_type": "padding_causal", "qkv_format": "thd"}, PACKED),
    "packed, sink": ({"attn_mask_type": "padding", "qkv_format": "thd", "softmax_type": "learnable"}, PACKED),
    "channels of values": ({"kv_channels": (8, 4)}, {}),
    "largest scores": ({"return_max_logit": True}, {}),
    "recomputed": ({"softmax_type": "learnable"}, {"checkpoint_core_attention": True}),
    "float32": ({"dtype": torch.float32}, {}),
}
FORMATS = {
    "mxfp8": lambda: recipes.MXFP8BlockScaling(fp8_mha=True),
    "fp8": lambda: recipes.Float8CurrentScaling(fp8_dpa=True),
    "hybrid": lambda: "all: hp, attention: nvfp4, attention.s: fp8, attention.dp: mxfp8",
}


GATHERED = {  # no format for the gradients of keys and values
    "mxfp8 of operands": lambda: recipes.MXFP8BlockScaling(fp8_dpa=True),
    "fp8": FORMATS["fp8"],
    "hybrid of operands": lambda: (
        "all: hp, attention: nvfp4, attention.s: fp8, attention.dp: mxfp8, attention.o: hp, attention.dqkv: hp"
    ),
}
FORMATS_BY_NAME = FORMATS | GATHERED
OF_QUERIES = ("causal", "no mask, sbhd", "window", "learnable", "padding", "packed", "recomputed", "largest scores")


def chunks(size, rank, count):
    """The tokens of a rank, by loops: chunk ``rank`` from the start and from the end."""
    length = size // (2 * count)
    return [t for chunk in (rank, 2 * count - 1 - rank) for t in range(chunk * length, (chunk + 1) * length)]


def own(fmt, rank, count):
    """The tokens of a rank, and the dimension they are in."""
    if fmt != "thd":
        return chunks(16, rank, count), 1 if fmt == "bshd" else 0
    return [t + start for start, size in ((0, 8), (8, 16)) for t in chunks(size, rank, count)], 0


def layer_and_inputs(options, dtype=torch.float64):
    torch.manual_seed(3)
    options = {"qkv_format": "bshd", "kv_channels": 8, "num_gqa_groups": 4, **options}
    dtype = options.pop("dtype", dtype)
    layer = cg.DotProductAttention(8, **options).to(dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    before = {"bshd": (2, 16), "sbhd": (16, 2), "thd": (24,)}[options["qkv_format"]]
    channels = options["kv_channels"]
    d_v = channels if isinstance(channels, int) else channels[1]
    shapes = ((8, 8), (4, 8), (4, d_v))
    q, k, v = (torch.randn(*before, *shape, dtype=dtype) for shape in shapes)
    return layer, (q, k, v), torch.randn(*before, 8 * d_v, dtype=dtype)


def step(layer, inputs, dy, recipe=None, **options):
    """Output, gradients and perhaps the largest scores."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with cg.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(*inputs, **options)
    y, *largest = y if isinstance(y, tuple) else (y,)
    found = gradients(y, dy, *inputs, *layer.parameters())
    return {"along": [y.detach(), *found[:3]], "summed": list(found[3:]), "same": largest}


@functools.cache
def of_one_process(name, recipe=None):
    options, call = CASES[name]
    layer, inputs, dy = layer_and_inputs(options, torch.float64 if recipe is None else torch.float32)
    return step(layer, inputs, dy, None if recipe is None else FORMATS_BY_NAME[recipe](), **call)


def work(rank, count):
    found = {}

    def part(name, how, recipe=None, group=None):
        options, call = CASES[name]
        layer, inputs, dy = layer_and_inputs(options, torch.float64 if recipe is None else torch.float32)
        group = group or dist.group.WORLD
        at, size = dist.get_rank(group), dist.get_world_size(group)
        tokens, dim = own(options.get("qkv_format", "bshd"), at, size)
        layer.set_context_parallel_group(group, dist.get_process_group_ranks(group), None, how)
        inputs, dy = (
            [x.index_select(dim, torch.tensor(tokens)) for x in inputs],
            dy.index_select(dim, torch.tensor(tokens)),
        )
        return step(layer, inputs, dy, None if recipe is None else FORMATS_BY_NAME[recipe](), **call)

    for how in HOW:
        for name in CASES:
            found[name, how] = part(name, how)
    for recipe in FORMATS:
        found["causal", "a2a", recipe] = part("causal", "a2a", recipe)
    for recipe in GATHERED:
        found["whole blocks", recipe] = part_of_blocks(GATHERED[recipe], count, rank)
        for name in OF_QUERIES:
            found[name, "all_gather", recipe] = part(name, "all_gather", recipe)
    if count == 4:  # two groups that are not of neighbours, at the same time
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        for how in HOW:
            found["causal", how, "group"] = part("causal", how, group=groups[rank % 2])
    return found


def with_blocks(count):
    """Causal attention in which every chunk is a block of 32 tokens."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 64 * count, heads, 32) for heads in (2, 1, 1))
    options = {"qkv_format": "bshd", "num_gqa_groups": 1, "attn_mask_type": "causal"}
    return cg.DotProductAttention(2, 32, **options), (q, k, v), torch.randn(1, 64 * count, 64)


def part_of_blocks(recipe, count, rank):
    layer, inputs, dy = with_blocks(count)
    layer.set_context_parallel_group(dist.group.WORLD, list(range(count)), None, "all_gather")
    tokens = chunks(64 * count, rank, count)
    return step(layer, [x[:, tokens] for x in inputs], dy[:, tokens], recipe())


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    return ranks.run(work, request.param, tmp_path_factory.mktemp("ranks"), request.param)


def assembled(results, key, fmt):
    """What the ranks have, put together."""
    found = [one[key] for one in results]
    wholes = []
    for parts in zip(*(one["along"] for one in found), strict=True):
        dim = own(fmt, 0, 1)[1]
        shape = [size * len(results) if axis == dim else size for axis, size in enumerate(parts[0].shape)]
        whole = parts[0].new_full(shape, torch.nan)
        for rank, part in enumerate(parts):
            whole.index_copy_(dim, torch.tensor(own(fmt, rank, len(results))[0]), part)
        wholes.append(whole)
    summed = [sum(parts) for parts in zip(*(one["summed"] for one in found), strict=True)]
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one["same"], found[0]["same"], strict=True))
    return [*wholes, *summed, *found[0]["same"]]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_does(results, name, how):
    """fp32 sums of 16 numbers around 1, in another order: 2e-6 is a few units in the last place of the largest."""
    exact = of_one_process(name)
    expected = [*exact["along"], *exact["summed"], *exact["same"]]
    close = {"rtol": 0, "atol": 2e-6} if name == "float32" else SUM_ORDER
    for mine, theirs in zip(
        assembled(results, (name, how), CASES[name][0].get("qkv_format", "bshd")), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("recipe", FORMATS)
def test_formats_give_the_bits_of_one_process(results, recipe):
    """Every rank has whole sequences of its heads, and one scale per tensor is that of all heads."""
    exact = of_one_process("causal", recipe)["along"]
    assert not torch.equal(exact[0], of_one_process("causal")["along"][0].float())
    for mine, theirs in zip(assembled(results, ("causal", "a2a", recipe), "bshd"), exact, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("recipe", GATHERED)
@pytest.mark.parametrize("name", OF_QUERIES)
def test_queries_on_gathered_keys_in_formats_are_those_of_one_process(results, name, recipe):
    """The output has the same bits. dQ is a sum of fp32 numbers around 1: 2e-6 is a few units in its last place."""
    exact, fmt = of_one_process(name, recipe), CASES[name][0].get("qkv_format", "bshd")
    output, dq, *_ = assembled(results, (name, "all_gather", recipe), fmt)
    assert torch.equal(output, exact["along"][0])
    torch.testing.assert_close(dq, exact["along"][1], rtol=0, atol=2e-6)


@pytest.mark.parametrize("recipe", GATHERED)
def test_gathered_keys_in_formats_give_the_numbers_of_one_process(results, recipe):
    """If chunks are whole blocks. Gradients are sums of up to 256 fp32 numbers around 1, in another order."""
    count = len(results)
    layer, inputs, dy = with_blocks(count)
    exact = step(layer, inputs, dy, GATHERED[recipe]())["along"]
    for at, theirs in enumerate(exact):
        mine = torch.empty_like(theirs)
        for rank, one in enumerate(results):
            mine[:, chunks(64 * count, rank, count)] = one["whole blocks", recipe]["along"][at]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_groups_of_some_ranks(results, how):
    if len(results) == 4:
        for group in (results[0::2], results[1::2]):
            for mine, theirs in zip(
                assembled(group, ("causal", how, "group"), "bshd"), of_one_process("causal")["along"], strict=True
            ):
                torch.testing.assert_close(mine, theirs, **SUM_ORDER)


def test_one_process_is_right():
    """What ranks are compared with, against attention written out."""
    layer, (q, k, v), _ = layer_and_inputs({"softmax_type": "learnable"})
    exact = batched(q, k, v, [may_look(16, 16, causal=True)] * 2, sink=layer.softmax_offset)
    torch.testing.assert_close(of_one_process("learnable")["along"][0], exact.detach(), **SUM_ORDER)


# ---- modules ------------------------------------------------------------------------------------------


def modules():
    torch.manual_seed(5)
    shared = {"attention_dropout": 0.0, "params_dtype": torch.float64, "num_gqa_groups": 2, "softmax_type": "learnable"}
    return {
        "attention": cg.MultiheadAttention(16, 4, qkv_format="bshd", **shared).double(),
        "decoder": cg.TransformerLayer(
            16, 24, 4, hidden_dropout=0.0, layer_type="decoder", rotary_pos_interleaved=True, **shared
        ).double(),
        "packed": cg.TransformerLayer(
            16, 24, 4, hidden_dropout=0.0, attn_input_format="thd", self_attn_mask_type="padding_causal", **shared
        ).double(),
    }


def module_step(name, module, how=None, rank=0, count=1):
    """Output, gradient of the input, and those of the parameters."""
    torch.manual_seed(6)
    fmt = {"attention": "bshd", "decoder": "sbhd", "packed": "thd"}[name]
    shape = {"bshd": (2, 16, 16), "sbhd": (16, 2, 16), "thd": (24, 16)}[fmt]
    x, dy, encoder_output = (torch.randn(*shape, dtype=torch.float64) for _ in range(3))
    tokens, dim = own(fmt, rank, count)
    tokens = torch.tensor(tokens)
    x = x.index_select(dim, tokens).requires_grad_()
    options = {"rotary_pos_emb": cg.RotaryPositionEmbedding(4, interleaved=name == "decoder")(16)}
    if name == "decoder":
        options["encoder_output"] = encoder_output.index_select(dim, tokens)
    if name == "packed":
        options |= PACKED
    if how is not None:
        module.set_context_parallel_group(dist.group.WORLD, None, None, how)
    y = module(x, **options)
    found = gradients(y, dy.index_select(dim, tokens), x, *module.parameters())
    return {"along": [y.detach(), found[0]], "summed": list(found[1:]), "same": [], "format": fmt}


def module_work(rank, count):
    return {
        (name, how): module_step(name, module, how, rank, count) for name, module in modules().items() for how in HOW
    }


def test_modules(tmp_path):
    """Attention with rotary positions, a decoder with cross attention, packed sequences; float64."""
    results = ranks.run(module_work, 2, tmp_path, 2)
    for name, module in modules().items():
        exact = module_step(name, module)
        for how in HOW:
            mine = assembled(results, (name, how), exact["format"])
            for a, b in zip(mine, [*exact["along"], *exact["summed"]], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


# ---- errors -------------------------------------------------------------------------------------------


def errors(rank):
    world, q = dist.group.WORLD, torch.randn(2, 6, 4, 8)
    cu = torch.tensor([0, 8])

    def message(options=None, call=None, inputs=(q, q, q), how="p2p", group=world):
        options = {"kv_channels": 8, "qkv_format": "bshd", "cp_group": group, **(options or {})}
        layer = cg.DotProductAttention(inputs[0].shape[-2], **options)
        layer.cp_comm_type = how
        return ranks.error_of(lambda: layer(*inputs, **(call or {})))

    formats = recipes.MXFP8BlockScaling(fp8_dpa=True)
    with cg.autocast(recipe=formats):
        found = {"formats": message()}
    with cg.autocast(recipe=recipes.MXFP8BlockScaling(fp8_mha=True)):
        found["gradients"] = message(how="all_gather")
    padding = {"attn_mask_type": "padding"}
    single = dist.new_group([0]), dist.new_group([1])
    return found | {
        "dropout": message({"attention_dropout": 0.1}),
        "arbitrary": message({"attn_mask_type": "arbitrary"}),
        "cache": message(call={"inference_params": cg.InferenceParams(2, 8, 4, 8)}),
        "mask": message(padding, {"attention_mask": torch.zeros(2, 1, 1, 6)}),
        "no lengths": message(padding),
        "lengths": message(padding, {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}),
        "chunks": message(inputs=(q[:, :3],) * 3),
        "heads": message(inputs=(q[:, :, :3],) * 3, how="a2a"),
        "ranks": message({"cp_global_ranks": [1, 0]}),
        "tokens": message(
            {"qkv_format": "thd", **padding}, {"cu_seqlens_q": cu, "cu_seqlens_kv": cu}, inputs=(q[0],) * 3
        ),
        "copy": ranks.error_of(lambda: copy.deepcopy(cg.DotProductAttention(4, 8, cp_group=world))(q, q, q)),
        "copy of a copy": ranks.error_of(
            lambda: copy.deepcopy(copy.deepcopy(cg.DotProductAttention(4, 8, cp_group=world)))
        ),
        "one rank": message(inputs=(q[:, :3],) * 3, group=single[rank]),
    }


def test_what_is_refused(tmp_path):
    for found in ranks.run(errors, 2, tmp_path):
        assert found.pop("one rank") is None
        assert found.pop("copy of a copy") is None
        expected = {
            "formats": ("NotImplementedError", "not supported with cp_comm_type='p2p'.* Use 'a2a' or 'all_gather'"),
            "gradients": ("NotImplementedError", "gradients of keys and values .* cp_comm_type='all_gather'.*'a2a'"),
            "copy": ("RuntimeError", "is a copy of a layer .* call set_context_parallel_group"),
            "dropout": ("NotImplementedError", "attention_dropout"),
            "arbitrary": ("NotImplementedError", "arbitrary"),
            "cache": ("NotImplementedError", "inference_params"),
            "mask": ("NotImplementedError", "attention_mask; give the lengths of the whole sequences"),
            "no lengths": ("ValueError", "needs cu_seqlens_q and cu_seqlens_kv of the whole"),
            "lengths": ("ValueError", "do not fit a batch of 2 sequences of at most 12 tokens on 2 ranks"),
            "chunks": (
                "ValueError",
                r"sequences of \[6\] tokens cannot be cut into 2 equal chunks for each of 2 ranks",
            ),
            "heads": ("ValueError", "not possible for 3 heads of queries"),
            "ranks": ("ValueError", r"cp_global_ranks=\[1, 0\], but the ranks of cp_group are \[0, 1\]"),
            "tokens": ("ValueError", "each of 2 ranks has 6 tokens, but cu_seqlens.* ends at 8 tokens"),
        }
        assert found.keys() == expected.keys()
        for name, (kind, words) in expected.items():
            assert found[name] is not None, name
            assert found[name][0] == kind
            assert re.search(words, found[name][1]), found[name]
