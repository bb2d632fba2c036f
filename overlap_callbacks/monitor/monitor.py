"""``OverlapMonitor``, the object that users and adapters drive. The machinery behind it starts in ``driver.py``."""

from __future__ import annotations

import contextlib
import os
import shlex
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.run import Setting
from overlap_callbacks.gate.arms import BaseArm, Keep, Offers
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.names import StepNames
from overlap_callbacks.gate.switches import OverlapSwitch, Switch
from overlap_callbacks.instruments.device import Stream
from overlap_callbacks.monitor.attaching import announce_limits, attach_line, close_others, started
from overlap_callbacks.monitor.background.roll_call import has_others
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.config import (
    MonitorConfig,
    apply_env_overrides,
    as_settings,
    default_run_folder,
    default_sinks,
    record_of,
    switched_off_by,
)
from overlap_callbacks.monitor.driver import StepDriver, StepHook
from overlap_callbacks.monitor.faults import MisuseError
from overlap_callbacks.monitor.race.repeatable import RepeatableStep
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.monitor.step_ring import Marker
from overlap_callbacks.monitor.timing import TimingRunner
from overlap_callbacks.sinks import Sink

__all__ = ["EXCEPTION_CLOSE_TIMEOUT_S", "MisuseError", "OverlapMonitor"]

T = TypeVar("T")

# Maximum delay by pending reports when a job ends with an exception, or without close().
EXCEPTION_CLOSE_TIMEOUT_S = 5.0


