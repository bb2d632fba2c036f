"""Only ``python3 dev.py test --simulated-gpu`` runs these tests: elsewhere they are skipped, with the reason."""

from __future__ import annotations

import pytest

from tests.simulated_gpu.parameters import ON_SIMULATED_GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_SIMULATED_GPU:
        return
    reason = "needs the simulated GPU: python3 dev.py test --simulated-gpu"
    for item in items:
        if "tests/simulated_gpu/" in item.nodeid:
            item.add_marker(pytest.mark.skip(reason=reason))
