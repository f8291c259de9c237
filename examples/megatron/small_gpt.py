"""A small GPT of Megatron-core that trains on CPUs, with crossgrain in the place of Transformer Engine.

The model, the data-parallel wrapper, the optimizer and the schedule are Megatron's own. Import this module before
anything of ``megatron.core``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import cuda_on_cpu
import torch
from torch import Tensor, nn

import crossgrain.compat

cuda_on_cpu.install()
crossgrain.compat.install()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of apex and other kernels that are not there
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
        TorchFullyShardedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

VOCABULARY, CONTEXT = 64, 32

# What Megatron's configuration says for each recipe.
RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
    "hybrid": {
        "fp8": "e4m3",
        "fp8_recipe": "custom",
        "fp8_quantizer_factory": "crossgrain.recipe.zoo.mxfp8_fwd_nvfp4_bwd_factory",
    },
}


@dataclass(frozen=True)
class Options:
    """Of a run. ``config`` and ``ddp`` are further options of Megatron's configurations."""

    recipe: str = "none"
    bf16: bool = True  # of parameters and activations; else float32
    width: int = 128
    layers: int = 2
    batch: int = 4  # of all ranks together
    microbatches: int = 1
    local_spec: bool = False  # Megatron's own layers, without Transformer Engine
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    virtual_stages: int | None = None  # of each rank, which are interleaved
    context_parallel: int = 1  # ranks that share each text
    distributed_optimizer: bool = False
    fsdp: bool = False  # Megatron's own
    torch_fsdp: bool = False  # torch's FSDP2
    quantized_parameters: bool = False  # "--fp8-param-gather"
    clip_grad: float = 1.0
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)


def transformer_config(options: Options) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": options.layers,
        "hidden_size": options.width,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": options.tensor_parallel,
        "sequence_parallel": options.sequence_parallel,
        "pipeline_model_parallel_size": options.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": options.virtual_stages,
        "pipeline_dtype": torch.bfloat16 if options.bf16 else torch.float32,
        # Of two ranks each is before and after the other: what they send must not be mixed up in one batch.
        "overlap_p2p_comm": options.virtual_stages is not None,
        "batch_p2p_comm": options.virtual_stages is None,
        "context_parallel_size": options.context_parallel,
        "params_dtype": torch.bfloat16 if options.bf16 else torch.float32,
        "bf16": options.bf16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,  # of Megatron's own layers: a CUDA extension of apex
        "masked_softmax_fusion": False,
        "fp4_param" if options.recipe == "nvfp4" else "fp8_param": options.quantized_parameters,
        # FSDP2 reduces gradients by itself, and its wrapper does not take what Megatron would say to it here.
        "finalize_model_grads_func": None if options.torch_fsdp else finalize_model_grads,
    }
    return TransformerConfig(**{**settings, **RECIPES[options.recipe], **options.config})


def build(options: Options, seed: int = 1234) -> tuple[nn.ModuleList, Any]:
    """The stages of the model that this rank has, wrapped for data parallelism, and their optimizer.

    Process groups of torch have to be there.
    """
    _refuse_what_megatron_gets_wrong(options)
    config = transformer_config(options)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            options.tensor_parallel,
            options.pipeline_parallel,
            options.virtual_stages,
            context_parallel_size=options.context_parallel,
            expert_model_parallel_size=config.expert_model_parallel_size,
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    layer = get_gpt_layer_local_spec if options.local_spec else get_gpt_layer_with_transformer_engine_spec
    spec = layer(num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    stages = [_stage(config, spec, stage) for stage in range(options.virtual_stages or 1)]
    sharded = options.distributed_optimizer or options.fsdp
    # MXFP8 parameters have no other way to the ranks of Megatron's distributed optimizer.
    reuse = options.quantized_parameters and options.recipe == "mxfp8" and not options.fsdp
    settings: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": sharded,
        "use_megatron_fsdp": options.fsdp,
        "fp8_param_gather": options.quantized_parameters,
        "reuse_grad_buf_for_mxfp8_param_ag": reuse,
    }
    if options.fsdp:
        settings |= {"data_parallel_sharding_strategy": "optim_grads_params", "overlap_param_gather": True}
        settings |= {"overlap_grad_reduce": True, "gradient_reduce_div_fusion": False}  # a sum that gloo has not
    ddp_config = DistributedDataParallelConfig(**{**settings, **options.ddp})
    wrapper = FullyShardedDataParallel if options.fsdp else DistributedDataParallel
    if options.torch_fsdp:
        ddp_config, wrapper = TorchFullyShardedDataParallelConfig(), TorchFullyShardedDataParallel
    wrapped = [wrapper(config, ddp_config, Float16Module(config, each) if options.bf16 else each) for each in stages]
    optimizer_config = OptimizerConfig(
        lr=2e-3,
        bf16=options.bf16,
        params_dtype=config.params_dtype,
        clip_grad=options.clip_grad,
        fp8_recipe=config.fp8_recipe if config.fp8 else None,
        use_distributed_optimizer=sharded,
        reuse_grad_buf_for_mxfp8_param_ag=reuse,
    )
    return nn.ModuleList(wrapped), get_megatron_optimizer(optimizer_config, wrapped, use_gloo_process_groups=False)


