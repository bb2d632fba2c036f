"""Every option of a monitor, validated in one place."""

from __future__ import annotations

import functools
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from overlap_callbacks import _validation
from overlap_callbacks.analysis.causal import BLOCK_STEPS
from overlap_callbacks.analysis.communication.model_shape import PRESETS
from overlap_callbacks.analysis.results.env_overrides import RUN_DIR, SWITCH, TIME_ONLY, TimingPlan
from overlap_callbacks.analysis.results.run import FILE_NAME, Setting, Workload
from overlap_callbacks.analysis.statistics import MIN_BLOCKS
from overlap_callbacks.analysis.throughput import PRECISIONS
from overlap_callbacks.gate.arms import BaseArm, Keep, checked_arms, checked_decide
from overlap_callbacks.instruments.power.meter import PowerOptions
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import JsonlSink, Sink, WandbSink
from overlap_callbacks.sinks.base import DETAILS

# Keeps the record small whatever the user puts in.
_MAX_SETTINGS, _MAX_SETTING_LENGTH = 32, 100

# Values of the environment variable ``OVERLAP_CALLBACKS``, in lower or upper case.
_OFF_WORDS = ("off", "0", "false", "no", "disabled")
_ON_WORDS = ("on", "", "1", "true", "yes", "enabled")
_QUICK_WORD = "quick"


def default_run_folder(prefix: str = "") -> Path:
    """Path of a new run folder: ``prefix``, the time, and a random part. The folder is not created.

    The jobs of an array start within one second, and so may two monitors of one process. (``secrets`` does not touch
    the job's random seeds.)
    """
    return Path("overlap_runs") / f"{prefix}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def default_sinks(run_dir: Path, detail: str = "short") -> list[Sink]:
    """The record in ``run_dir``, and the active W&B run, if one exists when the first window ends."""
    return [JsonlSink(run_dir), WandbSink(start=False, detail=detail)]


def record_of(sinks: Sequence[Sink]) -> Path | None:
    """Folder of the first record among the sinks, if any."""
    return next((path.parent for sink in sinks if (path := sink.kept_record()) is not None and path.exists()), None)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """The options of an ``OverlapMonitor``, which documents them.

    Attributes:
        configuration: what adapters read of the job: they add to it until the first window.

    Raises:
        TypeError, ValueError: an option has the wrong type or value. The message says what is allowed.
    """

    schedule: Schedule = field(default_factory=Schedule)
    sinks: Sequence[Sink] = ()
    arms: Sequence[BaseArm] | None = None
    decide: Keep | str | None = None
    run_dir: Path = field(default_factory=default_run_folder)
    detail: str = "short"
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
    quick: bool = False
    causal: bool = False
    ask: str = "user"
    ask_signal: str | None = None
    framework: str = ""
    hosts: bool = True
    configuration: dict[str, Setting] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule, got {self.schedule!r} (a {type(self.schedule).__name__})")
        self._set("arms", checked_arms(self.arms))
        self._set("sinks", checked_sinks(self.sinks))
        self._set("run_dir", Path(self.run_dir))
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name in _REQUIRED:
                self._set(name, check(name, value))
        self._set("decide", checked_decide(self.decide, self.arms or (), self.max_overhead))
        if self.decide is not None and self.schedule.control:
            raise ValueError("decide needs windows in which arms are turned: control=True turns none")
        if self.causal and (self.decide is not None or self.schedule.control):
            raise ValueError(
                "causal=True delays collectives of the job as configured: give neither decide nor control=True with "
                "it; start with causal=True, then let a later start decide between the arms that it names"
            )
        if self.causal and self.schedule.delayed_steps < BLOCK_STEPS * MIN_BLOCKS:
            least = self.schedule.decided_at + BLOCK_STEPS * MIN_BLOCKS
            raise ValueError(
                f"causal=True needs windows of {least} steps: give every_n_steps of at least {least}, got "
                f"{self.schedule.every_n_steps}"
            )
        sizes = [name for name in _SIZES if getattr(self, name) is not None]
        if len(sizes) > 1:
            raise ValueError(f"give one of {' and '.join(sizes)}: each of them tells the FLOP of a step")
        _ = self.power_options  # validates the intervals

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # sets a validated value on a frozen dataclass

    @property
    def search(self) -> Keep | None:
        """The limits within which the best arm is looked for; None if it is not."""
        if self.decide is None or isinstance(self.decide, Keep):
            return self.decide
        usual = Keep()
        return usual if self.max_overhead is None else Keep(budget=min(usual.budget, self.max_overhead))

    @property
    def workload(self) -> Workload:
        """What the user says about the job's work per step."""
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
        """The power options, as the meter takes them."""
        return PowerOptions(
            enabled=self.power,
            interval_s=self.power_interval_s,
            idle_interval_s=self.power_idle_interval_s,
            per_node=self.power_per_node,
        )


