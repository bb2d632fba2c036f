"""Transformer sizes that determine a job's messages; parameter counts; models by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from overlap_callbacks import _validation

BYTES_OF_DTYPE = {"bf16": 2, "fp16": 2, "fp32": 4}
# Far above any real model. Time and memory grow with the layers.
MAX_SIZE, MAX_LAYERS = 10**9, 10**4


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of equal layers, like GPT (the defaults) or LLaMA.

    Attributes:
        layers: number of layers.
        hidden: width of a token.
        heads, kv_heads: of attention, and of its keys and values; 0 for the same.
        sequence: tokens of a sequence.
        vocabulary: rows of the word embeddings, before padding.
        ffn: width within the MLP; 0 for 4 times ``hidden``.
        gated: whether the MLP has a gate (SwiGLU), a third matrix.
        biases, norm_biases: whether linear layers have biases, and norms (layer norm, not RMS norm).
        learned_positions: whether positions are embedded by a table of ``sequence`` rows.
        tied: whether the output layer shares its weights with the word embeddings.
        experts: MLPs of each layer among which a router chooses; 0 for one MLP without a router.
        experts_per_token: how many of them a token passes.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    biases: bool = True
    norm_biases: bool = True
    learned_positions: bool = True
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 1

    @property
    def ffn_width(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values, of a token."""
        return (self.kv_heads or self.heads) * self.head_width

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer that a token passes."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn_width
        return attention + (self.experts * self.hidden + self.experts_per_token * mlp if self.experts else mlp)

    @property
    def token_flop(self) -> float:
        """FLOP of a token, forward and backward, without recomputation."""
        layers = self.layers * (2 * self.layer_weights + self.attention_flop(1))
        return 3 * (layers + 2 * self.hidden * self.vocabulary)

    def attention_flop(self, tokens: int) -> float:
        """FLOP of queries times keys, and of weights times values, in a layer's forward pass."""
        return 4 * tokens * self.sequence * self.hidden

    def check(self) -> None:
        """Reject impossible sizes by a TypeError or ValueError that names the parameter."""
        _validation.count("layers", self.layers, minimum=1, maximum=MAX_LAYERS)
        for name in ("hidden", "heads", "sequence", "vocabulary", "experts_per_token"):
            _validation.count(name, getattr(self, name), minimum=1, maximum=MAX_SIZE)
        for name in ("kv_heads", "ffn"):
            _validation.count(name, getattr(self, name), minimum=0, maximum=MAX_SIZE)
        _validation.count("experts", self.experts, minimum=0, maximum=MAX_LAYERS)
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden={self.hidden}, got {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads={self.heads}, got {self.kv_heads}")
        if self.experts_per_token > 1 and not self.experts:
            raise ValueError(f"experts_per_token must be 1 without experts, got {self.experts_per_token}")
        if self.experts and (self.biases or self.experts_per_token > self.experts):
            raise ValueError(
                f"experts must be at least experts_per_token={self.experts_per_token} and without biases, "
                f"got {self.experts}"
            )


def _gpt(layers: int, hidden: int, heads: int, sequence: int = 2048) -> ModelShape:
    return ModelShape(layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=50257)


def _llama(
    layers: int, hidden: int, heads: int, ffn: int, sequence: int, vocabulary: int = 32000, kv_heads: int = 0
) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, ffn=ffn, sequence=sequence, vocabulary=vocabulary,
        kv_heads=kv_heads, gated=True, biases=False, norm_biases=False, learned_positions=False, tied=False,
    )  # fmt: skip


