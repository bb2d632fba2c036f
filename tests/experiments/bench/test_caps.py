"""Points of a benchmark under caps of power: on a fake driver, with products and all-reduces of the CPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from overlap_callbacks.analysis.results.bench import LOOPBACK, GemmPoint
from overlap_callbacks.experiments.bench.results import Bench
from overlap_callbacks.experiments.bench.session import CapsInForce, run_session
from overlap_callbacks.experiments.bench.site import Ranks
from overlap_callbacks.experiments.bench.view import bench_document
from overlap_callbacks.experiments.sweep import CannotGoOnError
from overlap_callbacks.instruments.caps.settings import CapError, Caps
from overlap_callbacks.report.terminal import drawn
from tests.analysis.bench_results import gemm_plan
from tests.commands import invoke
from tests.distributed import run_alone
from tests.experiments.fake_gpus import BEFORE_W, Device, needs_driver
from tests.instruments.power.fakes import build


def measured(folder: Path) -> list[float]:
    """Limits of power as the points saw them, in a process of its own: its environment is for the fake driver."""
    device = Device(folder)
    os.environ.update(LD_LIBRARY_PATH=str(build.nvml().parent), FAKE_STATE=str(device.state))
    plan = gemm_plan(
        link=LOOPBACK, device="cpu", ranks=2, link_gb_s=0.05, sizes=(16, 24), message_bytes=(4096,), dtypes=("fp32",),
        rounds=2, block_s=0.01, power_caps_w=(None, 300.0, 5000.0),
    )  # fmt: skip
    stop: Any = SimpleNamespace(requested=False)
    run_session(plan, folder / "results", "overlap bench", stop, lambda *_: None, device.cap)
    return [*device.seen, device.power_limit_w]


class TestWithADriver:
    pytestmark = needs_driver

    def test_each_point_runs_under_its_cap_and_one_that_is_refused_is_a_note(self, tmp_path: Path) -> None:
        # The second round runs backwards: 300 W again, without the cap that no device takes, and then no cap.
        assert run_alone(measured, tmp_path) == [300.0, 300.0, BEFORE_W, BEFORE_W]
        results = Bench.read(tmp_path / "results")
        assert results.left == []
        assert {(line.point.n, line.point.power_cap_w) for line in results.rounds} == {
            (n, cap) for n in (16, 24) for cap in (None, 300.0)
        }
        assert len(results.rounds) == 8
        refused: list[GemmPoint] = [failed.gemm for failed in results.failed if failed.gemm is not None]
        assert [(point.n, point.power_cap_w) for point in refused] == [(16, 5000.0), (24, 5000.0)]
        console = Console(width=100)
        with console.capture() as captured:
            console.print(drawn(bench_document(results)))
        shown = " ".join(captured.get().split())
        assert "4 KiB fp32 300" in shown
        assert "N 16, fp32, all-reduce of 4 KiB, 5000 W: the power cap of" in shown


def test_what_one_host_cannot_put_back_ends_the_benchmark_on_all_ranks() -> None:
    class TwoRanks(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, ("THE DEVICE GPU-0 IS NOT AS BEFORE", "")]

    caps = CapsInForce(TwoRanks(), sets=False)
    assert caps.change(Caps()) == ""  # without caps, nobody is asked
    with pytest.raises(CannotGoOnError, match="THE DEVICE GPU-0"):
        caps.change(Caps(power_w=300.0))


def test_a_cap_that_another_host_refuses_is_refused_on_all_ranks() -> None:
    class TwoRanks(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, ("", "a power cap must be from 200 to 700 W")]

    caps = CapsInForce(TwoRanks(), sets=False)
    for _ in range(2):
        assert caps.change(Caps(power_w=900.0)) == "a power cap must be from 200 to 700 W"


def test_caps_are_refused_in_one_sentence_on_a_cpu(tmp_path: Path) -> None:
    done = invoke(
        "bench", "gemm-allreduce", "--power-cap", "300", "-o", str(tmp_path / "x"), env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.exit_code == 2
    assert "--power-cap caps GPUs, and the ranks are on the CPU here: leave it out" in done.stderr
    assert not (tmp_path / "x").exists()
    wrong = invoke("bench", "gemm-allreduce", "--clock-cap", "fast")
    assert "--clock-cap must be numbers above 0, or none" in wrong.stderr


def test_a_keeper_that_cannot_start_is_a_reason() -> None:
    def cap(wanted: Caps) -> Any:
        raise CapError("no caps: NVML is missing")

    caps = CapsInForce(Ranks(), sets=True, cap=cap)
    assert caps.change(Caps(power_w=300.0)) == "no caps: NVML is missing"
    caps.close()
