"""When the host launched the kernels of a trace, and when it waited for the device."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from overlap_callbacks.analysis.intervals import Intervals, distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable, Kind

# Calls in which the host waits for the device.
WAITING_CALLS = frozenset({
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize",
    "hipDeviceSynchronize", "hipStreamSynchronize", "hipEventSynchronize", "hipMemcpy", "hipMemcpyWithStream",
})  # fmt: skip


class Launches(msgspec.Struct, frozen=True):
    """The host's side of the kernels of a trace.

    Attributes:
        launched_ns: when the call began that launched each kernel, -1 if the file does not tell; shape (n,).
        waits: when the host waited for the device, in ascending order of their ends.
        streams: name of each lane of the kernels, by its number: the stream, as it is in the file.
        range_of: in which range of the host each kernel was launched, as an index into ``ranges``, -1 if in none; shape
            (n,). None if the file has no ranges.
        ranges: names of ranges of the host.
        records_waits: whether the file has any call in which the host waits for the device. The profiler makes one at
            its end; files from which such calls were left out have none.
    """

    launched_ns: Indices
    waits: Intervals
    streams: tuple[str, ...] = ()
    records_waits: bool = False
    range_of: Indices | None = None
    ranges: tuple[str, ...] = ()

    @classmethod
    def none(cls, num_kernels: int) -> Launches:
        """Of a file that tells nothing of launches."""
        return cls(np.full(num_kernels, -1, dtype=np.int64), Intervals.empty())

    def __getitem__(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Launches:
        """The launches of the selected kernels."""
        range_of = None if self.range_of is None else self.range_of[rows]
        return msgspec.structs.replace(self, launched_ns=self.launched_ns[rows], range_of=range_of)

    @property
    def known(self) -> bool:
        """Whether any kernel's launch is known."""
        return bool((self.launched_ns >= 0).any())


def launches_of(wanted: npt.NDArray[np.uint64], correlation: npt.NDArray[np.uint64]) -> Indices:
    """The place of the launch of each kernel, -1 where there is none. Of several with one number the first counts.

    Args:
        wanted: number that each kernel shares with its launch, 0 for none; shape (n,).
        correlation: number of each launch; shape (launches,).
    """
    if not len(correlation):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(correlation, kind="stable")
    launch = order[np.minimum(np.searchsorted(correlation[order], wanted), len(order) - 1)]
    return np.where((correlation[launch] == wanted) & (wanted != 0), launch, -1)


def launch_interval_ns(launched_ns: Indices) -> float | None:
    """Median time from one launch to the next; None with fewer than two.

    Args:
        launched_ns: when each row was launched, -1 if unknown; shape (n,).
    """
    times_ns = distinct_values(launched_ns[launched_ns >= 0])
    return float(np.median(np.diff(times_ns))) if len(times_ns) > 1 else None


def waits_of(
    calls: tuple[Indices, Indices, npt.NDArray[np.bool_], int],
    launched_ns: Indices,
    returned_ns: Indices,
    kernels: KernelTable,
) -> Intervals:
    """When the host waited for the device, in ascending order of the ends.

    It does so in calls that are made for it, and in those of copies that return after the copy has ended.

    Args:
        calls: start and end of each call that is made for it, and which of them have no time.
        launched_ns: when the call began that launched each row, -1 if unknown; shape (n,).
        returned_ns: when it returned; shape (n,).
        kernels: the rows.
    """
    start, end, impossible, _ = calls
    blocking = (kernels.kind == Kind.COPY) & (launched_ns >= 0) & (returned_ns >= kernels.intervals.end_ns)
    start = np.concatenate((start[~impossible], launched_ns[blocking]))
    end = np.concatenate((end[~impossible], returned_ns[blocking]))
    order = np.argsort(end, kind="stable")
    return Intervals(start[order], end[order])
