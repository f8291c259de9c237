"""The tree of modules: every name resolves, and every module is what it stands for."""

import ast
import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

import crossgrain as cg
from crossgrain import compat
from crossgrain.compat.facade import Facade
from crossgrain.compat.tree import MODULES
from crossgrain.linear import split_quantize as splitting

te = compat.transformer_engine.pytorch

MODULE_NAMES = """
common.recipe pytorch pytorch.quantization pytorch.fp8 pytorch.constants pytorch.quantized_tensor pytorch.tensor
pytorch.tensor.float8_tensor pytorch.tensor.mxfp8_tensor pytorch.tensor.float8_blockwise_tensor
pytorch.tensor.nvfp4_tensor pytorch.tensor.hybrid_tensor pytorch.tensor.identity_tensor
pytorch.tensor.grouped_tensor pytorch.tensor.utils pytorch.tensor.storage.float8_tensor_storage
pytorch.tensor.storage.mxfp8_tensor_storage pytorch.tensor.storage.float8_blockwise_tensor_storage
pytorch.tensor.storage.nvfp4_tensor_storage pytorch.tensor.storage.hybrid_tensor_storage
pytorch.tensor.storage.identity_tensor_storage pytorch.tensor.storage.grouped_tensor_storage pytorch.module
pytorch.module.base pytorch.module._common pytorch.module._split_quantization pytorch.module.grouped_linear
pytorch.module.linear pytorch.module.layernorm_linear pytorch.module.layernorm_mlp pytorch.cpp_extensions
pytorch.cpp_extensions.gemm pytorch.cpp_extensions.fused_attn pytorch.ops pytorch.ops.basic pytorch.ops.fused
pytorch.ops.basic.basic_linear pytorch.ops.basic.grouped_linear pytorch.ops.fuser pytorch.ops.op
pytorch.optimizers pytorch.distributed pytorch.cpu_offload pytorch.cpu_offload_v1
pytorch.custom_recipes.quantizer_factories pytorch.custom_recipes.quantizer_factory_zoo
pytorch.custom_recipes.reference_nvfp4 pytorch.custom_recipes.reference_current_scaling
pytorch.custom_recipes.reference_utils pytorch.custom_recipes.gemm pytorch.attention
pytorch.attention.multi_head_attention pytorch.attention.dot_product_attention
pytorch.attention.dot_product_attention.utils pytorch.attention.dot_product_attention.backends
pytorch._extra_state pytorch.utils pytorch.graph pytorch.export pytorch.permutation pytorch.router pytorch.ep
pytorch.triton pytorch.newton_schulz debug debug.pytorch.debug_state debug.features debug.features.api
debug.features.utils debug.features.utils.stats_buffer debug.features.log_tensor_stats
debug.features.log_fp8_tensor_stats debug.features.log_nvfp4_tensor_stats debug.features.fake_quant
debug.features.per_tensor_scaling debug.features.disable_quantization_gemm
debug.features.disable_quantization_layer debug.features.disable_fp8_gemm debug.features.disable_fp8_layer
"""

