"""The options of all adapters: their names and types for editors and type checkers, and checks of what was given."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from overlap_callbacks.analysis.results.run import Setting
from overlap_callbacks.gate.arms import BaseArm, Keep
from overlap_callbacks.monitor.config import MonitorConfig, checked_sinks
from overlap_callbacks.monitor.faults import current_rank
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import Sink


class AdvancedOptions(TypedDict, total=False):
    """Options that few jobs need; given as ``advanced={"steps_per_block": 4}``. ``docs/options.md`` explains them."""

    blocks: str
    steps_per_block: int
    warmup_steps: int
    min_block_seconds: float
    spread: bool
    order_timeout_s: float
    report_timeout_s: float
    power_interval_s: float | None
    power_idle_interval_s: float | None
    power_per_node: bool
    sample_experts_every: int | None
    ask: str
    ask_signal: str | None
    hosts: bool


class Options(TypedDict, total=False):
    """Options of ``attach`` and the callbacks. ``docs/options.md`` explains them."""

    every_n_steps: int
    first_step: int
    repeats: int
    profiled_steps: int
    control: bool
    schedule: Schedule | None
    quick: bool
    causal: bool
    max_overhead: float | None
    arms: Sequence[BaseArm] | None
    decide: Keep | str | None
    sinks: Sequence[Sink] | Sink | None
    run_dir: str | os.PathLike[str] | None
    strict: bool
    power: bool
    tokens_per_step: int | None
    samples_per_step: int | None
    flop_per_step: float | None
    model_parameters: float | None
    model_preset: str | None
    precision: str | torch.dtype | None
    peak_flop_per_s: float | None
    settings: Mapping[str, Setting] | None
    detail: str
    check_gradients: bool
    annotate_steps: bool
    advanced: AdvancedOptions


_OF_SCHEDULE = frozenset([f.name for f in dataclasses.fields(Schedule) if f.init])
_ADVANCED = frozenset(AdvancedOptions.__annotations__)
_USUAL = frozenset(Options.__annotations__) - {"advanced"}
# These are made where None is given.
_MADE = frozenset(("schedule", "sinks", "run_dir"))
_told: set[str] = set()  # what was warned of: callbacks check their options where they are made, and at each training


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``OverlapMonitor`` in the options of an adapter, with its ``Schedule`` made.

    Raises:
        TypeError: an option that does not exist, a wrong type, or ``schedule`` with its own options.
        ValueError: a value that is not allowed.
    """
    given = {name: value for name, value in flat(options).items() if value is not None or name not in _MADE}
    of_schedule = {name: value for name, value in given.items() if name in _OF_SCHEDULE}
    arguments = {name: value for name, value in given.items() if name not in _OF_SCHEDULE}
    if of_schedule:
        if "schedule" in arguments:
            raise TypeError(f"give either schedule or {', '.join(sorted(of_schedule))}, not both")
        arguments["schedule"] = Schedule(**of_schedule)
    if "run_dir" in arguments:
        run_dir = arguments["run_dir"]
        if not isinstance(run_dir, (str, os.PathLike)):
            raise TypeError(f"run_dir must be the path of a folder, got {run_dir!r} (a {type(run_dir).__name__})")
        if "\0" in str(run_dir):
            raise ValueError(f"run_dir must be the path of a folder, got {run_dir!r}")
        arguments["run_dir"] = Path(run_dir)
    if "sinks" in arguments:
        arguments["sinks"] = checked_sinks(arguments["sinks"])
    MonitorConfig(**arguments)
    return arguments


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those under ``advanced`` among them. Warns of those that belong there, once."""
    given = dict(options)
    advanced = given.pop("advanced", None)
    advanced = {} if advanced is None else advanced
    if not isinstance(advanced, Mapping):
        raise TypeError(f"advanced must map names to values, got {advanced!r} (a {type(advanced).__name__})")
    _check_names(given, _USUAL | _ADVANCED, "options", _USUAL)
    _check_names(advanced, _ADVANCED, "advanced options", _ADVANCED)
    twice = sorted(given.keys() & advanced.keys())
    if twice:
        raise TypeError(f"{', '.join(twice)} was given twice: under advanced, and outside it")
    old = ", ".join([f"{name!r}: ..." for name in sorted(given.keys() & _ADVANCED)])
    if old and old not in _told and not current_rank():
        _told.add(old)
        frames = enumerate(traceback.walk_stack(sys._getframe()), 1)
        # The user's line.
        level = next(n for n, (f, _) in frames if not f.f_globals.get("__name__", "").startswith("overlap_callbacks."))
        # Even where warnings are errors: this rank alone would raise.
        with contextlib.suppress(FutureWarning):
            warnings.warn(
                f"options of overlap-callbacks have moved: give advanced={{{old}}} [OC119]", FutureWarning, level
            )
    return {**given, **advanced}


def _check_names(given: Iterable[str], known: frozenset[str], what: str, shown: frozenset[str]) -> None:
    unknown = sorted(set(given) - known)
    if not unknown:
        return
    every = [*Options.__annotations__, *_ADVANCED]
    near = [name for each in unknown for name in difflib.get_close_matches(str(each), every, 1)]
    inside = [f"advanced={{{name!r}: ...}}" if name in _ADVANCED and what == "options" else name for name in near]
    hint = f" (did you mean {', '.join(inside)}?)" if near else ""
    raise TypeError(f"unknown {what} {unknown}{hint}; allowed are {', '.join(sorted(shown))}")
