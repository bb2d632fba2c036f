"""Reads this process's environment: versions, devices, variables. Never raises, creates no CUDA context."""

from __future__ import annotations

import os
import platform
import re
import socket
import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from overlap_callbacks._threads import NoAnswerError, QuestionFailedError, Worker
from overlap_callbacks.analysis.environment.privacy import (
    HiddenNames,
    environment_variables,
    hidden_environment,
    mark_of,
)
from overlap_callbacks.analysis.results.environment import PCIE, RankEnvironment
from overlap_callbacks.analysis.safe_text import digest
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.power.discovery import from_properties
from overlap_callbacks.instruments.power.nvml import nvlink_devices

T = TypeVar("T")

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_AMD_DRIVER = Path("/sys/module/amdgpu/version")

# Maximum wait for the driver: a driver that hangs must not block the report.
_DRIVER_TIMEOUT_S = 5.0


class EnvironmentReader:
    """Reads the environment of this process once, on the first thread that asks: parts of it query the driver.

    Create it on the training thread: other threads have their own current device. ``framework``: the adapter's
    framework and version. ``hide`` replaces host names in texts; None to keep them.
    """

    def __init__(self, framework: str = "", hide: Callable[[str], str] | None = None) -> None:
        self._framework = framework
        self._hide = hide
        # As for step times, only a process that already uses a device trains on it.
        self._device = device.in_use()
        self._lock = threading.Lock()

    def read(self) -> RankEnvironment:
        """The environment of this process. Safe to call from several threads."""
        with self._lock:
            return self._environment

    @cached_property
    def _environment(self) -> RankEnvironment:
        used = self._device
        of_device: dict[str, Any] = {} if used is None else _or(dict, lambda: _device(used))
        environment = RankEnvironment(
            hostname=_or(str, platform.node),
            host_id=_or(str, _host_id),
            cpus=_or(str, lambda: cpu_list(os.sched_getaffinity(0))),
            num_threads=_or(int, torch.get_num_threads),
            torch=str(torch.__version__),
            cuda=str(torch.version.cuda or ""),
            hip=str(torch.version.hip or ""),
            framework=self._framework,
            variables=_or(dict, lambda: environment_variables(os.environ)),
            **of_device,
        )
        return environment if self._hide is None else hidden_environment(environment, self._hide)


def hidden_names(own_host: str = "") -> HiddenNames:
    """The names of this host and of rank 0's, from system and launcher, to be replaced by ``own_host``.

    The default is a mark that rank 0 replaces by the host's number.
    """
    own = [_or(str, platform.node), _or(str, socket.gethostname), *map(_variable, ("HOSTNAME", "SLURMD_NODENAME"))]
    instead = own_host or mark_of(_or(str, _host_id) or own[0])
    return HiddenNames({**{_variable("MASTER_ADDR"): "host 0"}, **dict.fromkeys(own, instead)})


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _or(default: Callable[[], T], read: Callable[[], T]) -> T:
    """The result of ``read``, or of ``default`` if it raises: unknown values are left out."""
    try:
        return read()
    except Exception:
        return default()


def _host_id() -> str:
    """Identifies the machine, whatever its containers are called; NCCL uses the same file."""
    return digest(_BOOT.read_text().strip())[:12]


def cpu_list(cpus: Iterable[int]) -> str:
    """CPU numbers in Linux notation, e.g. ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _device(used: torch.device) -> dict[str, Any]:
    if used.type != "cuda":
        return {"device": device.name(used)}
    properties = device.properties(used)
    hip = torch.version.hip is not None
    identity = from_properties(properties, hip=hip)
    capability = f"{properties.major}.{properties.minor}"
    links = None if hip else _within(_DRIVER_TIMEOUT_S, lambda: nvlink_devices(identity.uuid, identity.pci_bus_id))
    return {
        "device": identity.name,
        "compute_capability": str(getattr(properties, "gcnArchName", capability)) if hip else capability,
        "num_sms": int(properties.multi_processor_count),
        "memory_bytes": int(properties.total_memory),
        "device_uuid": identity.uuid,
        "pci_bus_id": identity.pci_bus_id,
        "nccl": _or(str, device.nccl_version),
        "driver": _or(str, lambda: _driver_version(hip)),
        "nvlink_devices": links,
        # Empty if unknown: hosts without x86 processors may have NVLink to the GPU (POWER, Grace), and AMD's GPUs
        # Infinity Fabric.
        "host_link": PCIE if not hip and platform.machine().lower() in ("x86_64", "amd64") else "",
    }


def _driver_version(hip: bool) -> str:
    if hip:
        return _AMD_DRIVER.read_text().strip()
    # e.g. "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _NVIDIA_DRIVER.read_text().partition("\n")[0])
    return found[0] if found else ""


def _within(timeout_s: float, read: Callable[[], T | None]) -> T | None:
    """The result of ``read``; None if it raises or takes longer than ``timeout_s``."""
    worker = Worker("overlap-callbacks-environment", lambda error: None)
    try:
        return worker.ask(read, timeout_s)
    except (NoAnswerError, QuestionFailedError, RuntimeError):  # RuntimeError: the system cannot start another thread
        return None
    finally:
        worker.close(0.1)
