"""A parsed trace file: its kernels, steps, collectives and job."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.impossible import at_no_time
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind
from overlap_callbacks.traces.checks import likely_communication, problems_of
from overlap_callbacks.traces.collect import Note
from overlap_callbacks.traces.collectives import Collectives, with_groups
from overlap_callbacks.traces.columns import Array
from overlap_callbacks.traces.events import MAX_TIME_NS
from overlap_callbacks.traces.files import Document
from overlap_callbacks.traces.reductions import RepeatedReductions

# No job has more; larger numbers are damage.
MOST_RANKS = 2**31


# What else torch's profiler may record: the field with which newer versions say so, and its name.
RECORDED = {"with_stack": "Python stacks", "record_shapes": "shapes", "profile_memory": "memory"}

_STEP = re.compile(r"ProfilerStep#(\d{1,18})(?!\d)")
# Steps that a sentence names; there may be thousands.
_MAX_NAMED = 8


class TraceStep(msgspec.Struct, frozen=True):
    """A range of the host that is one step, usually ``ProfilerStep#`` followed by its number.

    Attributes:
        cut: whether kernels are or may be missing.
    """

    number: int
    start_ns: int
    end_ns: int
    cut: bool = False

    @property
    def wall_ms(self) -> float:
        """Length of the step on the host, in milliseconds."""
        return (self.end_ns - self.start_ns) / 1e6


class HostCalls(msgspec.Struct, frozen=True):
    """Collectives that host libraries (Gloo, UCC, MPI) run beside a device.

    Attributes:
        ran: their ranges, which may overlap in several threads; shape (n,).
        waited: the part of each that the host waited for; shape (n,).
        name: index into ``names`` of each, e.g. ``gloo:all_reduce``; shape (n,).
    """

    ran: Intervals
    waited: Intervals
    name: Indices
    names: tuple[str, ...]


class Launches(msgspec.Struct, frozen=True):
    """The host's side of the kernels of a trace.

    Attributes:
        launched_ns: when the call that launched each kernel began, -1 if unknown; shape (n,).
        waits: when the host waited for the device, by end.
        streams: the file's stream for each lane of kernels.
        records_waits: whether the file has any call that waits for the device. The profiler makes one at its end, so a
            file without has lost them.
        range_of: index into ``ranges`` of the host range that launched each kernel, -1 for none; shape (n,).
            None if the file has no ranges, or they were not requested.
        ranges: names of ranges of the host.
        captures: when launches were captured into a graph.
        on_host: the collectives of the host; None if the file has none.
    """

    launched_ns: Indices
    waits: Intervals
    streams: tuple[str, ...]
    records_waits: bool
    range_of: Indices | None = None
    ranges: tuple[str, ...] = ()
    captures: Intervals | None = None
    on_host: HostCalls | None = None

    def __getitem__(self, rows: slice) -> Launches:
        """The launches of some kernels."""
        range_of = None if self.range_of is None else self.range_of[rows]
        return msgspec.structs.replace(self, launched_ns=self.launched_ns[rows], range_of=range_of)


@dataclass(frozen=True)
class Trace:
    """One trace file, or a part of it. Columns of a long file are mapped from temporary files.

    Attributes:
        path: the file.
        kernels: its kernels, by device and start; their ``step`` is an index into ``steps``.
        device: number of the device of each kernel; shape (n,).
        steps: its steps, in time order. Without any, the whole file counts as one step.
        collectives: the collective of each kernel.
        on_host: whether it is a CPU job, without kernels of a device.
        rank, world_size: rank in the job and number of its ranks; None if unknown.
        device_names: names of the devices that the file lists, by number.
        problems: what is wrong or doubtful.
        warnings: those of ``problems`` to read before any figure.
        launches: the host's side of the kernels; None of a CPU job.
        recorded: what the profiler recorded besides, which makes launches longer, e.g. ``shapes``.
        lacks: why kernels are missing and no step is known to be whole, e.g. ``is cut off``; empty where they are not.
        reductions: reductions of gradients that the file proves to be repeated, if any.
        overlong: starts of the collectives that ran longer than they can, whose times cannot be compared with those of
            other ranks.
        merged: of a file into which those of several ranks were merged: all of them, of which this is the first.
    """

    path: Path
    kernels: KernelTable
    device: Indices
    steps: tuple[TraceStep, ...]
    collectives: Collectives
    on_host: bool
    rank: int | None
    world_size: int | None
    device_names: dict[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    launches: Launches | None = None
    recorded: tuple[str, ...] = ()
    lacks: str = ""
    reductions: RepeatedReductions | None = None
    overlong: tuple[int, ...] = ()
    merged: tuple[Trace, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether kernels are missing and no step is known to be whole."""
        return bool(self.lacks)

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Whether each step is known to be whole; the last entry is for rows outside steps; shape (steps + 1,)."""
        return np.array([not step.cut for step in self.steps] + [not self.lacks], dtype=bool)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that ran kernels."""
        return tuple(distinct_values(self.device).tolist())

    def by_device(self) -> dict[int, Trace]:
        """One trace per device, with its own times."""
        bounds = np.searchsorted(self.device, [*self.devices, 2**31]).tolist()
        return {
            device: self.part(first, last)
            for device, first, last in zip(self.devices, bounds, bounds[1:], strict=False)
        }

    def part(self, first: int, last: int) -> Trace:
        """A part of the trace, from row ``first`` up to ``last``."""
        rows = slice(first, last)
        kernels = self.kernels[rows]
        if not self.on_host:
            kernels = dataclasses.replace(kernels, call=np.arange(len(kernels)))
        return dataclasses.replace(
            self,
            kernels=kernels,
            device=self.device[rows],
            collectives=self.collectives[rows],
            launches=None if self.launches is None else self.launches[rows],
        )


