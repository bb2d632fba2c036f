"""Why a command failed, in a line: its exit code, and the line of its output that says most."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from overlap_callbacks.analysis.formatting import shortened
from overlap_callbacks.analysis.safe_text import printable

# So much of the end of the output is looked at.
_TAIL_BYTES = 256 * 1024
_MAX_LENGTH = 200

_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# "[rank1]: torch.OutOfMemoryError: CUDA out of memory. ...", with what launchers put before it.
_ERROR = re.compile(
    r"^(?:\[[^\]]*\]:?\s*|\d+:\s*)*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Failure)\b.*)$"
)
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|Cannot allocate memory|can't allocate memory", re.IGNORECASE)
# What a launcher, or another rank, says of a rank that has failed.
_CONSEQUENCE = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|SignalException|CalledProcessError"
    r"|Connection (?:reset|closed|refused)|Broken pipe|DistNetworkError|DistStoreError"
)


def exit_in_words(exit_code: int) -> str:
    """E.g. ``exit code 1`` or ``ended by SIGKILL``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


def telling_line(output: str) -> str:
    """The line of a command's output that says most of why it failed; empty where there is no output.

    That is a line which tells of memory; else the last line of an exception that is no consequence of another; else
    the last line.
    """
    lines = [line.strip() for line in _COLORS.sub("", output).splitlines() if line.strip()]
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    causes = [line for line in errors if not _CONSEQUENCE.search(line)]
    memory = [line for line in errors or lines if _OUT_OF_MEMORY.search(line)]
    told = (memory or causes[-1:] or errors[-1:] or lines[-1:] or [""])[0]
    return printable(shortened(told, _MAX_LENGTH))


def end_of(file: Path) -> str:
    """The end of a file with output; empty where there is none."""
    try:
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, 2) - _TAIL_BYTES))
            return source.read().decode(errors="replace")
    except OSError:
        return ""
