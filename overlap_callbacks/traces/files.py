"""Reads the bytes of a trace file, decompressed, in pieces of bounded size."""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

try:
    from isal import igzip, isal_zlib

    # igzip decompresses about three times faster than zlib, but has no wheels for some machines.
    _open_gzip: Any = igzip.open
    _GZIP_ERRORS: tuple[Any, ...] = (EOFError, OSError, zlib.error, isal_zlib.error)
except ImportError:  # pragma: no cover
    _open_gzip = gzip.open
    _GZIP_ERRORS = (EOFError, OSError, zlib.error)

# A piece and the events decoded from it fit into a core's cache. Larger pieces cost memory and time.
PIECE_BYTES = 2**18

_GZIP_MAGIC = b"\x1f\x8b"
_ZIP_MAGIC = b"PK\x03\x04"
SQLITE_MAGIC = b"SQLite format 3\x00"
_LONGEST_MAGIC = SQLITE_MAGIC


# Called with the number of bytes read so far and the number of bytes of the file.
Progress = Callable[[int, int], None]


class TraceError(ValueError):
    """A file cannot be read as a trace; the message says why."""


@dataclass
class Document:
    """A file as far as it was read.

    Attributes:
        head: the fields around its events.
        problems: what is wrong with it.
        warnings: what must be read before any figure.
        is_cut: whether it ends before its events do.
    """

    path: Path
    head: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    is_cut: bool = False
    warnings: list[str] = field(default_factory=list)


def pieces(
    file: Path, problems: list[str], size: int = PIECE_BYTES, progress: Progress | None = None
) -> Iterator[bytes]:
    """Read a file in pieces of at most ``size`` bytes, decompressed if it is gzipped, whatever its name.

    Where a compressed file is cut off or damaged, reading ends, and ``problems`` gets why.

    Raises:
        TraceError: there is no such file, it cannot be opened, or it is empty.
    """
    if file.is_dir():
        raise TraceError(f"{file} is a folder: give the trace files in it")
    try:
        with _opened(file) as (raw, total):
            magic = raw.read(len(_LONGEST_MAGIC))
            if not magic:
                raise TraceError(f"{file} is empty")
            _refuse(file, magic)
            raw.seek(0)
            packed = magic.startswith(_GZIP_MAGIC)
            errors = _GZIP_ERRORS if packed else ()
            with _open_gzip(raw, "rb") if packed else contextlib.nullcontext(raw) as stream:
                for piece in _unpacked(stream, file, problems, size, (*errors, *_archive_errors())):
                    if progress is not None:
                        progress(raw.tell(), total)
                    yield piece
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror or error}") from None
    except _archive_errors() as error:
        raise TraceError(f"{file} cannot be read from its archive: {error}") from None


def _refuse(file: Path, magic: bytes) -> None:
    """Raise a TraceError for files of other profilers, by their names and first bytes."""
    suffix = file.suffix.lower()
    if suffix in (".nsys-rep", ".qdrep", ".qdstrm"):
        raise TraceError(
            f"{file} is a report of Nsight Systems: export it with nsys export --type sqlite {file.name}, and give the "
            ".sqlite file"
        )
    if magic.startswith(SQLITE_MAGIC):
        raise TraceError(
            f"{file} is a database without kernels of Nsight Systems: give what nsys export --type sqlite writes. "
            "Databases of rocprof are not read: take the trace with torch.profiler, which reads AMD devices too"
        )
    if suffix in (".csv", ".pftrace", ".rpd", ".ncu-rep"):
        raise TraceError(
            f"{file} is of a profiler that is not read (rocprof, Perfetto, Nsight Compute): take the trace with "
            "torch.profiler, or with Nsight Systems and nsys export --type sqlite"
        )


def is_zip(file: Path) -> bool:
    """Whether a file is an archive; False if it cannot be read."""
    return starts_with(file, _ZIP_MAGIC)


def starts_with(file: Path, magic: bytes) -> bool:
    """Whether a file's first bytes are these; False if it cannot be read."""
    try:
        with file.open("rb") as raw:
            return raw.read(len(magic)) == magic
    except OSError:
        return False


def container_of(path: Path) -> tuple[Path, str] | None:
    """The file above a path such as ``traces.zip/rank0.json``, and the name in it; None for an ordinary path."""
    for parent in path.parents:
        if parent.is_file():
            return parent, path.relative_to(parent).as_posix()
        if parent.exists():
            break
    return None


def bytes_of(path: Path) -> int:
    """Size of a file, or of the archive that it is in; 0 if there is none."""
    inside = container_of(path)
    try:
        return (inside[0] if inside else path).stat().st_size
    except OSError:
        return 0


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file, or a member of an archive, and its size in bytes."""
    inside = container_of(path) if not path.exists() else (path, "") if is_zip(path) else None
    if inside is None or not is_zip(inside[0]):
        with path.open("rb") as raw:
            yield raw, os.fstat(raw.fileno()).st_size
        return
    import zipfile  # few files are archives, and the import takes some milliseconds

    with zipfile.ZipFile(inside[0]) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        name = inside[1] or (names[0] if len(names) == 1 else "")
        if name not in names:
            raise TraceError(f"{path} is an archive of {len(names)} files: name one of them, as in {path}/{names[0]}"
                             if not inside[1] and names else f"{path} is not in its archive")  # fmt: skip
        with archive.open(name) as member:
            yield cast(BinaryIO, member), archive.getinfo(name).file_size


def _archive_errors() -> tuple[Any, ...]:
    """What a member of an archive raises: damaged, encrypted, compressed in a way that is not known."""
    import zipfile

    return (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError)


def _unpacked(stream: BinaryIO, file: Path, problems: list[str], size: int, errors: tuple[Any, ...]) -> Iterator[bytes]:
    read = 0
    while True:
        try:
            piece = stream.read(size)
        except errors as error:
            if not read:
                raise TraceError(f"{file} cannot be decompressed: {error}") from None
            problems.append(f"the compressed file is cut off or damaged after {read} bytes ({error})")
            return
        if not piece:
            return
        read += len(piece)
        yield piece
