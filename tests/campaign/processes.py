"""Starts the ranks of a job, disturbs them, and waits for their ends with a hard time limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
HOST = "127.0.0.1"
# Of all processes. torch looks up the name of each socket that it connects, and a name server that does not answer
# costs five seconds a time; see tests/conftest.py.
VARIABLES = {"PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "99", "RES_OPTIONS": "timeout:1 attempts:1"}
_ports: set[int] = set()
_ports_lock = threading.Lock()
_POLL_S = 0.005
_START_S = 120.0


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        code: its return code; negative for a signal; None if it had to be killed at the time limit.
        output: stdout and stderr.
        seconds: from its start to its end.
    """

    code: int | None
    output: str
    seconds: float


class Zygote:
    """A process that forks ranks; see ``zygote.py``.

    Args:
        modules: that it loads before it forks.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        variables = {**os.environ, **VARIABLES}
        variables.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
        script = Path(__file__).with_name("zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), *modules], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._asking = threading.Lock()
        self._started: queue.Queue[int] = queue.Queue()
        self._ended: dict[int, tuple[int, float]] = {}
        self._ready = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        if not self._ready.wait(_START_S):
            raise TimeoutError("the process that forks ranks did not start")

    def start(
        self, function: Callable[..., Any], arguments: Sequence[Any], folder: Path, output: Path, **environment: str
    ) -> Rank:
        """Fork a process that calls ``function(*arguments)`` in ``folder``. Threads may do so at the same time."""
        request = {
            "module": function.__module__, "function": function.__name__, "arguments": list(arguments),
            "folder": str(folder), "output": str(output), "environment": environment,
        }  # fmt: skip
        assert self._process.stdin is not None
        with self._asking:
            began_s = time.time()
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return Rank(self, self._started.get(timeout=_START_S), output, began_s)

    def ended(self, pid: int) -> tuple[int, float] | None:
        """The return code of a process and the time at which it ended; None while it runs."""
        return self._ended.get(pid)

    def close(self) -> None:
        """End the process, and all ranks that still run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10.0)
        self._listener.join(10.0)
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "ready" in message:
                self._ready.set()
            elif "started" in message:
                self._started.put(message["started"])
            else:
                self._ended[message["ended"]] = message["code"], message["at"]


class Rank:
    """A process of a job."""

    def __init__(self, zygote: Zygote, pid: int, output: Path, began_s: float) -> None:
        self._zygote = zygote
        self.pid = pid
        self._output = output
        self._began_s = began_s

    @property
    def runs(self) -> bool:
        return self._zygote.ended(self.pid) is None

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def ending(self) -> Ending:
        """How it ended. One that still runs shows its stacks, and is killed."""
        hung = self.runs
        if hung:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGUSR1)
            time.sleep(0.5)
            self.signal(signal.SIGKILL)
            wait_for(lambda: not self.runs, 10.0)
        code, at = self._zygote.ended(self.pid) or (None, time.time())
        output = self._output.read_text(errors="replace") if self._output.exists() else ""
        return Ending(None if hung else code, output, at - self._began_s)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something is so; False if it was not within the time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


@contextlib.contextmanager
def zygotes() -> Iterator[tuple[Zygote, Zygote]]:
    """One process that forks ranks without the library, one that forks ranks with it."""
    plain = Zygote(["torch", "torch._dynamo", "torch.profiler", "tests.campaign.job", "tests.campaign.cases"])
    try:
        library = Zygote(
            [
                "torch", "torch._dynamo", "torch.profiler", "torch.distributed.fsdp", "scipy.special",
                "tests.campaign.job", "tests.campaign.cases", "overlap_callbacks.integrations.pytorch",
                "overlap_callbacks.sinks", "overlap_callbacks.report.record", "overlap_callbacks.cli",
            ]
        )  # fmt: skip
        try:
            yield plain, library
        finally:
            library.close()
    finally:
        plain.close()


def free_port() -> int:
    """A port that nobody listens on, and that no other job of this process gets."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        with _ports_lock:
            if port not in _ports:
                _ports.add(port)
                return port
