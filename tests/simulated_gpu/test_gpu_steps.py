"""The steps of ``benchmarks/gpu.py`` on the simulated device: all expectations are met, and the results say where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toggling import at_night

ROOT = Path(__file__).resolve().parents[2]
# The steps tests-ddp to tests-megatron are tests/gpu, which runs by itself.
STEPS = ("probe", "nccl", "overflow", "ddp", "fsdp2", "slowdown", "negative", "host-bound", "arms", "bench")


@pytest.mark.parametrize("step", at_night(STEPS, set(STEPS) - {"nccl"}))
def test_a_step_meets_its_expectations(tmp_path: Path, step: str) -> None:
    results = ROOT / "benchmarks" / "results"
    before = sorted(results.iterdir())
    command = [sys.executable, ROOT / "benchmarks/gpu.py", "--only", step, "--json", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing about a GPU" in done.stdout
    (file,) = tmp_path.iterdir()
    assert file.name == f"gpu-{step}-simulated-gpu-no-hardware.json"
    assert json.loads(file.read_text())["environment"]["device"] == "Simulated GPU (no hardware)"
    assert sorted(results.iterdir()) == before


def test_what_cannot_run_is_left_out_with_the_reason() -> None:
    command = [sys.executable, ROOT / "benchmarks/gpu.py", "--only", "power", "gate-cost"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("not on the simulated GPU: ") == 2
