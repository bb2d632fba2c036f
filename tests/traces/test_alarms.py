"""Good files raise no alarm: real ones, cut-outs of them in ``real/``, and those that are made here.

Where a real file has kernels that cannot be or lacks some, the library must count as many as a plain count finds. The
fixture ``alarms_are_true`` (``conftest.py``) does the same for whatever the other tests of this folder read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.traces import TraceError, analyze, compare, read_trace
from overlap_callbacks.traces.trace import Trace
from tests import kineto
from tests.traces import alarms, events, reference, test_compare, test_host_ranges, test_long, test_merged

CUT_OUTS = sorted((Path(__file__).parent / "real").glob("*.json.*"))
REAL = [*CUT_OUTS, *sorted(reference.SHARED.rglob("*.json*"))]
# Words of notes about what a good file has not. Others, as on ranks that are missing, may be true of it.
_ALARMS = (
    "have no kernel", "no time", "clock may have jumped", "ends where the next begins", "after the profile",
    "more than once", "later than they can", "CUDA graph", "lost events", "cut off", "told apart", "could not be read",
    "not valid JSON", "twice", "different",
)  # fmt: skip


def notes_of(trace: Trace) -> tuple[str, ...]:
    found = analyze([trace])
    return (*found.problems, *[note for one in found.traces for note in one.problems])


def holds_no_alarm(trace: Trace, *, but: Iterable[str] = ()) -> None:
    """Nothing is said of the file by itself, or of it and itself, that is not so."""
    assert not trace.merged
    notes = notes_of(trace)
    assert [note for note in notes if any(words in note for words in _ALARMS) and note not in but] == []
    assert [step.number for step in trace.steps if step.cut] == [] or but
    try:
        compared = compare(trace, trace)
    except ValueError as error:
        assert "holds no compute kernels" in str(error) or "devices" in str(error)  # noqa: PT017 - true of some
        return
    assert compared.figures.get("compute_slowdown", 0) == 0
    assert compared.matched_fraction == 1
    faults = {problem.split(": ", 1)[-1] for problem in compared.problems} - {*notes}
    also_true = ("its overlap ratio", "during compute", "neither file communicates")
    assert {fault for fault in faults if not any(words in fault for words in also_true)} == {
        "the same file was given twice"
    }


@pytest.mark.parametrize("path", REAL, ids=[f"{path.parent.name}/{path.name}" for path in REAL])
def test_a_real_file_has_what_a_plain_count_finds_and_no_other_alarm(path: Path) -> None:
    try:
        trace = read_trace(path)
    except TraceError as error:
        pytest.skip(str(error))
    found = alarms.events_of(path)
    assert found is not None
    expected = alarms.counted(found)
    assert alarms.said(trace.problems) == expected
    holds_no_alarm(trace, but=trace.warnings if expected else ())
    if path in CUT_OUTS:
        assert (trace.warnings, expected) == ((), {})


def test_cut_outs_have_the_kernels_of_their_steps() -> None:
    found = [reference.read(path) for path in CUT_OUTS]
    assert [len(one.kernels) for one in found] == [900, 577, 552, 14]
    ranks = analyze([read_trace(path) for path in CUT_OUTS[1:3]])
    assert ranks.one_job
    assert {row.collective for row in ranks.skew} >= {"all_to_all"}
    assert not [note for note in ranks.problems if any(words in note for words in _ALARMS)]


Made = Callable[[], Iterable[kineto.Event]]
MADE: dict[str, Made] = {
    **{
        f"training {options}": lambda options=options: kineto.training(layers=4, **options)
        for options in (
            {},
            {"overlapped": False},
            {"slowdown": 0.3},
            {"metadata": False},
            {"steps": 1},
            {"operators": 0},
        )
    },
    "short": events.short_trace,
    "modules": lambda: test_host_ranges.job(1.2),
    "one of several ranks": lambda: test_merged.rank_events(1),
    "on a CPU": lambda: test_compare.on_cpu(1.2, (2, 7)),
    "long, on a CPU": lambda: test_long.cpu_job(random.Random(3)),
}


@pytest.mark.parametrize("style", ["pretty", "compact"])
@pytest.mark.parametrize("whole_us", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_a_made_file_raises_no_alarm(tmp_path: Path, name: str, whole_us: bool, style: str) -> None:
    head: dict[str, Any] = kineto.job() if name.startswith("training") else {}
    path = kineto.write(tmp_path / "trace.json", MADE[name](), whole_us=whole_us, style=style, **head)
    trace = read_trace(path)
    assert not trace.warnings
    holds_no_alarm(trace)