def _refuse_what_megatron_gets_wrong(options: Options) -> None:
    """Raise where Megatron-core 0.16.1 fails far from the cause, or not at all. README.md names its lines."""
    if options.torch_fsdp and options.quantized_parameters:
        raise ValueError(
            "Megatron's wrapper for FSDP2 does not take weights that are kept quantized: it looks for attributes that "
            "tensors of Transformer Engine 1 had (save_custom_attrs). Use Megatron-FSDP or the distributed optimizer"
        )
    if options.fsdp and options.quantized_parameters and options.recipe == "nvfp4":
        raise ValueError(
            "Megatron-FSDP does not take 4-bit parameters: its buffers have a byte for each number (set_item). Use the "
            "distributed optimizer"
        )
    divided = options.config.get("expert_model_parallel_size", 1) > 1
    if options.quantized_parameters and options.recipe == "mxfp8" and options.distributed_optimizer and divided:
        raise ValueError(
            "Megatron sets all parameters but the experts to zero if those are divided among ranks and kept in MXFP8 "
            "(ChainedOptimizer.step_with_ready_grads). Keep them in bfloat16, or choose another recipe"
        )
    if options.fsdp and torch.distributed.get_world_size() == 1:
        raise ValueError(
            "Megatron-FSDP on one rank adds every gradient to itself, of its own layers too "
            "(_bucket_group_gradient_reduce). Use at least two ranks, or the distributed optimizer"
        )


def _stage(config: TransformerConfig, spec: Any, number: int) -> GPTModel:
    """One of this rank's stages of the pipeline: the whole model, if there is no pipeline."""
    virtual = {} if config.virtual_pipeline_model_parallel_size is None else {"vp_stage": number}
    return GPTModel(
        config,
        spec,
        VOCABULARY,
        CONTEXT,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=not virtual, **virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=not virtual, **virtual),
        position_embedding_type="rope",
        **virtual,
    )


def batches(options: Options, seed: int = 7) -> Iterator[tuple[Tensor, Tensor]]:
    """Microbatches of this rank, for ever: counting up or down from random numbers."""
    generator = torch.Generator().manual_seed(seed)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    size = options.batch // (ranks * options.microbatches)
    while True:
        start = torch.randint(VOCABULARY, (options.batch, 1), generator=generator)
        step = torch.randint(1, 4, (options.batch, 1), generator=generator)
        text = (start + step * torch.arange(CONTEXT + 1)) % VOCABULARY
        for mine in text.chunk(ranks)[rank].split(size):
            yield mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def forward_step(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    tokens, labels = next(data)
    positions = torch.arange(CONTEXT).expand_as(tokens)
    mask = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
    batch = get_batch_on_this_cp_rank({"tokens": tokens, "positions": positions, "labels": labels})
    losses = model(batch["tokens"], batch["positions"], mask, labels=batch["labels"])

    def loss_of(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # Megatron adds up what ranks say that share texts, and divides by the number of microbatches.
        loss = output.float().mean() / parallel_state.get_context_parallel_world_size()
        return loss, {"loss": loss.detach().clone()}

    return losses, loss_of


def train(options: Options, steps: int) -> list[tuple[float, float]]:
    """The loss of the batch and the norm of all gradients, of every step."""
    return list(run(*build(options), options, steps))


def run(model: nn.ModuleList, optimizer: Any, options: Options, steps: int) -> Iterator[tuple[float, float]]:
    stages, replicas = list(model), parallel_state.get_data_parallel_world_size()
    data = [batches(options) for _ in stages]
    for _ in range(steps):
        for stage in stages:
            stage.zero_grad_buffer()  # type: ignore[operator]
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=stages,
            num_microbatches=options.microbatches,
            seq_length=CONTEXT,
            micro_batch_size=options.batch // (replicas * options.microbatches),
        )
        updated, norm, _ = optimizer.step()
        if not updated:
            raise RuntimeError("a gradient is not finite")
        loss = torch.stack([each["loss"] for each in losses]).mean() if losses else torch.zeros(())
        torch.distributed.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())  # the last has it
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        yield loss.item() / replicas, float(norm)
