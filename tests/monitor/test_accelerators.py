"""Devices that cannot be timed: refused where the job uses them, and no matter where it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.monitor import session
from overlap_callbacks.monitor.accelerators import accelerator_in_use
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, Training, new_monitor, run_steps


def has(monkeypatch: pytest.MonkeyPatch, kind: str | None, module: Any) -> str:
    device = None if kind is None else SimpleNamespace(type=kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(torch, "get_device_module", lambda of: module)
    return accelerator_in_use()


def module_with(initialized: bool, num_bytes: int) -> Any:
    return SimpleNamespace(is_initialized=lambda: initialized, memory_allocated=lambda: num_bytes)


def test_an_accelerator_is_in_use_if_the_process_has_tensors_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has(monkeypatch, "xpu", module_with(True, 512)) == "xpu"
    assert has(monkeypatch, "npu", module_with(True, 512)) == "npu"


def test_an_accelerator_that_the_machine_has_and_the_job_leaves_alone_is_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert has(monkeypatch, "xpu", module_with(False, 0)) == ""
    assert has(monkeypatch, "xpu", module_with(True, 0)) == ""
    assert has(monkeypatch, "mps", SimpleNamespace()) == ""  # does not tell; its tensors will
    assert has(monkeypatch, None, None) == ""
    assert has(monkeypatch, "cuda", module_with(True, 512)) == ""


def train_beside_an_accelerator(rank: int, in_use: str) -> tuple[list[str], bool, int]:
    session.accelerator_in_use = lambda: in_use  # type: ignore[attr-defined]
    monitor = new_monitor(sink := KeptReports())
    with captured_log() as lines:
        run_steps(Training(rank), monitor, 10)
    active = monitor.active
    monitor.close()
    return lines, active, len(sink.facts())


def test_a_job_on_another_accelerator_is_not_measured_and_one_line_says_so() -> None:
    for lines, active, reports in run_ranks(train_beside_an_accelerator, 2, "xpu"):
        assert not active
        assert reports == 0
        assert len(lines) == 1
        assert "'xpu'" in lines[0]


def test_a_job_on_the_cpu_of_a_machine_with_another_accelerator_is_measured() -> None:
    found = run_ranks(train_beside_an_accelerator, 2, "")
    assert all(active and lines == [] for lines, active, _ in found)
    assert found[0][2] > 0
