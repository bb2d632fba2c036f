"""Good files broken in random ways, as profilers break them: what is wrong is left out, and said before any figure."""

from __future__ import annotations

import copy
import functools
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.traces import TraceError, analyze, compare, read_trace
from overlap_callbacks.traces.figures import Analysis, TraceFigures
from overlap_callbacks.traces.trace import Trace
from tests import kineto
from tests.traces import test_compare, test_doubts
from tests.traces.test_fuzz import check

MS = 1_000_000
Events = list[kineto.Event]

GOOD: list[Callable[[], Events]] = [
    lambda: [*kineto.training(4, 4, operators=1)],
    lambda: [*kineto.training(3, 4, operators=1, metadata=False, slowdown=0.3)],
    lambda: [*kineto.training(4, 3, operators=0, overlapped=False)],
    test_doubts.job,
    lambda: test_doubts.job(steps=False),
    lambda: test_compare.on_cpu(1.2, (2, 7)),
]
JUNK = [math.nan, math.inf, -math.inf, None, "", "soon", "NaN", "5", "-3", "1e400", True, [], {}, [1], {"a": 1}, -1, 0,
        1e300, 1e18, 2**63, 2**64, 2**70, -(2**63), -(2**70), 10**400]  # fmt: skip


def made(number: int) -> Events:
    """A good file, with the mark of when its profile had ended."""
    events = GOOD[number]()
    end = max(event["ts"] + event.get("dur", 0) for event in events) - kineto.BASE_NS
    return [*events, test_doubts.window_end(end + MS)]


@functools.cache
def read(number: int) -> tuple[Trace, Analysis]:
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(kineto.write(Path(folder, "good.json"), made(number), **kineto.job()))
        return trace, analyze([trace])


# -- what breaks


def is_kernel(event: kineto.Event) -> bool:
    return event.get("cat") == "kernel"


def is_launch(event: kineto.Event) -> bool:
    return event.get("cat") == "cuda_runtime"


def is_step(event: kineto.Event) -> bool:
    return str(event.get("name")).startswith("ProfilerStep")


def is_any(event: kineto.Event) -> bool:
    return "cat" in event