PRESETS: dict[str, ModelShape] = {
    # "Language Models are Few-Shot Learners" (2020), table 2.1. For the 1.3B model, the paper's 24 heads of 128 do not
    # give 2048; 32 heads of 64 are in use. The 13B model's 5140 is 5120 wherever it is trained.
    "gpt3-125m": _gpt(12, 768, 12),
    "gpt3-350m": _gpt(24, 1024, 16),
    "gpt3-760m": _gpt(24, 1536, 16),
    "gpt3-1.3b": _gpt(24, 2048, 32),
    "gpt3-xl": _gpt(24, 2048, 32),  # the same by its name in that table
    "gpt3-2.7b": _gpt(32, 2560, 32),
    "gpt3-6.7b": _gpt(32, 4096, 32),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-175b": _gpt(96, 12288, 96),
    # Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
    "gpt2": _gpt(12, 768, 12, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    # The communication study (APNet '24), which gives no number of heads. No message depends on it; 16 is our choice,
    # which allows tp of 2, 4, 8 and 16.
    "gpt-1.5b": _gpt(48, 1600, 16, 1024),
    "gpt-3b": _gpt(54, 2000, 16, 1024),
    # BERT-large, "BERT: Pre-training of Deep Bidirectional Transformers" (2018).
    "bert": ModelShape(layers=24, hidden=1024, heads=16, sequence=512, vocabulary=30522),
    # "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023), and the released configurations.
    "llama2-7b": _llama(32, 4096, 32, 11008, 4096),
    "llama2-13b": _llama(40, 5120, 40, 13824, 4096),
    "llama2-70b": _llama(80, 8192, 64, 28672, 4096, kv_heads=8),
    # "The Llama 3 Herd of Models" (2024), table 3.
    "llama3-8b": _llama(32, 4096, 32, 14336, 8192, 128256, kv_heads=8),
    "llama3-70b": _llama(80, 8192, 64, 28672, 8192, 128256, kv_heads=8),
}


def preset(name: str) -> ModelShape:
    """The model of this name; a ValueError lists the known ones."""
    return PRESETS[_validation.one_of("model", name, tuple(PRESETS))]


# -- parameters, tensor by tensor. Their order and sizes determine the edges of buckets. Megatron-core's are those of
# ``GPTModel`` with its local layers; with Transformer Engine the order of norms within a layer differs. All others are
# Hugging Face's GPT-2 and LLaMA.


class Parameter(msgspec.Struct, frozen=True):
    """One tensor of parameters, as one tensor-parallel rank has it.

    Attributes:
        unit: number of its layer; -1 outside layers.
        whole: whether sequence parallelism splits its input, but not itself: norms, and biases added after the sum.
        word_embedding: whether it is the word embeddings, or the output layer.
        expert: whether it is of an expert, which other ranks of the same replica do not have.
    """

    shape: tuple[int, ...]
    unit: int = -1
    whole: bool = False
    word_embedding: bool = False
    expert: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def elements(parameters: Iterable[Parameter]) -> int:
    return sum([parameter.elements for parameter in parameters])


def padded_vocabulary(vocabulary: int, t: int, multiple: int) -> int:
    """Rows of the word embeddings once they divide by ``multiple`` on each of ``t`` tensor-parallel ranks."""
    return math.ceil(vocabulary / (multiple * t)) * multiple * t


def count_parameters(shape: ModelShape) -> int:
    """Exact number of parameters of a model; eq. 10 omits the last norm and missing biases."""
    stage = megatron_parameters(shape, 1, range(shape.layers), first=True, last=True, multiple=1)
    return elements(stage)


def megatron_parameters(
    shape: ModelShape,
    t: int,
    layers: range,
    *,
    first: bool,
    last: bool,
    multiple: int,
    alone: bool = True,
    ep: int = 1,
) -> list[Parameter]:
    """The parameters of a model chunk on one of ``t`` tensor-parallel ranks, in the order of ``named_parameters``.

    Args:
        shape: the model.
        t: ranks over which matrices are split.
        layers: the chunk's layers.
        first: whether it has the embeddings.
        last: whether it has the last norm and the output layer.
        multiple: multiple to which the vocabulary is padded on each rank.
        alone: whether no other stage has the word embeddings; a tied output layer then has no tensor.
        ep: ranks over which the experts are split.
    """
    hidden, words = shape.hidden, padded_vocabulary(shape.vocabulary, t, multiple) // t
    found = []
    if first:
        found.append(Parameter((words, hidden), word_embedding=True))
        if shape.learned_positions:
            found.append(Parameter((shape.sequence, hidden)))
    for layer in layers:
        found += _norm(shape, layer)
        found += _rows(shape, hidden, hidden // t, layer)
        found += _columns(shape, (hidden + 2 * shape.kv_width) // t, layer)
        found += _norm(shape, layer)
        found += _experts(shape, ep, layer) if shape.experts else _mlp(shape, t, layer)
    if last:
        found += _norm(shape, -1)
        if not (shape.tied and first and alone):
            found.append(Parameter((words, hidden), word_embedding=True))
    return found


def _norm(shape: ModelShape, layer: int) -> Iterator[Parameter]:
    for _ in range(2 if shape.norm_biases else 1):
        yield Parameter((shape.hidden,), layer, whole=True)


def _mlp(shape: ModelShape, t: int, layer: int) -> Iterator[Parameter]:
    yield from _columns(shape, (2 if shape.gated else 1) * shape.ffn_width // t, layer)
    yield from _rows(shape, shape.hidden, shape.ffn_width // t, layer)


def _experts(shape: ModelShape, ep: int, layer: int) -> Iterator[Parameter]:
    yield Parameter((shape.experts, shape.hidden), layer)  # the router
    for _ in range(shape.experts // ep):
        for parameter in _mlp(shape, 1, layer):
            yield Parameter(parameter.shape, layer, expert=True)


def _columns(shape: ModelShape, outputs: int, layer: int) -> Iterator[Parameter]:
    """A linear layer whose outputs are split over the ranks."""
    yield Parameter((outputs, shape.hidden), layer)
    if shape.biases:
        yield Parameter((outputs,), layer)


def _rows(shape: ModelShape, outputs: int, inputs: int, layer: int) -> Iterator[Parameter]:
    """A linear layer whose inputs are split over the ranks; its bias is added after the sum."""
    yield Parameter((outputs, inputs), layer)
    if shape.biases:
        yield Parameter((outputs,), layer, whole=True)


def huggingface_parameters(shape: ModelShape) -> list[Parameter]:
    """The parameters of Hugging Face's GPT-2 (a model with biases) or LLaMA (one without), in the order of use."""
    hidden, found = shape.hidden, [Parameter((shape.vocabulary, shape.hidden), word_embedding=True)]
    if shape.learned_positions:
        found.append(Parameter((shape.sequence, hidden)))
    norm = [(hidden,)] * (2 if shape.norm_biases else 1)
    for layer in range(shape.layers):
        found += [
            Parameter(size, layer) for size in (_gpt2_layer(shape, norm) if shape.biases else _llama_layer(shape))
        ]
    found += [Parameter(size) for size in norm]
    if not shape.tied:
        found.append(Parameter((shape.vocabulary, hidden), word_embedding=True))
    return found


def _gpt2_layer(shape: ModelShape, norm: list[tuple[int]]) -> list[tuple[int, ...]]:
    hidden, attention = shape.hidden, shape.hidden + 2 * shape.kv_width
    # Its matrices are transposed: inputs first.
    return [
        *norm, (hidden, attention), (attention,), (hidden, hidden), (hidden,),
        *norm, (hidden, shape.ffn_width), (shape.ffn_width,), (shape.ffn_width, hidden), (hidden,),
    ]  # fmt: skip


def _llama_layer(shape: ModelShape) -> list[tuple[int, ...]]:
    hidden = shape.hidden
    mlp: list[tuple[int, ...]] = [(shape.ffn_width, hidden)] * (2 if shape.gated else 1)
    return [
        (hidden,), (hidden, hidden), (shape.kv_width, hidden), (shape.kv_width, hidden), (hidden, hidden),
        (hidden,), *mlp, (hidden, shape.ffn_width),
    ]  # fmt: skip
