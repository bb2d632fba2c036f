"""The models have the sizes of their names, at every scale those of the rule, and compute what their kind does."""

from __future__ import annotations

import msgspec
import pytest
import torch

from overlap_callbacks.analysis.communication.model_shape import count_parameters
from overlap_callbacks.experiments.study.job.building import batches, build, count_weights, draw_weights, loss_of
from overlap_callbacks.experiments.study.models import MODELS, ConvNet, Model, Transformer, scaled


def test_the_sizes_of_table_ii_are_the_studys() -> None:
    shapes = {name: (m.shape.layers, m.shape.hidden, m.shape.heads) for name, m in MODELS.items() if _is_gpt(m)}
    assert shapes["gpt3-xl"] == (24, 2048, 32)
    assert shapes["gpt3-2.7b"] == (32, 2560, 32)
    assert shapes["gpt3-6.7b"] == (32, 4096, 32)
    assert shapes["gpt3-13b"] == (40, 5120, 40)
    assert shapes["llama2-13b"] == (40, 5120, 40)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt3-xl", 1_316), ("llama2-13b", 13_016), ("bert", 334), ("gpt-1.5b", 1_558), ("gpt-3b", 2_700),
        # As counted by torchvision.
        ("resnet50", 25.557), ("resnet101", 44.549), ("vgg16", 138.358),
    ],
)  # fmt: skip
def test_a_models_name_tells_its_size(name: str, millions: float) -> None:
    weights = count_weights(MODELS[name])
    model = MODELS[name]
    if isinstance(model, Transformer):
        assert weights == count_parameters(model.shape)
        assert weights == pytest.approx(millions * 1e6, rel=0.01)
    else:
        assert round(weights / 1e6, 3) == millions


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0625, 0.01])
def test_a_shrunk_model_keeps_what_makes_its_kind(name: str, factor: float) -> None:
    model = scaled(name, factor)
    if factor == 1:
        assert model is MODELS[name]
    elif isinstance(model, Transformer):
        model.shape.check()
        assert model.shape.heads % 2 == 0
        assert model.shape.head_width == MODELS[name].shape.head_width  # type: ignore[union-attr]
        assert model.shape.layers >= 2
    else:
        assert model.image % 32 == 0
        assert min(model.blocks) >= 1
    assert count_weights(model) <= count_weights(MODELS[name])
    assert msgspec.json.decode(msgspec.json.encode(model), type=Transformer | ConvNet) == model


def test_the_rule_of_the_docs() -> None:
    shape = scaled("gpt3-xl", 0.25).shape  # type: ignore[union-attr]
    assert (shape.layers, shape.heads, shape.hidden, shape.sequence, shape.vocabulary) == (6, 8, 512, 512, 12544)
    assert scaled("resnet50", 0.25) == ConvNet(kind="ResNet", blocks=(1, 1, 2, 1), channels=16, image=64, classes=250)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_preset_runs_and_its_stages_after_one_another_are_the_model(name: str) -> None:
    model = scaled(name, 0.01)
    torch.manual_seed(0)
    inputs, targets = next(batches(model, 2, 0, torch.device("cpu")))
    whole = build(model)
    draw_weights(whole, 0)
    stages = [build(model, range(1)), build(model, range(1, model.num_blocks))]
    x = inputs
    for stage in stages:
        x = stage(x)
    logits = whole(inputs)
    assert x.shape == logits.shape
    loss = loss_of(logits, targets)
    # Nothing is learnt yet: every class is about as likely.
    assert loss.item() == pytest.approx(torch.tensor(float(logits.shape[-1])).log().item(), rel=0.5)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in whole.parameters())


@pytest.mark.parametrize(("name", "seen"), [("gpt3-xl", 6), ("llama2-13b", 6), ("bert", 12)])
def test_a_token_sees_those_before_it_and_berts_see_all(name: str, seen: int) -> None:
    model = scaled(name, 0.01)
    block = build(model).blocks[0]
    x = torch.randn(1, 12, model.shape.hidden, requires_grad=True)  # type: ignore[union-attr]
    block(x)[0, 5].sum().backward()
    assert x.grad is not None
    assert int((x.grad[0].abs().sum(dim=-1) > 0).sum()) == seen


def test_berts_targets_are_the_hidden_tokens() -> None:
    _, targets = next(batches(scaled("bert", 0.0625), 16, 0, torch.device("cpu")))
    assert 0.05 < float((targets >= 0).float().mean()) < 0.25


def _is_gpt(model: Model) -> bool:
    return isinstance(model, Transformer)
