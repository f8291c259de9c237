"""Offloading together with recomputation, other hooks, kept graphs, second derivatives, threads and compilers."""

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import crossgrain as cg

from ..common.modules import assert_same


@pytest.fixture(params=["host", "directory"])
def offload(request, tmp_path):
    return cg.offload("host" if request.param == "host" else tmp_path, min_bytes=0)


class Block(cg.LayerNormMLP):
    """Enters its own autocast, so that recomputation enters it, too."""

    def forward(self, x):
        with cg.autocast(recipe="mxfp8-fwd-nvfp4-bwd"):
            return super().forward(x)


def block():
    return Block(64, 128, activation="swiglu")


def step(run, module):
    """Everything that comes out of a step on an input that is not a leaf."""
    torch.manual_seed(11)
    x = torch.randn(32, 64, requires_grad=True)
    y = run(x * 2)
    y.square().sum().backward()
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in module.named_parameters():
        found[name], parameter.grad = parameter.grad, None
    return found


def in_context(context, function):
    def run(*args):
        with context:
            return function(*args)

    return run


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["recompute inside", "recompute around"])
def test_recomputation(order, reentrant, offload):
    module = block()
    expected = step(module, module)

    def recomputed(function):
        return lambda x: checkpoint(function, x, use_reentrant=reentrant)

    run = {
        "recompute inside": in_context(offload, recomputed(module)),
        "recompute around": recomputed(in_context(offload, module)),
    }[order]
    assert_same(step(run, module), expected)
    offload.wait()
    assert offload.stats.used == 0
    if order == "recompute inside":
        assert offload.stats.stored == 32 * 64 * 4, "the input of the region, and nothing of its inside"


def test_hooks_inside_hooks_take_their_own(offload):
    module = block()
    expected = step(module, module)
    seen = []

    def note(tensor):
        seen.append(tensor)
        return tensor

    for inner in (saved_tensors_hooks(note, lambda tensor: tensor), save_on_cpu()):
        before = offload.stats.stored
        assert_same(step(in_context(offload, in_context(inner, module)), module), expected)
        assert offload.stats.stored == before
        assert_same(step(in_context(inner, in_context(offload, module)), module), expected)
        assert offload.stats.stored > before
    assert seen


def test_where_hooks_are_switched_off_it_is_not_entered(offload):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        offload.__enter__()
    with offload:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def test_entered_twice(offload):
    module = block()
    expected = step(module, module)
    assert_same(step(in_context(offload, in_context(offload, module)), module), expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_graph_that_is_kept_runs_again(offload):
    module = block()
    x = torch.randn(32, 64, requires_grad=True)
    with offload:
        y = module(x * 2)
    offload.wait()
    used = offload.stats.used
    found = []
    for _ in range(2):
        torch.manual_seed(5)  # of stochastic rounding
        found.append(torch.autograd.grad(y.sum(), [x, *module.parameters()], retain_graph=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert offload.stats.used == used > 0


@pytest.mark.parametrize("backward_inside", [True, False])
def test_second_derivatives(backward_inside, offload):
    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def second(context, outer):
        with context:
            y = (torch.tanh(x * 2 @ w) ** 3).sum()
        with outer:
            dx, dw = torch.autograd.grad(y, (x, w), create_graph=True)
        return [dx, dw, *torch.autograd.grad((dx * dw).sum(), (x, w))]

    mine = second(offload, offload if backward_inside else nullcontext())
    assert offload.stats.stored > 0
    assert all(torch.equal(a, b) for a, b in zip(mine, second(nullcontext(), nullcontext()), strict=True))


def test_writes_in_place_are_noticed_as_without_offloading(offload):
    x = torch.randn(8, requires_grad=True)
    for context in (nullcontext(), offload):
        with context:
            y = (x * 2).exp()
            z = y.sum()
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


def test_a_parameter_that_is_updated_before_backward_is_noticed(offload):
    """It stays in memory, and is watched there."""
    layer = torch.nn.Linear(8, 8)
    with offload:
        y = layer(torch.randn(4, 8, requires_grad=True) * 2)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_reads_ahead_in_its_order(tmp_path):
    offload = cg.offload(tmp_path, min_bytes=0, prefetch=2)
    read = []
    from crossgrain.offload.record import Record

    x = torch.randn(64, requires_grad=True)
    with offload:
        y = x * 1
        for _ in range(5):
            y = y.exp()
    offload.wait()
    original = Record.read

    def noted(record):
        read.append(record.index)
        return original(record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "read", noted)
        y.grad_fn._raw_saved_result  # noqa: B018  the record is there, and not read
        assert read == []
        saved = y.grad_fn._saved_result
        offload.wait()
        assert saved.shape == x.shape and read == [5, 4, 3]
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert sorted(set(read)) == [1, 2, 3, 4, 5] and dx.shape == x.shape


def test_few_tensors_wait_to_be_written(tmp_path, monkeypatch):
    """The training thread waits when the disk is slower than it."""
    import threading

    from crossgrain.offload import store as stores

    go, waiting = threading.Semaphore(0), []
    write = stores.DirectoryStore.write

    def slow(store, place, source):
        go.acquire()
        write(store, place, source)

    monkeypatch.setattr(stores.DirectoryStore, "write", slow)
    offload = cg.offload(tmp_path, min_bytes=0, pending=2)
    engine = offload._engine
    submit = engine._worker.submit

    def submitted(function, *args):
        waiting.append(len([future for future in engine._waiting if not future.done()]))
        go.release()
        return submit(function, *args)

    monkeypatch.setattr(engine._worker, "submit", submitted)
    with offload:
        y = torch.randn(64, requires_grad=True) * 1
        for _ in range(6):
            y = y.exp()
    assert len(waiting) == 6 and max(waiting) <= 1, "with the one that is submitted, two"


def test_a_compiled_region_computes_alike(offload):
    torch.compiler.reset()
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))
    cg.convert(model, "mxfp8")
    x = torch.randn(32, 64)

    def gradients(run, context):
        leaf = x.clone().requires_grad_()
        with context:
            y = run(leaf * 2)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = gradients(compiled, nullcontext())
    found = gradients(compiled, offload)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    offload.wait()
    assert offload.stats.stored > 0 and offload.stats.used == 0
    torch.compiler.reset()


def test_inside_a_compiled_function_it_runs_in_eager_or_is_refused(offload):
    torch.compiler.reset()
    x = torch.randn(8, 8, requires_grad=True)

    def function(x):
        with offload:
            return (x * 2).exp()

    with pytest.raises(Exception, match="Unsupported context manager.*\n.*`Offload`"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    torch.compiler.reset()
    (expected,) = torch.autograd.grad(function(x).sum(), x)
    (found,) = torch.autograd.grad(torch.compile(function, backend="aot_eager")(x).sum(), x)
    assert torch.equal(found, expected)
    torch.compiler.reset()


def test_two_graphs_at_once(offload):
    module = block()
    x = torch.randn(32, 64, requires_grad=True)

    def gradients(context):
        torch.manual_seed(2)
        with context:
            a = module(x * 2)
            b = module(a * 3)
            c = module(x * 4)
        return [torch.autograd.grad(y.sum(), [x, *module.parameters()], retain_graph=True) for y in (a, c, b)]

    for mine, theirs in zip(gradients(offload), gradients(nullcontext()), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))
