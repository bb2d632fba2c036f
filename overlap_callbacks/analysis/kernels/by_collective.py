"""Times of communication kernels, grouped by the gate's log: dimension, collective, single call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.dimension_rules import UNKNOWN
from overlap_callbacks.analysis.intervals import Intervals
from overlap_callbacks.analysis.kernels.alignment import Alignment
from overlap_callbacks.analysis.kernels.attribution import labels_of
from overlap_callbacks.analysis.kernels.calls import ALONE_SHARE
from overlap_callbacks.analysis.kernels.device_time import on_critical_path_ns
from overlap_callbacks.analysis.kernels.exposure import exposure_of
from overlap_callbacks.analysis.kernels.issued import SEND_RECV, Issued, IssuedCollective
from overlap_callbacks.analysis.kernels.receives import Transfers
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.analysis.results.arrivals import ALL_TO_ALL, MAX_BINS, CollectiveCalls, ProfiledStep, name_code
from overlap_callbacks.analysis.results.exposure import UNKNOWN_SIZE, ExposureSums, Label
from overlap_callbacks.analysis.results.window import DimensionTime
from overlap_callbacks.analysis.sums import grouped, same_or

# What is sent: kinds of collectives on groups, and kinds of messages with a peer.
MAX_ROWS, MAX_MESSAGES = 32, 16

# Operator and name of the group.
CollectiveKey = tuple[str, str]


def dimension_times(
    aligned: Alignment, overlapped: Sequence[int], sequential: Sequence[int], recorded: Sequence[IssuedCollective]
) -> tuple[DimensionTime, ...]:
    """The communication of each dimension in a profile and the recorded step, per step, the most time first."""
    kernels, (dimension, labels) = aligned.kernels, aligned.dimensions
    compute = kernels.union_of(Kind.COMPUTE)
    messages, bytes_in = Counter[str](), Counter[str]()
    for collective in recorded:
        messages[collective.dimension] += 1
        bytes_in[collective.dimension] += collective.bytes_in
    times = []
    for name in dict.fromkeys((*labels, *messages)):
        rows = dimension == (labels.index(name) if name in labels else -2)  # -2 matches no row
        ov, seq = (kernels.intervals[rows & np.isin(kernels.step, steps)] for steps in (overlapped, sequential))
        busy = ov.union()
        of_overlapped = (busy.sum_ns, busy.sum_ns - int(busy.covered_ns(compute).sum()), ov.sum_ns)
        comm_ms, exposed_ms, kernels_ms = (time_ns / max(len(overlapped), 1) / 1e6 for time_ns in of_overlapped)
        isolated_ms = seq.sum_ns / max(len(sequential), 1) / 1e6
        times.append(DimensionTime(name, messages[name], bytes_in[name], comm_ms, exposed_ms, kernels_ms, isolated_ms))
    return tuple(sorted(times, key=lambda time: -time.comm_ms))


def exposed_collectives(aligned: Alignment, numbers: Mapping[int, int]) -> ExposureSums:
    """Exposed and hidden time of the collectives of some steps; ``numbers`` are those of the steps, by their index."""
    kernels = aligned.kernels
    labels: dict[Label, int] = {}
    rows = np.flatnonzero((kernels.kind == Kind.COMMUNICATION) & np.isin(kernels.step, list(numbers)))
    label, size = np.zeros(len(rows), dtype=np.int64), np.full(len(rows), UNKNOWN_SIZE)
    names = [""] * len(rows)
    for place, row in enumerate(rows.tolist()):
        found = Label(kernels.collectives[kernels.collective[row]], "", 0)
        part = aligned.by_row.get(row)
        if part is not None:
            ranks = aligned.groups[part.group].ranks if part.group else ()
            dimension = "" if part.dimension == UNKNOWN else part.dimension
            found = Label(part.kind or found.collective, dimension, len(ranks))
            names[place] = part.name
            size[place] = 0 if part.kind == "barrier" else part.size_bytes or UNKNOWN_SIZE
        label[place] = labels.setdefault(found, len(labels))
    path_ns = on_critical_path_ns(kernels, list(numbers))
    return exposure_of(
        kernels, kernels.union_of(Kind.COMPUTE), rows, label, list(labels), size, numbers, names,
        None if path_ns is None else path_ns[rows],
    )  # fmt: skip


def kernel_times_by_collective(kernels: KernelTable, issued: Issued) -> dict[CollectiveKey, float]:
    """Time of the kernels of each collective, per step, in milliseconds.

    Kernels show a kind, but no group. So only collectives count whose kind one operator on one group alone has, with a
    kernel for each, in every step. ``issued`` is what each sequential step issued, by its index.
    """
    counts = {  # a group of one rank has no kernels
        step: Counter([(call.operator, call.group.name) for call in calls if call.group_size > 1])
        for step, calls in issued.items()
    }
    of_kind: dict[str, set[CollectiveKey]] = defaultdict(set)
    for key in {key for count in counts.values() for key in count}:
        of_kind[name_rules.collective_of(key[0])].add(key)
    times = {}
    for kind, (key, *others) in of_kind.items():
        rows = kernels.runs(kind)
        in_steps = {step: rows & (kernels.step == step) for step in counts}
        if not others and all(np.count_nonzero(in_steps[step]) == count[key] for step, count in counts.items()):
            total_ns = sum(kernels.intervals[in_step].sum_ns for in_step in in_steps.values())
            times[key] = total_ns / len(counts) / 1e6
    return times


# -- single calls, to compare with other ranks


class _Key(NamedTuple):
    """What is compared with other ranks. For messages, ``group`` names both ranks and what they send each other.

    ``first_rank`` is the lowest of the group, -1 if unknown; ``alike`` as in ``CollectiveCalls``.
    """

    first_rank: int
    group: str
    kind: str
    group_size: int
    dimension: str
    alike: str = ""


# Rows of the profile of each step, by its index.
_Rows = dict[_Key, dict[int, list[int]]]
_Times = npt.NDArray[np.float64]


def collective_calls(
    aligned: Alignment, steps: Mapping[int, ProfiledStep], rank: int, transfers: Transfers
) -> tuple[CollectiveCalls, ...]:
    """The kernels of each kind of collective on each group, in the steps that count, which ``steps`` has by index.

    All ranks of a group choose and divide them in one way.
    """
    kernels = aligned.kernels
    rows: _Rows = defaultdict(lambda: defaultdict(list))
    for row, part in aligned.by_row.items():
        step = int(kernels.step[row])
        if step in steps and part.group and part.kind not in (SEND_RECV, "barrier"):
            ranks = aligned.groups[part.group].ranks
            if len(ranks) > 1:
                rows[_Key(min(ranks), part.group, part.kind, len(ranks), part.dimension)][step].append(row)
    # Gloo's send ends before the message arrives.
    messages = _message_rows(aligned, steps, rank, transfers) if aligned.on_device else {}
    order = sorted(steps, key=lambda step: steps[step].number)
    label, labels = labels_of(kernels)
    compute = kernels.union_of(Kind.COMPUTE)
    both = ((kernels.kind == Kind.COMPUTE) | (kernels.kind == Kind.COPY)) & (label >= 0)
    families = {
        labels[code]: kernels.intervals[both & (label == code)].union() for code in np.unique(label[both]).tolist()
    }
    with_copies = compute.with_others(*[families[name] for name in name_rules.COPIES if name in families]).union()
    found = []
    for key, by_step in (*_by_number(rows)[:MAX_ROWS], *_by_number(messages)[:MAX_MESSAGES]):
        having = [place for place, step in enumerate(order) if step in by_step]
        start_ns = kernels.intervals.start_ns
        of_steps = np.array([sorted(by_step[order[place]], key=lambda row: start_ns[row]) for place in having])
        calls = kernels.intervals[of_steps.ravel()]
        number = of_steps.shape[1]

        def binned(values: Indices, having: Sequence[int] = having, number: int = number) -> _Times:
            num_bins = min(number, MAX_BINS)
            starts = -(-np.arange(num_bins) * number // num_bins)
            table = np.zeros((len(order), num_bins))
            table[having] = np.add.reduceat(values.reshape(-1, number).astype(float), starts, axis=1)
            return table

        one = [] if key.alike else [aligned.by_row[row] for row in of_steps[0].tolist()]
        times, hidden = binned(calls.durations_ns), binned(calls.covered_ns(compute))
        by_family = {family: binned(calls.covered_ns(busy)) for family, busy in families.items()}
        sizes = b""
        if key.kind == ALL_TO_ALL:
            shares = [aligned.by_row[row].size_bytes for row in of_steps.ravel().tolist()]
            sizes = binned(np.array(shares)).astype(np.float32).tobytes()
        copies = [covered for family, covered in by_family.items() if family in name_rules.COPIES and covered.any()]
        if copies and not key.alike:
            # As in ``attribution``: not what ran beside the same share of a call in sequential steps too.
            of_sequential = [place for place in having if steps[order[place]].sequential]
            copied = np.sum(copies, axis=0)
            for covered in copies:
                if of_sequential:
                    there, alone = (part[of_sequential].mean(axis=0) for part in (covered, times))
                    covered -= times * there / np.where(alone > 0, alone, np.inf)  # noqa: PLW2901
                covered[covered < ALONE_SHARE * times] = 0.0
            left = np.sum(copies, axis=0) / np.where(copied > 0, copied, 1)
            hidden += (binned(calls.covered_ns(with_copies)) - hidden) * left
        # Messages are no victims: in both modes they overlap with compute.
        by_family = {family: covered for family, covered in by_family.items() if covered.any() and not key.alike}
        concurrent = np.stack([*by_family.values()], axis=2) if by_family else np.empty((*hidden.shape, 0))
        total = concurrent.sum(axis=2, keepdims=True)
        found.append(
            CollectiveCalls(
                kind=key.kind,
                group=key.group,
                first_rank=key.first_rank,
                group_size=key.group_size,
                calls=number,
                steps=tuple([steps[step] for step in order]),
                families=tuple(by_family),
                time_us=_in_us(times),
                hidden_us=_in_us(hidden),
                shares=np.rint(255 * concurrent / np.where(total > 0, total, 1)).astype(np.uint8).tobytes(),
                dimension=key.dimension,
                alike=f"{key.alike} x {number}" if key.alike else "",
                open_us=_in_us(binned(_open_ns(kernels, of_steps.ravel(), transfers))) if key.alike else b"",
                sizes=sizes,
                names=_of_bins([name_code(part.kind, part.name) for part in one]),
            )
        )
    return tuple(found)


def _of_bins(codes: Sequence[int]) -> tuple[int, ...]:
    """The names of the bins of a step's calls; 0 where they differ."""
    number, places = len(codes), range(len(codes))
    of_bins = grouped(places, lambda place: place * min(number, MAX_BINS) // number)
    return tuple([same_or(0)([codes[place] for place in of_bin]) for of_bin in of_bins.values()])


def _in_us(times_ns: _Times) -> bytes:
    return (times_ns / 1e3).astype(np.float32).tobytes()


def _by_number(rows: _Rows) -> list[tuple[_Key, dict[int, list[int]]]]:
    """The rows of each key by step, for each number of rows per step; the same on all ranks."""
    found = {
        (key, number): {step: of_step for step, of_step in by_step.items() if len(of_step) == number}
        for key, by_step in rows.items()
        for number in {len(of_step) for of_step in by_step.values()}
    }
    return [(key, found[key, number]) for key, number in sorted(found)]


def _message_rows(aligned: Alignment, steps: Mapping[int, ProfiledStep], rank: int, transfers: Transfers) -> _Rows:
    """The rows of messages with one peer, by both ranks and what they send each other.

    A kernel with several peers ends with the last of them, so its messages cannot be separated.
    """
    rows: _Rows = defaultdict(lambda: defaultdict(list))
    for row, message in transfers.messages.items():
        step, (place, *others) = int(aligned.kernels.step[row]), set(message.peers)
        ranks = aligned.groups[message.group].ranks
        peer = ranks[place] if 0 <= place < len(ranks) else rank
        if step not in steps or others or peer == rank:
            continue
        low, high = sorted((rank, peer))
        sizes = (message.bytes_in, message.bytes_out)
        up, down = sizes if rank == low else sizes[::-1]
        name = f"{message.group}: {up} bytes from {low} to {high}, {down} back"
        alike = f"{up} up, {down} down, {'low' if rank == low else 'high'}"
        rows[_Key(low, name, SEND_RECV, 2, message.dimension, alike)][step].append(row)
    return rows


def _open_ns(kernels: KernelTable, rows: Indices, transfers: Transfers) -> Indices:
    """For messages, when waiting is unknown and nothing else runs, in nanoseconds; shape (len(rows),)."""
    assert transfers.start_ns is not None  # messages are known only with it
    comm = kernels.of(Kind.COMMUNICATION)
    order = np.argsort(comm.start_ns, kind="stable")
    start_ns, end_ns = comm.start_ns[order], comm.end_ns[order]
    latest_ns = np.maximum.accumulate(end_ns)[:-1]
    several = Intervals(start_ns[1:], np.minimum(end_ns[1:], latest_ns))  # some are empty or inverted: a union has none
    others = kernels.union_of(Kind.COMPUTE).with_others(several).union()
    unknown = Intervals(transfers.start_ns[rows], kernels.intervals.end_ns[rows])
    return unknown.durations_ns - unknown.covered_ns(others)
