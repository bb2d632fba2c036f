"""Faults that only many thousands of files with faults showed: see ``mutations.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_callbacks.traces import analyze, read_trace, stream
from overlap_callbacks.traces.files import PIECE_BYTES
from tests import kineto
from tests.traces.events import said, short_trace


@pytest.mark.parametrize("number", [b"9" * 400, b"-" + b"9" * 400])
@pytest.mark.parametrize("category", [b"kernel", b"cuda_runtime"])
def test_a_duration_of_hundreds_of_digits_costs_its_event_alone(tmp_path: Path, category: bytes, number: bytes) -> None:
    content = kineto.text(short_trace(), style="compact")
    place = content.index(b'"dur":', content.index(b'"cat":"' + category)) + len(b'"dur":')
    path = tmp_path / "trace.json"
    path.write_bytes(content[:place] + number + content[content.index(b",", place) :])
    found = read_trace(path)
    assert found.problems
    assert len(analyze([found]).traces) == 1


@pytest.mark.parametrize("stray", [b"}", b"0,5", b"null,", b"\xc3("])
def test_text_between_events_is_reported(tmp_path: Path, stray: bytes) -> None:
    content = kineto.text(short_trace(), style="compact")
    place = content.index(b"}},{") + 2
    path = tmp_path / "trace.json"
    path.write_bytes(content[:place] + stray + content[place:])
    found = read_trace(path)
    assert len(found.kernels) == len(read_trace(kineto.write(tmp_path / "whole.json", short_trace())).kernels)
    assert said(found.problems, "not valid JSON") or said(found.problems, "left out")


def test_a_missing_comma_between_events_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(kineto.text(short_trace(), style="compact").replace(b"}},{", b"}}{", 1))
    assert said(read_trace(path).problems, "1 places between events are not valid JSON")


def test_text_after_a_bare_array_of_events_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(kineto.text(short_trace(), style="array") + b', "traceName": "of another file"}')
    assert said(read_trace(path).problems, "the text after the events is not valid JSON")


def test_a_field_whose_name_is_no_text_is_reported(tmp_path: Path) -> None:
    # The event has no "ph" any more, so it does not count.
    path = tmp_path / "trace.json"
    path.write_bytes(kineto.text(short_trace(), style="compact").replace(b'"ph"', b'"ph\xff"', 1))
    assert said(read_trace(path).problems, "no UTF-8")


def test_text_of_other_alphabets_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(kineto.text(short_trace(), style="compact").replace(b'"gemm', '"中é'.encode()))
    for size in (1, 2, 3, PIECE_BYTES):
        found = stream.EventStream(path, piece_bytes=size)
        assert sum(map(len, found)) > 0
        assert not said(found.problems, "UTF-8")
