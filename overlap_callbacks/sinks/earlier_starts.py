"""What the earlier starts of a resumed job measured, from the record that all of them write."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import without_details

# As ``JsonlSink`` writes them.
_RUN, _WINDOW, _ARM = b'{"record":"run"', b'{"record":"window"', b'{"record":"arm"'
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class EarlierStarts(NamedTuple):
    """What was measured before this start of the job.

    Attributes:
        windows: without their details.
        arms: windows of other arms.
    """

    windows: list[OverlapReport]
    arms: list[ArmReport]


def earlier_starts(record: Path) -> EarlierStarts:
    """What stands in a record before its last start; a line that cannot be read is left out.

    A record that leads to a device, such as ``/dev/full``, holds nothing: reading it might never end.

    Raises:
        OSError: the record cannot be read.
    """
    found, before = EarlierStarts([], []), EarlierStarts([], [])
    decode_window, decode_arm = msgspec.json.Decoder(OverlapReport).decode, msgspec.json.Decoder(ArmReport).decode
    if not stat.S_ISREG(record.stat().st_mode):
        return before
    with record.open("rb") as lines:
        for line in lines:
            try:
                if line.startswith(_RUN):
                    before = EarlierStarts([*before.windows, *found.windows], [*before.arms, *found.arms])
                    found = EarlierStarts([], [])
                elif line.startswith(_WINDOW):
                    found.windows.append(without_details(decode_window(line)))
                elif line.startswith(_ARM):
                    found.arms.append(decode_arm(line))
            except _UNREADABLE:
                continue
    return before