def trace_of(
    document: Document,
    kernels: KernelTable,
    device: Array,
    steps: tuple[TraceStep, ...],
    collectives: Collectives,
    problems: list[str],
    *,
    launches: Launches | None = None,
    likely: Callable[[], Sequence[str]] | None = None,
    warnings: Sequence[str] = (),
    lacking: frozenset[int] = frozenset(),
    recorded: frozenset[str] = frozenset(),
) -> Trace:
    """A trace with job data from the fields around its events, and what is doubtful.

    ``problems`` are those of the events, and ``warnings`` those to read before any figure. ``likely`` suggests names of
    communication if none is known, by default among the kernels. ``lacking`` are indices of steps that lack kernels, -1
    if any may or the file has no steps. ``recorded`` are those of ``RECORDED`` that events show.
    """
    head, is_cut = document.head, document.is_cut
    problems = [*document.problems, *problems, *problems_of(kernels)]
    rank, world_size = _job(head, problems)
    warnings = [*document.warnings, *warnings]
    steps = tuple([
        msgspec.structs.replace(step, cut=True) if i in lacking or -1 in lacking else step
        for i, step in enumerate(steps)
    ])  # fmt: skip
    held = frozenset(distinct_values(kernels.step).tolist())
    lacks = "lacks kernels" if lacking and all([step.cut for i, step in enumerate(steps) if i in held]) else ""
    if is_cut:
        lacks, words = "is cut off", "the file is cut off, so its totals lack kernels, and their time looks idle"
        steps, named = mark_cut(steps, held)
        warnings.append(f"{words}{named and f': {named}'} [OC720]")
    if world_size is not None and world_size > 1 and not (kernels.kind == Kind.COMMUNICATION).any():
        names = ", ".join(likely() if likely is not None else likely_communication(kernels)) or "none sounds like it"
        what = "nothing" if launches is None or launches.on_host is None else "no kernel"
        warnings.append(
            f"the job has {world_size} ranks, but {what} in this file communicates, by its name; what does can be "
            f"named with --communication REGEX. What looks most like it: {names} [OC721]"
        )
    infos = with_groups(collectives.infos, head.get("distributedInfo"))
    return Trace(
        path=document.path,
        kernels=kernels,
        device=device,
        steps=steps,
        collectives=msgspec.structs.replace(collectives, infos=infos),
        on_host=launches is None,
        rank=rank,
        world_size=world_size,
        device_names=_device_names(head),
        problems=(*warnings, *problems),
        warnings=tuple(warnings),
        launches=launches,
        recorded=tuple(
            [what for key, what in RECORDED.items() if what in recorded or head.get(key) in (1, "1", "true")]
        ),
        lacks=lacks,
    )


