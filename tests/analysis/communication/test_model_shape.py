"""Parameters, counted exactly: against the numbers that the models' authors and Hugging Face publish."""

from __future__ import annotations

import pytest

from overlap_callbacks.analysis.communication import equations
from overlap_callbacks.analysis.communication.model_shape import (
    PRESETS,
    ModelShape,
    count_parameters,
    elements,
    huggingface_parameters,
    megatron_parameters,
    padded_vocabulary,
    preset,
)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
    ],
)
def test_published_numbers(name: str, number: int) -> None:
    assert count_parameters(preset(name)) == number
    assert elements(huggingface_parameters(preset(name))) == number


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt")])
def test_equation_10_leaves_out_the_last_norm_only(name: str) -> None:
    model = preset(name)
    paper = equations.parameters(
        layers=model.layers, hidden=model.hidden, vocabulary=model.vocabulary, sequence=model.sequence
    )
    assert count_parameters(model) == round(paper) + 2 * model.hidden


def test_tensor_ranks_split_matrices_and_repeat_norms_and_biases_after_the_sum() -> None:
    # Width 8, MLP of 32, 20 words padded to a multiple of 4 on each of 2 ranks: 24, 12 a rank. A layer of a rank:
    # norms 2 * 16; projections 12 * 8 + 12 (queries, keys, values), 8 * 4 + 8; MLP 16 * 8 + 16, 8 * 16 + 8.
    model = ModelShape(layers=1, hidden=8, heads=2, sequence=6, vocabulary=20)
    assert padded_vocabulary(20, 2, 4) == 24
    layer = 2 * 16 + (96 + 12) + (32 + 8) + (128 + 16) + (128 + 8)
    first = megatron_parameters(model, 2, range(1), first=True, last=False, multiple=4)
    assert elements(first) == 12 * 8 + 6 * 8 + layer
    assert elements([parameter for parameter in first if parameter.whole]) == 2 * 16 + 8 + 8
    # A last stage has its own copy of tied words, and the last norm.
    last = megatron_parameters(model, 2, range(1), first=False, last=True, multiple=4, alone=False)
    assert elements(last) == layer + 16 + 12 * 8


def test_grouped_queries_and_gates_have_no_biases() -> None:
    # Width 8, 4 heads of 2 with keys and values for 2: queries 64, keys and values 2 * 32, output 64; MLP 3 * 8 * 20;
    # two norms of 8 without biases.
    model = ModelShape(
        layers=1, hidden=8, heads=4, kv_heads=2, ffn=20, sequence=6, vocabulary=10, gated=True, biases=False,
        norm_biases=False, learned_positions=False, tied=False,
    )  # fmt: skip
    assert model.layer_weights == 64 + 64 + 64 + 480
    assert count_parameters(model) == 2 * 80 + model.layer_weights + 2 * 8 + 8


def test_experts_are_split_over_ranks_and_their_router_is_not() -> None:
    # Width 8, MLP of 32 without biases: 2 * 8 * 32 = 512 an expert; the router 4 * 8; attention 4 * 64; norms 2 * 16.
    model = ModelShape(
        layers=1, hidden=8, heads=2, sequence=6, vocabulary=10, biases=False, experts=4, experts_per_token=2
    )
    layer = megatron_parameters(model, 1, range(1), first=False, last=False, multiple=1, ep=2)
    assert elements(layer) == 2 * 512 + 32 + 256 + 32
    assert elements([parameter for parameter in layer if parameter.expert]) == 2 * 512
    assert model.layer_weights == 256 + 32 + 2 * 512


def test_an_unknown_model_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"model must be one of gpt3-125m, .*llama3-70b, got 'gpt5'"):
        preset("gpt5")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden": 0}, "hidden must be at least 1, got 0"),
        ({"heads": 3}, "heads must divide hidden=8, got 3"),
        ({"experts": 2}, "experts must be at least experts_per_token=1 and without biases, got 2"),
        ({"kv_heads": 3}, "kv_heads must divide heads=4, got 3"),
    ],
)
def test_sizes_that_no_model_has(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape(**{"layers": 1, "hidden": 8, "heads": 4, "sequence": 4, "vocabulary": 10, **sizes}).check()
