"""Which collectives of sequential steps are timed one by one."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.results.arrivals import TimedCall
from overlap_callbacks.gate.collectives import Collective, Group
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.monitor.background.calls import timed_calls

DATA = Group("7", "dp", (4, 8, 12), "gloo", "data")
ALONE = Group("1", "tp", (4,), "gloo", "tensor")


def call(size: int, time_us: int | None = 100, *, operator: str = "allreduce_", group: Group = DATA) -> Collective:
    end = None if time_us is None else 5000 + 1000 * time_us
    return Collective(operator, group, size, size, None, 0, -1, 0, 0, None if end is None else 5000, end)


def timed(*steps: Sequence[Collective] | None) -> dict[str, tuple[TimedCall, ...]]:
    logs = [(10 + at, None if step is None else StepLog(tuple(step), 0, None)) for at, step in enumerate(steps)]
    found = timed_calls(logs)
    assert all((row.group, row.first_rank, row.group_size, row.dimension) == ("7", 4, 3, "data") for row in found)
    return {row.operator: row.calls for row in found}


def test_a_call_has_its_step_its_number_its_bytes_and_its_time() -> None:
    found = timed([call(8, 20), call(8, 30)], None, [call(8, 40)])
    assert found == {"allreduce_": (TimedCall(10, 0, 8, 20), TimedCall(10, 1, 8, 30), TimedCall(12, 0, 8, 40))}


def test_what_does_not_wait_for_all_or_was_not_serialised_is_left_out() -> None:
    others = [call(8, operator="broadcast_"), call(8, operator="send"), call(8, group=ALONE), call(8, None)]
    assert timed(others) == {}


def test_every_size_has_a_turn_and_the_number_is_bounded() -> None:
    sizes = [1] * 50 + [1024] * 2 + [64] * 50
    (calls,) = timed([call(size) for size in sizes]).values()
    assert [(one.number, one.size_bytes) for one in calls] == [(0, 1), (50, 1024), (51, 1024), (52, 64)]
    (calls,) = timed(*[[call(8)] * 9] * 40).values()
    assert len(calls) == 32
    assert len({one.step for one in calls}) == 8


def test_of_all_to_alls_whose_sizes_are_each_ranks_own_all_ranks_choose_the_same() -> None:
    chosen = [
        [one.number for one in timed([call(size, operator="alltoall_base_") for size in sizes])["alltoall_base_"]]
        for sizes in ([5, 900, 3, 80, 2, 7], [7, 7, 7, 7, 900, 1])
    ]
    assert chosen[0] == chosen[1] == [0, 1, 2, 3]
