"""Reads what a trace tells about each collective: kind, process group, size in bytes.

The kernel's own arguments tell it (since about torch 2.2), else the arguments of torch's range around the launch.
The size is counted as NCCL's own tests do, so that bus bandwidths are comparable. For a gather or all-gather it is the
size of the output, for a scatter or reduce-scatter of the input; for other collectives the two are the same.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.kernels.accounting import is_copy
from overlap_callbacks.analysis.kernels.table import Indices, KernelTableBuilder, communicates
from overlap_callbacks.traces.events import Args

_DTYPE_BYTES = {
    "double": 8, "float64": 8, "long": 8, "longint": 8, "int64": 8, "complexfloat": 8, "complexdouble": 16,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "uint64": 8,
    "half": 2, "float16": 2, "bfloat16": 2, "short": 2, "int16": 2, "uint16": 2,
    "byte": 1, "char": 1, "signedchar": 1, "unsignedchar": 1, "uint8": 1, "int8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


# Maximum number of elements of a tensor; a larger number is an error.
_MAX_ELEMENTS = 2**50


class CollectiveInfo(NamedTuple):
    """What is known about one collective.

    Attributes:
        kind: kind of collective, e.g. ``all_reduce``.
        group: name of its process group; empty if unknown.
        description: description of the group; empty if unknown.
        ranks: ranks of the group, as text of the file; empty if unknown.
        size: number of ranks of the group; None if unknown.
        num_bytes: size of the collective, as NCCL's tests count it; None if unknown.
        sequence: number of the collective in its group; None if unknown.
        by_name: whether nothing but the kernel's name tells the kind.
    """

    kind: str
    group: str = ""
    description: str = ""
    ranks: str = ""
    size: int | None = None
    num_bytes: int | None = None
    sequence: int | None = None
    by_name: bool = False


class KernelMetadata:
    """Reads the arguments of communication kernels. Results are cached: many kernels have nearly the same arguments."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[CollectiveInfo, int | None]] = {}
        self._sized: dict[tuple[Any, ...], CollectiveInfo] = {}

    @staticmethod
    def key(args: Args) -> tuple[Any, ...]:
        """What two collectives of one kind on one group have in common."""
        size = args.group_size if type(args.group_size) is int and args.group_size > 0 else None
        texts: tuple[Any, ...] = (args.collective, args.dtype, args.group, args.group_description, args.group_ranks)
        if {*map(type, texts)} != {str}:
            texts = tuple(map(_text, texts))
        return (*texts, size)

    def read(self, args: Args) -> CollectiveInfo:
        """What the arguments of one communication kernel tell about its collective."""
        key = self.key(args)
        cached = self._known.get(key)
        if cached is None:
            name, dtype, group, description, ranks = (safe_text.clean(text) for text in key[:-1])
            size = key[-1]
            info = CollectiveInfo(name_rules.collective_of(name), group, description, ranks, size)
            cached = self._known[key] = (info, _width(dtype))
        info, width = cached
        elements = args.out_elements if info.kind in ("all_gather", "gather") else args.in_elements
        is_possible = type(elements) is int and 0 <= elements < _MAX_ELEMENTS
        num_bytes = elements * width if is_possible and width else None
        sequence = args.sequence if type(args.sequence) is int else None
        if num_bytes is None and sequence is None:
            return info
        sized = self._sized.get((key, num_bytes)) if sequence is None else None  # mostly one of few
        if sized is None:
            sized = info._replace(num_bytes=num_bytes, sequence=sequence)
            if sequence is None:
                self._sized[key, num_bytes] = sized
        return sized


def with_groups(collectives: dict[int, CollectiveInfo], distributed_info: Any) -> dict[int, CollectiveInfo]:
    """Fill in what the kernels do not tell about their process groups from the file's ``distributedInfo``.

    Args:
        collectives: what is known about each collective, by row.
        distributed_info: the field of the file, of whatever type it is there.
    """
    config = distributed_info.get("pg_config") if isinstance(distributed_info, dict) else None
    groups = {
        str(group.get("pg_name")): group
        for group in (config if isinstance(config, list) else [])
        if isinstance(group, dict)
    }
    if not groups:
        return collectives
    filled = {}
    for row, known in collectives.items():
        group = groups.get(known.group)
        if group is not None:
            ranks, size = group.get("ranks"), group.get("pg_size")
            cut_off = not known.ranks or "..." in known.ranks
            known = known._replace(  # noqa: PLW2901
                description=known.description or safe_text.clean(str(group.get("pg_desc", ""))),
                ranks=safe_text.clean(str(ranks)) if cut_off and isinstance(ranks, list) else known.ranks,
                size=size if known.size is None and type(size) is int and size > 0 else known.size,
            )
        filled[row] = known
    return filled


