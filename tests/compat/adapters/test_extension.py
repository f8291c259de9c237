"""GEMMs by layout, the extension's functions and the reference quantizers, over crossgrain's own."""

import pytest
import torch

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE, compat
from crossgrain.gemm import gemm
from crossgrain.quantizers.grouped_tensor import GroupedTensor

from ...common.quantizers import QUANTIZERS, assert_same_bytes, hybrid_of

te, tex = compat.transformer_engine.pytorch, compat.transformer_engine_torch
general_gemm = te.cpp_extensions.general_gemm
unwrap = te.cpp_extensions.gemm._unwrap_tensor

M, N, K = 64, 96, 128


def operands(name):
    x, w, dy = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    return [tensor if name is None else QUANTIZERS[name]()(tensor) for tensor in (x, w, dy)]


@pytest.mark.parametrize("name", [None, "fp8", "mxfp8", "nvfp4", "identity"])
def test_layouts_are_the_gemms_of_a_layer(name):
    x, w, dy = operands(name)

    def plane(tensor, direction):
        return tensor if name is None else tensor.plane(direction)

    cases = {
        "TN": (w, x, gemm("fprop", plane(x, ROWWISE), plane(w, ROWWISE))),
        "NN": (w, dy, gemm("dgrad", plane(dy, ROWWISE), plane(w, COLUMNWISE))),
        "NT": (x, dy, gemm("wgrad", plane(dy, COLUMNWISE), plane(x, COLUMNWISE))),
    }
    for layout, (a, b, expected) in cases.items():
        result, bias_gradient, gelu_in, extra = general_gemm(a, b, layout=layout)
        assert torch.equal(result, expected) and bias_gradient is gelu_in is extra is None
        out = torch.ones_like(expected)
        assert general_gemm(a, b, layout=layout, out=out, accumulate=True)[0] is out
        torch.testing.assert_close(out, expected + 1)
        turned = tex.generic_gemm(
            a, layout[0] == "T", b, layout[1] == "T", None, None, None, None, None, False, None, False
        )
        assert torch.equal(turned[0], expected)


def test_leading_dimensions_biases_and_outputs():
    x, w, bias = torch.randn(2, 32, K), torch.randn(N, K), torch.randn(N)
    y = general_gemm(w, x, bias=bias, out_dtype=torch.bfloat16)[0]
    assert y.shape == (2, 32, N) and y.dtype == torch.bfloat16
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w, bias).to(torch.bfloat16))
    dy = torch.randn(2, 32, N)
    dw, db, *_ = general_gemm(x, dy, layout="NT", grad=True, bias=bias)
    torch.testing.assert_close(dw, dy.flatten(0, 1).t() @ x.flatten(0, 1))
    torch.testing.assert_close(db, dy.sum((0, 1)))
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    quantized = general_gemm(w, x, quantization_params=quantizer)[0]
    assert_same_bytes(quantized, quantizer(general_gemm(w, x)[0]))


def test_gelu_in_a_gemm():
    x, w = torch.randn(M, K), torch.randn(N, K)
    y, _, before, _ = general_gemm(w, x, gelu=True)
    plain = x @ w.t()
    torch.testing.assert_close(before, plain)
    torch.testing.assert_close(y, torch.nn.functional.gelu(plain, approximate="tanh"))
    at = torch.randn(M, K, requires_grad=True)
    dy = torch.randn(M, N)
    dx = general_gemm(w, dy, layout="NN", gelu=True, gelu_in=at.detach(), grad=True)[0]
    (expected,) = torch.autograd.grad(torch.nn.functional.gelu(at, approximate="tanh"), at, dy @ w)
    torch.testing.assert_close(dx, expected)
    with pytest.raises(ValueError, match="gelu=True with grad=True needs gelu_in"):
        general_gemm(w, dy, layout="NN", gelu=True, grad=True)


