"""Models of Hugging Face, small enough for tests; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import nn


def tiny_llama(**options: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **options}))
