"""``benchmarks/gpu.py``: what goes wrong in one step costs no other step, and no result is measured twice."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from packaging.requirements import Requirement

from overlap_callbacks.analysis.results.kernel_times import KernelTime

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, str(ROOT / "benchmarks/gpu.py"))
DEVICE = {"device": "NVIDIA H200", "torch": "2.13.0", "python": "3.12.3", "sources": "abc", "commit": "1234567"}

STEPS = {
    "good": """
        def run(record):
            open(RUNS, "a").write("x")
            record.figure("width", 0.01, "mm", proves="it is thin", expect=figures.below(0.02))
            record.raw("all widths", [0.01, 0.02])
    """,
    "crash": """
        def run(record):
            record.figure("before the crash", 1.0)
            print("about to crash")
            os.abort()
    """,
    "hang": """
        def run(record):
            record.figure("before the hang", 1.0)
            rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open(RUNS, "w").write(str(rank.pid))
            time.sleep(600)
    """,
    "pid": """
        def run(record):
            open(RUNS, "w").write(str(os.getpid()))
            time.sleep(600)
    """,
    "unmet": """
        def run(record):
            record.figure("width", 0.03, "mm", expect=figures.below(0.02))
            record.figure("height", None, "mm", expect=figures.below(0.02))
    """,
}
_HEADER = """
import os, subprocess, sys, time
from gpu_steps import figures
RUNS = {runs!r}
"""


class Bench:
    """The command, with steps that are made here; ``run`` returns its exit code."""

    def __init__(self, folder: Path, gpu: Any, environment: dict[str, Any]) -> None:
        self.folder = folder
        self.environment = environment
        self.runs = folder / "runs"
        self._gpu = gpu

    def run(self, names: list[str], *arguments: str, limit_s: float = 60.0) -> int:
        steps = [self._gpu.Step(name, f"made_{name}", f"what {name} does", limit_s) for name in names]
        code: int = self._gpu.main([*arguments, "--json", str(self.folder)], steps)
        return code

    def result(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"gpu-{name}-nvidia-h200.json").read_text())
        return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name, body in STEPS.items():
        lines = [line[8:] for line in body.splitlines()]
        header = _HEADER.format(runs=str(tmp_path / "runs"))
        (tmp_path / f"made_{name}.py").write_text(header + "\n".join(lines))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gpu = importlib.import_module("gpu")
    environment = dict(DEVICE)
    monkeypatch.setattr(gpu, "environment", lambda: dict(environment))
    return Bench(tmp_path, gpu, environment)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and not yet read by its parent


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


# -- the command


def test_list_names_every_step_and_its_time_limit_of_less_than_ten_minutes() -> None:
    done = subprocess.run([*COMMAND, "--list"], capture_output=True, text=True, check=True)
    *lines, total = done.stdout.splitlines()
    assert [line.split()[0] for line in lines][:2] == ["probe", "overflow"]
    limits = [float(line.split()[1]) for line in lines]
    assert all(0 < limit < 10 for limit in limits)
    assert total.split("min")[0].split() == ["all", "of", "them", f"{sum(limits):.1f}"]
    assert sum(limits) < 120  # as the command's description says


def test_every_file_of_tests_on_the_loopback_link_is_a_step_of_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_tests = importlib.import_module("gpu_steps.gpu_tests")
    run: list[list[str]] = []
    monkeypatch.setattr(gpu_tests, "run_tests", lambda record, *arguments: run.append(list(arguments)))
    functions = [step.module.partition(":")[2] for step in importlib.import_module("gpu").STEPS]
    for function in functions:
        if function.startswith("loopback_"):
            getattr(gpu_tests, function)(SimpleNamespace(on_cpu=False))
    of_cpu_alone = ROOT / "tests/gpu/test_loopback_known.py"  # test_loopback_device.py has the same for a GPU
    files = sorted({*(ROOT / "tests/gpu").glob("test_loopback*.py")} - {of_cpu_alone})
    assert sorted(run) == [[str(file.relative_to(ROOT))] for file in files]


def test_without_a_gpu_it_ends_with_one_line_and_exit_code_2(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.environment |= importlib.import_module("gpu_steps.environment")._from_torch()
    if bench.environment["device"] is not None:
        pytest.skip("there is a GPU")
    assert bench.run(["good"]) == 2
    assert not bench.runs.exists()
    line = "no GPU: torch sees none here. --cpu runs the steps in their CPU form."
    assert capsys.readouterr().err.splitlines() == [line]


def test_the_probe_runs_on_a_cpu_and_its_result_says_so(tmp_path: Path) -> None:
    command = [*COMMAND, "--cpu", "--only", "probe", "--json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device: cpu" in done.stdout
    (file,) = tmp_path.glob("*.json")
    assert file.name == "gpu-probe-cpu.json"
    result = json.loads(file.read_text())
    assert result.keys() == {"environment", "step", "status", "error", "seconds", "figures", "raw", "output"}
    assert result["environment"]["device"] == "cpu"
    assert {"date", "torch", "python", "commit", "sources"} <= result["environment"].keys()
    assert result["status"] == "complete"
    keys = {"value", "unit", "proves", "expected", "passed"}
    assert all(figure.keys() == keys for figure in result["figures"].values())


# -- a step that goes wrong


def test_a_step_that_crashes_costs_only_itself_and_keeps_its_figures(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(["crash", "good"]) == 1
    crash, good = bench.result("crash"), bench.result("good")
    assert crash["status"] == "failed"
    assert "SIGABRT" in crash["error"]
    assert crash["figures"]["before the crash"]["value"] == 1.0
    assert "about to crash" in crash["output"]
    assert good["status"] == "complete"
    assert good["raw"] == {"all widths": [0.01, 0.02]}
    shown = capsys.readouterr().out
    assert "FAIL  the step was ended by SIGABRT" in shown
    assert "pass  width" in shown


def test_a_step_that_hangs_is_ended_with_all_that_it_started(bench: Bench) -> None:
    assert bench.run(["hang"], limit_s=4.0) == 1
    hang = bench.result("hang")
    assert hang["status"] == "failed"
    assert "time limit" in hang["error"]
    assert "before the hang" in hang["figures"]
    rank = int(bench.runs.read_text())
    assert wait_until(lambda: not is_alive(rank))


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_step_ends_with_the_command(bench: Bench, by: signal.Signals) -> None:
    driver = bench.folder / "driver.py"
    driver.write_text(
        f"import sys; sys.path[:0] = [{str(ROOT / 'benchmarks')!r}]\n"
        "import os, signal\n"
        "from gpu_steps.runner import Step, run_step\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "run_step(Step('pid', 'made_pid', '', 60), on_cpu=False)\n"
    )
    command = subprocess.Popen([sys.executable, str(driver)])
    assert wait_until(lambda: bench.runs.exists() and bool(bench.runs.read_text()))
    command.send_signal(by)
    command.wait()
    step = int(bench.runs.read_text())
    assert wait_until(lambda: not is_alive(step))


def test_a_figure_that_misses_its_expectation_or_was_not_measured_fails(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run(["unmet"]) == 1
    unmet = bench.result("unmet")
    assert unmet["status"] == "complete"
    assert [figure["passed"] for figure in unmet["figures"].values()] == [False, False]
    shown = capsys.readouterr().out
    assert shown.count("FAIL  ") == 2
    assert "not measured" in shown
    assert "0 of 2 expectations met" in shown


# -- what is measured already


def test_a_step_with_a_result_is_not_run_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["good"]) == 0
    assert bench.run(["good"]) == 0
    assert bench.runs.read_text() == "x"
    assert "of an earlier run" in capsys.readouterr().out
    bench.run(["good"], "--again")
    assert bench.runs.read_text() == "xx"


@pytest.mark.parametrize("key", ["torch", "sources", "device"])
def test_a_result_counts_for_its_device_versions_and_sources_only(bench: Bench, key: str) -> None:
    bench.run(["good"])
    bench.environment[key] = "another"
    bench.run(["good"])
    assert bench.runs.read_text() == "xx"


@pytest.mark.parametrize("name", ["step.py", "kernels.cu"])
def test_results_depend_on_the_sources_in_python_and_in_cuda(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    environment = importlib.import_module("gpu_steps.environment")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    source = tmp_path / "tests/gpu/loopback" / name
    source.parent.mkdir(parents=True)
    source.write_text("before")
    before = environment._digest()
    source.write_text("after")
    assert environment._digest() != before


def test_a_step_that_failed_is_run_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run(["crash"])
    bench.run(["crash"])
    assert "of an earlier run" not in capsys.readouterr().out


def test_no_step_begins_for_which_the_time_is_too_short(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["good"], "--minutes", "1", limit_s=600.0) == 1
    assert not bench.runs.exists()
    assert "not begun, for want of time: good" in capsys.readouterr().out


def test_a_step_is_ended_when_the_time_is_over_and_counts_as_failed(bench: Bench) -> None:
    assert bench.run(["hang"], "--minutes", "0.05", limit_s=6.0) == 1
    assert "time limit of 3 s" in bench.result("hang")["error"]


# -- wheels


def test_wheels_are_of_the_tested_versions_and_known_by_their_package(bench: Bench) -> None:
    wheels = importlib.import_module("gpu_steps.wheels")
    versions = wheels.tested_versions()
    assert {"msgspec", "deepspeed", "megatron-core"} <= versions.keys()
    assert wheels.package_of(Path("pydantic_core-2.50.4-cp312-cp312-manylinux2014_x86_64.whl")) == "pydantic-core"
    assert wheels.is_installed("msgspec")
    assert not wheels.is_installed("no-such-package")


def test_what_is_carried_needs_nothing_that_is_neither_carried_nor_there(bench: Bench) -> None:
    wheels = importlib.import_module("gpu_steps.wheels")
    lacking = {
        f"{package}: {required}"
        for package in wheels.PACKAGES
        for required in map(Requirement, importlib.metadata.requires(package) or ())
        if required.marker is None or required.marker.evaluate({"extra": "", "python_version": wheels.PYTHON})
        if required.name.lower().replace("_", "-") not in {*wheels.PACKAGES, *wheels.THERE}
    }
    assert not lacking


def test_a_folder_without_wheels_is_said(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert bench.run([], "--unpack", str(empty)) == 1
    assert "no wheels" in capsys.readouterr().err


@pytest.mark.usefixtures("bench")
def test_one_rank_needs_no_launch_so_a_wait_in_an_open_block_orders_it() -> None:
    semantics = importlib.import_module("gpu_steps.nccl_semantics")
    assert semantics.orders_in_open_block(1)
    assert not semantics.orders_in_open_block(2)


@pytest.mark.usefixtures("bench")
def test_a_profile_is_whole_if_it_has_each_kernel_that_the_job_launched() -> None:
    negative = importlib.import_module("gpu_steps.negative")
    kernel = KernelTime("neg", False, 150_000, 150_000, 300.0, 300.0)
    assert negative.is_whole([kernel], 150_000)
    assert not negative.is_whole([msgspec.structs.replace(kernel, sequential_calls=149_999)], 150_000)


@pytest.mark.parametrize(
    ("torch_version", "cuda_version", "sent", "allowed"),
    [
        ("2.13.0+cu126", "12.6", signal.SIGSEGV, True),
        ("2.13.0+cu126", "12.6", signal.SIGABRT, False),
        ("2.13.0+cu130", "13.0", signal.SIGSEGV, False),
        ("2.12.1+cu126", "12.6", signal.SIGSEGV, False),
    ],
)
@pytest.mark.usefixtures("bench")
def test_a_crash_is_allowed_only_at_kinetos_limit_and_with_a_torch_that_it_may_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_version: str, cuda_version: str, sent: int, allowed: bool
) -> None:
    runner, kept = importlib.import_module("gpu_steps.runner"), importlib.import_module("gpu_steps.figures")
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    crashed = runner.Result("case", "failed", runner._ending(-sent), 1.0, ())
    passed = {}
    for name in ("overflow", "negative"):
        step = importlib.import_module(f"gpu_steps.{name}")
        monkeypatch.setattr(step, "run_step", lambda *_, **__: crashed)
        step.run(kept.Recorder(tmp_path / name, on_cpu=False))
        passed |= {figure.name: figure.passed for figure in kept.read(tmp_path / name)[0]}
    at_the_limit = (
        "profiles of many kernels: ran to their end",
        "more kernels than the profiler keeps: ran to its end",
    )
    assert {passed.pop(name) for name in at_the_limit} == {None if allowed else False}
    assert len(passed) == 6
    assert set(passed.values()) == {False}


def test_ranks_are_forked_from_a_process_that_asked_nvml_for_its_gpus() -> None:
    code = "import tests.gpu.machine, torch; print(torch.cuda._nvml_based_avail())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.split() == ["True"]
