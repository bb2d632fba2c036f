"""The tables of traces as files: Parquet (pyarrow), one file a table, and Excel (XlsxWriter), one sheet a table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.safe_text import printable
from overlap_callbacks.report.trace_rows import Rows

# Excel's own limits.
_MAX_TEXT, _MAX_ROWS = 32_767, 1_048_575


def write_parquet(tables: Mapping[str, Rows], folder: Path) -> None:
    """Write each table into ``folder`` as ``NAME.parquet``; the folder is made. A figure that is undefined is null.

    Args:
        tables: by name.
        folder: of the files; older ones of these names are replaced.

    Raises:
        OSError: a file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        columns = {column: _column(pyarrow, [row.get(column) for row in table.rows]) for column in table.header}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")


def _column(pyarrow: Any, values: list[Any]) -> Any:
    """A column of one type: of text if any of its values is text, e.g. steps, among which is ``all``."""
    if any(isinstance(value, str) for value in values):
        return pyarrow.array([None if value is None else str(value) for value in values], pyarrow.string())
    if all(value is None for value in values):
        return pyarrow.array(values, pyarrow.float64())
    return pyarrow.array(values)


def write_xlsx(tables: Mapping[str, Rows], path: Path) -> None:
    """Write a workbook with a sheet for each table. A figure that is undefined is an empty cell; no text is a formula.

    Args:
        tables: by name.
        path: of the file; an older one is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    import xlsxwriter
    from xlsxwriter.exceptions import FileCreateError

    book = xlsxwriter.Workbook(str(path))
    bold = book.add_format({"bold": True})
    for name, table in tables.items():
        sheet = book.add_worksheet(name)
        sheet.freeze_panes(1, 0)
        for column, text in enumerate(table.header):
            sheet.write_string(0, column, text, bold)
        for number, row in enumerate(table.rows[:_MAX_ROWS], start=1):
            for column, key in enumerate(table.header):
                _write(sheet, number, column, row.get(key))
    try:
        book.close()
    except FileCreateError as error:
        cause = error.args[0] if error.args else error
        raise cause if isinstance(cause, OSError) else OSError(str(cause)) from None


def _write(sheet: Any, row: int, column: int, value: Any) -> None:
    if isinstance(value, bool):
        sheet.write_boolean(row, column, value)
    elif isinstance(value, (int, float)):
        sheet.write_number(row, column, value)
    elif value is not None:
        sheet.write_string(row, column, printable(str(value))[:_MAX_TEXT])
