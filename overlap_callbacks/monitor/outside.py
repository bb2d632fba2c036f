"""What the environment tells a monitor: where its record goes, and whether it only times steps."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from overlap_callbacks.analysis.results.env_overrides import RUN_DIR, TIME_ONLY, TimingPlan
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import JsonlSink


def told_from_outside(config: MonitorConfig) -> tuple[MonitorConfig, TimingPlan | None]:
    """The options of a monitor after what the environment says, which goes before what the script says.

    Args:
        config: as the script says.

    Returns:
        The options, and how steps are timed if nothing else is to be measured; None for windows.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    folder, text = os.environ.get(RUN_DIR, "").strip(), os.environ.get(TIME_ONLY, "").strip()
    if folder:
        config = _recorded_in(Path(folder), config)
    if not text:
        return config, None
    try:
        plan = TimingPlan.of(text)
    except ValueError as error:
        raise ValueError(f"{TIME_ONLY} {error}") from None
    # No other sink: it would get no report. The schedule is what the record says of the blocks.
    schedule = Schedule(
        first_step=plan.warmup_steps,
        steps_per_block=plan.steps_per_block,
        min_block_seconds=plan.min_block_seconds,
        every_n_steps=max(500, 12 * (1 + plan.steps_per_block)),
        repeats=1,
        profiled_steps=0,
        control=True,
    )
    return replace(config, sinks=[JsonlSink(config.run_dir)], schedule=schedule), plan


def _recorded_in(folder: Path, config: MonitorConfig) -> MonitorConfig:
    records = [sink for sink in config.sinks if isinstance(sink, JsonlSink)]
    for sink in records:
        sink.path = folder / FILE_NAME
    return replace(config, run_dir=folder, sinks=config.sinks if records else [JsonlSink(folder), *config.sinks])
