"""What the simulated device did, read from its log: the truth that a record of the library is held against."""

from __future__ import annotations

import bisect
import csv
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

Interval = tuple[int, int]


@dataclass(frozen=True)
class Task:
    """A kernel, collective or copy. Times are nanoseconds of ``time.monotonic_ns``.

    Attributes:
        task_class: ``compute``, ``communication`` or ``copy``.
        device: its number in its process.
        stream: number of the stream.
        enqueued: when the host enqueued it.
        start: when it began.
        met: of a collective: when the last rank began it.
        end: when it ended.
        alone_ns: what it takes with nothing beside it, at full clock, and for a collective from ``met`` on.
        clock: share of the full clock, at its end.
        watts: drawn by the device, at its end.
        joules: that the device had drawn by then.
        memory_s, multiprocessors_s: for which its memory and its multiprocessors had been in use by then.
        correlation: number of its launch; the profiler has the same.
        name: of the kernel.
    """

    task_class: str
    device: int
    stream: int
    enqueued: int
    start: int
    met: int
    end: int
    alone_ns: float
    clock: float
    watts: float
    joules: float
    memory_s: float
    multiprocessors_s: float
    correlation: int
    name: str

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return "SendRecv" in self.name

    @property
    def duration_ns(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class StepTruth:
    """What a device did for the tasks that the host enqueued in one step.

    Attributes:
        tasks: all of them.
    """

    tasks: tuple[Task, ...]

    @property
    def end(self) -> int:
        """When the last kernel that updates weights ended: where the next step begins on the device."""
        return self.last.end

    @property
    def begin(self) -> int:
        """When its first compute kernel began."""
        return min(task.start for task in self.of_class("compute"))

    def of_class(self, task_class: str) -> list[Task]:
        return [task for task in self.tasks if task.task_class == task_class]

    @property
    def compute_ms(self) -> float:
        """Summed durations of compute kernels."""
        return sum(task.duration_ns for task in self.of_class("compute")) / 1e6

    @property
    def compute_busy_ms(self) -> float:
        """Time in which compute ran."""
        return length(_spans(self.of_class("compute"))) / 1e6

    @property
    def covered_ms(self) -> float:
        """Summed durations of compute kernels, of the part beside communication."""
        communication = _spans(self.of_class("communication"))
        return sum(_shared([span], communication) for span in _spans(self.of_class("compute"))) / 1e6

    @property
    def compute_alone_ms(self) -> float:
        """What these kernels take with nothing beside them."""
        return sum(task.alone_ns for task in self.of_class("compute")) / 1e6

    @property
    def compute_slowdown(self) -> float:
        """Share by which compute took longer than alone."""
        return self.compute_ms / self.compute_alone_ms - 1

    @property
    def communication_ms(self) -> float:
        """Time with communication in flight, the waiting for other ranks included."""
        return length(_spans(self.of_class("communication"))) / 1e6

    @property
    def waiting_ms(self) -> float:
        """Summed times for which collectives waited for the last rank."""
        return sum(task.met - task.start for task in self.of_class("communication")) / 1e6

    @property
    def kernels_ms(self) -> float:
        """Summed durations of communication kernels, the waiting for other ranks included."""
        return sum(task.duration_ns for task in self.of_class("communication")) / 1e6

    @property
    def transfer_ms(self) -> float:
        """Summed durations of collectives from the moment at which all ranks were there."""
        return sum(task.end - task.met for task in self.of_class("communication")) / 1e6

    @property
    def transfer_alone_ms(self) -> float:
        """What these transfers take with nothing beside them."""
        return sum(task.alone_ns for task in self.of_class("communication")) / 1e6

    @property
    def hidden_ms(self) -> float:
        """Time with communication in flight beside compute."""
        return _shared(_spans(self.of_class("communication")), _spans(self.of_class("compute"))) / 1e6

    @property
    def exposed_ms(self) -> float:
        """Time with communication in flight and no compute."""
        return self.communication_ms - self.hidden_ms

    @property
    def last(self) -> Task:
        """The kernel with which the step ended."""
        return max(self.of_class("compute"), key=lambda task: task.end)

    @property
    def joules(self) -> float:
        """That the device had drawn when the step ended."""
        return self.last.joules

    @property
    def memory_s(self) -> float:
        """For which its memory had been in use when the step ended."""
        return self.last.memory_s

    @property
    def multiprocessors_s(self) -> float:
        """For which its multiprocessors had been in use when the step ended."""
        return self.last.multiprocessors_s

    @property
    def clock(self) -> float:
        """Share of the full clock at which compute ran, by time."""
        compute = self.of_class("compute")
        return sum(task.clock * task.duration_ns for task in compute) / sum(task.duration_ns for task in compute)

    @property
    def kernels(self) -> list[Task]:
        """All but copies."""
        return [task for task in self.tasks if task.task_class in ("compute", "communication")]

    @property
    def span(self) -> Interval:
        """From the first kernel's start to the last one's end."""
        return min(task.start for task in self.kernels), max(task.end for task in self.kernels)

    @property
    def span_ns(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def messages_ms(self) -> float:
        """Time in which sends and receives were in flight."""
        return length(_spans([task for task in self.tasks if task.is_message])) / 1e6

    def transfers_ms(self, kind: str) -> float:
        """Summed durations of a kind of collective, without waiting.

        Args:
            kind: as in the kernels' names, in lower case.
        """
        own = [task for task in self.of_class("communication") if kind in task.name.lower()]
        return sum(task.end - task.met for task in own) / 1e6


class DeviceLog:
    """The log of one process.

    Args:
        tasks: in the order in which they ended.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = sorted(tasks, key=lambda task: task.enqueued)

    @classmethod
    def read(cls, prefix: Path, process: int) -> DeviceLog:
        """Read the log of a process that was told to begin its log's name with ``prefix``."""
        with Path(f"{prefix}.{process}.tsv").open(newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        return cls(
            Task(
                task_class=row["class"],
                device=int(row["device"]),
                stream=int(row["stream"]),
                enqueued=int(row["enqueued"]),
                start=int(row["start"]),
                met=int(row["met"]),
                end=int(row["end"]),
                alone_ns=float(row["alone_ns"]),
                clock=float(row["clock"]),
                watts=float(row["watts"]),
                joules=float(row["joules"]),
                memory_s=float(row["memory_s"]),
                multiprocessors_s=float(row["multiprocessors_s"]),
                correlation=int(row["correlation"]),
                name=row["name"],
            )
            for row in rows
        )

    def steps(self, begun: Sequence[int]) -> list[StepTruth]:
        """The steps between these moments of the host; each has the tasks that were enqueued in it."""
        places = [bisect.bisect_left(self.tasks, moment, key=lambda task: task.enqueued) for moment in begun]
        return [StepTruth(tuple(self.tasks[first:last])) for first, last in itertools.pairwise(places)]


def of_one_transfer(ranks: Sequence[DeviceLog]) -> list[DeviceLog]:
    """The logs with each all-to-all as one transfer, which takes what the largest share does.

    What its kernels take beyond is waiting; there is none where that is less than all of them are long.

    Args:
        ranks: of a job without sends and receives.
    """
    met: dict[int, list[Task]] = defaultdict(list)
    for log in ranks:
        for task in log.tasks:
            if task.is_message:
                met[task.met].append(task)
    transfer_ns = {
        moment: min(max(task.end - moment for task in tasks), statistics.fmean(task.duration_ns for task in tasks))
        for moment, tasks in met.items()
    }

    def changed(task: Task) -> Task:
        return replace(task, met=round(task.end - transfer_ns[task.met])) if task.is_message else task

    return [DeviceLog(map(changed, log.tasks)) for log in ranks]


def _spans(tasks: Iterable[Task]) -> list[Interval]:
    return [(task.start, task.end) for task in tasks]


def _shared(first: Sequence[Interval], second: Sequence[Interval]) -> int:
    """Length of what both unions cover."""
    return length(first) + length(second) - length([*first, *second])


def length(spans: Iterable[Interval]) -> int:
    """Length of the union."""
    total, until = 0, 0
    for start, end in sorted(spans):
        if end > until:
            total += end - max(start, until)
            until = end
    return total
