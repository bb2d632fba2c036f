"""Decides when what is read of a trace is too much for memory, and has it written to files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from overlap_callbacks.traces.device_events import DeviceEvents
from overlap_callbacks.traces.host_events import HostEvents

if TYPE_CHECKING:
    from overlap_callbacks.traces.long.columns import Folder
    from overlap_callbacks.traces.long.spill import HostSpill, Spill

# Events that are held in memory before they are written to files, and between one time and the next.
MAX_IN_MEMORY, MAX_SPILLING = 5 * 2**16, 2**16

Events = TypeVar("Events", DeviceEvents, HostEvents)


class _Files(Protocol):
    def take(self, events: Any) -> None: ...


Files = TypeVar("Files", bound=_Files)


class _Writer(Generic[Events, Files]):
    """Writes events to files, if there are many.

    Args:
        folder: takes the files.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files: Files | None = None

    def look(self, events: Events) -> None:
        """Write what was collected, if it is much.

        Raises:
            TraceError: it cannot be written.
        """
        if events.num_held > (MAX_IN_MEMORY if self._files is None else MAX_SPILLING):
            self._write(events)

    def finish(self, events: Events) -> Files | None:
        """Write the rest, if some was written. Returns what was written.

        Raises:
            TraceError: it cannot be written.
        """
        if self._files is not None:
            self._write(events)
        return self._files

    def _new(self) -> Files:
        """The files, which are empty."""
        raise NotImplementedError

    def _write(self, events: Events) -> None:
        if self._files is None:
            self._files = self._new()
        self._files.take(events)


class Spilling(_Writer[DeviceEvents, "Spill"]):
    """Writes the events of a device to files, if there are many.

    Args:
        folder: takes the files.
        with_ranges: whether to keep the ranges of the host that have names.
    """

    def __init__(self, folder: Folder, *, with_ranges: bool = False) -> None:
        super().__init__(folder)
        self._with_ranges = with_ranges

    def finish(self, events: DeviceEvents) -> Spill | None:
        """Write the rest, if some was written. Returns what was written; None of a file without rows."""
        found = super().finish(events)
        return found if events.num_rows else None

    def _new(self) -> Spill:
        from overlap_callbacks.traces.long.spill import Spill

        return Spill(self._folder, with_ranges=self._with_ranges)


class HostSpilling(_Writer[HostEvents, "HostSpill"]):
    """Writes the operators of a host to files, if there are many."""

    def _new(self) -> HostSpill:
        from overlap_callbacks.traces.long.spill import HostSpill

        return HostSpill(self._folder)