def _checked_settings(_: str, settings: Any) -> dict[str, Setting]:
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must map names to values, got {settings!r} (a {type(settings).__name__})")
    if len(settings) > _MAX_SETTINGS:
        raise ValueError(f"settings must be at most {_MAX_SETTINGS}, got {len(settings)}")
    found = {_validation.plain(name): _validation.plain(value) for name, value in settings.items()}
    for name, value in found.items():
        if not isinstance(name, str) or not name or len(name) > _MAX_SETTING_LENGTH:
            raise ValueError(f"settings: a name must be text of 1 to {_MAX_SETTING_LENGTH} characters, got {name!r}")
        if not isinstance(value, (str, int, float)) or len(str(value)) > _MAX_SETTING_LENGTH:
            raise TypeError(
                f"settings[{name!r}] must be a number, True, False or text of at most {_MAX_SETTING_LENGTH} "
                f"characters, got {value!r} (a {type(value).__name__})"
            )
        if any(text != text.encode(errors="replace").decode() for text in (name, str(value))):
            raise ValueError(f"settings[{name!r}]: text must be valid Unicode, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"settings[{name!r}] must be finite, got {value!r}")
        if isinstance(value, int):
            _validation.count(f"settings[{name!r}]", int(value), minimum=-(2**53))
    return found


def _checked_precision(name: str, given: Any) -> str:
    """One of ``PRECISIONS``, also from a torch dtype or another usual name."""
    word = str(given).lower().removeprefix("torch.").removesuffix("-mixed").removesuffix("-true")
    word = "fp8" if word.startswith(("float8", "fp8")) else _OTHER_NAMES.get(word, word)
    if word not in PRECISIONS:
        raise ValueError(f"{name} must be one of {', '.join(PRECISIONS)}, or a torch dtype of these, got {given!r}")
    return word


# Usual names of precisions.
_OTHER_NAMES = {
    **dict.fromkeys(("float32", "float", "single", "32", "f32"), "fp32"),
    **dict.fromkeys(("tensorfloat32", "tensorfloat-32"), "tf32"),
    **dict.fromkeys(("bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("float16", "half", "16", "f16"), "fp16"),
}  # fmt: skip
_FLAGS = ("strict", "power", "power_per_node", "hosts", "check_gradients", "annotate_steps", "quick", "causal")
_TIMEOUTS = ("order_timeout_s", "report_timeout_s")
_COUNTS = ("tokens_per_step", "samples_per_step", "sample_experts_every")
_REQUIRED = frozenset((*_FLAGS, *_TIMEOUTS, "detail", "ask"))  # these must not be None
# How each of the other options is checked, called with its name and value. Returns the value to keep.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_FLAGS, _validation.flag),
    "max_overhead": _validation.fraction,
    **dict.fromkeys(_TIMEOUTS, _validation.seconds),
    **dict.fromkeys(_COUNTS, functools.partial(_validation.count, minimum=1)),
    **dict.fromkeys(("flop_per_step", "model_parameters", "peak_flop_per_s"), _validation.positive),
    "model_preset": functools.partial(_validation.one_of, allowed=tuple(PRESETS)),
    "precision": _checked_precision,
    "settings": _checked_settings,
    "detail": functools.partial(_validation.one_of, allowed=DETAILS),
    "ask": functools.partial(_validation.one_of, allowed=("user", "group", "off")),
    "ask_signal": functools.partial(_validation.one_of, allowed=("SIGUSR1", "SIGUSR2")),
}
# At most one of these may give the FLOP of a step.
_SIZES = ("flop_per_step", "model_parameters", "model_preset")


def as_settings(facts: Mapping[str, object]) -> dict[str, Setting]:
    """Facts of a job as the record keeps them: a limited number, each a number, True, False or a short text."""
    kept: dict[str, Setting] = {}
    for name, given in list(facts.items())[:_MAX_SETTINGS]:
        value = _validation.plain(given)
        plain = isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))
        kept[str(name)[:_MAX_SETTING_LENGTH]] = value if plain else str(value)[:_MAX_SETTING_LENGTH]
    return kept