def test_arguments_of_a_gemm_are_used_or_refused():
    x, w = torch.randn(2, M // 2, K), torch.randn(N, K)
    plain = general_gemm(w, x)[0]
    assert general_gemm(w, x, torch.bfloat16)[0].dtype == torch.bfloat16
    with pytest.raises(TypeError, match="out_dtype must be a torch.dtype, got"):
        general_gemm(w, x, torch.empty(0, dtype=torch.uint8))
    out = torch.empty(M, N)
    assert general_gemm(w, x, gelu=True, out=out)[0] is out
    torch.testing.assert_close(out, torch.nn.functional.gelu(plain.view(M, N), approximate="tanh"))
    quantizer = QUANTIZERS["mxfp8"]()
    kept = quantizer(torch.zeros(2, M // 2, N))
    for options in ({"quantization_params": quantizer}, {}):
        kept.quantize_(torch.zeros(2, M // 2, N))
        assert general_gemm(w, x, out=kept, **options)[0] is kept
        assert_same_bytes(kept, quantizer(plain))
    for options in ({"gelu": True}, {"quantization_params": quantizer}):
        with pytest.raises(ValueError, match="can be added to out|cannot be written to an out"):
            general_gemm(w, x, out=torch.zeros(M, N), accumulate=True, **options)
    with pytest.raises(ValueError, match="cannot be written to an out"):
        general_gemm(w, x, out=torch.zeros(M, N), quantization_params=quantizer)
    with pytest.raises(ValueError, match="beta is 0.5"):
        general_gemm(w, x, beta=0.5)


def test_the_last_arguments_of_a_generic_gemm_are_not_lost():
    x, w = torch.randn(M, K), torch.randn(N, K)
    first = (w, True, x, False, None, None, te.DType.kFloat32, None, te.DType.kBFloat16, False, None, False, None, 0)
    doubled = tex.generic_gemm(*first, False, False, None, None, None, False, 2.0, 0.0)[0]
    torch.testing.assert_close(doubled, 2 * (x @ w.t()))
    with pytest.raises(NotImplementedError, match="overlap"):
        tex.generic_gemm(*first, comm_overlap=object())


def test_formats_that_do_not_go_together_are_refused():
    x, w, dy = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    with pytest.raises(RuntimeError, match="have to be scaled alike"):
        general_gemm(QUANTIZERS["mxfp8"]()(w), QUANTIZERS["nvfp4"]()(x))
    hybrids = hybrid_of("mxfp8", "nvfp4")(x), hybrid_of("mxfp8", "mxfp8")(dy)
    with pytest.raises(RuntimeError, match="wgrad multiplies"):
        general_gemm(*hybrids, layout="NT")
    assert general_gemm(hybrid_of("mxfp8", "nvfp4")(w), hybrid_of("mxfp8", "mxfp8")(x))[0].shape == (M, N)
    with pytest.raises(RuntimeError, match="has no columnwise data"):
        general_gemm(cg.quantize(w, "mxfp8", columnwise=False), QUANTIZERS["mxfp8"]()(dy), layout="NN")
    with pytest.raises(ValueError, match="TN, NN, NT"):
        general_gemm(w, x, layout="TT")


def test_groups():
    weights, rows = [torch.randn(N, K) for _ in range(2)], torch.randn(M, K)
    parts = rows.split([24, 40])
    out = torch.empty(M, N)
    made, *_ = te.cpp_extensions.general_grouped_gemm(
        weights, parts, [out], None, torch.float32, m_splits=[24, 40], single_output=True
    )
    expected = [part @ weight.t() for part, weight in zip(parts, weights, strict=True)]
    assert made is out
    torch.testing.assert_close(out, torch.cat(expected))
    each = [torch.empty(24, N), torch.empty(40, N)]
    biases = [torch.randn(N) for _ in range(2)]
    made, *_ = te.cpp_extensions.general_grouped_gemm(
        weights, parts, each, None, torch.float32, bias=biases, use_bias=True
    )
    assert made[1] is each[1]
    torch.testing.assert_close(each[1], expected[1] + biases[1])


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_groups_in_one_memory(layout):
    rows = [32, 64]
    shapes = {"x": [(m, K) for m in rows], "w": [(N, K)] * 2, "dy": [(m, N) for m in rows]}
    plain = {name: [torch.randn(shape) for shape in group] for name, group in shapes.items()}
    groups = {
        name: GroupedTensor.make_grouped_tensor_with_shapes(2, shapes[name], QUANTIZERS["mxfp8"]()) for name in shapes
    }
    for name, group in groups.items():
        group.quantize(plain[name])
    left, right, made = {"TN": ("w", "x", "dy"), "NN": ("w", "dy", "x"), "NT": ("x", "dy", "w")}[layout]
    wanted = [
        general_gemm(a, b, layout=layout)[0]
        for a, b in zip(groups[left].quantized_tensors, groups[right].quantized_tensors, strict=True)
    ]
    out = GroupedTensor.make_grouped_tensor_with_shapes(2, shapes[made])
    multiply = te.cpp_extensions.general_grouped_gemm_for_grouped_tensor
    assert multiply(groups[left], groups[right], out, layout=layout) is out
    assert all(torch.equal(y, z) for y, z in zip(out.quantized_tensors, wanted, strict=True))
    scales = torch.tensor([2.0, 0.5])
    listed = [torch.ones_like(y) for y in wanted]
    multiply(groups[left], groups[right], listed, layout=layout, alpha=scales, beta=scales, accumulate=True)
    for y, z, scale in zip(listed, wanted, scales, strict=True):
        torch.testing.assert_close(y, scale * (z + 1))
    with pytest.raises(ValueError, match="accumulate"):
        multiply(groups[left], groups[right], out, layout=layout, beta=scales)


def test_what_a_gemm_unwraps(x):
    q = hybrid_of("mxfp8", "nvfp4")(x)
    assert unwrap(q, "rowwise") is q.rowwise_sub_storage and unwrap(q, "columnwise") is q.columnwise_sub_storage
    plain = torch.randn(2, 2)
    native = QUANTIZERS["mxfp8"]()(x)
    assert unwrap(plain, "rowwise") is plain and unwrap(native, "columnwise") is native
    assert torch.equal(unwrap(QUANTIZERS["identity"]()(x), "rowwise"), x)
    assert type(unwrap(QUANTIZERS["mxfp4"]()(x), "rowwise")) is torch.Tensor
    with pytest.raises(ValueError, match="rowwise or columnwise"):
        unwrap(q, "diagonal")
    q.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="no columnwise data"):
        unwrap(q, "columnwise")
    check = te.cpp_extensions.gemm._validate_native_gemm_output_quantizer
    check(None)
    check(QUANTIZERS["nvfp4"]())
    with pytest.raises(NotImplementedError, match="HybridQuantizer"):
        check(hybrid_of("mxfp8", "nvfp4"))


def test_quantizing(x):
    quantizer = QUANTIZERS["mxfp8"]()
    q = tex.quantize(x, quantizer)
    assert_same_bytes(q, quantizer(x))
    tex.quantize(x * 2, quantizer, q, torch.ones(1))
    assert_same_bytes(q, quantizer(x))
    assert tex.quantize(x * 2, quantizer, q) is q
    assert_same_bytes(q, quantizer(x * 2))
    assert torch.equal(tex.dequantize(q, te.DType.kFloat32), q.dequantize(dtype=torch.float32))
    sums, q = tex.bgrad_quantize(x, quantizer)
    assert torch.equal(sums, x.float().sum(0).to(x.dtype)) and isinstance(q, cg.MXFP8Tensor)
    parts = tex.split_quantize(x, [32, 96], [QUANTIZERS["mxfp8"](), QUANTIZERS["mxfp8"]()])
    assert_same_bytes(parts[1], quantizer(x[32:]))
    groups, dbias = te.module._split_quantization._split_quantize(
        x, [32, 96], [QUANTIZERS["mxfp8"](), QUANTIZERS["mxfp8"]()], torch.float32, compute_dbias=True
    )
    assert_same_bytes(groups[0], quantizer(x[:32].float()))
    split = te.module._split_quantization._split_quantize
    groups, none = split(x, [32, 96], [QUANTIZERS["mxfp8"](), QUANTIZERS["mxfp8"]()], torch.float32)
    assert none is None and isinstance(groups[0], cg.MXFP8Tensor)
    for quantizers in (None, [None, None]):
        groups, dbias_of_plain = split(x, [32, 96], quantizers, torch.float32, compute_dbias=True)
        assert torch.equal(groups[1], x[32:].float()) and torch.equal(dbias_of_plain[1], dbias[1])
    with pytest.raises(ValueError, match="quantizer count does not match the number of groups: 1 quantizers for 2"):
        split(x, [32, 96], [quantizer], torch.float32)
    hybrids = [hybrid_of("mxfp8", "nvfp4") for _ in range(2)]
    halves = te.module._split_quantization._split_quantize_hybrid(x, [32, 96], hybrids)
    assert_same_bytes(halves[1], hybrids[0](x[32:]))
    assert torch.equal(dbias[1], x[32:].float().sum(0))
    with pytest.raises(TypeError, match="needs a HybridQuantizer here, got HybridQuantizer, MXFP8Quantizer"):
        te.module._split_quantization._split_quantize_hybrid(x, [32, 96], [hybrids[0], quantizer])
    hybrids[1].set_usage(columnwise=False)
    for split in ("_split_quantize_hybrid", "_split_quantize_non_hybrid"):
        with pytest.raises(ValueError, match="mixed parent usage flags"):
            getattr(te.module._split_quantization, split)(x, [32, 96], hybrids)
    hybrids[0].set_usage(columnwise=False)
    halves = te.module._split_quantization._split_quantize_hybrid(x, [32, 96], hybrids)
    assert [half.get_usages() for half in halves] == [{"rowwise": True, "columnwise": False}] * 2


def test_quantizing_groups(x):
    sizes, quantizer = torch.tensor([32, 96]), QUANTIZERS["mxfp8"]()
    group = tex.group_quantize(x, quantizer, 2, sizes, tensor_offsets=None)
    assert isinstance(group, te.tensor.grouped_tensor.GroupedTensor)
    for member, part in zip(group.split_into_quantized_tensors(), x.split([32, 96]), strict=True):
        assert_same_bytes(member, quantizer(part))
    plain = tex.group_dequantize(group, te.DType.kFloat32)
    assert torch.equal(plain.rowwise_data.view(128, 256)[32:], quantizer(x[32:]).dequantize(dtype=torch.float32))
    group, sums = tex.bgrad_group_quantize(x, quantizer, 4)
    assert group.all_same_shape() and torch.equal(sums[1], x[32:64].float().sum(0).to(x.dtype))


def test_activations_and_their_gradients():
    functional = torch.nn.functional
    known = {
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
        "silu": functional.silu,
        "srelu": lambda x: functional.relu(x) ** 2,
        "swiglu": lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    }
    for name, function in known.items():
        x = torch.randn(32, 64, requires_grad=True)
        y = function(x)
        torch.testing.assert_close(getattr(tex, name)(x.detach(), None), y.detach())
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(getattr(tex, f"d{name}")(dy, x.detach(), None), dx)
    assert isinstance(tex.gelu(torch.randn(32, 32), QUANTIZERS["mxfp8"]()), cg.MXFP8Tensor)


def test_norms():
    x, w, b = torch.randn(8, 32, requires_grad=True), torch.randn(32), torch.randn(32)
    y, mean, rstd = tex.layernorm_fwd(x.detach(), w, b, 1e-5, None, None, te.DType.kFloat32, 0, False)
    expected = torch.nn.functional.layer_norm(x, (32,), w, b, 1e-5)
    torch.testing.assert_close(y, expected.detach())
    dy = torch.randn(8, 32)
    dx, _, db = tex.layernorm_bwd(dy, x.detach(), mean, rstd, w, 0, False)
    torch.testing.assert_close(dx, torch.autograd.grad(expected, x, dy)[0])
    torch.testing.assert_close(db, dy.sum(0))
    y, nothing, rstd = tex.rmsnorm_fwd(x.detach(), w, 1e-5, None, None, te.DType.kBFloat16, 0, False)
    expected = torch.nn.functional.rms_norm(x, (32,), w, 1e-5)
    assert nothing is None and torch.equal(y, expected.detach().to(torch.bfloat16))
    torch.testing.assert_close(
        tex.rmsnorm_bwd(dy, x.detach(), rstd, w, 0, False)[0], torch.autograd.grad(expected, x, dy)[0]
    )


def test_offsets_and_shares_of_sequences():
    sizes, (ends, starts) = tex.splits_to_offsets_multi(
        torch.tensor([2, 0, 3], dtype=torch.int32), "cpu", [1, 10], [False, True], [torch.int32, torch.int64]
    )
    assert sizes.dtype == torch.int64 and ends.tolist() == [2, 2, 5] and starts.tolist() == [0, 20, 20, 50]
    assert ends.dtype == torch.int32
    borders = torch.tensor([0, 8, 12])
    shares = [tex.thd_get_partitioned_indices(borders, 12, 2, rank).tolist() for rank in range(2)]
    assert shares == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    with pytest.raises(ValueError, match="pad them to multiples of 4"):
        tex.thd_get_partitioned_indices(torch.tensor([0, 10]), 10, 2, 0)


def test_a_step_of_delayed_scaling():
    history, scale = torch.zeros(4, 2), torch.ones(2)
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor([4.0, 0.0]), [history], [scale], "max", te.DType.kFloat8E4M3, 0
    )
    assert scale.tolist() == [112.0, 1.0] and history[-1].tolist() == [4.0, 0.0] and history[0].abs().max() == 0


# ---- reference quantizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile, rht", [((1, 16), False), ((16, 16), False), ((1, 16), True)])
def test_the_nvfp4_reference_has_the_bytes_of_the_quantizer(tile, rht, x):
    reference = te.custom_recipes.reference_nvfp4.NVFP4QuantizerRef(quant_tile_shape=tile, with_rht=rht)
    quantizer = cg.NVFP4Quantizer(with_2d_quantization=tile == (16, 16), with_rht=rht, with_post_rht_amax=rht)
    made, expected = reference(x), quantizer(x)
    assert torch.equal(made.data, expected._rowwise_data) and torch.equal(made.data_t, expected._columnwise_data)
    for scale, padded in ((made.scale, expected._rowwise_scale_inv), (made.scale_t, expected._columnwise_scale_inv)):
        assert scale.dtype == torch.float8_e4m3fn
        assert torch.equal(scale.view(torch.uint8), padded[: scale.shape[0], : scale.shape[1]])
    assert torch.equal(made.global_amax_row, expected._amax_rowwise) and made.original_shape == x.shape
    unpacked = te.custom_recipes.reference_utils.unpack_fp4(made.data)
    assert unpacked.shape == x.shape and torch.equal(te.custom_recipes.reference_utils.pack_fp4(unpacked), made.data)
    assert te.tensor.utils.is_custom(reference) and te.tensor.utils.is_custom(made)
    assert not te.tensor.utils.is_custom(quantizer) and not te.tensor.utils.is_custom(None)


@pytest.mark.parametrize("transposing", [False, True])
def test_the_fp8_reference_has_the_bytes_of_the_quantizer(transposing, x):
    with cg.settings.override(non_tn_fp8_gemm=not transposing):
        module = te.custom_recipes.reference_current_scaling
        made = module.CurrentScalingQuantizerRef(torch.float8_e5m2)(x)
        expected = cg.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2)(x)
        assert isinstance(made, module.CurrentScalingTensorRef) and made.data.dtype == torch.float8_e5m2
        assert torch.equal(made.data.view(torch.uint8), expected._data)
        assert torch.equal(made.data_t.view(torch.uint8), expected._data.t())
        assert torch.equal(made.scale, expected._scale_inv) and torch.equal(made.scale_t, expected._scale_inv)


def test_a_recipe_of_references_trains_like_the_other():
    x = torch.randn(32, 64)

    def factory(role):
        if role is not None and role.tensor_type == "weight":
            return cg.NVFP4Quantizer(with_2d_quantization=True)
        return cg.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)

    results = []
    for qfactory in (te.custom_recipes.reference_nvfp4.nvfp4_ref_rht_2d_factory, factory):
        torch.manual_seed(0)
        layer = te.Linear(64, 32)
        with te.autocast(recipe=cg.recipe.CustomRecipe(qfactory=qfactory)):
            y = layer(x)
        y.square().sum().backward()
        results.append((y.detach(), layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- small things ---------------------------------------------------------------------------------------------


def test_utilities():
    utils = te.utils
    assert (utils.ceil_div(7, 2), utils.round_up_to_nearest_multiple(33, 32)) == (4, 64)
    a, b = utils.split_tensor_along_dim(torch.arange(12).view(2, 6), 1, 2, contiguous_split_chunks=True)
    assert a.tolist() == [[0, 1, 2], [6, 7, 8]] and b.is_contiguous()
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        utils.split_tensor_along_dim(torch.zeros(2, 6), 1, 4)
    assert utils.cast_if_needed(None, torch.bfloat16) is None
    assert utils.cast_if_needed(torch.ones(2), torch.bfloat16).dtype == torch.bfloat16
    assert utils.canonicalize_dtype(None) == torch.float32
    big = torch.empty(1000, 1000)
    utils.scaled_init_method_normal(0.2, 8)(big)
    assert abs(big.std().item() - 0.05) < 1e-3
    masked = utils.attention_mask_func(torch.zeros(2), torch.tensor([True, False]))
    assert masked[0] < -1000 and masked[1] == 0
    q, k = te.attention._SplitAlongDim.apply(torch.randn(2, 6), 1, [4, 2])
    assert q.shape == (2, 4) and k.shape == (2, 2)
    assert te.is_bf16_available(return_reason=True) == (True, "")


def test_debug_state_resets():
    state = compat.transformer_engine.debug.pytorch.debug_state.TEDebugState
    assert (state.get_layer_count(), state.get_layer_count()) == (1, 2)
    state._reset()
    assert state.get_layer_count() == 1
    state._reset()


def test_queries_and_keys_are_turned_together():
    qkv, angles = torch.randn(5, 2, 3, 24), te.RotaryPositionEmbedding(8)(5)
    q, k, v = te.attention.rope.apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, [8, 8, 8])
    assert torch.equal(q, te.attention.apply_rotary_pos_emb(qkv[..., :8], angles, fused=True))
    assert torch.equal(k, te.attention.apply_rotary_pos_emb(qkv[..., 8:16], angles)) and torch.equal(v, qkv[..., 16:])
    options = {"cp_size": 2, "cp_rank": 1}
    angles = te.RotaryPositionEmbedding(8)(8)
    q, _, _ = te.attention.rope.apply_fused_qkv_rotary_pos_emb(qkv[:4], angles, angles, [8, 8, 8], **options)
    assert torch.equal(q, te.attention.apply_rotary_pos_emb(qkv[:4, ..., :8], angles[2:6]))


def test_columns_that_can_be_made_again_are_cleared(x):
    tiles = QUANTIZERS["fp8_block_2d"]()(x)
    te.tensor.utils.clear_columnwise_cache(tiles)
    assert tiles.get_usages() == {"rowwise": True, "columnwise": False}
    rows = QUANTIZERS["mxfp8"]()(x)
    te.tensor.utils.clear_columnwise_cache(rows)
    assert rows.get_usages() == {"rowwise": True, "columnwise": True}
