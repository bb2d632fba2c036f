"""What is known of a run before its first window: plain data, the first line of a record."""

from __future__ import annotations

from typing import Any

import msgspec

from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.workload import Setting, Workload

SCHEMA_VERSION = 2


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first window: enough to read the rest of a record without this library.

    Attributes:
        schema_version: of the record's layout.
        library_version, torch_version, python_version: versions of the software.
        started_at: wall clock, ISO 8601 with time zone.
        hostname: of rank 0's machine.
        framework: the adapter in use, with its framework's version.
        world_size: ranks of the job.
        backend: of the default process group.
        device: name of the device that rank 0 trains on.
        schedule: the options of the schedule.
        units: unit of each figure, by name.
        meanings: meaning of each figure, by name.
        environment: what rank 0 runs on; None in a record of an older version.
        workload: what the user tells of the job's work; None in a record of an older version.
        hosts_named: False where hosts have numbers in the place of their names.
        tells_end: whether the record has a line of kind ``end`` once the job has ended; False in a record of an older
            version.
        configuration: what the adapter read of the job, by name: model, buckets; empty in a record of an older version.
    """

    schema_version: int = SCHEMA_VERSION
    library_version: str
    torch_version: str
    python_version: str
    started_at: str
    hostname: str
    framework: str
    world_size: int
    backend: str
    device: str
    schedule: dict[str, Any]
    units: dict[str, str]
    meanings: dict[str, str]
    environment: RankEnvironment | None = None
    workload: Workload | None = None
    hosts_named: bool = True
    configuration: dict[str, Setting] = {}
    tells_end: bool = False


FILE_NAME = "overlap.jsonl"
