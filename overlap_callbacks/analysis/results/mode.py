"""How the collectives of a step run."""

from __future__ import annotations

import enum


class Mode(enum.Enum):
    OVERLAPPED = "overlapped"  # as the framework was configured
    SEQUENTIAL = "sequential"  # each collective is a barrier between compute and communication on its device
