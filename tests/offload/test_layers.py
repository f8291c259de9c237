"""Offloading by layers, under the names of the field, on the same engine."""

import pytest
import torch

import crossgrain as cg
from crossgrain.compat import cpu_offload
from crossgrain.offload import layers as by_layers

from ..common.modules import assert_same
from ..common.quantizers import PAIRS, assert_same_bytes, hybrid_of

LAYERS = 3


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch):
    monkeypatch.setattr(by_layers, "MIN_BYTES", 1)
    monkeypatch.setattr(by_layers._engine, "__defaults__", (1,))


def model():
    return torch.nn.ModuleList(cg.LayerNormMLP(64, 128) for _ in range(LAYERS))


def step(modules, context, synchronize, between=lambda: None):
    torch.manual_seed(4)
    x = torch.randn(32, 64, requires_grad=True)
    y = x * 2  # not a leaf, which would stay
    for module in modules:
        with context, cg.autocast(recipe="mxfp8-fwd-nvfp4-bwd"):
            y = module(y)
        y = synchronize(y)
    between()
    y.sum().backward()
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in modules.named_parameters():
        found[name], parameter.grad = parameter.grad, None
    return found


@pytest.mark.parametrize("num_layers", range(LAYERS + 1))
@pytest.mark.parametrize("double_buffering", [False, True])
def test_the_first_layers_are_offloaded(num_layers, double_buffering):
    modules = model()
    expected = step(modules, *cg.get_cpu_offload_context())
    context, synchronize = cg.get_cpu_offload_context(
        enabled=True, num_layers=num_layers, model_layers=LAYERS, double_buffering=double_buffering
    )
    stored = []
    for _ in range(2):  # the count of layers begins anew
        assert_same(step(modules, context, synchronize), expected)
        stored.append(context._engine.stored_bytes)
    of_a_layer = stored[0] // max(1, num_layers)
    assert (of_a_layer > 0) == (num_layers > 0) and stored == [num_layers * of_a_layer, 2 * num_layers * of_a_layer]


@pytest.mark.parametrize("retain", [False, True])
def test_layers_by_hand(retain):
    modules = model()
    expected = step(modules, *cg.get_cpu_offload_context())
    context, synchronize, by_hand = cg.get_cpu_offload_context(
        enabled=True,
        num_layers=LAYERS,
        model_layers=LAYERS,
        manual_synchronization=True,
        retain_pinned_cpu_buffers=retain,
    )
    assert isinstance(by_hand, cg.ManualOffloadSynchronizer)

    def sources(layer):
        return [record.source is None for record in by_hand._of(layer)]

    def move():
        for layer in (0, 1):
            by_hand.start_offload_layer(layer)
        by_hand.release_activation_forward_gpu_memory(0)
        assert all(sources(0)) and sources(0)
        assert not any(sources(1)) and sources(1), "written, and still in memory"
        assert all(record.writing is None for record in by_hand._of(2))
        by_hand.start_reload_layer(0)
        assert all(record.reading is not None for record in by_hand._of(0))

    for _ in range(2):
        assert_same(step(modules, context, synchronize, move), expected)
        by_hand._engine.wait()  # the background thread may still have a record of which it reads ahead
        assert not by_hand._of(0), "the records went with the graph"
    with pytest.raises(ValueError, match="layer_id must be between 0 and 2, got 3"):
        by_hand.start_offload_layer(3)


def test_a_forward_that_fails_does_not_shift_the_layers():
    context, synchronize = cg.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)
    with context:
        pass
    synchronize(torch.ones(1))
    with pytest.raises(KeyError), context:
        raise KeyError
    with context:
        (torch.randn(64, requires_grad=True) * 1).exp()
    assert context._engine.stored_bytes == 256, "this is layer 0 again"
    with context, pytest.raises(RuntimeError, match="already entered"):
        context.__enter__()


def test_options_are_checked():
    with pytest.raises(ValueError, match="num_layers must be between 0 and model_layers = 2, got 3"):
        cg.get_cpu_offload_context(enabled=True, num_layers=3, model_layers=2)
    with pytest.raises(ValueError, match="offload_activations must be True"):
        cg.get_cpu_offload_context(enabled=True, offload_activations=False)
    with pytest.warns(DeprecationWarning, match="offload_weights has no effect"):
        cg.get_cpu_offload_context(enabled=True, offload_weights=True)
    assert cg.get_cpu_offload_context(manual_synchronization=True)[2] is None
    with pytest.raises(TypeError, match="start_offload takes tensors, got str"):
        cpu_offload.start_offload("x")
    cpu_offload.start_offload(torch.ones(2), cg.quantize(torch.ones(32, 32), "mxfp8"))


@pytest.mark.parametrize("row, column", PAIRS)
@pytest.mark.parametrize("until", ["pushed", "written", "released", "reloaded"])
def test_hybrid_tensors_are_pushed_and_popped(row, column, until, x):
    state = cpu_offload.OffloadableLayerState(None, min_bytes=1)
    q, plain = hybrid_of(row, column)(x), torch.randn(8)
    pushed = [state.push_tensor(tensor) for tensor in (q, plain, q)]
    if until != "pushed":
        state.start_offload()
    if until in ("released", "reloaded"):
        state.release_activation_forward_gpu_memory()
        assert all(record.source is None for record in state._records())
    if until == "reloaded":
        state.start_reload()
    back = [state.pop_tensor(number) for number in pushed]
    assert_same_bytes(back[0], q)
    assert_same_bytes(back[2], q)
    assert torch.equal(back[1], plain)
    distinct = {buffer.data_ptr(): buffer.nbytes for buffer in (plain, *(buffer for _, buffer in q._buffers()))}
    size = 0.0 if until == "pushed" else sum(distinct.values()) / 2**20
    assert state.get_offloaded_total_size_mb() == size
    q.copy_(x)  # the caller's tensor has kept its buffers
    state.release_all_memory()
    state._engine.wait()
    assert state._engine.store.used == 0


def test_buffers_are_used_again():
    state = cpu_offload.OffloadableLayerState(None, retain_pinned_cpu_buffers=True, min_bytes=1)
    addresses = set()
    for number in range(3):
        tensor = torch.full((64,), float(number))
        at = state.push_tensor(tensor)
        state.start_offload()
        state.release_activation_forward_gpu_memory()
        addresses.add(state._records()[0].place.memory.data_ptr())
        assert torch.equal(state.pop_tensor(at), tensor)
        state.release_all_memory()
        state._engine.wait()
    assert len(addresses) == 1
    with pytest.raises(TypeError, match="push_tensor takes tensors, got int"):
        state.push_tensor(3)
