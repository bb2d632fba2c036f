"""Assigns the files of one job to cycles: a profiler that keeps running writes files of all ranks in each cycle."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

# A folder or a file of a cycle, as ``iteration_10``: its number stands after one of these words.
_CYCLE = re.compile(
    r"(?i)(?<![a-z])((iter(?:ation)?|(?:global[_-]?)?step|cycle|epoch|batch|window|profile|round)s?[\s_=:.-]*(\d{1,18}))"
)
# A folder or a file of a cycle may have a bare number too.
_NUMBER = re.compile(r"(\d{1,18})(?:\.\D.*)?")
_RANK = re.compile(r"(?i)rank[\s_=:.-]*(\d{1,7})(?!\d)")
# Files of TensorBoard's handler have the worker and the time in their names.
_HANDLER = re.compile(r"(.+)\.(\d{10,19})\.pt\.trace\.json(?:\.\w+)?")


class File(NamedTuple):
    """A file, or one rank in it: its path, its rank, and the number of its first step."""

    path: str
    rank: int | None
    first_step: int | None


def cycles_of(files: Sequence[File]) -> list[str]:
    """The cycle of each file; empty unless the files are of one job in several cycles.

    Each rank appears at most once per cycle, and some appear in several.
    """
    for word in dict.fromkeys(found[1].lower() for file in files for found in _CYCLE.findall(file.path)):
        numbers = [[found for found in _CYCLE.findall(file.path) if found[1].lower() == word] for file in files]
        if all(numbers):
            texts = [found[-1][0] for found in numbers]
            members = _members(files, [file.path.replace(text, "") for file, text in zip(files, texts, strict=True)])
            cycles = [int(found[-1][2]) for found in numbers]
            if _fits(members, cycles):
                text_of = dict(zip(cycles, texts, strict=True))
                return [text_of[cycle] for cycle in cycles]
    return _of_handler(files) or _of_bare_numbers(files)


def _of_handler(files: Sequence[File]) -> list[str]:
    """The same of files of TensorBoard's handler: by their first steps, else by the time in their names."""
    names = [[found for part in Path(file.path).parts if (found := _HANDLER.fullmatch(part))] for file in files]
    if not all(names):
        return []
    workers = [found[-1][1] for found in names]
    members = _members(files, workers)
    if len({*zip(members, workers, strict=True)}) > len({*members}):  # a rank in another process: the job restarted
        return []
    steps = [file.first_step for file in files]
    known = [step for step in steps if step is not None]
    if len(known) == len(files) and _fits(members, known):
        cycles = known
    else:
        cycles = _in_turn(members, [int(found[-1][2]) for found in names])
    place_of = {cycle: place for place, cycle in enumerate(sorted({*cycles}), start=1)}
    return [f"cycle {place_of[cycle]}" for cycle in cycles] if _fits(members, cycles) else []


def _of_bare_numbers(files: Sequence[File]) -> list[str]:
    """The same of folders or files such as ``10/rank0.json``. A number alone may be that of a rank or a job too.

    So the first steps of the files, where known, must rise with it.
    """
    if not all([file.rank is not None or _RANK.search(file.path) for file in files]):
        return []
    paths = [Path(file.path).parts for file in files]
    for depth in range(1, min(map(len, paths)) + 1):
        numbers = [_NUMBER.fullmatch(parts[-depth]) for parts in paths]
        if None in numbers:
            continue
        cycles = [int(found[1]) for found in numbers if found is not None]
        members = _members(files, [(*parts[:-depth], *parts[len(parts) - depth + 1 :]) for parts in paths])
        together = len({*cycles}) < len(cycles) or len({*members}) == 1  # else the numbers may be times
        pairs = zip(cycles, [file.first_step for file in files], strict=True)
        known = sorted({(cycle, step) for cycle, step in pairs if step is not None})
        rise = all([step < later or cycle == following for (cycle, step), (following, later) in pairwise(known)])
        if together and rise and _fits(members, cycles):
            return [f"cycle {cycle}" for cycle in cycles]
    return []


def _members(files: Sequence[File], others: Sequence[Hashable]) -> list[Hashable]:
    """The rank of each file, or what else names it."""
    return [other if file.rank is None else file.rank for file, other in zip(files, others, strict=True)]


def _in_turn(members: Sequence[Hashable], times: Sequence[int]) -> list[int]:
    """A cycle ends before the first file of a rank that is in it already."""
    cycles, here, number = [0] * len(times), set[Hashable](), 0
    for place in sorted(range(len(times)), key=lambda place: times[place]):
        if members[place] in here:
            here, number = set(), number + 1
        here.add(members[place])
        cycles[place] = number
    return cycles


def _fits(members: Sequence[Hashable], cycles: Sequence[int]) -> bool:
    once = Counter(zip(cycles, members, strict=True)).most_common(1)[0][1] == 1
    return once and len({*cycles}) > 1 and len({*members}) < len(members)


def ranks_in_names(paths: Sequence[str]) -> list[int]:
    """The rank in the name of each file; empty unless each has one of its own."""
    ranks = [int(found[-1]) for path in paths if (found := _RANK.findall(path))]
    return ranks if len({*ranks}) == len(paths) else []


def in_order(cycles: Sequence[str], ranks: Sequence[int | None]) -> Mapping[str, list[int]]:
    """The positions of each cycle's files, by cycle, then by rank if all are known."""
    numbers = {cycle: int(re.findall(r"\d+", cycle)[-1]) for cycle in cycles}
    known = None not in ranks
    places: dict[str, list[int]] = defaultdict(list)
    for place in sorted(range(len(cycles)), key=lambda i: (numbers[cycles[i]], (ranks[i] or 0) if known else 0)):
        places[cycles[place]].append(place)
    return places
