"""Kind, process group, size and number of each collective of a trace.

They come from the kernel's own arguments (since about torch 2.2), else from those of torch's range around the launch.
Sizes are counted as NCCL's own tests do, so that bus bandwidths are comparable: the output of a gather or all-gather,
the input of a scatter or reduce-scatter, the larger of the two of an all-to-all; for others they are the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.table import Indices
from overlap_callbacks.traces.collect import Memo, Numbers
from overlap_callbacks.traces.events import Args

# An unknown size or number.
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
ALL_TO_ALL = "all_to_all"
# Limit of what is cached of collectives by their arguments.
_MOST_KNOWN = 4096
# Torch's text of equal split sizes of an all-to-all; a long text of others is truncated, and ends in ``...``.
_NO_SPLITS = (None, "[]")
_SPLITS = re.compile(r"\[\d{1,15}(?:, ?\d{1,15})*\]")
_decode_numbers = msgspec.json.Decoder(tuple[int, ...]).decode


class CollectiveInfo(NamedTuple):
    """What many collectives share: kind, and process group if known.

    Attributes:
        kind: e.g. ``all_reduce``.
        ranks: ranks of the group, as text of the file.
        size: number of ranks of the group; None if unknown.
        by_name: whether the kind comes from the kernel's name alone.
        sent, received: split sizes of an all-to-all; empty if equal or unknown.
        cut: whether torch cut off its split sizes.
        module: that it is for, as a CUDA graph's annotation says (``torch.cuda._annotate_cuda_graph_trace``).
    """

    kind: str
    group: str = ""
    description: str = ""
    ranks: str = ""
    size: int | None = None
    by_name: bool = False
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    cut: bool = False
    module: str = ""


class RangeDetail(NamedTuple):
    """Torch's range of a collective: its name, such as ``nccl:all_reduce``, and data from its arguments, if any."""

    name: str
    info: CollectiveInfo | None = None


