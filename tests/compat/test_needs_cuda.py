"""What only a GPU can do can be imported, and says so when it is used."""

import pytest

from crossgrain import compat

te, tex = compat.transformer_engine.pytorch, compat.transformer_engine_torch

ON_A_GPU = [
    (te, "make_graphed_callables"),
    (te, "initialize_ub"),
    (te, "destroy_ub"),
    (te, "onnx_export"),
    (te, "newton_schulz"),
    (te, "CusolverMpCtx"),
    (te, "FusedMLAQUpProjRopeQuant"),
    (te.graph, "set_capture_start"),
    (te.ep, "ep_dispatch"),
    (te.attention.dot_product_attention.backends, "FlashAttention"),
    (te.cpp_extensions.fused_attn, "fused_attn_fwd"),
    (tex, "CommOverlap"),
    (tex, "multi_tensor_adam_fp8"),
    (te.ops.fused, "UserbuffersForwardLinear"),
]


@pytest.mark.parametrize("module, name", ON_A_GPU, ids=[name for _, name in ON_A_GPU])
def test_it_says_so_when_called(module, name):
    with pytest.raises(compat.NeedsCudaError, match=f"^{name} needs CUDA"):
        getattr(module, name)(1, option=2)


def test_kernels_that_are_asked_for_first_say_that_they_are_not_there():
    ops = compat.transformer_engine.pytorch.ops
    assert not ops._common._cudnn_frontend_version_supported()
    for name in ("ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8", "BackwardGroupedMLP_CuTeGEMMDSwiGLU_MXFP8"):
        kernel = getattr(ops.fused, name)
        assert not kernel.is_supported()
        with pytest.raises(compat.needs_cuda.NeedsCudaError):
            kernel()


def test_it_is_an_error_that_clients_catch():
    assert issubclass(compat.NeedsCudaError, NotImplementedError) and issubclass(compat.NeedsCudaError, RuntimeError)
    assert not isinstance(object(), te.CusolverMpCtx)


def test_overlap_with_communication_is_refused():
    with pytest.raises(compat.NeedsCudaError, match="overlap"):
        te.cpp_extensions.general_gemm(None, None, ub=object())
