"""Arms of FSDP2 under Lightning and the Hugging Face Trainer: weights stay what they are, the model is as before."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks import Mode, arms
from tests.distributed import run_ranks
from tests.integrations import accelerate_shims
from tests.integrations import huggingface_jobs as jobs
from tests.integrations.parallel_jobs import fsdp_options

RANKS_LOAD = ("transformers.trainer", "accelerate", "lightning.pytorch")

NUM_STEPS = 44
# Windows of one recorded step and OSSO timed ones, one after the other: each arm has two.
WINDOWS: dict[str, Any] = {
    **jobs.ONE_WINDOW, "every_n_steps": 6, "repeats": 1, "profiled_steps": 0, "sinks": [], "power": False,
}  # fmt: skip
WAYS = ("whole", "close", "force", "exception")

needs_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is missing")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is missing"
)


class PlantedError(Exception):
    """Raised within a step of an arm."""


class Probe:
    """Looks in every step at what the arms turn, and ends a window in a step of an arm.

    Args:
        callback: the adapter's; None without the library.
        how: the window ends; ``whole`` for not at all.
    """

    def __init__(self, callback: Any, how: str) -> None:
        self._callback = callback
        self._how = how
        self._before: Any = None
        self._next: Any = None
        self._ended = False
        self._model: Any = None
        self._turned: dict[str, bool] = {}
        self._weights = ""

    def step_has_begun(self, model: Any) -> None:
        """Before its forward pass."""
        if self._ended:
            self._next = self._next or fsdp_options(model)
            return
        monitor = None if self._callback is None else self._callback.monitor
        if monitor is None or monitor.arm is None:
            return
        self._turned[monitor.arm] = fsdp_options(model) != self._before
        if self._how == "whole":
            return
        self._ended = True
        if self._how == "close":
            monitor.close()
        elif self._how == "force":
            monitor.force(Mode.OVERLAPPED)
        else:
            raise PlantedError

    def step_has_ended(self, model: Any) -> None:
        """After the optimizer's step."""
        self._model, self._weights = model, jobs.digest(model)
        if self._before is None:  # FSDP2 has made all of its state by now
            self._before = fsdp_options(model)

    def found(self) -> dict[str, Any]:
        """Once the training has ended."""
        return {
            "weights": self._weights,
            "turned": self._turned,
            "next": self._next in (None, self._before),
            "same": fsdp_options(self._model) == self._before,
        }


def three_arms() -> list[Any]:
    return [arms.Prefetch(2, 2), arms.Reshard(False), arms.Native()]


def with_lightning(rank: int, folder: str, endings: tuple[str, ...]) -> dict[str, Any]:
    from tests.integrations import test_lightning_strategies as lightning
    from tests.integrations.test_lightning import overlap_callback, pl

    class Watch(pl.Callback):
        def __init__(self, probe: Probe) -> None:
            self.probe = probe

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.probe.step_has_begun(trainer.strategy.model)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.probe.step_has_ended(trainer.strategy.model)

    found = {}
    for how in ("absent", *endings):
        options = {**WINDOWS, "arms": three_arms(), "run_dir": Path(folder, how)}
        callback = None if how == "absent" else overlap_callback(**options)
        probe = Probe(callback, how)
        callbacks = [Watch(probe)] if callback is None else [callback, Watch(probe)]
        with contextlib.suppress(PlantedError):
            lightning.fit(rank, folder, "fsdp2", *callbacks, max_steps=NUM_STEPS)
        found[how] = probe.found()
    return found


def with_transformers(rank: int, folder: str, endings: tuple[str, ...]) -> dict[str, Any]:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self, probe: Probe) -> None:
            self.probe = probe

        def on_step_begin(self, *_: Any, model: Any, **__: Any) -> None:
            self.probe.step_has_begun(model)

        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            self.probe.step_has_ended(model)

    jobs.join(rank)
    accelerate_shims.install()
    sharded = {"use_cpu": False, "fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    found = {}
    for how in ("absent", *endings):
        callback = None if how == "absent" else jobs.overlap_callback(**WINDOWS, arms=three_arms())
        probe = Probe(callback, how)
        callbacks = [Watch(probe)] if callback is None else [callback, Watch(probe)]
        trainer = jobs.trainer(rank, Path(folder, how), *callbacks, max_steps=NUM_STEPS, **sharded)
        with contextlib.suppress(PlantedError):
            trainer.train()
        if callback is not None:
            callback.close()
        found[how] = probe.found()
    return found


# How a window ends in a step of an arm is told to the same monitor by both trainers.
@pytest.mark.parametrize(
    ("train", "endings"),
    [
        pytest.param(with_lightning, ("whole", "close", "exception"), marks=needs_lightning),
        pytest.param(with_transformers, ("whole", "force", "exception"), marks=[needs_transformers, pytest.mark.slow]),
        pytest.param(with_lightning, WAYS, marks=[needs_lightning, pytest.mark.nightly]),
        pytest.param(with_transformers, WAYS, marks=[needs_transformers, pytest.mark.nightly]),
    ],
)
def test_arms_of_fsdp2_leave_weights_and_the_model_as_they_are_however_their_windows_end(
    tmp_path: Path, train: Any, endings: tuple[str, ...]
) -> None:
    for ways in run_ranks(train, 2, str(tmp_path), endings, timeout_s=240):
        assert list(ways["whole"]["turned"].values()) == [True] * len(three_arms())
        for how in endings:
            assert ways[how]["same"], how
            assert ways[how]["next"], how
            assert how == "whole" or list(ways[how]["turned"].values()) == [True]
            if how != "exception":
                assert ways[how]["weights"] == ways["absent"]["weights"], how