NAMES = {
    "pytorch": """
        Linear LayerNormLinear LayerNormMLP LayerNorm RMSNorm GroupedLinear TransformerLayer MultiheadAttention
        DotProductAttention autocast quantized_model_init fp8_autocast fp8_model_init is_fp8_available
        is_mxfp8_available is_fp8_block_scaling_available is_nvfp4_available get_default_recipe QuantizerRole
        QuantizerRequest DelayedScalingRequest DType Quantizer QuantizedTensor QuantizedTensorStorage
        prepare_for_saving restore_from_saved restore_from_func_ctx Float8Quantizer Float8CurrentScalingQuantizer
        MXFP8Quantizer Float8BlockQuantizer NVFP4Quantizer HybridQuantizer IdentityQuantizer Float8Tensor
        MXFP8Tensor Float8BlockwiseQTensor NVFP4Tensor HybridQuantizedTensor IdentityTensor Float8TensorStorage
        MXFP8TensorStorage Float8BlockwiseQTensorStorage NVFP4TensorStorage HybridQuantizedTensorStorage
        IdentityTensorStorage ops optimizers checkpoint CudaRNGStatesTracker get_cpu_offload_context
        mark_not_offload Fp8Padding Fp8Unpadding InferenceParams RotaryPositionEmbedding is_bf16_available
        get_device_compute_capability ManualOffloadSynchronizer make_graphed_callables initialize_ub destroy_ub
        UserBufferQuantizationMode get_cudnn_version onnx_export parallel_cross_entropy moe_permute
        moe_permute_with_probs moe_unpermute moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs
        newton_schulz CusolverMpCtx FusedMLAQUpProjRopeQuant interleave_glu_tensor deinterleave_glu_tensor""",
    "pytorch.constants": """
        DType TE_DType TE_DType_To_Torch FP8FwdTensorIdx FP8BwdTensorIdx MXFP8_BLOCK_SCALING_SIZE
        NVFP4_BLOCK_SCALING_SIZE dist_group_type""",
    "pytorch.quantization": """
        autocast fp8_autocast quantized_model_init fp8_model_init check_fp8_support check_mxfp8_support
        check_nvfp4_support check_recipe_support QuantizerRole QuantizerRequest DelayedScalingRequest
        get_align_size_for_quantization get_default_fp8_recipe get_fp8_torch_dtype get_fp8_te_dtype get_fp4_te_dtype
        get_fp8_max _amax_and_scale_update _default_sf_compute RecipeState DelayedScalingRecipeState
        Float8CurrentScalingRecipeState MXFP8BlockScalingRecipeState Float8BlockScalingRecipeState
        NVFP4BlockScalingRecipeState CustomRecipeState FP8GlobalStateManager""",
    "pytorch.tensor.utils": """
        quantize_master_weights cast_master_weights_to_fp8 post_all_gather_processing replace_raw_data
        clear_columnwise_cache is_custom""",
    "pytorch.tensor.grouped_tensor": "GroupedTensor",
    "pytorch.tensor.storage.grouped_tensor_storage": "GroupedTensorStorage",
    "pytorch.cpp_extensions": "general_gemm general_grouped_gemm",
    "pytorch.cpp_extensions.gemm": """
        general_gemm general_grouped_gemm general_grouped_gemm_for_grouped_tensor _unwrap_tensor
        _validate_native_gemm_output_quantizer""",
    "pytorch.cpp_extensions.fused_attn": "FusedAttnBackend",
    "pytorch.optimizers": "FusedAdam FusedSGD MultiTensorApply multi_tensor_applier multi_tensor_scale",
    "pytorch.distributed": """
        checkpoint is_fp8_activation_recompute_enabled in_fp8_activation_recompute_phase CudaRNGStatesTracker
        gather_along_first_dim reduce_scatter_along_first_dim allreduce get_distributed_world_size
        get_distributed_rank set_tensor_model_parallel_attributes prepare_te_modules_for_fsdp""",
    "pytorch.cpu_offload": """
        get_cpu_offload_context mark_not_offload start_offload OffloadableLayerState DefaultOffloadSynchronizer
        ManualOffloadSynchronizer""",
    "pytorch.custom_recipes.reference_nvfp4": "NVFP4QuantizerRef nvfp4_ref_rht_2d_factory",
    "pytorch.custom_recipes.reference_current_scaling": "CurrentScalingQuantizerRef CurrentScalingTensorRef",
    "pytorch.custom_recipes.gemm": "MMParams custom_gemm GEMMType",
    "pytorch.utils": """
        get_device_compute_capability is_non_tn_fp8_gemm_supported is_bf16_available init_method_normal
        scaled_init_method_normal attention_mask_func round_up_to_nearest_multiple gpu_autocast_ctx devices_match
        canonicalize_device canonicalize_dtype split_tensor_along_dim ceil_div cast_if_needed""",
    "pytorch.module": "is_module_grouped_tensor_path_supported",
    "pytorch.module.base": "get_dummy_wgrad quantize_weight TransformerEngineBaseModule",
    "pytorch.module._common": "can_reconstruct_wgrad_input_from_original",
    "pytorch.module._split_quantization": """
        _split_quantize _split_quantize_hybrid _split_quantize_non_hybrid validate_grouped_quantizer_list tex""",
    "pytorch.attention.dot_product_attention": "_attention_backends",
    "pytorch.attention.dot_product_attention.utils": """
        get_attention_backend AttentionParams AttentionLogging check_set_window_size""",
    "pytorch.ops._common": """
        is_quantized_tensor maybe_dequantize _cudnn_frontend_version_supported
        _cudnn_frontend_supports_grouped_gemm_srelu""",
    "pytorch._extra_state": """
        UNSAFE_PICKLE_EXTRA_STATE_ENV CheckpointExtraStatePolicy should_load_extra_state_pickle _RECIPE_POLICIES""",
    "debug": "set_weight_tensor_tp_group_reduce",
    "debug.pytorch.debug_state": "TEDebugState set_weight_tensor_tp_group_reduce",
    "debug.features.fake_quant": "fake_quantize",
    "debug.features.per_tensor_scaling": "per_tensor_cast",
    "debug.features.utils": "next_enabled_iter",
    "debug.features.utils.stats_buffer": "STATS_BUFFERS StatsBuffers",
}
EXTENSION = """
DType FP8FwdTensors FP8BwdTensors FP8TensorMeta quantize dequantize split_quantize bgrad_quantize group_quantize
group_dequantize bgrad_group_quantize splits_to_offsets_multi generic_gemm dgelu
fused_amax_and_scale_update_after_reduction get_cublasLt_version
"""


