"""What a notebook does: cells that are run again, monitors that nothing names any more, and copies of callbacks."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_callbacks
from overlap_callbacks import JsonlSink, OverlapReport, Sink
from overlap_callbacks.integrations.pytorch import attach
from tests.distributed import captured_log, run_ranks
from tests.integrations.test_lines_gone_wrong import needs
from tests.monitor.jobs import KeptReports, Training, digest_without_library, tiny_schedule

OPTIONS: dict[str, Any] = {
    "schedule": tiny_schedule(every_n_steps=20, spread=False), "max_overhead": None, "power": False,
}  # fmt: skip


def run_a_cell_again(rank: int) -> dict[str, Any]:
    """A cell makes a model, attaches and trains; it is interrupted within a window and run again, three times."""
    sinks, monitors, digests = [KeptReports() for _ in range(3)], [], []
    with captured_log(logging.INFO) as lines:
        for number, sink in enumerate(sinks):
            training = Training(rank)
            monitors.append(attach(training.optimizer, sinks=[sink], **OPTIONS))
            for _ in range(4 if number < 2 else 12):
                training.step()
            dist.barrier()
            digests.append(training.digest())
        active = [monitor.active for monitor in monitors]
        overlap_callbacks.close()
    return {
        "active": active, "after": [monitor.active for monitor in monitors],
        "lines": [line for line in lines if "earlier" in line],
        "windows": [len(sink.reports) for sink in sinks], "complete": [r.complete for r in sinks[2].reports],
        "same": digests == [digest_without_library(rank, steps) for steps in (4, 4, 12)],
    }  # fmt: skip


def test_attach_closes_a_monitor_of_another_optimizer_with_one_sentence() -> None:
    ranks = run_ranks(run_a_cell_again, 2)
    for found in ranks:
        assert found["same"]
        assert found["active"] == [False, False, True]
        assert found["after"] == [False, False, False]
    sentence = "overlap-callbacks: an earlier monitor is closed: it was attached to another AdamW [OC117]"
    assert ranks[0]["lines"] == [sentence] * 2
    assert ranks[1]["lines"] == []
    assert ranks[0]["windows"][2] == 1
    assert ranks[0]["complete"] == [True]


def attach_when_the_optimizer_is_gone(rank: int) -> dict[str, Any]:
    training = Training(rank)
    first = attach(training.optimizer, sinks=[], **OPTIONS)
    for _ in range(4):
        training.step()
    first._driver.on_close.clear()  # the hook is gone with its optimizer
    training.optimizer._optimizer_step_post_hooks.clear()
    del training
    gc.collect()
    again, sink = Training(rank), KeptReports()
    with captured_log(logging.INFO) as lines, attach(again.optimizer, sinks=[sink], **OPTIONS):
        for _ in range(12):
            again.step()
    return {"lines": [line for line in lines if "earlier" in line], "reports": len(sink.reports)}


def test_attach_closes_a_monitor_whose_optimizer_is_gone() -> None:
    first, second = run_ranks(attach_when_the_optimizer_is_gone, 2)
    assert first["lines"] == [
        "overlap-callbacks: an earlier monitor is closed: what it was attached to is gone [OC117]"
    ]
    assert second["lines"] == []
    assert first["reports"] == 1


def attach_twice_without_a_step(rank: int) -> list[str]:
    first, second = Training(rank), Training(rank)
    with captured_log(logging.INFO) as lines:
        attach(first.optimizer, sinks=[], every_n_steps=300)
        attach(second.optimizer, sinks=[], every_n_steps=300)
        for _ in range(3):
            second.step()
        attach(first.optimizer, sinks=[], every_n_steps=300)
    overlap_callbacks.close()
    return lines


def test_a_monitor_that_is_replaced_takes_one_sentence_though_it_measured_nothing() -> None:
    lines, other = run_ranks(attach_twice_without_a_step, 2)
    assert other == []
    assert ["OC117" in line for line in lines] == [False, True, False, True, False]
    assert all("OC117" in line or "2 ranks; first window" in line for line in lines)


def close_by_name(rank: int) -> dict[str, Any]:
    training, sink = Training(rank), KeptReports()
    attach(training.optimizer, sinks=[sink], **OPTIONS)  # its name is lost
    for _ in range(12):
        training.step()
    overlap_callbacks.close()
    hooks = len(training.optimizer._optimizer_step_post_hooks)
    again = attach(training.optimizer, sinks=[], **OPTIONS)
    active = again.active
    overlap_callbacks.close()
    overlap_callbacks.close()
    return {"reports": len(sink.reports), "hooks": hooks, "again": active}


def test_what_runs_can_be_closed_without_its_name_and_attached_again() -> None:
    first, second = run_ranks(close_by_name, 2)
    assert first == {"reports": 1, "hooks": 0, "again": True}
    assert second["again"]


def test_a_monitor_that_raises_as_it_is_closed_keeps_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monitors = [overlap_callbacks.OverlapMonitor(sinks=[]) for _ in range(3)]

    def fail(*_: Any) -> None:
        raise RuntimeError("strict")

    monkeypatch.setattr(monitors[1]._driver.faults, "raise_reported", fail)
    monkeypatch.setattr(monitors[1]._driver.faults, "strict", True)
    with pytest.raises(RuntimeError, match="strict"):
        overlap_callbacks.close()
    assert not any(monitor.active for monitor in monitors)


# -- copies of monitors and callbacks


def copy_a_model_that_holds_its_monitor(rank: int) -> dict[str, Any]:
    training, sink = Training(rank), KeptReports()
    holder = torch.nn.Linear(2, 2)
    holder.monitor = monitor = attach(training.optimizer, sinks=[sink], **OPTIONS)
    active = []
    for step in range(12):
        training.step()
        if step == 4:  # within a window
            copies = [copy.deepcopy(holder), copy.copy(holder.monitor), pickle.loads(pickle.dumps(holder))]
            active = [getattr(each, "monitor", each).active for each in copies]
            for each in copies:
                getattr(each, "monitor", each).close()
    still = monitor.active
    monitor.close()
    return {
        "active": active, "still": still, "complete": [report.complete for report in sink.reports],
        "same": training.digest() == digest_without_library(rank, 12),
    }  # fmt: skip


def test_a_model_that_holds_its_monitor_is_copied_and_saved_and_the_copy_measures_nothing() -> None:
    for number, found in enumerate(run_ranks(copy_a_model_that_holds_its_monitor, 2)):
        assert found["active"] == [False, False, False]
        assert (found["still"], found["same"]) == (True, True)
        assert found["complete"] == [True] * (number == 0)


def lightning_callback(**options: Any) -> tuple[Any, Callable[[Any], None]]:
    from overlap_callbacks.integrations import lightning

    def start(callback: Any) -> None:
        trainer = SimpleNamespace(
            default_root_dir="", global_step=0, is_global_zero=True, loggers=[], precision="32-true",
            strategy=SimpleNamespace(model=None), optimizers=[], accumulate_grad_batches=1,
        )  # fmt: skip
        callback.on_train_start(trainer, torch.nn.Linear(2, 2))
        callback.on_train_batch_start(trainer)
        callback.on_validation_start(trainer, None)

    return lightning.OverlapCallback(**options), start


def transformers_callback(**options: Any) -> tuple[Any, Callable[[Any], None]]:
    from overlap_callbacks.integrations import transformers

    def start(callback: Any) -> None:
        args, state = SimpleNamespace(output_dir="", distributed_state=None), SimpleNamespace(global_step=0)
        callback.on_train_begin(args, state, None, model=torch.nn.Linear(2, 2))
        callback.on_step_begin(args, state, None)
        callback.on_epoch_end(args, state, None)

    return transformers.OverlapCallback(**options), start


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lightning_callback, marks=needs("lightning")),
        pytest.param(transformers_callback, marks=needs("transformers")),
    ],
)
def test_callbacks_are_copied_and_pickled_while_they_measure(make: Callable[..., Any], tmp_path: Any) -> None:
    sink = JsonlSink(tmp_path)
    callback, start = make(sinks=[sink], every_n_steps=300)
    start(callback)
    sink._file = (tmp_path / "overlap.jsonl").open("ab")  # as once a window has opened
    try:
        assert callback.monitor is not None
        for made in (copy.copy(callback), copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
            assert made.monitor is None
            assert made._options["every_n_steps"] == 300
            assert made._options["sinks"][0].path == sink.path
            start(made)
            assert made.monitor is not callback.monitor
            made.monitor.close()
    finally:
        callback.monitor.close()
        sink._file.close()


@dataclasses.dataclass(frozen=True)
class FrozenSink(Sink):
    name: str

    def log(self, report: OverlapReport) -> None:
        raise NotImplementedError


def test_a_sink_that_is_a_frozen_dataclass_is_made_and_copied() -> None:
    sink = FrozenSink("one")
    assert copy.deepcopy(sink) == pickle.loads(pickle.dumps(sink)) == sink


# -- what is refused by design


def begin_within_a_backward_pass(rank: int, strict: bool) -> dict[str, Any]:
    training = Training(rank)
    monitor = attach(
        training.optimizer, sinks=[], strict=strict, **{**OPTIONS, "schedule": tiny_schedule(first_step=0)}
    )
    weight = torch.ones(1, requires_grad=True)
    raised = ""

    def begin(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal raised
        try:
            monitor.step_begin(0)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        return gradient

    product = weight * 2
    product.register_hook(begin)
    with captured_log() as lines:
        product.sum().backward()
    monitor.close()
    return {"lines": lines, "active": monitor.active, "raised": raised}


def test_what_is_refused_by_design_is_not_called_an_internal_error() -> None:
    why = "a step began within a backward pass, where it cannot be measured: begin steps outside [OC126]"
    for found in run_ranks(begin_within_a_backward_pass, 2, False):
        (line,) = found["lines"]
        assert line.endswith(f"measuring is switched off, training goes on: {why}")
        assert not found["active"]
        assert found["raised"] == ""
    for found in run_ranks(begin_within_a_backward_pass, 2, True):
        assert found["raised"] == f"RefusedError: {why}"
