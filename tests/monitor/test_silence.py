"""A rank or a store that is stopped holds up neither training nor ``close()`` for longer than our own bounds."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from overlap_callbacks.gate.deadlock import CollectiveSequence, Item
from overlap_callbacks.monitor.background import parts
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.order_check import Decision, OrderChecker
from overlap_callbacks.monitor.background.reporter import SETTLE_S
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.background.submissions import RecordedKinds
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.report.record import read
from tests.commands import invoke
from tests.distributed import captured_log, run_ranks
from tests.interpreters import run_interpreters, started
from tests.margins import PATIENCE_S
from tests.monitor import silent_job
from tests.monitor.jobs import Training, new_monitor, tiny_schedule, wait_until

DEFAULTS = MonitorConfig()


def run_job(folder: Path, what: str, *close_timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """What the ranks that ended printed, and rank 0's log."""
    port, outputs = folder / "port", [folder / f"output-{rank}" for rank in range(2)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(silent_job.serve, port, output=folder / "output-server"))
        wait_until(port.exists)
        arguments = (folder, what, server.pid, *close_timeout_s)
        environment = {"MASTER_PORT": port.read_text()}
        ranks = [
            stack.enter_context(started(silent_job.main, *arguments, output=output, rank=rank, environment=environment))
            for rank, output in enumerate(outputs)
        ]
        logs = []
        for rank, output in zip(ranks[:1] if what == "rank" else ranks, outputs, strict=False):
            rank.join(PATIENCE_S)
            logs.append(output.read_text())
            assert rank.exitcode == 0, logs[-1]
        printed = [[line for line in log.splitlines() if line.startswith("{")] for log in logs]
        return [json.loads(lines[-1]) for lines in printed], logs[0]


def test_close_gives_up_a_rank_that_is_stopped_before_the_time_for_reports_is_over(tmp_path: Path) -> None:
    (first,), _ = run_job(tmp_path, "rank")
    assert SETTLE_S < first["close_s"] < DEFAULTS.report_timeout_s
    (window,) = read(tmp_path).windows
    assert window.ranks == (0,)
    assert "1 of 2 ranks were not heard [OC328]" in window.problems


def test_close_waits_for_the_given_time(tmp_path: Path) -> None:
    timeout_s = SETTLE_S + 3
    (first,), _ = run_job(tmp_path, "rank", timeout_s)
    assert timeout_s < first["close_s"] < DEFAULTS.report_timeout_s


@pytest.mark.nightly
def test_a_rank_that_is_killed_between_windows_is_told_and_holds_up_nothing(tmp_path: Path) -> None:
    first, second, killed = run_interpreters(silent_job.lose_a_rank, 3, tmp_path, timeout_s=1.5 * PATIENCE_S)
    assert (first.code, second.code, killed.code) == (0, 0, -signal.SIGKILL), f"{first}\n{second}\n{killed}"
    for rank in (first, second):
        found = json.loads(next(line for line in rank.output.splitlines() if line.startswith("{")))
        assert found["longest_s"] < parts._TIMEOUT_S  # as long as the reporting thread waits for the killed rank
        assert found["close_s"] < DEFAULTS.report_timeout_s
    record = read(tmp_path)
    whole, without = record.frontier[0], [stretch for stretch in record.frontier if stretch.silent]
    assert (whole.num_ranks, whole.silent) == (3, ())
    assert {(stretch.num_ranks, stretch.silent) for stretch in without} == {(2, (2,))}
    assert min(stretch.last_step for stretch in without) >= silent_job.KILLED_AT
    assert "at times without rank 2" in " ".join(invoke("show", str(tmp_path), "--all").stdout.split())


def test_a_store_that_is_stopped_holds_up_neither_training_nor_the_end(tmp_path: Path) -> None:
    found, log = run_job(tmp_path, "store")
    for rank in found:
        assert rank["longest_s"] < DEFAULTS.order_timeout_s
        assert rank["close_s"] < DEFAULTS.report_timeout_s
        assert rank["active"]
    assert "a window has no sequential steps: the job's store does not answer" in log
    assert "what was not reported yet is lost" in log
    assert [window.ranks for window in read(tmp_path).windows] == [(0, 1)]


def test_once_the_store_goes_on_measuring_does(tmp_path: Path) -> None:
    found, _ = run_job(tmp_path, "store that goes on")
    assert all(rank["active"] for rank in found)
    windows = read(tmp_path).windows
    after = [window for window in windows if window.first_step > silent_job.THAW_AT]
    assert any(window.complete and window.ranks == (0, 1) for window in after)
    assert not any(window.complete for window in windows if window.first_step in range(12, silent_job.THAW_AT))


def train_beside_a_rank_that_does_not_measure(rank: int) -> dict[str, Any]:
    """The longest step, and what was said; only rank 0 has a monitor."""
    training, longest_s = Training(rank), 0.0
    monitor = new_monitor(schedule=tiny_schedule(first_step=20, every_n_steps=20)) if rank == 0 else None
    with captured_log() as lines:
        for step in range(60):
            began_s = time.monotonic()
            with monitor.step(step) if monitor is not None else contextlib.nullcontext():
                training.step()
            longest_s = max(longest_s, time.monotonic() - began_s)
        if monitor is not None:
            monitor.close(1.0)
    return {"longest_s": longest_s, "lines": lines}


def test_the_first_wait_for_a_rank_that_never_answers_is_short_where_steps_are() -> None:
    first, _ = run_ranks(train_beside_a_rank_that_does_not_measure, 2)
    assert first["longest_s"] < DEFAULTS.order_timeout_s
    (line,) = [line for line in first["lines"] if "no sequential steps" in line]
    assert "rank 1 did not report the order of collectives within" in line
    assert f"within {DEFAULTS.order_timeout_s:g} s" not in line


def test_ranks_have_less_time_until_all_were_heard_once() -> None:
    channel = StoreChannel(Job(0, 1, "gloo"), "prefix", Connection(dist.HashStore))
    checker = OrderChecker(channel, timeout_s=10.0, budget=WindowBudget(None), on_error=lambda _: None)
    assert [checker.timeout_s(step_s) for step_s in (0.008, 0.2, 3.0, None)] == [2.0, 4.0, 10.0, 10.0]
    order = RecordedKinds((CollectiveSequence(items=(Item("allreduce_", "0"),), groups={"0": (0,)}, compiled=True),))
    checker.start("check", order, 0, usual_step_s=0.008)
    assert checker.patience_s == 3 * 2.0
    assert checker.await_ruling().decision is Decision.SKIPPED  # a ruling of rank 0 on what all ranks handed in
    assert checker.timeout_s(0.008) == 10.0
    assert checker.patience_s == 3 * 10.0
    checker.close(5.0)
    # A user's own limit is never exceeded.
    hasty = OrderChecker(channel, timeout_s=0.3, budget=WindowBudget(None), on_error=lambda _: None)
    assert hasty.timeout_s(0.008) == 0.3
