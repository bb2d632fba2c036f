from __future__ import annotations

import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlap_callbacks.traces.events import Args
from overlap_callbacks.traces.stream import EventStream
from tests import kineto

STYLES = ["pretty", "line", "compact", "array"]
GROUPS = [{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "1", "ranks": [0]}, {"pg_name": "2", "ranks": []}]
INFO = {"backend": "nccl", "rank": 1, "world_size": 2, "pg_config": GROUPS}

Fields = tuple[Any, ...]


def small_trace() -> list[kineto.Event]:
    return [*kineto.training(steps=1, layers=1, operators=1)]


def number(value: Any) -> Any:
    """A time as it is decoded, or as it stands in the file."""
    if isinstance(value, (int, float, str)) or value is None:
        return value
    text = bytes(value)
    return json.loads(text) if text else None


def fields(event: Any, args: Args | None) -> Fields:
    return (
        event.ph,
        event.cat,
        event.name,
        event.pid,
        event.tid,
        number(event.ts),
        number(event.dur),
        None if args is None else (args.correlation, args.device, args.dtype, args.collective, args.group),
    )


def expected_fields(event: dict[str, Any]) -> Fields:
    args = event.get("args")
    names = ("correlation", "device", "dtype", "Collective name", "Process Group Name")
    return (
        *(event.get(name) for name in ("ph", "cat", "name", "pid", "tid", "ts", "dur")),
        None if args is None else tuple(args.get(name) for name in names),
    )


def expected(content: bytes) -> list[Fields]:
    document = json.loads(content)
    return [expected_fields(event) for event in (document if isinstance(document, list) else document["traceEvents"])]


def streamed(path: Path, piece_bytes: int) -> tuple[list[Fields], EventStream]:
    stream = EventStream(path, piece_bytes=piece_bytes)
    found = [
        fields(event, args)
        for events in stream
        for event, args in zip(events, stream.args_of(events, Args), strict=True)
    ]
    return found, stream


def with_info_last(content: bytes) -> bytes:
    """The document with ``distributedInfo`` after the events."""
    body = content.rstrip()
    assert body.endswith(b"}")
    return body[:-1].rstrip() + b', "distributedInfo": ' + json.dumps(INFO).encode() + b"}\n"


# -- what is valid


@pytest.mark.parametrize("gzipped", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("whole_us", [False, True], ids=["ns", "us"])
@pytest.mark.parametrize("info", ["before", "after"])
@pytest.mark.parametrize("style", STYLES)
def test_events_are_those_of_the_whole_document_however_it_is_written_and_cut(
    tmp_path: Path, style: str, info: str, whole_us: bool, gzipped: bool
) -> None:
    head = {"distributedInfo": INFO} if info == "before" and style != "array" else {}
    content = kineto.text(small_trace(), style=style, whole_us=whole_us, **head)
    if info == "after" and style != "array":
        content = with_info_last(content)
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(content) if gzipped else content)
    wanted = expected(content)
    assert len(wanted) > 15
    for size in (*range(200, len(content), 97), len(content) - 1, len(content), len(content) + 1):
        found, stream = streamed(path, size)
        assert found == wanted, size
        assert stream.problems == []
        if style != "array":
            assert stream.head["distributedInfo"] == INFO


@pytest.mark.parametrize("style", STYLES)
def test_no_size_of_the_pieces_changes_the_events(tmp_path: Path, style: str) -> None:
    path = kineto.write(tmp_path / "trace.json", small_trace()[:8], style=style)
    wanted = expected(path.read_bytes())
    for size in range(200, path.stat().st_size + 1):
        found, stream = streamed(path, size)
        assert (found, stream.problems) == (wanted, []), size


def test_a_trace_of_one_event_and_one_of_none_are_read(tmp_path: Path) -> None:
    for style in STYLES:
        for count in (0, 1):
            path = kineto.write(tmp_path / f"{style}.json", small_trace()[:count], style=style)
            for size in (1, 7, 200, 10_000):
                found, stream = streamed(path, size)
                assert (found, stream.problems) == (expected(path.read_bytes()), []), (style, size)


