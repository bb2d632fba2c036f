"""The page of traces."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.report.html import as_html
from overlap_callbacks.report.views.traces import trace_document
from overlap_callbacks.traces import analyze, read_trace
from overlap_callbacks.traces.figures import Analysis
from tests import kineto
from tests.commands import invoke
from tests.traces.events import gemm

SECTIONS = (
    "What does the device do with its time?", "What holds the steps up?", "What does overlap cost?",
    "Which kernels take the time?", "What is communicated?", "When does the device work?", "Can the file be trusted?",
)  # fmt: skip


def trace(folder: Path, rank: int = 0, slowdown: float = 0.3) -> Path:
    events = kineto.training(slowdown=slowdown, operators=0)
    return kineto.write(folder / f"rank{rank}.json.gz", events, **kineto.job(rank, 2))


def page_of(*paths: Path) -> tuple[str, Analysis]:
    analysis = analyze([read_trace(path) for path in paths])
    return as_html(trace_document(analysis)), analysis


def charts(page: str) -> list[dict[str, Any]]:
    (content,) = re.findall(r'<script[^>]*id="charts"[^>]*>(.*?)</script>', page, re.DOTALL)
    return list(json.loads(content))


def test_the_page_of_one_file_has_every_section_and_its_figures(tmp_path: Path) -> None:
    page, analysis = page_of(trace(tmp_path))
    (found,) = analysis.traces
    places = [page.index(title) for title in SECTIONS]
    assert places == sorted(places)
    whole = found.time[0]
    for value in (whole.span_ms, whole.compute_ms, whole.exposed_comm_ms, found.kernels[0].time_ms):
        assert f"{value:,.3f}" in page
    assert f"{whole.compute_ms / whole.span_ms:.1%}" in page
    assert "Do the ranks wait" not in page
    assert [chart["title"] for chart in charts(page) if chart["draw"] == "timeline"] == ["Timeline of one step"]


def test_parts_of_a_step_in_the_chart_add_up_to_its_length(tmp_path: Path) -> None:
    page, analysis = page_of(trace(tmp_path))
    (stack,) = [chart for chart in charts(page) if chart["draw"] == "stack"]
    rows = stack["data"]["rows"] if "data" in stack else stack["rows"]
    steps = analysis.traces[0].time[1:]
    assert [row["label"] for row in rows] == [f"step {time.step}" for time in steps]
    for row, time in zip(rows, steps, strict=True):
        assert sum(part["value"] for part in row["parts"]) == pytest.approx(time.span_ms, rel=1e-5)


def test_several_ranks_begin_with_who_waits_and_have_a_part_each(tmp_path: Path) -> None:
    page, _ = page_of(trace(tmp_path, 0), trace(tmp_path, 1, slowdown=0.6))
    assert "2 devices compared" in page
    assert page.index("How do the ranks differ?") < page.index("Do the ranks wait for one another?")
    assert page.index("Do the ranks wait for one another?") < page.index(SECTIONS[0])
    assert page.count(SECTIONS[0]) == 2


def test_what_must_be_read_first_comes_first(tmp_path: Path) -> None:
    whole, cut = trace(tmp_path), tmp_path / "cut.json"
    content = gzip.decompress(whole.read_bytes())
    cut.write_bytes(content[: content.rindex(b'"kernel"')])
    page, analysis = page_of(cut)
    places = [page.index(text) for text in ("kernels are missing", "the file is cut off", SECTIONS[0])]
    assert places == sorted(places)
    assert '<dl class="tiles">' not in page
    assert '<dl class="tiles">' in page_of(whole)[0]
    (rows,) = [chart["rows"] for chart in charts(page_of(whole, cut)[0]) if chart["title"].endswith("by rank")]
    assert len(rows) == 1  # shares of a file that lacks kernels are not known
    said = ("left out: x",)
    several = msgspec.structs.replace(analysis, traces=analysis.traces * 2, warnings=said, problems=said)
    page = as_html(trace_document(several))
    assert page.count("left out: x") == 1
    assert page.index("How do the ranks differ?") < page.index("left out: x") < page.index("<table")


@pytest.mark.parametrize("events", [[gemm(0, 1)], [kineto.host_range("aten::mm", 0, 9, cat="cpu_op")]])
def test_a_file_with_next_to_nothing_still_has_a_page(tmp_path: Path, events: list[kineto.Event]) -> None:
    page, _ = page_of(kineto.write(tmp_path / "bare.json", events))
    assert SECTIONS[0] in page
    assert "nan" not in json.dumps(charts(page)).lower()


def test_names_of_kernels_are_no_markup(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    page, _ = page_of(kineto.write(tmp_path / "odd.json", [kineto.kernel(name, 0, 9_000, 0)]))
    assert name not in page
    assert "&lt;script&gt;alert(1)" in page


# -- the command


def test_report_takes_a_file_several_and_a_folder(tmp_path: Path) -> None:
    files = [trace(tmp_path, 0), trace(tmp_path, 1)]
    for arguments in ([files[0]], files, [tmp_path]):
        out = tmp_path / "page.html"
        result = invoke("report", *map(str, arguments), "-o", str(out))
        assert result.exit_code == 0, result.output
        assert f"The page is {out}" in result.output
        assert ("Do the ranks wait" in out.read_text()) == (arguments != [files[0]])
        out.unlink()


def test_report_refuses_a_mix_and_an_axis(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = str(trace(tmp_path))
    for arguments, said in (
        ([path, str(tmp_path / "empty")], "a page is of traces or of runs"), ([path, "--axis", "x"], "compares runs"),
    ):  # fmt: skip
        result = invoke("report", *arguments)
        assert result.exit_code == 2
        assert said in " ".join(result.output.split())
    bad = tmp_path / "bad.json"
    bad.write_text("no JSON")
    result = invoke("report", str(bad))
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
