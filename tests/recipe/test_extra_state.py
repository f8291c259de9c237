"""Delayed scaling in checkpoints: a tensor of bytes, or its fields, checked before anything is written."""

import io

import pytest
import torch

import crossgrain as cg
from crossgrain.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    FP8Format,
    MXFP8BlockScaling,
    QuantizerRole,
    RecipeState,
)
from crossgrain.recipe.extra_state import (
    check_extra_state,
    extra_state_of,
    load_extra_state,
    read_extra_state,
    resized_history,
)
from crossgrain.recipe.pickled_state import holds_nothing, passes_over


def states(recipe=None, filled=False, counts=(3, 2)):
    recipe = recipe or DelayedScaling(amax_history_len=4)
    made = []
    for mode, count in zip(("forward", "backward"), counts, strict=True):
        roles = [QuantizerRole("linear", "input")] * count
        state = RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles)
        state.make_quantizers()
        if filled:
            state.scale.uniform_(1, 2)
            state.amax_history.uniform_(1, 2)
        made.append(state)
    return made


def encoded():
    return extra_state_of(*states(filled=True))


def example():
    return read_extra_state(encoded())


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.scale, other.scale)
        assert torch.equal(mine.amax_history, other.amax_history)


def test_contents():
    extra = example()
    assert {name: type(value) for name, value in extra.items()} == {
        "version": int,
        "forward.scale": torch.Tensor,
        "forward.amax_history": torch.Tensor,
        "forward.fp8_dtype": int,
        "backward.scale": torch.Tensor,
        "backward.amax_history": torch.Tensor,
        "backward.fp8_dtype": int,
    }
    assert (extra["forward.fp8_dtype"], extra["backward.fp8_dtype"]) == (7, 8)


def test_round_trip_through_a_file():
    saved, loaded = states(filled=True), states()
    quantizers = loaded[0].make_quantizers()
    file = io.BytesIO()
    torch.save(extra_state_of(*saved), file)
    file.seek(0)
    load_extra_state(torch.load(file, weights_only=True), *loaded)
    assert_same(loaded, saved)
    assert [q.scale.item() for q in quantizers] == saved[0].scale.tolist(), "in place: quantizers see it"


def test_what_is_saved_is_a_copy():
    saved = states(filled=True)
    extra = extra_state_of(*saved)
    saved[0].scale.zero_()
    assert read_extra_state(extra)["forward.scale"].all()
    fields = read_extra_state(extra)
    fields["forward.scale"].zero_()
    assert read_extra_state(extra)["forward.scale"].all()


def test_requests_are_saved_like_the_recipe():
    recipe = CustomRecipe(lambda role: DelayedScalingRequest(amax_history_len=4))
    saved, loaded = states(recipe, filled=True), states(recipe)
    load_extra_state(extra_state_of(*saved), *loaded)
    assert_same(loaded, saved)


def test_recipes_without_histories_have_none():
    stateless = states(MXFP8BlockScaling())
    for extra in (extra_state_of(*stateless), extra_state_of(None, None)):
        assert extra.numel() == 0 and extra.dtype == torch.uint8 and read_extra_state(extra) == {}
    load_extra_state(example(), *stateless)
    for nothing in (None, {}, torch.empty(0, dtype=torch.uint8)):
        fresh = states()
        load_extra_state(nothing, *fresh)
        assert fresh[0].scale.tolist() == [1.0] * 3


def test_one_pass_alone():
    forward, _ = states(filled=True)
    extra = extra_state_of(forward, None)
    assert "backward.scale" not in read_extra_state(extra)
    fresh, other = states()
    load_extra_state(extra, fresh, None)
    assert_same([fresh], [forward])
    with pytest.raises(ValueError, match="proj: the extra state has no backward part"):
        load_extra_state(extra, fresh, other, "proj")


@pytest.mark.parametrize("length, expected", [(5, [9, 0, 1, 2, 3]), (4, [9, 1, 2, 3]), (3, [9, 2, 3]), (1, [9])])
def test_a_history_of_another_length_keeps_what_is_newest(length, expected):
    history = torch.tensor([9.0, 1.0, 2.0, 3.0]).view(4, 1)
    assert resized_history(history, length)[:, 0].tolist() == expected
    assert resized_history(torch.tensor([[7.0]]), 3)[:, 0].tolist() == [7, 0, 0]


def test_loading_another_length():
    saved, loaded = states(filled=True), states(DelayedScaling(amax_history_len=2))
    load_extra_state(extra_state_of(*saved), *loaded)
    assert torch.equal(loaded[0].amax_history, saved[0].amax_history[[0, 3]])


