"""The training data of the demo: random sentences of a tiny grammar, as bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

VOCABULARY = 256

_SUBJECTS = ("the rank", "a kernel", "the scheduler", "one bucket", "the last gradient", "every stream")
_VERBS = ("waits for", "overlaps with", "overtakes", "hides behind", "contends with", "follows")
_OBJECTS = ("the all-reduce", "a copy", "the optimizer", "its neighbour", "the backward pass", "the memory bus")


class GeneratedText(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches of tokens and next tokens, each of shape (batch, sequence).

    Args:
        seed: seed of the text; give each rank its own.
        batch: sequences of a batch.
        sequence: tokens of a sequence.
    """

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
