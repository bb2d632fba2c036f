"""Only ``python3 dev.py test --simulated-gpu`` runs these tests: elsewhere they are skipped, with the reason."""

from __future__ import annotations

import os

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
