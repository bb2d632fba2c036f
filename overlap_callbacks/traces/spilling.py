"""Decides when what is read of a trace is too much for memory, and has it written to files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_callbacks.traces.collect import DeviceEvents
from overlap_callbacks.traces.files import TraceError

if TYPE_CHECKING:
    from overlap_callbacks.traces.long.columns import Folder
    from overlap_callbacks.traces.long.spill import Spill

# Events of a device that are held in memory before they are written to files, and between one time and the next.
MAX_IN_MEMORY, MAX_SPILLING = 2**18, 2**16


class Spilling:
    """Writes the events of one trace to files, if there are many.

    Args:
        folder: takes the files.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._spill: Spill | None = None

    def look(self, events: DeviceEvents) -> None:
        """Write what was collected, if it is much.

        Raises:
            TraceError: it cannot be written.
        """
        if events.num_held > (MAX_IN_MEMORY if self._spill is None else MAX_SPILLING):
            self._write(events)

    def finish(self, events: DeviceEvents) -> Spill | None:
        """Write the rest, if some was written. Returns what was written; None of a file without rows.

        Raises:
            TraceError: it cannot be written.
        """
        if self._spill is not None:
            self._write(events)
        return self._spill if events.num_rows else None

    def _write(self, events: DeviceEvents) -> None:
        from overlap_callbacks.traces.long.spill import Spill

        try:
            if self._spill is None:
                self._spill = Spill(self._folder)
            self._spill.take(events)
        except OSError as error:
            raise TraceError(
                f"the trace is too long for memory, and a temporary file cannot be written: {error}; TMPDIR names "
                "another folder for it"
            ) from None
