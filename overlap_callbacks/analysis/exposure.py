"""Which collectives are exposed: sums over steps and ranks, and the answer in a sentence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from overlap_callbacks.analysis.formatting import PLAIN, Style, bytes_in_words, count, three_digits, unit_of
from overlap_callbacks.analysis.results.arrivals import name_code
from overlap_callbacks.analysis.results.exposure import (
    FIRST,
    LAST,
    NOWHERE,
    SEVERAL,
    UNKNOWN_SIZE,
    ExposedCollective,
    ExposedSum,
    Exposure,
    ExposureSums,
)
from overlap_callbacks.analysis.sums import distinct, grouped, named_sum, struct_sum, table_sum

# More sizes of one kind and place share a row.
MAX_SIZES = 16
# What is kept: rows, and ranks of each that are exposed most.
MAX_ROWS, _MAX_RANKS = 96, 8
# A step does not count if a row is exposed in it for less than this share of the step where it is exposed most.
_COUNTS = 0.1
# From these shares of the exposed time on, a row has *all* of it, one rank has it *alone*, and a row is named.
_ALL, _ALONE, _NAMED = 0.99, 0.9, 0.1
_MAX_NAMED = 3
# Windows, the last ones that count, over which the page and W&B add up what is exposed.
MAX_WINDOWS = 8
# A name that is only a place: ``all_reduce 3 of 12``; or none at all.
_BY_PLACE = re.compile(r"(\w+ \d+ of \d+)?")
# A row begins or ends the step if no more than this share of the step's compute is before or after it.
_AT_THE_END = 0.1


def _most_exposed(parts: Sequence[dict[int, float]]) -> dict[int, float]:
    ranks = named_sum(sum)(parts).items()
    return dict(sorted(ranks, key=lambda rank: -rank[1])[:_MAX_RANKS])


_add_rows = table_sum(
    ExposedSum, 5, order=lambda row: (-row.exposed_ns, -row.hidden_ns),
    least_bytes=min, most_bytes=max, by_step=named_sum(sum), by_rank=_most_exposed,
)  # fmt: skip


def add_rows(tables: Iterable[Sequence[ExposedSum]]) -> tuple[ExposedSum, ...]:
    """The rows of all tables, the most exposed first; too many sizes of one kind and place become one row."""
    rows = _add_rows(tables)
    most = MAX_SIZES if len(rows) <= MAX_ROWS else 1
    families = grouped([row for row in rows if row.size != UNKNOWN_SIZE], _family)
    many = {key for key, of in families.items() if len(of) > most or SEVERAL in [row.size for row in of]}
    if many:
        rows = _add_rows([[
            msgspec.structs.replace(row, size=SEVERAL) if row.size != UNKNOWN_SIZE and _family(row) in many else row
            for row in rows
        ]])  # fmt: skip
    return rows[:MAX_ROWS]


def _family(row: ExposedSum) -> tuple[Any, ...]:
    """Kind, group and place."""
    return msgspec.structs.astuple(row)[:4]


add_exposures = struct_sum(ExposureSums, steps=distinct, rows=add_rows, names=add_rows)


def of_rank(sums: ExposureSums, rank: int) -> ExposureSums:
    """The sums of one rank, as its own."""

    def own(rows: Sequence[ExposedSum]) -> tuple[ExposedSum, ...]:
        return tuple([msgspec.structs.replace(row, by_rank={rank: row.exposed_ns}) for row in rows])

    return msgspec.structs.replace(sums, num_ranks=1, rows=own(sums.rows), names=own(sums.names))


def of_cycle(sums: ExposureSums, cycle: int, num_cycles: int) -> ExposureSums:
    """The same with steps numbered so that those of two cycles differ."""
    rows, names = (
        tuple(
            [
                msgspec.structs.replace(
                    row, by_step={step * num_cycles + cycle: ns for step, ns in row.by_step.items()}
                )
                for row in table
            ]
        )
        for table in (sums.rows, sums.names)
    )
    steps = tuple([step * num_cycles + cycle for step in sums.steps])
    return msgspec.structs.replace(sums, steps=steps, rows=rows, names=names)


def reported(sums: ExposureSums, waited_us: Mapping[int, float] | None = None) -> Exposure | None:
    """As it is shown and written; None where nothing communicates. ``waited_us``: by codes of names."""
    if not sums.rows:
        return None
    rows = [_reported(row) for row in sums.rows]
    places = _add_rows([[msgspec.structs.replace(row, size=SEVERAL) for row in sums.rows]])
    by_place = [_reported(row) for row in places]
    return Exposure(len(sums.steps), sums.num_ranks, tuple(rows), tuple(by_place), names_of(sums, waited_us))


def names_of(sums: ExposureSums, waited_us: Mapping[int, float] | None = None) -> tuple[ExposedCollective, ...]:
    """``Exposure.names``; ``waited_us`` as in ``reported``."""
    waited = {code: us / 1e3 for code, us in (waited_us or {}).items()}
    of_code = Counter([name_code(row.collective, row.place) for row in sums.names])
    names = [
        msgspec.structs.replace(
            _reported(row),
            place=NOWHERE,
            name=row.place,
            waiting_ms=waited.get(code) if of_code[code] == 1 else None,
            path_ms=row.path_ns / 1e6 if sums.paths == sums.num_ranks else None,
        )
        for row in sums.names
        for code in [name_code(row.collective, row.place)]
    ]
    return _first_by_name(names)


def _first_by_name(names: Iterable[ExposedCollective]) -> tuple[ExposedCollective, ...]:
    return tuple(sorted(names, key=lambda row: (-row.held_ms, -row.exposed_ms)))


def _reported(row: ExposedSum) -> ExposedCollective:
    known = row.least_bytes != UNKNOWN_SIZE  # of all of them
    worst_ns = max(row.by_step.values(), default=0.0)
    rank, of_rank_ns = _worst(row.by_rank)
    return ExposedCollective(
        collective=row.collective,
        dimension=row.dimension,
        group_size=row.group_size or None,
        place=row.place,
        least_bytes=row.least_bytes if known else None,
        most_bytes=row.most_bytes if known else None,
        calls=row.calls,
        exposed_ms=row.exposed_ns / 1e6,
        hidden_ms=row.hidden_ns / 1e6,
        exposed_steps=sum([ns >= _COUNTS * worst_ns for ns in row.by_step.values()]),
        beyond=min(1.0, row.beyond_ns / row.exposed_ns) if row.exposed_ns > 0 else 0.0,
        worst_rank=rank,
        worst_ms=of_rank_ns / 1e6,
        queued_ms=row.queued_ns / 1e6,
    )


def over_windows(found: Sequence[Exposure]) -> Exposure | None:
    """What is exposed in several windows together; None without any."""
    if not found:
        return None
    return Exposure(
        sum([window.num_steps for window in found]),
        max([window.num_ranks for window in found]),
        _added([window.rows for window in found], 6),
        _added([window.places for window in found], 4),
        add_names([window.names for window in found]),
    )


def add_names(tables: Iterable[Sequence[ExposedCollective]]) -> tuple[ExposedCollective, ...]:
    """``Exposure.names`` of several windows together."""
    return _first_by_name(_added(tables, 4))


def with_blocking(found: Exposure, slopes: Mapping[tuple[str, str], float]) -> Exposure:
    """The same with ``causal.slopes_by_name``, and those that hold steps up most first."""
    names = [msgspec.structs.replace(row, blocking=slopes.get((row.collective, row.name))) for row in found.names]
    return msgspec.structs.replace(found, names=_first_by_name(names))


def _added(tables: Iterable[Sequence[ExposedCollective]], key: int) -> tuple[ExposedCollective, ...]:
    rows = grouped(chain.from_iterable(tables), lambda row: (row.name, *msgspec.structs.astuple(row)[:key]))
    return tuple(sorted(map(_together, rows.values()), key=lambda row: -row.exposed_ms))


def _together(rows: Sequence[ExposedCollective]) -> ExposedCollective:
    """The same collectives of several windows."""
    sums = {name: sum([getattr(row, name) for row in rows]) for name in _SUMS}
    sizes = [size for row in rows for size in (row.least_bytes, row.most_bytes) if size is not None]
    known = len(sizes) == 2 * len(rows)
    some = {
        name: [ms for row in rows if (ms := getattr(row, name)) is not None]
        for name in ("waiting_ms", "path_ms", "queued_ms")
    }
    each_ms = [row.exposed_ms / max(row.exposed_steps, 1) for row in rows]
    counted = [row.exposed_steps for row, ms in zip(rows, each_ms, strict=True) if ms >= _COUNTS * max(each_ms)]
    worst, worst_ms = _worst(named_sum(sum)([{row.worst_rank: row.worst_ms} for row in rows]))
    return msgspec.structs.replace(
        rows[0],
        **sums,
        least_bytes=min(sizes) if known else None,
        most_bytes=max(sizes) if known else None,
        beyond=sum([row.beyond * row.exposed_ms for row in rows]) / (sums["exposed_ms"] or 1),
        exposed_steps=sum(counted),
        worst_rank=worst,
        worst_ms=worst_ms,
        **{name: sum(of_rows) if len(of_rows) == len(rows) else None for name, of_rows in some.items()},
    )


_SUMS = ("calls", "exposed_ms", "hidden_ms")


def _worst(by_rank: Mapping[int, float]) -> tuple[int, float]:
    """The rank that has most, of several the lowest, and how much."""
    return max(by_rank.items(), key=lambda rank: (rank[1], -rank[0]), default=(0, 0.0))


# -- in words


def exposure_sentence(found: Exposure, style: Style = PLAIN, late_rank: int | None = None) -> str:
    """Which collectives are exposed, e.g. ``Of 15.0 ms exposed all are the 1.2 MB all-reduce that ends the step, ...``.

    Empty where none is. ``late_rank``: waiting for this rank holds steps up most.
    """
    whole, parts = exposed_parts(found, style)
    return f"Of {whole} {'; '.join(parts)}.{first_in_words(found, late_rank, style)}" if parts else ""


def first_in_words(found: Exposure, late_rank: int | None = None, style: Style = PLAIN) -> str:
    """What holds steps up most, as a sentence that follows another; empty if that has no name."""
    if found.names and all(row.blocking == 0 for row in found.names):
        return " No collective holds steps up: delays show slack of each."
    if late_rank is not None:
        return f" What holds steps up most is waiting for rank {late_rank}, not a layer."
    first = first_by_name(found)
    if first is None:
        return ""
    behind = ", with what queues behind it" if first.blocking is None and first.held_ms > first.exposed_ms else ""
    steps = found.num_steps * found.num_ranks  # none of files without steps
    held = f"{_ms(first.held_ms / steps, style)} a step" if steps else _ms(first.held_ms, style)
    return f" First by name is {name_in_words(first)}, for {held}{behind}."


def first_by_name(found: Exposure, kinds: Sequence[str] = ()) -> ExposedCollective | None:
    """The collective (of these kinds) that holds steps up most, if its framework names it; None if none does."""
    rows = [row for row in found.names if row.collective in kinds or not kinds]
    return rows[0] if rows and rows[0].held_ms > 0 and not _BY_PLACE.fullmatch(rows[0].name) else None


def name_in_words(row: ExposedCollective) -> str:
    """E.g. ``the all-gather of layers.3``."""
    noun, _ = _NOUNS.get(row.collective, (row.collective.replace("_", "-"), ""))
    return f"the {noun} of {row.name}"


def exposed_parts(found: Exposure, style: Style = PLAIN) -> tuple[str, list[str]]:
    """How much is exposed, and the parts of the collectives that have most of it; none where nothing is exposed."""
    total_ms = found.exposed_ms
    if not total_ms > 0:
        return "", []

    def most_of(rows: Sequence[ExposedCollective]) -> Sequence[ExposedCollective]:
        return [row for row in rows[:_MAX_NAMED] if row.exposed_ms >= _NAMED * total_ms] or rows[:1]

    # If no single size has most of it, or sizes are the same in words, name kinds and places instead.
    named = most_of(found.rows)
    alike = len({(row.collective, row.dimension, row.place, size_in_words(row)) for row in named}) < len(named)
    if found.places and (alike or found.rows[0].exposed_ms < total_ms / 2):
        named = most_of(found.places)

    def part(row: ExposedCollective) -> str:
        share = "all" if row.exposed_ms >= _ALL * total_ms else _ms(row.exposed_ms, style)
        return f"{share} are {collectives_in_words(row, found)}{_where(row, found)}"

    ranks = f" on {count(found.num_ranks, 'rank')}" if found.num_ranks > 1 else ""
    return f"{_ms(total_ms, style)} exposed{ranks}", list(map(part, named))


def collectives_in_words(row: ExposedCollective, of: Exposure) -> str:
    """E.g. ``the 1.2 MB all-reduce that ends the step``."""
    several = row.calls > max(1, of.num_steps) * max(1, of.num_ranks) or row.least_bytes != row.most_bytes
    one, many = _NOUNS.get(row.collective, (row.collective.replace("_", "-"), ""))
    noun = (many or f"{one}s") if several else one
    groups = {(other.dimension, other.group_size) for other in of.rows if other.collective == row.collective}
    if len(groups) > 1 and (row.dimension or row.group_size):
        noun += f" of {row.dimension}" if row.dimension else f" on {count(row.group_size or 0, 'rank')}"
    size = size_in_words(row)
    return f"the {f'{size} ' if size else ''}{noun}{_place(row, several=several)}"


_NOUNS = {"send_recv": ("send or receive", "sends and receives"), "other": ("collective of an unknown kind", "")}


def size_in_words(row: ExposedCollective) -> str:
    """The size of one, or the least and the greatest; empty if unknown or zero."""
    if row.least_bytes is None or not row.most_bytes:  # a barrier has none
        return ""
    least, most = bytes_in_words(row.least_bytes), bytes_in_words(row.most_bytes)
    if least == most:
        return most
    unit = f" {unit_of(row.most_bytes)[0]}"
    return f"{least.removesuffix(unit)} to {most}"


def _place(row: ExposedCollective, *, several: bool) -> str:
    ends = row.beyond <= _AT_THE_END
    if row.place not in (FIRST, LAST):
        return " in the middle of the step" if row.place else ""
    verb = ("begin" if row.place == FIRST else "end") if ends else "come"
    return f" that {verb}{'' if several else 's'} {'' if ends else f'{row.place} in '}the step"


def _where(row: ExposedCollective, of: Exposure) -> str:
    """In how many steps, and on which rank if it is one alone."""
    steps = f", in {row.exposed_steps} of {count(of.num_steps, 'step')}" if of.num_steps else ""
    alone = of.num_ranks > 1 and row.worst_ms >= _ALONE * row.exposed_ms
    return steps + (f", on rank {row.worst_rank} alone" if alone else "")


def _ms(value: float, style: Style) -> str:
    return f"{three_digits(value, style)}{style.space}ms"
