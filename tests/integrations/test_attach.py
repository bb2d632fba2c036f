"""From attach to the first step: the one line on rank 0, what raises, and what switches measuring off on all ranks."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks import JsonlSink, OverlapMonitor, Schedule, WandbSink
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.monitor import monitor as monitor_module
from overlap_callbacks.monitor.background.budget import Skip, WindowBudget
from overlap_callbacks.monitor.background.store import Job
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, Training, digest_without_library, own_threads, wait_until
from tests.monitor.test_keys_left import keys_of

STEPS = 12
WINDOW: dict[str, Any] = {
    "every_n_steps": 12, "first_step": 2, "repeats": 2, "profiled_steps": 0, "power": False,
    "advanced": {"steps_per_block": 1, "warmup_steps": 0, "spread": False},
}  # fmt: skip


def our_keys() -> list[str]:
    store: Any = dist.distributed_c10d._get_default_store()
    if not hasattr(store, "list_keys"):  # torch before 2.10
        return []
    return sorted(key for key in keys_of(store) if "overlap_callbacks" in key)


def train(rank: int, options: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Attach, train and close; what was said, and whether anything was changed or left."""
    os.environ.update(environment or {})
    training = Training(rank)
    raised = ""
    with captured_log(logging.INFO) as lines:
        begun_s = time.monotonic()
        try:
            monitor = attach(training.optimizer, **{**WINDOW, **options})
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            monitor = None
        took_s, at_attach, active = time.monotonic() - begun_s, list(lines), monitor is not None and monitor.active
        dist.barrier()
        for _ in range(STEPS):
            training.step()
        if monitor is not None:
            monitor.close()
    dist.barrier()
    return {
        "lines": at_attach, "later": lines[len(at_attach) :], "active": active, "raised": raised, "took_s": took_s,
        "same": training.digest() == digest_without_library(rank, STEPS), "threads": own_threads(), "keys": our_keys(),
    }  # fmt: skip


def check_unchanged(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["same"]
        assert found["threads"] == []
        assert found["keys"] == []


# -- the line at attach, and without steps


def attach_and_train(rank: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(rank, {"run_dir": folder, **options})


def test_one_line_on_rank_0_says_what_will_be_measured(tmp_path: Path) -> None:
    ranks = run_ranks(attach_and_train, 2, str(tmp_path / "run"), {"start_step": 7, "max_overhead": 0.02})
    check_unchanged(ranks)
    assert ranks[0]["lines"] == [
        f"overlap-callbacks: pytorch {torch.__version__}, 2 ranks; first window at step 14, then every 12 steps, "
        f"at most 2.00% of training time; record {tmp_path / 'run'}"
    ]
    assert ranks[1]["lines"] == []
    assert all(found["active"] for found in ranks)


def test_sinks_say_where_reports_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))  # type: ignore[arg-type]
    assert JsonlSink(tmp_path).destination() == f"record {tmp_path}"
    assert WandbSink(project="llama").destination() == "a new W&B run"
    assert WandbSink(start=False).destination() == ""
    assert KeptReports().destination() == ""
    assert WandbSink(SimpleNamespace(name="given", id="1")).destination() == "W&B run given"
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(name=None, id="1a2b")))  # type: ignore[arg-type]
    assert WandbSink(start=False).destination() == "W&B run 1a2b"


def never_step(rank: int, folder: str) -> list[str]:
    training = Training(rank)
    with captured_log() as lines, attach(training.optimizer, run_dir=folder):
        for _ in range(3):
            training.optimizer.zero_grad()
            loss = training.model(torch.ones(1, 16)).sum()
            loss.backward()
    return lines


def test_a_job_that_never_steps_the_optimizer_is_told_so(tmp_path: Path) -> None:
    said, other = run_ranks(never_step, 2, str(tmp_path))
    assert said == [
        "overlap-callbacks: nothing was measured: `optimizer.step()` was never called on the attached AdamW [OC101]"
    ]
    assert other == []


def attach_alone(rank: int, timed: bool) -> tuple[bool, list[str]]:
    if timed:
        os.environ["OVERLAP_CALLBACKS_TIME_ONLY"] = "1"
    with captured_log() as lines, attach(Training(rank).optimizer, sinks=[]) as monitor:
        return monitor.active, list(lines)


def test_a_job_of_one_rank_is_told_so_at_attach() -> None:
    said = (
        "overlap-callbacks: the job has one rank: nothing to overlap, so only the parts of its steps are timed [OC107]"
    )
    assert run_ranks(attach_alone, 1, False) == [(True, [said])]
    assert run_ranks(attach_alone, 1, True) == [(True, [])]