def test_fields_before_and_after_the_events_are_both_in_the_head(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "trace.json", small_trace(), schemaVersion=1, distributedInfo=INFO)
    for size in (200, 1_000, 100_000):
        _, stream = streamed(path, size)
        assert stream.head == {
            "schemaVersion": 1, "distributedInfo": INFO, "traceName": "t.json", "displayTimeUnit": "ms",
        }  # fmt: skip


def test_a_file_of_many_large_pieces_is_read_whole(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "trace.json.gz", kineto.training(steps=2, layers=20, operators=5))
    wanted = expected(gzip.decompress(path.read_bytes()))
    for size in (3_000, 64 * 1024, 4 * 2**20):
        assert streamed(path, size)[0] == wanted


# What a cut between two events looks like, in text.
TRICKY = [
    "},{",
    "}, {",
    "},\n  {",
    "]}",
    "}]",
    "}],",
    '"}]}',
    "{",
    "}",
    "[",
    "\\",
    '\\"',
    '"',
    "\x00",
    "\x1f",
    "\u2028",
]
texts = st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=6)), max_size=6).map("".join)
nested = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
objects = st.lists(st.dictionaries(st.sampled_from(["a", "b"]), nested, max_size=2), max_size=4)
events = st.builds(
    lambda name, dims, objects, number: {
        "ph": "X", "cat": "cpu_op", "name": name, "pid": number, "tid": "t", "ts": number + 0.125, "dur": number,
        "args": {"Input Dims": dims, "objects": objects, "correlation": number},
    },
    texts, nested, objects, st.integers(0, 10),
)  # fmt: skip


def objects_of(count: int, **event: Any) -> list[dict[str, Any]]:
    base = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "args": {"objects": [{"a": 1}, {"b": 2}]}}
    return [{**base, "pid": i, **event} for i in range(count)]


@settings(deadline=None, max_examples=150 if os.environ.get("OVERLAP_LONG_TESTS") else 50)
@given(
    st.lists(events, max_size=12), st.sampled_from(STYLES), st.booleans(), st.booleans(), st.integers(200, 3_000), texts
)
@example(objects_of(40), "compact", False, False, 200, "")
@example(objects_of(40), "line", True, True, 100_000, "")
@example(objects_of(12, name="},{"), "line", False, True, 300, "")
@example(objects_of(12, name='"}]}, {"'), "pretty", True, False, 300, "}],")
@example(objects_of(12, args={"objects": [{"a": [{"b": 1}, {"c": 2}]}]}), "array", True, False, 250, "")
def test_any_names_and_arguments_are_read_as_the_whole_document_has_them(
    content: list[dict[str, Any]], style: str, escaped: bool, info_last: bool, size: int, note: str
) -> None:
    events = json.dumps(content, ensure_ascii=escaped, separators=(",", ":") if style == "compact" else None)
    if style == "pretty":
        events = events.replace('"args": {', '\n    "args": {\n      ')
    if style == "array":
        document = events
    else:
        head, tail = (
            ("", f', "info": {json.dumps([INFO, note])}') if info_last else (f'"note": {json.dumps(note)}, ', "")
        )
        document = f'{{{head}"traceEvents": {events}{tail}}}'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_bytes(document.encode())
        found, stream = streamed(path, size)
    assert found == [expected_fields(event) for event in json.loads(events)]
    assert stream.problems == []


# -- what is not valid

# A change to one event's text, and its name and correlation after it; None where the event is lost.
DAMAGE = {
    "NaN": (b'"External id": 77', b'"External id": NaN', True),
    "-NaN": (b'"External id": 77', b'"External id": -nan', True),
    "infinity": (b'"External id": 77', b'"External id": Infinity', True),
    "-infinity": (b'"External id": 77', b'"External id": -inf', True),
    "a comma in a decimal": (b'"External id": 77', b'"External id": 0,074074', True),
    "a bad escape": (b'"grid": [1, 1, 1]', b'"grid": "C:\\Users\\x \\u12"', True),
    "bad UTF-8": (b'"pid": 0', b'"pid": "\xff\xfe\x80"', True),
    "a control character": (b'"grid": [1, 1, 1]', b'"grid": "\x00\x01\n\t"', True),
    "a missing value": (b'"External id": 77', b'"External id": ', False),
    "a missing quote": (b'"External id": 77', b'"External id: 77', False),
    "arguments that are a list": (b'"args": {', b'"args": [], "was": {', True),
    "arguments that are a text": (b'"args": {', b'"args": "none", "was": {', True),
}


