"""``tests/gpu`` under pytest, one figure a test: two ranks of NCCL on one GPU, each a host of its own to NCCL.

Both ranks share the GPU's time, so these tests show that the library works there, and nothing about times.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from gpu_steps import figures
from gpu_steps.environment import ROOT
from gpu_steps.figures import Recorder

_OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL)\b")
_TWO_RANKS = (
    "tests/gpu/test_parallel_forms.py", "tests/gpu/test_native_agrees.py", "tests/gpu/test_race_check.py",
)  # fmt: skip


def ddp(record: Recorder) -> None:
    of_kind(record, "ddp")


def fsdp2(record: Recorder) -> None:
    of_kind(record, "fsdp2")


def zero(record: Recorder) -> None:
    of_kind(record, "zero")


def megatron(record: Recorder) -> None:
    of_kind(record, "megatron")


def of_kind(record: Recorder, kind: str) -> None:
    """The tests of one kind of job on two ranks. In the CPU form one of them: the others take minutes."""
    run_tests(record, *_TWO_RANKS, "-k", f"{kind} and test_sequential_steps" if record.on_cpu else kind)


def loopback_link(record: Recorder) -> None:
    of_file(record, "tests/gpu/test_loopback_link.py", "broadcast_")


def loopback_jobs(record: Recorder) -> None:
    of_file(record, "tests/gpu/test_loopback.py", "ddp")


def loopback_figures(record: Recorder) -> None:
    run_tests(record, "tests/gpu/test_loopback_device.py")


def loopback_refusals(record: Recorder) -> None:
    of_file(record, "tests/gpu/test_loopback_refusals.py", "whole_profile")


def of_file(record: Recorder, file: str, on_cpu: str) -> None:
    """The tests of one file. In the CPU form those of this name: they all run with the usual tests."""
    run_tests(record, file, *(["-k", on_cpu] if record.on_cpu else []))


def power(record: Recorder) -> None:
    run_tests(record, "tests/gpu/test_power.py")


def run_tests(record: Recorder, *arguments: str) -> None:
    """Run tests one after the other; each is a figure as soon as it has ended.

    Args:
        record: takes the figures.
        *arguments: of pytest.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short", "-p", "no:cacheprovider", *arguments]
    variables = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    if record.on_cpu:
        variables["OVERLAP_GPU_TESTS_ON"] = "cpu"
    lines: list[str] = []
    num_run = 0
    with subprocess.Popen(
        command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
            found = _OUTCOME.match(line)
            if found:
                test, outcome = found.groups()
                # A test that is skipped proves nothing, and is no failure: the reason is under raw.
                expect = None if outcome == "SKIPPED" else figures.equal("passed")
                num_run += outcome != "SKIPPED"
                record.figure(test.removeprefix("tests/gpu/"), outcome.lower(), expect=expect)
    record.raw("output", lines[-400:])
    record.figure(
        "tests that were not skipped", num_run, proves="there was something to test",
        expect=None if record.on_cpu else figures.above(0),
    )  # fmt: skip
    record.figure("pytest's exit code", process.returncode, expect=figures.equal(0))
