"""The tables of traces as files: CSV; Parquet (pyarrow), a file per table; Excel (XlsxWriter), a sheet per table."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.results.exposure import ExposedCollective
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime
from overlap_callbacks.analysis.safe_text import printable, spreadsheet_cell
from overlap_callbacks.traces.device_time import CriticalPath, DeviceTime, HostCollective, StreamQueue, TopKernel
from overlap_callbacks.traces.figures import (
    Analysis,
    CollectiveFigures,
    CollectiveSize,
    Comparison,
    FamilyFigures,
    RankTime,
    SlowdownEstimate,
    StepFigures,
    TraceFigures,
    UnmatchedKernel,
)

Row = dict[str, Any]

# Limits of Excel.
_MAX_TEXT, _MAX_ROWS = 32_767, 1_048_575


@dataclass(frozen=True)
class Rows:
    """A table: column names, and rows as mappings; a missing column is None."""

    header: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]


def analysis_rows(analysis: Analysis, table: str) -> Rows:
    """One table of an analysis, by name: see ``ANALYSIS_TABLES``."""
    if table == "sizes":
        return Rows(CollectiveSize.__struct_fields__, tuple(map(_fields, analysis.sizes)))
    if table == "skew":
        header = ("collective", "group", "count", "transfer_ms", "cycle", *RankTime.__struct_fields__)
        waiting = [{**_fields(skew), **_fields(rank)} for skew in analysis.skew for rank in skew.ranks]
        return Rows(header, tuple(waiting))
    fields, rows_of = _OF_TRACES[table]
    where = ("file", "rank", "device")
    rows = [
        {**{name: getattr(trace, name) for name in where}, **row} for trace in analysis.traces for row in rows_of(trace)
    ]
    return Rows((*where, *fields), tuple(rows))


def comparison_rows(comparison: Comparison, table: str) -> Rows:
    """One table of a comparison, by name: see ``COMPARISON_TABLES``."""
    if table == "figures":
        figures = [{"figure": name, "value": value} for name, value in comparison.figures.items()]
        return Rows(("figure", "value"), tuple(figures))
    struct = _OF_COMPARISON[table]
    extra = tuple([name for name in ("slowdown", "lost_ms") if hasattr(struct, name)])
    rows = [_fields(item, *extra) for item in getattr(comparison, table)]
    return Rows((*struct.__struct_encode_fields__, *extra), tuple(rows))


def as_csv(table: Rows) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, table.header, lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        writer.writerow({name: cell(row.get(name)) for name in table.header})
    return out.getvalue()


def cell(value: Any) -> Any:
    """A cell that is harmless to terminals and spreadsheets: file names may contain anything."""
    text = "" if value is None else spreadsheet_cell(value)
    return printable(text) if isinstance(text, str) else text


def write_parquet(tables: Mapping[str, Rows], folder: Path) -> None:
    """Write each table into ``folder``, created if needed, as ``NAME.parquet``. An undefined figure is null.

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
    """A column of one type: text if any value is text, such as ``all`` among step numbers."""
    if any(isinstance(value, str) for value in values):
        return pyarrow.array([None if value is None else str(value) for value in values], pyarrow.string())
    if all(value is None for value in values):
        return pyarrow.array(values, pyarrow.float64())
    return pyarrow.array(values)


def write_xlsx(tables: Mapping[str, Rows], path: Path) -> None:
    """Write a workbook with one sheet per table. An undefined figure is an empty cell; text is never a formula.

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


def _fields(item: Any, *properties: str) -> Row:
    """The fields of a struct under their JSON names, and some of its properties."""
    names = zip(item.__struct_encode_fields__, item.__struct_fields__, strict=True)
    fields = {column: getattr(item, name) for column, name in names}
    return fields | {name: getattr(item, name) for name in properties}


def _with_all(items: Iterable[Any]) -> Iterator[Row]:
    """Rows, with ``all`` as the step of the whole file's row."""
    for item in items:
        fields = _fields(item)
        yield {**fields, "step": "all" if fields["step"] is None else fields["step"]}


def _exposure(trace: TraceFigures) -> Iterator[Row]:
    return map(_fields, () if trace.exposure is None else trace.exposure.rows)


def _families(trace: TraceFigures) -> Iterator[Row]:
    for item in trace.families:
        yield {**_fields(item), "beside_ms": " ".join(f"{kind}={ms:g}" for kind, ms in item.beside.items())}


def _estimates(trace: TraceFigures) -> Iterator[Row]:
    if trace.estimate is not None:
        yield {**_fields(trace.estimate), "family": "all"}
        for family, estimate in trace.estimate.families.items():
            yield {**_fields(estimate), "family": family}


def _utilisation(trace: TraceFigures) -> Iterator[Row]:
    use = trace.utilisation
    if use is not None:
        for i, (compute, comm) in enumerate(zip(use.compute, use.exposed_comm, strict=True)):
            yield {"start_ms": i * use.part_ms, "part_ms": use.part_ms, "compute": compute, "exposed_comm": comm}


def _without(fields: Iterable[str], *left_out: str) -> tuple[str, ...]:
    return tuple([name for name in fields if name not in left_out])


_OF_TRACES: dict[str, tuple[tuple[str, ...], Callable[[TraceFigures], Iterable[Row]]]] = {
    "steps": (StepFigures.__struct_fields__, lambda trace: _with_all((trace.total, *trace.steps))),
    "time": (DeviceTime.__struct_fields__, lambda trace: _with_all(trace.time)),
    "paths": (_without(CriticalPath.__struct_fields__, "kernels"), lambda trace: _with_all(trace.paths)),
    "kernels": (TopKernel.__struct_fields__, lambda trace: map(_fields, trace.kernels)),
    "collectives": (CollectiveFigures.__struct_fields__, lambda trace: map(_fields, trace.collectives)),
    "exposure": (ExposedCollective.__struct_fields__, _exposure),
    "on_host_collectives": (HostCollective.__struct_fields__, lambda trace: map(_fields, trace.on_host_collectives)),
    "families": ((*_without(FamilyFigures.__struct_fields__, "beside"), "beside_ms"), _families),
    "estimates": (("family", *_without(SlowdownEstimate.__struct_fields__, "families")), _estimates),
    "copies": (
        (*PairTime.__struct_encode_fields__, "slowdown", "slowdown_during"),
        lambda trace: [_fields(pair, "slowdown", "slowdown_during") for pair in trace.beside_copies],
    ),
    "queues": (StreamQueue.__struct_fields__, lambda trace: map(_fields, trace.queues)),
    "utilisation": (("start_ms", "part_ms", "compute", "exposed_comm"), _utilisation),
}
_OF_COMPARISON: dict[str, Any] = {
    "kernels": KernelTime,
    "ranges": KernelTime,
    "pairs": PairTime,
    "unmatched": UnmatchedKernel,
}
ANALYSIS_TABLES = (*_OF_TRACES, "sizes", "skew")
COMPARISON_TABLES = ("figures", *_OF_COMPARISON)
