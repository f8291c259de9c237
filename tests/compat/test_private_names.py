"""Names with an underscore that clients touch, for every format and for hybrids."""

import pytest
import torch

import crossgrain as cg
from crossgrain import compat

from ..common.quantizers import QUANTIZERS, hybrid_of

te = compat.transformer_engine.pytorch
E4M3 = cg.DType.kFloat8E4M3
BUFFERS = ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv")


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "fp8_block", "fp8_block_2d", "nvfp4", "nvfp4_2d"])
def test_formats_with_scales_of_blocks(name, x):
    q = QUANTIZERS[name]()(x)
    for buffer in BUFFERS:
        assert getattr(q, buffer).dtype in (torch.uint8, torch.float32)
    if "nvfp4" in name:
        assert q._fp4_dtype == cg.DType.kFloat4E2M1 and q._amax_rowwise.shape == q._amax_columnwise.shape == (1,)
    else:
        assert q._fp8_dtype == (cg.DType.kFloat8E5M2 if "e5m2" in name else E4M3)
    assert not hasattr(q, "_transpose_invalid") and not hasattr(q, "_data")
    q._reset_caches()
    q.update_usage(rowwise_usage=True, columnwise_usage=False)
    assert q._columnwise_data is None and q._rowwise_data is not None
    if "2d" in name:
        q._create_columnwise()
        assert q._columnwise_data is not None
    else:
        with pytest.raises(RuntimeError, match="columnwise usage requested"):
            q._create_columnwise()


@pytest.mark.parametrize("name", ["fp8_block_2d", "nvfp4_2d"])
def test_columns_are_made_again_from_rows_that_were_written(name, x):
    """By a gather into the buffer, of which nobody tells the tensor."""
    q, other = QUANTIZERS[name]()(x), QUANTIZERS[name]()(x * 3 + 1)
    alias, columns = q.detach(), q._columnwise_data
    for buffer in (buffer for buffer in q._buffer_names if "rowwise" in buffer):
        getattr(q, buffer).copy_(getattr(other, buffer))
    q._create_columnwise()
    assert q._columnwise_data is columns
    for written in (q, alias):
        assert torch.equal(written.dequantize(direction=cg.COLUMNWISE), other.dequantize())


def test_columns_that_do_not_follow_from_rows_are_not_made_again(x):
    for q in (QUANTIZERS["mxfp8"]()(x), hybrid_of("mxfp8", "nvfp4")(x)):
        with pytest.raises(RuntimeError, match="columnwise usage requested"):
            q._create_columnwise()


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp8_delayed"])
def test_per_tensor_fp8_with_a_transposed_copy(name, x):
    with cg.settings.override(non_tn_fp8_gemm=False):
        q = QUANTIZERS[name]()(x)
        assert q._data.shape == (128, 256) and q._transpose.shape == (256, 128) and not q._transpose_invalid
        assert q._scale_inv.shape == (1,) and q._fp8_dtype in (E4M3, cg.DType.kFloat8E5M2)
        expected = q._transpose.clone()
        q._reset_caches()
        assert q._transpose is None and q._transpose_invalid
        q._create_transpose()
        assert torch.equal(q._transpose, expected) and not q._transpose_invalid
        q._transpose_invalid = True
        q.update_usage(rowwise_usage=True, columnwise_usage=True)
        assert torch.equal(q._transpose, expected)


