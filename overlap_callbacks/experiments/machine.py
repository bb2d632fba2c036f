"""Facts about this machine. A separate process examines the GPUs, so that the command itself holds no GPU context."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import msgspec

from overlap_callbacks._version import __version__
from overlap_callbacks.experiments.supervisor import exit_in_words, telling_line
from overlap_callbacks.experiments.sweep import CannotGoOnError

_TIMEOUT_S = 180.0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What a study needs to know about the machine.

    Attributes:
        num_gpus: usable by torch.
        gpu: their name; empty without GPUs.
        cpu: name of the CPU, with its cores.
        capability: compute capability of the GPUs; None without, and for AMD.
        is_amd: whether they are AMD GPUs.
        cores: usable by this process.
        free_bytes: host memory available to programs; None if not known.
        versions: of the relevant installed packages, by name.
    """

    num_gpus: int = 0
    gpu: str = ""
    cpu: str = ""
    capability: tuple[int, int] | None = None
    is_amd: bool = False
    cores: int = 1
    free_bytes: int | None = None
    versions: dict[str, str] = {}

    @property
    def has_link(self) -> bool:
        """Whether GPUs can communicate: NCCL needs one per rank."""
        return self.num_gpus > 1

    @property
    def device(self) -> str:
        """Name of the device that ranks train on."""
        return self.gpu if self.has_link else self.cpu


def find_machine() -> Machine:
    """Examine the machine in a separate process, or raise a ``CannotGoOnError`` that says why that failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise CannotGoOnError(f"torch does not load within {_TIMEOUT_S:g} s on this machine") from None
    if done.returncode:
        said = telling_line(done.stderr.decode(errors="replace"))
        raise CannotGoOnError(f"torch does not load on this machine, {exit_in_words(done.returncode)}: {said}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Machine)


def _look() -> Machine:
    import torch

    versions = {"python": platform.python_version(), "overlap-callbacks": __version__, "torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["deepspeed"] = importlib.metadata.version("deepspeed")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_amd = torch.version.hip is not None
    return Machine(
        num_gpus=num_gpus,
        gpu=torch.cuda.get_device_name(0) if num_gpus else "",
        cpu=cpu_name(),
        capability=torch.cuda.get_device_capability(0) if num_gpus and not is_amd else None,
        is_amd=is_amd,
        cores=cores(),
        free_bytes=free_bytes(),
        versions=versions,
    )


# -- the host


def free_bytes() -> int | None:
    """Memory available to programs, including what caches would release; None if Linux does not report it."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def cores() -> int:
    """Cores usable by this process: in a container, or under taskset, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """E.g. ``AMD EPYC 9R14, 8 cores``."""
    try:
        found = re.search(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1]}, {cores()} cores" if found else platform.processor() or platform.machine()


if __name__ == "__main__":
    print(msgspec.json.encode(_look()).decode())
