"""Separates the ranks of a merged trace file, so that each is read as its own file.

Tools that merge files for a viewer mark the rank of each event: in the process's id (``[TP01] 17``, or the id plus a
thousand for each rank), or as ``args.rank``. Devices, threads and correlation numbers are the same on all ranks.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from overlap_callbacks.analysis import name_rules, safe_text
from overlap_callbacks.analysis.kernels.impossible import CLOCKS_NS
from overlap_callbacks.traces.collect import CATEGORIES, LAUNCH, NOTE, OLD_RANGE, OPERATOR, ROW, Memo, hashable, is_step
from overlap_callbacks.traces.columns import Array
from overlap_callbacks.traces.device_events import device_number
from overlap_callbacks.traces.events import Event, nanoseconds
from overlap_callbacks.traces.sources import natural
from overlap_callbacks.traces.stream import EventStream
from overlap_callbacks.traces.trace import MOST_RANKS

_LABEL = re.compile(r"(?i)\[\s*([^\]]+?)\s*\]|(rank[\s_#:=-]*\d+)(?!\d)|^([a-z][\w-]*?\d+)[\s/:.|-]+\d+$")
# Processes' ids are raised by at least this much per rank.
_LEAST_RAISE = 100
# A process with a smaller fraction of the kernels or launches is damage.
_LEAST_SHARE = 0.05
# A process with a smaller fraction of the operators that does not communicate is a worker, such as a data loader's.
_LEAST_OPERATORS = 0.25
_MOST_NAMED = 8
_NEVER = 2**63
# Fractions of the kernels: the process that launched them has at least the first, any other less than the second.
_NEARLY_ALL, _CLEARLY = 0.95, 0.9
# Fraction of launch numbers that occur twice in joined files.
_JOINED = 0.25

# Identifies a rank: its number, a label, or the process's unit.
Key = Any
_Host = TypeVar("_Host")
_Document = TypeVar("_Document", bound=EventStream)


class MergedArgs(msgspec.Struct, gc=False):
    """``args`` of any event that help to identify its rank."""

    device: Any = None
    correlation: Any = None
    rank: Any = None


class Unit(NamedTuple):
    """Identifies an event's rank: its process, and ``args.rank`` if it has one."""

    process: int | str
    rank: int | None


@dataclass
class Seen:
    """The events of one unit: starts of kernels by device and correlation number, starts of launches, other counts."""

    kernels: dict[int, list[tuple[Any, int]]] = field(default_factory=lambda: defaultdict(list))
    launches: dict[Any, int] = field(default_factory=dict)
    steps: int = 0
    operators: int = 0
    communicates: bool = False

    @property
    def num_kernels(self) -> int:
        return sum(map(len, self.kernels.values()))


class Ranks(NamedTuple):
    """The ranks of a file.

    Attributes:
        numbers: of each; all None if unknown.
        names: the last part of each one's path.
        of_unit: position of each unit's rank; other events are left out.
        by: what distinguishes them, in words.
        by_args: whether that needs the events' arguments.
        on_device: whether they have device kernels.
    """

    numbers: tuple[int | None, ...]
    names: tuple[str, ...]
    of_unit: Mapping[Unit, int]
    by: str
    by_args: bool
    on_device: bool

    def split(self, events: Sequence[Event], stream: EventStream) -> Iterator[tuple[int, list[Event]]]:
        """Yields positions of ranks with their events."""
        found: dict[int, list[Event]] = defaultdict(list)
        if self.by_args:
            units: Iterable[Unit] = map(_unit, events, stream.args_of(events, MergedArgs))
        else:
            of_process: Memo[int | str, Unit] = Memo(lambda process: Unit(_process(process), None))
            units = [of_process[hashable(event.pid)] for event in events]
        for event, unit in zip(events, units, strict=True):
            place = self.of_unit.get(unit)
            if place is not None:
                found[place].append(event)
        yield from found.items()

    def document(self, stream: _Document, place: int) -> _Document:
        """The file as if it were of one rank."""
        own = copy.copy(stream)
        own.path = stream.path / self.names[place]
        own.problems = [*stream.problems, f"the file holds {len(self.names)} ranks, distinguished by {self.by} [OC756]"]
        info = stream.head.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        size, ranks = info.get("world_size"), [rank for rank in self.numbers if rank is not None]
        own.head = {key: value for key, value in stream.head.items() if key != "distributedInfo"}
        if ranks:
            size = size if type(size) is int and size > max(ranks) else None
            own.head["distributedInfo"] = {**info, "rank": self.numbers[place], "world_size": size}
        return own