def test_a_hybrid_has_the_names_of_its_children(x):
    q = hybrid_of("mxfp8", "nvfp4")(x)
    row, column = q.rowwise_sub_storage, q.columnwise_sub_storage
    assert q._rowwise_data is row._rowwise_data and q._rowwise_scale_inv is row._rowwise_scale_inv
    assert q._columnwise_data is column._columnwise_data and q._amax_columnwise is column._amax_columnwise
    assert q._fp8_dtype == E4M3
    for absent in ("_data", "_scale_inv", "_transpose", "_transpose_invalid", "_fp4_dtype", "_amax_rowwise"):
        assert not hasattr(q, absent)
    q.update_usage(columnwise_usage=False)
    assert not hasattr(q, "_columnwise_data") and hasattr(q, "_rowwise_data")


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "nvfp4"])
def test_columns_that_are_not_transposed_are_refused(name, x):
    """They have as many bytes as the right ones."""
    with cg.settings.override(non_tn_fp8_gemm=False):
        q = QUANTIZERS[name]()(x)
        columns = "_transpose" if name == "fp8" else "_columnwise_data"
        setattr(q, columns, getattr(q, "_data" if name == "fp8" else "_rowwise_data"))
        with pytest.raises(ValueError, match="needs codes of torch.uint8, transposed, 256 rows"):
            q.dequantize(direction=cg.COLUMNWISE)


@pytest.mark.parametrize("row, column", [("fp8", "mxfp8"), ("mxfp8", "fp8"), ("fp8", "fp8_e5m2")])
def test_a_hybrid_with_per_tensor_fp8(row, column, x):
    with cg.settings.override(non_tn_fp8_gemm=False):
        q = hybrid_of(row, column)(x)
        assert hasattr(q, "_data") == row.startswith("fp8")
        assert hasattr(q, "_transpose_invalid") == column.startswith("fp8")
        if row == "fp8":
            assert q._data is q.rowwise_sub_storage._data and q._scale_inv is q.rowwise_sub_storage._scale_inv
        if column != "mxfp8":
            assert q._transpose is q.columnwise_sub_storage._transpose and not q._transpose_invalid
        q._reset_caches()


def test_setting_a_name_of_a_hybrid_sets_it_in_the_child(x):
    """What would be set beside it would never be read."""
    q = hybrid_of("mxfp8", "nvfp4")(x)
    new = torch.zeros_like(q._rowwise_data)
    q._rowwise_data = new
    assert q.rowwise_sub_storage._rowwise_data is new and torch.equal(q.dequantize(), torch.zeros_like(x))
    with pytest.raises(AttributeError, match="rowwise MXFP8Tensor has no _data"):
        q._data = new


@pytest.mark.parametrize(
    "first, second", [("_rowwise_data", "_columnwise_data"), ("_columnwise_data", "_rowwise_data")]
)
def test_codes_set_in_one_direction_make_the_other_stale(first, second, x):
    q, other = hybrid_of("mxfp8", "nvfp4")(x), hybrid_of("mxfp8", "nvfp4")(x.flip(0))
    alias, before = q.detach(), hybrid_of("mxfp8", "nvfp4")(x)
    missed = cg.COLUMNWISE if first == "_rowwise_data" else cg.ROWWISE
    setattr(q, first, getattr(q, first).clone())  # moved, with the same codes
    q.dequantize(direction=missed)
    setattr(q, first, getattr(other, first))
    with pytest.raises(RuntimeError, match=f"the {missed.value} .* is stale"):
        q.dequantize(direction=missed)
    setattr(q, second, getattr(other, second))
    for direction in cg.Direction:
        q.dequantize(direction=direction)
        assert torch.equal(alias.dequantize(direction=direction), before.dequantize(direction=direction))


def test_names_of_a_hybrid_survive_pickling_and_copies(x):
    q = hybrid_of("mxfp8", "mxfp8")(x)
    for other in (q.detach(), q.clone()):
        assert torch.equal(other._rowwise_data, q._rowwise_data)


# ---- parameters and modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [cg.recipe.MXFP8BlockScaling(), cg.recipe.Float8CurrentScaling()])
def test_initial_values_are_kept_until_they_are_cleared(recipe):
    with te.fp8_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True):
        layer = te.Linear(32, 32, bias=False)
    value = layer.weight.get_high_precision_init_val()
    assert value.dtype == torch.float32 and value.shape == (32, 32) and type(value) is torch.Tensor
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None


