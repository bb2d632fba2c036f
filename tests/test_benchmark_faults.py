"""One injected fault of each kind in a real job: the first change that is told has the right cause and ranks."""

from __future__ import annotations

import pytest

from benchmarks.faults import Fault, outcome

pytestmark = [pytest.mark.alone, pytest.mark.nightly]  # each trains a minute and more


@pytest.mark.parametrize(
    "case",
    [
        Fault("compute", 2, (1,), 0.015),
        Fault("input", 3, (2,), 0.015),
        Fault("link", 2, (0, 1), 0.015),
        Fault("growing", 2, (0, 1), 0.03),
        Fault("host", 4, (2, 3), 0.015),
    ],
    ids=lambda case: case.kind,
)
def test_a_fault_is_told_with_its_cause_and_ranks(case: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = outcome(case)
    assert found["right"], found
