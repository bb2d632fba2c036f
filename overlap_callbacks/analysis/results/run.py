"""The facts of a run that are known before its first window: plain data, the first line of a record."""

from __future__ import annotations

from typing import Any

import msgspec

from overlap_callbacks.analysis.results.environment import RankEnvironment

Setting = str | int | float | bool


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The work of the job per step. Everything is optional.

    Attributes:
        tokens_per_step: tokens that one step of the whole job trains on.
        samples_per_step: samples (sequences, images) of that step.
        flop_per_step: model FLOP of one step of the whole job; recomputation does not count.
        model_parameters: parameters that a token passes in a transformer; of experts, only active ones.
        model_preset: the model by name, one of those of ``overlap predict``.
        precision: of the matrix products, which determines the peak: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
        peak_flop_per_s: of one device; empty for the table's value.
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
    """Facts known before the first window: enough to read the rest of a record without this library.

    Attributes:
        schema_version: of the record's layout.
        started_at: wall clock, ISO 8601 with time zone.
        hostname, device: of rank 0.
        framework: the adapter in use, with its framework's version.
        units, meanings: of each figure, by name.
        environment, workload: of rank 0, and as given by the user; None in older records.
        hosts_named: False if hosts have numbers instead of names.
        tells_end: whether the record gets a line of kind ``end`` when the job ends; False in older records.
        configuration: facts that the adapter read from the job, by name: model, buckets; empty in older records.
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

    @property
    def job(self) -> tuple[object, ...]:
        """What must be the same for windows of one start to say something about another."""
        job = self.world_size, self.backend, self.device, self.framework, self.torch_version
        return *job, self.workload, self.configuration


FILE_NAME = "overlap.jsonl"
