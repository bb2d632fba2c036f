"""How much memory this host has for programs."""

from __future__ import annotations

import re
from pathlib import Path


def free_bytes() -> int | None:
    """Memory that programs can have, what caches would give up included; None where Linux does not tell."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])