class Collectives(msgspec.Struct, frozen=True):
    """The collective of each kernel; shape (n,) each.

    Attributes:
        info: index into ``infos``; -1 if nothing is known.
        num_bytes: size, as NCCL's tests count it; ``UNKNOWN`` if unknown.
        sequence: number of the collective in its group; ``UNKNOWN`` if unknown.
        infos: what many of them share.
        joint: of all-to-alls that several kernels run: 2n for the first kernel of number n, 2n + 1 for its others, -1
            for all that are alone; None without any.
        whole_ns: the time of each such all-to-all, from its first start to its last end.
    """

    info: Indices
    num_bytes: Indices
    sequence: Indices
    infos: tuple[CollectiveInfo, ...]
    joint: Indices | None = None
    whole_ns: Indices | None = None

    @classmethod
    def none(cls, number: int) -> Collectives:
        """For this number of kernels, without any information."""
        unknown = np.broadcast_to(np.int64(UNKNOWN), number)
        return cls(np.broadcast_to(np.int64(-1), number), unknown, unknown, ())

    def __getitem__(self, rows: slice | npt.NDArray[Any]) -> Collectives:
        """Those of the selected kernels."""
        joint = None if self.joint is None else self.joint[rows]
        return Collectives(self.info[rows], self.num_bytes[rows], self.sequence[rows], self.infos, joint, self.whole_ns)

    def transfers_ns(self, durations_ns: Indices) -> tuple[npt.NDArray[np.bool_], Indices]:
        """Whether each kernel is the first or only one of its collective, and its collective's time."""
        if self.joint is None or self.whole_ns is None:
            return np.ones(len(self.info), dtype=bool), durations_ns
        first = (self.joint < 0) | (self.joint % 2 == 0)
        return first, np.where(self.joint < 0, durations_ns, self.whole_ns[self.joint // 2])


class _Known(NamedTuple):
    """What arguments give besides size and number; ``width`` is the bytes of an element, None if unknown.

    ``as_sent``: whether what is received may be given as what is sent.
    """

    number: int
    info: CollectiveInfo
    width: int | None
    of_output: bool
    of_both: bool
    as_sent: bool


class KernelMetadata:
    """Reads the arguments of communication kernels; what many of them share is kept once.

    Attributes:
        infos: what collectives share, by number.
    """

    def __init__(self) -> None:
        self.infos: Numbers[CollectiveInfo] = Numbers()
        infos = self.infos
        apart: Memo[tuple[Any, ...], _Known] = Memo(_known)
        self._known: Memo[tuple[Any, ...], _Known] = Memo(lambda key: _with_splits(apart[key[1:]], key[0], infos))

    def describe(self, all_args: Sequence[Args]) -> list[tuple[int, int, int]]:
        """Number of each collective's ``CollectiveInfo``, its bytes and sequence number, from the arguments."""
        if len(self._known) > _MOST_KNOWN:  # each all-to-all may have its own split sizes
            self._known.clear()
        return [
            (
                known.number,
                _size(
                    _elements(args, known)
                    if known.of_both
                    else args.out_elements
                    if known.of_output
                    else args.in_elements,
                    known.width,
                ),
                args.sequence if type(args.sequence) is int and UNKNOWN < args.sequence < 2**63 else UNKNOWN,
            )
            for args, known in zip(all_args, map(self._known.__getitem__, _keys(all_args)), strict=True)
        ]

    def info(self, args: Args) -> CollectiveInfo:
        """The information in a collective's arguments, except its size and number."""
        return self._known[_keys([args])[0]].info


def _known(key: tuple[Any, ...]) -> _Known:
    """What is known without split sizes; the number is not."""
    *texts, size = key
    name, dtype, group, description, ranks = map(safe_text.clean, texts)
    info = CollectiveInfo(name_rules.collective_of(name), group, description, ranks, size)
    of_output, of_both = info.kind in ("all_gather", "gather"), info.kind == ALL_TO_ALL
    return _Known(-1, info, _width(dtype), of_output, of_both, not name.lower().endswith("v"))


def _with_splits(known: _Known, others: tuple[str, str, str] | None, infos: Numbers[CollectiveInfo]) -> _Known:
    """The same with a module and split sizes, of which nearly each all-to-all may have others."""
    info, as_sent = known.info, False
    if others is not None:
        sent, received, module = others
        info = info._replace(module=safe_text.clean(module))
        if known.of_both and sent:
            info = info._replace(sent=numbers_in(sent), received=numbers_in(received), cut="..." in sent + received)
            as_sent = info.cut and sent != received and known.as_sent
    return _Known(infos[info], info, *known[2:5], as_sent)


def _keys(all_args: Sequence[Args]) -> list[tuple[Any, ...]]:
    """What collectives may share: split sizes and module if given, five texts, and the group's size."""
    keys = [
        (
            _seldom_given(args),
            args.collective, args.dtype, args.group, args.group_description, args.group_ranks, args.group_size,
        )
        for args in all_args
    ]  # fmt: skip
    _, *texts, sizes = ({*map(type, column)} for column in zip(*keys, strict=True))
    if set().union(*texts) == {str} and sizes == {int}:
        return [key if key[-1] > 0 else (*key[:-1], None) for key in keys]
    return [
        (splits, *map(_text, texts), size if type(size) is int and size > 0 else None) for splits, *texts, size in keys
    ]  # equal numbers may have different types


def _seldom_given(args: Args) -> tuple[str, str, str] | None:
    if args.in_splits in _NO_SPLITS:
        return None if args.module is None else ("", "", _text(args.module))
    return _text(args.in_splits), _text(args.out_splits), _text(args.module)


def numbers_in(splits: str) -> tuple[int, ...]:
    """Split sizes or ranks from torch's text; empty if truncated or malformed."""
    if not _SPLITS.fullmatch(splits):
        return ()
    try:
        return _decode_numbers(splits)
    except msgspec.DecodeError:  # numbers that begin with 0 are not JSON
        return tuple(map(int, splits[1:-1].split(",")))


def _elements(args: Args, known: _Known) -> Any:
    """The number of elements that counts as a collective's size."""
    sent, received = args.in_elements, args.out_elements
    if known.info.received and sent == received and sum(known.info.sent) == sent:
        received = sum(known.info.received)  # for lists of tensors, torch gives both as what is sent
    if known.as_sent and sent == received:
        return None
    return max(sent, received) if type(sent) is type(received) is int else sent


def _size(elements: Any, width: int | None) -> int:
    """Bytes of this many elements; ``UNKNOWN`` if unknown."""
    return elements * width if type(elements) is int and 0 <= elements < _MAX_ELEMENTS and width else UNKNOWN


def joint_transfers(
    info: Indices, group: Indices, sequence: Indices, lane: Indices, around: Indices, ran: Intervals
) -> tuple[Indices, Indices]:
    """``joint`` and ``whole_ns`` of the kernels of all-to-alls, in order of time.

    NCCL may run an all-to-all as several kernels, one behind the other on a stream, and no other of its group between
    them. They were launched in one range of torch's (``around``, -1 if unknown), or where that is not known, have one
    number.
    """
    order = np.lexsort((np.arange(len(info)), lane, group))
    sequence, around = sequence[order], around[order]
    continues = np.all([column[1:] == column[:-1] for column in (info[order], lane[order], sequence)], axis=0)
    in_ranges = (around[1:] >= 0) & (around[:-1] >= 0)
    in_one = in_ranges & (around[1:] == around[:-1])
    continues &= in_one | ((sequence[1:] != UNKNOWN) & ~in_ranges)
    begins = np.flatnonzero(np.concatenate(([True], ~continues)))[: len(info)]
    sizes = np.diff(np.append(begins, len(info)))
    starts_ns, ends_ns = ran.start_ns[order], ran.end_ns[order]
    several = sizes > 1
    whole_ns = (np.maximum.reduceat(ends_ns, begins) - starts_ns[begins])[several] if len(info) else starts_ns
    joint = np.empty(len(info), dtype=np.int64)
    joint[order] = np.repeat(np.where(several, 2 * np.cumsum(several) - 1, -1), sizes)
    joint[order[begins[several]]] -= 1
    return joint, whole_ns


def with_groups(infos: Sequence[CollectiveInfo], distributed_info: Any) -> tuple[CollectiveInfo, ...]:
    """Add missing process groups from the file's ``distributedInfo``, which may be of any type."""
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


def input_bytes(name: str, dims: bytes, types: bytes) -> int:
    """Bytes of a collective's first input if that is its size, else ``UNKNOWN``.

    ``dims`` and ``types`` are the inputs' sizes and element types, as text of the file; empty if unknown.
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
