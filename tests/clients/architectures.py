"""Small models of many architectures with random weights, and a call of each. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY = 64
TOKENS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
_GROUPED: dict[str, Any] = {**_TEXT, "num_key_value_heads": 1}


@dataclass(frozen=True)
class Architecture:
    """A model, arguments for it that give a loss, and what it can do.

    Attributes:
        make: makes the model.
        arguments: keyword arguments of a call whose result has a loss.
        share: the least share of the multiply-adds with weights that must be quantized.
        generates: it has a cache, and ``generate``.
        checkpoints: transformers can recompute its blocks in backward.
        shares: blocks of a decoder read one output of an encoder; when they are recomputed, autograd adds their
            gradients in another order, in plain torch as well.
        compiles: it is one graph, or several with breaks; False if torch.compile itself cannot trace the model.
    """

    make: Callable[[], nn.Module]
    arguments: Callable[[], dict[str, Any]]
    share: float
    generates: bool = False
    checkpoints: bool = True
    shares: bool = False
    compiles: bool = True


def _text() -> dict[str, Any]:
    return {"input_ids": TOKENS, "labels": TOKENS}


def _causal(cls: str, config: str, share: float = 0.8, **options: Any) -> Architecture:
    return Architecture(lambda: getattr(hf, cls)(getattr(hf, config)(**options)), _text, share, generates=True)


_MOE: dict[str, Any] = {**_GROUPED, "num_experts_per_tok": 2}


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer: attention and an MLP, scaled and shifted by the time step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        own = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(own, own, own, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    """Patches of an image, blocks, and the noise of each patch."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(2))
        self.unpatch = nn.Linear(width, 16)

    def forward(self, image: Tensor, time: Tensor, noise: Tensor) -> Any:
        condition = self.time((time[:, None] * torch.arange(16)).cos())
        x = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, condition)
        error = self.unpatch(x) - noise
        return {"loss": error.square().mean()}


class TorchTransformer(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.transformer = nn.Transformer(32, 2, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embedding(tokens)
        logits = self.head(self.transformer(x, x, tgt_mask=mask, tgt_is_causal=True))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())}


def _image() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": torch.tensor([1, 0])}


def _diffusion() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"image": (2, 4, 8, 8), "time": (2,), "noise": (2, 16, 16)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _speech() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"input_features": torch.randn(2, 16, 24, generator=generator), "labels": TOKENS}


def _whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, encoder_attention_heads=2, decoder_attention_heads=2, max_source_positions=12,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


ARCHITECTURES: dict[str, Architecture] = {
    "Llama": _causal("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "Qwen3": _causal("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=16),
    "Gemma 3": _causal("Gemma3ForCausalLM", "Gemma3TextConfig", **_GROUPED, head_dim=16, sliding_window=8),
    "GPT-2": _causal(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2
    ),
    "BERT": Architecture(lambda: hf.BertForMaskedLM(hf.BertConfig(**_TEXT)), _text, 0.8),
    "T5": Architecture(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCABULARY,
                d_model=32,
                d_kv=16,
                d_ff=64,
                num_layers=2,
                num_heads=2,
                decoder_start_token_id=0,
                dropout_rate=0.0,
            )
        ),
        _text,
        0.8,
        shares=True,
    ),
    "ViT": Architecture(
        lambda: hf.ViTForImageClassification(
            hf.ViTConfig(
                image_size=16,
                patch_size=4,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        ),
        _image,
        0.95,
    ),
    "Whisper": Architecture(_whisper, _speech, 0.6, shares=True),  # its two convolutions of sound overlap
    "Mixtral": _causal("MixtralForCausalLM", "MixtralConfig", **_MOE, num_local_experts=4),
    "Qwen3-MoE": _causal(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_MOE, moe_intermediate_size=32, num_experts=4, head_dim=16
    ),
    "gpt-oss": _causal("GptOssForCausalLM", "GptOssConfig", **_MOE, num_local_experts=4, head_dim=16),
    "DeepSeek-V3": _causal(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **{**_MOE, "num_key_value_heads": 2},
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
    "Mamba": _causal(
        "MambaForCausalLM", "MambaConfig", 0.7, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8
    ),
    "diffusion transformer": Architecture(DiffusionTransformer, _diffusion, 0.95, checkpoints=False),
    "torch.nn.Transformer": Architecture(TorchTransformer, lambda: {"tokens": TOKENS}, 0.8, checkpoints=False),
}


def make(name: str) -> nn.Module:
    """A model with random weights that are the same in every run, without dropout."""
    torch.manual_seed(0)
    model = ARCHITECTURES[name].make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.08)
    return model
