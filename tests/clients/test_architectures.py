"""Every architecture: its products are accounted for, it trains, generates, recomputes, saves, loads and compiles.

The table in docs/reference/models.md is made from this: ``python -m tests.clients.test_architectures`` writes it anew.
"""

import contextlib
import copy
import math
from pathlib import Path

import pytest
import torch

import crossgrain as cg
from crossgrain.convert.selection import WITHOUT_CALLING

pytest.importorskip("transformers")

from .architectures import ARCHITECTURES, TOKENS, make

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
RECIPE = "nvfp4"
NAMES = list(ARCHITECTURES)


def loss_of(model, **arguments):
    result = model(**arguments)
    return result["loss"]


def converted(name: str, recipe: str = RECIPE, **options):
    model = make(name).train()
    report = cg.convert(model, recipe, **options)
    return model, report


def row_of(name: str) -> str:
    """The line of the table for an architecture."""
    _, report = converted(name, inputs=ARCHITECTURES[name].arguments())
    left: dict[str, float] = {}
    for path, why in report.left.items():
        kind = why.partition(";")[0].removeprefix("by default, ").removesuffix(" stay in high precision")
        kind = "convolutions" if kind.startswith("a convolution") else kind
        kind = "read without a call" if WITHOUT_CALLING in kind else kind
        left[kind] = left.get(kind, 0.0) + report.share(path)
    rest = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in left.items() if share >= 0.0005)
    quantized, activations = 100 * report.quantized_share, 100 * report.activation_share
    return f"| {name} | {len(report.converted)} | {quantized:.1f} % | {rest or '-'} | {activations:.1f} % |"


@pytest.mark.parametrize("name", NAMES)
def test_every_product_is_accounted_for(name):
    _, report = converted(name, inputs=ARCHITECTURES[name].arguments())
    assert report.quantized_share >= ARCHITECTURES[name].share
    accounted = report._share([*report.formats, *report.left])
    assert accounted == pytest.approx(1)
    shapes = cg.convert(make(name), "hp", skip=lambda path, module: False)
    assert {product.path for product in shapes.products} == {each.path for each in report.products if each.weight}


def test_the_page_has_the_numbers_of_this_run():
    shown = [
        line for line in PAGE.read_text().splitlines() if line.startswith("| ") and line[2:].split(" |")[0] in NAMES
    ]
    assert shown == [row_of(name) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_in_high_precision_it_is_the_same_model(name):
    """Only the order of sums differs, as of experts that are multiplied one by one."""
    plain, arguments = make(name).train(), ARCHITECTURES[name].arguments()
    model, _ = converted(name)
    found = []
    for each in (plain, model):
        with cg.autocast(enabled=False) if each is model else contextlib.nullcontext():
            loss = loss_of(each, **arguments)
            loss.backward()
        found.append((loss, {path: p.grad for path, p in each.named_parameters() if p.grad is not None}))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[0][1].keys() == found[1][1].keys()
    for path, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][path], gradient, rtol=1e-3, atol=1e-5, msg=path)


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_of_training(name):
    """The loss falls as in high precision. With 4-bit numbers in tiny layers, it stays within a few percent of it."""
    arguments, losses = ARCHITECTURES[name].arguments(), {}
    for recipe in ("hp", "mxfp8", RECIPE):
        model, _ = converted(name, recipe)
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        found = []
        for _ in range(3):
            loss = loss_of(model, **arguments)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses[recipe] = found
        assert all(map(math.isfinite, found)) and found[-1] < found[0]
    assert losses["mxfp8"] != losses["hp"] != losses[RECIPE]
    assert losses["mxfp8"] == pytest.approx(losses["hp"], rel=0.05)
    assert losses[RECIPE] == pytest.approx(losses["hp"], rel=0.15)


@pytest.mark.parametrize("name", [name for name in NAMES if ARCHITECTURES[name].generates])
@torch.no_grad()
def test_generating_with_a_cache_is_generating_without(name):
    """Rows are quantized alone in MXFP8, so the cache changes only the order of sums; logits differ by rounding."""
    model, _ = converted(name, "mxfp8")
    model.eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    found = [
        model.generate(TOKENS[:1, :5], use_cache=use_cache, return_dict_in_generate=True, **options)
        for use_cache in (True, False)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    for one, other in zip(found[0].logits, found[1].logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)  # a number on an edge of its format may flip


@pytest.mark.parametrize("name", [name for name in NAMES if ARCHITECTURES[name].checkpoints])
def test_recomputing_blocks_gives_the_same_gradients(name):
    model, _ = converted(name)
    arguments, found = ARCHITECTURES[name].arguments(), []
    for recomputes in (False, True):
        twin = copy.deepcopy(model).train()
        if recomputes:
            twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(2)
        loss = loss_of(twin, **arguments)
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in twin.parameters() if parameter.grad is not None)])
    for one, other in zip(*found, strict=True):
        if ARCHITECTURES[name].shares:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_weights(name):
    model, _ = converted(name)
    model.bfloat16()
    arguments = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in ARCHITECTURES[name].arguments().items()
    }
    loss = loss_of(model, **arguments)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad is None or parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_saving_and_loading(name, tmp_path):
    model, _ = converted(name)
    model.eval()
    arguments = ARCHITECTURES[name].arguments()
    torch.manual_seed(3)
    expected = loss_of(model, **arguments)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
    else:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        loaded = make(name)
        loaded.load_state_dict(torch.load(tmp_path / "weights.pt"))
    cg.convert(loaded.eval(), RECIPE)
    torch.manual_seed(3)
    assert torch.equal(loss_of(loaded, **arguments), expected)


@pytest.mark.parametrize("name", [name for name in NAMES if ARCHITECTURES[name].compiles])
def test_compiled_models_compute_the_same(name):
    """Graphs may break, as around experts. What torch's compiler fuses between layers may differ by fp32 rounding."""
    torch._dynamo.reset()
    model, _ = converted(name, "mxfp8")
    arguments = ARCHITECTURES[name].arguments()
    expected = loss_of(model, **arguments)
    expected.backward()
    gradients = {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss = loss_of(torch.compile(model, backend="aot_eager"), **arguments)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
    assert {path for path, p in model.named_parameters() if p.grad is not None} == gradients.keys()


def write_page() -> None:
    """Write the table of docs/reference/models.md anew."""
    lines = PAGE.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|---")) + 1
    last = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    PAGE.write_text("\n".join([*lines[:first], *map(row_of, NAMES), *lines[last:]]) + "\n")


if __name__ == "__main__":
    write_page()
