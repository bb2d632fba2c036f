"""What ``overlap study`` measures: plain data, as it stands in the lines of its result file.

The first line is a ``StudyStart``. Each further line is one configuration that was trained once, so that a crash costs
the one that was under way, and no more.
"""

from __future__ import annotations

from typing import Any

import msgspec

from overlap_callbacks.analysis.results.estimate import Estimate

# Name of the file in the folder of results.
FILE_NAME = "study.jsonl"
SCHEMA = 1


class Configuration(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One training job of the study.

    Attributes:
        model: name of a preset, e.g. ``gpt3-xl``.
        strategy: ``ddp``, ``fsdp2``, ``zero3``, ``tp`` or ``pp``.
        batch: sequences or images of a micro-batch on each rank.
        precision: ``fp32``, ``tf32``, ``fp16`` or ``bf16``.
        power_cap_w, clock_cap_mhz: limits of each device; None for its own.
    """

    model: str
    strategy: str
    batch: int
    precision: str
    power_cap_w: float | None = None
    clock_cap_mhz: float | None = None


class StudyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one configuration, over all its counted windows and ranks. What was not measured is None.

    ``values`` are by the keys of the catalogue, e.g. ``power/overlapped_avg_w``; ``num_steps`` is that of each mode.
    """

    values: dict[str, Estimate]
    num_windows: int
    num_steps: int


class StudyStart(msgspec.Struct, frozen=True, kw_only=True, tag="start", tag_field="line"):
    """What a study was asked for, and where it ran.

    Attributes:
        scale: by which the presets' sizes are shrunk; 1 for the models as published.
        steps: measured steps of each mode.
        device: name of the ranks' device, such as ``NVIDIA H100 80GB HBM3``, or of the CPU.
        link: ``gloo``, ``nccl`` or ``loopback``.
        options: everything else that must be the same in a resumed study.
    """

    configurations: tuple[Configuration, ...]
    ranks: int
    scale: float
    steps: int
    device: str
    link: str
    versions: dict[str, str]
    started_at: str
    options: dict[str, Any] = {}
    schema: int = SCHEMA


class StudyRow(msgspec.Struct, frozen=True, kw_only=True, tag="row", tag_field="line"):
    """One configuration, trained once, with the time that this took.

    Attributes:
        failure: why it failed, in a line; None where it did not, and has ``figures``.
        record: path of the job's record, relative to the folder of results.
        model: sizes of the model as trained, e.g. layers, hidden, parameters.
    """

    configuration: Configuration
    seconds: float
    figures: StudyFigures | None = None
    failure: str | None = None
    record: str | None = None
    model: dict[str, int | float | str] = {}