class AdapterApi:
    """The monitor's interface for adapters, in addition to what users call."""

    _driver: StepDriver
    config: MonitorConfig

    @property
    def arm(self) -> str | None:
        """Name of the switch turned in the open step; None if none is. ``mode`` says what the gate does."""
        return self._driver.switch.turned if self._driver.open else None

    @property
    def in_step(self) -> bool:
        """Whether a step is open: begun, and not ended."""
        return self._driver.open

    @property
    def in_window(self) -> bool:
        return self._driver.runner.in_window

    @property
    def steps_left(self) -> int:
        """How many steps the open window has after the latest one, as far as it is planned."""
        return self._driver.runner.steps_left

    def cut_short(self, reason: str) -> None:
        """End the open window within the open step, for a reason that stands in the record."""
        if self._driver.runner.in_window:
            self._driver.guarded(self._driver.runner.abandon, reason, within_step=self._driver.open)

    def name_groups(self, dimensions: Mapping[str, str]) -> None:
        """Name the dimension of parallelism of process groups, by ``group.group_name``, if the groups do not say it."""
        self._driver.gate.dimensions.update(dimensions)

    def name_computing_streams(self, streams: Iterable[Stream]) -> None:
        """Register streams that compute but issue no collectives, to be ordered too; iterated in each measured step."""
        self._driver.gate.side_streams.append(streams)

    def name_collectives(self, names: Callable[[], StepNames]) -> None:
        """Name what collectives are for. ``names`` is called at the beginning of each recorded step."""
        self._driver.gate.names = names

    def tell_configuration(self, facts: Mapping[str, object]) -> None:
        """Add facts of the job's configuration to the record, before the first window. Long ones are cut."""
        self.config.configuration.update(as_settings(facts))

    def tell_model_chunks(self, number: int) -> None:
        """Set the number of model chunks of an interleaved pipeline on this rank."""
        self._driver.window_runner.model_chunks = number

    def enter(self, part: int) -> None:
        """Mark that a part of ``analysis.step_vectors`` begins, in the open step or after it."""
        self._driver.ring.enter(part)

    def lend_marks(self, marker: Marker) -> None:
        """Let an object leave marks itself, for less."""
        self._driver.ring.lend(marker)

    def step_hook(self, otherwise: Callable[[], None]) -> Callable[..., None]:
        """A hook for the end of each step, which begins the next one; see ``StepHook``."""
        return StepHook(self._driver, otherwise).step_ended

    def tell_micro_batch(self) -> None:
        """Count one more micro-batch in the open step. The count is part of a step's kind."""
        self._driver.gate.micro_batches += 1

    def expect_nested_collectives(self) -> None:
        """Before the first window: see collectives of DTensors, too, for some microseconds each between windows."""
        self._driver.gate.nested = True

    def use_native(self, form: OverlapSwitch) -> None:
        """Make steps sequential by a framework's switches, not the gate (it records). Call it before the first step."""
        if not isinstance(form, OverlapSwitch):
            raise TypeError(f"form must be an OverlapSwitch, got {form!r} (a {type(form).__name__})")
        self._driver.switch.adopt(form)

    def offer_switches(self, offers: Offers) -> None:
        """Offer switches to arms, by ``BaseArm.needs``. Call it before the first step."""
        self._driver.switch.offers.update(offers)

    def offer_repetition(self, step: RepeatableStep) -> None:
        """Offer a repeatable step for ``check_gradients``. Call it before the first window."""
        self._driver.slot.race.step = step

    @property
    def is_repeating(self) -> bool:
        """Whether a step is being repeated right now; a repetition does not train."""
        return self._driver.slot.race.running

    def is_turned(self, switch: Switch) -> bool:
        """Whether this switch is turned in the open step."""
        state = self._driver.switch
        return state.form is switch and state.is_turned

    def post(self, issue: Callable[[], T], works_of: Callable[[T], Sequence[Any]]) -> tuple[T, list[Any]]:
        """Issue a batch of sends and receives, and in sequential steps wait for them; see ``Gate.post``."""
        return self._driver.gate.post(issue, works_of)

    def call_on_close(self, action: Callable[[], None]) -> None:
        """Make ``close()`` call ``action``, once: an adapter removes its hooks."""
        self._driver.on_close.append(action)

    def offer_page(self, write: Callable[[Path], Path]) -> None:
        """Offer a function that writes the page of a record and returns its path. Call it before the first window."""
        self._driver.slot.write_page = write

    def say(self, message: str) -> None:
        """Say something on rank 0, even if logging is not configured."""
        self._driver.notices.announce(message)

    def attached(self, next_step: int, unused: str, target: object = None) -> None:
        """Agree with the other ranks whether to measure, and say on rank 0 what will be. An adapter calls it last.

        Waits a short time for the other ranks; those that come later are heard later.

        Args:
            next_step: number of the first step that the monitor will see.
            unused: what is wrong if it never sees one.
            target: what the monitor is attached to; monitors of others are closed.

        Raises:
            Exception: (``strict=True`` only) a rank cannot measure.
        """
        driver, job = self._driver, Job.current()
        driver.unused = unused
        timed_only = isinstance(driver.window_runner, TimingRunner)
        if driver.active and not timed_only and (job is None or job.world_size == 1):
            driver.guarded(driver.slot.acquire)  # says now that there is nothing to measure
        if not driver.active or job is None:
            return
        if has_others(job):
            call = driver.slot.call_roll(job, timed_only=timed_only)
            refusal = call.wait()
            if refusal is not None:
                driver.faults.refusal = None
                driver.stop()
                driver.slot.close(0.0)
                if self.config.strict:
                    raise call.error or RuntimeError(f"measuring is switched off on all ranks: {refusal.text}")
                return
        if target is not None:
            driver.guarded(close_others, self, target)
        if job.world_size > 1:
            self.say(attach_line(self.config, job, next_step, timed_only=timed_only))

    def sink_failed(self, sink: Sink, error: Exception) -> None:
        """Report a sink that failed and is no longer used; in strict mode the next step raises the error."""
        self._driver.faults.sink_failed(sink, error)


