"""What a device of a trace does with its time, as plain data: idle time, critical paths, queues, utilisation.

A figure that the file does not tell is None, never zero and never NaN.
"""

from __future__ import annotations

import msgspec


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the device did in one step, or in a whole file. The parts add up to ``span_ms``.

    A step is on the device from the last end of the kernels of earlier steps to the last end of its own, so that the
    steps follow one another without a gap. The first begins with its range on the host.

    Attributes:
        step: number of the ``ProfilerStep#``; None for the whole file, from its first kernel to its last.
        span_ms: length.
        compute_ms: compute ran, beside communication or not.
        exposed_comm_ms: communication was in flight and no compute ran.
        copy_ms: nothing but copies and fills ran.
        idle_ms: nothing ran.
        idle_host_ms: the part of it in which what runs next had not been launched yet; None if the file has no
            launches.
        idle_launch_ms: the part of it in which what runs next had been launched since the device fell idle, and had not
            started yet; None as above.
        idle_other_ms: the rest of it: what runs next had been launched before; None as above.
    """

    step: int | None
    span_ms: float
    compute_ms: float
    exposed_comm_ms: float
    copy_ms: float
    idle_ms: float
    idle_host_ms: float | None
    idle_launch_ms: float | None
    idle_other_ms: float | None


class PathKernel(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel on a critical path.

    Attributes:
        name: name of the kernel.
        communication: whether it communicates.
        calls: number of its calls on the path.
        time_ms: their time on the path.
    """

    name: str
    communication: bool
    calls: int
    time_ms: float


class CriticalPath(msgspec.Struct, frozen=True, kw_only=True):
    """The critical path of a step: a chain of work, each link held up by the one before.

    The parts add up to its length.

    Attributes:
        step: number of the ``ProfilerStep#``; None if the file has no steps, and counts as one.
        length_ms: length of the step on the device, see ``DeviceTime``.
        compute_ms, comm_ms, copy_ms: kernels, collectives and copies on the path.
        launch_ms: from the launch of a kernel that nothing else held up to its start.
        host_ms: the host, on the way to such a launch.
        other_ms: gaps between two links on the device.
        at_most_compute_ms, at_most_comm_ms, at_most_host_ms: what would be won at most if compute, communication, or
            the host took no time: no more than the path has of it, and no more than the other work on its busiest
            stream leaves. None if the host is on the path and the file does not record when it waits for the device:
            then that time may be compute's or communication's.
        kernels: on the path, those with the most time first; ten at most.
    """

    step: int | None
    length_ms: float
    compute_ms: float
    comm_ms: float
    copy_ms: float
    launch_ms: float
    host_ms: float
    other_ms: float
    at_most_compute_ms: float | None
    at_most_comm_ms: float | None
    at_most_host_ms: float | None
    kernels: tuple[PathKernel, ...] = ()


class TopKernel(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one kernel, in the whole file.

    Attributes:
        name: name of the kernel.
        family: its family; of a kernel that communicates, its kind of collective.
        communication: whether it communicates.
        calls: number of calls.
        time_ms: sum of their times.
        share: ``time_ms`` as a share of the sum over all kernels and collectives.
        longest_ms: time of the longest call.
        beside_ms: the part of ``time_ms`` beside communication; of a kernel that communicates, beside compute.
    """

    name: str
    family: str
    communication: bool
    calls: int
    time_ms: float
    share: float
    longest_ms: float
    beside_ms: float


class StreamQueue(msgspec.Struct, frozen=True, kw_only=True):
    """Launches in flight on one stream: kernels and copies that were launched and had not started yet.

    Attributes:
        stream: name of the stream in the file.
        launches: number of its kernels and copies whose launch is known.
        longest: most that waited at one time.
        mean: mean number that waited, over the file.
        delay_ms: mean time from launch to start.
    """

    stream: str
    launches: int
    longest: int
    mean: float
    delay_ms: float


class HostLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the host keeps the device waiting.

    Attributes:
        launch_bound: whether at least a tenth of the time is idle since launches come late, and most of that in gaps
            shorter than a millisecond.
        idle_fraction: share of the file in which the device was idle since a launch came late.
        gaps: number of such gaps.
        short_gaps_ms: time of those shorter than a millisecond.
        longest_gap_ms: the longest.
        kernel_us: median time of the kernels, collectives left out; None without compute.
        launch_interval_us: median time from one launch to the next; None with fewer than two launches.
    """

    launch_bound: bool
    idle_fraction: float
    gaps: int
    short_gaps_ms: float
    longest_gap_ms: float
    kernel_us: float | None
    launch_interval_us: float | None


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """What the device did over time, in equal parts of the file. Each number is a share of its part.

    Attributes:
        part_ms: length of each part.
        compute: compute ran.
        exposed_comm: communication was in flight and no compute ran.
    """

    part_ms: float
    compute: tuple[float, ...]
    exposed_comm: tuple[float, ...]
