"""Train a small GPT of Megatron-core on CPUs, with crossgrain in the place of Transformer Engine.

    python examples/megatron/train.py --recipe mxfp8 --steps 5
    torchrun --nproc-per-node 2 examples/megatron/train.py --recipe hybrid --tensor-parallel 2 --sequence-parallel
    torchrun --nproc-per-node 2 examples/megatron/train.py --recipe blockwise --distributed-optimizer --fp8-param-gather
    torchrun --nproc-per-node 2 examples/megatron/train.py --recipe nvfp4 --pipeline-parallel 2 --microbatches 2

Megatron-core is as it comes from PyPI (`pip install 'crossgrain[megatron]'`). README.md says what stands in for CUDA.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import small_gpt
import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT of Megatron-core on CPUs.")
    parser.add_argument("--recipe", choices=small_gpt.RECIPES, default="mxfp8")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--virtual-stages", type=int, help="of each rank of a pipeline, which are interleaved")
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--fp8-param-gather", action="store_true", help="keep weights quantized")
    given = parser.parse_args()
    options = small_gpt.Options(
        recipe=given.recipe,
        layers=given.layers,
        width=given.width,
        tensor_parallel=given.tensor_parallel,
        sequence_parallel=given.sequence_parallel,
        pipeline_parallel=given.pipeline_parallel,
        virtual_stages=given.virtual_stages,
        context_parallel=given.context_parallel,
        microbatches=given.microbatches,
        distributed_optimizer=given.distributed_optimizer,
        quantized_parameters=given.fp8_param_gather,
    )

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:  # torchrun
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model, optimizer = small_gpt.build(options)
        for step, (loss, norm) in enumerate(small_gpt.run(model, optimizer, options, given.steps)):
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.6f}, gradient norm {norm:.6f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
