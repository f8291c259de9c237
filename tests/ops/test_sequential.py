"""Sequential: a list, groups of operations, extra tensors, channels; and what one autograd function has to keep."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import Tensor

from crossgrain import ops
from crossgrain.ops.fuser import OperationFuser
from crossgrain.recipe import DelayedScaling, MXFP8BlockScaling

from ..common.ops_cases import RECIPES, assert_close, assert_same, grads_of, quantized


def _scales(*factors: float) -> ops.Sequential:
    return ops.Sequential(*(ops.ConstantScale(factor) for factor in factors))


def _factors(block: ops.Sequential) -> list[float]:
    return [op.scale for op in block]


# ---- a list ----------------------------------------------------------------------------------------


def test_indices_and_slices() -> None:
    block = _scales(1, 2, 3, 4)
    assert len(block) == 4 and block[1].scale == 2 and block[-1].scale == 4
    assert isinstance(block[1:3], ops.Sequential) and _factors(block[1:3]) == [2, 3]
    assert _factors(block[::-1]) == [4, 3, 2, 1]
    assert block[1:3][0] is block[1]
    with pytest.raises(IndexError):
        block[4]


def test_changes() -> None:
    block = _scales(1, 2)
    block.append(ops.ConstantScale(3)).extend(_scales(4, 5)).insert(0, ops.ConstantScale(0))
    assert _factors(block) == [0, 1, 2, 3, 4, 5]
    assert block.pop().scale == 5 and block.pop(0).scale == 0
    del block[1]
    block[0] = ops.ConstantScale(9)
    assert _factors(block) == [9, 3, 4]
    assert _factors(block + _scales(7)) == [9, 3, 4, 7] and len(block) == 3
    block += _scales(8)
    assert _factors(block) == [9, 3, 4, 8]
    assert [name for name, _ in block.named_children()] == ["0", "1", "2", "3"]
    with pytest.raises(TypeError, match="a Sequential takes modules .*, got int"):
        block.append(3)


def test_changes_are_noticed_by_forward() -> None:
    block, x = _scales(2, 3), torch.ones(2)
    assert torch.equal(block(x), x * 6)
    block.append(ops.ConstantScale(4))
    assert torch.equal(block(x), x * 24)
    block[0] = ops.Identity()
    assert torch.equal(block(x), x * 12)


def test_named_modules() -> None:
    block = ops.Sequential(OrderedDict(first=ops.ConstantScale(2.0), second=ops.Identity()))
    assert [name for name, _ in block.named_children()] == ["first", "second"]
    assert torch.equal(block(torch.ones(2)), torch.full((2,), 2.0))


def test_empty() -> None:
    x = torch.randn(3)
    assert ops.Sequential()(x) is x


def test_groups_of_neighbours() -> None:
    block = ops.Sequential(
        ops.Linear(8, 8), ops.GELU(), torch.nn.Tanh(), ops.Bias(8), torch.nn.Identity(), torch.nn.ReLU(), ops.GELU()
    )
    kinds = [type(group) for group in block._module_groups]
    assert kinds == [
        OperationFuser,
        torch.nn.Tanh,
        OperationFuser,
        torch.nn.Identity,
        torch.nn.ReLU,
        OperationFuser,
    ]
    assert [type(op) for op in block._module_groups[0]._basic_ops] == [ops.BasicLinear, ops.Bias, ops.GELU]
    x = torch.randn(4, 8, requires_grad=True)
    linear, bias = block[0], block[3]

    def reference() -> Tensor:
        h = torch.nn.functional.gelu(torch.nn.functional.linear(x, linear.weight, linear.bias), approximate="tanh")
        return torch.nn.functional.gelu(torch.relu(torch.tanh(h) + bias.bias), approximate="tanh")

    dy = torch.randn(4, 8)
    tensors = [x, *block.parameters()]
    assert_close(grads_of(lambda: block(x), tensors, dy), grads_of(reference, tensors, dy), torch.float32)


def test_copies_and_pickles() -> None:
    block, x = ops.Sequential(ops.Linear(8, 8), ops.GELU()), torch.randn(4, 8)
    y = block(x)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(x), y)
        assert other[0].weight is not block[0].weight
    again = ops.Sequential(ops.Linear(8, 8), ops.GELU())
    again.load_state_dict(block.state_dict())
    assert torch.equal(again(x), y)


# ---- extra tensors ---------------------------------------------------------------------------------


def test_extra_inputs_and_outputs() -> None:
    block = ops.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), ops.ConstantScale(2.0), ops.AddExtraInput())
    x, a, b = (torch.randn(3, requires_grad=True) for _ in range(3))
    y, extra = block(x, a, b)
    assert torch.equal(y, (x + a) * 2 + b) and torch.equal(extra, x + a)
    (y.sum() * 3 + extra.sum()).backward()
    assert [t.grad[0].item() for t in (x, a, b)] == [7, 7, 3]


def test_extra_tensors_of_several_groups() -> None:
    block = ops.Sequential(
        ops.AddExtraInput(), ops.MakeExtraOutput(), torch.nn.Tanh(), ops.MakeExtraOutput(), ops.AddExtraInput()
    )
    x, a, b = torch.randn(3), torch.randn(3), torch.randn(3)
    y, first, second = block(x, a, b)
    assert torch.equal(first, x + a) and torch.equal(second, torch.tanh(x + a)) and torch.equal(y, second + b)


def test_number_of_extra_inputs_is_checked() -> None:
    block = ops.Sequential(ops.AddExtraInput())
    for extras in ([], [torch.ones(2)] * 2):
        with pytest.raises(ValueError, match=f"takes 1 extra inputs, but {len(extras)} were given"):
            block(torch.ones(2), *extras)
        with pytest.raises(ValueError, match=f"takes 1 extra inputs, but {len(extras)} were given"):
            block[0](torch.ones(2), *extras)


def test_extra_output_alone_carries_gradients() -> None:
    op, x = ops.MakeExtraOutput(), torch.randn(3, requires_grad=True)
    _, extra = op(x)
    extra.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_in_place_addition_writes_to_the_extra_input() -> None:
    x, extra = torch.randn(3), torch.randn(3)
    wanted = x + extra
    y = ops.AddExtraInput(in_place=True)(x, extra)
    assert torch.equal(extra, wanted) and y.data_ptr() == extra.data_ptr()


def test_in_place_gradients_are_added_to_that_of_the_branch() -> None:
    x = torch.randn(3, requires_grad=True)
    y, extra = ops.MakeExtraOutput(in_place=True)(x)
    grad = torch.full((3,), 5.0)
    torch.autograd.backward([y, extra], [torch.ones(3), grad])
    assert torch.equal(x.grad, torch.full((3,), 6.0)) and torch.equal(grad, x.grad)


# ---- channels --------------------------------------------------------------------------------------


def _residual(output_to_caller: bool) -> ops.Sequential:
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=output_to_caller)
    add.set_extra_input_channel(0, "residual")
    return ops.Sequential(ops.Linear(64, 64), make, ops.RMSNorm(64), ops.Linear(64, 64), add)


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("output_to_caller", [True, False])
def test_a_residual_inside_the_sequence(output_to_caller: bool, recipe: str | None) -> None:
    block = _residual(output_to_caller)
    parts = ops.Sequential(block[0], ops.MakeExtraOutput(), block[2], block[3]), ops.AddExtraInput()
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)
    made_recipe = None if recipe is None else RECIPES[recipe]()
    tensors = [x, *block.parameters()]

    def outside() -> Tensor:
        y, residual = parts[0](x)
        return parts[1](y, residual)

    def inside() -> Tensor:
        result = block(x)
        assert isinstance(result, tuple) == output_to_caller
        return result[0] if output_to_caller else result

    assert_same(grads_of(inside, tensors, dy, made_recipe), grads_of(outside, tensors, dy, made_recipe))


def test_one_channel_for_many_readers_and_the_caller() -> None:
    make = ops.MakeExtraOutput()
    make.set_extra_output_channel(0, "x")
    adds = [ops.AddExtraInput() for _ in range(2)]
    for add in adds:
        add.set_extra_input_channel(0, "x")
    x = torch.randn(3, requires_grad=True)
    y, extra = ops.Sequential(make, *adds)(x)
    assert torch.equal(y, x + x + x)
    (y + 10 * extra).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 13.0))


class _Looks(ops.BasicOperation):
    """Adds its extra input, and notes whether it would get a gradient."""

    num_extra_inputs = 1

    def fuser_forward(self, ctxs, input_, *, basic_op_extra_inputs, **kwargs):  # type: ignore[no-untyped-def]
        ((extra,),) = basic_op_extra_inputs
        self.gets_gradient = extra.requires_grad
        return input_ + extra, [()]

    def fuser_backward(self, ctxs, grad_output, *, basic_op_grad_extra_outputs):  # type: ignore[no-untyped-def]
        return grad_output, [()], [(grad_output if self.gets_gradient else None,)]


def test_a_tensor_of_a_channel_says_whether_it_gets_a_gradient() -> None:
    make, looks = ops.MakeExtraOutput(), _Looks()
    make.set_extra_output_channel(0, "x", output_to_caller=False)
    looks.set_extra_input_channel(0, "x")
    model = ops.Sequential(ops.Identity(), make, looks)
    x = torch.randn(3, requires_grad=True)
    model(x).sum().backward()
    assert looks.gets_gradient
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    plain = torch.randn(3)
    model(plain)
    assert not looks.gets_gradient
    assert not plain.requires_grad


class _MakeAndAdd(ops.FusedOperation):
    """Both ends of a channel in one operation: y = x + x."""

    leaves_out = True

    def fuser_forward(self, ctxs, input_, *, basic_op_extra_inputs, **kwargs):  # type: ignore[no-untyped-def]
        assert basic_op_extra_inputs == [(), (None,)]
        return input_ + input_, [(None if self.leaves_out else input_,), ()]

    def fuser_backward(self, ctxs, grad_output, *, basic_op_grad_extra_outputs):  # type: ignore[no-untyped-def]
        ((from_outside,), _) = basic_op_grad_extra_outputs
        dx = 2 * grad_output if from_outside is None else 2 * grad_output + from_outside
        return dx, [(), ()], [(), (grad_output,)]  # the gradient of the extra input is in dx already


def _fuse(found, *, recipe):  # type: ignore[no-untyped-def]
    for i in range(len(found) - 1):
        if isinstance(found[i], ops.MakeExtraOutput) and isinstance(found[i + 1], ops.AddExtraInput):
            return [*found[:i], _MakeAndAdd([found[i], found[i + 1]]), *found[i + 2 :]]
    return found


@pytest.mark.parametrize("passes", ["both", "forward", "backward"])
def test_a_fused_operation_with_both_ends_of_a_channel_passes_it_on_by_itself(passes, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    name = {"both": "forward_backward", "forward": "forward", "backward": "backward"}[passes]
    monkeypatch.setattr(ops.OperationFuser, f"{name}_fusion_functions", [_fuse])
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    make.set_extra_output_channel(0, "x", output_to_caller=False)
    add.set_extra_input_channel(0, "x")
    x = torch.randn(3, requires_grad=True)
    y = ops.Sequential(make, add)(x)
    assert torch.equal(y, x + x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_what_is_needed_outside_of_a_fusion_cannot_be_left_out(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ops.OperationFuser, "forward_backward_fusion_functions", [_fuse])
    make, add, later = ops.MakeExtraOutput(), ops.AddExtraInput(), ops.AddExtraInput()
    add.set_extra_input_channel(0, "x")
    make.set_extra_output_channel(0, "x", output_to_caller=True)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="extra output 0 of operation 0 is public, but _MakeAndAdd returned None"):
        ops.Sequential(make, add)(x)
    make.set_extra_output_channel(0, "x", output_to_caller=False)
    later.set_extra_input_channel(0, "x")
    with pytest.raises(RuntimeError, match="outside its forward fusion, but _MakeAndAdd returned None"):
        ops.Sequential(make, add, later)(x)
    monkeypatch.setattr(_MakeAndAdd, "leaves_out", False)
    ops.Sequential(make, add, later)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


def test_wrong_channels_are_refused() -> None:
    add, make = ops.AddExtraInput(), ops.MakeExtraOutput()
    add.set_extra_input_channel(0, "x")
    make.set_extra_output_channel(0, "x")
    with pytest.raises(ValueError, match="AddExtraInput at position 0 reads the channel 'x', but no earlier"):
        ops.Sequential(add, make)(torch.ones(2))
    with pytest.raises(
        ValueError, match="MakeExtraOutput at position 1 writes to the channel 'x', but an earlier operation"
    ):
        ops.Sequential(make, make)(torch.ones(2))
    with pytest.raises(ValueError, match="AddExtraInput has 1 extra inputs, so there is no index 1"):
        add.set_extra_input_channel(1, "x")
    for index, channel, error, message in (
        (0, "", ValueError, "name of a channel must not be empty"),
        (0, 3, TypeError, "name of a channel must be a str, got 3"),
        ("0", "x", TypeError, "index of an extra input must be an int, got '0'"),
        (-1, "x", ValueError, "there is no index -1"),
    ):
        with pytest.raises(error, match=message):
            add.set_extra_input_channel(index, channel)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="AddExtraInput has 0 extra outputs"):
        add.set_extra_output_channel(0, "x")


# ---- keyword arguments -----------------------------------------------------------------------------


class _Power(ops.BasicOperation):
    def op_forward(self, ctx, input_, *, power=1, **kwargs):  # type: ignore[no-untyped-def]
        ctx.power = power
        ctx.save_for_backward(input_)
        return input_**power

    def op_backward(self, ctx, grad_output):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return grad_output * ctx.power * x ** (ctx.power - 1), []


def test_keyword_arguments() -> None:
    block, x = ops.Sequential(_Power(), _Power()), torch.randn(3, requires_grad=True)
    y = block(x, op_kwargs={0: {"power": 3}, block[1]: {"power": 2}})
    y.sum().backward()
    assert_close([y, x.grad], [x.detach() ** 6, 6 * x.detach() ** 5], torch.float32)
    assert torch.equal(block[0](x, power=2), x**2)
    with pytest.raises(ValueError, match="the keys of op_kwargs must be operations of this sequence"):
        block(x, op_kwargs={ops.Identity(): {}})
    with pytest.raises(ValueError, match="keyword arguments for 1 operations, but there are 2"):
        OperationFuser(list(block))(x, basic_op_kwargs=[{}])


# ---- one autograd function -------------------------------------------------------------------------


def test_one_node_in_the_graph() -> None:
    y = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))(torch.randn(4, 8))
    names = {type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None}
    assert "FuserFunction" in type(y.grad_fn).__name__ and names == {"AccumulateGrad"}


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_kept_graph_runs_backward_again(recipe: str | None) -> None:
    block = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 64), ops.GELU(cache_quantized_input=True))
    x = torch.randn(32, 64, requires_grad=True)
    with quantized(None if recipe is None else RECIPES[recipe]()):
        loss = block(x).square().sum()
    torch.manual_seed(1)
    first = torch.autograd.grad(loss, [x, *block.parameters()], retain_graph=True)
    if recipe == "fp8_delayed":  # whose scales have changed meanwhile
        return
    torch.manual_seed(1)
    assert_same(first, torch.autograd.grad(loss, [x, *block.parameters()]))


def test_in_place_changes_of_saved_tensors_are_noticed() -> None:
    block, x = ops.Sequential(ops.GELU()), torch.randn(4, requires_grad=True)
    given = x * 1
    y = block(given)
    given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_changes_inside_the_sequence_are_noticed() -> None:
    """Autograd looks at what is saved only when the whole sequence has run."""
    x = torch.randn(4, 8, requires_grad=True)
    given = x * 1
    with pytest.raises(RuntimeError, match="was changed in place by a later one: do not use in_place"):
        ops.Sequential(ops.BasicLinear(8, 8), ops.AddExtraInput(in_place=True))(given, given)
    make, add = ops.MakeExtraOutput(), ops.AddExtraInput(in_place=True)
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    with pytest.raises(RuntimeError, match="do not use in_place"):
        ops.Sequential(make, ops.RMSNorm(8), add)(given)


def test_gradients_of_the_caller_are_not_written_to_through_a_channel() -> None:
    make, add = ops.MakeExtraOutput(in_place=True), ops.AddExtraInput()
    make.set_extra_output_channel(0, "residual", output_to_caller=False)
    add.set_extra_input_channel(0, "residual")
    x, dy = torch.randn(4, requires_grad=True), torch.ones(4)
    ops.Sequential(make, ops.ConstantScale(2.0), add)(x).backward(dy)
    assert torch.equal(x.grad, torch.full((4,), 3.0)) and torch.equal(dy, torch.ones(4))


def test_saved_memory_is_let_go_after_backward() -> None:
    block = ops.Sequential(ops.GELU(cache_quantized_input=True), ops.Linear(32, 32), ops.RMSNorm(32))
    with quantized(MXFP8BlockScaling()):
        y = block(torch.randn(32, 32, requires_grad=True))
    run = y.grad_fn.run
    y.sum().backward()
    assert not any(context.saved_tensors for context in run.contexts)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_frozen_parameters_and_inference() -> None:
    block, x = ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        assert block(x).grad_fn is None
    block[0].requires_grad_(False)
    block(x).sum().backward()
    assert block[0].weight.grad is None and block[2].weight.grad is not None
    block.requires_grad_(False)
    assert block(x).grad_fn is None


def test_checkpointing_replays() -> None:
    block = ops.Sequential(ops.Linear(64, 64), ops.Dropout(0.3), ops.GELU(), ops.Linear(64, 64))
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)

    def run() -> Tensor:
        with quantized(RECIPES["nvfp4"]()):
            return block(x)

    def checkpointed() -> Tensor:
        return torch.utils.checkpoint.checkpoint(run, use_reentrant=False)

    tensors = [x, *block.parameters()]
    assert_same(grads_of(checkpointed, tensors, dy), grads_of(run, tensors, dy))


def test_delayed_scaling_learns_in_both_passes() -> None:
    block = ops.Sequential(ops.GELU(), ops.Linear(16, 16, bias=False), ops.ReLU(), ops.Linear(16, 16, bias=False))
    x = torch.randn(16, 16)
    recipe = DelayedScaling(amax_history_len=3)
    for _ in range(2):
        with quantized(recipe):
            y = block(x)
        y.sum().backward()
    for op in (block[1].basic_ops[0], block[3].basic_ops[0]):
        for state in op._built.states.values():
            assert (state.delayed.amax_history[1:].max(0).values > 0).all()


def test_a_quantized_tensor_can_be_given() -> None:
    """Operations decode what they cannot use."""
    block = ops.Sequential(ops.Quantize(), ops.Bias(64), ops.GELU(), ops.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    with quantized(MXFP8BlockScaling()):
        block(x).sum().backward()
    assert x.grad is not None
