"""What is known of a run before its first window: plain data, the first line of a record."""

from __future__ import annotations

from typing import Any

import msgspec

from overlap_callbacks.analysis.results.environment import RankEnvironment

Setting = str | int | float | bool


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the job's work. Everything is optional.

    Attributes:
        tokens_per_step: tokens that one step of the whole job trains on.
        samples_per_step: samples (sequences, images) of it.
        flop_per_step: model FLOP of one step of the whole job; nothing that is recomputed counts.
        model_parameters: parameters that a token passes, of a transformer; of experts, only those that are active.
        model_preset: the model by name, one of those of ``overlap predict``.
        precision: of the matrix products, which decides the peak: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
        peak_flop_per_s: of one device; empty for that of the table.
        settings: what the user varies from run to run, by name.
    """

    tokens_per_step: int | None = None
    samples_per_step: int | None = None
    flop_per_step: float | None = None
    model_parameters: float | None = None
    model_preset: str | None = None
    precision: str | None = None
    peak_flop_per_s: float | None = None
    settings: dict[str, Setting] = {}


SCHEMA_VERSION = 2


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first window: enough to read the rest of a record without this library.

    Attributes:
        schema_version: of the record's layout.
        started_at: wall clock, ISO 8601 with time zone.
        hostname, device: of rank 0.
        framework: the adapter in use, with its framework's version.
        units, meanings: of each figure, by name.
        environment, workload: what rank 0 runs on, and what the user tells of the job's work; None in older records.
        hosts_named: False where hosts have numbers in the place of their names.
        tells_end: whether the record has a line of kind ``end`` once the job has ended; False in older records.
        configuration: what the adapter read of the job, by name: model, buckets; empty in older records.
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