class Unspeakable(KeptReports):
    def destination(self) -> str:
        raise OSError("no name")


def attach_with_an_unspeakable_sink(rank: int) -> dict[str, Any]:
    return train(rank, {"sinks": [Unspeakable()]})


def test_a_sink_that_cannot_say_where_reports_go_raises_nothing() -> None:
    ranks = run_ranks(attach_with_an_unspeakable_sink, 2)
    check_unchanged(ranks)
    assert [found["raised"] for found in ranks] == ["", ""]
    assert all(found["active"] for found in ranks)
    assert len(ranks[0]["lines"]) == 1
    assert "no name" not in ranks[0]["lines"][0]


def test_what_goes_wrong_with_earlier_monitors_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("cannot create weak reference")

    monkeypatch.setattr(monitor_module, "close_others", fail)
    monkeypatch.setattr(Job, "current", lambda: Job(0, 1, "gloo"))
    monitor = OverlapMonitor(sinks=[])
    with captured_log() as lines:
        monitor.attached(0, "", object())
    assert not monitor.active
    assert len(lines) == 2  # the other one is of a job of one rank
    monitor.close()


# -- wrong values


def test_adapters_take_every_option_of_schedule_and_monitor() -> None:
    from overlap_callbacks.integrations._options import AdvancedOptions, Options

    schedule, monitor = inspect.signature(Schedule).parameters, inspect.signature(OverlapMonitor).parameters
    assert Options.__annotations__.keys().isdisjoint(AdvancedOptions.__annotations__)
    typed = {*Options.__annotations__, *AdvancedOptions.__annotations__}
    assert typed == {*schedule, *monitor, "advanced"} - {"framework"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every_n_steps": 3}, "ValueError: every_n_steps=3 is shorter"),
        ({"every_n_steps": "500"}, "TypeError: every_n_steps must be"),
        ({"every_n_step": 500}, "TypeError: unknown options ['every_n_step'] (did you mean every_n_steps?); allowed"),
        ({"steps_per_blok": 2}, "TypeError: unknown options ['steps_per_blok'] (did you mean advanced={'steps_per_bl"),
        ({"advanced": {"steps_per_blok": 2}}, "TypeError: unknown advanced options ['steps_per_blok'] (did you mean"),
        ({"advanced": {"every_n_steps": 2}}, "TypeError: unknown advanced options ['every_n_steps']"),
        ({"advanced": 5}, "TypeError: advanced must map names to values"),
        ({"advanced": []}, "TypeError: advanced must map names to values"),
        ({"advanced": {"steps_per_block": 10**9}, "every_n_steps": 10**12}, "ValueError: a window of 16,000,000,"),
        ({"repeats": 10**20}, "ValueError: repeats must be at most"),
        ({"advanced": {"report_timeout_s": 1e12}}, "ValueError: report_timeout_s must be at most"),
        ({"run_dir": 5}, "TypeError: run_dir must be"),
        ({"run_dir": "a\0b"}, "ValueError: run_dir must be the path of a folder, got 'a"),
        ({"sinks": [5]}, "TypeError: sinks must be"),
        ({"max_overhead": 2}, "ValueError: max_overhead must be"),
        ({"start_step": -1}, "ValueError: start_step must be"),
        ({"sequential": "sometimes"}, "ValueError: sequential must be"),
        ({"sequential": "native"}, "ValueError: sequential='native' needs the model"),
        ({"precision": "fp4"}, "ValueError: precision must be"),
        ({"arms": []}, "ValueError: arms is empty"),
    ],
)
def test_a_wrong_value_raises_at_attach(options: dict[str, Any], said: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for strict in (False, True):
        with pytest.raises((TypeError, ValueError)) as raised:
            attach(optimizer, strict=strict, **options)
        assert f"{type(raised.value).__name__}: {raised.value}".startswith(said)


def test_old_places_of_options_go_on_with_one_warning_that_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from overlap_callbacks.integrations import _options
    from overlap_callbacks.integrations._options import checked

    monkeypatch.setattr(_options, "_told", set())
    given = {"steps_per_block": 3, "hosts": False, "every_n_steps": 700}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.warns(FutureWarning) as warned:
        attach(optimizer, **given)
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        found = checked(given)
    assert again == []
    (warning,) = warned
    assert str(warning.message).endswith("give advanced={'hosts': ..., 'steps_per_block': ...} [OC119]")
    assert warning.filename == __file__  # the user's line
    _options._told.clear()
    assert (found["schedule"].steps_per_block, found["schedule"].every_n_steps, found["hosts"]) == (3, 700, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # this rank alone would raise
        assert checked(given) == found
        assert checked({"advanced": {"steps_per_block": 3, "hosts": False}, "every_n_steps": 700}) == found
        with pytest.raises(TypeError, match="hosts was given twice: under advanced, and outside it"):
            checked({"advanced": {"hosts": False}, "hosts": True})


# -- what is wrong on one rank alone


def attach_where_one_fails(rank: int, failing: int, folder: str, good: str, strict: bool) -> dict[str, Any]:
    return train(rank, {"run_dir": folder if rank == failing else good, "strict": strict})


@pytest.mark.parametrize("below", ["file", "proc"])
def test_a_folder_that_only_rank_0_cannot_write_switches_measuring_off_on_all_ranks(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "run") if below == "file" else "/proc/run"
    ranks = run_ranks(attach_where_one_fails, 2, 0, folder, str(tmp_path / "run"), False)
    check_unchanged(ranks)
    (line,) = ranks[0]["lines"]
    assert line.startswith("overlap-callbacks: measuring is switched off on all ranks, training goes on: [Errno ")
    assert folder in line
    assert ranks[1]["lines"] == ranks[0]["later"] == ranks[1]["later"] == []
    assert not any(found["active"] or found["raised"] for found in ranks)


def test_a_folder_that_only_rank_0_cannot_write_raises_on_all_ranks_if_strict(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad, good = str(tmp_path / "file" / "run"), str(tmp_path / "run")
    ranks = run_ranks(attach_where_one_fails, 2, 0, bad, good, True)
    check_unchanged(ranks)
    assert ranks[0]["raised"].startswith("NotADirectoryError: ")
    assert ranks[1]["raised"].startswith("RuntimeError: measuring is switched off on all ranks: [Errno 20]")
    assert ranks[0]["lines"] == ranks[1]["lines"] == []


def test_the_folder_of_another_rank_does_not_matter_and_the_check_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad, good = str(tmp_path / "file" / "run"), str(tmp_path / "run")
    ranks = run_ranks(attach_where_one_fails, 2, 1, bad, good, False)
    check_unchanged(ranks)
    assert all(found["active"] for found in ranks)


def attach_with_one_environment(rank: int, which: int, name: str, value: str, strict: bool) -> dict[str, Any]:
    return train(rank, {"sinks": [], "strict": strict}, {name: value} if rank == which else {})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OVERLAP_CALLBACKS_TIME_ONLY", "often", "OVERLAP_CALLBACKS_TIME_ONLY must be 1 or JSON"),
        ("OVERLAP_CALLBACKS", "quikc", "OVERLAP_CALLBACKS must be on, off or quick, got 'quikc'"),
        ("OVERLAP_CALLBACKS", "off", "switched off by OVERLAP_CALLBACKS=off"),
    ],
)
def test_an_environment_that_is_wrong_on_rank_1_alone_is_said_on_rank_0(name: str, value: str, said: str) -> None:
    ranks = run_ranks(attach_with_one_environment, 2, 1, name, value, False)
    check_unchanged(ranks)
    (line,) = ranks[0]["lines"]
    assert line.startswith(
        f"overlap-callbacks: measuring is switched off on all ranks, training goes on: rank 1: {said}"
    )
    assert ranks[1]["lines"] == []
    assert not any(found["active"] or found["raised"] for found in ranks)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OVERLAP_CALLBACKS", "quick", "quick is set on "),
        ("OVERLAP_CALLBACKS_TIME_ONLY", "1", "OVERLAP_CALLBACKS_TIME_ONLY is set on "),
    ],
)
def test_what_one_rank_alone_is_asked_for_is_said_on_rank_0(name: str, value: str, said: str) -> None:
    ranks = run_ranks(attach_with_one_environment, 2, 1, name, value, False)
    check_unchanged(ranks)
    (line,) = ranks[0]["lines"]
    assert "measuring is switched off on all ranks, training goes on: " in line
    assert line.partition(said)[2] in (
        "another rank, and not on this one [OC110]", "this rank, and not on another [OC110]",
    )  # fmt: skip
    assert ("rank 1: " in line) is line.endswith("not on another [OC110]")
    assert ranks[1]["lines"] == []
    assert not any(found["active"] or found["raised"] for found in ranks)


