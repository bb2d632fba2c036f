"""The demo's model and its data.

The model is a small GPT: embeddings, pre-norm blocks of causal attention and MLP, a tied output layer. The data are
random sentences of a tiny grammar, as bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from overlap_callbacks.analysis.communication.model_shape import ModelShape
from overlap_callbacks.experiments.study.job.transformer import LanguageModel

VOCABULARY = 256


class GPT(nn.Module):
    """Next-token prediction over bytes, in sequences of at most ``sequence`` tokens; ``heads`` divides ``hidden``."""

    def __init__(self, layers: int, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        shape = ModelShape(layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=VOCABULARY)
        self.logits = LanguageModel(shape, causal=True, layers=range(layers))
        self.apply(_initialise)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of ``targets``; both of shape (batch, sequence)."""
        return functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:  # the output layer has no bias
        nn.init.zeros_(module.bias)


# -- data


_SUBJECTS = ("the rank", "a kernel", "the scheduler", "one bucket", "the last gradient", "every stream")
_VERBS = ("waits for", "overlaps with", "overtakes", "hides behind", "contends with", "follows")
_OBJECTS = ("the all-reduce", "a copy", "the optimizer", "its neighbour", "the backward pass", "the memory bus")


class GeneratedText(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches of tokens and next tokens, each of shape (batch, sequence); each rank has its own seed."""

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
