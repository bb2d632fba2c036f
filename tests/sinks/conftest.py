from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb as if it had never run on this machine, and gone again afterwards."""
    for name in ("WANDB_DIR", "HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    gc.freeze()  # the garbage of this test is looked for, not that of all that is loaded
    yield
    if sys.modules.get("wandb") is not None:
        sys.modules["wandb"].teardown()
        with warnings.catch_warnings():
            # wandb leaves the folders in which it prepares artifacts to the garbage collector, which says so.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    gc.unfreeze()
