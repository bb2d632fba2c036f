"""How adapters make a monitor from the options of their one line."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import Any

from overlap_callbacks.monitor import OverlapMonitor
from overlap_callbacks.schedule import Schedule

logger = logging.getLogger("overlap_callbacks")

_SCHEDULE_OPTIONS = frozenset(f.name for f in dataclasses.fields(Schedule) if f.init)
_MONITOR_OPTIONS = frozenset(inspect.signature(OverlapMonitor).parameters) - {"framework"}


def build_monitor(framework: str, options: dict[str, Any]) -> OverlapMonitor:
    """A monitor from the options of ``Schedule`` and ``OverlapMonitor`` taken together.

    An option with a wrong value costs the measuring, not the job: unless ``strict`` is among the options, it is said
    once and the monitor comes back switched off.

    Args:
        framework: name and version of the adapter's framework, for the record.
        options: keyword arguments of either class; ``schedule`` excludes those of ``Schedule``.

    Raises:
        TypeError: an option that does not exist, or ``schedule`` beside options of a schedule.
        ValueError: (strict only) an option with a value that is not allowed.
    """
    check_names(options)
    try:
        return _build(framework, options)
    except (TypeError, ValueError) as error:
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


def _build(framework: str, options: dict[str, Any]) -> OverlapMonitor:
    of_schedule = {name: value for name, value in options.items() if name in _SCHEDULE_OPTIONS}
    of_monitor = {name: value for name, value in options.items() if name in _MONITOR_OPTIONS}
    if of_schedule:
        if of_monitor.get("schedule") is not None:
            raise TypeError(f"give either schedule or {sorted(of_schedule)}, not both")
        of_monitor["schedule"] = Schedule(**of_schedule)
    return OverlapMonitor(**of_monitor, framework=framework)
