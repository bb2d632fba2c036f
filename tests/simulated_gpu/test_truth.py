"""A record of the library equals what the simulated device did, by its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks import Mode
from overlap_callbacks.analysis.power.cause import MEMORY_BANDWIDTH, POWER_CAP, SM_CONTENTION
from tests.simulated_gpu.figures import CASES, run
from tests.toggling import at_night

# ZeRO-2 is in the part of the matrix that runs for each change. In other jobs compute is 1.3 times slower, and in the
# test of a late rank as fast.
NIGHTLY = (
    "DDP",
    "DDP, compute 1.3 times slower beside communication",
    "DDP, compute 2 times slower beside communication",
    "DDP, both slower",
    "DDP on 4 ranks",
    "DDP on 4 ranks, one link at half speed",
    "DDP, power capped",
    "DDP, memory exhausted",
    "DDP, channels that take SMs",
    "HSDP on 2 x 2 ranks",
    "ZeRO-2",
    "Megatron-core's pipeline",
)


# What makes compute slow in jobs whose power is measured.
CAUSES = {
    "DDP, power": SM_CONTENTION,
    "DDP, power capped": POWER_CAP,
    "DDP, memory exhausted": MEMORY_BANDWIDTH,
}
# Its figures are held in the test below.
LATE_RANK = "DDP, rank 1 slower by a tenth"


@pytest.mark.parametrize("name", at_night([name for name in CASES if name != LATE_RANK], NIGHTLY))
def test_a_job_is_measured_as_it_ran(tmp_path: Path, name: str) -> None:
    window, sequential, compared = run(CASES[name], tmp_path)
    assert window.valid
    # Others may be told: of power in short blocks, or of a busy host.
    assert not [problem for problem in window.problems if "the profile " in problem]
    if name in CAUSES:  # where a machine is so busy that a mode has no power, a note says so
        missing = [m for m in Mode if any(f"power of {m.value} steps" in problem for problem in window.problems)]
        for mode in Mode:
            told = sum(one.name.startswith(f"power/{mode.value}_") for one in compared)
            assert told == (0 if mode in missing else 2), window.problems
        if not missing:
            assert sum(one.name.endswith(("_dram_fraction", "_sm_fraction")) for one in compared) == 4
            assert window.power_verdict is not None
            assert window.power_verdict.verdict == CAUSES[name]
    assert "Simulated GPU" in window.device
    assert len(sequential) > 8 * CASES[name].ranks
    assert max(step.hidden_ms for step in sequential) == 0
    assert window.residual_overlap is not None
    assert window.residual_overlap.value == pytest.approx(0, abs=1e-3)
    assert CASES[name].must_have <= {one.name for one in compared}
    assert [one for one in compared if not one.holds] == []
    if name == "DDP":
        assert window.compute_slowdown is not None
        assert window.compute_slowdown.value == pytest.approx(0, abs=1e-3)


def test_a_rank_that_is_late_makes_the_others_wait_and_no_kernel_slow(tmp_path: Path) -> None:
    window, sequential, compared = run(CASES[LATE_RANK], tmp_path)
    assert window.valid
    assert [one for one in compared if not one.holds] == []
    for slowdown in (window.compute_slowdown, window.comm_slowdown):
        assert slowdown is not None
        assert slowdown.value == pytest.approx(0, abs=1e-3)
    assert all(step.communication_ms > 1.02 * step.transfer_ms for step in sequential if step.waiting_ms > 1)
    assert sum(step.waiting_ms > 1 for step in sequential) == len(sequential) / 2
