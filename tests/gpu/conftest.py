from __future__ import annotations

import pytest
import torch

from tests.gpu.machine import ON_CPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            tried_on_cpu = ON_CPU and getattr(item.module, "TRIED_ON_CPU", False)
            if not (torch.cuda.is_available() or tried_on_cpu):
                item.add_marker(pytest.mark.skip(reason="no accelerator"))
