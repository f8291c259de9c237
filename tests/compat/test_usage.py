"""Programs and tests in the style of Transformer Engine's: as they are written there, on the CPU."""

import copy
import io

import pytest
import torch

from crossgrain import compat

compat.install(replace=True)  # as at the top of a program; the names below are imported once

import transformer_engine.pytorch as te  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.common import recipe  # noqa: E402
from transformer_engine.pytorch import (  # noqa: E402
    Float8Quantizer,
    Float8Tensor,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo import (  # noqa: E402
    mxfp8_fwd_nvfp4_bwd_factory,
    nvfp4_linear_fp8_dpa_factory,
)
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast, fp8_model_init  # noqa: E402
from transformer_engine.pytorch.ops.fused import ForwardLinearBiasActivation  # noqa: E402
from transformer_engine.pytorch.tensor.utils import (  # noqa: E402
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    replace_raw_data,
)
from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported  # noqa: E402

compat.uninstall()  # what was imported stays

pytestmark = pytest.mark.filterwarnings("ignore:fp8_.* is deprecated")

FP8, _reason = te.is_fp8_available(return_reason=True)
RECIPES = [
    recipe.DelayedScaling(amax_history_len=2),
    recipe.Float8CurrentScaling(),
    recipe.MXFP8BlockScaling(),
    recipe.Float8BlockScaling(),
    recipe.NVFP4BlockScaling(),
    recipe.CustomRecipe(qfactory=mxfp8_fwd_nvfp4_bwd_factory),
    recipe.CustomRecipe(qfactory=nvfp4_linear_fp8_dpa_factory),
]


@pytest.fixture(autouse=True)
def _fresh():
    yield
    FP8GlobalStateManager.reset()


def name_of(fp8_recipe):
    factory = getattr(fp8_recipe, "qfactory", None)
    return factory.__name__ if factory else type(fp8_recipe).__name__


@pytest.mark.skipif(not FP8, reason=_reason)
@pytest.mark.parametrize("fp8_recipe", RECIPES, ids=name_of)
def test_a_transformer_layer_trains_and_evaluates(fp8_recipe):
    block = te.TransformerLayer(
        64,
        128,
        4,
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layer_number=1,
        params_dtype=torch.float32,
        fuse_qkv_params=True,
        normalization="RMSNorm",
        activation="swiglu",
        device="cuda",
    )
    optimizer = te.optimizers.FusedAdam(block.parameters(), lr=1e-3, adam_w_mode=True)
    x = torch.randn(32, 2, 64, requires_grad=True)
    with te.autocast(enabled=False):
        exact = block(x, self_attn_mask_type="causal").detach()
    for microbatch in range(2):
        with fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
            out = te.checkpoint(block, x, use_reentrant=False, is_first_microbatch=microbatch == 0)
        out.square().mean().backward()
    assert (out.detach() - exact).norm() < 0.3 * exact.norm()
    assert x.grad.isfinite().all() and all(p.grad is not None for p in block.parameters())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad(), fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        block.eval()(x)


def test_the_history_of_delayed_scaling_is_where_clients_look():
    module = te.Linear(32, 32, bias=False, device="cuda")
    delayed = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="max", fp8_format=recipe.Format.HYBRID)
    for scale in (1.0, 3.0):
        x = torch.full((32, 32), scale)
        with fp8_autocast(enabled=True, fp8_recipe=delayed):
            module(x).sum().backward()
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
    forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
    assert forward.amax_history[:, 0].max() == 3 and forward.scale[0] == 448 / 3
    assert forward.amax_history.shape == (4, 3) and backward.amax_history.shape == (4, 2)
    quantizer = module.quantizers["scaling_fwd"][tex.FP8FwdTensors.GEMM1_INPUT]
    assert isinstance(quantizer, Float8Quantizer) and quantizer.scale.data_ptr() == forward.scale.data_ptr()
    same = copy.deepcopy(module)
    assert "recipe" not in same.fp8_meta and "recipe" in module.fp8_meta


