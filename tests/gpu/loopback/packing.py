"""Compiled kernels of the link for another machine, which has no nvcc."""

from __future__ import annotations

import shutil
from pathlib import Path

from overlap_callbacks.experiments.loopback.device_link import PACKED, cache, compile_library, library_file

# For all of these, and for later ones through the code of the first.
_PACKED_FOR = ("80", "90", "100")


def pack(folder: Path) -> Path:
    """Compile the kernels for the usual GPUs, into one library. Raises as ``compile_library``."""
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in _PACKED_FOR]
    later = f"-gencode=arch=compute_{_PACKED_FOR[0]},code=compute_{_PACKED_FOR[0]}"
    return compile_library(PACKED, folder, (*codes, later))


def unpack(folder: Path) -> Path | None:
    """Put a packed library where the link looks for it; None if ``folder`` has none of these sources."""
    packed = library_file(PACKED, folder)
    if not packed.exists():
        return None
    target = library_file(PACKED, cache())
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(packed, target)
    return target
