"""Records of long runs: what is left in the file, what is left out of it, and what is left out of what is shown."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from overlap_callbacks.analysis import run_summary
from overlap_callbacks.analysis.formatting import DASH
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.analysis.results.settled import StepSeries
from overlap_callbacks.analysis.run_summary import without_details
from overlap_callbacks.cli import main
from overlap_callbacks.cli._output import read_record
from overlap_callbacks.report import record, record_lines
from overlap_callbacks.report.views import quality
from tests.report import runs

OLD_RECORDS = sorted((Path(__file__).parent / "records").glob("*.jsonl"))


@pytest.fixture
def some(tmp_path: Path) -> Path:
    """Windows with power, without, not valid, and cut short."""
    invalid = msgspec.structs.replace(runs.window(2), valid=False, problems=("no",))
    windows = [runs.window(0), runs.window(1, power=True), invalid, runs.window(3, complete=False)]
    return runs.write(tmp_path / "run", *windows)


def lines_of(folder: Path) -> list[bytes]:
    lines = (folder / FILE_NAME).read_bytes().splitlines(keepends=True)
    return [line for line in lines if not line.startswith(b'{"record":"prediction"')]


# -- what is left in the file


def test_without_details_a_window_is_what_a_summary_needs_and_the_rest_comes_when_asked_for(some: Path) -> None:
    whole, slim = record.read(some), record.read(some, details=False)
    assert slim.windows == [without_details(window) for window in whole.windows]
    assert [slim.whole(window) for window in slim.windows] == whole.windows
    assert [whole.whole(window) for window in whole.windows] == whole.windows
    assert slim.pooled() == whole.pooled()
    assert slim.broken_lines == whole.broken_lines == 0


@pytest.mark.parametrize("path", OLD_RECORDS, ids=lambda path: path.stem)
def test_records_of_earlier_versions_read_without_details_too(path: Path) -> None:
    whole, slim = record.read(path), record.read(path, details=False)
    assert slim.windows == [without_details(window) for window in whole.windows]
    assert [slim.whole(window) for window in slim.windows] == whole.windows
    assert slim.unfinished == whole.unfinished


@pytest.mark.parametrize("part", ["kernels", "pairs", "dimensions", "pictures", "collectives", "power_trace"])
def test_the_last_window_with_a_part_is_found_with_and_without_details(some: Path, part: str) -> None:
    whole, slim = record.read(some), record.read(some, details=False)
    for found in (slim, whole):
        assert found.latest_valid(part) == whole.summary.latest_valid(part)
        assert found.latest(part) == whole.summary.latest(part)
    assert slim.latest_valid("power_trace") == whole.windows[1]


def test_what_is_shown_is_the_same_as_with_all_details(
    some: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> list[str]:
        commands = (["show", str(some)], ["show", str(some), "--all"], ["show", str(some), "--json"])
        told = [CliRunner().invoke(main, command).output for command in commands]
        CliRunner().invoke(main, ["report", str(some), "--output", str(tmp_path / "page.html")])
        return [*told, (tmp_path / "page.html").read_text(encoding="utf-8")]

    without, read = shown(), record.read
    monkeypatch.setattr(record, "read", lambda path, progress, details: read(path, progress))
    assert without == shown()


def test_details_that_cannot_be_read_cost_themselves_alone_and_are_counted(tmp_path: Path) -> None:
    folder = runs.write(tmp_path, runs.window(0), runs.window(1))
    lines = lines_of(folder)[:-1]  # without the end
    broken = json.loads(lines[-1])
    broken["kernels"] = [{"name": 1}]
    (folder / FILE_NAME).write_bytes(b"".join(lines[:-1]) + json.dumps(broken).encode())
    found = record.read(folder, details=False)
    assert len(found.windows) == 2
    assert found.latest_valid("kernels") == runs.window(0)
    assert found.latest_valid("kernels") == runs.window(0)
    assert found.broken_lines == 1


def test_a_record_that_is_gone_or_replaced_meanwhile_gives_figures_without_details(tmp_path: Path) -> None:
    folder = runs.write(tmp_path, runs.window(0), runs.window(1))
    found = record.read(folder, details=False)
    lines = lines_of(folder)
    (folder / FILE_NAME).write_bytes(b"".join([*lines[:-2], *lines[:-3:-1]]))
    assert found.whole(found.windows[1]) == without_details(runs.window(1))
    (folder / FILE_NAME).unlink()
    assert found.whole(found.windows[0]) == without_details(runs.window(0))
    assert found.broken_lines == 2


# -- what is left out of the file


def with_series(window: OverlapReport) -> OverlapReport:
    """The window with the steps of rank 0."""
    first, *others = window.samples
    first = msgspec.structs.replace(first, series=StepSeries(window.first_step, (100.0, 120.0), "OS"))
    return msgspec.structs.replace(window, samples=(first, *others))


def test_after_two_hundred_windows_fewer_and_fewer_are_whole_and_figures_stay(tmp_path: Path) -> None:
    written = [with_series(window) for window in runs.many(500)]
    found = record.read(runs.write(tmp_path, *written)).windows
    counting = [(old, new) for old, new in zip(written, found, strict=True) if old.valid]
    assert all(old == new for old, new in counting[:200])
    thinned = [new for old, new in counting if old != new]
    assert len(thinned) == 180
    for old, new in counting:
        assert without_details(old) == without_details(new)
        assert (old.kernels, old.pairs, old.collectives) == (new.kernels, new.pairs, new.collectives)
        assert [sample.timed for sample in old.samples] == [sample.timed for sample in new.samples]
        assert bool(new.pictures) is bool(new.samples[0].kernels) is bool(new.samples[0].series) is (old == new)


def test_windows_that_do_not_count_are_thinned_apart(tmp_path: Path) -> None:
    written = runs.many(500)
    found = record.read(runs.write(tmp_path, *written)).windows
    doubtful = [(old, new) for old, new in zip(written, found, strict=True) if not old.valid]
    assert len(doubtful) > 10
    assert all(old == new for old, new in doubtful)


# -- what is left out of what is shown


def windows_of_table(windows: list[OverlapReport], tmp_path: Path) -> tuple[list[str], str]:
    found = record.Record(tmp_path / FILE_NAME, [runs.run_info()], windows)
    table = quality._window_table(found)
    return [row[0].text for row in table.rows], table.caption


def test_the_table_of_very_many_windows_keeps_the_first_the_extremes_and_the_doubtful(tmp_path: Path) -> None:
    windows = runs.many(3000)
    slow = windows[40].e2e_overlapped_ms
    assert slow is not None
    windows[40] = msgspec.structs.replace(windows[40], e2e_overlapped_ms=msgspec.structs.replace(slow, value=9e9))
    rows, caption = windows_of_table(windows, tmp_path)
    assert len(rows) == quality.MAX_WINDOWS
    shown = {int(row.replace(",", "").replace("\u202f", "").replace("\xa0", "")) for row in rows}
    assert {0, 40, 2999} <= shown
    assert {window.window for window in windows if not window.valid} <= shown
    assert caption.startswith("1,000 of 3,000: the first and the last ones")
    assert windows_of_table(windows[:900], tmp_path)[1] == ""


def test_the_terminal_shows_fifty_different_notes_and_says_how_many_there_are(tmp_path: Path) -> None:
    several = [runs.window(0), runs.window(1)]
    windows = [
        msgspec.structs.replace(several[i % 2], window=i, problems=("often", f"note {i} of its own")[: 1 + bool(i)])
        for i in range(80)
    ]
    folder = str(runs.write(tmp_path, *windows))
    shown = CliRunner().invoke(main, ["show", folder, "--all"], env={"COLUMNS": "200"}).output
    assert shown.count("of its own") == 49
    assert re.search(rf"often +80 +0{DASH}79", shown)
    assert "note 79 of its own" in shown
    assert "The 50 most frequent of 80." in shown
    first = CliRunner().invoke(main, ["show", folder], env={"COLUMNS": "200"}).output
    assert "of its own" not in first
    assert "All tables, and 80 notes: overlap show" in first


# -- what reading costs


def test_the_figures_of_a_run_are_added_up_once_for_all_who_show_them(
    some: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pooled, add_up = [], run_summary.RunSummary._pool
    monkeypatch.setattr(
        run_summary.RunSummary, "_pool", lambda self, pooling: pooled.append(self) or add_up(self, pooling)
    )
    result = CliRunner().invoke(main, ["show", str(some), "--all"])
    assert result.exit_code == 0
    assert len(pooled) == 1


def test_a_record_that_has_gone_on_is_summarised_anew(some: Path) -> None:
    found = record.read(some)
    before, windows = found.summary, found.windows
    assert found.summary is before
    found.windows = windows[:1]
    assert found.summary.windows == windows[:1]
    found.windows, found.unfinished = windows, windows[-1]
    assert found.summary.unfinished is windows[-1]
    found.runs.append(msgspec.structs.replace(found.runs[-1], schedule={"control": True}))
    assert found.summary.control


def test_while_a_command_prints_no_collection_of_garbage_looks_at_the_record(some: Path) -> None:
    gc.collect()
    found = read_record(some)
    assert gc.isenabled()
    assert {type(window) for window in found.windows} == {OverlapReport}
    assert OverlapReport not in {type(each) for each in gc.get_objects()}


def test_a_line_still_being_written_is_counted_up_to_its_current_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\n\n  \nsec")
    lines = record_lines.lines_of(path, lambda done, total: None)
    assert next(lines) == (0, b"first")
    assert next(lines) == (10, b"sec")
    with path.open("ab") as file:
        file.write(b"ond\nthird\n")
    assert list(lines) == []