def attach_again_on_one_rank(rank: int, strict: bool) -> dict[str, Any]:
    training, other = Training(rank), Training(rank)
    with attach(training.optimizer, sinks=[]) as first, captured_log() as lines:
        raised, second = "", None
        try:
            second = attach((training if rank else other).optimizer, sinks=[], strict=strict)
        except Exception as error:
            raised = str(error)
        return {
            "lines": list(lines), "first": first.active, "raised": raised,
            "second": second is not None and second.active,
        }  # fmt: skip


def test_an_optimizer_that_is_attached_already_on_one_rank_alone_raises_nowhere() -> None:
    ranks = run_ranks(attach_again_on_one_rank, 2, False)
    (line,) = ranks[0]["lines"]
    assert "switched off on all ranks, training goes on: rank 1: optimizer is attached to already" in line
    assert ranks[1]["lines"] == []
    assert [(found["first"], found["second"], found["raised"]) for found in ranks] == [(True, False, "")] * 2
    for found in run_ranks(attach_again_on_one_rank, 2, True):
        assert "attached to already" in found["raised"]
        assert found["lines"] == []


def test_an_environment_that_is_wrong_on_rank_0_raises_on_all_ranks_if_strict_and_nothing_is_said() -> None:
    ranks = run_ranks(attach_with_one_environment, 2, 0, "OVERLAP_CALLBACKS_TIME_ONLY", "often", True)
    check_unchanged(ranks)
    for found, error in zip(
        ranks, ("ValueError: ", "RuntimeError: measuring is switched off on all ranks: "), strict=True
    ):
        assert found["raised"].startswith(f"{error}OVERLAP_CALLBACKS_TIME_ONLY must be 1 or JSON")
        assert found["lines"] == []