@pytest.mark.parametrize(
    "recipe, kept",
    [
        (cg.recipe.NVFP4BlockScaling(), True),
        (cg.recipe.CustomRecipe(qfactory=cg.recipe.zoo.mxfp8_fwd_nvfp4_bwd_factory), True),
        (cg.recipe.MXFP8BlockScaling(), False),
        (None, False),
    ],
)
def test_initial_values_of_4_bit_weights_are_kept_unless_a_client_says_no(recipe, kept):
    """Megatron says nothing about those of FP4 parameters, and makes masters of them if there are any."""

    def has_them(**said):
        with te.fp8_model_init(recipe=recipe, **said):
            return hasattr(te.Linear(32, 32).weight, "get_high_precision_init_val")

    assert has_them() == kept
    assert not has_them(preserve_high_precision_init_val=False)
    assert te.quantization.fp8_model_init is te.fp8_model_init
    with torch.no_grad():
        assert not has_them()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_module_made_for_a_recipe_tells_it(device):
    with te.quantized_model_init(recipe=cg.recipe.MXFP8BlockScaling()):
        layer = te.Linear(32, 32, device=device)
    assert layer.fp8_meta["recipe"].mxfp8() and not layer.fp8_meta["fp8_checkpoint"]


def test_what_clients_read_from_a_module():
    layer = te.LayerNormLinear(32, 64, ub_name="qkv")
    assert (layer.ub_name, layer.tp_rank, layer.tp_size, layer.fp8_calibration) == ("qkv", 0, 1, False)
    assert not layer.fp8_initialized and not layer.fp8_parameters and not layer.save_original_input
    with te.autocast(calibrating=True, enabled=False):
        assert layer.fp8_calibration
    with te.autocast(recipe=cg.recipe.DelayedScaling()):
        layer(torch.randn(32, 32)).sum().backward()
    assert layer.fp8_initialized and layer.fp8
    state = cg.recipe.read_extra_state(layer.get_extra_state())
    assert any(value.abs().max() > 0 for key, value in state.items() if "amax_history" in key)
    layer.reset_fp8_meta_tensors()
    state = cg.recipe.read_extra_state(layer.get_extra_state())
    assert all(value.abs().max() == 0 for key, value in state.items() if "amax_history" in key)
    assert all(torch.equal(value, torch.ones_like(value)) for key, value in state.items() if key.endswith("scale"))


def test_quantizers_that_a_client_declares_void_are_built_again_with_their_histories():
    layer, recipe = te.Linear(32, 32), cg.recipe.DelayedScaling(amax_history_len=4)
    assert not layer.fp8_meta_tensors_initialized
    layer.init_fp8_meta_tensors(recipe)
    assert layer.fp8_meta_tensors_initialized
    quantizers = layer.quantizers["scaling_fwd"]
    layer.init_fp8_meta_tensors(recipe)
    assert layer.quantizers["scaling_fwd"] is quantizers
    layer.fp8_meta["scaling_fwd"].scale.fill_(3)
    layer.fp8_meta_tensors_initialized = False
    assert not layer.fp8_meta_tensors_initialized
    layer.set_extra_state(layer.get_extra_state())
    layer.init_fp8_meta_tensors(recipe)
    assert layer.quantizers["scaling_fwd"] is not quantizers
    assert [quantizer.scale.item() for quantizer in layer.quantizers["scaling_fwd"]] == [3, 3, 3]


def test_a_recipe_takes_what_clients_hand_to_everything():
    class Theirs(cg.recipe.DelayedScaling):
        def __init__(self, **options):
            super().__init__(margin=1, override_linear_precision=(False, False, False), **options)

    recipe = Theirs(params_dtype=torch.bfloat16, device="cuda", fp8_dpa=False)
    assert recipe.margin == 1 and recipe.delayed() and "device" not in recipe.options()
    with pytest.raises(AssertionError, match="override_linear_precision"):
        cg.recipe.DelayedScaling(override_linear_precision=(False, False, True))


