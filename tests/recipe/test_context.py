"""autocast and quantized_model_init: nesting, threads, what is refused."""

import threading

import pytest
import torch

import crossgrain as cg
import crossgrain.recipe as r
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    FP8GlobalStateManager,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    active,
    autocast,
    quantized_model_init,
)
from crossgrain.tensor.init_values import keep_high_precision_init_val


def test_nothing_is_in_force_by_default():
    assert active() == r.PrecisionContext()
    assert type(r.active_recipe()) is MXFP8BlockScaling


def test_levels_nest_and_restore():
    outer, inner, group = NVFP4BlockScaling(), Float8CurrentScaling(), object()
    with autocast(recipe=outer, amax_reduction_group=group):
        assert active().enabled and active().recipe is outer and active().group is group
        with autocast(recipe=inner, calibrating=True):
            assert active().recipe is inner and active().calibrating and active().group is None
            with autocast(enabled=False):
                assert not active().enabled
                with autocast(recipe=outer):
                    assert active().enabled and active().recipe is outer
                assert not active().enabled
            assert active().enabled and active().recipe is inner
        assert active().recipe is outer and not active().calibrating
    assert active() == r.PrecisionContext()


def test_the_outer_level_is_restored_after_an_error():
    with autocast(recipe=NVFP4BlockScaling()) as outer:
        with pytest.raises(ZeroDivisionError), autocast(enabled=False):
            raise ZeroDivisionError
        assert active().enabled
    with outer:  # an instance may be used again, not at once
        assert active().enabled


def test_one_instance_cannot_be_entered_twice_at_once():
    context = autocast()
    with context:
        with pytest.raises(RuntimeError, match="already entered"), context:
            pass
        assert active().enabled
    assert not active().enabled


def test_threads_do_not_see_each_other():
    inside, done, seen = threading.Event(), threading.Event(), {}

    def other():
        seen["at start"] = active().enabled
        with autocast(recipe=NVFP4BlockScaling()):
            inside.set()
            done.wait(10)
            seen["inside"] = type(active().recipe)

    thread = threading.Thread(target=other)
    with autocast(recipe=Float8CurrentScaling()):
        thread.start()
        assert inside.wait(10)
        with autocast(enabled=False):
            assert not active().enabled
            done.set()
            thread.join()
        assert type(active().recipe) is Float8CurrentScaling
    assert seen == {"at start": False, "inside": NVFP4BlockScaling}


def test_default_recipe_by_capability():
    for capability, cls in (((9, 0), DelayedScaling), ((10, 0), MXFP8BlockScaling), ((12, 0), Float8CurrentScaling)):
        with cg.settings.override(compute_capability=capability), autocast():
            assert type(active().recipe) is type(r.get_default_recipe()) is type(r.get_default_fp8_recipe()) is cls


def test_strings_and_paths_are_loaded(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("all: mxfp8\n")
    for value in ("all: mxfp8", str(path), path):
        with autocast(recipe=value):
            assert active().recipe == r.GemmRecipe.load("all: mxfp8")
        with quantized_model_init(recipe=value):
            assert active().recipe == r.GemmRecipe.load("all: mxfp8")
    with pytest.raises(TypeError, match="got int: 3"):
        autocast(recipe=3)


def test_availability():
    checks = [r.is_fp8_available, r.is_mxfp8_available, r.is_fp8_block_scaling_available, r.is_nvfp4_available]
    with cg.settings.override(compute_capability=(7, 0)):
        assert all(check() is True and check(return_reason=True) == (True, "") for check in checks)
        with cg.settings.override(strict=True):
            for check in checks:
                assert check() is False
                assert "needs compute capability" in check(return_reason=True)[1]


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling(), Float8BlockScaling(), DelayedScaling()])
def test_support_is_checked_on_entering_enabled_levels_only(recipe):
    with cg.settings.override(strict=True):
        r.check_recipe_support(recipe)
        with cg.settings.override(compute_capability=(7, 0)):
            context = autocast(recipe=recipe)
            with pytest.raises(RuntimeError, match=type(recipe).__name__), context:
                pass
            assert active() == r.PrecisionContext(), "nothing was entered"
            with autocast(enabled=False, recipe=recipe):
                pass
            with pytest.raises(RuntimeError), quantized_model_init(recipe=recipe):
                pass
        with context:
            pass


