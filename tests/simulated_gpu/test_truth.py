"""A record of the library equals what the simulated device did, by its log."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record
from tests.simulated_gpu import jobs
from tests.simulated_gpu.truth import StepTruth
from tests.toggling import at_night

WITHIN = 0.01
# Its products are of many sizes.
MEGATRON: dict[str, Any] = {"rules": None, "tflops": 17, "link_gbs": 4, "most_data_bytes": 100_000}


class Steps:
    """What the devices did in the window's steps of one mode, over all ranks."""

    def __init__(self, mode: Mode, truths: list[list[StepTruth]], trained: list[jobs.Trained]) -> None:
        self.steps: list[StepTruth] = []
        self.times_ms: list[float] = []
        for truth, rank in zip(truths, trained, strict=True):
            # The window's first step is recorded, which takes the host longer.
            known = list(zip(truth, rank.modes, strict=True))[jobs.FIRST_STEP + 1 :]
            for (before, mode_before), (step, own_mode) in itertools.pairwise(known):
                if own_mode is not mode:
                    continue
                self.steps.append(step)
                if mode_before is mode:
                    self.times_ms.append((step.end - before.end) / 1e6)

    def values(self, name: str) -> list[float]:
        return [getattr(step, name) for step in self.steps]

    def median(self, name: str) -> float:
        return statistics.median(self.values(name))


def check(figure: Any, true_values: list[float], base: float = 0.0) -> None:
    """A figure is a mean over some of the steps, so it lies among the steps' own values, within 1 %.

    These are equal where the host is ahead of the device. On a busy machine it is late for single steps.
    """
    low, high = base + min(true_values), base + max(true_values)
    slack = 0.0 if base else 0.02
    assert low - WITHIN * low - slack < base + measured(figure) < high + WITHIN * high + slack


def measured(figure: Any) -> float:
    assert figure is not None
    return float(figure.value)


def compare(window: OverlapReport, overlapped: Steps, sequential: Steps) -> None:
    """What every record must have right."""
    assert window.valid
    # Others may be told: of power in short blocks, or of a busy host.
    assert not [problem for problem in window.problems if "the profile" in problem]
    assert "Simulated GPU" in window.device
    assert len(sequential.steps) > 20
    # Of some 25 ms or more. FSDP2 copies into its second all-gather, on a stream of its own, beside the first.
    assert max(step.hidden_ms for step in sequential.steps) < 0.03
    assert measured(window.residual_overlap) == pytest.approx(0, abs=1e-3)
    check(window.compute_slowdown, overlapped.values("compute_slowdown"), base=1)
    check(window.compute_ms, overlapped.values("compute_ms"))
    check(window.compute_isolated_ms, sequential.values("compute_ms"))
    for name, figure in (
        ("communication_ms", window.comm_ms),
        ("hidden_ms", window.hidden_comm_ms),
        ("exposed_ms", window.exposed_comm_ms),
    ):
        check(figure, overlapped.values(name))


def compare_transfers(window: OverlapReport, sequential: Steps) -> None:
    """Of collectives, what is left without the waiting for the last rank is exact, however late the hosts are."""
    waiting_ms = measured(window.waiting_isolated_ms) if window.waiting_isolated_ms else 0
    transfer_ms = measured(window.comm_isolated_ms) - waiting_ms
    assert transfer_ms == pytest.approx(sequential.median("transfer_ms"), rel=WITHIN)


def compare_times(window: OverlapReport, overlapped: Steps, sequential: Steps) -> None:
    """What is the device's alone where the host is ahead of it."""
    check(window.e2e_overlapped_ms, overlapped.times_ms)
    check(window.e2e_sequential_ms, sequential.times_ms)
    for mode, truth in ((Mode.OVERLAPPED, overlapped), (Mode.SEQUENTIAL, sequential)):
        timed = [ms for rank in window.samples for block in rank.timed if block.arm is mode for ms in block.step_ms]
        assert statistics.median(timed) == pytest.approx(statistics.median(truth.times_ms), rel=WITHIN)