def test_all_calls_of_the_global_state():
    state = te.quantization.FP8GlobalStateManager
    state.reset()
    assert not state.is_fp8_enabled() and not state.is_fp8_calibration() and state.get_fp8_group() is None
    with te.fp8_autocast(enabled=True, fp8_recipe=cg.recipe.MXFP8BlockScaling()):
        assert state.is_fp8_enabled() and state.get_fp8_recipe().mxfp8() and state.is_first_fp8_module()
        kept = state.get_fp8_autocast_state()
        state.add_fp8_tensors_to_global_buffer({})
    state.set_fp8_autocast_state(kept)
    assert state.is_fp8_enabled()
    state.reset()
    assert not state.is_fp8_enabled()
    with te.fp8_model_init(preserve_high_precision_init_val=True):
        assert state.with_fp8_parameters() and state.with_high_precision_init_val()
    state.set_skip_fp8_weight_update_tensor(True)
    assert state.get_skip_fp8_weight_update_tensor().item() == 1
    state.reduce_and_update_fp8_tensors(forward=False)
    state.reset()


def test_quantize_weight_makes_uses_and_renews_a_workspace():
    quantize_weight = te.module.base.quantize_weight
    w = torch.randn(32, 64)
    quantizer = te.MXFP8Quantizer(E4M3)
    used, kept = quantize_weight(tensor=w, quantizer=quantizer, workspace=None, cache=True)
    assert used is kept and torch.equal(used.dequantize(), quantizer(w).dequantize())
    again, new = quantize_weight(tensor=w * 2, quantizer=quantizer, workspace=kept)
    assert again is kept and new is None and torch.equal(kept.dequantize(), quantizer(w * 2).dequantize())
    before = kept.dequantize()
    for options in ({"update_workspace": False}, {"skip_update_flag": torch.ones(1)}):
        quantize_weight(tensor=w, quantizer=quantizer, workspace=kept, **options)
        assert torch.equal(kept.dequantize(), before)
    rows_only = te.MXFP8Quantizer(E4M3, columnwise=False)(w)
    other, new = quantize_weight(tensor=w, quantizer=quantizer, workspace=rows_only, cache=True)
    assert other is new is not rows_only and other.get_usages() == {"rowwise": True, "columnwise": True}
    primary = te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False)(torch.randn(128, 128))
    needs_both = te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)
    used, new = quantize_weight(tensor=primary, quantizer=needs_both, workspace=None)
    assert used is primary and new is None and primary.get_usages()["columnwise"]
    with pytest.raises(ValueError, match="needs a quantizer"):
        quantize_weight(tensor=w, quantizer=None, workspace=None)


def test_dummy_gradients_are_shared():
    get = te.module.base.get_dummy_wgrad
    assert get([4, 8], torch.bfloat16).data_ptr() == get((4, 8), torch.bfloat16).data_ptr()
    get([4, 8], torch.bfloat16).fill_(3)
    assert get([4, 8], torch.bfloat16, zero=True).abs().max() == 0


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_2d"])
@pytest.mark.parametrize("usages", [{"rowwise": False}, {"columnwise": False}])
def test_sizes_of_block_storages_as_a_matrix(name, usages, x):
    quantizer = QUANTIZERS[name]()
    quantizer.set_usage(**usages)
    for internal in (False, True):
        quantizer.internal = internal
        assert quantizer(x.view(2, 64, 256))._fsdp_logical_mn() == (128, 256)
        assert quantizer(x)._FSDP_BLOCK_LEN == 128


def test_the_debug_state():
    state = compat.transformer_engine.debug.pytorch.debug_state
    state.set_weight_tensor_tp_group_reduce(False)
    state.TEDebugState.layers_initialized["a"] = True
    assert not state.TEDebugState.weight_tensor_tp_group_reduce
    state.TEDebugState._reset()
    assert state.TEDebugState.weight_tensor_tp_group_reduce and not state.TEDebugState.layers_initialized


