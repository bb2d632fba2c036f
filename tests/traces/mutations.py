"""Traces with faults, seeded, and what must hold of each: ``python -m tests.traces.mutations --count 100000``.

Of every file: no traceback; every figure is finite and possible; memory stays bounded. And no wrong figure without a
note: where the figures are not those of the whole file, either the file says so itself (it is JSON, and a reader that
shares nothing with the library finds the same in it), or the library does, in a note or in its refusal.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import io
import itertools
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from overlap_callbacks.report.terminal import drawn
from overlap_callbacks.report.trace_tables import ANALYSIS_TABLES, analysis_rows, as_csv
from overlap_callbacks.report.views.traces import trace_document
from overlap_callbacks.traces import TraceError, analyze, read_trace
from overlap_callbacks.traces.figures import Analysis
from tests.traces import reference
from tests.traces.test_fuzz import PIECES, TRACES, Mutation, check, mutations

DEEP = 100_000
_NUMBERS = (b"1e400", b"-1e400", b"1e-400", b"1" + b"0" * 400, b"9" * 19, b"-1", b"1e18", b"0.1e-7", b"NaN")
# One file in so many is also shown, as tables and as CSV.
_SHOWN = 20
# A process that has read all of them may have taken so much.
MOST_MB = 250

Change = Callable[[bytes, random.Random], bytes]


def mutated(seed: int) -> tuple[str, int, bytes]:
    """The kind of the faults, the trace that has them, and the file."""
    chance = random.Random(seed)
    number = chance.randrange(len(TRACES))
    kind = chance.choices(list(KINDS), weights=[weight for _, weight in KINDS.values()])[0]
    return kind, number, KINDS[kind][0](TRACES[number], chance)


def _small(content: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        mutation: Mutation = chance.choice(mutations)
        content = mutation(content, chance.random(), chance.random(), chance.randrange(2**16))
    return content


def _nested(content: bytes, chance: random.Random) -> bytes:
    """Brackets within brackets, in place of a value or between two events."""
    depth = chance.choice((200, 3_000, DEEP))
    opened, closed = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    deep = opened * depth + chance.choice((b"0", b"")) + closed * chance.choice((depth, depth, depth - 1, 0))
    return _in_place_of_a_value(content, chance, deep)


def _number(content: bytes, chance: random.Random) -> bytes:
    return _in_place_of_a_value(content, chance, chance.choice(_NUMBERS))


def _in_place_of_a_value(content: bytes, chance: random.Random, value: bytes) -> bytes:
    colon = content.find(b":", chance.randrange(len(content))) + 1
    ends = [end for mark in (b",", b"}") if (end := content.find(mark, colon)) >= 0]
    return content[:colon] + value + content[min(ends) :] if colon and ends else content


def _inflating(content: bytes, chance: random.Random) -> bytes:
    """A few kilobytes that inflate a thousandfold."""
    filler = chance.choice((b" ", b"\n", b"[", b"0", b'{"a":', b"\x00")) * chance.choice((200_000, 2_000_000))
    place = chance.choice((0, len(content), content.find(b"[") + 1))
    return gzip.compress(content[:place] + filler + content[place:], mtime=0)


def _compressed(content: bytes, chance: random.Random) -> bytes:
    packed = gzip.compress(_small(content, chance) if chance.random() < 0.5 else content, mtime=0)
    return _small(packed, chance) if chance.random() < 0.7 else packed


def _bytes(content: bytes, chance: random.Random) -> bytes:
    """Single bytes of the file, many of them."""
    flipped = bytearray(content)
    for _ in range(chance.choice((1, 10, 100))):
        flipped[chance.randrange(len(flipped))] = chance.choice((chance.randrange(256), *PIECES[-1]))
    return bytes(flipped)


KINDS: dict[str, tuple[Change, int]] = {
    "pieces": (_small, 50),
    "bytes": (_bytes, 20),
    "numbers": (_number, 15),
    "compressed": (_compressed, 12),
    "nested": (_nested, 2),
    "inflating": (_inflating, 1),
}


# -- what must hold


def judge(path: Path, seed: int) -> str:
    """What came of one file: ``refused``, ``figures`` or ``figures with notes``.

    Raises:
        AssertionError: a figure is impossible, or wrong without a note.
        Exception: anything that is a traceback to a user.
    """
    _, number, content = mutated(seed)
    path.write_bytes(content)
    try:
        trace = read_trace(path)
    except TraceError as error:
        assert str(path) in str(error)  # noqa: PT017 - the other outcome is right too
        return "refused"
    found = analyze([trace])
    check(found)
    if seed % _SHOWN == 0:
        _show(found)
    whole = _whole(number)
    if _notes(found) - _notes(whole):
        return "figures with notes"
    sums = _sums(found)
    if sums != _sums(whole):
        expected = _by_reference(path)
        if expected is None or (_is_of_host(number) and not isinstance(expected, str)):
            return "figures"  # the file is JSON, and times of operators take more than a plain reader
        assert sums == expected, f"{sums} without a note, and a plain reader finds {expected}"
    return "figures"


def _is_of_host(number: int) -> bool:
    return _whole(number).traces[0].on_host


def _show(found: Analysis) -> None:
    Console(file=io.StringIO(), width=100).print(drawn(trace_document(found), everything=True))
    for table in ANALYSIS_TABLES:
        as_csv(analysis_rows(found, table))


def _notes(found: Analysis) -> set[str]:
    return {*found.problems, *[problem for trace in found.traces for problem in trace.problems]}


def _sums(found: Analysis) -> tuple[int, int]:
    """Nanoseconds of all compute kernels, and of all communication kernels."""
    totals = [trace.total for trace in found.traces]
    return round(sum(one.compute_ms for one in totals) * 1e6), round(sum(one.comm_kernels_ms for one in totals) * 1e6)


@functools.cache
def _whole(number: int) -> Analysis:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_bytes(TRACES[number])
        return analyze([read_trace(path)])


def _by_reference(path: Path) -> tuple[int, int] | str | None:
    content = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
    except Exception as error:
        return f"no JSON: {type(error).__name__}: {str(error)[:200]}"
    sums = [0, 0]
    for event in document if isinstance(document, list) else document["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            communicates = "nccl" in str(event.get("name")).lower()
            if not communicates and "Collective name" in (event.get("args") or {}):
                return None  # what this is takes more than a plain reader
            sums[communicates] += reference.nanoseconds(event["dur"])
    return sums[0], sums[1]


# -- many of them


def _judge_some(seeds: range) -> tuple[Counter[str], list[str], float]:
    outcomes: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            try:
                outcomes[f"{mutated(seed)[0]}: {judge(Path(folder, 'trace.json'), seed)}"] += 1
            except (Exception, RecursionError):
                failures.append(f"seed {seed}: {traceback.format_exc(limit=-2)[-1500:]}")
    return outcomes, failures, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the outcome there")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.count)
    parts = [seeds[start : start + 250] for start in range(0, len(seeds), 250)]
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    peak_mb, began_s = 0.0, time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for done, (some, failed, mb) in enumerate(pool.imap_unordered(_judge_some, parts), 1):
            outcomes += some
            failures += failed
            peak_mb = max(peak_mb, mb)
            for failure in failed:
                print(failure, flush=True)
            if done % 20 == 0:
                print(f"{sum(outcomes.values()):,} of {len(seeds):,}, {len(failures)} failed", flush=True)
    seconds = time.monotonic() - began_s
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8,}  {outcome}")
    print(f"{len(seeds):,} files in {seconds:.0f} s, {len(failures)} failed, at most {peak_mb:.0f} MB a process")
    if options.json:
        figures: dict[str, Any] = {"files": len(seeds), "first_seed": options.first, "failed": len(failures)}
        figures |= {"seconds": round(seconds), "peak_mb": round(peak_mb), "outcomes": dict(sorted(outcomes.items()))}
        figures["examples"] = list(itertools.islice(failures, 20))
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return int(bool(failures) or peak_mb > MOST_MB)


if __name__ == "__main__":
    sys.exit(main())
