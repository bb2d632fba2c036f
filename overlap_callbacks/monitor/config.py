"""Every option of a monitor, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlap_callbacks import _validation
from overlap_callbacks.analysis.communication.model_shape import PRESETS
from overlap_callbacks.analysis.peaks import PRECISIONS
from overlap_callbacks.analysis.results.run import Setting, Workload
from overlap_callbacks.gate.arms import BaseArm, checked_arms
from overlap_callbacks.instruments.power.meter import PowerOptions
from overlap_callbacks.monitor.run_info import default_run_folder
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import JsonlSink, Sink, WandbSink

# A record stays small whatever is put into it.
_MAX_SETTINGS, _MAX_SETTING_LENGTH = 32, 100


def default_sinks(run_dir: Path) -> list[Sink]:
    """The record in ``run_dir``, and the W&B run that is active when the first window ends, if there is one."""
    return [JsonlSink(run_dir), WandbSink(start=False)]


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """The options of an ``OverlapMonitor``.

    Attributes:
        schedule: when windows open and what they are made of.
        sinks: where reports go; used on rank 0 only.
        arms: what the job as configured is compared with, each window with one of them; None for sequential steps
            alone.
        run_dir: folder of the record. By default a new one under ``overlap_runs``.
        strict: raise errors of the library's own instead of switching it off.
        max_overhead: maximum fraction of training time that measuring may cost; None for no limit.
        order_timeout_s: maximum time in which the ranks' sequences of collectives must come in.
        report_timeout_s: maximum time in which the ranks' reports must come in.
        power: measure power, energy and clocks in windows, where the device has sensors.
        power_interval_s: time between readings of power; None for 0.1 (NVIDIA, CPU) or 0.02 (AMD).
        power_idle_interval_s: time between readings outside windows; None for no readings there.
        power_per_node: the first rank of each node reads all of its devices, on one thread; else each reads its own.
        tokens_per_step: tokens that one step of the whole job trains on; None if not known.
        samples_per_step: samples of it; None if not known.
        flop_per_step: model FLOP of one step of the whole job; None if not known.
        model_parameters: parameters that a token passes, of a transformer; None if not known.
        model_preset: the model by name, one of those of ``overlap predict``; None for none.
        precision: of the matrix products: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``; None if not known.
        peak_flop_per_s: of one device; None for that of the table of peaks.
        settings: what you vary from run to run, by name, for ``overlap report --axis``.
        sample_experts_every: between windows, record the split sizes of all-to-alls in every so-manieth step; None for
            windows alone.
        check_gradients: after each window, repeat a step that an adapter can repeat, and compare the gradients of
            overlapped and sequential repetitions bit by bit.
        annotate_steps: name the steps of windows and their modes in profiles of your own, as ranges of
            ``record_function`` and of NVTX.
        framework: name and version of the adapter's framework, for the record.
        hosts: whether hosts may be called by their names; if not, they have numbers in all that is written.
        configuration: what adapters read of the job: they add to it until the first window.

    Raises:
        TypeError, ValueError: an option has the wrong type or value. The message names the option, what was given and
            what is allowed.
    """

    schedule: Schedule = field(default_factory=Schedule)
    sinks: Sequence[Sink] = ()
    arms: Sequence[BaseArm] | None = None
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
    samples_per_step: int | None = None
    flop_per_step: float | None = None
    model_parameters: float | None = None
    model_preset: str | None = None
    precision: str | None = None
    peak_flop_per_s: float | None = None
    settings: Mapping[str, Setting] | None = None
    sample_experts_every: int | None = None
    check_gradients: bool = False
    annotate_steps: bool = False
    framework: str = ""
    hosts: bool = True
    configuration: dict[str, Setting] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule, got {self.schedule!r} (a {type(self.schedule).__name__})")
        self._set("arms", checked_arms(self.arms))
        for name in ("strict", "power", "power_per_node", "hosts", "check_gradients", "annotate_steps"):
            flag = getattr(self, name)
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r} (a {type(flag).__name__})")
        self._set("sinks", _checked_sinks(self.sinks))
        self._set("run_dir", Path(self.run_dir))
        if self.max_overhead is not None:
            self._set("max_overhead", _validation.fraction("max_overhead", self.max_overhead))
        for name in ("order_timeout_s", "report_timeout_s"):
            self._set(name, _validation.seconds(name, getattr(self, name)))
        self._check_workload()
        if self.sample_experts_every is not None:
            self._set(
                "sample_experts_every", _validation.count("sample_experts_every", self.sample_experts_every, minimum=1)
            )
        _ = self.power_options  # checks the intervals

    def _check_workload(self) -> None:
        for name in ("tokens_per_step", "samples_per_step"):
            if getattr(self, name) is not None:
                self._set(name, _validation.count(name, getattr(self, name), minimum=1))
        for name in ("flop_per_step", "model_parameters", "peak_flop_per_s"):
            if getattr(self, name) is not None:
                self._set(name, _validation.positive(name, getattr(self, name)))
        sizes = [
            name for name in ("flop_per_step", "model_parameters", "model_preset") if getattr(self, name) is not None
        ]
        if len(sizes) > 1:
            raise ValueError(f"give one of {' and '.join(sizes)}: each of them tells the FLOP of a step")
        if self.model_preset is not None:
            _validation.one_of("model_preset", self.model_preset, tuple(PRESETS))
        if self.precision is not None:
            _validation.one_of("precision", self.precision, PRECISIONS)
        if self.settings is not None:
            self._set("settings", _checked_settings(self.settings))

    @property
    def checked_arms(self) -> tuple[BaseArm, ...]:
        """The arms; at least one."""
        return checked_arms(self.arms)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the way of a frozen dataclass to keep a checked value

    @property
    def workload(self) -> Workload:
        """What the user tells of the job's work."""
        return Workload(
            tokens_per_step=self.tokens_per_step,
            samples_per_step=self.samples_per_step,
            flop_per_step=self.flop_per_step,
            model_parameters=self.model_parameters,
            model_preset=self.model_preset,
            precision=self.precision,
            peak_flop_per_s=self.peak_flop_per_s,
            settings=dict(self.settings or {}),
        )

    @property
    def power_options(self) -> PowerOptions:
        """The options of power, as the meter takes them."""
        return PowerOptions(
            enabled=self.power,
            interval_s=self.power_interval_s,
            idle_interval_s=self.power_idle_interval_s,
            per_node=self.power_per_node,
        )