def changed(**values):
    def change(extra):
        for name, value in values.items():
            key = name.replace("__", ".")
            extra[key] = value(extra[key]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    "change, error, match",
    [
        (changed(version=2), ValueError, "fc: the extra state has version 2"),
        (changed(surprise=1), ValueError, "the extra state has unknown keys 'surprise'"),
        (lambda extra: extra.pop("backward.fp8_dtype"), ValueError, "the extra state has no backward.fp8_dtype"),
        (
            changed(forward__scale=b"\x80\x04"),
            TypeError,
            "forward.scale of the extra state must be a float32 tensor, got bytes",
        ),
        (changed(forward__scale=lambda t: t.double()), TypeError, "got torch.float64"),
        (changed(forward__scale=lambda t: t[:2]), ValueError, r"\[2\] and \[4, 3\]"),
        (changed(forward__amax_history=lambda t: t[0]), ValueError, r"\[3\] and \[3\]"),
        (changed(forward__amax_history=lambda t: t[:0]), ValueError, r"\[3\] and \[0, 3\]"),
        (
            changed(backward__scale=lambda t: t * 0),
            ValueError,
            "backward.scale of the extra state must hold positive, finite",
        ),
        (
            changed(backward__scale=lambda t: t * torch.nan),
            ValueError,
            "backward.scale of the extra state must hold positive, finite",
        ),
        (
            changed(backward__amax_history=lambda t: -t),
            ValueError,
            "backward.amax_history of the extra state must not hold NaN",
        ),
        (
            changed(backward__amax_history=lambda t: t * torch.nan),
            ValueError,
            "backward.amax_history of the extra state must not hold NaN",
        ),
        (
            changed(forward__fp8_dtype=4),
            ValueError,
            "forward.fp8_dtype of the extra state is 4, which is not an FP8 type",
        ),
        (changed(forward__fp8_dtype="e4m3"), ValueError, "'e4m3', which is not an FP8 type"),
    ],
)
def test_damaged_state_is_refused_before_anything_is_written(change, error, match):
    extra, fresh = example(), states()
    change(extra)
    with pytest.raises(error, match=match):
        check_extra_state(extra, "fc")
    with pytest.raises(error, match=match):
        load_extra_state(extra, *fresh, "fc")
    assert_same(fresh, states())


def with_bytes(tensor, at, *values):
    tensor = tensor.clone()
    tensor[at : at + len(values)] = torch.tensor(values, dtype=torch.uint8)
    return tensor


# The head: 23 bytes of magic, 1 of the version, then three numbers of 4 bytes for each pass.
@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: t[:24], "fc: the extra state is cut off: it has 24 bytes, its head 48"),
        (lambda t: t[:-1], r"has 147 bytes, but its head describes 148"),
        (lambda t: t[:48], "has 48 bytes, but its head describes 148"),
        (lambda t: torch.cat((t, t[:4])), "has 152 bytes"),
        (lambda t: with_bytes(t, 23, 2), "version 2, but only version 1"),
        (lambda t: with_bytes(t, 24, 255, 255, 255, 255), "but its head describes"),
        (lambda t: with_bytes(t, 32, 4), "forward.fp8_dtype of the extra state is 4, which is not an FP8 type"),
        (lambda t: with_bytes(t, 48, 0, 0, 192, 127), "forward.scale of the extra state must hold positive, finite"),
        (lambda t: with_bytes(t, 60, 0, 0, 192, 127), "forward.amax_history of the extra state must not hold NaN"),
        (lambda t: with_bytes(t, 147, 191), "backward.amax_history of the extra state must not hold NaN or negative"),
    ],
)
def test_damaged_bytes_are_refused_before_anything_is_written(change, match):
    extra, fresh = change(encoded()), states()
    with pytest.raises(ValueError, match=match):
        check_extra_state(extra, "fc")
    with pytest.raises(ValueError, match=match):
        load_extra_state(extra, *fresh, "fc")
    assert_same(fresh, states())


def test_bytes_that_are_not_ours_are_refused():
    for other in (torch.ones(80, dtype=torch.uint8), encoded().float(), encoded()[1:], encoded()[None]):
        with pytest.raises(TypeError, match="must be a tensor of bytes that crossgrain has made.* tensor"):
            check_extra_state(other)


def test_our_bytes_are_not_taken_for_a_pickle():
    extra = encoded()
    assert not holds_nothing(bytes(extra.numpy())) and not passes_over(extra) and not passes_over(extra[:30])
    with pytest.raises(RuntimeError, match="pickle"):
        passes_over(extra[1:])


@pytest.mark.parametrize(
    "others, match",
    [
        (lambda: states(counts=(3, 3)), "for 2 backward tensors, but the module has 3"),
        (
            lambda: states(DelayedScaling(fp8_format=FP8Format.E4M3)),
            "backward scales of the extra state are for kFloat8E5M2",
        ),
    ],
)
def test_state_of_other_modules_is_refused_before_anything_is_written(others, match):
    fresh = others()
    with pytest.raises(ValueError, match=match):
        load_extra_state(example(), *fresh)
    assert set(fresh[0].scale.tolist()) == {1.0}


def test_infinite_amaxes_are_history():
    """A step that overflowed has been seen; it must not make a checkpoint unreadable."""
    saved, loaded = states(filled=True), states()
    saved[0].amax_history[2, 1] = torch.inf
    load_extra_state(extra_state_of(*saved), *loaded)
    assert_same(loaded, saved)
    assert cg.DType(read_extra_state(extra_state_of(*loaded))["forward.fp8_dtype"]) is cg.DType.kFloat8E4M3
