"""What rank 0 says at attach (what will be measured, when, and where it goes), and which monitors are running."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from overlap_callbacks._log import logger
from overlap_callbacks.analysis.formatting import PLAIN, count
from overlap_callbacks.analysis.results.env_overrides import TIME_ONLY
from overlap_callbacks.analysis.statistics import MIN_BLOCKS
from overlap_callbacks.monitor.background.quick import LONGEST_S, NARROW, is_answered, quick_schedule
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.faults import Notices
from overlap_callbacks.monitor.schedule import Schedule

if TYPE_CHECKING:
    from overlap_callbacks.monitor.monitor import OverlapMonitor

# Maximum delay by the reports of a monitor that another one replaces.
_CLOSE_TIMEOUT_S = 5.0

_running: weakref.WeakSet[OverlapMonitor] = weakref.WeakSet()
# What an adapter has attached a monitor to: an optimizer, an engine, a trainer.
_attached_to: weakref.WeakKeyDictionary[OverlapMonitor, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def started(monitor: OverlapMonitor) -> None:
    """Note a monitor that may measure."""
    _running.add(monitor)


def close() -> None:
    """Close every monitor of this process. Call it on all ranks."""
    with contextlib.ExitStack() as each:  # a strict one may raise
        for monitor in list(_running):
            _running.discard(monitor)
            each.callback(monitor.close)


def close_others(monitor: Any, target: object) -> None:
    """Close monitors that adapters have attached to something else than ``target``; rank 0 says so, in one sentence.

    So the cell of a notebook that makes model and optimizer may be run again, whatever still holds the earlier ones.
    """
    _attached_to[monitor] = weakref.ref(target)
    for other, attached_to in list(_attached_to.items()):
        before = attached_to()
        if before is target or not other.active:
            continue
        gone = "what it was attached to is gone"
        why = gone if before is None else f"it was attached to another {type(before).__name__}"
        monitor.say(f"an earlier monitor is closed: {why} [OC117]")
        _running.discard(other)
        other._driver.replaced = True
        other.close(_CLOSE_TIMEOUT_S)


def attach_line(config: MonitorConfig, job: Job, next_step: int, *, timed_only: bool = False) -> str:
    """The line at attach; ``next_step`` is the first step that the monitor will see."""
    schedule = config.schedule
    budget = "without a budget"
    if config.max_overhead is not None:
        budget = f"at most {PLAIN.share_of_training(config.max_overhead)} of training time"
    first = schedule.next_window_step(next_step)
    delays = ", every second one with delays" if config.causal else ""
    when = f"first window at step {first:,}, then every {schedule.every_n_steps:,} steps{delays}, {budget}"
    if config.quick and job.rank == 0 and is_answered(config.sinks):
        when += "; the record has the quick answer of an earlier start"
    elif config.quick:
        first = quick_schedule(schedule).next_window_step(next_step)
        when = (
            f"quick: windows back to back from step {first:,}, until the interval of the step time is below "
            f"{100 * NARROW:.0f} points or {LONGEST_S / 60:.0f} minutes are over; outside the budget: training is "
            f"slower meanwhile; then every {schedule.every_n_steps:,} steps, {budget}"
        )
    if timed_only:
        when = f"steps are timed, and nothing else is measured ({TIME_ONLY})"
    said = [f"{config.framework}, {count(job.world_size, 'rank')}", when]
    for sink in config.sinks:
        try:
            said.append(sink.destination())
        except Exception as error:  # it costs no more than these words
            logger.debug("the destination of %s", type(sink).__name__, exc_info=error)
    return "; ".join(filter(None, said))


def announce_limits(schedule: Schedule, notices: Notices) -> None:
    """Log which figures a schedule is too short for."""
    if schedule.timed_blocks // 2 < MIN_BLOCKS:
        notices.info("fewer than 4 blocks of each mode: there will be no confidence intervals [OC114]")
    elif 0 < schedule.profiled_steps < MIN_BLOCKS:
        notices.info("profiled_steps below 4: figures of kernels will have no confidence intervals [OC115]")
