"""The backends of ``engine.monitor`` as a sink, and which sinks a job with such a monitor has."""

from __future__ import annotations

from pathlib import Path

from deepspeed.monitor.monitor import Monitor
from deepspeed.monitor.wandb import WandbMonitor
from deepspeed.runtime.engine import DeepSpeedEngine

from overlap_callbacks import Sink, WandbSink
from overlap_callbacks.sinks import FunctionSink, JsonlSink


class EventsSink(FunctionSink):
    """Passes reports on to the backends of ``engine.monitor``, on the training thread, against the samples seen.

    Its W&B backend is left out. The run that this backend starts is the active one, and ``WandbSink`` logs the same
    there, with tables and against an axis of steps.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        # ``close`` writes the last reports, which come while the training thread waits in the monitor's close().
        super().__init__(self._write_events, deferred=True, exact_keys=True)
        self._engine = engine
        backends = vars(engine.monitor).values()  # None where one is not enabled, and on all ranks but the first
        self.backends = [b for b in backends if isinstance(b, Monitor) and not isinstance(b, WandbMonitor)]

    def _write_events(self, metrics: dict[str, float], step: int) -> None:
        events = [(name, value, self._engine.global_samples) for name, value in metrics.items()]
        for backend in self.backends:
            backend.write_events(events)


def sinks_of(given: list[Sink] | None, folder: Path, engine: DeepSpeedEngine, events: EventsSink) -> list[Sink]:
    """The monitor's sinks: those given or the default ones, and the engine's backends. One W&B sink at most."""
    sinks = [JsonlSink(folder), WandbSink(start=False)] if given is None else given
    if not engine.monitor.enabled:
        return sinks
    extra: list[Sink] = [events] if events.backends else []
    if engine.monitor.wandb_monitor is not None and not any(isinstance(sink, WandbSink) for sink in sinks):
        extra.append(WandbSink(start=False))
    return [*sinks, *extra]
