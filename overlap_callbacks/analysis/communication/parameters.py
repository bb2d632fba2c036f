"""The parameters of a model, tensor by tensor and in the order in which frameworks see them.

The order and the sizes decide the edges of buckets. Megatron-core's are those of ``GPTModel`` with its local layers;
with Transformer Engine's the order of norms within a layer differs. All others are those of Hugging Face's GPT-2 and
LLaMA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from overlap_callbacks.analysis.communication.model_shape import ModelShape


class Parameter(msgspec.Struct, frozen=True):
    """One tensor of parameters, as one tensor-parallel rank has it.

    Attributes:
        shape: its sizes.
        unit: number of the layer that it belongs to; -1 for those outside layers.
        whole: whether every tensor-parallel rank has all of it although its input is split along the sequence in
            sequence parallelism: norms, and biases that are added after the sum over ranks.
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
        """How many numbers it has."""
        return math.prod(self.shape)


def elements(parameters: Iterable[Parameter]) -> int:
    """Numbers of several parameters together."""
    return sum([parameter.elements for parameter in parameters])


def padded_vocabulary(vocabulary: int, t: int, multiple: int) -> int:
    """Rows of the word embeddings once they divide by ``multiple`` on each of ``t`` tensor-parallel ranks."""
    return math.ceil(vocabulary / (multiple * t)) * multiple * t


def count_parameters(shape: ModelShape, multiple: int = 1) -> int:
    """Parameters of a model, exactly; eq. 10 leaves out the last norm, biases that are not there, and padding.

    Args:
        shape: the model.
        multiple: that the vocabulary is padded to.
    """
    stage = megatron_parameters(shape, 1, range(shape.layers), first=True, last=True, multiple=multiple)
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
    """Those of a model chunk on one of ``t`` tensor-parallel ranks, in the order of ``named_parameters``.

    Args:
        shape: the model.
        t: tensor-parallel ranks.
        layers: the chunk's layers.
        first: whether it has the embeddings.
        last: whether it has the last norm and the output layer.
        multiple: that the vocabulary is padded to, on each rank.
        alone: whether no other stage has the word embeddings too; a tied output layer then has no tensor of its own.
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
    """Those of Hugging Face's GPT-2 (a model with biases) or LLaMA (one without), in the order of use."""
    hidden, found = shape.hidden, [Parameter((shape.vocabulary, shape.hidden), word_embedding=True)]
    if shape.learned_positions:
        found.append(Parameter((shape.sequence, hidden)))
    norm = [(hidden,)] * (2 if shape.norm_biases else 1)
    for layer in range(shape.layers):
        found += [Parameter(size, layer) for size in (_gpt2_layer(shape, norm) if shape.biases else _llama(shape))]
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


def _llama(shape: ModelShape) -> list[tuple[int, ...]]:
    hidden = shape.hidden
    mlp: list[tuple[int, ...]] = [(shape.ffn_width, hidden)] * (2 if shape.gated else 1)
    return [
        (hidden,), (hidden, hidden), (shape.kv_width, hidden), (shape.kv_width, hidden), (hidden, hidden),
        (hidden,), *mlp, (hidden, shape.ffn_width),
    ]  # fmt: skip
