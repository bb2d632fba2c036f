"""Adapters report the precision of matrix products from the framework's settings if the user does not."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.integrations.base import build_monitor, precision_of
from tests.distributed import run_alone, run_ranks


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is missing")


def test_the_users_value_counts_and_an_unknown_one_costs_nothing() -> None:
    def lost() -> str:
        raise AttributeError("no such name in this version")

    for given, told, expected in (
        (None, lambda: "bf16", "bf16"),
        ("fp8", lambda: "bf16", "fp8"),
        (None, lambda: None, None),
        (None, lost, None),
    ):
        options: dict[str, Any] = {"sinks": [], "precision": given} if given else {"sinks": []}
        monitor = build_monitor("framework 1", options, precision=told)
        assert monitor.active
        assert monitor.config.precision == expected
        monitor.close()


def test_types_without_a_peak_have_no_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float64, None)
    assert [precision_of(kind) for kind in types] == ["bf16", "fp16", "fp32", None, None]
    # On a GPU torch may round the factors of 32-bit products.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    assert precision_of(torch.float32) == "tf32"


def _lightning(names: tuple[str, ...], folder: str) -> list[str | None]:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    from overlap_callbacks.integrations.lightning import OverlapCallback

    found = []
    for name in names:
        callback = OverlapCallback(sinks=[], strict=True)

        class Look(pl.Callback):
            def on_train_start(self, *_: Any, seen: Any = callback) -> None:
                found.append(seen.monitor.config.precision)

        pl.Trainer(
            accelerator="cpu", max_steps=1, precision=name, callbacks=[callback, Look()], logger=False,
            default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            limit_val_batches=0,
        ).fit(BoringModel())  # fmt: skip
    return found


@needs("lightning")
def test_lightning_gives_its_trainers_precision(tmp_path: Any) -> None:
    names = ("32-true", "bf16-mixed", "bf16-true", "64-true")
    assert run_alone(_lightning, names, str(tmp_path), timeout_s=90) == ["fp32", "bf16", "bf16", None]


def _transformers(rank: int, folder: str) -> list[str | None]:
    from accelerate import Accelerator
    from transformers import TrainerCallback

    from overlap_callbacks.integrations.transformers import attach_accelerate
    from tests.integrations.huggingface_jobs import overlap_callback, trainer

    found = []
    for settings in ({}, {"bf16": True}):
        callback = overlap_callback()

        class Look(TrainerCallback):
            def on_train_begin(self, *_: Any, seen: Any = callback, **__: Any) -> None:
                found.append(seen.monitor.config.precision)

        trainer(rank, folder, callback, Look(), max_steps=1, **settings).train()
    model = torch.nn.Linear(2, 2)
    optimizer = Accelerator(cpu=True, mixed_precision="bf16").prepare(torch.optim.SGD(model.parameters()))
    with attach_accelerate(optimizer, sinks=[], strict=True) as monitor:
        found.append(monitor.config.precision)
    return found


@needs("transformers")
def test_transformers_and_accelerate_give_their_precision(tmp_path: Any) -> None:
    assert run_ranks(_transformers, 1, str(tmp_path), timeout_s=90) == [["fp32", "bf16", "bf16"]]


def _deepspeed(rank: int) -> list[str | None]:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    found = []
    for dtype in ("fp32", "bf16"):
        with attach(jobs.Training(rank, jobs.config(1, 1, dtype)).engine, sinks=[], strict=True) as monitor:
            found.append(monitor.config.precision)
    return found


@needs("deepspeed")
def test_deepspeed_gives_its_engines_precision() -> None:
    assert run_ranks(_deepspeed, 1, timeout_s=90) == [["fp32", "bf16"]]


def _megatron(rank: int) -> list[str | None]:
    from overlap_callbacks.integrations.megatron import attach
    from tests.integrations import megatron_jobs, megatron_shims

    megatron_shims.install()
    found = []
    for setup in (megatron_jobs.Setup(), megatron_jobs.Setup(fp16=16.0)):
        with (
            megatron_jobs.job(setup) as training,
            attach(training.model, training.optimizer, sinks=[], strict=True) as monitor,
        ):
            found.append(monitor.config.precision)
    return found


@needs("megatron")
def test_megatron_gives_its_models_precision() -> None:
    assert run_ranks(_megatron, 1, timeout_s=90) == [["fp32", "fp16"]]
