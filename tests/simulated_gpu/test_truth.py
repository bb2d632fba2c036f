"""A record of the library equals what the simulated device did, by its log."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from overlap_callbacks import Mode
from overlap_callbacks.report import record
from tests.simulated_gpu import jobs

WITHIN = 0.01


@pytest.mark.parametrize("contention", [1.0, 1.3, 2.0])
def test_ddp_record_equals_the_devices_log(tmp_path: Path, contention: float) -> None:
    run_dir, truths, trained = jobs.train(jobs.ddp, tmp_path, compute_slowdown=contention)
    (window,) = record.read(run_dir).windows
    assert window.valid, window.problems
    assert "simulated" in window.device.lower()
    steps = {
        mode: [
            step
            for truth, one in zip(truths, trained, strict=True)
            for step, which in list(zip(truth, one.modes, strict=True))[jobs.FIRST_STEP + 1 :]
            if which is mode
        ]
        for mode in (Mode.OVERLAPPED, Mode.SEQUENTIAL)
    }
    overlapped, sequential = steps[Mode.OVERLAPPED], steps[Mode.SEQUENTIAL]
    assert len(sequential) > 20

    true_slowdown = statistics.mean(step.compute_slowdown for step in overlapped)
    assert max(step.compute_slowdown for step in sequential) == pytest.approx(0, abs=1e-6)
    assert window.compute_slowdown is not None
    assert 1 + window.compute_slowdown.value == pytest.approx(1 + true_slowdown, rel=WITHIN)
    for figure, true_ms in (
        (window.compute_ms, statistics.median(step.compute_ms for step in overlapped)),
        (window.comm_ms, statistics.median(step.communication_ms for step in overlapped)),
        (window.hidden_comm_ms, statistics.median(step.hidden_ms for step in overlapped)),
        (window.exposed_comm_ms, statistics.median(step.exposed_ms for step in overlapped)),
    ):
        assert figure is not None
        assert figure.value == pytest.approx(true_ms, rel=WITHIN, abs=0.01)
    assert window.residual_overlap is not None
    assert window.residual_overlap.value == pytest.approx(0, abs=1e-3)
