from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
from rich.console import Console

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report import record, terminal
from overlap_callbacks.report.html import as_html
from overlap_callbacks.report.views.elements import Cell, Document, RunPage, Table, heads
from overlap_callbacks.report.views.runs import runs_document
from tests.report.runs import window, write


def printed(folder: Path, *windows: OverlapReport, everything: bool = True) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    document = runs_document([record.read(write(folder, *windows))], charts=False)
    console.print(terminal.drawn(document, everything))
    return console.export_text()


def test_the_tables_have_compute_by_the_dimension_in_flight_and_the_share_attained(tmp_path: Path) -> None:
    text = printed(tmp_path, window(0))
    (row,) = [line for line in text.splitlines() if line.startswith("pipeline ") and line.rstrip().endswith("%")]
    assert "+33.3%" in row
    assert "Slowdown by dimension of parallelism in flight" in text
    for label in ("share of the attainable gain", "bubble of the pipeline", "residual overlap, of communication"):
        assert label in text


def test_the_pairs_show_the_slowdown_of_whole_calls_and_while_both_run(tmp_path: Path) -> None:
    text = printed(tmp_path, window(0))
    assert re.search(r"gemm +all_reduce +\+17\.5% +\+78\.3% ", text)  # of the 41 ms beside it, 18 ms were lost
    assert re.search(r"gemm +ran alone, unexplained +\+0\.8% {8,}", text)


def test_a_job_without_sends_gets_no_note_on_an_unmeasured_bubble(tmp_path: Path) -> None:
    bare = msgspec.structs.replace(window(0), bubble_ms=None, p2p_ms=None, attained_fraction=None, idle_ms=None)
    text = printed(tmp_path, bare).partition("What does it cost?")[0]
    assert "bubble" not in text
    assert len(re.findall(r" {3,}not measured", text)) == 1  # the idle time
    assert "Where the time of a profiled step goes" not in text  # it would not add up


def test_windows_that_are_not_valid_compare_no_dimensions(tmp_path: Path) -> None:
    text = printed(tmp_path, msgspec.structs.replace(window(0), valid=False, problems=("residual overlap 0.3",)))
    assert "+33.3%" not in text
    assert "Slowdown by dimension" not in text
    assert "Why: 1 window is not valid: residual overlap 0.3." in text


def test_a_table_without_rows_is_left_out_and_no_number_is_cut_without_a_mark() -> None:
    columns = heads("~Kernel", "Slowdown", "Calls of it")
    assert list(terminal.drawn_table(Table("Kernels", columns, ()))) == []
    table = Table("Kernels", columns, ((Cell("a_kernel_of_thirty_characters_"), Cell("+17.6%"), Cell("192,431")),))
    for width in range(12, 60):
        console = Console(width=width, record=True, file=io.StringIO())
        for part in terminal.drawn_table(table):
            console.print(part)
        lines = console.export_text().splitlines()
        assert all(len(line) <= width for line in lines)
        assert re.search(r"(192,431|…)$", lines[-1].rstrip())


def test_a_window_that_was_cut_short_shows_the_kernels_that_it_measured(tmp_path: Path) -> None:
    text = printed(tmp_path, msgspec.structs.replace(window(0), complete=False, problems=("cut short: why",)))
    assert "Unfinished" in text
    assert "Compute kernels that lose most time under overlap" in text
    assert "Slowdown by concurrent kernel" in text


def test_columns_of_one_medium_and_intervals_below_their_figures() -> None:
    columns = heads("+*Job", "-*Model", "-Batch", "Slowdown", "_95% interval", "Steps")
    row = (Cell("a, 4"), Cell("a"), Cell("4"), Cell("+17.6%"), Cell("+16.1% to +19.0%"), Cell("9"))
    bare = (Cell("b, 4"), Cell("b"), Cell("4"), Cell("+1.0%"), Cell(""), Cell("8"))
    bounds = (Cell("c, 4"), Cell("c"), Cell("4"), Cell(""), Cell("up to +2.0%"), Cell("7"))
    console = Console(width=60, record=True, file=io.StringIO())
    for part in terminal.drawn_table(Table("Jobs", columns, (row, bare, bounds))):
        console.print(part)
    text = console.export_text()
    assert "Model" not in text
    assert re.search(r"Slowdown *\nJob +95% interval +Steps", text)
    assert re.search(r"a, 4 +\+17\.6% +9 *\n +\+16\.1% to \+19\.0% *\n *b, 4 +\+1\.0% +8", text)
    assert re.search(r"c, 4 +- +7 *\n +up to \+2\.0%", text)
    page = blocks_html(Table("Jobs", columns, (row, bare)))
    assert [head for head in ("Job", "Model", "Batch", "95% interval") if f">{head}<" in page] == [
        "Model", "Batch", "95% interval",
    ]  # fmt: skip


def test_columns_without_any_text_are_left_out_and_words_count() -> None:
    rows = tuple((Cell(name), Cell(""), Cell("", 1.0), Cell(note)) for name, note in (("a", ""), ("b", "failed")))
    shown = Table("Jobs", heads("*Job", "Step", "Change", "Note"), rows).without_empty_columns()
    assert [head.text for head in shown.columns] == ["Job", "Note"]
    assert [[cell.text for cell in row] for row in shown.rows] == [["a", ""], ["b", "failed"]]


def blocks_html(table: Table) -> str:
    run = RunPage("run", "run", "", "", (table,), ())
    return as_html(Document("title", (run,), ""))