# -- a rank that never attaches, or late


def attach_on_rank_0_alone(rank: int) -> dict[str, Any]:
    if rank == 0:
        advanced = {**WINDOW["advanced"], "order_timeout_s": 1.0, "report_timeout_s": 2.0}
        return train(rank, {"sinks": [], "advanced": advanced})
    training = Training(rank)
    dist.barrier()
    for _ in range(STEPS):
        training.step()
    dist.barrier()
    return {"same": training.digest() == digest_without_library(rank, STEPS)}


def test_attach_does_not_hang_if_a_rank_never_attaches() -> None:
    first, _ = run_ranks(attach_on_rank_0_alone, 2)
    assert first["active"]
    assert first["same"]
    assert first["threads"] == []
    assert first["keys"] == []


def attach_later_on_rank_1(rank: int, folder: str) -> dict[str, Any]:
    training, store = Training(rank), dist.distributed_c10d._get_default_store()
    with captured_log() as lines:
        if rank:
            store.wait(["test/attached"])
            os.environ["OVERLAP_CALLBACKS_TIME_ONLY"] = "often"
        monitor = attach(training.optimizer, **{**WINDOW, "run_dir": folder})
        if not rank:
            store.set("test/attached", "-")
        dist.barrier()
        deadline = time.monotonic() + 30
        while rank == 0 and not lines and time.monotonic() < deadline:
            time.sleep(0.01)
        dist.barrier()
        for _ in range(STEPS):
            training.step()
        active = monitor.active
        monitor.close()
    return {"lines": lines, "active": active, "same": training.digest() == digest_without_library(rank, STEPS)}


def test_a_rank_that_attaches_later_is_heard_later(tmp_path: Path) -> None:
    first, second = run_ranks(attach_later_on_rank_1, 2, str(tmp_path))
    assert len(first["lines"]) == 1
    assert "switched off on all ranks, training goes on: rank 1: OVERLAP_CALLBACKS_TIME_ONLY" in first["lines"][0]
    assert second["lines"] == []
    assert not first["active"]
    assert not second["active"]
    assert first["same"]
    assert second["same"]


# -- the budget


def train_beyond_the_budget(rank: int) -> list[str]:
    training, sink = Training(rank), KeptReports()
    options, skip = {**WINDOW, "max_overhead": 1e-6}, WindowBudget.skip

    def skip_each(budget: WindowBudget, window: int | None) -> Skip | None:
        """Rank 0 rules on each window, and leaves none out in advance."""
        found = skip(budget, window)
        return found and found._replace(next_window=0)

    with (
        mock.patch.object(WindowBudget, "skip", skip_each),
        captured_log(logging.INFO) as lines,
        attach(training.optimizer, sinks=[sink], **options),
    ):
        for step in range(70):
            training.step()
            if step == 11:
                wait_until(lambda: rank > 0 or bool(sink.reports))
                dist.barrier()
    return [line for line in lines if "postpone" in line or "left out" in line]


def test_a_window_that_the_budget_postpones_is_said_once_and_when_it_comes() -> None:
    first, second = run_ranks(train_beyond_the_budget, 2)
    (line,) = first
    assert "overlap-callbacks: the budget postpones the next window to about step " in line
    assert " would bring it at step " in line
    assert second == []