class OverlapMonitor(AdapterApi):
    """Measures what overlapping computation with communication costs and saves, on a few steps of a live job.

    Call ``step_begin(step)`` and ``step_end(step)`` around each optimizer step (all its micro-batches), or use
    ``with monitor.step():``; ``close()`` at the end. All ranks must do the same. Made by hand, a monitor does not agree
    with the other ranks at the start, since it may be made before the process group; ``attached`` does.

    Training does not change: losses and weights stay bit-identical. In production (the default) the monitor never
    raises: an error of its own switches it off with one warning. It never hangs: every wait has a timeout.

    The environment variable ``OVERLAP_CALLBACKS=off`` switches everything off. ``OVERLAP_CALLBACKS_RUN_DIR`` names the
    folder of the record, and overrides ``run_dir`` and the folders of ``sinks``.

    Args:
        schedule: when windows open and what they are made of.
        arms: what the job as configured is compared with, each window with one of them: ``Sequential()`` alone by
            default, or any switch that can be turned between two steps; see ``overlap_callbacks.arms``.
        decide: find the best arm: ``"recommend"`` says which it is, ``Keep()`` also turns it on while it wins.
        sinks: where reports go, on rank 0. By default the record in ``run_dir``, and the W&B run active at a window.
        run_dir: folder of the record; by default a new one under ``overlap_runs``.
        detail: what W&B and a trainer's other loggers get of each window: ``"short"``, at most 14 keys, or ``"all"``.
            It does not change sinks that you give yourself.
        strict: raise instead of switching off.
        max_overhead: maximum fraction of training time for measuring: windows become rarer; None for no limit.
        order_timeout_s: maximum time in which the ranks' sequences of collectives must come in.
        report_timeout_s: maximum time in which their reports must come in.
        power: measure power, energy and clocks in windows, where the device has sensors.
        power_interval_s: time between readings of power, at least 0.001; None for 0.1 (NVIDIA, CPU) or 0.02 (AMD).
        power_idle_interval_s: the same outside windows; None for no readings there.
        power_per_node: the first rank of each node reads all of its devices, on one thread; else each reads its own.
        tokens_per_step: tokens that one step of the whole job trains on; None if not known.
        samples_per_step: samples of it; None if not known.
        flop_per_step: model FLOP of one step of the whole job; or
        model_parameters: parameters that a token passes, of a transformer; or
        model_preset: the model by name, one of those of ``overlap predict``. None if not known.
        precision: of matrix products: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``fp8``, a torch dtype; None if unknown.
        peak_flop_per_s: of one device; None for that of the table of peaks.
        settings: what you vary from run to run, by name, for ``overlap report --axis``.
        sample_experts_every: record split sizes of all-to-alls in every n-th step between windows; None: in windows.
        check_gradients: the race check: after each window repeat a step, overlapped and sequential, and compare the
            gradients bit by bit. Needs an adapter that can repeat one, as ``attach(..., repeat_step=...)``.
        annotate_steps: name the steps of windows in profiles of your own, by ``record_function`` and NVTX.
        quick: windows back to back first, outside the budget, until step time is known to 5 points; at most 10 minutes.
        causal: in every second window, delay collectives by known times instead: which of them hold the step up?
        ask, ask_signal: who may ask the job with ``overlap ask``: its user, its group or nobody; a signal that does so.
        framework: the adapter in use, for the record.
        hosts: whether hosts may be named; if not, they have numbers in all that is written.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or value.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        sinks: Sequence[Sink] | None = None,
        *,
        arms: Sequence[BaseArm] | None = None,
        decide: Keep | str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        detail: str = "short",
        strict: bool = False,
        max_overhead: float | None = 0.005,
        order_timeout_s: float = 10.0,
        report_timeout_s: float = 30.0,
        power: bool = True,
        power_interval_s: float | None = None,
        power_idle_interval_s: float | None = None,
        power_per_node: bool = False,
        tokens_per_step: int | None = None,
        samples_per_step: int | None = None,
        flop_per_step: float | None = None,
        model_parameters: float | None = None,
        model_preset: str | None = None,
        precision: str | torch.dtype | None = None,
        peak_flop_per_s: float | None = None,
        settings: Mapping[str, Setting] | None = None,
        sample_experts_every: int | None = None,
        check_gradients: bool = False,
        annotate_steps: bool = False,
        quick: bool = False,
        causal: bool = False,
        ask: str = "user",
        ask_signal: str | None = None,
        framework: str = "",
        hosts: bool = True,
    ) -> None:
        options = {name: value for name, value in locals().items() if name != "self"}
        folder = options["run_dir"] = default_run_folder() if run_dir is None else Path(run_dir)
        options["schedule"] = Schedule() if schedule is None else schedule
        options["sinks"] = default_sinks(folder, detail) if sinks is None else sinks
        self._set_up(MonitorConfig(**options), Gate())

    @classmethod
    def from_config(cls, config: MonitorConfig, gate: Gate | None = None) -> OverlapMonitor:
        """A monitor with these options. ``gate`` is not registered yet; a new one by default."""
        monitor = cls.__new__(cls)
        monitor._set_up(config, Gate() if gate is None else gate)
        return monitor

    @classmethod
    def stopped(cls, framework: str) -> OverlapMonitor:
        """A monitor that does nothing."""
        monitor = cls.__new__(cls)
        monitor._set_up(MonitorConfig(framework=framework), Gate(), off=True)
        monitor.close()
        return monitor

    def __reduce__(self) -> tuple[Any, ...]:  # a copy measures nothing: a model may hold its monitor
        return OverlapMonitor.stopped, (self.config.framework,)

    def _set_up(self, config: MonitorConfig, gate: Gate, *, off: bool = False) -> None:
        timing, problem = None, ""
        try:
            config, timing = (config, None) if off else apply_env_overrides(config)
        except ValueError as error:
            problem = str(error)
        self.schedule = config.schedule
        self.run_dir = config.run_dir
        self.strict = config.strict
        self.config = config
        self._driver = driver = StepDriver(config, gate, timing)
        self._step_context = _StepContext(self)
        # Runs when the monitor is collected or the interpreter exits, whichever comes first.
        self._finalizer = weakref.finalize(self, driver.slot.close, EXCEPTION_CLOSE_TIMEOUT_S)
        started(self)
        if off:
            driver.stop()
        elif switched_off_by():
            driver.notices.info(f"switched off by {switched_off_by()} [OC103]")
            driver.stop()
        elif problem:
            driver.notices.warn_once("environment", f"measuring is switched off, training goes on: {problem} [OC104]")
            driver.stop()
        elif timing is None:
            announce_limits(config.schedule, driver.notices)

    # -- steps

    def step_begin(self, step: int) -> None:
        """Mark the start of optimizer step ``step``.

        Args:
            step: its number, counted up by one from step to step, the same on every rank.
        """
        driver = self._driver
        # Fast path: outside windows a step costs no more than this.
        if type(step) is int and driver.last_step < step < driver.next_step and not driver.open:
            driver.ring.begin(step)
            driver.last_step = step
            driver.open = True
            return
        driver.raise_interrupt()
        nested, driver.open = driver.open, True
        driver.guarded(driver.begin, step, nested)

    def step_end(self, step: int | None = None) -> None:
        """Mark the end of the open step. ``step``: its number, as a check; optional."""
        driver = self._driver
        if driver.open and not driver.in_runner_step and (step is None or step == driver.last_step):
            driver.open = False
            return
        driver.guarded(driver.end, step)
        driver.raise_interrupt()

    def step(self, step: int | None = None) -> _StepContext:
        """``with monitor.step():`` around a step, numbered after the previous one unless a number is given.

        The user's exceptions pass through unchanged, with the gate back to pass-through.
        """
        self._step_context.number = self._driver.last_step + 1 if step is None else step
        return self._step_context

    def abort_step(self) -> None:
        """Abandon the open step, and the window with it: something went wrong in the user's step."""
        self._driver.abort()

    def skip_step(self, reason: str) -> None:
        """Exclude the open step because it trains nothing (for example, a loss scaler skipped the update).

        A window that began with it is skipped: it issues fewer collectives than other steps.
        """
        self._driver.runner.skip(reason)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Wrap anything within a step that is not training (an evaluation, a checkpoint).

        Its collectives are neither recorded nor serialised, and the step does not count.
        """
        runner = self._driver.runner
        self._driver.guarded(self._driver.pause)
        try:
            yield
        finally:
            self._driver.guarded(self._driver.resume, runner)

    @property
    def last_step(self) -> int:
        """Number of the latest step; -1 before the first."""
        return self._driver.last_step

    @property
    def mode(self) -> Mode:
        """The mode of the open step."""
        sequential = self._driver.gate.serialising or self._driver.switch.is_sequential
        return Mode.SEQUENTIAL if self._driver.open and sequential else Mode.OVERLAPPED

    @property
    def active(self) -> bool:
        """False once the monitor is switched off, whatever the reason."""
        return self._driver.active

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens that one step of the whole job trains on; an adapter that knows the number may set it."""
        return self._driver.window_runner.tokens_per_step

    @tokens_per_step.setter
    def tokens_per_step(self, tokens: int | None) -> None:
        self._driver.window_runner.tokens_per_step = tokens

    # -- a mode pinned by hand

    def force(self, mode: Mode | None) -> None:
        """Pin the mode of all steps from the next one on; no window opens meanwhile. None returns to the schedule.

        All ranks must pin the same mode between the same steps. The first step for which sequential mode is pinned is
        overlapped: it is recorded for the order check, which must pass first. Modes may then change at each step.
        ``mode`` is the mode of the open step.

        Raises TypeError if it is something else.
        """
        if mode is not None and not isinstance(mode, Mode):
            raise TypeError(f"mode must be Mode.OVERLAPPED, Mode.SEQUENTIAL or None, got {mode!r}")
        if self.active:
            self._driver.guarded(self._driver.pin, mode)

    @contextlib.contextmanager
    def forced(self, mode: Mode) -> Iterator[None]:
        """``with monitor.forced(Mode.SEQUENTIAL):`` around some steps."""
        before = self._driver.pinned_mode
        self.force(mode)
        try:
            yield
        finally:
            self.force(before)

    # -- end

    def close(self, timeout_s: float | None = None) -> None:
        """Report what was measured, release the gate for other monitors, close the sinks. Safe to call twice.

        Call it before ``torch.distributed.destroy_process_group()``, on all ranks. The adapter's hooks, and a
        framework's own switches that can only be turned between steps, stay until the open step has ended.

        Args:
            timeout_s: maximum time for the last reports. By default ``report_timeout_s``, but ranks that stay silent
                for some seconds are given up, because all ranks end at about the same time.
        """
        driver = self._driver
        was_active, num_windows = self.active, driver.window_runner.num_opened
        driver.say_if_nothing_was_measured()
        switched_back = driver.close()
        if self._finalizer.detach() is not None:
            limit_s = self.config.report_timeout_s + 5.0 if timeout_s is None else timeout_s
            driver.guarded(driver.slot.close, limit_s, restore=switched_back, settle=timeout_s is None)
            record = record_of(self.config.sinks) if was_active and num_windows else None
            if record is not None:
                driver.notices.announce(f"the record is in {record}: overlap show {shlex.quote(str(record))}")
        driver.guarded(driver.faults.raise_reported)  # errors of the last reports
        driver.raise_interrupt()

    def __enter__(self) -> OverlapMonitor:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.abort_step()
        self.close(None if exception[0] is None else EXCEPTION_CLOSE_TIMEOUT_S)


class _StepContext:
    """``with monitor.step():``; one object, reused for each step."""

    def __init__(self, monitor: OverlapMonitor) -> None:
        self._monitor = weakref.ref(monitor)
        self.number = 0

    def __enter__(self) -> OverlapMonitor:
        monitor: Any = self._monitor()
        monitor.step_begin(self.number)
        return monitor  # type: ignore[no-any-return]

    def __exit__(self, *exception: object) -> None:
        monitor: Any = self._monitor()
        if exception[0] is None:
            monitor.step_end(self.number)
        else:
            monitor.abort_step()
