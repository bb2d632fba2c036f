"""What this host has for programs: memory, cores, and the name of its CPU."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def free_bytes() -> int | None:
    """Memory that programs can have, what caches would give up included; None where Linux does not tell."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def cores() -> int:
    """Cores that this process may use: of a container, or under taskset, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """E.g. ``AMD EPYC 9R14, 8 cores``."""
    try:
        found = re.search(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1]}, {cores()} cores" if found else platform.processor() or platform.machine()
