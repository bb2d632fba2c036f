"""The gate's mark on threads where torch cannot remove it, as torch 2.8 cannot."""

from __future__ import annotations

import pytest
import torch

from overlap_callbacks.gate import dispatcher as module
from tests.gate.test_threads import in_a_thread


def marked_and_not(placement: module._AtBackendSelect) -> tuple[bool, ...]:
    """Whether a thread of its own is marked: before its first step, then in and after each of two."""
    found = []

    def mark() -> None:
        is_marked = module._is_marked()
        found.append(bool(is_marked(module.MARK)))
        for _ in range(2):
            placement.enter()
            found.append(bool(is_marked(module.MARK)))
            placement.leave()
            found.append(bool(is_marked(module.MARK)))
            placement.leave()  # a step that ended on another thread leaves twice

    in_a_thread(mark)
    return tuple(found)


@pytest.mark.parametrize("removable", [True, False])
def test_a_thread_is_marked_in_its_steps_only(monkeypatch: pytest.MonkeyPatch, removable: bool) -> None:
    if not removable:
        monkeypatch.delattr(torch._C, "_remove_obj_from_tls", raising=False)
    assert marked_and_not(module._AtBackendSelect()) == (False, True, False, True, False)
