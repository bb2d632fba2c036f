"""Pages opened in a headless Chromium, that may ask for nothing but themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import until
from tests.margins import PATIENCE_S


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file, with all that is folded; the test fails if the page logs an error, or asks for anything else."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(file: Path, *, unfolded: bool = True, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **options})
        context.set_default_timeout(1e3 * PATIENCE_S)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))

        def only_itself(route: Any) -> None:
            if route.request.url == file.as_uri():
                route.continue_()
            else:
                complaints.append(f"request: {route.request.url}")
                route.abort()

        page.route("**/*", only_itself)
        page.goto(file.as_uri())
        if unfolded:
            page.evaluate("document.querySelectorAll('main details').forEach((each) => { each.open = true; })")
        shown = "(chart) => chart.firstChild || !chart.checkVisibility()"
        until(page, f"[...document.querySelectorAll('[data-chart]')].every({shown})")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
