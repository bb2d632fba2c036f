from __future__ import annotations

import pytest
import torch

from tests.gpu.machine import ASKED_FOR_CPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            has_cpu_form = getattr(item.module, "HAS_CPU_FORM", False)  # always runs, on what there is
            if has_cpu_form and not torch.cuda.is_available():
                continue
            item.add_marker(pytest.mark.gpu)
            tried_on_cpu = ASKED_FOR_CPU and getattr(item.module, "TRIED_ON_CPU", False)
            if not (torch.cuda.is_available() or tried_on_cpu):
                item.add_marker(pytest.mark.skip(reason="no accelerator"))
