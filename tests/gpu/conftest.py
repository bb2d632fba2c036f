from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu import not_simulated
from tests.gpu.machine import ASKED_FOR_CPU, HAS_GPU, ON_CPU
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu/" in item.nodeid:
            has_cpu_form = getattr(item.module, "HAS_CPU_FORM", False)  # always runs, on what there is
            if has_cpu_form and not HAS_GPU:
                continue
            item.add_marker(pytest.mark.gpu)
            tried_on_cpu = ASKED_FOR_CPU and getattr(item.module, "TRIED_ON_CPU", False)
            if not (HAS_GPU or tried_on_cpu):
                item.add_marker(pytest.mark.skip(reason="no accelerator"))
            elif ON_SIMULATED_GPU and (reason := not_simulated.reason(item.nodeid)):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """On the simulated GPU only those tests are skipped that the table names."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if ON_SIMULATED_GPU and not ON_CPU and skipped and not not_simulated.reason(item.nodeid):
        report.outcome = "failed"
        report.longrepr = f"skipped, and not in tests/gpu/not_simulated.py: {report.longrepr}"
    return report
