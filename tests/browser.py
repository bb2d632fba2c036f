"""What tests of pages share besides the ``browser`` of ``tests/conftest.py``."""

from __future__ import annotations

import time
from typing import Any

from tests.margins import PATIENCE_S


def until(page: Any, condition: str) -> None:
    """Wait until an expression holds. Playwright's own wait needs eval, which a page's policy may forbid."""
    end = time.monotonic() + PATIENCE_S
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never came true: {condition}"
        page.wait_for_timeout(20)
