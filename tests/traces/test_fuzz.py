from __future__ import annotations

import gzip
import io
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from overlap_callbacks.report.terminal import drawn
from overlap_callbacks.report.trace_tables import ANALYSIS_TABLES, analysis_rows, as_csv
from overlap_callbacks.report.views.traces import comparison_document, trace_document
from overlap_callbacks.traces import TraceError, analyze, compare, read_trace
from overlap_callbacks.traces.figures import Analysis
from tests import kineto
from tests.toggling import SAMPLE_OR_ALL

# Each a trace as some version of torch writes it; small, so that a mutation is likely to hit something that counts.
TRACES = [
    kineto.text(kineto.training(steps=2, layers=1, operators=1), style="compact", **kineto.job()),
    kineto.text(kineto.training(steps=1, layers=2, operators=0, metadata=False), style="pretty", whole_us=True),
    kineto.text(
        [
            kineto.step(1, 0, 90_000),
            kineto.host_range("aten::mm", 10, 5_000, cat="cpu_op"),
            kineto.host_range("aten::mul", 1_000, 2_000, cat="cpu_op"),
            kineto.host_range("gloo:all_reduce", 500, 8_000, thread=8),
        ],
        style="array",
    ),
]
# What breaks a reader of JSON, or of numbers.
PIECES = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"-", b".", b"e9", b"9" * 12, b"9" * 30, b"NaN", b"Infinity",
    b"null", b"true", b"\x00", b"\xff", b"},{", b"}]", b"[]", b"{}", b"\\ud800", b'"a"', b"0,5", b"\n", b"]}",
]  # fmt: skip

# ``.ci/nightly`` sets the variable.
EXAMPLES = 200 if os.environ.get("OVERLAP_LONG_TESTS") else 30

positions = st.floats(0, 1)


def at(content: bytes, position: float) -> int:
    return min(int(position * len(content)), max(len(content) - 1, 0))


def flip(content: bytes, first: float, second: float, data: int) -> bytes:
    place = at(content, first)
    return content[:place] + bytes([content[place] ^ (1 << data % 8)]) + content[place + 1 :] if content else content


def delete(content: bytes, first: float, second: float, data: int) -> bytes:
    place = at(content, first)
    return content[:place] + content[place + 1 + data % 40 :]


def insert(content: bytes, first: float, second: float, data: int) -> bytes:
    place = at(content, first)
    return content[:place] + PIECES[data % len(PIECES)] + content[place:]


def replace_value(content: bytes, first: float, second: float, data: int) -> bytes:
    """What stands between the next colon and the next comma becomes something else."""
    colon = content.find(b":", at(content, first)) + 1
    comma = content.find(b",", colon)
    return content[:colon] + PIECES[data % len(PIECES)] + content[comma:] if 0 < colon < comma else content


def duplicate(content: bytes, first: float, second: float, data: int) -> bytes:
    low, high = sorted((at(content, first), at(content, second)))
    return content[:high] + content[low:high] + content[high:]


def truncate(content: bytes, first: float, second: float, data: int) -> bytes:
    return content[: at(content, first)]


def splice(content: bytes, first: float, second: float, data: int) -> bytes:
    other = TRACES[data % len(TRACES)]
    return content[: at(content, first)] + other[at(other, second) :]


Mutation = Callable[[bytes, float, float, int], bytes]
mutations: list[Mutation] = [flip, delete, insert, replace_value, duplicate, truncate, splice]
steps = st.lists(st.tuples(st.sampled_from(mutations), positions, positions, st.integers(0, 2**16)), max_size=5)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "trace.json"


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from numbers(inner, name)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


SIGNED = ("slowdown", "step", "rank", "world_size", "schema_version")


def check(found: Analysis) -> None:
    for name, value in numbers(msgspec.to_builtins(found)):
        assert math.isfinite(value), (name, value)
        assert value >= 0 or name.endswith(SIGNED), (name, value)
    for trace in found.traces:
        for times in (trace.total, *trace.steps):
            for ratio in (times.overlap_ratio, times.overlap_ratio_busy, times.hidden_comm_fraction):
                assert ratio is None or 0 <= ratio <= 1
            assert times.compute_busy_ms <= times.compute_ms * (1 + 1e-12)
            assert times.hidden_comm_ms <= min(times.comm_ms, times.comm_kernels_ms) * (1 + 1e-12)
            assert times.hidden_comm_ms + times.exposed_comm_ms == pytest.approx(times.comm_ms)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Analysis) == found


def answer(path: Path, content: bytes) -> bool:
    """Whether the file gave an answer, all of which is sound; it may be refused with a message too."""
    path.write_bytes(content)
    try:
        trace = read_trace(path)
    except TraceError as error:
        assert str(path) in str(error)  # noqa: PT017 - the other outcome is right too
        return False
    found = analyze([trace])
    check(found)
    check(analyze([trace, trace]))
    Console(file=io.StringIO(), width=100).print(drawn(trace_document(found), everything=True))
    for table in ANALYSIS_TABLES:
        as_csv(analysis_rows(found, table))
    try:
        compared = compare(trace, trace)
    except ValueError:
        return True
    Console(file=io.StringIO(), width=100).print(drawn(comparison_document(compared)))
    assert all(math.isfinite(value) for value in compared.figures.values())
    return True


@pytest.mark.parametrize("content", TRACES)
def test_what_is_mutated_gives_an_answer_as_it_is(path: Path, content: bytes) -> None:
    assert answer(path, content)
    assert answer(path, gzip.compress(content))


@settings(deadline=None, max_examples=3 * EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(TRACES), steps)
def test_a_mutated_trace_gives_a_sound_answer_or_one_message(path: Path, content: bytes, mutated: Any) -> None:
    for mutation, first, second, data in mutated:
        content = mutation(content, first, second, data)
    answer(path, content)


@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(TRACES), steps, steps)
def test_a_mutated_compressed_trace_gives_a_sound_answer_or_one_message(
    path: Path, content: bytes, before: Any, after: Any
) -> None:
    for mutation, first, second, data in before:
        content = mutation(content, first, second, data)
    content = gzip.compress(content, mtime=0)
    for mutation, first, second, data in after[:2]:
        content = mutation(content, first, second, data)
    answer(path, content)


@settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.sampled_from([b"", b'{"traceEvents": [', b'[{"ph": "X", ', b"\x1f\x8b\x08\x00"]))
def test_any_bytes_give_a_sound_answer_or_one_message(path: Path, content: bytes, head: bytes) -> None:
    answer(path, head + content)


@pytest.mark.parametrize("every", SAMPLE_OR_ALL)
def test_most_single_mutations_of_an_event_still_give_an_answer(path: Path, every: bool) -> None:
    content = TRACES[0]
    begin, end = content.index(b"traceEvents") + 20, content.rindex(b"]")
    places = range(begin, end, max(1, (end - begin) // (60 if every else 12)))
    answered = [answer(path, flip(content, place / len(content), 0, 1)) for place in places]
    assert all(answered)
