"""Forks ranks that have torch loaded already, and that end as an interpreter ends.

This file is run as a script, by ``processes.py``. It reads one JSON object a line: what to call, and in which
environment. A rank is a fork of this process that runs on to the end of this script: its ``atexit`` functions run, its
daemon threads are left behind, and torch is taken down, as in any script. Loading torch takes seconds, a fork
milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

_POLL_S = 0.02


def serve(modules: list[str]) -> dict[str, Any] | None:
    """Fork ranks until there are no more requests. Returns in a rank, with its work."""
    for module in modules:
        importlib.import_module(module)
    # What is loaded by now is shared with all ranks: without this each would copy it when its garbage is collected.
    gc.collect()
    gc.freeze()
    _say({"ready": os.getpid()})
    living: set[int] = set()
    waiting = b""
    while True:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable:
            read = os.read(0, 65536)
            if not read:
                for pid in living:
                    os.kill(pid, signal.SIGKILL)
                return None
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if not pid:
                    return request
                living.add(pid)
                _say({"started": pid})
        for pid in sorted(living):
            with contextlib.suppress(ChildProcessError):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    living.discard(pid)
                    _say({"ended": pid, "code": os.waitstatus_to_exitcode(status), "at": time.time()})


def _say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def become(request: dict[str, Any]) -> Any:
    """Turn this process into a rank; returns what it has to call."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # A shell starts what runs in the background with SIGINT ignored, and ranks would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Of the thread that fails alone: where a thread of torch aborts while the interpreter ends, to walk the stacks of
    # the others may end in SIGSEGV.
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    return getattr(importlib.import_module(request["module"]), request["function"])


if __name__ == "__main__":
    request = serve(sys.argv[1:])
    if request is not None:
        become(request)(*request["arguments"])
