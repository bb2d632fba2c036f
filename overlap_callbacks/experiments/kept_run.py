"""One command with a folder of its own, in which its output is kept, and within the time that is left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlap_callbacks.analysis.results.env_overrides import RUN_DIR, SWITCH, TIME_ONLY
from overlap_callbacks.experiments.failures import end_of, telling_line
from overlap_callbacks.experiments.supervisor import Ending, Outcome, supervise

_STDOUT, _STDERR = "stdout.log", "stderr.log"


@dataclass(frozen=True)
class Limits:
    """How long a command may take.

    Attributes:
        timeout_s: after so long it has failed.
        left_s: after so long the time for all of them is over; then it counts for nothing.
    """

    timeout_s: float
    left_s: float


def fresh_folder(folder: Path, name: str) -> Path:
    """The folder of a command, empty.

    Args:
        folder: of the results.
        name: of the command's own.

    Raises:
        OSError: it cannot be made.
    """
    own = (folder / "runs" / name).resolve()
    if own.exists():
        shutil.rmtree(own)  # of a run that was cut short
    own.mkdir(parents=True)
    return own


def run_kept(
    command: Sequence[str],
    own: Path,
    limits: Limits,
    *,
    environment: Mapping[str, str],
    is_done: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Run a command with the library's record in its own folder.

    Args:
        command: program and arguments.
        own: its folder.
        limits: of time.
        environment: what it has beside ours. How the library is told what to do from outside, it has from here alone.
        is_done: asked again and again; the command is ended once it says so.

    Returns:
        How it ended; None where the time for all was over first.

    Raises:
        OSError: the command cannot be started, or a file of it cannot be written.
        KeyboardInterrupt: Ctrl-C. The command has ended.
    """
    ours = {name: value for name, value in os.environ.items() if name not in (SWITCH, TIME_ONLY)}
    with (own / _STDOUT).open("wb") as stdout, (own / _STDERR).open("wb") as stderr:
        outcome = supervise(
            command,
            environment={**ours, **environment, RUN_DIR: str(own)},
            is_done=is_done,
            timeout_s=min(limits.timeout_s, limits.left_s),
            stdout=stdout,
            stderr=stderr,
        )
    return None if outcome.ending is Ending.TIMEOUT and limits.left_s < limits.timeout_s else outcome


def said(own: Path) -> str:
    """What a command said of its failure, to follow other words; empty where it said nothing."""
    line = telling_line(end_of(own / _STDERR)) or telling_line(end_of(own / _STDOUT))
    return f": {line}" if line else ""
