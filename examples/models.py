"""Language models for the examples, by name: ``tiny``, and the sizes of the study (arXiv 2507.03114).

Plain PyTorch. A layer draws its weights on its own device, so a model can be built on the meta device, or in shards.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """The dimensions of a model.

    Attributes:
        layers, width, heads: of the transformer.
        vocabulary: number of different tokens.
        sequence: tokens per sample.
        llama_ffn: width of LLaMA's gated network; 0 for a GPT.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int = 51200
    sequence: int = 2048
    llama_ffn: int = 0


MODELS = {
    "tiny": Size(layers=4, width=128, heads=4, vocabulary=512, sequence=64),
    "gpt3-1.3b": Size(layers=24, width=2048, heads=16),
    "gpt3-2.7b": Size(layers=32, width=2560, heads=32),
    "gpt3-6.7b": Size(layers=32, width=4096, heads=32),
    "gpt3-13b": Size(layers=40, width=5120, heads=40),
    "llama2-13b": Size(layers=40, width=5120, heads=40, vocabulary=32000, sequence=4096, llama_ffn=13824),
}


def parse_arguments() -> argparse.Namespace:
    """The options that the examples share."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and micro-batch")
    parser.add_argument("--steps", type=int, default=200)
    return parser.parse_args()


class LanguageModel(nn.Module):
    """A GPT or a LLaMA; ``model(tokens)`` is the mean loss of predicting each next token."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.size = size = MODELS[name]
        self.tokens = Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = norm(size)
        self.head = Linear(size.width, size.vocabulary, bias=False)
        if not size.llama_ffn:
            self.positions = Embedding(size.sequence, size.width)
            self.head.weight = self.tokens.weight

    def init_weights(self) -> None:
        """Draw all weights again, on the device where they are now."""
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss on ``tokens``, of shape (samples, sequence)."""
        x = self.tokens(tokens)
        if not self.size.llama_ffn:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1]))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size, width, bias = size, size.width, not size.llama_ffn
        self.norms = nn.ModuleList(norm(size) for _ in range(2))
        self.attention = Linear(width, 3 * width, bias=bias)
        self.attention_out = Linear(width, width, bias=bias)
        self.up = Linear(width, 2 * size.llama_ffn or 4 * width, bias=bias)  # for LLaMA, the gate too
        self.down = Linear(size.llama_ffn or 4 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next block's input, of the same shape as ``x``."""
        heads = self.attention(self.norms[0](x)).unflatten(-1, (3, self.size.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (samples, heads, sequence, width per head)
        if self.size.llama_ffn:
            query, key = rotated(query), rotated(key)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        up = self.up(self.norms[1](x))
        if self.size.llama_ffn:
            up, gate = up.chunk(2, dim=-1)
            return x + self.down(up * functional.silu(gate))
        return x + self.down(functional.gelu(up))


class Linear(nn.Linear):
    """With the initial weights of a language model."""

    def reset_parameters(self) -> None:
        """Small random weights; biases of zero."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """With the initial weights of a language model."""

    def reset_parameters(self) -> None:
        """Small random weights."""
        nn.init.normal_(self.weight, std=0.02)


def norm(size: Size) -> nn.Module:
    """GPT's norm or LLaMA's."""
    return nn.RMSNorm(size.width, eps=1e-5) if size.llama_ffn else nn.LayerNorm(size.width)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: rotates pairs of a head's numbers by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = 10_000 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    left, right = x.split(half, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
