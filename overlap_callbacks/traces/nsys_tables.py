"""The tables of an export of Nsight Systems: an SQLite file, or a folder of Parquet that is copied into one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_callbacks.traces.files import TABLE_FILES, TraceError

if TYPE_CHECKING:
    import sqlite3

ROWS_AT_ONCE = 4096
_ROWS_OF_PARQUET = 2**16


class Tables:
    """The tables of a file; ``columns`` maps each to its columns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        names = connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        self.columns = {
            str(name): {str(row[1]) for row in connection.execute(f"PRAGMA table_info({_quoted(str(name))})")}
            for (name,) in names
        }

    def rows(self, query: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, a few thousand at a time; ``values`` are those of its placeholders."""
        cursor = self._connection.execute(query, values)
        while found := cursor.fetchmany(ROWS_AT_ONCE):
            yield from found

    def select(self, table: str, columns: tuple[str, ...], where: str = "", *values: Any) -> Iterator[tuple[Any, ...]]:
        """Some columns of a table, NULL if the file's version lacks one. No rows without the table."""
        if table not in self.columns:
            return
        wanted = ", ".join(name if name in self.columns[table] else "NULL" for name in columns)
        yield from self.rows(f"SELECT {wanted} FROM {table} {where}", *values)


@contextlib.contextmanager
def open_tables(file: Path, wanted: tuple[str, ...]) -> Iterator[Tables]:
    """The tables of an export while they are open; of a folder of Parquet only the ``wanted`` ones.

    Raises:
        TraceError: a table of Parquet cannot be read, or pyarrow is missing.
    """
    import sqlite3
    from urllib.parse import quote

    if file.name in TABLE_FILES:
        connection = sqlite3.connect("")  # in a temporary file, deleted with the connection
        _load(file.parent, wanted, connection)
    else:
        connection = sqlite3.connect(f"file:{quote(str(file.absolute()))}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda text: text.decode(errors="replace")
    try:
        yield Tables(connection)
    finally:
        connection.close()


def _load(folder: Path, wanted: tuple[str, ...], connection: sqlite3.Connection) -> None:
    """Copy the required tables from a folder of Parquet to a database."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise TraceError(
            f"{folder} is an export of Nsight Systems in Parquet, for which pyarrow is missing: "
            "pip install 'overlap-callbacks[tables]', or export it with nsys export --type sqlite"
        ) from None
    for name in wanted:
        file = folder / f"{name}.parquet"
        if not file.is_file():
            continue
        try:
            with pq.ParquetFile(file) as table:
                columns = [field.name for field in table.schema_arrow if not pa.types.is_nested(field.type)]
                connection.execute(f"CREATE TABLE {name} ({', '.join(map(_quoted, columns))})")
                marks = ", ".join("?" * len(columns))
                for batch in table.iter_batches(_ROWS_OF_PARQUET, columns=columns):
                    rows = zip(*[_signed(column).to_pylist() for column in batch.columns], strict=True)
                    connection.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
        except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
            raise TraceError(f"{file} cannot be read as Parquet: {error}") from None


def _signed(column: Any) -> Any:
    """A column of signed 64-bit numbers, as SQLite has."""
    import pyarrow as pa

    return column.cast(pa.int64(), safe=False) if pa.types.is_uint64(column.type) else column


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
