"""Builds a model, or a stage of it, with weights drawn from fixed seeds; and its data."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from overlap_callbacks.experiments.study.job.convnet import ImageModel
from overlap_callbacks.experiments.study.job.transformer import LanguageModel
from overlap_callbacks.experiments.study.models import Model, Transformer

# Batches drawn once and then used in turn, so that drawing costs no step any time.
_BATCHES = 4
_WEIGHT_STD = 0.02
# BERT's share of tokens to predict.
_HIDDEN_SHARE = 0.15
_IGNORED = -100


def build(model: Model, blocks: range | None = None) -> LanguageModel | ImageModel:
    """The model on the current device, or the blocks of one pipeline stage."""
    own = range(model.num_blocks) if blocks is None else blocks
    if isinstance(model, Transformer):
        return LanguageModel(model.shape, model.causal, own)
    return ImageModel(model, own)


def count_weights(model: Model) -> int:
    """Parameters of the whole model; shared ones count once."""
    with torch.device("meta"):
        return sum([parameter.numel() for parameter in build(model).parameters()])


@torch.no_grad()
def draw_weights(module: nn.Module, rank: int) -> None:
    """Draw this rank's part of every weight in place, after allocation.

    A tensor's draw depends only on its name and, if it is split, on the rank. So no rank ever holds a whole model, and
    every run starts with the same weights.
    """
    for name, parameter in module.named_parameters():
        local, is_part, shape = _local(parameter)
        if len(shape) == 1:  # norms and biases
            local.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        seed = zlib.crc32(name.encode()) + (rank if is_part else 0)
        std = _WEIGHT_STD if len(shape) == 2 else math.sqrt(2 / (shape[0] * math.prod(shape[2:])))
        local.normal_(std=std, generator=torch.Generator(local.device).manual_seed(seed))
    for name, buffer in module.named_buffers():  # of batch norms
        buffer.fill_(1.0 if name.endswith("running_var") else 0.0)


def _local(parameter: Any) -> tuple[torch.Tensor, bool, tuple[int, ...]]:
    """This rank's part of a parameter, whether the parameter is split, and its full shape."""
    if hasattr(parameter, "to_local"):  # DTensor
        return parameter.to_local(), True, tuple(parameter.shape)
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3
        return parameter.ds_tensor, True, tuple(parameter.ds_shape)
    return parameter, False, tuple(parameter.shape)


def batches(model: Model, samples: int, seed: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless random inputs and targets; ranks with the same seed see the same data."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [_batch(model, samples, generator) for _ in range(_BATCHES)]
    return itertools.cycle([(inputs.to(device), targets.to(device)) for inputs, targets in drawn])


def _batch(model: Model, samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(model, Transformer):
        images = torch.randn(samples, 3, model.image, model.image, generator=generator)
        return images, torch.randint(model.classes, (samples,), generator=generator)
    size = (samples, model.shape.sequence)
    tokens = torch.randint(model.shape.vocabulary, size, generator=generator)
    targets = torch.randint(model.shape.vocabulary, size, generator=generator)
    if not model.causal:
        targets[torch.rand(size, generator=generator) > _HIDDEN_SHARE] = _IGNORED
    return tokens, targets


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in 32 bit whatever the type of the logits."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=_IGNORED)
