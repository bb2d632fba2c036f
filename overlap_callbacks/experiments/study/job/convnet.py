"""ResNet and VGG in plain torch, as published, for images of any size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from overlap_callbacks.experiments.study.models import ConvNet

# A ResNet's bottleneck block outputs this many times its own channels; the last stages of a VGG do not double theirs.
_EXPANSION = 4
_MAX_DOUBLINGS = 3


class ImageModel(nn.Module):
    """All blocks of a network (bottlenecks of a ResNet, convolutions of a VGG), or those of a pipeline stage."""

    def __init__(self, net: ConvNet, blocks: range) -> None:
        super().__init__()
        resnet = net.kind == "ResNet"
        made = list(_bottlenecks(net, blocks) if resnet else _convolutions(net, blocks))
        first, last = blocks.start == 0, blocks.stop == net.num_blocks
        self.stem = _stem(net.channels) if first and resnet else None
        self.blocks = nn.ModuleList(made)
        self.output = None if not last else _resnet_output(net) if resnet else _vgg_output(net)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From images of shape (samples, 3, height, width), or the previous stage, to logits, or the next stage."""
        if self.stem is not None:
            x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x if self.output is None else self.output(x)


class Bottleneck(nn.Module):
    """Three convolutions on a residual branch; the middle one has the stride."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * channels
        self.branch = nn.Sequential(
            *_convolution(inputs, channels, 1, 1), nn.ReLU(inplace=True),
            *_convolution(channels, channels, 3, stride), nn.ReLU(inplace=True),
            *_convolution(channels, outputs, 1, 1),
        )  # fmt: skip
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride)) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (samples, inputs, height, width) to (samples, outputs, height / stride, width / stride)."""
        return torch.relu(self.branch(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def _stem(channels: int) -> nn.Module:
    return nn.Sequential(*_convolution(3, channels, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))


def _bottlenecks(net: ConvNet, wanted: range) -> Iterator[nn.Module]:
    number, inputs = 0, net.channels
    for stage, count in enumerate(net.blocks):
        channels = net.channels * 2**stage
        for block in range(count):
            if number in wanted:
                yield Bottleneck(inputs, channels, 2 if stage and not block else 1)
            number, inputs = number + 1, _EXPANSION * channels


def _resnet_output(net: ConvNet) -> nn.Module:
    channels = _EXPANSION * net.channels * 2 ** (len(net.blocks) - 1)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, net.classes))


def _convolutions(net: ConvNet, wanted: range) -> Iterator[nn.Module]:
    number, inputs = 0, 3
    for stage, count in enumerate(net.blocks):
        channels = net.channels * 2 ** min(stage, _MAX_DOUBLINGS)
        for block in range(count):
            if number in wanted:
                layers: list[nn.Module] = [nn.Conv2d(inputs, channels, 3, padding=1), nn.ReLU(inplace=True)]
                yield nn.Sequential(*layers, *([nn.MaxPool2d(2)] if block == count - 1 else []))
            number, inputs = number + 1, channels


def _vgg_output(net: ConvNet) -> nn.Module:
    channels = net.channels * 2 ** min(len(net.blocks) - 1, _MAX_DOUBLINGS)
    pixels = (net.image // 2 ** len(net.blocks)) ** 2
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * pixels, net.hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(net.hidden, net.hidden), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(net.hidden, net.classes),
    )  # fmt: skip