def test_float8_tensors_are_built_by_hand_and_saved():
    scale = torch.full([1], 2.0)
    quantizer = Float8Quantizer(scale=scale, amax=torch.zeros(1), fp8_dtype=tex.DType.kFloat8E4M3)
    x = torch.rand(32, 64) * 2 - 1
    q = quantizer(x)
    assert isinstance(q, Float8Tensor) and quantizer.amax == x.abs().max() and q._scale_inv == 0.5
    torch.testing.assert_close(q.dequantize(), x, rtol=0.0625, atol=0.01)
    by_hand = Float8Tensor(
        shape=q.shape,
        dtype=torch.bfloat16,
        data=q._data.clone(),
        fp8_scale_inv=q._scale_inv,
        fp8_dtype=tex.DType.kFloat8E4M3,
    )
    assert torch.equal(by_hand.dequantize(dtype=torch.float32), q.dequantize())
    assert torch.equal(by_hand + 1, by_hand.dequantize() + 1) and not isinstance(by_hand + 1, Float8Tensor)
    file = io.BytesIO()
    torch.save(by_hand, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is Float8Tensor and torch.equal(loaded._data, q._data)
    assert (q._transpose is None) == is_non_tn_fp8_gemm_supported()


def test_a_hybrid_is_made_saved_and_restored():
    quantizer = HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3),
        columnwise_quantizer=NVFP4Quantizer(fp4_dtype=tex.DType.kFloat4E2M1),
    )
    q = quantizer.quantize(torch.randn(64, 128, dtype=torch.bfloat16))
    expected = q.dequantize()
    tensors, objects = te.prepare_for_saving(q)
    assert any(tensor is not None for tensor in tensors)
    (restored,) = te.restore_from_saved(objects, tensors)
    assert torch.equal(restored.dequantize(), expected)
    with pytest.raises(ValueError, match="requires distinct rowwise and columnwise quantizers, two objects"):
        HybridQuantizer(rowwise_quantizer=quantizer.rowwise_quantizer, columnwise_quantizer=quantizer.rowwise_quantizer)
    assert quantizer._get_compatible_recipe() is recipe.CustomRecipe
    assert isinstance(IdentityQuantizer()(torch.ones(2, 2)), te.IdentityTensor)


def test_fused_operations_are_found_in_the_fuser():
    model = te.ops.Sequential(te.ops.Linear(32, 32, bias=True, device="cuda", dtype=torch.bfloat16), te.ops.GELU())
    with te.autocast(enabled=True, recipe=recipe.MXFP8BlockScaling()):
        model(torch.randn(32, 32, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    (fuser,) = model._module_groups
    kinds = [type(op) for op, _ in fuser._forward_ops]
    assert len(fuser._basic_ops) == 3 and kinds == [ForwardLinearBiasActivation]


@pytest.mark.parametrize("fp8_recipe", [recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()], ids=name_of)
def test_weights_kept_in_fp8_follow_their_masters(fp8_recipe):
    with fp8_model_init(enabled=True, recipe=fp8_recipe, preserve_high_precision_init_val=True):
        model = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16, device="cuda")
    weight = model.weight
    assert isinstance(weight, te.QuantizedTensor) and model.primary_weights_in_fp8
    master = weight.get_high_precision_init_val().float().flatten()
    weight.clear_high_precision_init_val()
    raw = "_rowwise_data" if hasattr(weight, "_rowwise_data") else "_data"
    buffer = torch.empty_like(getattr(weight, raw))
    replace_raw_data(weight, buffer)
    assert getattr(weight, raw).data_ptr() == buffer.data_ptr()
    cast_master_weights_to_fp8([weight], [master * 2], [0], None, manual_post_all_gather_processing=True)
    post_all_gather_processing([weight])
    expected = weight._quantizer.copy().quantize((master * 2).view(32, 64).to(torch.bfloat16))
    assert torch.equal(weight.dequantize(), expected.dequantize())


def test_a_custom_quantizer_of_a_client():
    class Half(MXFP8Quantizer):
        """What a user would write: everything at half the size."""

        custom = True

        def quantize_impl(self, tensor):
            return super().quantize_impl(tensor * 0.5)

    def factory(role):
        is_weight = role is not None and role.tensor_type == "weight"
        return (Half if is_weight else MXFP8Quantizer)(tex.DType.kFloat8E4M3)

    layer, x = te.Linear(32, 32, bias=False), torch.randn(32, 32)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        whole = layer(x)
    with te.autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        half = layer(x)
    assert torch.equal(whole, 2 * half)  # a power of two moves the scales alone


def test_offload_context_and_random_states():
    context, sync = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
    layers = [te.Linear(256, 256) for _ in range(2)]
    x = torch.randn(64, 256, requires_grad=True)
    y = x
    for layer in layers:
        with context:
            y = layer(y)
        y = sync(y)
    y.sum().backward()
    assert x.grad is not None
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    with tracker.fork():
        first = torch.rand(1)
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    with tracker.fork("model-parallel-rng"):
        assert torch.equal(first, torch.rand(1))


def test_options_that_have_one_value_here_are_taken_and_others_refused():
    layer = te.TransformerLayer(32, 32, 2, softmax_type="learnable", hidden_dropout=0.0, attention_dropout=0.0)
    assert layer(torch.randn(4, 2, 32)).shape == (4, 2, 32)
    assert layer.self_attention.core_attention.softmax_offset.shape == (2,)
    for make in (lambda **o: te.TransformerLayer(32, 32, 2, **o), lambda **o: te.MultiheadAttention(32, 2, **o)):
        make(softmax_type="vanilla")
        with pytest.raises(ValueError, match="softmax_type must be one of vanilla, off-by-one, learnable, got 'sink'"):
            make(softmax_type="sink")
    x = torch.randn(4, 8)
    gathered, handle = te.distributed.gather_along_first_dim(x, None, False, None, None, False)
    assert torch.equal(gathered, x) and handle is None
    with pytest.raises(NotImplementedError, match="external_coalescing"):
        te.distributed.gather_along_first_dim(x, None, external_coalescing=True)