def damaged(damage: str, row: int, tail: bytes) -> tuple[bytes, list[str]]:
    """A document of nine kernels, one of them damaged, and the names of those that can be read."""
    old, new, mended = DAMAGE[damage]
    kernels = [kineto.kernel(f"{kineto.GEMM} {i}", i * 1_000, i * 1_000 + 500, 77, grid=(1, 1, 1)) for i in range(9)]
    lines = [kineto.text([event], style="array")[2:-2] for event in kernels]
    assert old in lines[row]
    lines[row] = lines[row].replace(old, new)
    names = [event["name"] for i, event in enumerate(kernels) if mended or i != row]
    return b'{"schemaVersion": 1, "traceEvents": [' + b", ".join(lines) + b"], " + tail + b"}", names


@pytest.mark.parametrize("row", [0, 4, 8], ids=["first", "middle", "last"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_an_event_that_is_not_valid_is_mended_or_counted_and_all_others_are_right(
    tmp_path: Path, damage: str, row: int
) -> None:
    content, names = damaged(damage, row, b'"traceName": "t.json"')
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    for size in (200, 400, 1_000, len(content)):
        found, stream = streamed(path, size)
        assert [event[2] for event in found if event[0] == "X"] == names, size
        assert stream.problems
        if (damage, row) == ("a missing quote", 8):
            continue  # where the events end cannot be told then: all that follows may be a text
        (problem,) = stream.problems
        assert problem.startswith("1 events ")
        assert ("repaired" if DAMAGE[damage][2] else "could not be read") in problem
        assert stream.head == {"schemaVersion": 1, "traceName": "t.json"}


@pytest.mark.parametrize("groups", [3, 300])
@pytest.mark.parametrize("row", [0, 8], ids=["first", "last"])
@pytest.mark.parametrize("damage", ["NaN", "a missing quote"])
def test_process_groups_after_events_that_are_not_valid_are_no_events(
    tmp_path: Path, damage: str, row: int, groups: int
) -> None:
    info = {"rank": 1, "world_size": 2, "pg_config": [{"pg_name": str(i), "ranks": [0, i]} for i in range(groups)]}
    content, names = damaged(damage, row, b'"distributedInfo": ' + json.dumps(info).encode())
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    for size in (200, 400, 1_000, len(content)):
        found, stream = streamed(path, size)
        assert [event[2] for event in found if event[0] == "X"] == names, size
        assert stream.problems
        if (damage, row) == ("a missing quote", 8):
            continue
        assert len(found) == len(names)
        assert len(stream.problems) == 1
        assert stream.head == {"schemaVersion": 1, "distributedInfo": info}


def test_many_events_that_are_not_valid_are_counted(tmp_path: Path) -> None:
    content = kineto.text(small_trace(), style="line")
    count = content.count(b'"External id": ')
    path = tmp_path / "trace.json"
    path.write_bytes(content.replace(b'"External id": ', b'"External id": NaN, "was": '))
    for size in (200, 1_000, 100_000):
        found, stream = streamed(path, size)
        assert [event[2] for event in found] == [event[2] for event in expected(content)]
        assert any(f"{count} events were not valid JSON" in problem for problem in stream.problems)


def test_a_beginning_that_is_not_valid_is_left_out_and_the_events_are_right(tmp_path: Path) -> None:
    content = kineto.text(small_trace(), style="line", schemaVersion=1, distributedInfo=INFO)
    path = tmp_path / "trace.json"
    path.write_bytes(content.replace(b'"schemaVersion": 1', b'"schemaVersion": NaN'))
    for size in (200, 1_000, 100_000):
        found, stream = streamed(path, size)
        assert found == expected(content)
        assert any("before the events is not valid JSON" in problem for problem in stream.problems)


def test_an_end_that_is_not_valid_is_left_out_and_the_events_are_right(tmp_path: Path) -> None:
    content = kineto.text(small_trace(), style="line")
    path = tmp_path / "trace.json"
    path.write_bytes(content.replace(b'"traceName": "t"', b'"traceName": NaN'))
    for size in (200, 1_000, 100_000):
        found, stream = streamed(path, size)
        assert found == expected(content)
        assert any("after the events is not valid JSON" in problem for problem in stream.problems)
