"""What a case is, and the list that they are entered in."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.campaign.job import Rank
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU


class Job(Protocol):
    """A running job, as a disturbance sees it."""

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, or to all (-1)."""

    def signal_store(self, number: int) -> None:
        """Send a signal to the process that serves the store."""

    def await_step(self, rank: int, step: int) -> bool:
        """Wait until a rank has done this many steps; False if it has ended."""

    def await_stop(self, rank: int) -> bool:
        """Wait until a signal has stopped a rank; False if it has ended."""

    def await_end(self, rank: int) -> None:
        """Wait until a rank has ended."""


# The group of cases that need a device.
ON_DEVICES = "Devices"
NEEDS_DEVICE = "needs a device"

Disturb = Callable[[Job, random.Random], None]


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: of the case, for the command line.
        group: its heading.
        what: is done, in a sentence.
        run: a rank's part; runs with the library and without.
        disturb: what is done from outside meanwhile.
        world_size: ranks.
        server: whether a process of its own serves the store, and not rank 0.
        runs: in the full form, on a CPU.
        device_runs: the same on a device; 0 where the case has nothing to do with one.
        faults: of the device, as ``Parameters.faults`` puts them. Such a case does not run on a CPU.
        says: what the library says, a regular expression; empty where it has nothing to say.
        may_say: what else the library may say, a regular expression; empty for nothing.
        may_be_silent: whether it may have nothing to say, because the fault came between windows, say.
        sentences: how many sentences a rank may say, where the fault has several consequences for its user.
        in_record: whether the sentence stands in the record, as a note of a window, and not in the log.
        also: ways of ending that come about by chance without the library, whichever rank ends first.
        ends: whether the fault ends the job without the library; else it had no effect, and shows nothing.
        bound_s: how much longer than without the library the job may take.
        limit_s: hard limit of a run.
        torchrun: start it with torchrun, which restarts it so often at most; None for plain processes.
        needs: says why the case cannot run here; empty if it can.
        packages: that it runs, as the package index names them. The table shows their versions. Without one of them the
            case cannot run.
        options: that the ranks get, in the full form and in the quick one.
        nightly: why it is left out of the quick form; empty if it is not.
        record: whether there must be a record that can be read: "yes", "maybe" or "none".
        whole_window: whether the record must hold a window with all steps of all ranks.
    """

    name: str
    group: str
    what: str
    run: Callable[[Rank], None]
    disturb: Disturb | None = None
    world_size: int = 2
    server: bool = False
    runs: int = 3
    device_runs: int = 0
    faults: Callable[[random.Random], str] | None = None
    says: str = ""
    may_say: str = ""
    may_be_silent: bool = False
    sentences: int = 1
    in_record: bool = False
    also: tuple[str, ...] = ()
    ends: bool = False
    bound_s: float = 15.0
    limit_s: float = 90.0
    torchrun: int | None = None
    needs: Callable[[], str] = lambda: ""
    packages: tuple[str, ...] = ()
    options: dict[str, Any] | None = None
    nightly: str = ""
    quick_options: dict[str, Any] | None = None
    record: str = "yes"
    whole_window: bool = False

    def lacks(self) -> str:
        """Why it cannot run here; empty if it can."""
        if missing := [name for name in self.packages if not version_of(name)]:
            return f"needs {' and '.join(missing)}, see [loops that were run](loops.md#to-run-them)"
        return self.needs() if self.runs_here else NEEDS_DEVICE

    @property
    def runs_here(self) -> int:
        """How often it runs in the full form on what this process runs on."""
        if ON_SIMULATED_GPU:
            return self.device_runs
        return 0 if self.group == ON_DEVICES else self.runs


def version_of(package: str) -> str:
    """The version that is installed; empty if none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


CASES: dict[str, Case] = {}


def case(
    name: str, group: str, what: str, **attributes: Any
) -> Callable[[Callable[[Rank], None]], Callable[[Rank], None]]:
    """Enter a function as a case."""

    def enter(run: Callable[[Rank], None]) -> Callable[[Rank], None]:
        assert name not in CASES
        CASES[name] = Case(name, group, what, run, **attributes)
        return run

    return enter