def annotated(
    rows: KernelTableBuilder,
    known: dict[int, CollectiveInfo],
    launched_ns: Indices,
    thread_of: Callable[[int], Any],
    notes: Sequence[tuple[str, int | str, int, int, Args | None]],
) -> dict[int, CollectiveInfo]:
    """Add to ``known`` what torch's ranges tell about the communication kernels that were launched in them.

    Args:
        rows: the kernels.
        known: what their own arguments tell, by row.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
        thread_of: gives the thread that launched a row.
        notes: torch's ranges of collectives: name, thread, start and end in nanoseconds, arguments.

    Returns:
        What is known about every communication kernel, by row. Copies have no size: several may be one collective.
    """
    collectives = dict(known)
    ranges = Ranges(notes)
    texts = rows.names.texts
    for row in np.flatnonzero(communicates(rows)).tolist():
        if row in known:
            continue
        found = ranges.around(int(launched_ns[row]), thread_of(row))
        if found is not None:
            kind = name_rules.collective_of(found.name)
            if kind != name_rules.OTHER:
                collectives[row] = CollectiveInfo(
                    kind=kind,
                    num_bytes=None if is_copy(texts[rows.name[row]]) else _input_bytes(kind, found.args),
                )
                continue
        collectives[row] = CollectiveInfo(kind=name_rules.collective_of(texts[rows.name[row]]), by_name=True)
    return collectives


class Range(NamedTuple):
    """One of torch's ranges of collectives."""

    thread: str
    start_ns: int
    end_ns: int
    name: str
    args: Args | None

    def __hash__(self) -> int:
        return hash(self[:4])


class Ranges:
    """Torch's ranges of collectives, by thread.

    Args:
        notes: name, thread, start and end in nanoseconds, and arguments of each range.
    """

    def __init__(self, notes: Sequence[tuple[str, int | str, int, int, Args | None]]) -> None:
        self._by_thread: dict[str, list[tuple[str, int | str, int, int, Args | None]]] = {}
        by_thread: dict[int | str, list[Any]] = {}
        for note in notes:
            by_thread.setdefault(note[1], []).append(note)
        for thread, of_thread in by_thread.items():  # a number and its text are one thread
            self._by_thread.setdefault(str(thread), []).extend(of_thread)
        for ranges in self._by_thread.values():
            ranges.sort(key=itemgetter(2, 3))
        self._starts = {thread: [note[2] for note in ranges] for thread, ranges in self._by_thread.items()}

    def around(self, launched_ns: int, thread: Any) -> Range | None:
        """The range in which the thread made a launch; None for an unknown launch, and outside of all ranges."""
        starts = self._starts.get(str(thread))
        if launched_ns < 0 or starts is None:
            return None
        place = bisect.bisect_right(starts, launched_ns) - 1
        if place < 0:
            return None
        name, _, start_ns, end_ns, args = self._by_thread[str(thread)][place]
        return Range(str(thread), start_ns, end_ns, name, args) if launched_ns < end_ns else None


def _input_bytes(kind: str, args: Args | None) -> int | None:
    """Bytes of the first input, if that is the size of the collective; else None."""
    if args is None or kind in ("all_gather", "gather", "scatter"):
        return None
    try:
        dims, dtype = args.input_dims[0], args.input_type[0]
        width = _width(dtype)
        if not width or not dims or not all(type(size) is int and size >= 0 for size in dims):
            return None
        elements = math.prod(dims)
        return elements * width if elements < _MAX_ELEMENTS else None
    except (TypeError, IndexError, KeyError):
        return None


def _width(dtype: Any) -> int | None:
    """Bytes of an element; None for an unknown type."""
    name = re.sub(r"^c10::|\s+", "", str(dtype)).lower()
    return _DTYPE_BYTES.get(name)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()