def train_and_compare(
    kind: str, folder: Path, host_ahead: bool = True, **parameters: Any
) -> tuple[OverlapReport, Steps, list[list[StepTruth]]]:
    run_dir, truths, trained = jobs.train(kind, folder, **parameters)
    (window,) = record.read(run_dir).windows
    overlapped, sequential = (Steps(mode, truths, trained) for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL))
    compare(window, overlapped, sequential)
    if "pipeline" not in kind:
        compare_transfers(window, sequential)
    if host_ahead:
        compare_times(window, overlapped, sequential)
    return window, overlapped, truths


@pytest.mark.parametrize("contention", at_night([1.0, 1.3, 2.0], [2.0]))
def test_ddp_is_measured_as_it_ran(tmp_path: Path, contention: float) -> None:
    window, *_ = train_and_compare("ddp", tmp_path, compute_slowdown=contention)
    if contention == 1:
        assert measured(window.compute_slowdown) == pytest.approx(0, abs=1e-3)
    assert measured(window.comm_slowdown) == pytest.approx(0, abs=1e-3)


def test_slow_communication_is_measured_as_it_ran(tmp_path: Path) -> None:
    window, overlapped, _ = train_and_compare("ddp", tmp_path, communication_slowdown=1.4)
    true_slowdown = overlapped.median("transfer_ms") / overlapped.median("transfer_alone_ms")
    assert 1.2 < true_slowdown < 1.4
    assert 1 + measured(window.comm_slowdown) == pytest.approx(true_slowdown, rel=WITHIN)


def test_fsdp2_is_measured_as_it_ran(tmp_path: Path) -> None:
    train_and_compare("fsdp2", tmp_path, compute_slowdown=1.3, rules="gemm=6000")


def test_hsdp_is_measured_as_it_ran(tmp_path: Path) -> None:
    train_and_compare("hsdp", tmp_path, ranks=4, compute_slowdown=1.3, rules="gemm=12000", most_data_bytes=100_000)


def test_tensor_parallelism_is_measured_as_it_ran(tmp_path: Path) -> None:
    train_and_compare("tensor", tmp_path, compute_slowdown=1.3, most_data_bytes=100_000)


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_zero_is_measured_as_it_ran(tmp_path: Path, kind: str) -> None:
    # It asks the device for overflow in every step, so the host is never ahead.
    train_and_compare(kind, tmp_path, host_ahead=False, compute_slowdown=1.3)


def test_megatron_is_measured_as_it_ran(tmp_path: Path) -> None:
    # It asks the device for the norm of the gradients in every step.
    train_and_compare("megatron", tmp_path, host_ahead=False, compute_slowdown=1.3, **MEGATRON)


def test_a_pipeline_of_megatron_is_measured_as_it_ran(tmp_path: Path) -> None:
    train_and_compare("megatron pipeline", tmp_path, host_ahead=False, **MEGATRON)


def test_a_pipeline_is_measured_as_it_ran(tmp_path: Path) -> None:
    parameters: dict[str, Any] = {"rules": "gemm=1000", "most_data_bytes": 100_000}
    window, overlapped, _ = train_and_compare("pipeline", tmp_path, host_ahead=False, **parameters)
    check(window.e2e_overlapped_ms, overlapped.times_ms)


def test_a_slow_rank_is_no_contention(tmp_path: Path) -> None:
    run_dir, truths, trained = jobs.train("ddp", tmp_path, slow_rank="1:1.1")
    (window,) = record.read(run_dir).windows
    overlapped = Steps(Mode.OVERLAPPED, truths, trained)
    assert window.valid, window.problems
    assert measured(window.compute_slowdown) == pytest.approx(0, abs=1e-3)
    check(window.e2e_overlapped_ms, overlapped.times_ms)
    # The fast rank waits for the slow one within its collectives: they last longer than they transfer.
    assert overlapped.median("communication_ms") > 1.02 * overlapped.median("transfer_ms")
    assert overlapped.median("transfer_ms") == pytest.approx(overlapped.median("transfer_alone_ms"), rel=1e-5)


@pytest.mark.nightly
def test_ddp_on_four_ranks_is_measured_as_it_ran(tmp_path: Path) -> None:
    train_and_compare("ddp", tmp_path, ranks=4, compute_slowdown=1.3, rules="gemm=8000")