def some(chance: random.Random, events: Events, *kinds: Callable[[kineto.Event], bool]) -> Events:
    """Some events of one of the kinds, here and there or in a row."""
    kind = chance.choice(kinds)
    of_kind = [event for event in events if kind(event)]
    # All events at once leave nothing to know a file by.
    most = len(of_kind) // 3 if kind is is_any else len(of_kind)
    number = min(chance.choice((1, 1, 2, 5, len(of_kind) // 10, len(of_kind) // 3, len(of_kind))), most)
    first = chance.randrange(len(of_kind) - number + 1)
    return chance.choice((chance.sample(of_kind, number), of_kind[first : first + number]))


def timed(events: Events) -> Events:
    kernels = [event for event in events if is_kernel(event)]
    fits = [event for event in kernels if {type(event.get(key)) for key in ("ts", "dur")} == {kineto.Nanoseconds}]
    return sorted(fits, key=lambda event: event["ts"])


def overlong(chance: random.Random, events: Events) -> Events:
    for event in some(chance, kernels, is_kernel) if (kernels := timed(events)) else []:
        later = [other["ts"] for other in kernels if other.get("tid") == event.get("tid") and other["ts"] > event["ts"]]
        if later:
            excess = chance.choice((50_001, 200_000, 9 * MS, 3_200_000 * MS))
            event["dur"] = kineto.Nanoseconds(later[0] - event["ts"] + excess)
    return events


def overlong_to_the_end(chance: random.Random, events: Events) -> Events:
    for event in timed(events)[-1:]:
        event["dur"] = kineto.Nanoseconds(chance.choice((9_000 * MS, 3_200_000 * MS)))
    return events


def overlong_step(chance: random.Random, events: Events) -> Events:
    for event in some(chance, events, is_step):
        event["dur"] = kineto.Nanoseconds(3_200_000 * MS)
    return events


def at_no_time(chance: random.Random, events: Events) -> Events:
    for event in some(chance, events, is_kernel, is_kernel, is_launch, is_step, is_any):
        event["ts"] = chance.choice((0, -1))
        if chance.random() < 0.6:
            event["dur"] = 0
    return events


def negative(chance: random.Random, events: Events) -> Events:
    for event in some(chance, events, is_kernel, is_kernel, is_launch, is_step):
        event["dur"] = chance.choice((-1, -1e6, -(2**40)))
    return events


def missing(chance: random.Random, events: Events) -> Events:
    lost = {id(event) for event in some(chance, events, is_kernel, is_kernel, is_launch, is_step)}
    return [event for event in events if id(event) not in lost]


def twice(chance: random.Random, events: Events) -> Events:
    again = [copy.deepcopy(event) for event in some(chance, events, is_kernel, is_kernel, is_launch, is_step, is_any)]
    return [*events, *again] if chance.random() < 0.5 else [*again, *events]


def other_processes(chance: random.Random, events: Events) -> Events:
    if chance.random() < 0.2:
        swapped: dict[Any, int] = {0: 1, 1: 0}
        return [{**event, "pid": swapped.get(str(event.get("pid")), event.get("pid"))} for event in events]
    for event in some(chance, events, is_kernel, is_launch, is_any):
        event["pid"] = chance.choice((0, 1, 2, 77, 1000, 2001, "x", "[TP01] 3", None))
    return events


def short_steps(chance: random.Random, events: Events) -> Events:
    for event in some(chance, events, is_step):
        if type(event.get("dur")) is kineto.Nanoseconds:
            event["dur"] = kineto.Nanoseconds(event["dur"] // chance.choice((2, 100)))
    return events


def is_fault(event: kineto.Event, key: str, value: Any) -> bool:
    """Whether a file shows that a field of this event is wrong.

    On a coarse clock a kernel may take 0 us, and any name is a name. Without kernels, nothing else in a file has the
    operators, so that none is missed; and one on another thread is a worker's.
    """
    if is_step(event):
        return True
    if key == "dur":
        return value not in (0, "5")
    if key == "name":
        return not name_rules.is_communication(str(event.get("name")))
    return event.get("cat") != "cpu_op" or key not in ("cat", "ph", "tid")


def odd_fields(chance: random.Random, events: Events) -> Events:
    for event in some(chance, events, is_kernel, is_kernel, is_launch, is_step, is_any):
        fields, key = event, chance.choice(("ts", "dur", "pid", "tid", "name", "cat", "ph", "args", "args", "args"))
        if key == "args" and isinstance(event.get("args"), dict) and event["args"]:
            fields, key = event["args"], chance.choice([*event["args"]])
        value, is_lost = chance.choice(JUNK), chance.random() < 0.2
        if fields is event and not is_fault(event, key, None if is_lost else value):
            continue
        if is_lost:
            fields.pop(key, None)
        else:
            fields[key] = value
    return events


BREAKS = [overlong, overlong_to_the_end, overlong_step, at_no_time, negative, missing, twice, other_processes,
          short_steps, odd_fields]  # fmt: skip


# -- what must hold

# Of these, the figures of a step may differ: kernels that it launched are in another, or in none.
_PLACED = ("placed by their start", "launched in none of the steps", "no kernels were launched in steps",
           "count in no step", "holds no launches")  # fmt: skip


def is_sound(found: Analysis) -> None:
    check(found)
    for trace in found.traces:
        assert all(0 <= kernel.share <= 1 + 1e-9 for kernel in trace.kernels)
        if trace.utilisation is not None:
            parts = (*trace.utilisation.compute, *trace.utilisation.exposed_comm)
            assert all(0 <= part <= 1 + 1e-9 for part in parts)
        assert trace.host_limit is None or 0 <= trace.host_limit.idle_fraction <= 1
        for use in trace.time:
            parts = (use.compute_ms, use.exposed_comm_ms, use.copy_ms, use.idle_ms)
            assert sum(parts) == pytest.approx(use.span_ms)
        for path in trace.paths:
            parts = (path.compute_ms, path.comm_ms, path.copy_ms, path.launch_ms, path.host_ms, path.other_ms)
            assert sum(parts) == pytest.approx(path.length_ms)
        cut = {step.step for step in trace.steps if step.cut}
        assert not cut & {use.step for use in trace.time[1:]}
        assert not cut & {path.step for path in trace.paths}


def holds_in_a_comparison(one: Trace, other: Trace) -> None:
    try:
        compared = compare(one, other)
    except ValueError as error:
        assert str(one.path) in str(error) or str(other.path) in str(error)  # noqa: PT017 - the other outcome is right too
        return
    for name, value in compared.figures.items():
        assert math.isfinite(value), name
        assert value >= 0 or not name.endswith("_ms"), name
        assert 0 <= value <= 1 or name not in ("overlap_ratio", "hidden_comm_fraction", "residual_overlap"), name
    assert 0 <= compared.matched_fraction <= 1
    wholes = [{step.number for step in trace.steps if not step.cut} for trace in (one, other)]
    for number, trace, whole in zip(compared.steps, (one, other), wholes, strict=True):
        assert number <= max(len(whole), 1), trace.path


def differences(found: Analysis, good: Analysis) -> Iterator[tuple[str, float, float]]:
    """Figures of all, or of whole steps, that differ from the good file's by more than 1 %."""
    ((truth,), traces) = good.traces, found.traces
    for name in ("compute_ms", "comm_kernels_ms"):
        yield name, getattr(truth.total, name), sum(getattr(trace.total, name) for trace in traces)
    if len(traces) > 1:
        return
    yield from _of_one(traces[0], truth)


def _of_one(found: TraceFigures, truth: TraceFigures) -> Iterator[tuple[str, float, float]]:
    for name in ("comm_ms", "hidden_comm_ms", "wall_ms"):
        yield name, getattr(truth.total, name), getattr(found.total, name) or 0.0
    if any(words in problem for problem in found.problems for words in _PLACED):
        return
    steps, times = ({one.step: one for one in of} for of in (truth.steps, truth.time))
    for step in found.steps:
        for name in ("wall_ms", "compute_ms", "comm_ms", "hidden_comm_ms") if not step.cut else ():
            yield f"{name} of {step.step}", getattr(steps[step.step], name), getattr(step, name)
    for use in found.time[1:]:
        yield f"time of {use.step}", times[use.step].span_ms, use.span_ms


@settings(max_examples=150 if os.environ.get("OVERLAP_LONG_TESTS") else 40)
@given(st.integers(0, 2**32))
def test_a_broken_file_gives_no_figure_of_what_cannot_be_and_says_first_what_it_leaves_out(seed: int) -> None:
    chance = random.Random(seed)
    number = chance.randrange(len(GOOD))
    events = made(number)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        events = chance.choice(BREAKS)(chance, events)
    content = kineto.text(events, style=chance.choice(("pretty", "line", "compact")), **kineto.job())
    if chance.random() < 0.1:
        content = content[: chance.randrange(len(content))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "broken.json")
        path.write_bytes(content)
        holds(path, *read(number))


def holds(path: Path, good: Trace, truth: Analysis) -> None:
    try:
        trace = read_trace(path)
    except TraceError as error:
        assert str(path) in str(error)  # noqa: PT017 - the other outcome is right too
        assert len(str(error).replace(str(path), "").split()) > 2  # noqa: PT017
        return
    found = analyze([trace])
    is_sound(found)
    for pair in ((trace, good), (good, trace), (trace, trace)):
        holds_in_a_comparison(*pair)
    # An operator of another process makes a CPU job's file one of two ranks, which is said: it has another truth.
    ranks = [
        problem for one in found.traces for problem in one.problems if "distinguished by their process ids" in problem
    ]
    if not found.warnings and not ranks and not any(one.warnings for one in found.traces):
        far = [(name, was, now) for name, was, now in differences(found, truth) if abs(now - was) > 0.01 * was]
        assert not far, [one.problems for one in found.traces]


def test_kernels_of_0_us_count_as_on_a_coarse_clock(tmp_path: Path) -> None:
    events = test_doubts.job()
    for event in test_doubts.kernels_of(events)[:3]:
        event["dur"] = 0
    (found,) = analyze([read_trace(kineto.write(tmp_path / "trace.json", events))]).traces
    assert found.warnings == ()
    assert found.total.kernels == test_doubts.NUMBER
    assert [step.cut for step in found.steps] == [False] * 3