@pytest.mark.parametrize("name", [f"transformer_engine.{name}" for name in MODULE_NAMES.split()])
def test_modules_of_the_tree_can_be_imported(name):
    assert importlib.import_module(f"crossgrain.compat.{name}") is MODULES[name]


@pytest.mark.parametrize("module", NAMES)
def test_names_resolve(module):
    found = importlib.import_module(f"crossgrain.compat.transformer_engine.{module}")
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing


def test_names_of_the_extension_resolve():
    assert not [name for name in EXTENSION.split() if not hasattr(compat.transformer_engine_torch, name)]


def test_what_clients_import_resolves():
    lines = ast.parse((Path(__file__).parent / "client_imports.txt").read_text())
    count = 0
    for line in ast.walk(lines):
        if isinstance(line, ast.Import):
            for alias in line.names:
                importlib.import_module(f"crossgrain.compat.{alias.name}")
                count += 1
        elif isinstance(line, ast.ImportFrom):
            module = importlib.import_module(f"crossgrain.compat.{line.module}")
            for alias in line.names:
                assert hasattr(module, alias.name), f"{line.module}.{alias.name}"
                count += 1
    assert count == 89


def test_every_entry_of_the_tables_resolves():
    for name, module in MODULES.items():
        assert sys.modules[f"crossgrain.compat.{name}"] is module
        for attribute in module._elsewhere if isinstance(module, Facade) else ():
            if not needs_a_package(name):
                getattr(module, attribute)


def needs_a_package(name):
    """Debug features need nvdlfw_inspect. With it, tests/clients/test_nvdlfw_inspect.py reads all their names."""
    return name.startswith("transformer_engine.debug.features") and importlib.util.find_spec("nvdlfw_inspect") is None


def test_names_of_debug_features_say_which_package_they_need():
    if importlib.util.find_spec("nvdlfw_inspect") is not None:
        pytest.skip("nvdlfw_inspect is installed")
    with pytest.raises(ModuleNotFoundError, match="nvdlfw_inspect"):
        from crossgrain.compat.transformer_engine.debug.features.api import TEConfigAPIMapper  # noqa: F401


def test_scripts_find_the_directory_of_features_beside_the_package():
    root, features = compat.transformer_engine, compat.transformer_engine.debug.features
    beside = Path(root.__file__).parent / "debug" / "features"
    assert Path(root.__file__).is_file() and Path(features.__file__).is_file()
    assert Path(features.__file__).parent == beside and list(beside.glob("crossgrain_features.py"))


def test_the_modules_are_attributes_of_each_other():
    for name, module in MODULES.items():
        if name.endswith(".newton_schulz"):
            continue  # the attribute is the function, as there
        at = compat
        for part in name.split("."):
            at = getattr(at, part)
        assert at is module


# ---- one identity -----------------------------------------------------------------------------------------


def test_where_the_trees_agree_a_module_is_the_very_module():
    assert compat.transformer_engine.common.recipe.DelayedScaling is cg.recipe.DelayedScaling
    assert compat.transformer_engine.common.recipe.Format is cg.recipe.FP8Format
    assert te.tensor.float8_tensor is sys.modules["crossgrain.quantizers.float8"]
    assert (
        te.tensor.storage.nvfp4_tensor_storage is te.tensor.nvfp4_tensor is sys.modules["crossgrain.quantizers.nvfp4"]
    )
    assert te.fp8 is te.quantization
    assert te.ops.basic.basic_linear is sys.modules["crossgrain.ops.basic.linear"]


def test_crossgrain_modules_get_no_names_from_the_tree():
    """Only facades have children: `crossgrain.ops.basic` knows nothing of a `basic_linear`."""
    assert not hasattr(cg.ops.basic, "basic_linear")
    assert "transformer_engine" not in vars(cg)


def test_classes_are_one():
    assert te.Linear is cg.Linear is te.module.linear.Linear
    layer = te.LayerNormLinear(32, 32)
    assert isinstance(layer, te.module.base.TransformerEngineBaseModule)
    q = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.randn(32, 32))
    assert isinstance(q, te.QuantizedTensor) and type(pickle.loads(pickle.dumps(q))) is cg.MXFP8Tensor


