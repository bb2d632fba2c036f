"""torchtitan's own ``Trainer`` on two Gloo ranks, with FSDP2, and one line: ``attach(trainer.optimizers)``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loops.harness import compare, expect_measured
from tests.loops.torchtitan_loop import train
from tests.margins import PATIENCE_S

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_torchtitan(accumulate: int, tmp_path: Path) -> None:
    expect_measured(compare(train, tmp_path / "run", str(tmp_path / "out"), accumulate, timeout_s=250))


PROFILED = """
import sys, threading, torch
from torchtitan.config.function import Function
from torchtitan.tools.profiler import Profiler
from overlap_callbacks.traces import analyze_export

torch.distributed.get_rank = lambda: 0
config = Profiler.Config(enable_profiling=True, profile_freq=4, profiler_warmup=1, profiler_active=1)
config.trace_post_processor = Function.Config(fn=analyze_export)
with config.build(global_step=0, base_folder=sys.argv[1]) as profiler:
    for _ in range(8):
        torch.ones(64, 64) @ torch.ones(64, 64)
        profiler.step()
for thread in threading.enumerate():
    if thread.name == "overlap-callbacks-trace":
        thread.join()
"""


def test_its_profiler_has_each_trace_analysed_by_one_line(tmp_path: Path) -> None:
    """The line of ``docs/traces.md``, with torchtitan's own profiler."""
    subprocess.run([sys.executable, "-c", PROFILED, str(tmp_path)], check=True, timeout=PATIENCE_S)
    written = sorted(file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.overlap.txt"))
    assert written == [f"profiling/traces/iteration_{step}/rank0_trace.overlap.txt" for step in (4, 8)]
    assert all("Where the time goes" in (tmp_path / name).read_text() for name in written)
