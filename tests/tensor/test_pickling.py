"""Quantized tensors survive pickling, torch.save, deepcopy and state dicts bit for bit."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import crossgrain as cg
from crossgrain import COLUMNWISE, ROWWISE

from ..common.quantizers import assert_same_bytes

DIRECTIONS = [ROWWISE, COLUMNWISE]


def is_identity(quantizer):
    return isinstance(quantizer, cg.IdentityQuantizer)


# ---- pickling ----------------------------------------------------------------------------------------


def saved_and_loaded(obj, **options):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, **options)


def test_pickles_bit_for_bit(quantizer, x):
    q = quantizer(x.clone())
    for copied in (pickle.loads(pickle.dumps(q)), saved_and_loaded(q, weights_only=True), copy.deepcopy(q)):
        assert type(copied) is type(q)
        assert copied.dtype == q.dtype
        assert_same_bytes(copied, q)
        assert type(copied._quantizer) is type(q._quantizer)
        copied.quantize_(x)  # the quantizer travelled too


def test_parameters_stay_parameters(quantizer, x):
    q = nn.Parameter(quantizer(x.clone()))
    for copied in (pickle.loads(pickle.dumps(q)), saved_and_loaded({"w": q}, weights_only=True)["w"], copy.deepcopy(q)):
        assert isinstance(copied, nn.Parameter)
        assert copied.requires_grad
        assert_same_bytes(copied, q)


def test_a_pickled_slice_does_not_carry_the_rest(quantizer, x):
    part = quantizer(x.clone()).split(128, dim=1)[1]
    loaded = saved_and_loaded(part, weights_only=True)
    assert_same_bytes(loaded, part)
    whole = io.BytesIO()
    torch.save(loaded, whole)
    full = io.BytesIO()
    torch.save(quantizer(x.clone()), full)
    assert len(whole.getvalue()) < len(full.getvalue())


def test_a_tampered_state_is_refused(x):
    rebuild, (cls, state, *rest) = cg.quantize(x, "mxfp8").__reduce_ex__(2)
    state["_surprise"] = 1
    with pytest.raises(ValueError, match="other fields"):
        rebuild(cls, state, *rest)


def test_buffers_that_do_not_fit_are_refused(quantizer, x):
    rebuild, (cls, state, *rest) = quantizer(x.clone()).__reduce_ex__(2)
    for name in (name for name in cls._buffer_names if state[name] is not None):
        with pytest.raises(ValueError, match="plane of shape .128, 256. needs"):
            rebuild(cls, {**state, name: state[name].flatten()[:-1]}, *rest)


def test_map_location_meta(quantizer, x):
    loaded = saved_and_loaded(quantizer(x.clone()), map_location="meta", weights_only=True)
    assert loaded.device.type == "meta"
    assert isinstance(loaded, cg.QuantizedTensor)


def test_deepcopy_keeps_what_hangs_on_a_parameter(quantizer, x):
    q = nn.Parameter(quantizer(x.clone()))
    q.main_grad = torch.ones(2)
    q.grad = torch.ones_like(q)
    copied = copy.deepcopy(q)
    assert torch.equal(copied.main_grad, q.main_grad)
    assert copied.main_grad is not q.main_grad
    assert torch.equal(copied.grad, q.grad)


def test_deepcopy_has_delayed_scaling_state_of_its_own(x):
    quantizer = cg.Float8Quantizer(torch.ones(1), torch.zeros(1), cg.DType.kFloat8E4M3)
    q = quantizer(x)
    seen = quantizer.amax.clone()
    copy.deepcopy(q).quantize_(x * 1000)
    assert torch.equal(quantizer.amax, seen)


def test_only_quantizers_and_tensors_are_rebuilt():
    from crossgrain.quantizers.base import make_quantizer
    from crossgrain.tensor.pickling import make_tensor

    with pytest.raises(TypeError, match="not a quantizer"):
        make_quantizer(nn.Linear, {"a": 1})
    with pytest.raises(TypeError, match="not a class of quantized tensors"):
        make_tensor(nn.Linear, {}, False, False)


def test_state_dict_round_trip(quantizer, x):
    source, target = nn.Module(), nn.Module()
    source.weight, target.weight = nn.Parameter(quantizer(x.clone())), nn.Parameter(quantizer(x * 2))
    target.load_state_dict(source.state_dict())
    assert_same_bytes(target.weight, source.weight)
    target.weight = nn.Parameter(quantizer(x * 2))
    target.load_state_dict(source.state_dict(), assign=True)
    assert_same_bytes(target.weight, source.weight)


@pytest.mark.parametrize(
    "change",
    [
        {"_rowwise_data": "text"},
        {"_rowwise_scale_inv": 1.0},
        {"_shape": (64,)},
        {"_shape": (2**40, 2**40)},
        {"_rowwise_data": torch.zeros(32, 64, dtype=torch.uint8).t()},
        {"_quantizer": True},
    ],
    ids=["text", "number", "another shape", "a huge shape", "turned codes", "no quantizer"],
)
def test_states_that_do_not_fit_together_are_refused(change):
    from crossgrain.tensor.pickling import make_tensor, reduce_tensor

    cls, state, *rest = reduce_tensor(cg.quantize(torch.ones(32, 64), "mxfp8"))[1]
    with pytest.raises(ValueError, match="the pickled state of a MXFP8Tensor does not fit together"):
        make_tensor(cls, {**state, **change}, *rest)