def test_a_facade_can_be_pickled_and_starred():
    assert pickle.loads(pickle.dumps(te)) is te
    names = {}
    exec("from crossgrain.compat.transformer_engine.pytorch import *", names)
    assert names["Linear"] is cg.Linear and names["moe_permute"] is te.moe_permute


def test_what_is_not_there_says_so():
    with pytest.raises(AttributeError, match=r"transformer_engine.pytorch' has no attribute 'no_such_thing'"):
        te.no_such_thing  # noqa: B018
    with pytest.raises(ImportError):
        exec("from crossgrain.compat.transformer_engine.pytorch import no_such_thing")


# ---- replacing a name ---------------------------------------------------------------------------------------


def grouped_step():
    torch.manual_seed(0)
    layer = te.GroupedLinear(2, 32, 32)
    x = torch.randn(64, 32, requires_grad=True)
    with te.autocast(recipe=cg.recipe.MXFP8BlockScaling()):
        y = layer(x, [32, 32])
    y.square().sum().backward()
    return y.detach(), x.grad, layer.weight1.grad


def test_the_library_calls_what_was_put_in_the_place_of_split_quantize(monkeypatch):
    original = splitting.split_quantize
    expected, calls = grouped_step(), []

    def spy(tensor, sections, quantizers, *rest):
        calls.append(list(sections))
        return original(tensor, sections, quantizers, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(te.module._split_quantization.tex, "split_quantize", spy)
        assert compat.transformer_engine_torch.split_quantize is splitting.split_quantize is spy
        got = grouped_step()
    assert calls == [[32, 32], [32, 32]]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert splitting.split_quantize is te.cpp_extensions.split_quantize is original


def test_contexts_ask_for_the_recipe_that_was_put_in_the_place_of_the_default(monkeypatch):
    quantization = compat.transformer_engine.pytorch.quantization
    monkeypatch.setattr(quantization, "get_default_recipe", cg.recipe.Float8CurrentScaling)
    with quantization.autocast():
        assert quantization.FP8GlobalStateManager.get_fp8_recipe().float8_current_scaling()


def test_every_name_that_a_module_lists_is_there():
    for path, module in MODULES.items():
        assert needs_a_package(path) or all(hasattr(module, name) for name in dir(module))


def test_replacing_goes_both_ways(monkeypatch):
    facade, implementation = te.quantization, sys.modules["crossgrain.recipe.delayed_state"]
    monkeypatch.setattr(implementation, "_default_sf_compute", "mine")
    assert facade._default_sf_compute == "mine"
    monkeypatch.setattr(facade, "_default_sf_compute", "yours")
    assert implementation._default_sf_compute == "yours"


def test_mock_patches_and_restores():
    original = splitting.split_quantize
    with mock.patch.object(compat.transformer_engine_torch, "split_quantize") as fake:
        assert splitting.split_quantize is fake
    assert splitting.split_quantize is original
    with mock.patch("crossgrain.compat.transformer_engine.pytorch.permutation.moe_permute") as fake:
        assert te.permutation.moe_permute is fake
    assert te.permutation.moe_permute is te.moe_permute is not fake


def test_new_names_stay_on_the_facade(monkeypatch):
    monkeypatch.setattr(te, "of_the_client", 1, raising=False)
    assert te.of_the_client == 1 and not hasattr(cg, "of_the_client")


def test_patches_inside_patches_are_undone_one_by_one():
    original, tex = splitting.split_quantize, compat.transformer_engine_torch
    for patch in (pytest.MonkeyPatch.context, None):
        with mock.patch.object(tex, "split_quantize") as outer:
            with patch() if patch else mock.patch.object(tex, "split_quantize") as inner:
                if patch:
                    inner.setattr(tex, "split_quantize", "inner")
                assert splitting.split_quantize is not outer
            assert splitting.split_quantize is outer
        assert splitting.split_quantize is original
    kept, tex.split_quantize = tex.split_quantize, "by hand"
    assert splitting.split_quantize == "by hand"
    tex.split_quantize = kept
    assert splitting.split_quantize is original and not tex._replaced["split_quantize"]


def test_a_name_can_be_deleted_and_put_back():
    original, tex = splitting.split_quantize, compat.transformer_engine_torch
    del tex.split_quantize
    assert not hasattr(splitting, "split_quantize") and not hasattr(tex, "split_quantize")
    tex.split_quantize = original
    assert splitting.split_quantize is original
