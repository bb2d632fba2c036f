"""How adapters make a monitor from the options of their one line."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlap_callbacks.monitor.monitor import OverlapMonitor
from overlap_callbacks.monitor.run_info import default_run_folder
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import Sink

logger = logging.getLogger("overlap_callbacks")

_SCHEDULE_OPTIONS = frozenset(f.name for f in dataclasses.fields(Schedule) if f.init)
_MONITOR_OPTIONS = frozenset(inspect.signature(OverlapMonitor).parameters) - {"framework"}

# From the user's sinks, None where none were given, and the run's folder to the sinks of the monitor.
MakeSinks = Callable[[list[Any] | None, Path], list[Sink]]


def build_monitor(
    framework: str,
    options: dict[str, Any],
    *,
    root: str | os.PathLike[str] = "",
    sinks: MakeSinks | None = None,
    check: Callable[[], None] = lambda: None,
) -> OverlapMonitor:
    """A monitor from the options of ``Schedule`` and ``OverlapMonitor`` taken together.

    An option with a wrong value costs the measuring, not the job: unless ``strict`` is among the options, it is said
    once and the monitor comes back switched off. So does whatever ``sinks`` or ``check`` raises.

    Args:
        framework: name and version of the adapter's framework, for the record.
        options: keyword arguments of either class; ``schedule`` excludes those of ``Schedule``.
        root: folder below which the run's own lies by default.
        sinks: makes the monitor's sinks; by default they are those of the options.
        check: raises where the framework cannot be measured.

    Raises:
        TypeError: an option that does not exist, or ``schedule`` beside options of a schedule.
        ValueError: (strict only) an option with a value that is not allowed.
    """
    check_names(options)
    try:
        check()
        return _build(framework, options, root, sinks)
    except Exception as error:
        if options.get("strict"):
            raise
        return switched_off(framework, error)


def switched_off(framework: str, error: Exception) -> OverlapMonitor:
    """Say why nothing is measured, and give a monitor that does nothing."""
    logger.warning("overlap-callbacks: measuring is switched off, training goes on: %s", error)
    monitor = OverlapMonitor(sinks=[], framework=framework)
    monitor.close()
    return monitor


def check_names(options: dict[str, Any]) -> None:
    """Refuse names that are no option.

    Raises:
        TypeError: with the names that are.
    """
    unknown = sorted(options.keys() - _SCHEDULE_OPTIONS - _MONITOR_OPTIONS)
    if unknown:
        allowed = ", ".join(sorted(_SCHEDULE_OPTIONS | _MONITOR_OPTIONS))
        raise TypeError(f"unknown options {unknown}; allowed are {allowed}")


def _build(
    framework: str, options: dict[str, Any], root: str | os.PathLike[str], make_sinks: MakeSinks | None
) -> OverlapMonitor:
    of_schedule = {name: value for name, value in options.items() if name in _SCHEDULE_OPTIONS}
    of_monitor = {name: value for name, value in options.items() if name in _MONITOR_OPTIONS}
    if of_schedule:
        if of_monitor.get("schedule") is not None:
            raise TypeError(f"give either schedule or {sorted(of_schedule)}, not both")
        of_monitor["schedule"] = Schedule(**of_schedule)
    of_monitor["run_dir"] = folder = _folder(of_monitor.get("run_dir"), root)
    if make_sinks is not None:
        of_monitor["sinks"] = make_sinks(_listed(of_monitor.get("sinks")), folder)
    return OverlapMonitor(**of_monitor, framework=framework)


def _folder(run_dir: Any, root: str | os.PathLike[str]) -> Path:
    if run_dir is None:
        return Path(root) / default_run_folder()
    if not isinstance(run_dir, (str, os.PathLike)):
        raise TypeError(f"run_dir must be the path of a folder, got {run_dir!r} (a {type(run_dir).__name__})")
    return Path(run_dir)


def _listed(sinks: Any) -> list[Any] | None:
    """What the user gave as sinks, in a list; what is in it is looked at by the monitor."""
    if sinks is None or isinstance(sinks, (list, tuple)):
        return None if sinks is None else list(sinks)
    if not isinstance(sinks, Sink):
        raise TypeError(f"sinks must be a list of Sink objects, got {sinks!r} (a {type(sinks).__name__})")
    return [sinks]
