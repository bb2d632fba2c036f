"""W&B hangs, refuses, or answers with errors: training and the record go on, and close comes to an end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from overlap_callbacks import JsonlSink, OverlapMonitor, OverlapReport, Schedule, Sink, WandbSink
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import RunInfo
from overlap_callbacks.sinks.fan_out import FanOut
from tests.distributed import run_ranks
from tests.margins import PATIENCE_S, near
from tests.report.runs import run_info, window
from tests.sinks.wandb.server import ERROR, HANG, WandbServer, environment, refusing
from tests.toggling import at_night
from tests.wandb_reader import SETTINGS, read_run

wandb = pytest.importorskip("wandb")

ONLINE = {**SETTINGS, "mode": "online", "x_file_stream_transmit_interval": 0.1}
SCHEDULE = Schedule(spread=False, every_n_steps=30, first_step=2, repeats=2, steps_per_block=1, profiled_steps=0)
STEPS = 60


@contextlib.contextmanager
def broken(trouble: str) -> Iterator[str]:
    """The address of a server in trouble."""
    if trouble == "refuse":
        with refusing() as url:
            yield url
    else:
        with WandbServer() as server:
            server.trouble = trouble
            yield server.url
            assert server.troubled, "wandb must have asked the server"
            assert server.hanging


class Noting(WandbSink):
    """Notes the threads on which it works."""

    threads: ClassVar[set[int]] = set()

    def open(self, run: RunInfo) -> None:
        self.threads.add(threading.get_ident())
        super().open(run)

    def log(self, report: OverlapReport) -> None:
        self.threads.add(threading.get_ident())
        super().log(report)


def _train(rank: int, folder: str, variables: dict[str, str]) -> dict[str, Any]:
    """The same training four times, in turns without and with W&B."""
    import torch
    from torch import nn

    os.environ.update(variables, HOME=folder, WANDB_DIR=folder)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
    batch = torch.ones(32, 256)
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(4):
        with_wandb = turn % 2 == 1
        run_dir = Path(folder, f"turn{turn}")
        sinks = [JsonlSink(run_dir)]
        if with_wandb:
            settings = wandb.Settings(**ONLINE)
            sinks.append(Noting(settings=settings, timeout_s=0.5))
        monitor = OverlapMonitor(SCHEDULE, sinks, run_dir=run_dir, max_overhead=None, power=False)
        for step in range(STEPS):
            start = time.perf_counter()
            with monitor.step(step):
                model(batch).sum().backward()
            times[with_wandb].append(time.perf_counter() - start)
        monitor.close()
    assert rank or Noting.threads
    assert threading.get_ident() not in Noting.threads
    return {"without": times[False], "with": times[True]}


@pytest.mark.parametrize("trouble", at_night([HANG, ERROR, "refuse"], [ERROR]))
def test_training_never_waits_and_no_window_is_missing_from_the_record(trouble: str, tmp_path: Path) -> None:
    with broken(trouble) as url:
        (times, _) = run_ranks(_train, 2, str(tmp_path), environment(url), timeout_s=120.0)
    # W&B works on threads of its own. Had training waited for one of them but once, that would be longer than all steps
    # together: a stall of the machine is in one turn, W&B in both.
    turns = {name: [sum(of_all[:STEPS]), sum(of_all[STEPS:])] for name, of_all in times.items()}
    assert near(min(turns["with"]), 3 * max(turns["without"]))
    for turn in range(4):
        assert [report.first_step for report in read(tmp_path / f"turn{turn}").windows] == [2, 32]


class StuckRun:
    """A run that takes nothing, as where wandb's own process has stopped."""

    id = "stuck"
    step = 0
    _is_finished = False

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.release = threading.Event()

    def define_metric(self, *_: Any, **__: Any) -> None:
        self.release.wait()

    def log(self, *_: Any, **__: Any) -> None:
        pass


