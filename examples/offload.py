"""A small GPT with what autograd saves in memory, in host memory and in a file: where the bytes are, and the same loss.

What stays is counted by the hooks: tensors below the least size. Parameters are not counted, they live anyway.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

import crossgrain as cg
from crossgrain.gpt.data import even_batch
from crossgrain.lab import GPT, GPTConfig, load_text

MIB = 2**20
NOTHING = 1 << 60  # a least size that no tensor has: everything stays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fprop: mxfp8, dgrad: nvfp4(sr), wgrad: nvfp4(rht, sr); head: hp")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--min-bytes", type=int, default=4096, help="smaller tensors stay in memory")
    parser.add_argument("--directory", help="where the file goes; a temporary directory if not given")
    arguments = parser.parse_args()
    config = GPTConfig(layers=arguments.layers, width=arguments.width, heads=4, context=64)
    batch = even_batch(load_text().train, 8, config.context)

    def train(name: str, where: str, min_bytes: int) -> None:
        torch.manual_seed(0)
        model = GPT(config)
        cg.convert(model, arguments.recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses = []
        for _ in range(3):
            begin = time.perf_counter()
            offload = cg.offload(where, min_bytes=min_bytes)
            with offload:
                loss = model.loss(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(f"{loss.item():.6f}")
            seconds = time.perf_counter() - begin
        kept, stored = offload.stats.kept / MIB, offload.stats.stored / MIB
        print(f"{name:<7} kept {kept:6.2f} MiB, stored {stored:6.2f} MiB, {seconds:.2f} s, losses {', '.join(losses)}")

    train("memory", "host", NOTHING)
    train("host", "host", arguments.min_bytes)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        train("file", directory, arguments.min_bytes)


if __name__ == "__main__":
    main()
