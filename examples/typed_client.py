"""A program with types that uses crossgrain: `mypy --strict` has nothing to say about it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import crossgrain as cg
from crossgrain.recipe import GemmRecipe, MXFP8BlockScaling

RECIPE: GemmRecipe = GemmRecipe.load("fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr)")


class Network(nn.Module):
    """Two layers of torch, and one of crossgrain."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.middle = cg.Linear(128, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.middle(torch.relu(self.up(x)))
        out: Tensor = self.down(y)
        return out


def train(model: nn.Module, steps: int) -> list[float]:
    """The loss of every step."""
    optimizer = cg.optim.FusedAdam(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for _ in range(steps):
        loss: Tensor = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        losses.append(loss.item())
    return losses


def error(x: Tensor, direction: cg.Direction) -> float:
    """What one direction of a tensor loses."""
    quantized: cg.QuantizedTensor = cg.quantize(x, "nvfp4")
    plane: cg.Plane | None = quantized.plane(direction)
    assert plane is not None and plane.format == cg.get_format("nvfp4")
    return float((quantized.dequantize(direction=direction) - x).norm() / x.norm())


def main() -> None:
    """Convert, train, look."""
    model = Network()
    report: cg.ConvertReport = cg.convert(model, RECIPE)
    print(report)
    print(train(model, 2))
    with cg.autocast(recipe=MXFP8BlockScaling()):
        print(model(torch.randn(32, 64)).shape)
    print({way.value: round(error(torch.randn(64, 64), way), 2) for way in (cg.ROWWISE, cg.COLUMNWISE)})


if __name__ == "__main__":
    main()
