"""Every option of a monitor, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlap_callbacks import _validation
from overlap_callbacks.instruments.power.meter import PowerOptions
from overlap_callbacks.monitor.run_info import default_run_folder
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import JsonlSink, Sink, WandbSink


def default_sinks(run_dir: Path) -> list[Sink]:
    """The record in ``run_dir``, and the W&B run that is active when the first window ends, if there is one."""
    return [JsonlSink(run_dir), WandbSink(start=False)]


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """The options of an ``OverlapMonitor``.

    Attributes:
        schedule: when windows open and what they are made of.
        sinks: where reports go; used on rank 0 only.
        run_dir: folder of the record. By default a new one under ``overlap_runs``.
        strict: raise errors of the library's own instead of switching it off.
        max_overhead: maximum fraction of training time that measuring may cost; None for no limit.
        order_timeout_s: maximum time in which the ranks' sequences of collectives must come in.
        report_timeout_s: maximum time in which the ranks' reports must come in.
        power: measure power, energy and clocks in windows, where the device has sensors.
        power_interval_s: time between readings of power; None for 0.1 (NVIDIA, CPU) or 0.02 (AMD).
        power_idle_interval_s: time between readings outside windows; None for no readings there.
        power_per_node: the first rank of each node reads all of its devices, on one thread; else each reads its own.
        tokens_per_step: tokens that one step of the whole job trains on, for energy per token; None if not known.
        framework: name and version of the adapter's framework, for the record.

    Raises:
        TypeError, ValueError: an option has the wrong type or value. The message names the option, what was given and
            what is allowed.
    """

    schedule: Schedule = field(default_factory=Schedule)
    sinks: Sequence[Sink] = ()
    run_dir: Path = field(default_factory=default_run_folder)
    strict: bool = False
    max_overhead: float | None = 0.005
    order_timeout_s: float = 10.0
    report_timeout_s: float = 30.0
    power: bool = True
    power_interval_s: float | None = None
    power_idle_interval_s: float | None = None
    power_per_node: bool = False
    tokens_per_step: int | None = None
    framework: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule, got {self.schedule!r} (a {type(self.schedule).__name__})")
        for name in ("strict", "power", "power_per_node"):
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r} (a {type(flag).__name__})")
        self._set("sinks", _checked_sinks(self.sinks))
        self._set("run_dir", Path(self.run_dir))
        if self.max_overhead is not None:
            self._set("max_overhead", _validation.fraction("max_overhead", self.max_overhead))
        for name in ("order_timeout_s", "report_timeout_s"):
            self._set(name, _validation.seconds(name, getattr(self, name)))
        if self.tokens_per_step is not None:
            self._set("tokens_per_step", _validation.count("tokens_per_step", self.tokens_per_step, minimum=1))
        _ = self.power_options  # checks the intervals

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way of a frozen dataclass to keep a checked value

    @property
    def power_options(self) -> PowerOptions:
        """The options of power, as the meter takes them."""
        return PowerOptions(
            enabled=self.power,
            interval_s=self.power_interval_s,
            idle_interval_s=self.power_idle_interval_s,
            per_node=self.power_per_node,
        )


def _checked_sinks(sinks: Any) -> list[Sink]:
    if isinstance(sinks, Sink):
        return [sinks]
    if not isinstance(sinks, (list, tuple)):
        raise TypeError(f"sinks must be a list of Sink objects, got {sinks!r} (a {type(sinks).__name__})")
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise TypeError(f"sinks must be a list of Sink objects, got {sink!r} (a {type(sink).__name__}) in it")
    return list(sinks)
