"""The mode in which the collectives of a step run."""

from __future__ import annotations

import enum


class Mode(enum.Enum):
    OVERLAPPED = "overlapped"  # as the framework was configured
    SEQUENTIAL = "sequential"  # each collective waits for earlier work on its device, and later work for it
