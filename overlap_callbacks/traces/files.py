"""Reads the bytes of a trace file, decompressed, in pieces of limited size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from overlap_callbacks.traces.archives import UnpackError, opened, unpack_errors

# A piece and its decoded events fit into a core's cache. Larger pieces cost memory and time.
PIECE_BYTES = 2**18

SQLITE_MAGIC = b"SQLite format 3\x00"
PARQUET_MAGIC = b"PAR1"
# The table that stands for a Parquet export of Nsight Systems, a folder of tables: the first that exists.
KERNELS_FILE = "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
TABLE_FILES = (KERNELS_FILE, "CUPTI_ACTIVITY_KIND_RUNTIME.parquet", "DIAGNOSTIC_EVENT.parquet")
# Number of leading bytes that identify a file's kind.
_MAGIC_BYTES = 256

# Called with the number of bytes read so far and the number of bytes of the file.
Progress = Callable[[int, int], None]


class TraceError(ValueError):
    """A file cannot be read as a trace; the message says why."""


@dataclass
class Document:
    """A file, up to where it was read.

    Attributes:
        head: the fields around its events.
        problems: what is wrong with it.
        warnings: warnings to be read before any figure.
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
    """Read a file in pieces of at most ``size`` bytes, unpacked if need be; its name does not matter.

    If packed content is truncated or damaged, reading ends, and ``problems`` gets the reason.

    Raises:
        TraceError: the file is missing, cannot be opened, is empty, or was written by another profiler.
    """
    if file.is_dir():
        raise TraceError(f"{file} is a folder: give the trace files in it")
    try:
        with opened(file) as content:
            errors = unpack_errors() if content.is_packed else ()
            for number, piece in enumerate(_pieces(content.stream, file, problems, size, errors)):
                if number == 0:
                    _refuse(file, piece[:_MAGIC_BYTES], is_packed=content.is_packed)
                if progress is not None:
                    progress(content.read(), content.total)
                yield piece
    except TraceError:
        raise
    except UnpackError as error:
        raise TraceError(f"{file}{error}") from None
    except OSError as error:
        raise TraceError(f"{file} cannot be read: {error.strerror or error}") from None
    except unpack_errors() as error:
        raise TraceError(f"{file} cannot be read from its archive: {error}") from None


def _pieces(stream: BinaryIO, file: Path, problems: list[str], size: int, errors: tuple[Any, ...]) -> Iterator[bytes]:
    read = 0
    while True:
        try:
            piece = stream.read(size)
        except errors as error:
            if not read:
                if isinstance(error, UnpackError):
                    raise
                raise TraceError(f"{file} cannot be decompressed: {error}") from None
            problems.append(f"the compressed file is cut off or damaged after {read} bytes ({error}) [OC711]")
            return
        if not piece and not read and errors:  # zstd's reader raises nothing for a truncated file
            raise TraceError(f"{file} is empty, or cut off before anything can be decompressed")
        if not piece:
            return
        read += len(piece)
        yield piece


def with_tables(path: Path) -> Path:
    """The table that represents a folder exported by Nsight Systems; any other path unchanged."""
    return next((path / name for name in TABLE_FILES if (path / name).is_file()), path)


# -- files of other profilers

_TORCH = "take the trace with torch.profiler, or with Nsight Systems and nsys export --type sqlite"
_NSYS = "export it with nsys export --type sqlite {name}, and give the .sqlite file"
_CHAKRA = f" is an execution trace (Chakra): it holds the order of operators, but no kernel times; {_TORCH}"
_ROCPROF = f" is of a profiler that is not supported (rocprof): {_TORCH}. torch.profiler supports AMD GPUs too"
_XLA = (
    " is a profile of JAX or TensorFlow (XLA), which is not supported: profile the job with Nsight Systems, and "
    "give what nsys export --type sqlite writes"
)
_PERFETTO = (
    " is a Perfetto trace (protobuf), which is not supported. torch writes one if the name given to "
    "export_chrome_trace ends in .pftrace: use a name that ends in .json.gz. Instead of rocprofv3, use torch.profiler, "
    "which supports AMD GPUs too"
)
# By the end of the name, packed or not.
_BY_NAME = {
    r"nsys-rep|qdrep|qdstrm": f" is a report of Nsight Systems: {_NSYS}",
    r"pftrace|perfetto-trace": _PERFETTO,
    r"xplane\.pb": _XLA,
    r"et": _CHAKRA,
    r"csv|rpd|otf2": _ROCPROF,
    r"ncu-rep": f" is of a profiler that is not supported (Nsight Compute): {_TORCH}",
}
# By the content of a JSON file.
_BY_CONTENT = {
    rb'"schema"\s*:\s*"[^"]*chakra|"(ctrl|data)_?[dD]eps"\s*:|"nodes"\s*:\s*\[': _CHAKRA,
    rb'"rocprofiler-sdk-\w+"\s*:|"BeginNs"\s*:|"(CPU )?(HIP|HSA) API"': _ROCPROF,
    rb'"/(device|host):(GPU|TPU|CPU|CUSTOM)|"hlo_(module|op)"\s*:': _XLA,
    rb'"(CudaEvent|NvtxEvent|TraceProcessEvent)"\s*:': " is an export of Nsight Systems as JSON: use --type sqlite",
}
# A message of Perfetto's protobuf begins with a line feed. Text has no such control characters.
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_SEARCHED_BYTES = 2**20


def foreign_kind(text: bytes | bytearray) -> str:
    """What a JSON file is if not torch's trace, and what to do, as a message after its name; empty if unknown."""
    return next((kind for pattern, kind in _BY_CONTENT.items() if re.search(pattern, text[:_SEARCHED_BYTES])), "")


def is_foreign(name: str) -> bool:
    """Whether a file is of another profiler, judging by its name."""
    return bool(_kind_by_name(name))


def _kind_by_name(name: str) -> str:
    found = (kind for ends, kind in _BY_NAME.items() if re.search(rf"(?i)\.({ends})(\.(gz|bz2|xz|zst))?$", name))
    return next(found, "")


def _refuse(file: Path, head: bytes, *, is_packed: bool) -> None:
    """Raise a TraceError for files of other profilers, judging by their names and first bytes."""
    kind = _kind_by_name(file.name)
    if head.startswith(SQLITE_MAGIC):
        kind = (
            " is a database, but not an export of Nsight Systems: give what nsys export --type sqlite writes. "
            "Databases of rocprof are not supported: take the trace with torch.profiler, which supports AMD GPUs too"
        )
        if is_packed:
            kind = " is a compressed or archived database: unpack it, and give the .sqlite file"
    elif head.startswith(PARQUET_MAGIC):
        kind = (
            f" is a Parquet table, but not {KERNELS_FILE}: the only Parquet files that can be read are exports of "
            "Nsight Systems with CUDA kernels; give the export's folder"
        )
    elif not kind and head[:1] == b"\n" and _BINARY.search(head):
        kind = _PERFETTO
    if kind:
        raise TraceError(f"{file}{kind.replace('{name}', file.name)}")
