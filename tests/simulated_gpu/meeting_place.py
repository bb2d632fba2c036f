"""Where the ranks of a job on the simulated GPU meet, for tests of any folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.simulated_gpu.parameters import ON_SIMULATED_GPU, Parameters


def new_place() -> tempfile.TemporaryDirectory[str]:
    """A folder, in memory if possible: ranks leave behind what they sent each other."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="simulated-gpu-", dir=memory if os.access(memory, os.W_OK) else None)


@contextmanager
def meeting_place() -> Iterator[Path]:
    """A folder for the processes of a job that start within."""
    with new_place() as folder:
        # The processes that ranks are forked from start later, and inherit it.
        Parameters(folder=Path(folder)).apply()
        yield Path(folder)


@pytest.fixture(scope="session", autouse=True)
def _meeting_place() -> Iterator[Path | None]:
    if not ON_SIMULATED_GPU:
        yield None
        return
    with meeting_place() as folder:
        yield folder


@pytest.fixture(autouse=True)
def _empty_meeting_place(_meeting_place: Path | None) -> Iterator[None]:
    """A job of two ranks leaves some 100 MB."""
    yield
    for left in _meeting_place.iterdir() if _meeting_place else ():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
