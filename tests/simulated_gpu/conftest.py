"""Only ``python3 dev.py test --simulated-gpu`` runs these tests: elsewhere they are skipped, with the reason."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.simulated_gpu.build import LIBRARIES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_simulation = torch.version.cuda is not None and str(LIBRARIES) in os.environ.get("LD_LIBRARY_PATH", "")
    if on_simulation:
        return
    reason = "needs the simulated GPU: python3 dev.py test --simulated-gpu"
    for item in items:
        if "tests/simulated_gpu/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def meeting_place() -> Iterator[Path]:
    """Where the ranks of all jobs meet, in memory if possible: they leave behind what they sent each other."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="simulated-gpu-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        # The processes that ranks are forked from start later, and inherit it.
        os.environ["SIMGPU_FOLDER"] = folder
        yield Path(folder)


@pytest.fixture(autouse=True)
def _empty_meeting_place(meeting_place: Path) -> Iterator[None]:
    """A job of two ranks leaves some 100 MB."""
    yield
    for left in meeting_place.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
