"""GPT, LLaMA and BERT in plain torch: pre-norm blocks of attention and MLP between embeddings and an output layer.

Queries, keys and values have separate matrices, so that tensor parallelism can split each by heads.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from overlap_callbacks.analysis.communication.model_shape import ModelShape


class LanguageModel(nn.Module):
    """All layers of a model, or those of one pipeline stage; ``shape`` has the sizes of the whole model."""

    def __init__(self, shape: ModelShape, causal: bool, layers: range) -> None:
        super().__init__()
        first, last = layers.start == 0, layers.stop == shape.layers
        self.embedding = Embedding(shape) if first else None
        self.blocks = nn.ModuleList([Block(shape, causal) for _ in layers])
        self.output = Output(shape) if last else None
        if self.embedding is not None and self.output is not None and shape.tied:
            self.output.words.weight = self.embedding.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From tokens of shape (samples, sequence), or the previous stage, to logits, or the next stage."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.output is None else self.output(x)


class Embedding(nn.Module):
    """Token embedding and, for GPT and BERT, position embedding."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden) if shape.learned_positions else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shapes: (samples, sequence) to (samples, sequence, hidden)."""
        x: torch.Tensor = self.words(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return x


class Output(nn.Module):
    """The final norm and the logits."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = _norm(shape)
        self.words = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (samples, sequence, hidden) to (samples, sequence, vocabulary)."""
        logits: torch.Tensor = self.words(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention and MLP, each on a residual branch."""

    def __init__(self, shape: ModelShape, causal: bool) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape, causal)
        self.mlp_norm = _norm(shape)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next block's input, of the same shape."""
        x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class Attention(nn.Module):
    """Attention over the heads of this rank: all, or its part in tensor parallelism."""

    def __init__(self, shape: ModelShape, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.rotary = not shape.learned_positions
        self.head_width = shape.head_width
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=shape.biases)
        self.key = nn.Linear(shape.hidden, shape.kv_width, bias=shape.biases)
        self.value = nn.Linear(shape.hidden, shape.kv_width, bias=shape.biases)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=shape.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (samples, sequence, hidden) to the same."""
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        if self.rotary:
            query, key = _rotated(query), _rotated(key)
        if key.shape[1] < query.shape[1]:  # heads share keys and values in groups
            key, value = [x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value)]
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        return heads


class Mlp(nn.Module):
    """An MLP with GELU, or LLaMA's with a gate."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn_width, bias=shape.biases)
        self.gate = nn.Linear(shape.hidden, shape.ffn_width, bias=shape.biases) if shape.gated else None
        self.down = nn.Linear(shape.ffn_width, shape.hidden, bias=shape.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (samples, sequence, hidden) to the same."""
        up = self.up(x)
        active = functional.gelu(up) if self.gate is None else functional.silu(self.gate(x)) * up
        y: torch.Tensor = self.down(active)
        return y


def _norm(shape: ModelShape) -> nn.Module:
    return nn.LayerNorm(shape.hidden) if shape.norm_biases else nn.RMSNorm(shape.hidden, eps=1e-5)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: rotates pairs of a head's numbers by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = 10_000 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    left, right = x.split(half, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
