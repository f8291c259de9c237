"""Operations on lists of tensors, against torch."""

import pytest
import torch

import crossgrain as cg
from crossgrain.optim.multi_tensor import (
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)


@pytest.fixture
def flag():
    return torch.zeros(1, dtype=torch.int32)


def tensors(*dtypes):
    return [torch.randn(3, 5).to(dtype) for dtype in dtypes or (torch.float32, torch.bfloat16)]


def test_scaling_writes_the_outputs_and_notes_what_is_not_finite(flag):
    inputs, outputs = tensors(), tensors(torch.float32, torch.float32)
    multi_tensor_applier(multi_tensor_scale, flag, [inputs, outputs], 0.5)
    for source, destination in zip(inputs, outputs, strict=True):
        assert torch.equal(destination, source.float() * 0.5)
    assert not flag.any()
    inputs[1][0, 0] = float("inf")
    multi_tensor_applier(multi_tensor_scale, flag, [inputs, outputs], 0.5)
    assert flag.item() == 1


def test_norms(flag):
    lists = [tensors()]
    flat = torch.cat([tensor.float().flatten() for tensor in lists[0]])
    total, each = multi_tensor_applier(multi_tensor_l2norm, flag, lists, True)
    assert total.shape == (1,) and total.dtype == torch.float32
    torch.testing.assert_close(total[0], flat.norm())
    torch.testing.assert_close(each, torch.stack([tensor.float().norm() for tensor in lists[0]]))
    total, each = multi_tensor_applier(multi_tensor_unscale_l2norm, flag, lists, torch.tensor([0.25]), False)
    torch.testing.assert_close(total[0], flat.norm() / 4)
    assert each.numel() == 0 and not flag.any()
    assert multi_tensor_applier(multi_tensor_l2norm, flag, [[]], False)[0].item() == 0


@pytest.mark.parametrize("mode, optimizer", [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam(mode, optimizer, flag):
    params = tensors(torch.float32, torch.float32)
    theirs = [param.clone().requires_grad_() for param in params]
    reference = optimizer(theirs, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    moments = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    for step in (1, 2, 3):
        grads = tensors(torch.float32, torch.float32)
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        reference.step()
        lists = [grads, params, *moments]
        multi_tensor_applier(multi_tensor_adam, flag, lists, 0.1, 0.8, 0.9, 1e-6, step, mode, 1, 0.1)
    for mine, other in zip(params, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach())
    before = params[0].clone()
    multi_tensor_applier(multi_tensor_adam, flag.fill_(1), lists, 0.1, 0.8, 0.9, 1e-6, 4, mode, 1, 0.1)
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov, flag):
    params = tensors(torch.float32, torch.float32)
    theirs = [param.clone().requires_grad_() for param in params]
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    momenta, copies = [torch.zeros_like(param) for param in params], [param.to(torch.bfloat16) for param in params]
    for step in range(3):
        grads = tensors(torch.float32, torch.float32)
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        reference.step()
        lists = [[grad * 4 for grad in grads], params, momenta, copies]
        multi_tensor_applier(multi_tensor_sgd, flag, lists, 0.1, 0.9, 0.0, 0.1, nesterov, step == 0, False, 0.25)
    for mine, other, copy in zip(params, theirs, copies, strict=True):
        torch.testing.assert_close(mine, other.detach())
        assert torch.equal(copy, mine.to(torch.bfloat16))


def test_adam_with_masters_writes_both(flag):
    masters = tensors(torch.float32, torch.float32)
    params, alone = [master.to(torch.bfloat16) for master in masters], [master.clone() for master in masters]
    grads = tensors(torch.float32, torch.float32)
    states = [[torch.zeros_like(master) for master in masters] for _ in range(4)]
    options = (0.1, 0.8, 0.9, 1e-6, 1, 1, 1, 0.1)
    multi_tensor_applier(multi_tensor_adam, flag, [grads, params, *states[:2], masters], *options)
    multi_tensor_applier(multi_tensor_adam, flag, [grads, alone, *states[2:]], *options)
    for param, master, expected in zip(params, masters, alone, strict=True):
        assert torch.equal(master, expected) and torch.equal(param, expected.to(torch.bfloat16))


def test_lists_that_do_not_fit_are_refused_before_anything_is_written(flag):
    whole, short = [torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(1)]
    written = [torch.zeros(2), torch.zeros(3)]
    with pytest.raises(ValueError, match="differ in number or shape"):
        multi_tensor_applier(multi_tensor_scale, flag, [short, written], 2.0)
    for lists in ([short, written, written, written], [whole[:1], written, written, written]):
        with pytest.raises(ValueError, match="differ in number or shape"):
            multi_tensor_applier(multi_tensor_adam, flag, lists, 0.1, 0.8, 0.9, 1e-6, 1, 1, 1, 0.1)
        with pytest.raises(ValueError, match="differ in number or shape"):
            multi_tensor_applier(multi_tensor_sgd, flag, lists, 0.1, 0.9, 0.0, 0.1, False, True, False)
    with pytest.raises(ValueError, match="takes 2 lists"):
        multi_tensor_applier(multi_tensor_scale, flag, [written], 2.0)
    assert all(tensor.abs().max() == 0 for tensor in written)


def test_a_flag_leaves_quantized_parameters_as_they_are(flag):
    """Bit for bit: writing the decoded numbers back would round them a second time."""
    param = cg.quantizer_for("nvfp4")(torch.randn(32, 32))
    grads, moments = [torch.randn(32, 32)], [[torch.zeros(32, 32)] for _ in range(2)]
    masters = [param.dequantize()]
    lists = [grads, [param], *moments, masters]
    for is_set in (1, 0):
        before = {name: buffer.clone() for name, buffer in param._buffers()}
        multi_tensor_applier(multi_tensor_adam, flag.fill_(is_set), lists, 0.1, 0.8, 0.9, 1e-6, 1, 1, 1, 0.1)
        same = [torch.equal(buffer, before[name]) for name, buffer in param._buffers()]
        assert all(same) if is_set else not all(same)