def may_be_merged(
    places: set[tuple[int | str, int, int | str]],
    launching: set[int | str],
    stepping: set[tuple[int | str, int | str]],
) -> bool:
    """Whether a file may be merged, by the processes of its kernels, launches and steps.

    ``places`` are process, device and ``args.rank`` of the kernels. In a file of one process, each device is a separate
    process.
    """
    if len(launching) > 1 or len(stepping) > 1:
        return True
    return len(places) > 1 and (
        len({rank for _, _, rank in places}) > 1 or any([process != device for process, device, _ in places])
    )


class Survey:
    """Surveys a file for marks of its ranks; on request also the many operators."""

    def __init__(self, steps: re.Pattern[str] | None, *, by_operators: bool = False) -> None:
        self._steps = steps
        self._groups = (ROW, LAUNCH, NOTE, OLD_RANGE, *((OPERATOR,) if by_operators else ()))
        self.units: dict[Unit, Seen] = defaultdict(Seen)
        # Once the ranks are known, the processes that are none of them, in one sentence.
        self.left_out: list[str] = []

    def take(self, events: Sequence[Event], stream: EventStream) -> None:
        """Look at the events of a piece."""
        timed = [event for event in events if event.ph == "X" and CATEGORIES.get(event.cat) in self._groups]
        for event, args in zip(timed, stream.args_of(timed, MergedArgs), strict=True):
            seen, group = self.units[_unit(event, args)], CATEGORIES[event.cat]
            start_ns = nanoseconds(event.ts)
            correlation = args.correlation if args is not None and type(args.correlation) is int else 0
            if group == ROW:
                device = args.device if args is not None and type(args.device) is int else event.pid
                seen.kernels[device_number(device)].append((correlation, start_ns or 0))
            elif group == LAUNCH and correlation and start_ns is not None:
                seen.launches.setdefault(correlation, start_ns)
            elif group in (NOTE, OLD_RANGE):
                seen.steps += is_step(event.name or "", self._steps)
                seen.communicates |= name_rules.is_communication_range(event.name or "")
            seen.operators += group in (OPERATOR, OLD_RANGE)

    def ranks(self) -> Ranks | None:
        """The ranks; None if the file is of one.

        Raises:
            ValueError: it has several, and events cannot be assigned to them; the message says why.
        """
        units = dict(self.units)
        running = _most({unit: seen.num_kernels for unit, seen in units.items()})
        found = _of_kernels(running, units) if running else _of_steps(units)
        several = len({*found.keys.values()}) > 1
        keys = _with_hosts(found, units) if several else found.keys
        if several or not running:  # all kernels of one rank count
            self.left_out = _left_out([unit for unit in units if unit not in keys], units)
        if not several:
            return None
        numbers = _numbers(found)
        order = sorted(dict.fromkeys(found.keys.values()), key=lambda key: (numbers[key] or 0, natural(str(key))))
        names = [f"rank{numbers[key]}" if numbers[key] is not None else _file_name(key) for key in order]
        return Ranks(
            tuple([numbers[key] for key in order]),
            tuple(names),
            {unit: order.index(key) for unit, key in keys.items()},
            found.by,
            any([unit.rank is not None for unit in units]),
            bool(running),
        )


class _Found(NamedTuple):
    """The key of each unit with kernels, one per rank; how much ids are raised per rank, or 0."""

    keys: dict[Unit, Key]
    by: str
    raised: int = 0


