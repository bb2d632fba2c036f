"""Finds trace files from files, folders, patterns and archives."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from overlap_callbacks.traces.archives import names_in, starts_with
from overlap_callbacks.traces.files import KERNELS_FILE, SQLITE_MAGIC, TABLE_FILES, TraceError, is_foreign

# Other members of a folder or an archive are not traces.
_PACKED = ("", ".gz", ".bz2", ".xz", ".zst")
_SUFFIXES_IN_ARCHIVES = tuple([f".json{packed}" for packed in _PACKED])
_SUFFIXES = (
    *_SUFFIXES_IN_ARCHIVES, ".zip", ".sqlite", KERNELS_FILE.lower(),
    *[f".tar{packed}" for packed in _PACKED], ".tgz", ".tbz2", ".txz", ".tzst",
)  # fmt: skip
_IN_WORDS = ".json, .sqlite or Nsight's tables of .parquet; .gz, .bz2, .xz, .zst, .zip or .tar of them"


def find_traces(paths: Iterable[str | Path]) -> list[Path]:
    """The trace files that files, folders and patterns stand for.

    A folder stands for the traces in it and its folders, a pattern such as ``run/rank*.json`` for the files that it
    matches, an archive (``.zip``, ``.tar``, ``.tar.gz`` and the like) for the traces in it, and an export of Nsight
    Systems for each of its processes. What is in an archive or an export has a path below it:
    ``traces.zip/rank0.json``.

    Raises:
        TraceError: a folder or an archive holds no trace, or a pattern matches no file.
    """
    return list(dict.fromkeys(file for path in paths for file in _expanded(Path(path))))


def holds_traces(path: Path) -> bool:
    """Whether a file looks like a trace by its name, or a folder holds one that does."""
    if path.is_dir():
        return any(_looks_like_a_trace(file.relative_to(path)) and file.is_file() for file in path.rglob("*"))
    return _looks_like_a_trace(Path(path.name))


def _expanded(path: Path) -> Iterator[Path]:
    if path.is_dir():
        inside = [file for file in _sorted(path.rglob("*")) if _looks_like_a_trace(file.relative_to(path))]
        files = [file for file in inside if file.is_file()]
        foreign = (file for file in _sorted(path.rglob("*")) if file.name in TABLE_FILES or is_foreign(file.name))
        files = files or [*itertools.islice(foreign, 1)]  # reading it shows why it is no trace
        if not files:
            raise TraceError(f"{path} is a folder without traces ({_IN_WORDS})")
        for file in files:
            yield from _members(file)
    elif not path.exists() and glob.has_magic(str(path)):
        matching = _sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not matching:
            raise TraceError(f"{path} matches no file")
        for found in matching:
            yield from _expanded(found)
    else:
        yield from _members(path)


def _members(file: Path) -> Iterator[Path]:
    """The traces of an archive or of several processes, or the file itself."""
    found = names_in(file)
    if found is not None:
        names, error = found
        traces = [name for name in _sorted(map(Path, names)) if _looks_like_a_trace(name, _SUFFIXES_IN_ARCHIVES)]
        if not traces and error is None:
            raise TraceError(f"{file} is an archive without traces ({', '.join(_SUFFIXES_IN_ARCHIVES)})")
        yield from (file / name for name in traces)
        if error is not None:
            yield file  # reading it shows why, without losing other files
    elif starts_with(file, SQLITE_MAGIC) or file.name in TABLE_FILES:
        from overlap_callbacks.traces.nsys import is_nsys, processes_in  # few files are databases

        processes = processes_in(file) if is_nsys(file) else []
        yield from (file / process for process in processes) if len(processes) > 1 else (file,)
    else:
        yield file


def _looks_like_a_trace(path: Path, suffixes: tuple[str, ...] = _SUFFIXES) -> bool:
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    return not hidden and path.name.lower().endswith(suffixes)


def _sorted(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: natural(str(path)))


def natural(text: str) -> list[tuple[int, int | str]]:
    """A key that sorts texts in natural order: ``rank2`` before ``rank10``."""
    parts = re.split(r"(\d{1,18})", text)
    return [(0, int(part)) if part.isdecimal() and part.isascii() else (1, part) for part in parts]
