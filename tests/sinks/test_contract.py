"""What holds for every sink."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime, TimedBlock
from overlap_callbacks.sinks import (
    FunctionSink,
    JsonlSink,
    MlflowSink,
    OpenTelemetrySink,
    PrometheusSink,
    RunInfo,
    Sink,
    TensorBoardSink,
    WandbSink,
)
from tests.report.arm_runs import arm_window
from tests.report.runs import run_info, window
from tests.samples import window_report
from tests.wandb_reader import SETTINGS

pytestmark = [
    pytest.mark.usefixtures("apart", "mlflow_store"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The filesystem tracking"),
]

HOSTILE = "</script><b>\"quoted\"\n\x00{job='x'}\\ a/b.c \u202e \ud800" + "x" * 5000


def wandb_sink(folder: Path) -> Sink:
    wandb = pytest.importorskip("wandb")
    return WandbSink(settings=wandb.Settings(**SETTINGS), dir=folder)


def tensorboard_sink(folder: Path) -> Sink:
    pytest.importorskip("tensorboard")
    return TensorBoardSink(folder / "tensorboard")


def prometheus_sink(folder: Path) -> Sink:
    pytest.importorskip("prometheus_client")
    return PrometheusSink(folder / "overlap.prom", {"job_name": HOSTILE}, port=0)


def mlflow_sink(folder: Path) -> Sink:
    pytest.importorskip("mlflow")
    return MlflowSink(detail="all")


def lightning_sink(folder: Path) -> Sink:
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    from overlap_callbacks.integrations.lightning import LoggerSink

    return LoggerSink(loggers.CSVLogger(folder))


def deepspeed_sink(folder: Path) -> Sink:
    pytest.importorskip("deepspeed")
    from types import SimpleNamespace

    from overlap_callbacks.integrations.deepspeed import EventsSink

    monitor = SimpleNamespace(csv_monitor=None, tb_monitor=None)
    return EventsSink(SimpleNamespace(monitor=monitor, global_samples=0))  # type: ignore[arg-type]


MAKERS: dict[str, Callable[[Path], Sink]] = {
    "jsonl": JsonlSink,
    "wandb": wandb_sink,
    "tensorboard": tensorboard_sink,
    "prometheus": prometheus_sink,
    "mlflow": mlflow_sink,
    "opentelemetry": lambda folder: OpenTelemetrySink(detail="all"),
    "function": lambda folder: FunctionSink(lambda metrics, step: None),
    "deferred": lambda folder: FunctionSink(lambda metrics, step: None, deferred=True),
    "lightning": lightning_sink,
    "deepspeed": deepspeed_sink,
}


HAS_FILES = ("jsonl", "prometheus")


@pytest.fixture(params=MAKERS)
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "opentelemetry":
        endpoint = request.getfixturevalue("collector").endpoint
        request.getfixturevalue("monkeypatch").setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", endpoint)
    made = MAKERS[request.param](tmp_path)
    yield made
    made.close()


def invalid() -> OverlapReport:
    return msgspec.structs.replace(window(1, power=True), valid=False, problems=("residual overlap 0.4",))


def hostile() -> OverlapReport:
    """Every name that a user or a kernel can choose, chosen badly; a figure that is no number."""
    report = window(2, power=True)
    return msgspec.structs.replace(
        report,
        device=HOSTILE,
        problems=(HOSTILE,) * 50,
        kernels=(KernelTime(HOSTILE, False, 1, 1, 2.0, 1.0),),
        dimensions=tuple(DimensionTime(f"{HOSTILE}{i}", 1, 1, 1.0, 1.0, 1.0, 1.0) for i in range(200)),
        collectives=(CollectiveTime(HOSTILE, HOSTILE, 2, HOSTILE, 1, 1, 1, math.nan, HOSTILE),),
        measurement_overhead=math.nan,
    )


def test_a_run_with_windows_of_all_kinds(sink: Sink) -> None:
    sink.open(run_info(framework=HOSTILE.replace("\ud800", "")))
    sink.block(0, 20, TimedBlock(Mode.OVERLAPPED, 0, (1.0, 2.0)))
    sparse = window_report(profiled=(), timed=(), kernels=(), pairs=(), dimensions=(), collectives=())
    for report in (window(0, power=True), invalid(), sparse):
        sink.log(report)
    sink.close()
    sink.close()


def test_names_that_users_and_kernels_choose_break_nothing(sink: Sink) -> None:
    sink.open(run_info())
    report = hostile()
    if isinstance(sink, JsonlSink):
        report = msgspec.convert(_without_surrogates(msgspec.to_builtins(report)), OverlapReport)
    sink.log(report)
    sink.close()


def _without_surrogates(value: Any) -> Any:
    """Names reach a report without them: JSON, in which ranks send theirs, cannot hold any."""
    if isinstance(value, str):
        return value.replace("\ud800", "")
    if isinstance(value, dict):
        return {key: _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, (list, tuple)) else value


def test_a_control_window_and_one_that_was_cut_short(sink: Sink) -> None:
    sink.open(run_info())
    sink.log(msgspec.structs.replace(window(0), control=True))
    sink.log(msgspec.structs.replace(window(1), complete=False))
    sink.close()


def test_closing_an_unopened_sink_does_nothing(sink: Sink, tmp_path: Path) -> None:
    sink.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix in (".jsonl", ".prom", ".wandb")]


def test_a_report_without_a_run_is_taken_by_all_but_the_record(sink: Sink) -> None:
    if isinstance(sink, JsonlSink):
        pytest.skip("a record begins with its run")
    sink.log(window())
    sink.close()


def test_windows_of_arms_reach_every_sink(sink: Sink, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sink.open(run_info())
    sink.log_arm(arm_window(0, power=True))
    sink.log_arm(msgspec.structs.replace(arm_window(1), valid=False, problems=(HOSTILE.replace("\ud800", ""),)))
    if isinstance(sink, FunctionSink):
        sink.flush()
    sink.close()
    assert type(sink).log_arm is not Sink.log_arm
    kind = request.node.callspec.params["sink"]
    if kind in HAS_FILES:  # those of W&B and TensorBoard have tests of their own; loggers write them later
        written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
        assert "prefetch_2_2" in written


class BrokenSink(Sink):
    def open(self, run: RunInfo) -> None:
        raise OSError("disk full")

    def log(self, report: OverlapReport) -> None:
        raise AssertionError("it must not be used again")


def _train(rank: int, folder: str) -> int:
    import torch
    from torch import nn

    from overlap_callbacks import OverlapMonitor, Schedule

    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    schedule = Schedule(spread=False, every_n_steps=30, first_step=2, repeats=1, steps_per_block=1, profiled_steps=0)
    sinks = [BrokenSink(), JsonlSink(folder)]
    monitor = OverlapMonitor(schedule, sinks, run_dir=folder, max_overhead=None, power=False)
    for step in range(25):
        with monitor.step(step):
            model(torch.ones(2, 8)).sum().backward()
    monitor.close()
    return step


def test_a_failure_costs_the_sink_and_nothing_else(tmp_path: Path) -> None:
    from overlap_callbacks.report.record import read
    from tests.distributed import run_ranks

    assert run_ranks(_train, 2, str(tmp_path)) == [24, 24]
    assert len(read(tmp_path).windows) == 1


def _train_without_backends(rank: int, folder: str, port: int) -> list[str]:
    from overlap_callbacks import OverlapMonitor
    from tests.distributed import captured_log
    from tests.monitor.jobs import Training, run_steps, tiny_schedule

    # Here: ranks are forks of a process that may have begun before.
    os.environ |= {
        "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "1", "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }  # fmt: skip
    gone = [OpenTelemetrySink(f"http://127.0.0.1:{port}/v1/metrics"), MlflowSink(), PrometheusSink(port=port)]
    with captured_log() as lines:
        monitor = OverlapMonitor(tiny_schedule(), [JsonlSink(folder), *gone], max_overhead=None, power=False)
        run_steps(Training(rank), monitor, 30)
        monitor.close()
    return lines


def test_backends_that_do_not_answer_cost_one_line_each(tmp_path: Path) -> None:
    for package in ("mlflow", "opentelemetry", "prometheus_client"):
        pytest.importorskip(package)
    from overlap_callbacks.report.record import read
    from tests.distributed import run_ranks

    with socket.socket() as silent:  # bound, and not listening: connections are refused
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        lines, others = run_ranks(_train_without_backends, 2, str(tmp_path), port)
    for name in ("OpenTelemetrySink", "MlflowSink", "PrometheusSink"):
        assert [f"{name} failed and is not used again" in line for line in lines].count(True) == 1, lines
    assert others == []
    assert len(read(tmp_path).windows) >= 5


def test_no_vendor_package_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, overlap_callbacks.sinks as s\n"
        "s.WandbSink(); s.TensorBoardSink('x'); s.PrometheusSink('x.prom'); s.FunctionSink(print)\n"
        "s.MlflowSink(); s.OpenTelemetrySink(); s.PrometheusSink(port=0)\n"
        "vendors = {'wandb', 'tensorboard', 'prometheus_client', 'mlflow', 'wandb_workspaces', 'lightning', "
        "'opentelemetry'}\n"
        "print(*sorted(vendors & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("module", "extra", "make"),
    [
        ("torch.utils.tensorboard", "tensorboard", TensorBoardSink),
        ("prometheus_client", "prometheus", lambda folder: PrometheusSink(folder / "x.prom")),
        ("wandb", "wandb", lambda folder: WandbSink()),
        ("mlflow", "mlflow", lambda folder: MlflowSink()),
        ("opentelemetry.exporter.otlp.proto.http.metric_exporter", "otel", lambda folder: OpenTelemetrySink()),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    module: str, extra: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    sink = make(tmp_path)
    with pytest.raises(ImportError, match=rf"pip install 'overlap-callbacks\[{extra}\]'"):
        sink.log(window())
    sink.close()