def _of_kernels(running: Sequence[Unit], units: Mapping[Unit, Seen]) -> _Found:
    found = _marked(running) or _raised(running, units) or _by_launches(running, units)
    if len({*found.keys.values()}) > 1:
        _check(found, units)
    return found


def _of_steps(units: Mapping[Unit, Seen]) -> _Found:
    """Without device kernels, each process with steps is a rank; without steps, each with operators."""
    stepping = _most({unit: seen.steps for unit, seen in units.items()})
    if not stepping:
        working = {unit: seen.operators for unit, seen in units.items() if seen.operators}
        often = {*_most(working, _LEAST_OPERATORS)}
        if _marked([*working]):
            often.update(working)
        stepping = [unit for unit in working if unit in often or units[unit].communicates]
    keys = {unit: _label(unit.process) or Unit(unit.process, None) for unit in stepping}
    return _marked(stepping) or _Found(keys, "their process ids")


def _left_out(others: Sequence[Unit], units: Mapping[Unit, Seen]) -> list[str]:
    """Says which processes are no ranks, though they did something."""
    named = [unit for unit in others if units[unit].num_kernels or units[unit].steps or units[unit].operators]
    if not named:
        return []
    words = ", ".join([_words(Unit(unit.process, None)) for unit in named[:_MOST_NAMED]])
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    counts, are = ("counts", "is") if len(named) == 1 else ("count", "are")
    return [
        f"{words}{more} {counts} for no rank and {are} left out: far fewer kernels, steps or operators than the ranks "
        "have [OC757]"
    ]


def _marked(units: Sequence[Unit]) -> _Found | None:
    """Ranks by a mark that all units have: ``args.rank``, else a label in the process's id; None without one."""
    marks: dict[str, list[Key]] = {
        "args.rank": [unit.rank for unit in units],
        "their process ids": [_label(unit.process) for unit in units],
    }
    for by, keys in marks.items():
        if None not in keys and len({*keys}) > 1:
            return _Found(dict(zip(units, keys, strict=True)), by)
    return None


