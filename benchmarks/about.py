"""What each table of a benchmark says of itself."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import overlap_callbacks


def about(*packages: str, **more: Any) -> dict[str, Any]:
    """When a table was made, by which command, with which versions and on how many cores.

    Args:
        *packages: whose versions matter too.
        **more: what else it was made with.
    """
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "date": datetime.date.today().isoformat(), "command": f"python benchmarks/{command}",
        "python": platform.python_version(), "overlap_callbacks": overlap_callbacks.__version__, **versions,
        "cores": os.cpu_count(), "machine": platform.machine(), **more,
    }  # fmt: skip
