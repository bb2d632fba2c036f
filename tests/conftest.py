"""What the tests of several folders share."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.known_failures import known_failure

# torch looks up the name of each socket that it connects. Where the name server does not answer, that takes 5 s a time.
# The C library of the processes that tests start reads this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so do all processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.pages", "tests.perfetto_ui", "tests.simulated_gpu.meeting_place"]

# How long an example takes says nothing on a busy machine.
settings.register_profile("without deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("without deadline")

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


# Several files run at a time. Those that take minutes begin first, so that none is left alone at the end.
_LONG = (
    "monitor/test_asked.py", "integrations/test_megatron.py", "monitor/test_deciding.py",
    "integrations/test_transformers.py", "integrations/test_pytorch_parallel.py", "experiments/study",
    "cli/test_exit_codes.py", "test_examples.py", "integrations/test_arms.py",
    "gpu/test_loopback_refusals.py", "monitor/test_silence.py", "cli/test_tune.py", "docs/test_site.py",
    "integrations/test_deepspeed.py", "integrations/test_quick.py", "integrations/test_deepspeed_engine.py",
    "integrations/test_predicted_messages.py", "integrations/test_megatron_native.py", "report/html/test_browser.py",
    "integrations/test_huggingface_sharded.py", "traces/test_bad_input.py", "monitor/test_faults.py",
    "integrations/test_lightning_strategies.py", "cli/test_cli.py", "docs/test_commands.py", "loops/",
    "experiments/bench", "monitor/test_keys_left.py", "integrations/test_ddp_native.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first. What is known to fail with the versions installed must fail: if it passes, that is an error."""
    items.sort(key=lambda item: next((n for n, path in enumerate(_LONG) if f"tests/{path}" in item.nodeid), len(_LONG)))
    for item in items:
        if known := known_failure(item.nodeid):
            item.add_marker(pytest.mark.xfail(reason=known.reason, strict=True, run=not known.spoils))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files whose ranks load the same go to one process, whose servers then load it once; see ``distributed.py``."""
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def loads_of(file: str) -> str:
        found = re.search(r"^RANKS_LOAD = .*$", (config.rootpath / file).read_text(), re.MULTILINE)
        return found.group() if found else file

    class ByWhatRanksLoad(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return loads_of(super()._split_scope(nodeid))

    return ByWhatRanksLoad(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collectstart() -> None:
    """What is loaded now stays to the end: to look for garbage in it, again and again, is a fifth of the work."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. It goes with its module: Playwright's event loop would run under every later test."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((found for name in _PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium on this machine (looked for {', '.join(_PROGRAMS)})")
    with api.sync_playwright() as playwright:
        # Without its sandbox, which needs rights that a container rarely has: it opens nothing but our own pages.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()