def _checked_settings(settings: Any) -> dict[str, Setting]:
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must map names to values, got {settings!r} (a {type(settings).__name__})")
    if len(settings) > _MAX_SETTINGS:
        raise ValueError(f"settings must be at most {_MAX_SETTINGS}, got {len(settings)}")
    for name, value in settings.items():
        if not isinstance(name, str) or not name or len(name) > _MAX_SETTING_LENGTH:
            raise ValueError(f"settings: a name must be text of 1 to {_MAX_SETTING_LENGTH} characters, got {name!r}")
        if not isinstance(value, (str, int, float)) or len(str(value)) > _MAX_SETTING_LENGTH:
            raise TypeError(
                f"settings[{name!r}] must be a number, True, False or text of at most {_MAX_SETTING_LENGTH} "
                f"characters, got {value!r} (a {type(value).__name__})"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"settings[{name!r}] must be finite, got {value!r}")
    return dict(settings)


def as_settings(facts: Mapping[str, object]) -> dict[str, Setting]:
    """Facts of a job as a record keeps them: at most so many, each a number, True, False or a short text."""
    kept: dict[str, Setting] = {}
    for name, value in list(facts.items())[:_MAX_SETTINGS]:
        plain = isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))
        kept[str(name)[:_MAX_SETTING_LENGTH]] = value if plain else str(value)[:_MAX_SETTING_LENGTH]  # type: ignore[assignment]
    return kept


def _checked_sinks(sinks: Any) -> list[Sink]:
    if isinstance(sinks, Sink):
        return [sinks]
    if not isinstance(sinks, (list, tuple)):
        raise TypeError(f"sinks must be a list of Sink objects, got {sinks!r} (a {type(sinks).__name__})")
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise TypeError(f"sinks must be a list of Sink objects, got {sink!r} (a {type(sink).__name__}) in it")
    return list(sinks)
