"""Every product of a model is counted, by shapes or by running it."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import crossgrain as cg
from crossgrain.convert.accounting import count_products

from ..common.experts import Experts, routed
from ..common.logs import warned


class Everything(nn.Module):
    """One of each: a linear layer, a parameter in F.linear, a scaled one, a lookup, a convolution, scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.fc = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.raw = nn.Parameter(torch.randn(8, 32))
        self.place = nn.Parameter(torch.randn(1, 1, 32))
        self.conv = nn.Conv1d(32, 16, 3, padding=1)
        self.rnn = nn.GRU(8, 4, batch_first=True)

    def forward(self, tokens):
        x = self.norm(self.fc(self.embedding(tokens) + self.place))
        scores = x @ x.transpose(1, 2)
        self.conv(x.transpose(1, 2))
        return self.rnn(functional.linear(scores @ x, self.raw.double().float() * 2))[0]


def test_by_shapes_every_weight_counts_once_per_token():
    found = {product.path: product.multiply_adds for product in count_products(Everything())}
    assert found == {
        "raw": 256,
        "fc": 1024,
        "conv": 32 * 16 * 3,
        "rnn.weight_ih_l0": 12 * 8,
        "rnn.weight_hh_l0": 12 * 4,
    }


def test_by_running_products_are_counted_as_they_happen():
    model, tokens = Everything(), torch.randint(16, (2, 5))
    found = {product.path: product for product in count_products(model, tokens)}
    assert found["fc"].multiply_adds == 10 * 1024
    assert found["raw"].multiply_adds == 10 * 256  # also through a copy in another dtype
    assert found["conv"].multiply_adds == 10 * 32 * 16 * 3
    scores = found[""]
    assert not scores.weight and scores.multiply_adds == 2 * 2 * 5 * 5 * 32
    assert model.training


class Hidden(nn.Module):
    """Weights in operators that do not show their products."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.lstm = nn.Linear(32, 32), nn.LSTM(32, 16, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    def forward(self, x):
        return self.lstm(self.encoder(self.fc(x)))[0]


def test_products_that_operators_hide_are_counted_by_shape():
    model, x = Hidden(), torch.randn(2, 5, 32)
    random = torch.get_rng_state()
    found = {product.path: product.multiply_adds for product in count_products(model, x)}
    weights = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.dim() > 1}
    for name in ("lstm.weight_ih_l0", "lstm.weight_hh_l0"):
        assert found[name] == 10 * weights[name]
    assert found["encoder.self_attn.in_proj"] == 10 * 96 * 32 and found["encoder.linear1"] == 10 * 64 * 32
    assert torch.backends.mha.get_fastpath_enabled() and model.training
    assert torch.equal(torch.get_rng_state(), random)


def test_inputs_can_be_keywords_and_on_the_meta_device():
    with torch.device("meta"):
        model, tokens = Everything(), torch.zeros(2, 5, dtype=torch.long)
    model.forward = lambda tokens: model.fc(model.embedding(tokens))
    found = {product.path: product.multiply_adds for product in count_products(model, {"tokens": tokens})}
    assert found["fc"] == 10 * 1024


@pytest.mark.parametrize("convert", [False, True])
def test_tokens_use_some_experts(convert):
    experts = Experts(experts=8, top_k=2)
    if convert:
        cg.convert(experts, "mxfp8")
    shapes = {product.path: product.multiply_adds for product in count_products(experts)}
    assert shapes == {"gate_up_proj": 2 * 96 * 32, "down_proj": 2 * 32 * 48}
    x, routing = torch.randn(10, 32), routed(10, 8)
    counted = {product.path: product.multiply_adds for product in count_products(experts, (x, *routing))}
    assert counted == {path: 10 * count for path, count in shapes.items()}


def test_the_report_says_which_share_is_quantized():
    model, tokens = Everything(), torch.randint(16, (2, 5))
    with warned("% of the multiply-adds with weights of this Everything stay in high precision"):
        report = cg.convert(model, "mxfp8", inputs=tokens)
    total = 1024 + 256 + 32 * 16 * 3 + 12 * 12
    assert report.quantized_share == pytest.approx(1024 / total)
    assert report.unasked_share == pytest.approx(1 - 1024 / total)
    assert "products of two activations are another" in report.summary() and 0 < report.activation_share < 1
    assert "a parameter that GRU uses itself" in report.left["rnn.weight_ih_l0"]
    assert "register_layer(Everything, adapter)" in report.left["raw"]


def test_strict_refuses_before_anything_changes():
    model = Everything()
    with pytest.raises(ValueError, match="stay in high precision, for example conv"):
        cg.convert(model, "mxfp8", strict=True)
    assert type(model.fc) is nn.Linear


@pytest.mark.usefixtures("silently")
def test_what_was_asked_for_is_not_warned_about():
    model = nn.ModuleDict({"fc": nn.Linear(32, 32), "lm_head": nn.Linear(32, 999), "other": nn.Linear(32, 99)})
    report = cg.convert(model, "mxfp8; other: hp", strict=True)
    assert report.unasked_share == 0
    assert report.formats == {"fc": "mxfp8", "other": "hp"} and list(report.left) == ["lm_head"]


def test_a_notebook_shows_a_table():
    model = nn.ModuleDict({"fc": nn.Linear(32, 32), "lm_head": nn.Linear(32, 32)})
    shown = cg.convert(model, "fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)")._repr_html_()
    assert "<td style='text-align:left'>fprop mxfp8, dgrad nvfp4(sr) x nvfp4, wgrad" in shown
    assert "include=&#x27;lm_head&#x27;" in shown and "50 %" in shown


class Reader(nn.Module):
    """Multiplies the weight of one of its layers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return functional.linear(self.called(x), self.read.weight)


def test_layers_whose_weights_are_read_without_a_call_are_left():
    with warned("50 % of the multiply-adds"):
        report = cg.convert(Reader(), "mxfp8", inputs=torch.randn(3, 32))
    assert report.converted == ["called"] and report.quantized_share == 0.5
    assert report.left["read"].startswith("Reader multiplies its weight without calling the layer")


def test_a_weight_that_two_layers_share_is_called_by_either():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    assert cg.convert(model, "mxfp8", inputs=torch.randn(3, 32)).converted == ["0", "1"]


def test_weights_that_share_one_buffer_are_counted_apart():
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32))
    buffer, start = torch.randn(sum(parameter.numel() for parameter in model.parameters())), 0
    for parameter in model.parameters():
        parameter.data = buffer[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    counts = [product.multiply_adds for product in count_products(model, torch.randn(3, 32))]
    assert counts == [3 * layer.weight.numel() for layer in model]


class ChosenExperts(nn.Module):
    """Multiplies each row by the weight of its expert, which it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x, chosen):
        return torch.bmm(self.up[chosen], x.unsqueeze(-1)).squeeze(-1)


def test_experts_that_are_looked_up_are_weights():
    (product,) = count_products(ChosenExperts(), (torch.randn(5, 8), torch.tensor([0, 3, 3, 1, 2])))
    assert (product.path, product.multiply_adds, product.weight) == ("up", 5 * 16 * 8, True)
