"""A small GPT, converted and compiled: the whole model is one graph, and its numbers are those of eager.

Each linear layer is one operator to the compiler, which fuses what is between them. Inductor needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import time

import torch

import crossgrain as cg
from crossgrain.gpt.data import even_batch
from crossgrain.lab import GPT, GPTConfig, load_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor", help="of torch.compile: inductor, aot_eager")
    parser.add_argument("--recipe", default="mxfp8; head: hp")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = GPTConfig(layers=2, width=64, heads=2, context=64)
    model = GPT(config)
    print(cg.convert(model, arguments.recipe))
    compiled = torch.compile(model.loss, backend=arguments.backend, fullgraph=True)
    batch = even_batch(load_text().train, 8, config.context)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(4):
        begin = time.perf_counter()
        loss = compiled(*batch)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            eager = model.loss(*batch)
        optimizer.step()
        seconds = time.perf_counter() - begin
        print(f"step {step}: loss {loss.item():.5f}, in eager {eager.item():.5f}, {seconds:.2f} s")


if __name__ == "__main__":
    main()
