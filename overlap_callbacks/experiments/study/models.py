"""The models of the studies by name, how they are shrunk, and the description of a training job. Pure."""

from __future__ import annotations

import math

import msgspec

from overlap_callbacks.analysis.communication.model_shape import PRESETS as KNOWN
from overlap_callbacks.analysis.communication.model_shape import ModelShape
from overlap_callbacks.analysis.study import Configuration

# Minimum sizes of a shrunk model.
_MIN_LAYERS, _MIN_HEADS, _MIN_SEQUENCE, _MIN_VOCABULARY = 2, 2, 32, 256
# An image of 32 would be a single pixel after the last stage, for which batch norm has no variance.
_MIN_CHANNELS, _MIN_IMAGE, _MIN_CLASSES = 8, 64, 16


class Transformer(msgspec.Struct, frozen=True, kw_only=True, tag="transformer"):
    """A language model.

    Attributes:
        shape: its sizes.
        causal: whether a token sees only earlier ones. False for BERT, which predicts masked tokens.
    """

    shape: ModelShape
    causal: bool = True

    def scaled(self, factor: float) -> Transformer:
        """The model with each of its sizes multiplied; see ``scaled``."""
        shape = self.shape
        heads = _multiple(shape.heads * factor, 2, _MIN_HEADS)
        # Heads keep their published width: attention kernels are made for widths of 64 and 128.
        hidden = heads * shape.head_width
        small = msgspec.structs.replace(
            shape,
            layers=_multiple(shape.layers * factor, 1, _MIN_LAYERS),
            heads=heads,
            kv_heads=math.gcd(heads, max(1, round(heads * shape.kv_heads / shape.heads))) if shape.kv_heads else 0,
            hidden=hidden,
            ffn=_multiple(shape.ffn * hidden / shape.hidden, 8, 8) if shape.ffn else 0,
            sequence=_multiple(shape.sequence * factor, 8, _MIN_SEQUENCE),
            vocabulary=_multiple(shape.vocabulary * factor, 64, _MIN_VOCABULARY),
        )
        return msgspec.structs.replace(self, shape=small)

    @property
    def num_blocks(self) -> int:
        """Parts between which a pipeline can be cut; the first and last stages also have embeddings and output."""
        return self.shape.layers

    def sizes(self) -> dict[str, int | float | str]:
        """For the results."""
        shape = self.shape
        return {
            "kind": "LLaMA" if shape.gated else "GPT" if self.causal else "BERT",
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "sequence": shape.sequence,
            "vocabulary": shape.vocabulary,
        }


class ConvNet(msgspec.Struct, frozen=True, kw_only=True, tag="convnet"):
    """A network that classifies images.

    Attributes:
        kind: ``ResNet`` or ``VGG``.
        blocks: of each stage: bottleneck blocks of a ResNet, convolutions of a VGG.
        channels: of the first stage.
        image: height and width.
        classes: number of classes.
        hidden: width of a VGG's linear layers; 0 for a ResNet.
    """

    kind: str
    blocks: tuple[int, ...]
    channels: int = 64
    image: int = 224
    classes: int = 1000
    hidden: int = 0

    def scaled(self, factor: float) -> ConvNet:
        """The network with each of its sizes multiplied; see ``scaled``."""
        return msgspec.structs.replace(
            self,
            blocks=tuple([_multiple(count * factor, 1, 1) for count in self.blocks]),
            channels=_multiple(self.channels * factor, 8, _MIN_CHANNELS),
            image=_multiple(self.image * factor, 32, _MIN_IMAGE),
            classes=_multiple(self.classes * factor, 1, _MIN_CLASSES),
            hidden=_multiple(self.hidden * factor, 8, 64) if self.hidden else 0,
        )

    @property
    def num_blocks(self) -> int:
        """Parts between which a pipeline can be cut; the first and last stages also have stem and output."""
        return sum(self.blocks)

    def sizes(self) -> dict[str, int | float | str]:
        """For the results."""
        return {
            "kind": self.kind,
            "blocks": sum(self.blocks),
            "channels": self.channels,
            "image": self.image,
            "classes": self.classes,
        }


Model = Transformer | ConvNet


# Table II of arXiv 2507.03114.
TABLE_II = ("gpt3-xl", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "llama2-13b")
MODELS: dict[str, Model] = {
    **{name: Transformer(shape=KNOWN[name], causal=name != "bert") for name in dict.fromkeys((*TABLE_II, *KNOWN))},
    # "Understanding Communication Characteristics of Distributed Training" (APNet '24).
    "resnet50": ConvNet(kind="ResNet", blocks=(3, 4, 6, 3)),
    "resnet101": ConvNet(kind="ResNet", blocks=(3, 4, 23, 3)),
    "vgg16": ConvNet(kind="VGG", blocks=(2, 2, 3, 3, 3), hidden=4096),
}


def scaled(name: str, factor: float) -> Model:
    """A preset, shrunk.

    Layers, heads, the width (by way of the heads), the sequence and the vocabulary are multiplied by the factor and
    rounded; for image networks the blocks of a stage, the channels, the image and the classes. So a transformer's
    weights shrink by about its third power. No size falls below the minimum of its kind of model, such as two layers
    and two heads.

    Args:
        name: of the preset.
        factor: above 0 and at most 1, which is the model as published.
    """
    model = MODELS[name]
    return model if factor == 1 else model.scaled(factor)


def _multiple(value: float, step: int, least: int) -> int:
    """The multiple of ``step`` nearest to a value, and at least ``least``."""
    return max(least, step * math.floor(value / step + 0.5))


# -- the files of a training job's folder


SPEC_NAME = "job.json"
# Written by the last rank at the end: it has the losses of a pipeline.
TRAINED_NAME = "trained.json"
# Steps of each mode that a window times; the same number is profiled.
WINDOW_STEPS = 5


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One training job.

    Attributes:
        configuration: to train.
        model: as it is trained.
        ranks: of the job.
        link: ``gloo`` or ``nccl``.
        threads: of each rank on a CPU.
        windows: number to measure, each of ``WINDOW_STEPS`` timed and as many profiled steps of each mode.
        scale: factor by which the model was shrunk; for the record.
        timeout_s: maximum time that ranks wait for each other.
        folder: of the job.
    """

    configuration: Configuration
    model: Model
    ranks: int
    link: str
    threads: int
    windows: int
    scale: float
    timeout_s: float
    folder: str


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """What a job reports at its end.

    Attributes:
        parameters: of the model; shared ones count once.
        samples_per_step: sequences or images of a step of the whole job.
        steps: number trained.
        losses: of this rank, step by step; in a pipeline, the last rank's.
    """

    parameters: int
    samples_per_step: int
    steps: int
    losses: tuple[float, ...] = ()
