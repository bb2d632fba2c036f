"""``--parquet`` and ``--xlsx``."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.report.trace_tables import ANALYSIS_TABLES, COMPARISON_TABLES, analysis_rows, comparison_rows
from overlap_callbacks.traces import analyze, compare, read_trace
from tests import kineto
from tests.commands import invoke


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    events = [*kineto.training(slowdown=0.3, operators=0), kineto.kernel("=HYPERLINK(1)", 10, 20, 0)]
    return kineto.write(tmp_path / "a.json", events, **kineto.job(0, 2))


def as_text(values: list[Any]) -> list[Any]:
    """Columns that have text are of text."""
    if any(isinstance(value, str) for value in values):
        return [None if value is None else str(value) for value in values]
    return values


def test_parquet_files_hold_every_table_with_its_types(tmp_path: Path, trace: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for arguments, tables, rows_of in (
        (["analyze", str(trace)], ANALYSIS_TABLES, lambda name: analysis_rows(analyze([read_trace(trace)]), name)),
        (
            ["compare", str(trace), str(trace), "--force"],
            COMPARISON_TABLES,
            lambda name: comparison_rows(compare(read_trace(trace), read_trace(trace)), name),
        ),
    ):
        folder = tmp_path / "new" / arguments[0]
        result = invoke(*arguments, "--parquet", str(folder))
        assert result.exit_code == 0, result.output
        assert {path.name for path in folder.iterdir()} == {f"{name}.parquet" for name in tables}
        for name in tables:
            found, wanted = parquet.read_table(folder / f"{name}.parquet"), rows_of(name)
            assert tuple(found.column_names) == wanted.header
            for column in wanted.header:
                assert found[column].to_pylist() == as_text([row.get(column) for row in wanted.rows])


def test_the_workbook_has_a_sheet_for_each_table_and_no_formula(tmp_path: Path, trace: Path) -> None:
    pytest.importorskip("xlsxwriter")
    path = tmp_path / "found.xlsx"
    result = invoke("analyze", str(trace), "--xlsx", str(path))
    assert result.exit_code == 0, result.output
    with zipfile.ZipFile(path) as book:
        sheets = re.findall(r'<sheet name="(\w+)"', book.read("xl/workbook.xml").decode())
        texts = book.read("xl/sharedStrings.xml").decode()
        steps = book.read(f"xl/worksheets/sheet{sheets.index('steps') + 1}.xml").decode()
        everything = "".join(book.read(name).decode() for name in book.namelist() if "worksheets/" in name)
    assert sheets == list(ANALYSIS_TABLES)
    assert "=HYPERLINK(1)" in texts
    assert "<f>" not in everything
    (total, *_) = analyze([read_trace(trace)]).traces
    numbers = [float(value) for value in re.findall(r"<c [^>]*><v>([^<]+)</v></c>", steps)]
    assert any(number == pytest.approx(total.total.compute_ms, rel=1e-12) for number in numbers)


@pytest.mark.parametrize(("option", "module"), [("--parquet", "pyarrow"), ("--xlsx", "xlsxwriter")])
def test_a_missing_package_is_named_with_its_extra_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, module: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke("analyze", str(tmp_path / "none.json"), option, str(tmp_path / "out"))
    assert result.exit_code == 2
    assert result.output == f"Error: {module} is not installed: pip install 'overlap-callbacks[tables]'\n"


def test_what_cannot_be_written_gives_one_line(tmp_path: Path, trace: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("xlsxwriter")
    (tmp_path / "file").write_text("")
    for option, place in (("--parquet", "file/folder"), ("--xlsx", "none/found.xlsx")):
        result = invoke("analyze", str(trace), option, str(tmp_path / place))
        assert result.exit_code == 2
        assert result.output.startswith(f"Error: {option} ")
        assert "cannot be written" in result.output
        assert result.output.count("\n") == 1
