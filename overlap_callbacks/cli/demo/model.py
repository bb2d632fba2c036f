"""The demo's model and its data.

A small GPT: embeddings, pre-norm blocks of causal attention and MLP, a tied output layer. Random sentences of a tiny
grammar, as bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

VOCABULARY = 256


class Block(nn.Module):
    """Attention and MLP, each on a residual branch."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)
        self.norm_mlp = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, sequence, hidden) to the same."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        x = x + self.mlp(self.norm_mlp(x))
        return x


class GPT(nn.Module):
    """Next-token prediction over bytes, in sequences of at most ``sequence`` tokens; ``heads`` divides ``hidden``."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of ``targets``; both of shape (batch, sequence)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# -- data


_SUBJECTS = ("the rank", "a kernel", "the scheduler", "one bucket", "the last gradient", "every stream")
_VERBS = ("waits for", "overlaps with", "overtakes", "hides behind", "contends with", "follows")
_OBJECTS = ("the all-reduce", "a copy", "the optimizer", "its neighbour", "the backward pass", "the memory bus")


class GeneratedText(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches of tokens and next tokens, each of shape (batch, sequence); each rank has a seed of its own."""

    def __init__(self, seed: int, batch: int, sequence: int) -> None:
        self.seed = seed
        self.batch = batch
        self.sequence = sequence

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        chance = random.Random(self.seed)
        wanted = self.batch * (self.sequence + 1)
        text = b""
        while True:
            while len(text) < wanted:
                words = (chance.choice(_SUBJECTS), chance.choice(_VERBS), chance.choice(_OBJECTS))
                text += " ".join(words).encode() + b". "
            block = torch.frombuffer(bytearray(text[:wanted]), dtype=torch.uint8).long().view(self.batch, -1)
            text = text[wanted:]
            yield block[:, :-1].contiguous(), block[:, 1:].contiguous()
