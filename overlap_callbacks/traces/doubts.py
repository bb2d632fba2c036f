"""What is impossible or missing among a file's kernels, and so left out, in one sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.impossible import (
    Overruns,
    captures_of,
    missing_kernels,
    overruns,
    past_the_end,
    repeated,
    without_time,
)
from overlap_callbacks.analysis.kernels.table import Kind, step_of
from overlap_callbacks.traces.columns import Array, taken
from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.files import Document
from overlap_callbacks.traces.trace import TraceStep, named_steps

_MAX_NAME = 80
# Fraction of launches that a profile may lose at its ends.
_FEW = 0.01


class Doubts:
    """The checks of one file, in the order of the methods.

    Args:
        steps: the steps.
        bounds: start and end of each.

    Attributes:
        warnings: what is left out, to read before any figure.
        problems: what else is doubtful.
        shortened: rows that ran longer than they can, and were ended.
        lacking: indices of steps that lack kernels; -1 if any may, or the file has no steps.
    """

    def __init__(self, steps: Sequence[TraceStep], bounds: Sequence[tuple[int, int]]) -> None:
        self._steps, self._bounds = steps, bounds
        self.warnings: list[str] = []
        self.problems: list[str] = []
        self.shortened: list[int] = []
        self.lacking: frozenset[int] = frozenset()

    def of_launches(
        self, calls: Mapping[str, Array], has_row: Array, rows: Mapping[str, Array], events: DeviceEvents,
        document: Document,
    ) -> Intervals:  # fmt: skip
        """Find launches without a kernel. Returns when launches were captured into graphs.

        Args:
            calls: calls that launch something.
            has_row: whether each call has a row; shape (calls,).
            rows: the kernels and copies.
            events: the events of the file.
            document: the file.
        """
        capturing = events.captures.finished()
        captures = captures_of(capturing["start"], capturing["begins"] > 0)
        launched = Intervals(calls["start"], calls["end"])
        found = missing_kernels(launched, calls["call"], calls["thread"], has_row, captures)
        if found.captured:
            self.warnings.append(
                f"{found.captured} launches were captured into a CUDA graph and ran no kernels [OC732]"
            )
        lost_ns = launched.start_ns[found.launches]
        # A kernel without a number may belong to any launch. What a truncated file lacks is reported elsewhere.
        unsure = int(((rows["correlation"] == 0) & (rows["kind"] != Kind.COPY)).sum()) if len(lost_ns) else 0
        if len(lost_ns) <= unsure or not has_row.any() or document.is_cut:
            return captures
        number = f"{len(lost_ns)} of {found.number}"
        step = step_of(lost_ns, self._bounds)
        inside, lacking = int((step >= 0).sum()), distinct_values(step[step >= 0]).tolist()
        if lacking:
            some = f"{inside} of them in" if inside < len(lost_ns) else "all in" if len(lacking) == 1 else "in"
            those = "that step is" if len(lacking) == 1 else "those steps are"
            self.warnings.append(
                f"{number} launches have no kernel, {some} {self._named(lacking)}: {those} in no mean [OC733]"
            )
            self.lacking |= {*lacking}
            return captures
        # A profile may begin just before the first kernel is recorded, and end before the last one.
        known_ns = launched.start_ns[has_row]
        inside = ((lost_ns > known_ns.min()) & (lost_ns < known_ns.max())).any()
        if inside or len(lost_ns) > _FEW * found.number:
            outside = ", none of them in a step" if self._steps else ""
            self.warnings.append(
                f"{number} launches have no kernel{outside}: the totals lack them, and their time looks idle [OC734]"
            )
            self.lacking |= {-1} if not self._steps else set()
        else:
            self.problems.append(
                f"{number} launches have no kernel, all at the beginning or the end of the file [OC735]"
            )
        return captures

    def with_time(self, rows: dict[str, Array], events: DeviceEvents) -> dict[str, Array]:
        """The rows that have a time. A launch without a time counts as unknown."""
        wrong, of_launch = without_time(Intervals(rows["start"], rows["end"]), rows["launched"])
        if of_launch.any():
            rows["launched"] = np.where(of_launch, -1, rows["launched"])
        if not wrong.any():
            return rows
        unreadable, number = events.rows.untimed, int(wrong.sum())
        launched_ns = rows["launched"][wrong]
        step = step_of(launched_ns, self._bounds)
        lacking = distinct_values(step[step >= 0]).tolist()
        where = ""
        if not self._steps or (launched_ns < 0).any():
            self.lacking |= {-1}
            where = "; any step may lack them" if self._steps else ""
        elif lacking:
            self.lacking |= {*lacking}
            where = f"; {self._named(lacking)} {'lacks' if len(lacking) == 1 else 'lack'} them"
        if unreadable:
            self.warnings.append(f"{unreadable} events have no time that can be read, and are left out{where} [OC736]")
        if number > unreadable:
            self.warnings.append(f"{number - unreadable} kernels have no time and are left out{where} [OC737]")
        kept = np.flatnonzero(~wrong)
        return {name: taken(column, kept) for name, column in rows.items()}

    def once(self, rows: dict[str, Array]) -> dict[str, Array]:
        """The rows without those that repeat others."""
        again = repeated(rows["lane"], Intervals(rows["start"], rows["end"]), rows["name"], rows["correlation"])
        if not len(again):
            return rows
        self.warnings.append(f"{len(again)} kernels are in the file more than once, and count once [OC738]")
        kept = np.setdiff1d(np.arange(len(rows["start"])), again, assume_unique=True)
        return {name: taken(column, kept) for name, column in rows.items()}

    def shorten(
        self, rows: dict[str, Array], texts: Sequence[str], calls: Mapping[str, Array], events: DeviceEvents,
        ended_ns: int,
    ) -> None:  # fmt: skip
        """End the rows that run longer than they can; ``texts`` are the names of rows.

        All had ended at ``ended_ns``.
        """
        correlation = rows.pop("correlation")
        found = overruns(rows["lane"], Intervals(rows["start"], rows["end"]), correlation)
        self._shorten(rows, texts, events, found, "the next one of its stream begins")
        syncs = events.syncs.finished()
        order = np.argsort(syncs["start"], kind="stable")
        device = rows["device"]
        if device.min(initial=0) < device.max(initial=0):  # of several devices, which one the host waits for is unknown
            order = order[:0]
        ends_ns = (calls["end"], syncs["end"], np.array([step.end_ns for step in self._steps], dtype=np.int64))
        found = past_the_end(
            rows["lane"],
            Intervals(rows["start"], rows["end"]),
            rows["name"],
            rows["kind"] == Kind.COMMUNICATION,
            rows["launched"],
            Intervals(syncs["start"][order], syncs["end"][order]),
            max([int(times_ns.max(initial=0)) for times_ns in ends_ns]),
            ended_ns,
        )
        self._shorten(rows, texts, events, found, "all else has ended")

    def _shorten(
        self, rows: dict[str, Array], texts: Sequence[str], events: DeviceEvents, found: Overruns, when: str
    ) -> None:
        if not len(found.rows):
            return
        excess_ns = rows["end"][found.rows] - found.until_ns
        worst = int(np.argmax(excess_ns))
        row, number = found.rows[worst], len(found.rows)
        name, stream = texts[rows["name"][row]][:_MAX_NAME], events.streams[rows["lane"][row]]
        excess = f"{excess_ns[worst] / 1e6:.3f} ms"
        if number == 1:
            self.warnings.append(
                f"{name} on stream {stream} ends {excess} after {when}: it counts only up to there [OC739]"
            )
        else:
            self.warnings.append(
                f"{number} kernels end later than they can, and count only up to there; the worst is {name} on "
                f"stream {stream}, {excess} after {when} [OC740]"
            )
        end_ns = rows["end"].copy()
        end_ns[found.rows] = found.until_ns
        self.shortened += found.rows.tolist()
        rows["end"] = end_ns

    def _named(self, steps: Sequence[int]) -> str:
        return named_steps([self._steps[i].number for i in steps])
