"""What a trace tells of each collective: kind, process group, size in bytes, number.

The kernel's own arguments tell it (since about torch 2.2), else the arguments of torch's range around the launch.
The size is counted as NCCL's own tests do, so that bus bandwidths are comparable. For a gather or all-gather it is the
size of the output, for a scatter or reduce-scatter of the input; for other collectives the two are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.kernels.table import Indices, is_copy
from overlap_callbacks.traces.collect import Numbers
from overlap_callbacks.traces.columns import Array
from overlap_callbacks.traces.events import Args

# Stands for a size or a number that is not known.
UNKNOWN = -(2**63)
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
    """What many collectives have in common.

    Attributes:
        kind: kind of collective, e.g. ``all_reduce``.
        group: name of its process group; empty if unknown.
        description: description of the group; empty if unknown.
        ranks: ranks of the group, as text of the file; empty if unknown.
        size: number of ranks of the group; None if unknown.
        by_name: whether nothing but the kernel's name tells the kind.
    """

    kind: str
    group: str = ""
    description: str = ""
    ranks: str = ""
    size: int | None = None
    by_name: bool = False


class RangeDetail(NamedTuple):
    """What some of torch's ranges of collectives have in common.

    Attributes:
        name: of the range, e.g. ``nccl:all_reduce``.
        info: what its arguments tell about the collective; None if they do not describe it.
    """

    name: str
    info: CollectiveInfo | None = None


class Collectives(msgspec.Struct, frozen=True):
    """What is known about the communication kernels of a trace, one row per kernel.

    Attributes:
        rows: rows of the kernels in their table, ascending; shape (m,).
        info: index into ``infos``; shape (m,).
        num_bytes: size of the collective, as NCCL's tests count it; ``UNKNOWN`` if unknown; shape (m,).
        sequence: number of the collective in its group; ``UNKNOWN`` if unknown; shape (m,).
        infos: what some of them have in common.
    """

    rows: Indices
    info: Indices
    num_bytes: Indices
    sequence: Indices
    infos: tuple[CollectiveInfo, ...]

    @classmethod
    def of(cls, info: Array, num_bytes: Array, sequence: Array, infos: tuple[CollectiveInfo, ...]) -> Collectives:
        """Of columns of a whole table; shape (n,) each. ``info`` is -1 where nothing is known."""
        rows = np.flatnonzero(info >= 0)
        return cls(rows, info[rows].astype(np.int64), num_bytes[rows], sequence[rows], infos)

    @classmethod
    def none(cls) -> Collectives:
        """Of a file that tells nothing."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing, nothing, nothing, ())

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, first: int, last: int) -> Collectives:
        """Those of the kernels from one row up to another, with their places among these as rows."""
        mine = slice(*np.searchsorted(self.rows, (first, last)).tolist())
        return Collectives(
            self.rows[mine] - first, self.info[mine], self.num_bytes[mine], self.sequence[mine], self.infos
        )

    def of_rows(self, rows: Indices) -> tuple[Indices, Indices, Indices]:
        """Index into ``infos``, size and number of each of some kernels: -1 and ``UNKNOWN`` where nothing is known."""
        if not len(self):
            unknown = np.full(len(rows), UNKNOWN, dtype=np.int64)
            return np.full(len(rows), -1, dtype=np.int64), unknown, unknown
        place = np.minimum(np.searchsorted(self.rows, rows), len(self) - 1)
        known = self.rows[place] == rows
        return (
            np.where(known, self.info[place], -1),
            np.where(known, self.num_bytes[place], UNKNOWN),
            np.where(known, self.sequence[place], UNKNOWN),
        )


class Described(NamedTuple):
    """What the arguments of a kernel tell of its collective: number of the ``CollectiveInfo``, bytes, number."""

    info: int
    num_bytes: int
    sequence: int


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
    """Reads the arguments of communication kernels.

    Many kernels have the same arguments but for their size and number. What they have in common is worked out once.

    Attributes:
        infos: what collectives have in common, numbered.
    """

    def __init__(self) -> None:
        self.infos: Numbers[CollectiveInfo] = Numbers()
        self._known: dict[tuple[Any, ...], _Known] = {}  # by what the arguments have in common

    def describe(self, all_args: Sequence[Args]) -> list[Described]:
        """What the arguments of communication kernels tell."""
        return [
            Described(
                known.number,
                _size(args.out_elements if known.of_output else args.in_elements, known.width),
                args.sequence if type(args.sequence) is int and UNKNOWN < args.sequence < 2**63 else UNKNOWN,
            )
            for args, known in zip(all_args, self._known_of(all_args), strict=True)
        ]

    def info(self, args: Args) -> CollectiveInfo:
        """What the arguments of one collective tell, without its size and number."""
        return self._known_of([args])[0].info

    def _known_of(self, all_args: Sequence[Args]) -> list[_Known]:
        return [self._known.get(key) or self._read(key) for key in _keys(all_args)]

    def _read(self, key: tuple[Any, ...]) -> _Known:
        name, dtype, group, description, ranks = (safe_text.clean(text) for text in key[:-1])
        info = CollectiveInfo(name_rules.collective_of(name), group, description, ranks, key[-1])
        found = _Known(self.infos[info], info, _width(dtype), info.kind in ("all_gather", "gather"))
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


def with_groups(infos: Sequence[CollectiveInfo], distributed_info: Any) -> tuple[CollectiveInfo, ...]:
    """Fill in what the kernels do not tell about their process groups from the file's ``distributedInfo``.

    Args:
        infos: what collectives have in common.
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

    return tuple(map(filled, infos))


class Hints(NamedTuple):
    """What torch's ranges, else names, tell of communication kernels.

    Attributes:
        info: number of what each has in common with others; shape (n,).
        num_bytes: sizes; ``UNKNOWN`` if unknown; shape (n,).
    """

    info: Indices
    num_bytes: Indices


def hints_from_ranges(
    name: Indices,
    detail: Indices,
    num_bytes: Indices,
    texts: Sequence[str],
    details: Sequence[RangeDetail],
    infos: Numbers[CollectiveInfo],
) -> Hints:
    """What torch's ranges tell of communication kernels, else their names.

    Copies have no size: several may be one collective.

    Args:
        name: index into ``texts`` of each kernel; shape (n,).
        detail: index into ``details`` of the range in which each was launched, -1 for none; shape (n,).
        num_bytes: size of the range's collective, ``UNKNOWN`` if unknown; shape (n,).
        texts: the distinct names.
        details: what ranges have in common.
        infos: numbers what collectives have in common.
    """
    # Kernels of one name in ranges that are alike are alike.
    detail = np.where(detail >= 0, detail, len(details))
    alike, place = np.unique(detail * len(texts) + name, return_inverse=True)
    numbers: list[int] = []
    has_size: list[bool] = []
    for number in alike.tolist():
        text = texts[number % len(texts)]
        about = details[number // len(texts)] if number // len(texts) < len(details) else None
        kind = name_rules.collective_of(about.name) if about is not None else name_rules.OTHER
        by_range = kind != name_rules.OTHER
        info = CollectiveInfo(kind) if by_range else CollectiveInfo(name_rules.collective_of(text), by_name=True)
        numbers.append(infos[info])
        has_size.append(by_range and not is_copy(text))
    place = place.reshape(-1)
    sized = np.array(has_size, dtype=bool)[place]
    return Hints(np.array(numbers, dtype=np.int64)[place], np.where(sized, num_bytes, UNKNOWN))


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
