"""The options ``--parquet`` and ``--xlsx`` of the commands for traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlap_callbacks.cli._output import one_line, require

if TYPE_CHECKING:
    from overlap_callbacks.report.trace_tables import Rows

parquet_option = click.option(
    "--parquet", type=click.Path(path_type=Path, file_okay=False), default=None,
    help="Write all tables into this folder too, each as a Parquet file; needs pyarrow.",
)  # fmt: skip
xlsx_option = click.option(
    "--xlsx", type=click.Path(path_type=Path, dir_okay=False), default=None,
    help="Write all tables to this Excel file too, each as a sheet; needs XlsxWriter.",
)  # fmt: skip


def check_packages(parquet: Path | None, xlsx: Path | None) -> None:
    """Check, before anything is read, that the packages are installed.

    Raises:
        click.ClickException: one is not; the message names the extra to install.
    """
    for wanted, module in ((parquet, "pyarrow"), (xlsx, "xlsxwriter")):
        if wanted is not None:
            require(module, "tables")


def write_table_files(
    names: Sequence[str], rows_of: Callable[[str], Rows], parquet: Path | None, xlsx: Path | None
) -> None:
    """Write the files that the user asked for.

    Args:
        names: of the tables.
        rows_of: gives a table by its name.
        parquet: folder of Parquet files; None for none.
        xlsx: Excel file; None for none.

    Raises:
        click.ClickException: a file cannot be written.
    """
    from overlap_callbacks.report.trace_tables import write_parquet, write_xlsx

    if parquet is None and xlsx is None:
        return
    tables = {name: rows_of(name) for name in names}
    for option, path, write in (("--parquet", parquet, write_parquet), ("--xlsx", xlsx, write_xlsx)):
        if path is not None:
            try:
                write(tables, path)
            except OSError as error:
                reason = error.strerror or str(error)
                raise click.ClickException(one_line(f"{option} {path} cannot be written: {reason}")) from None