def _job(head: dict[str, Any], problems: list[str]) -> tuple[int | None, int | None]:
    """Rank and world size, each None if unknown."""
    info = head.get("distributedInfo")
    if info is None:
        return None, None
    rank, world_size = (info.get(key) if isinstance(info, dict) else None for key in ("rank", "world_size"))
    if type(rank) is not int or not 0 <= rank < MOST_RANKS:  # bool is an int too
        problems.append("the file's distributedInfo cannot be read: its rank is not known [OC725]")
        return None, None
    return rank, world_size if type(world_size) is int and 0 < world_size <= MOST_RANKS else None


def _device_names(head: dict[str, Any]) -> dict[int, str]:
    devices = head.get("deviceProperties")
    names = {}
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("id"), int):
            names[device["id"]] = safe_text.clean(str(device.get("name", "")))
    return names


# -- steps


def steps_of(
    notes: Sequence[Note], pattern: re.Pattern[str] | None = None, ended_ns: int = MAX_TIME_NS
) -> tuple[tuple[TraceStep, ...], list[str]]:
    """The steps, ascending in time, and warnings; of several with one number, the first counts.

    Each ends where the next one begins, or when the profile had ended.

    Args:
        notes: ranges of the host.
        pattern: matches the names of steps. Its first group is the step's number; without a group they are numbered in
            order. None for torch's ``ProfilerStep#``.
        ended_ns: when the profile had ended.
    """
    starts_ns = np.array([note.start_ns for note in notes], dtype=np.int64)
    lost = at_no_time(starts_ns) | np.array([note.end_ns < note.start_ns for note in notes], dtype=bool)
    numbers: dict[int, TraceStep] = {}
    timed = [note for note, without_time in zip(notes, lost.tolist(), strict=True) if not without_time]
    if pattern is None or pattern.groups:
        for note in timed:
            matched = pattern.search(note.name) if pattern else _STEP.match(note.name)
            number = matched.group(1) if matched else None
            if number is not None and number.isdecimal() and len(number) <= 18:
                numbers.setdefault(int(number), TraceStep(int(number), note.start_ns, note.end_ns))
    else:
        ranges = sorted((note.start_ns, note.end_ns) for note in timed if pattern.search(note.name))
        for number, (start_ns, end_ns) in enumerate(ranges):
            numbers[number] = TraceStep(number, start_ns, end_ns)
    steps, warnings = sorted(numbers.values(), key=lambda step: step.start_ns), []
    if len(timed) < len(notes):
        warnings.append(
            f"{len(notes) - len(timed)} steps have no time and are left out: their kernels count in the total alone "
            "[OC722]"
        )
    next_ns = [step.start_ns for step in steps[1:]]
    if any([step.end_ns > begin_ns for step, begin_ns in zip(steps, next_ns, strict=False)]):
        warnings.append("some steps overlap: each ends where the next begins [OC723]")
    if steps and steps[-1].end_ns > ended_ns:
        excess = f"{(steps[-1].end_ns - ended_ns) / 1e6:.3f} ms"
        warnings.append(f"step {steps[-1].number} ends {excess} after the profile: it counts only up to there [OC724]")
    until_ns = [*next_ns, ended_ns]
    return tuple([
        msgspec.structs.replace(step, end_ns=min(step.end_ns, end_ns))
        for step, end_ns in zip(steps, until_ns, strict=False)
    ]), warnings  # fmt: skip


def bounds_of(steps: Sequence[TraceStep]) -> list[tuple[int, int]]:
    """Start and end of each step in nanoseconds."""
    return [(step.start_ns, step.end_ns) for step in steps]


def mark_cut(steps: tuple[TraceStep, ...], held: frozenset[int]) -> tuple[tuple[TraceStep, ...], str]:
    """The steps of a file that is cut off, marked, and words for them; ``held`` are indices of those with kernels.

    Kineto writes the host's threads one by one, then the device's buffers, none in time order. So any step may lack
    kernels.
    """
    if not steps:
        return steps, ""
    missing = [step.number for i, step in enumerate(steps) if i not in held]
    named = "any step may lack some, and none is in a mean"
    if missing:
        named += f"; {named_steps(missing)} {'has' if len(missing) == 1 else 'have'} none"
    return tuple([msgspec.structs.replace(step, cut=True) for step in steps]), named


def named_steps(numbers: Sequence[int]) -> str:
    """Steps in words, by their numbers: ``steps 3, 4``."""
    shown = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"step{'s' if len(numbers) > 1 else ''} {shown}{more}"
