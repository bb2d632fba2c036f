"""Launch shapes, and kernels without a launch, in trace files: by the rules of a live profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.kernels.table import LaunchShape
from overlap_callbacks.traces import read_trace
from tests import kineto

MS = 1_000_000


def gemm(correlation: int, **args: Any) -> list[kineto.Event]:
    kernel = kineto.kernel(kineto.GEMM, correlation * MS, correlation * MS + 100, correlation, **args)
    return [kineto.launch(correlation * MS - 500, correlation), kernel]


def test_launch_shapes_have_registers_shared_memory_and_the_sms_of_the_device(tmp_path: Path) -> None:
    full = {"registers per thread": 168, "shared memory": 199168, "blocks per SM": 8 / 132}
    events = [*gemm(1, **full), *gemm(2, **full), *gemm(3, **{**full, "registers per thread": 64}), *gemm(4)]
    kernels = read_trace(kineto.write(tmp_path / "t.json", events)).kernels
    assert [kernels.launches[shape] for shape in kernels.shape.tolist()] == [
        LaunchShape((8, 1, 1), (128, 1, 1), 168, 199168, 132),
        LaunchShape((8, 1, 1), (128, 1, 1), 168, 199168, 132),
        LaunchShape((8, 1, 1), (128, 1, 1), 64, 199168, 132),
        LaunchShape((8, 1, 1), (128, 1, 1)),
    ]
    # They pair by grid and block.
    assert {kernels.shapes[shape] for shape in kernels.shape.tolist()} == {"[8, 1, 1] [128, 1, 1]"}


def test_a_shape_that_makes_no_sense_stays_a_text(tmp_path: Path) -> None:
    kernels = read_trace(kineto.write(tmp_path / "t.json", gemm(1, grid=("x", 1)))).kernels
    assert kernels.launches == (None,)
    assert kernels.shapes == ('["x", 1] [128, 1, 1]',)


def test_a_kernel_without_a_launch_counts_in_the_step_that_the_device_ran(tmp_path: Path) -> None:
    lost = kineto.kernel(kineto.ALL_REDUCE, 2 * MS - 50, 2 * MS + 50, 99, stream=20)
    leftover = kineto.kernel(kineto.ALL_REDUCE, 10, 20, 98, stream=20)
    events = [kineto.step(1, 0, 10 * MS), *gemm(1), *gemm(2), lost, leftover]
    trace = read_trace(kineto.write(tmp_path / "t.json", events))
    assert trace.kernels.step.tolist() == [-1, 0, 0, 0]
    assert trace.problems == ("1 kernels have no launch in the file; they are placed by their start [OC727]",)
