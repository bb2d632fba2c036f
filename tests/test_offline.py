"""The library asks nothing of the network: not when it is imported, measures, shows a record or writes its page."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import offline_jobs
from tests.cli.test_cli import check_demo
from tests.margins import PATIENCE_S

JOB = [sys.executable, "-m", "tests.offline_jobs"]
ROOT = Path(__file__).parent.parent
# What a page loads by itself: a link that a reader may follow is none of these.
LOADED = re.compile(
    r"""<(?:script|img|iframe|link|source|video|audio|embed|object)\b[^>]*?\b(?:src|href|data)\s*=\s*["']?(?:https?:)?//"""
    r"""|url\(\s*["']?(?:https?:)?//|@import\s+["']?(?:https?:)?//""",
    re.IGNORECASE,
)


def isolated() -> bool:
    """Whether a network namespace of one's own may be made here, and its loopback interface brought up."""
    if not all(map(shutil.which, ("unshare", "ip"))):
        return False
    tried = subprocess.run(
        ["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True, check=False, timeout=30
    )
    return tried.returncode == 0


@pytest.mark.slow
def test_the_demo_asks_nothing_of_the_network_and_measures_all_five_equations(tmp_path: Path) -> None:
    """Where a network namespace may be made, the job has no network but loopback."""
    apart = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if isolated() else []
    command = [*apart, *JOB, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    asked = tmp_path / offline_jobs.ASKED
    assert not asked.exists(), asked.read_text()
    page = (tmp_path / "page.html").read_text()
    assert "</html>" in page
    assert LOADED.findall(page) == []
    found, _ = json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("{"))
    check_demo(found, tmp_path / "run")


@pytest.mark.parametrize("host", ["192.0.2.1", "example.invalid", b"example.invalid", "2001:db8::1"])
def test_the_guard_refuses_any_other_machine(host: str | bytes) -> None:
    with pytest.raises(offline_jobs.RequestError, match="asked for"):
        offline_jobs._refuse_others(host, "connect")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", socket.gethostname()])
def test_the_guard_lets_this_machine_pass(host: str) -> None:
    offline_jobs._refuse_others(host, "connect")


def test_a_request_is_noted_even_if_its_caller_catches_the_error(tmp_path: Path) -> None:
    asks = f"""
import contextlib, pathlib, socket
from tests import offline_jobs
offline_jobs.forbid_requests(pathlib.Path({str(tmp_path)!r}))
with contextlib.suppress(Exception):
    socket.create_connection(("192.0.2.1", 80), timeout=1)
socket.getaddrinfo("localhost", 80)
"""
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / offline_jobs.ASKED).read_text() == "getaddrinfo asked for '192.0.2.1'\n"


def test_what_a_page_would_load_is_found() -> None:
    assert LOADED.search('<script src="https://cdn.invalid/a.js">')
    assert LOADED.search("body { background: url(//cdn.invalid/a.png) }")
    assert not LOADED.search('<a href="https://example.invalid">read on</a>')
