"""Reads what a trace tells about each collective: kind, process group, size in bytes.

The kernel's own arguments tell it (since about torch 2.2), else the arguments of torch's range around the launch.
The size is counted as NCCL's own tests do, so that bus bandwidths are comparable. For a gather or all-gather it is the
size of the output, for a scatter or reduce-scatter of the input; for other collectives the two are the same.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.kernels.copies import is_copy
from overlap_callbacks.analysis.kernels.table import Indices, KernelTableBuilder, communicates
from overlap_callbacks.traces.collective_ranges import CollectiveRanges, RangeDetail
from overlap_callbacks.traces.collectives import UNKNOWN, CollectiveInfo, Collectives
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


class _Known(NamedTuple):
    """What the arguments of some collectives have in common.

    Attributes:
        number: of ``info`` among all.
        info: what is known of them.
        width: bytes of an element; None if unknown.
        of_output: whether their size is that of the output.
    """

    number: int
    info: CollectiveInfo
    width: int | None
    of_output: bool


class KernelMetadata:
    """Reads the arguments of communication kernels, and keeps what they tell in columns.

    Many kernels have the same arguments but for their size and number. What they have in common is worked out once.
    """

    def __init__(self) -> None:
        self._columns: tuple[array[int], ...] = tuple([array("q") for _ in range(4)])
        self._infos: dict[CollectiveInfo, int] = {}
        self._known: dict[tuple[Any, ...], _Known] = {}  # by what the arguments have in common

    def extend(self, rows: Sequence[int], all_args: Sequence[Args]) -> list[str]:
        """Keep what the arguments of communication kernels tell. Returns the kinds of their collectives.

        Args:
            rows: rows of the kernels, ascending.
            all_args: their arguments.
        """
        found = [self._known.get(key) or self._read(key) for key in _keys(all_args)]
        row, info, num_bytes, sequence = self._columns
        row.extend(rows)
        info.extend([known.number for known in found])
        num_bytes.extend(
            [
                _size(args.out_elements if known.of_output else args.in_elements, known.width)
                for args, known in zip(all_args, found, strict=True)
            ]
        )
        sequence.extend([_sequence(args.sequence) for args in all_args])
        return [known.info.kind for known in found]

    def info(self, args: Args) -> CollectiveInfo:
        """What the arguments of one collective tell, without its size and number."""
        (key,) = _keys([args])
        return (self._known.get(key) or self._read(key)).info

    def collectives(self) -> Collectives:
        """What was kept."""
        row, info, num_bytes, sequence = (np.array(column, dtype=np.int64) for column in self._columns)
        return Collectives(row, info, num_bytes, sequence, tuple(self._infos))

    def take(self) -> Collectives:
        """What was kept, which is then forgotten. What kernels have in common keeps its numbers."""
        found = self.collectives()
        self._columns = tuple([array("q") for _ in range(4)])
        return found

    def _read(self, key: tuple[Any, ...]) -> _Known:
        name, dtype, group, description, ranks = (safe_text.clean(text) for text in key[:-1])
        info = CollectiveInfo(name_rules.collective_of(name), group, description, ranks, key[-1])
        number = self._infos.setdefault(info, len(self._infos))
        found = _Known(number, info, _width(dtype), info.kind in ("all_gather", "gather"))
        self._known[key] = found
        return found


def _keys(all_args: Sequence[Args]) -> list[tuple[Any, ...]]:
    """What collectives have in common with others: five texts, and the size of the group."""
    keys = [
        (args.collective, args.dtype, args.group, args.group_description, args.group_ranks, args.group_size)
        for args in all_args
    ]
    *texts, sizes = ({*map(type, column)} for column in zip(*keys, strict=True))
    if set().union(*texts) == {str} and sizes == {int}:
        return [key if key[-1] > 0 else (*key[:-1], None) for key in keys]
    return [
        (*map(_text, texts), size if type(size) is int and size > 0 else None) for *texts, size in keys
    ]  # numbers that are equal may have different types


def _size(elements: Any, width: int | None) -> int:
    """Bytes of some elements; ``UNKNOWN`` if that cannot be told."""
    return elements * width if type(elements) is int and 0 <= elements < _MAX_ELEMENTS and width else UNKNOWN


def _sequence(number: Any) -> int:
    return number if type(number) is int and UNKNOWN < number < 2**63 else UNKNOWN


def with_groups(collectives: Collectives, distributed_info: Any) -> Collectives:
    """Fill in what the kernels do not tell about their process groups from the file's ``distributedInfo``.

    Args:
        collectives: what is known about each collective.
        distributed_info: the field of the file, of whatever type it is there.
    """
    config = distributed_info.get("pg_config") if isinstance(distributed_info, dict) else None
    groups = {
        str(group.get("pg_name")): group
        for group in (config if isinstance(config, list) else [])
        if isinstance(group, dict)
    }

    def filled(known: CollectiveInfo) -> CollectiveInfo:
        group = groups.get(known.group)
        if group is None:
            return known
        ranks, size = group.get("ranks"), group.get("pg_size")
        cut_off = not known.ranks or "..." in known.ranks
        return known._replace(
            description=known.description or safe_text.clean(str(group.get("pg_desc", ""))),
            ranks=safe_text.clean(str(ranks)) if cut_off and isinstance(ranks, list) else known.ranks,
            size=size if known.size is None and type(size) is int and size > 0 else known.size,
        )

    return collectives.with_infos(map(filled, collectives.infos)) if groups else collectives


def annotated(
    rows: KernelTableBuilder, known: Collectives, launched_ns: Indices, thread: Indices, ranges: CollectiveRanges
) -> Collectives:
    """What torch's ranges tell about the communication kernels that were launched in them, else their names.

    Args:
        rows: the kernels.
        known: what their own arguments tell: nothing else is asked about those.
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
        thread: the thread that launched it, as ``ranges`` numbers them; shape (n,).
        ranges: torch's ranges of collectives.

    Returns:
        What is known about the communication kernels that are not in ``known``.
    """
    wanted = np.flatnonzero(communicates(rows))
    wanted = wanted[~np.isin(wanted, known.rows)]
    within = ranges.around(launched_ns[wanted], thread[wanted])
    name = np.array(rows.name, dtype=np.int64)[wanted]
    detail, num_bytes = (np.append(column, -1)[within] for column in (ranges.detail, ranges.num_bytes))
    told = told_by_ranges(name, detail, num_bytes, rows.names.texts, ranges.details)
    return msgspec.structs.replace(Collectives.alike(wanted, told.info, told.infos), num_bytes=told.num_bytes)


class Told(NamedTuple):
    """What torch's ranges, else names, tell of communication kernels.

    Attributes:
        info: index into ``infos``; shape (n,).
        num_bytes: sizes; ``UNKNOWN`` if unknown; shape (n,).
        infos: what some of them have in common.
    """

    info: Indices
    num_bytes: Indices
    infos: tuple[CollectiveInfo, ...]


def told_by_ranges(
    name: Indices, detail: Indices, num_bytes: Indices, texts: Sequence[str], details: Sequence[RangeDetail]
) -> Told:
    """What torch's ranges tell of communication kernels, else their names.

    Copies have no size: several may be one collective.

    Args:
        name: index into ``texts`` of each kernel; shape (n,).
        detail: index into ``details`` of the range in which each was launched, -1 for none; shape (n,).
        num_bytes: size of the range's collective, ``UNKNOWN`` if unknown; shape (n,).
        texts: the distinct names.
        details: what ranges have in common.
    """
    # Kernels of one name in ranges that are alike are alike.
    detail = np.where(detail >= 0, detail, len(details))
    alike, place = np.unique(detail * len(texts) + name, return_inverse=True)
    infos: list[CollectiveInfo] = []
    has_size: list[bool] = []
    for number in alike.tolist():
        text = texts[number % len(texts)]
        about = details[number // len(texts)] if number // len(texts) < len(details) else None
        kind = name_rules.collective_of(about.name) if about is not None else name_rules.OTHER
        if about is not None and kind != name_rules.OTHER:
            infos.append(CollectiveInfo(kind))
            has_size.append(not is_copy(text))
        else:
            infos.append(CollectiveInfo(name_rules.collective_of(text), by_name=True))
            has_size.append(False)
    place = place.reshape(-1)
    return Told(place, np.where(np.array(has_size, dtype=bool)[place], num_bytes, UNKNOWN), tuple(infos))


def input_bytes(name: str, dims: bytes, types: bytes) -> int:
    """Bytes of the first input of a collective, if that is its size; else ``UNKNOWN``.

    Args:
        name: of torch's range of the collective.
        dims: sizes of each input, as text of the file; empty if unknown.
        types: type of the elements of each input, in the same form.
    """
    if not dims or not types or name_rules.collective_of(name) in ("all_gather", "gather", "scatter"):
        return UNKNOWN
    try:
        sizes, dtype = msgspec.json.decode(dims)[0], msgspec.json.decode(types)[0]
        if not sizes or not all(type(size) is int and size >= 0 for size in sizes):
            return UNKNOWN
        return _size(math.prod(sizes), _width(dtype))
    except (TypeError, IndexError, KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return UNKNOWN


def _width(dtype: Any) -> int | None:
    """Bytes of an element; None for an unknown type."""
    name = re.sub(r"^c10::|\s+", "", str(dtype)).lower()
    return _DTYPE_BYTES.get(name)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()
