"""What a window adds to a change that was told: clocks, memory, transfers; hosts, and runs whose steps go back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.environment import JobEnvironment, RankEnvironment, RankPlace
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import MemoryPeak
from overlap_callbacks.analysis.watch import RunWatch, Transfers, change_in_words, false_alarms_per_day, with_evidence
from tests.analysis.test_watch import STEPS, stretch
from tests.samples import window_report

SLOW = Change(what="step/forward", first_step=128, found_step=1279, before=10.0, after=14.0, step_ms=4.0,
              cause="compute", ranks=(3,))  # fmt: skip
LINK = msgspec.structs.replace(SLOW, what="step/waiting", cause="communication", ranks=())


def environment(*hosts: str, memory_bytes: int = 0) -> JobEnvironment:
    places = tuple([RankPlace(rank, host, "cpu") for rank, host in enumerate(hosts)])
    lowest = RankEnvironment(hostname=hosts[0], memory_bytes=memory_bytes)
    return JobEnvironment(lowest_rank=lowest, num_ranks=len(hosts), num_hosts=len(set(hosts)), num_devices=None,
                          places=places)  # fmt: skip


def report(clocks_mhz: tuple[float, ...] = (), peak: int = 0, size: int = 0, **changes: Any) -> OverlapReport:
    def sample(rank: int, clock: float) -> SimpleNamespace:
        modes = [SimpleNamespace(mode=mode, sm_clock_mhz=clock) for mode in (Mode.OVERLAPPED,)]
        return SimpleNamespace(rank=rank, power=[SimpleNamespace(modes=modes)])

    if size:
        changes |= {"memory": (MemoryPeak(Mode.OVERLAPPED, peak, peak),)}
        changes |= {"environment": environment("node-0", memory_bytes=size)}
    samples = tuple([sample(rank, clock) for rank, clock in enumerate(clocks_mhz)])
    return msgspec.structs.replace(window_report(), samples=samples, **changes)


def test_a_lower_clock_is_evidence_and_an_equal_one_is_ruled_out() -> None:
    found = with_evidence(SLOW, report((1500.0, 1500.0, 1500.0, 1200.0)), [])
    assert "window 0: its clock is 20.0% below that of other ranks" in found.evidence
    assert "its clock" not in found.is_not
    found = with_evidence(SLOW, report((1500.0, 1500.0, 1500.0, 1490.0)), [])
    assert "its clock" in found.is_not
    assert not any("clock" in evidence for evidence in found.evidence)
    unknown = with_evidence(SLOW, report((1500.0, 1500.0)), [])
    assert "clock" not in change_in_words(unknown)


@pytest.mark.parametrize(("peak", "ruled_out"), [(50, True), (95, False)])
def test_memory_is_ruled_out_unless_it_is_full(peak: int, ruled_out: bool) -> None:
    assert ("memory" in with_evidence(SLOW, report(peak=peak, size=100), []).is_not) is ruled_out


def test_a_slow_link_has_the_transfers_of_each_window() -> None:
    before, since = Transfers(1, 0, {"data": 2.0}), Transfers(2, 1280, {"data": 4.0})
    found = with_evidence(LINK, report(), [before, since])
    assert found.evidence[:2] == ("window 1: 2.00 ms a transfer", "window 2: 4.00 ms a transfer")
    assert with_evidence(SLOW, report(), [before]).evidence == found.evidence[2:]


def test_of_several_dimensions_the_one_whose_transfers_became_slower_is_told() -> None:
    before = Transfers(1, 0, {"tensor": 4.0, "data": 2.0, "expert": 1.0})
    since = Transfers(2, 1280, {"tensor": 5.0, "data": 6.0})
    found = with_evidence(LINK, report(), [before, since])
    assert found.evidence[:2] == ("window 1: 2.00 ms a transfer (data)", "window 2: 6.00 ms a transfer (data)")
    assert "a transfer" not in change_in_words(with_evidence(LINK, report(), []))


def on_two_hosts(**fault: Any) -> tuple[RunWatch, list[Change]]:
    watch = RunWatch()
    watch.window(report(environment=environment("node-0", "node-0", "node-1", "node-1")))
    found = [
        change
        for number in range(60)
        for change in watch.stretch(stretch(number, **(fault if number >= 40 else {"extra": {}})))
    ]
    return watch, found


def test_a_slow_host_is_named_with_its_places_and_the_next_window_completes_the_change() -> None:
    watch, (found,) = on_two_hosts(extra={("forward", 2): 4.0, ("forward", 3): 4.0})
    assert (found.cause, found.ranks, found.places) == ("compute", (2, 3), ("node-1, cpu", "node-1, cpu"))
    assert watch.awaits_window
    (completed,) = watch.window(report(first_step=found.found_step + 1))
    assert completed.evidence
    assert (completed.first_step, completed.ranks) == (found.first_step, found.ranks)
    assert not watch.awaits_window


def test_a_window_from_before_the_change_is_no_evidence() -> None:
    watch, (found,) = on_two_hosts(extra={("forward", 2): 4.0})
    assert watch.window(report(first_step=found.first_step - STEPS)) == []
    assert watch.awaits_window


def test_a_link_between_two_hosts_is_measured_again_on_both() -> None:
    _, (found,) = on_two_hosts(extra={}, transfer_ms=9.0)
    assert (found.cause, found.ranks) == ("communication", ())
    assert found.repeat.startswith("torchrun --nnodes 2 --nproc-per-node 1 ")
    assert "node-0:29400" in found.repeat


def test_between_more_hosts_the_command_measures_them_all() -> None:
    watch = RunWatch()
    watch.window(report(environment=environment("node-0", "node-1", "node-2", "node-2")))
    stretches = [stretch(number, {}, **({"transfer_ms": 9.0} if number >= 40 else {})) for number in range(60)]
    (found,) = [change for each in stretches for change in watch.stretch(each)]
    assert (found.cause, found.ranks) == ("communication", ())
    assert found.repeat.startswith("torchrun --nnodes 3 --nproc-per-node 1 ")


def test_steps_that_go_back_after_a_restart_are_no_change() -> None:
    watch = RunWatch()
    assert [change for number in (*range(30), *range(10, 60)) for change in watch.stretch(stretch(number, {}))] == []
    assert {row for row in watch.smallest_steps() if row.startswith("step/")}


def test_the_rate_of_a_day_adds_windows_and_parts() -> None:
    assert false_alarms_per_day(1728, 86_400) == pytest.approx(1.728 + 0.1)