def test_quantized_model_init():
    recipe, preserve = NVFP4BlockScaling(), FP8GlobalStateManager.with_high_precision_init_val
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        assert FP8GlobalStateManager.with_fp8_parameters() and preserve()
        assert active().recipe is recipe and not active().enabled
        with quantized_model_init(enabled=False):
            assert not FP8GlobalStateManager.with_fp8_parameters() and not preserve()
            assert active().recipe is recipe, "turning it off chooses no recipe"
        with autocast(recipe=MXFP8BlockScaling()):
            assert FP8GlobalStateManager.with_fp8_parameters()
        with quantized_model_init():
            assert type(active().recipe) is MXFP8BlockScaling
        with pytest.raises(ZeroDivisionError), quantized_model_init():
            raise ZeroDivisionError
        assert active().recipe is recipe
    assert active() == r.PrecisionContext()


def test_kept_initial_values():
    value = torch.randn(4)
    parameter = torch.nn.Parameter(torch.zeros(4))
    keep_high_precision_init_val(parameter, value)
    kept = parameter.get_high_precision_init_val()
    assert torch.equal(kept, value) and kept.device.type == "cpu"
    assert kept.data_ptr() != value.data_ptr(), "a copy: initialisation may reuse the buffer"
    parameter.clear_high_precision_init_val()
    assert parameter.get_high_precision_init_val() is None


def test_old_names_warn():
    recipe = NVFP4BlockScaling()
    with pytest.warns(DeprecationWarning, match="use autocast"):
        context = r.fp8_autocast(fp8_recipe=recipe, fp8_group=None)
    with context:
        assert active().recipe is recipe
    with pytest.warns(DeprecationWarning, match="use quantized_model_init") as caught, r.fp8_model_init(recipe=recipe):
        assert active().quantized_parameters
    assert caught[0].filename == __file__, "about the caller's line"


def test_alignment():
    assert r.get_align_size_for_quantization(MXFP8BlockScaling()) == 32
    assert r.get_align_size_for_quantization(NVFP4BlockScaling()) == 128
    assert r.get_align_size_for_quantization(DelayedScaling()) == 16
    assert r.get_align_size_for_quantization(Float8BlockScaling()) == 16

    def never(role):
        raise AssertionError("the factory is not asked")

    assert r.get_align_size_for_quantization(CustomRecipe(never, quantization_alignment=48)) == 48


@pytest.mark.parametrize(
    "fmt, forward, dtype, largest",
    [
        (r.FP8Format.E4M3, False, torch.float8_e4m3fn, 448.0),
        (r.FP8Format.HYBRID, True, torch.float8_e4m3fn, 448.0),
        (r.FP8Format.HYBRID, False, torch.float8_e5m2, 57344.0),
    ],
)
def test_types_of_recipes(fmt, forward, dtype, largest):
    recipe = Float8CurrentScaling(fp8_format=fmt)
    assert r.get_fp8_torch_dtype(recipe, forward) is dtype
    assert r.get_fp8_te_dtype(recipe, forward) is cg.TE_DType[dtype]
    assert r.get_fp8_max(recipe, forward) == largest
    assert r.get_fp4_te_dtype(NVFP4BlockScaling()) is cg.DType.kFloat4E2M1


def test_names_of_the_field():
    manager, recipe, group = FP8GlobalStateManager, NVFP4BlockScaling(), object()
    assert not manager.is_fp8_enabled() and not manager.is_first_fp8_module()
    with autocast(recipe=recipe, calibrating=True, amax_reduction_group=group):
        assert manager.is_fp8_enabled() and manager.is_fp8_calibration()
        assert manager.get_fp8_recipe() is recipe and manager.get_fp8_group() is group
        state = manager.quantization_state
        assert state.fp8_enabled and state.fp8_calibration and state.fp8_recipe is recipe
        assert state.fp8_distributed_group is group and state.autocast_depth == 1
        assert not state.fp8_parameters and not state.high_precision_init_val
        assert manager.is_first_fp8_module()
        with autocast():
            assert not manager.is_first_fp8_module(), "once per outermost level"
        saved = manager.get_autocast_state()
    assert not manager.is_fp8_enabled()
    assert type(manager.get_fp8_recipe()) is MXFP8BlockScaling
    manager.set_autocast_state(saved)
    assert manager.is_fp8_enabled() and manager.get_fp8_recipe() is recipe
    manager.set_skip_fp8_weight_update_tensor(True)
    assert manager.get_skip_fp8_weight_update_tensor().item() == 1.0
    manager.reset()
    assert not manager.is_fp8_enabled()
    assert manager.get_skip_fp8_weight_update_tensor() is None
    assert manager.is_fp8_available() == manager.is_mxfp8_available() == (True, "")
    assert manager.is_nvfp4_available() == manager.is_fp8_block_scaling_available() == (True, "")
