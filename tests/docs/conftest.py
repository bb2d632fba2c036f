"""The site, built once, and the texts that it is made from."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.margins import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
SKILL = ROOT / "overlap_callbacks" / ".agents" / "skills" / "overlap-callbacks" / "SKILL.md"


@pytest.fixture(scope="session")
def hooks() -> ModuleType:
    """``docs/hooks.py``, which MkDocs loads by its path."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; anything that a strict build warns of is an error."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; the test fails if one logs anything, or asks for what is not below ``base``."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(url: str, base: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(1e3 * PATIENCE_S)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{url}: console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"{url}: {error}"))
        page.on(
            "response",
            lambda reply: complaints.append(f"{url}: {reply.status}: {reply.url}") if reply.status >= 400 else None,
        )

        def only_the_site(route: Any) -> None:
            if route.request.url.startswith((base, "data:", "blob:")):
                route.continue_()
            else:
                complaints.append(f"{url}: request: {route.request.url}")
                route.abort()

        context.route("**/*", only_the_site)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
