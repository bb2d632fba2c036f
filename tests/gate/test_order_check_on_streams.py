"""What passes the order check ends on a device too, whatever the job waits for itself: on streams that run nothing."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_callbacks.gate.serialiser import StreamSerialiser
from tests.gate.sequences import collective, conflict_of, receive, send
from tests.gate.streams import Device, Stream, Work
from tests.gate.test_serialiser import new_call

STREAMS = ("compute", "side")
GROUPS = {"a": (0, 1), "b": (0, 1), "p2p": (0, 1)}


@dataclass(frozen=True)
class Issued:
    """What a rank issues on a stream: a collective, a block of them, or a message.

    Attributes:
        what: ``collective``, ``block`` or ``message``.
        group: its process group.
        stream: that is current.
        waits: whether the job has this stream wait for it at once.
        source: the rank that sends, of a message.
    """

    what: str
    group: str
    stream: str
    waits: bool
    source: int = 0


def items_of(rank: int, program: list[Issued]) -> list[Any]:
    """The sequence as the gate records it."""
    items = []
    for number, issued in enumerate(program, start=1):
        if issued.what == "message":
            end = send if rank == issued.source else receive
            items.append(end(issued.source, 1 - issued.source))
        else:
            coalesced = number if issued.what == "block" else 0
            items += [collective(issued.group, coalesced=coalesced)] * (2 if coalesced else 1)
    return items


def ends(programs: list[list[Issued]], *, sequential: bool) -> bool:
    """Whether all work of the ranks' devices can be done: each waits for its streams, and for the other rank."""
    after: dict[Any, set[Any]] = defaultdict(set)
    for rank, program in enumerate(programs):
        device = Device(*STREAMS)
        meetings: dict[int, Any] = {}  # what the ranks do together, by the number of the work on this device
        with pytest.MonkeyPatch.context() as monkeypatch:
            device.install(monkeypatch)
            _run(device, program, meetings, sequential=sequential)
        name = {number: meetings.get(number, (rank, number)) for number in device.all_work}
        for number, earlier in device.all_work.items():
            after[name[number]] |= {name[one] for one in earlier}
    done: set[Any] = set()
    while ready := {work for work, earlier in after.items() if work not in done and earlier <= done}:
        done |= ready
    return len(done) == len(after)


def _run(device: Device, program: list[Issued], meetings: dict[int, Any], *, sequential: bool) -> None:
    serialiser = StreamSerialiser(device.streams["compute"])  # type: ignore[arg-type]
    communicators = {name: Stream(device, name) for name in GROUPS}
    counts: dict[Any, Any] = defaultdict(itertools.count)
    for issued in program:
        device.current = device.streams[issued.stream]
        call = new_call()
        serialised = sequential and issued.what == "collective"
        if serialised:
            serialiser.before(call)
        elif sequential:
            serialiser.skip(None)
        for _ in range(2 if issued.what == "block" else 1):
            # A communicator has a stream; each channel of messages counts as a communicator of its own.
            message = issued.what == "message"
            key = ("message", issued.source) if message else issued.group
            work = Work(device, Stream(device, "channel") if message else communicators[issued.group])
            meetings[work.number] = (key, next(counts[key]))
        if issued.waits:
            work.wait()
        if serialised:
            assert serialiser.after(call, work)  # type: ignore[arg-type]


def two_ranks() -> st.SearchStrategy[list[list[Issued]]]:
    what = st.sampled_from([("collective", "a", 0), ("collective", "b", 0), ("block", "a", 0), ("block", "b", 0)])
    message = st.integers(0, 1).map(lambda source: ("message", "p2p", source))
    events = st.lists(what | message, max_size=6)

    def program(order: list[tuple[str, str, int]]) -> st.SearchStrategy[list[Issued]]:
        placed = st.tuples(st.sampled_from(STREAMS), st.booleans())
        return st.lists(placed, min_size=len(order), max_size=len(order)).map(
            lambda places: [
                Issued(what, group, stream, waits, source)
                for (what, group, source), (stream, waits) in zip(order, places, strict=True)
            ]
        )

    def both(order: list[tuple[str, str, int]]) -> st.SearchStrategy[list[list[Issued]]]:
        # Within a group all ranks have one order: torch demands it.
        def merged(other: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
            queues = defaultdict(list)
            for event in order:
                queues[event[1:]].append(event)
            return [queues[event[1:]].pop(0) for event in other]

        return st.tuples(program(order), st.permutations(order).map(merged).flatmap(program)).map(list)

    return events.flatmap(both)


@settings(max_examples=200, deadline=None)
@given(two_ranks())
def test_a_job_that_ends_when_overlapped_and_passes_the_order_check_ends_when_sequential(
    programs: list[list[Issued]],
) -> None:
    if not ends(programs, sequential=False):
        return
    if conflict_of(*(items_of(rank, program) for rank, program in enumerate(programs)), groups=GROUPS) is None:
        assert ends(programs, sequential=True)


@pytest.mark.parametrize("side", STREAMS)
@pytest.mark.parametrize("what", ["block", "message"])
def test_a_wait_of_the_job_for_what_is_let_pass_is_part_of_the_order(what: str, side: str) -> None:
    """One rank waits for a block, or in ``dist.send``, before a collective that another rank issues first."""
    passed = Issued(what, "p2p" if what == "message" else "a", "compute", waits=True)
    summed = Issued("collective", "b", side, waits=False)
    programs = [[passed, summed], [summed, passed]]
    assert ends(programs, sequential=False)
    assert not ends(programs, sequential=True)
    assert conflict_of(*(items_of(rank, program) for rank, program in enumerate(programs)), groups=GROUPS) is not None