def _raised(running: Sequence[Unit], units: Mapping[Unit, Seen]) -> _Found | None:
    """Ranks whose processes were raised by a power of ten; None if they were not."""
    offsets: dict[Unit, int] = {}
    for unit in running:
        devices = [*units[unit].kernels]
        if type(unit.process) is not int or len(devices) > 1 or unit.process < devices[0]:
            return None
        offsets[unit] = unit.process - devices[0]
    raised = _LEAST_RAISE
    if len({*offsets.values()}) < 2 or any([offset % raised for offset in offsets.values()]):
        return None
    while not any([offset % (10 * raised) for offset in offsets.values()]):
        raised *= 10
    return _Found({unit: offset // raised for unit, offset in offsets.items()}, "their process ids", raised)


def _by_launches(running: Sequence[Unit], units: Mapping[Unit, Seen]) -> _Found:
    """Ranks that are identified only by the processes that launched the kernels; each must have devices of its own.

    If kernels and launches share a process id, which is the rank in some files, that is enough.
    """
    launching = _most({unit: len(seen.launches) for unit, seen in units.items()})
    own = {Unit(unit.process, None) for unit in running}
    if 1 < len(own) == len(running) and own == {Unit(host.process, None) for host in launching}:
        return _Found({unit: Unit(unit.process, None) for unit in running}, "their process ids")
    on_device: dict[int, set[Unit]] = defaultdict(set)
    for unit in running:
        for device in units[unit].kernels:
            on_device[device].add(unit)
    for device, found in on_device.items():
        if len(found) > 1 and (len(launching) > 1 or _share_numbers([units[unit].kernels[device] for unit in found])):
            marked = {unit.rank for unit in found}
            what = (
                f"all are marked as rank {marked.pop()}"
                if len(marked) == 1 and None not in marked
                else "not all are marked with a rank"
            )
            raise ValueError(f"{len(found)} processes ran kernels on device {device}, and {what}")
    numbers = {number for host in launching for number in units[host].launches}
    ran = {number for unit in running for kernels in units[unit].kernels.values() for number, _ in kernels}
    if len(launching) < 2 or numbers.isdisjoint(ran):
        return _Found(dict.fromkeys(running), "")
    keys: dict[Unit, Key] = {}
    for unit in running:
        for device, kernels in units[unit].kernels.items():
            scores = {host: _launched(kernels, units[host].launches) for host in launching}
            host, known = _clearly(scores), sum([number in numbers for number, _ in kernels])
            key = Unit(host.process, None) if host is not None and scores[host] >= _NEARLY_ALL * known else None
            if key is None or keys.setdefault(unit, key) != key:
                raise ValueError(
                    f"{len(launching)} processes launched kernels, and nothing tells which launched those of "
                    f"device {device}"
                )
    return _Found(keys, "the processes that launched their kernels")


def _check(found: _Found, units: Mapping[Unit, Seen]) -> None:
    """Raise a ValueError if marks of kernels contradict each other."""
    ranks: dict[Key, set[int]] = defaultdict(set)
    keys: dict[int, set[Key]] = defaultdict(set)
    on_device: dict[tuple[Key, int], set[int | str]] = defaultdict(set)
    for unit, key in found.keys.items():
        if unit.rank is not None:
            ranks[key].add(unit.rank)
            keys[unit.rank].add(key)
        for device in units[unit].kernels:
            on_device[key, device].add(unit.process)
    for key, marked in ranks.items():
        if len(marked) > 1:
            raise ValueError(f"the kernels of {_words(key)} are marked with {len(marked)} ranks")
    for (key, device), processes in on_device.items():
        if len(processes) > 1:
            number, word = len(processes), _words(key)
            raise ValueError(f"{number} processes ran kernels on device {device}, and all are marked as {word}")
    for rank, of_rank in keys.items():
        if len(of_rank) > 1:
            raise ValueError(f"{len(of_rank)} processes are marked as rank {rank}")


def _with_hosts(found: _Found, units: Mapping[Unit, Seen]) -> dict[Unit, Key]:
    """The key of each unit, including host processes."""
    keys = dict(found.keys)
    of_mark: dict[Any, Key] = {key: key for key in found.keys.values() if isinstance(key, Unit)}
    for unit, key in found.keys.items():
        of_mark.update({mark: key for mark in (unit.rank, _label(unit.process)) if mark is not None})
    for unit in units:
        for mark in (unit.rank, _label(unit.process), Unit(unit.process, None)):
            if mark in of_mark:
                keys.setdefault(unit, of_mark[mark])
    _with_processes(keys, units)
    launching = _most({unit: len(seen.launches) for unit, seen in units.items()})
    still_open = [unit for unit in launching if unit not in keys]
    having = {keys[unit] for unit in launching if unit in keys}
    without = [key for key in dict.fromkeys(found.keys.values()) if key not in having]
    if still_open:
        keys.update(_hosts_of(still_open, without, found, units))
        _with_processes(keys, units)
    return keys


def _with_processes(keys: dict[Unit, Key], units: Mapping[Unit, Seen]) -> None:
    """Add the other units of a process whose known units are of one rank."""
    of_process: dict[int | str, set[Key]] = defaultdict(set)
    for unit, key in keys.items():
        of_process[unit.process].add(key)
    for unit in units:
        if unit not in keys and len(of_process[unit.process]) == 1:
            (keys[unit],) = of_process[unit.process]


def _hosts_of(hosts: Sequence[Unit], keys: Sequence[Key], found: _Found, units: Mapping[Unit, Seen]) -> dict[Unit, Key]:
    """The keys of host processes, by the kernels that they launched."""
    some = f"{len(hosts)} process{'es' if len(hosts) > 1 else ''}"
    untold = ValueError(f"{some} launched kernels, and nothing tells which launched those of each of {len(keys)} ranks")
    if len(hosts) != len(keys):
        raise untold
    if found.raised and all([type(host.process) is int for host in hosts]):
        of_key: Any = sorted(keys)
        in_order: list[tuple[Any, Any]] = list(zip(of_key, sorted(hosts, key=lambda host: host.process), strict=True))
        left = [host.process - found.raised * key for key, host in in_order]
        if min(left) >= 0 and max(left) - min(left) < found.raised:  # no other order has ids this close together
            return {host: key for key, host in in_order}
    kernels: dict[Key, list[tuple[Any, int]]] = defaultdict(list)
    for unit, key in found.keys.items():
        kernels[key] += itertools.chain.from_iterable(units[unit].kernels.values())
    best = {_clearly({host: _launched(kernels[key], units[host].launches) for host in hosts}): key for key in keys}
    if None in best or len(best) < len(keys):
        raise untold
    return {host: key for host, key in best.items() if host is not None}


def are_joined(launched: Array, ran: Array) -> bool:
    """Whether many launches and kernels have duplicate numbers, which are unique in one process.

    Kernels of a graph share the number of their one launch.
    """
    for numbers in (launched, ran):
        known = np.sort(numbers[numbers > 0], kind="stable")  # fast, as they mostly ascend in a file
        if np.count_nonzero(known[1:] == known[:-1]) <= _JOINED * len(numbers):
            return False
    return True


def _share_numbers(kernels: Sequence[Sequence[tuple[Any, int]]]) -> bool:
    """Whether any number occurs in several of these; if not, one process may have run them all."""
    numbers = [{number for number, _ in own if number} for own in kernels]
    return sum(map(len, numbers)) > len(set[Any]().union(*numbers))


def _launched(kernels: Iterable[tuple[Any, int]], launches: Mapping[Any, int]) -> int:
    """How many kernels were launched here, before they began or, as clocks differ, shortly after."""
    return sum([launches.get(number, _NEVER) <= start_ns + CLOCKS_NS for number, start_ns in kernels if number])


def _clearly(scores: Mapping[_Host, int]) -> _Host | None:
    """The one with by far the most, if any."""
    first, *others = sorted(scores, key=lambda host: -scores[host])
    return first if scores[first] and all([scores[host] < _CLEARLY * scores[first] for host in others]) else None


def _most(numbers: Mapping[Unit, int], share: float = _LEAST_SHARE) -> list[Unit]:
    """The units with enough of the events not to be damage."""
    least = share * max(numbers.values(), default=0)
    return [unit for unit, number in numbers.items() if number and number >= least]


def _numbers(found: _Found) -> dict[Key, int | None]:
    """The rank of each key: the given one, else the first unique number in its label; for all keys or none."""
    keys = dict.fromkeys(found.keys.values())
    in_labels = {key: [int(digits) for digits in re.findall(r"\d{1,9}", key)] for key in keys if isinstance(key, str)}
    columns = zip(*in_labels.values(), strict=False)
    unique = next((column for column in columns if len({*column}) == len(in_labels)), ())
    numbers: dict[Key, int] = dict(zip(in_labels, unique, strict=False))
    if found.raised:
        numbers = {key: key for key in keys}
    numbers.update({key: unit.rank for unit, key in found.keys.items() if unit.rank is not None})
    return {key: numbers[key] for key in keys} if len({*numbers.values()}) == len(keys) else keys


def _unit(event: Event, args: MergedArgs | None) -> Unit:
    return Unit(_process(hashable(event.pid)), _rank(args.rank) if args is not None else None)


def _process(process: int | str) -> int | str:
    text = str(process)
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 18 else process


def _rank(rank: Any) -> int | None:
    number = _process(hashable(rank))
    return number if type(number) is int and 0 <= number < MOST_RANKS else None


def _label(process: int | str) -> str | None:
    """The mark of a rank in the id of a process: ``TP01`` of ``[TP01] 17``."""
    matched = _LABEL.search(process) if isinstance(process, str) else None
    return None if matched is None else matched[1] or matched[2] or matched[3]


def _file_name(key: Key) -> str:
    return safe_text.clean(f"process{key.process}" if isinstance(key, Unit) else str(key)).replace("/", "_")[:80]


def _words(key: Key) -> str:
    if isinstance(key, int):
        return f"rank {key}"
    return f"process {safe_text.clean(str(key.process if isinstance(key, Unit) else key))[:80]}"
