"""What the record contains, and when."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overlap_callbacks import JsonlSink, OverlapMonitor, OverlapReport, Schedule
from overlap_callbacks.report import record
from overlap_callbacks.sinks import Sink
from tests.commands import invoke
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import Training, new_monitor, tiny_schedule

# 1 + 8 x 2 = 17 steps, one window right after the other.
SCHEDULE = Schedule(every_n_steps=17, first_step=0, repeats=2, steps_per_block=1, profiled_steps=0)


class Waiting(Sink):
    """Lets the job go on only once a window has been reported, so that its cost is known before the next check."""

    def __init__(self) -> None:
        self.reports: list[OverlapReport] = []

    def log(self, report: OverlapReport) -> None:
        self.reports.append(report)


def _train(rank: int, folder: str, steps: int, max_overhead: float | None) -> dict[str, Any]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    waiting = Waiting()
    sinks: list[Any] = [JsonlSink(folder), waiting]
    monitor = OverlapMonitor(SCHEDULE, sinks, strict=True, max_overhead=max_overhead)
    for step in range(steps):
        with monitor.step(step):
            model(torch.ones(8, 64)).sum().backward()
        torch.distributed.barrier()
        while rank == 0 and step == 16 and not waiting.reports:
            pass
        torch.distributed.barrier()
    with captured_log(logging.INFO) as lines:
        monitor.close()
    return {"windows": [report.window for report in waiting.reports], "lines": lines}


def test_a_window_left_out_for_its_cost_leaves_nothing_in_the_record(tmp_path: Path) -> None:
    # Sequential steps cost far more than a millionth, so after the first window all are left out.
    first, _ = run_ranks(_train, 2, str(tmp_path), 2 * 17, 1e-6)
    assert first["windows"] == [0]
    found = record.read(tmp_path)
    assert [window.window for window in found.windows] == [0]
    assert found.windows[0].measurement_overhead is not None
    assert found.windows[0].measurement_overhead > 1e-6
    assert all(sample.report_cpu_ms > 0 for sample in found.windows[0].samples)
    assert found.unfinished is None


def test_without_a_budget_every_window_is_measured(tmp_path: Path) -> None:
    first, second = run_ranks(_train, 2, str(tmp_path), 2 * 17, None)
    assert first["windows"] == [0, 1]
    # The line names the folder of the sink, which is not the monitor's run_dir here.
    assert first["lines"][-1] == f"overlap-callbacks: the record is in {tmp_path}: overlap show {tmp_path}"
    assert second["lines"] == []
    assert all(window.complete for window in record.read(tmp_path).windows)


def _stop_in_the_first_block(rank: int, folder: str) -> list[str]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    monitor = OverlapMonitor(SCHEDULE, [JsonlSink(folder)], strict=True)
    monitor.step_begin(0)
    model(torch.ones(8, 64)).sum().backward()
    monitor.step_end(0)
    file = Path(folder, "overlap.jsonl")
    while rank == 0 and not (file.exists() and file.read_text().endswith("\n")):
        pass
    torch.distributed.barrier()
    return [type(run).__name__ for run in record.read(folder).runs]


def _skip_the_recorded_step(rank: int, folder: str) -> None:
    training, monitor = Training(rank), new_monitor(JsonlSink(folder), schedule=tiny_schedule(), strict=True)
    for step in range(6):
        with monitor.step(step):
            training.step()
            if step == 2:
                monitor.skip_step("its gradients overflowed")
    monitor.close()


def test_why_a_window_was_left_out_goes_from_the_job_to_the_record_and_the_screen(tmp_path: Path) -> None:
    run_ranks(_skip_the_recorded_step, 2, str(tmp_path))
    reason = "its recorded steps were skipped (its gradients overflowed) [OC303]"
    assert record.read(tmp_path).left_out == [reason]
    shown = " ".join(invoke("show", str(tmp_path)).output.split())
    assert "Nothing has been measured: the only window was left out." in shown
    assert f"Why: {reason}." in shown


def test_there_is_a_record_before_anything_is_measured(tmp_path: Path) -> None:
    assert run_ranks(_stop_in_the_first_block, 2, str(tmp_path))[0] == ["RunInfo"]