def test_a_wandb_that_has_stopped_holds_up_neither_the_record_nor_the_end(tmp_path: Path) -> None:
    run = StuckRun()
    record, sink = JsonlSink(tmp_path), WandbSink(run, timeout_s=0.2)
    errors: list[tuple[Sink, Exception]] = []
    sinks = FanOut([sink, record], lambda *failure: errors.append(failure))  # W&B first, which is the worse order
    start = time.monotonic()
    sinks.open(run_info())
    for number in range(20):
        sinks.log(window(number))
    assert len(read(tmp_path).windows) == 20
    sinks.close(30.0)
    assert near(time.monotonic() - start, 30.0)
    assert not run.release.is_set()
    ((failed, error),) = errors
    assert failed is sink
    assert isinstance(error, TimeoutError)
    assert "W&B did not take everything within 0.2 s" in str(error)
    run.release.set()


def run_apart(script: str, url: str, folder: Path) -> str:
    """What a script prints, run to the end of its process in an interpreter of its own."""
    variables = {**os.environ, **environment(url), "HOME": str(folder)}
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


_STARTS_A_RUN = """
import sys, time
import wandb
from overlap_callbacks import WandbSink
from tests.report.runs import window
from tests.sinks.wandb.test_down import ONLINE

sink = WandbSink(settings=wandb.Settings(**ONLINE, init_timeout=0.5), dir=sys.argv[1], timeout_s=20)
sink.log(window())
while wandb.run is None:
    time.sleep(0.01)
sink.close()
print("ended")
"""


@pytest.mark.parametrize("trouble", at_night([HANG, ERROR], [ERROR]))
def test_a_run_that_the_server_does_not_begin_is_offline_and_the_process_ends(trouble: str, tmp_path: Path) -> None:
    with broken(trouble) as url:
        assert run_apart(_STARTS_A_RUN, url, tmp_path).endswith("ended\n")
    (offline,) = tmp_path.glob("wandb/offline-run-*")
    assert read_run(offline).values("overlap/step") == [20]


_HAS_A_RUN = """
import sys, time
import wandb
from overlap_callbacks import JsonlSink, WandbSink
from overlap_callbacks.sinks.fan_out import FanOut
from tests.report.runs import run_info, window
from tests.sinks.wandb.test_down import ONLINE

run = wandb.init(project="mine", dir=sys.argv[1], settings=wandb.Settings(**ONLINE, finish_timeout=0.5))
log, logged = run.log, []
def seen(row, **options):
    log(row, **options)
    logged.extend(row)
run.log = seen
print("begun", flush=True)
sys.stdin.readline()
sinks = FanOut([JsonlSink(sys.argv[1]), WandbSink(timeout_s=0.5)], lambda sink, error: print("told:", error))
sinks.open(run_info())
for number in range(5):
    sinks.log(window(number, power=True))
    run.log({"loss": 1.0})
while "overlap/compute_slowdown" not in logged:
    time.sleep(0.01)
run.log({"loss": 2.0})
sinks.close(30.0)
run.finish()
print("ended")
"""


def test_a_users_run_whose_server_goes_down_later(tmp_path: Path) -> None:
    with WandbServer() as server:
        variables = {**os.environ, **server.environment(), "HOME": str(tmp_path)}
        command = [sys.executable, "-c", _HAS_A_RUN, str(tmp_path)]
        with subprocess.Popen(
            command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            server.trouble = HANG
            output, _ = process.communicate("go on\n", timeout=PATIENCE_S)
        assert server.troubled
        assert server.hanging
    assert process.returncode == 0
    assert output.endswith("ended\n")
    assert len(read(tmp_path).windows) == 5
    # wandb was asked for the first tables, which wait for the server, after the first window's figures.
    logged = read_run(tmp_path)
    assert logged.values("loss") == [1.0] * 5 + [2.0]
    assert logged.values("overlap/step")[0] == 20
    assert logged.values("overlap/compute_slowdown")