def checked_sinks(sinks: Any) -> list[Sink]:
    """The user's sinks as a list. Raises TypeError if they are not sinks."""
    if isinstance(sinks, Sink):
        return [sinks]
    if not isinstance(sinks, (list, tuple)):
        raise TypeError(f"sinks must be a list of Sink objects, got {sinks!r} (a {type(sinks).__name__})")
    for sink in sinks:
        if not isinstance(sink, Sink):
            raise TypeError(f"sinks must be a list of Sink objects, got {sink!r} (a {type(sink).__name__}) in it")
    return list(sinks)


# -- environment variables, which override the script's options


def switched_off_by() -> str:
    """The environment variable that switches measuring off, with its value; empty if it does not."""
    given = os.environ.get(SWITCH, "")
    return f"{SWITCH}={given}" if given.strip().lower() in _OFF_WORDS else ""


def apply_env_overrides(config: MonitorConfig) -> tuple[MonitorConfig, TimingPlan | None]:
    """Apply environment variables to the options. Returns the plan for timing steps if nothing else is to be measured.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    folder, text = os.environ.get(RUN_DIR, "").strip(), os.environ.get(TIME_ONLY, "").strip()
    word = os.environ.get(SWITCH, "").strip().lower()
    if word not in (*_ON_WORDS, *_OFF_WORDS, _QUICK_WORD):
        raise ValueError(f"{SWITCH} must be on, off or quick, got {os.environ[SWITCH]!r}")
    if word == _QUICK_WORD:
        config = replace(config, quick=True)
    if folder:
        config = _recorded_in(Path(folder), config)
    if not text:
        return config, None
    try:
        plan = TimingPlan.of(text)
    except ValueError as error:
        raise ValueError(f"{TIME_ONLY} {error}") from None
    # No other sinks: they would get no reports. The schedule tells the record the block length.
    schedule = Schedule(
        first_step=plan.warmup_steps,
        steps_per_block=plan.steps_per_block,
        min_block_seconds=plan.min_block_seconds,
        every_n_steps=max(500, 12 * (1 + plan.steps_per_block)),
        repeats=1,
        profiled_steps=0,
        control=True,
    )
    return replace(
        config, sinks=[JsonlSink(config.run_dir)], schedule=schedule, quick=False, decide=None, causal=False
    ), plan


def _recorded_in(folder: Path, config: MonitorConfig) -> MonitorConfig:
    records = [sink for sink in config.sinks if isinstance(sink, JsonlSink)]
    for sink in records:
        sink.path = folder / FILE_NAME
    return replace(config, run_dir=folder, sinks=config.sinks if records else [JsonlSink(folder), *config.sinks])
