"""Analyses traces that a running job exports, without holding the job up: for torchtitan's ``trace_post_processor``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from overlap_callbacks._log import logger

_TIMEOUT_S = 600.0
_RANK = re.compile(r"rank[_-]?(\d+)")


def analyze_export(trace: str | os.PathLike[str]) -> None:
    """Run ``overlap analyze`` on a trace that this job has just exported, in another process.

    Its output goes to a file beside the trace, ``rank0_trace.overlap.txt``, and the first sentence to the log. Only the
    trace of rank 0 is analysed, so each rank may call this. Returns at once and never raises.
    """
    try:
        path = Path(trace)
        rank = _RANK.search(path.name)
        if rank is None or int(rank[1]) == 0:
            threading.Thread(target=_analyze, args=(path,), name="overlap-callbacks-trace", daemon=True).start()
    except Exception as error:  # the caller is a training loop
        _warn(trace, error)


def _analyze(path: Path) -> None:
    output = path.with_name(f"{path.name.partition('.')[0]}.overlap.txt")
    try:
        with output.open("wb") as file:  # so that the command goes on if the job ends first
            done = subprocess.run(
                [sys.executable, "-m", "overlap_callbacks", "analyze", str(path)],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "200"},
                timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
        answer = output.read_text(errors="replace").partition("\n")[0].strip()
        if not answer:
            said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
            raise OSError(said[-1])
        logger.info("overlap-callbacks: %s %s has all of it", answer, output)
    except Exception as error:
        _warn(path, error)


def _warn(trace: str | os.PathLike[str], error: Exception) -> None:
    logger.warning("overlap-callbacks: %s is not analysed: %s [OC706]", trace, error)
