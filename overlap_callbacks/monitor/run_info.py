"""What is known of a run before its first window."""

from __future__ import annotations

import datetime
import platform
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.environment.privacy import numbered
from overlap_callbacks.analysis.results.catalogue import recorded_figures
from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.run import Setting, Workload
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import RunInfo


def default_run_folder(prefix: str = "") -> Path:
    """A new folder's path for a run, named by the time. The folder is not made yet.

    The time alone is not enough: a record holds one run, and the jobs of an array start within one second, as do two
    monitors of one process. The name cannot be made unique later: nothing is written before the first window, and by
    then sinks and the user have the name. (``secrets`` does not touch the seeds of the job's own random numbers.)

    Args:
        prefix: what the name begins with.
    """
    return Path("overlap_runs") / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def run_info(
    job: Job,
    schedule: Schedule,
    framework: str,
    device: str,
    environment: RankEnvironment | None = None,
    *,
    hosts: bool = True,
    workload: Workload | None = None,
    configuration: Mapping[str, Setting] | None = None,
) -> RunInfo:
    """Everything about the run that is known before its first window.

    Args:
        job: of this rank.
        schedule: of the windows.
        framework: name and version of the adapter's framework.
        device: name of the device.
        environment: what this rank runs on.
        hosts: whether hosts may be called by their names.
        workload: what the user tells of the job's work.
        configuration: what the adapter reads of the job.
    """
    figures = recorded_figures()
    info = RunInfo(
        library_version=__version__,
        torch_version=str(torch.__version__),
        python_version=platform.python_version(),
        started_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        hostname=platform.node(),
        framework=framework,
        world_size=job.world_size,
        backend=job.backend,
        device=device,
        schedule=schedule.as_dict(),
        units={name: figure.unit for name, figure in figures.items()},
        meanings={name: figure.meaning for name, figure in figures.items()},
        environment=environment,
        workload=workload,
        configuration=dict(configuration or {}),
        hosts_named=hosts,
    )
    if hosts:
        return info
    # Rank 0 writes this, so that its host is the first.
    mark = "" if environment is None else environment.hostname
    return numbered(msgspec.structs.replace(info, hostname="host 0"), {mark: 0})