def test_histories_can_be_copied_and_put_back():
    layer, recipe = te.Linear(32, 32), cg.recipe.DelayedScaling(amax_history_len=3)
    assert layer.get_fp8_meta_tensors() is None
    with te.autocast(recipe=recipe):
        layer(torch.randn(32, 32)).sum().backward()
    kept = layer.get_fp8_meta_tensors()
    layer.reset_fp8_meta_tensors()
    for key, (scale, history) in kept.items():
        state = layer.fp8_meta[key]
        assert (state.scale == 1).all() and (state.amax_history == 0).all() and (history > 0).any() and scale.numel()
    layer.reset_fp8_meta_tensors(kept)
    for key, (scale, history) in kept.items():
        assert torch.equal(layer.fp8_meta[key].scale, scale) and torch.equal(layer.fp8_meta[key].amax_history, history)
    with pytest.raises(KeyError, match="fp8_meta_tensors has no scaling_bwd"):
        layer.reset_fp8_meta_tensors({"scaling_fwd": kept["scaling_fwd"]})


def test_a_workspace_is_used_if_there_is_no_weight():
    quantize_weight = te.module.base.quantize_weight
    workspace = te.MXFP8Quantizer(E4M3)(torch.randn(32, 32))
    assert quantize_weight(workspace=workspace) == (workspace, None)
    with pytest.raises(ValueError, match="tensor and workspace are both None"):
        quantize_weight()


def test_options_that_only_gpus_have_are_refused_or_change_nothing():
    reference = te.custom_recipes.reference_nvfp4.NVFP4QuantizerRef
    assert reference(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE").nvfp4_e4m3_max == 256
    with pytest.raises(NotImplementedError, match="nvfp4_4over6_err_use_fast_math=True compares"):
        reference(nvfp4_4over6_err_use_fast_math=True)
    x, dy = torch.randn(4, 32), torch.randn(4, 32)
    for plain, with_options in (
        (te.ops.AllReduce(), te.ops.AllReduce(reduce_in_backward=False)),
        (te.ops.L2Normalization(), te.ops.L2Normalization(seq_length=4, micro_batch_size=1)),
    ):
        results = []
        for op in (plain, with_options):
            leaf = x.clone().requires_grad_()
            y = op(leaf)
            y.backward(dy)
            results.append((y.detach(), leaf.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_states_in_bfloat16_can_be_read_as_they_are():
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = te.optimizers.FusedAdam([weight], exp_avg_dtype=torch.bfloat16)
    weight.grad = torch.randn(8, 8)
    optimizer.step()
    stored = optimizer.get_unscaled_state(weight, "exp_avg", skip_unscale=True)
    assert stored.dtype == torch.bfloat16
    assert torch.equal(optimizer.get_unscaled_state(weight, "exp_avg"), stored.float())
    assert optimizer.get_unscaled_state(weight, "exp_avg_sq", skip_unscale=True).dtype == torch.float32


def test_a_tensor_that_was_not_offloaded_is_popped_as_it_is():
    x = torch.ones(3)
    assert te.cpu_offload.OffloadableLayerState(None).pop_tensor(x) is x


def test_an_operation_has_the_states_of_each_pass():
    op, manager = te.ops.BasicLinear(16, 16), te.quantization.FP8GlobalStateManager
    assert op._fp8_metas == {"forward": None, "backward": None} and op._quantizers == {"forward": [], "backward": []}
    with te.autocast(recipe=cg.recipe.DelayedScaling(amax_history_len=4)):
        y = op(torch.full((16, 16), 3.0, requires_grad=True))
    y.backward(torch.full((16, 16), 5.0))
    for mode, amax in (("forward", 3.0), ("backward", 5.0)):
        state = op._fp8_metas[mode][manager.get_meta_tensor_key(forward=mode == "forward")]
        assert state.amax_history[-1, 0] == amax
        assert op._quantizers[mode][0] is op.get_quantizer(mode, 0)
    assert te.ops.ReLU()._fp8_metas == {"forward": None, "backward": None}
