"""Train on several ranks: FSDP2, tensor, sequence and expert parallelism, and checkpoints in shards.

- FSDP2: `gather_quantized` and `gather_by_pass` make weights travel between ranks in their quantized formats.
- Tensor parallelism: `ColwiseParallel` and `RowwiseParallel` for torch's ``parallelize_module``.
- Expert parallelism: `TokenExchange` sends tokens to the ranks of their experts.
- Checkpoints: `crossgrain.distributed.checkpoint`.
"""

from .by_pass import gather_by_pass
from .count import GatheredBytes, count_gathered_bytes
from .experts import ExchangedBytes, TokenExchange, all_to_all_rows, count_exchanged_bytes
from .gather_weights import GatherReport, gather_quantized
from .rank_helpers import (
    allreduce,
    gather_along_first_dim,
    get_distributed_rank,
    get_distributed_world_size,
    mark_sequence_parallel,
    reduce_scatter_along_first_dim,
    reduce_sequence_parallel_gradients,
    set_tensor_model_parallel_attributes,
)
from .styles import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "ExchangedBytes",
    "GatherReport",
    "GatheredBytes",
    "RowwiseParallel",
    "TokenExchange",
    "all_to_all_rows",
    "allreduce",
    "count_exchanged_bytes",
    "count_gathered_bytes",
    "gather_along_first_dim",
    "gather_by_pass",
    "gather_quantized",
    "get_distributed_rank",
    "get_distributed_world_size",
    "mark_sequence_parallel",
    "reduce_scatter_along_first_dim",
    "reduce_sequence_parallel_gradients",
    "set_tensor_model_parallel_attributes",
]
