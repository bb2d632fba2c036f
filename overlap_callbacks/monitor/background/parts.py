"""Adds up the parts of steps over the ranks, a stretch of steps at a time, on the reporting thread.

A stretch is about as long as a window, and begins at a multiple of its length: all ranks know it without asking.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from overlap_callbacks.analysis.job import frontier
from overlap_callbacks.analysis.job.frontier import RankStretch, RunFrontier, frontier_of
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.analysis.step_vectors import StepVectors
from overlap_callbacks.instruments import clocks
from overlap_callbacks.monitor.background.measurement import await_mark
from overlap_callbacks.monitor.background.store import StoreChannel
from overlap_callbacks.monitor.background.tree import Exchange, Tree
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.monitor.step_ring import StepRing

_FEWEST_STEPS, _MOST_STEPS = 128, 512
# Maximum time in which the ranks' parts of a stretch must come in; after one that some rank missed, less.
_TIMEOUT_S, _SHORT_TIMEOUT_S = 5.0, 0.5
# Stretches that may wait for the reporting thread; others are left out.
_MOST_WAITING = 4


def stretch_steps(schedule: Schedule) -> int:
    """Number of steps of a stretch."""
    return min(_MOST_STEPS, max(_FEWEST_STEPS, schedule.window_steps))


class PartsOfRanks:
    """The ranks' parts of steps, from stretch to stretch. ``run`` on rank 0: the frontier of the whole run."""

    def __init__(self, channel: StoreChannel, ring: StepRing, schedule: Schedule) -> None:
        self.exchange = Exchange(channel, Tree.of(channel.job), "parts", answered=False)
        self.run = RunFrontier()
        self.length = stretch_steps(schedule)
        self._rank = channel.job.rank
        self.is_rank_0 = not self._rank
        self._ring = ring
        self._timeout_s = _TIMEOUT_S
        self._num_waiting = 0

    def vectors(self) -> StepVectors:
        """This rank's latest steps."""
        return self._ring.vectors()

    def may_wait(self) -> bool:
        """On the training thread: whether another stretch may wait."""
        self._num_waiting += 1
        return self._num_waiting <= _MOST_WAITING

    def gather(self, number: int, key: str, stop: Callable[[], bool]) -> StepFrontier | None:
        """Add up a stretch over the ranks. On rank 0 returns its frontier; None if no step counts, and on others."""
        self._num_waiting = 0
        mark = self._ring.last_mark
        if mark is not None:
            clocks.prepare_own_thread(clocks.device_of(mark))
            await_mark(mark)
        own = RankStretch.of(self._rank, self._ring.vectors(), number * self.length, self.length)
        tree, parts = self.exchange.tree, [own]
        for child, message in self.exchange.gather(key, tree.patience_s(self._timeout_s), lambda _: stop()).items():
            stretch = _decoded(message)
            members = Tree(child, tree.world_size, tree.fan_in).members
            if stretch is not None and stretch.is_like(own, members):
                parts.append(stretch)
        merged = frontier.merge(parts)
        self.exchange.unheard = tree.members_without(merged.heard)
        self._timeout_s = _SHORT_TIMEOUT_S if self.exchange.unheard else _TIMEOUT_S
        if self._rank:
            self.exchange.send_up(key, frontier.encode(merged), self._timeout_s, stop)
            return None
        found = frontier_of(merged, self.exchange.unheard)
        return found if found.num_steps else None


def _decoded(message: Any) -> RankStretch | None:
    try:
        return frontier.decode(message)
    except (msgspec.MsgspecError, zlib.error, ValueError):
        return None  # another version's
