"""`InferenceParams`: a cache of keys and values of earlier steps, for generating text token by token.

    cache = InferenceParams(max_batch_size=4, max_sequence_length=128, num_heads_kv=8, head_dim_k=64, dtype=x.dtype)
    cache.pre_step({0: 17, 1: 9})                       # a step adds 17 tokens to sequence 0 and 9 to sequence 1
    y = layer(prompts, inference_params=cache)
    cache.pre_step({0: 1, 1: 1})                        # one token each
    y = layer(tokens, inference_params=cache)

The rows of the batch are sequences, in the order given to ``pre_step``. A sequence that is not named there has ended,
and its place becomes free for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.devices import resolved_device
from ...runtime.host_and_device import on_device


class CachedStep(NamedTuple):
    """All keys and values of the sequences of a step, [batch, longest, heads, channels], and which are valid."""

    keys: Tensor
    values: Tensor
    valid_queries: Tensor  # [batch, new tokens]
    valid_keys: Tensor  # [batch, longest]


class InferenceParams:
    """The cache of keys and values for all layers of a model. Each layer needs its own ``layer_number``.

    Args:
        max_batch_size: most sequences at a time.
        max_sequence_length: most tokens of a sequence.
        num_heads_kv: number of heads of keys and values.
        head_dim_k: channels of keys.
        dtype: dtype of the cache.
        head_dim_v: channels of values; by default ``head_dim_k``.
        is_paged: not supported; must be False.
        device: device of the cache.

    Examples:
        >>> cache = cg.InferenceParams(max_batch_size=2, max_sequence_length=64, num_heads_kv=2, head_dim_k=16)
        >>> cache.max_batch_size
        2
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int = 16,
        head_dim_k: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        if is_paged:
            raise NotImplementedError("InferenceParams: a cache in pages is not supported; pass is_paged=False")
        self.max_batch_size = max_batch_size
        self.max_sequence_length = max_sequence_length
        self.num_heads_kv = num_heads_kv
        self.head_dim_k = head_dim_k
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.dtype = dtype
        self.device = resolved_device(device)
        self._caches: dict[int, tuple[Tensor, Tensor]] = {}
        self.reset()

    def reset(self) -> None:
        """Remove all sequences. The memory is kept."""
        self._rows: dict[int, int] = {}  # by sequence: its row in the caches
        self._before: dict[int, int] = {}  # by sequence: tokens before this step
        self._new: dict[int, int] = {}  # by sequence: tokens of this step

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the memory of a layer now; otherwise its first step does."""
        if layer_number in self._caches:
            return
        shape = (self.max_batch_size, self.max_sequence_length, self.num_heads_kv)
        self._caches[layer_number] = (
            torch.zeros(*shape, self.head_dim_k, dtype=self.dtype, device=self.device),
            torch.zeros(*shape, self.head_dim_v, dtype=self.dtype, device=self.device),
        )

    def pre_step(self, step: Mapping[int, int]) -> None:
        """Begin a step.

        Args:
            step: how many tokens each sequence gets, by its number. Sequences that are not named are removed.

        Raises:
            ValueError: there are too many sequences or tokens for the cache, or a sequence gets no token.
        """
        before = {sequence: self._before[sequence] + self._new[sequence] for sequence in self._new if sequence in step}
        before = {sequence: before.get(sequence, 0) for sequence in step}
        if len(step) > self.max_batch_size:
            raise ValueError(
                f"the step has {len(step)} sequences, but the cache has room for max_batch_size={self.max_batch_size}"
            )
        for sequence, count in step.items():
            if count < 1 or before[sequence] + count > self.max_sequence_length:
                raise ValueError(
                    f"sequence {sequence} has {before[sequence]} tokens and cannot get {count} more: it must get at "
                    f"least 1, and the cache has room for max_sequence_length={self.max_sequence_length} tokens"
                )
        rows = {sequence: self._rows[sequence] for sequence in step if sequence in self._rows}
        free = iter(sorted(set(range(self.max_batch_size)) - set(rows.values())))
        self._rows = {sequence: rows[sequence] if sequence in rows else next(free) for sequence in step}
        self._before, self._new = before, dict(step)

    def get_seqlens_pre_step(self) -> Tensor:
        """The number of tokens of each sequence before this step, [batch]; the positions of new tokens begin there."""
        return on_device(list(self._before.values()), self.device, torch.int64)

    def step(self, layer_number: int, new_keys: Tensor, new_values: Tensor) -> CachedStep:
        """Store the keys and values of the new tokens of a layer, and return those of all tokens.

        Args:
            layer_number: number of the layer.
            new_keys: [batch, new tokens, heads, channels]. Sequences that get fewer tokens are padded at their end.
            new_values: the same for values.
        """
        self._check(new_keys, new_values)
        self.allocate_memory(layer_number)
        keys, values = self._caches[layer_number]
        longest = max(self._before[sequence] + new for sequence, new in self._new.items())
        places = torch.arange(max(longest, new_keys.shape[1]), device=self.device)
        before, new = self.get_seqlens_pre_step(), on_device(list(self._new.values()), self.device)
        with torch.no_grad():
            for i, (sequence, row) in enumerate(self._rows.items()):
                start, count = self._before[sequence], self._new[sequence]
                keys[row, start : start + count] = new_keys[i, :count].to(self.dtype)
                values[row, start : start + count] = new_values[i, :count].to(self.dtype)
        rows = on_device(list(self._rows.values()), self.device)
        return CachedStep(
            keys[rows, :longest],
            values[rows, :longest],
            places[: new_keys.shape[1]] < new[:, None],
            places[:longest] < (before + new)[:, None],
        )

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if not self._new:
            raise RuntimeError("call pre_step() first: it says how many tokens each sequence gets in this step")
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise RuntimeError(
                "the cache of keys and values is for inference only: run the model under torch.no_grad()"
            )
        longest = max(self._new.values())
        for name, x, channels in (("keys", keys, self.head_dim_k), ("values", values, self.head_dim_v)):
            if x.shape[0] != len(self._new) or x.shape[1] < longest:
                raise ValueError(
                    f"{name} of shape {list(x.shape)} do not fit this step, in which the sequences get {self._new} "
                    "tokens"
                )
            if tuple(x.shape[2:]) != (self.num_heads_kv, channels):
                raise ValueError(
                    f"{name} have {x.shape[2]} heads of {x.shape[3]} channels, but the cache is for "
                    f"{self.num_heads_kv} heads of {channels}"
                )
