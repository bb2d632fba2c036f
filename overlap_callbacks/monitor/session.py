"""What a monitor holds that must be let go when it ends: the gate, the order checks, the reporter.

It knows nothing of the monitor, so as not to keep it alive.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.native import SwitchState
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.instruments.power.discovery import devices_to_read
from overlap_callbacks.instruments.power.meter import PowerMeter, PowerOptions
from overlap_callbacks.monitor.background.reporter import OrderChecker, Reporter
from overlap_callbacks.monitor.background.store import Job, next_prefix
from overlap_callbacks.monitor.run_info import run_info
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import Sink


class Session:
    """The gate, at once; the rest once there is a job to measure."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.native = SwitchState(None)
        self._order: OrderChecker | None = None
        self._reporter: Reporter | None = None
        self.meter: PowerMeter | None = None

    def open(
        self,
        job: Job,
        *,
        schedule: Schedule,
        sinks: Sequence[Sink],
        framework: str,
        max_overhead: float | None,
        order_timeout_s: float,
        report_timeout_s: float,
        power: PowerOptions,
        on_no_power: Callable[[str, bool], None],
        on_error: Callable[[Exception], None],
        on_sink_error: Callable[[Sink, Exception], None],
    ) -> None:
        """Take up what measuring needs; the callbacks, bound methods, are held weakly."""
        prefix = next_prefix()
        if power.enabled:
            # Asked here, because other threads have a current device of their own.
            self.meter = PowerMeter(devices_to_read(power.per_node), power, tell=_weak(on_no_power))
        device = StepClock().device  # of the training thread: other threads have a current device of their own
        self._reporter = Reporter(
            job,
            prefix,
            schedule=schedule,
            sinks=sinks,
            run=lambda: run_info(job, schedule, framework, device),
            timeout_s=report_timeout_s,
            max_overhead=max_overhead,
            on_error=_weak(on_error),
            on_sink_error=_weak(on_sink_error),
        )
        self._reporter.open()
        self._order = OrderChecker(
            job, prefix, timeout_s=order_timeout_s, veto=self._reporter.veto, on_error=_weak(on_error)
        )

    @property
    def order(self) -> OrderChecker:
        assert self._order is not None
        return self._order

    @property
    def reporter(self) -> Reporter:
        assert self._reporter is not None
        return self._reporter

    def stop(self) -> None:
        """Back to overlapped, at once."""
        self.gate.stop()
        self.restore()

    def restore(self) -> None:
        """Put a framework's own switches back."""
        with contextlib.suppress(Exception):  # a form that cannot go back has said so where it went forth
            self.native.set(sequential=False)

    def close(self, timeout_s: float, restore: bool = True) -> None:
        """Let go of everything; reports that are on their way have ``timeout_s``."""
        self.gate.close()
        if restore:
            self.restore()
        if self._order is not None:
            self._order.close(1.0)
        if self._reporter is not None:
            self._reporter.close(timeout_s)
        if self.meter is not None:
            self.meter.close()
        self.meter = None
        self._order = self._reporter = None


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """A callback that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call
