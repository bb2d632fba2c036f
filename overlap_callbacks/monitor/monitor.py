"""OverlapMonitor: the one object that adapters drive. What is behind it begins in ``driver.py``."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from overlap_callbacks.analysis.results.env_overrides import SWITCH
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.run import Setting
from overlap_callbacks.analysis.statistics import MIN_BLOCKS
from overlap_callbacks.gate.arms import BaseArm
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.monitor.config import MonitorConfig, default_sinks
from overlap_callbacks.monitor.driver import StepDriver
from overlap_callbacks.monitor.faults import MisuseError
from overlap_callbacks.monitor.for_adapters import ForAdapters
from overlap_callbacks.monitor.notices import Notices
from overlap_callbacks.monitor.outside import told_from_outside
from overlap_callbacks.monitor.run_info import default_run_folder
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.sinks import Sink

__all__ = ["EXCEPTION_CLOSE_TIMEOUT_S", "SWITCH", "MisuseError", "OverlapMonitor"]

_OFF_WORDS = frozenset({"0", "off", "false", "no", "disabled"})

T = TypeVar("T")

# Maximum time that reports on their way may hold up a job that is ending with an exception, or without close().
EXCEPTION_CLOSE_TIMEOUT_S = 5.0


class OverlapMonitor(ForAdapters):
    """Measures what overlapping computation with communication costs and saves, on a few steps of a live job.

    Call ``step_begin(step)`` and ``step_end(step)`` around each optimizer step (all its micro-batches), or use
    ``with monitor.step():``; ``close()`` at the end. All ranks must do so alike.

    It observes and does not change training: losses and weights stay bit-identical. In production (the default) it
    never raises: an error of the library's own switches it off with one warning, and training goes on. It never hangs:
    every wait has a timeout. With ``strict`` errors are raised.

    The environment variable ``OVERLAP_CALLBACKS=off`` switches everything off. ``OVERLAP_CALLBACKS_RUN_DIR`` names the
    folder of the record, and goes before ``run_dir`` and the folders of ``sinks``.

    Args:
        schedule: when windows open and what they are made of.
        arms: what the job as configured is compared with, each window with one of them: ``Sequential()`` alone by
            default, or any switch that can be turned between two steps; see ``overlap_callbacks.arms``.
        sinks: where reports go, used on rank 0 only. By default the JSONL record in ``run_dir``, and the W&B run that
            is active when the first window ends, if there is one.
        run_dir: folder of the record; by default a new one under ``overlap_runs``.
        strict: raise instead of switching off.
        max_overhead: maximum fraction of training time that measuring may cost; windows that cost more are run less
            often. None for no limit.
        order_timeout_s: maximum time in which the ranks' sequences of collectives must come in.
        report_timeout_s: maximum time in which their reports must come in.
        power: measure power, energy and clocks in windows, where the device has sensors.
        power_interval_s: time between readings of power, at least 0.001; None for 0.1 (NVIDIA, CPU) or 0.02 (AMD).
        power_idle_interval_s: time between readings outside windows; None for no readings there.
        power_per_node: the first rank of each node reads all of its devices, on one thread; else each reads its own.
        tokens_per_step: tokens that one step of the whole job trains on; None if not known.
        samples_per_step: samples of it; None if not known.
        flop_per_step: model FLOP of one step of the whole job; or
        model_parameters: parameters that a token passes, of a transformer; or
        model_preset: the model by name, one of those of ``overlap predict``. None if not known.
        precision: of the matrix products: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``; None if not known.
        peak_flop_per_s: of one device; None for that of the table of peaks.
        settings: what you vary from run to run, by name, for ``overlap report --axis``.
        sample_experts_every: between windows, record the split sizes of all-to-alls in every so-manieth step; None for
            windows alone.
        check_gradients: the race check: after each window repeat a step, overlapped and sequential, and compare the
            gradients bit by bit. Needs an adapter that can repeat one, as ``attach(..., repeat_step=...)``.
        framework: the adapter in use, for the record.
        hosts: whether hosts may be called by their names; if not, they have numbers in all that is written.

    Raises:
        TypeError, ValueError: a parameter has the wrong type or value.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        sinks: Sequence[Sink] | None = None,
        *,
        arms: Sequence[BaseArm] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
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
        precision: str | None = None,
        peak_flop_per_s: float | None = None,
        settings: Mapping[str, Setting] | None = None,
        sample_experts_every: int | None = None,
        check_gradients: bool = False,
        annotate_steps: bool = False,
        framework: str = "",
        hosts: bool = True,
    ) -> None:
        folder = default_run_folder() if run_dir is None else Path(run_dir)
        self._set_up(
            MonitorConfig(
                schedule=Schedule() if schedule is None else schedule,
                arms=arms,
                sinks=default_sinks(folder) if sinks is None else sinks,
                run_dir=folder,
                strict=strict,
                max_overhead=max_overhead,
                order_timeout_s=order_timeout_s,
                report_timeout_s=report_timeout_s,
                power=power,
                power_interval_s=power_interval_s,
                power_idle_interval_s=power_idle_interval_s,
                power_per_node=power_per_node,
                tokens_per_step=tokens_per_step,
                samples_per_step=samples_per_step,
                flop_per_step=flop_per_step,
                model_parameters=model_parameters,
                model_preset=model_preset,
                precision=precision,
                peak_flop_per_s=peak_flop_per_s,
                settings=settings,
                sample_experts_every=sample_experts_every,
                check_gradients=check_gradients,
                annotate_steps=annotate_steps,
                framework=framework,
                hosts=hosts,
            ),
            Gate(),
        )

    @classmethod
    def from_config(cls, config: MonitorConfig, gate: Gate | None = None) -> OverlapMonitor:
        """A monitor with the options of ``config``.

        Args:
            config: all options.
            gate: not registered; by default a new one, with room for 20,000 collectives in a step.
        """
        monitor = cls.__new__(cls)
        monitor._set_up(config, Gate() if gate is None else gate)
        return monitor

    def _set_up(self, config: MonitorConfig, gate: Gate) -> None:
        timing, problem = None, ""
        try:
            config, timing = told_from_outside(config)
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
        if os.environ.get(SWITCH, "").strip().lower() in _OFF_WORDS:
            driver.notices.info(f"switched off by {SWITCH}={os.environ[SWITCH]}")
            driver.stop()
        elif problem:
            driver.notices.warn_once("outside", f"measuring is switched off, training goes on: {problem}")
            driver.stop()
        elif timing is None:
            _announce_limits(config.schedule, driver.notices)

    # -- steps

    def step_begin(self, step: int) -> None:
        """Say that optimizer step ``step`` begins.

        Args:
            step: its number, counted up by one from step to step, the same on every rank.
        """
        driver = self._driver
        # Outside windows this is all that a step costs. Any other call takes the long way.
        if type(step) is int and driver.last_step < step < driver.next_step and not driver.open:
            driver.ring.begin(step)
            driver.last_step = step
            driver.open = True
            return
        driver.raise_interrupt()
        nested, driver.open = driver.open, True
        driver.guarded(driver.begin, step, nested)

    def step_end(self, step: int | None = None) -> None:
        """Say that the step that began last has ended.

        Args:
            step: its number, as a check; may be left out.
        """
        driver = self._driver
        if driver.open and not driver.in_runner_step and (step is None or step == driver.last_step):
            driver.open = False
            return
        driver.guarded(driver.end, step)
        driver.raise_interrupt()

    def step(self, step: int | None = None) -> _StepContext:
        """``with monitor.step():`` around a step; numbered on from the last one unless a number is given.

        An exception of the user's passes through unchanged, with the gate back to pass-through.
        """
        self._step_context.number = self._driver.last_step + 1 if step is None else step
        return self._step_context

    def abort_step(self) -> None:
        """Give up the open step, and the window with it: something went wrong in the user's step."""
        self._driver.abort()

    def skip_step(self, reason: str) -> None:
        """Say that the open step trains nothing: a loss scaler skipped the update, say. It does not count.

        Such a step issues fewer collectives than others, so a window that began with it is left out.

        Args:
            reason: why, in words.
        """
        self._driver.runner.skip(reason)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around something within a step that is no part of training (an evaluation, a checkpoint).

        Its collectives are let through unseen, and the step does not count.
        """
        runner = self._driver.runner
        self._driver.guarded(self._driver.pause)
        try:
            yield
        finally:
            self._driver.guarded(runner.resume)

    @property
    def last_step(self) -> int:
        """Number of the step that began last; -1 before the first."""
        return self._driver.last_step

    @property
    def mode(self) -> Mode:
        """The mode in which the open step runs."""
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
        """Pin the mode of all steps from the next one on; no window opens meanwhile. None goes back to the schedule.

        All ranks must pin alike, between the same steps. The first step after pinning sequential mode is overlapped: it
        is recorded for the order check, which must pass first. (With ``attach`` the step under way has begun before,
        and is overlapped too.) ``mode`` tells in which mode the open step runs.

        Raises:
            TypeError: not a ``Mode`` or None.
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

        Call it before ``torch.distributed.destroy_process_group()``, on all ranks. Within a step that a framework's own
        switches make sequential, and that can only be turned between steps, they and the adapter's hooks stay until
        that step has ended.

        Args:
            timeout_s: maximum time for the reports on their way. By default as long as the ranks have to be heard, but
                ranks of which nothing comes for some seconds are given up, because all ranks end alike.
        """
        driver = self._driver
        was_active, num_windows = self.active, driver.window_runner.num_opened
        if was_active and not num_windows and driver.pinned_mode is None and self.last_step >= 0:
            driver.notices.announce(
                f"nothing was measured: the first window starts at step {self.schedule.first_step}, but the steps seen "
                f"end at {self.last_step}; a window that starts before the first step seen is left out"
            )
        switched_back = driver.close()
        if self._finalizer.detach() is not None:
            limit_s = self.config.report_timeout_s + 5.0 if timeout_s is None else timeout_s
            driver.guarded(driver.slot.close, limit_s, restore=switched_back, settle=timeout_s is None)
            record = _record_of(self.config.sinks) if was_active and num_windows else None
            if record is not None:
                driver.notices.announce(f"the record is in {record}: overlap show {record}")
        driver.guarded(driver.faults.raise_reported)  # errors of the last reports
        driver.raise_interrupt()

    def __enter__(self) -> OverlapMonitor:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None:
            self.abort_step()
        self.close(None if exception[0] is None else EXCEPTION_CLOSE_TIMEOUT_S)


class _StepContext:
    """``with monitor.step():``; one object, used again for each step."""

    def __init__(self, monitor: OverlapMonitor) -> None:
        self._monitor = weakref.ref(monitor)
        self.number = 0

    def __enter__(self) -> OverlapMonitor:
        monitor = self._monitor()
        assert monitor is not None
        monitor.step_begin(self.number)
        return monitor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        monitor = self._monitor()
        assert monitor is not None
        if kind is None:
            monitor.step_end(self.number)
        else:
            monitor.abort_step()


def _announce_limits(schedule: Schedule, notices: Notices) -> None:
    """Say which figures a schedule is too short for."""
    if schedule.timed_blocks // 2 < MIN_BLOCKS:
        notices.info("fewer than 4 blocks of each mode: there will be no confidence intervals")
    elif 0 < schedule.profiled_steps < MIN_BLOCKS:
        notices.info("profiled_steps below 4: figures of kernels will have no confidence intervals")


def _record_of(sinks: Sequence[Sink]) -> Path | None:
    """Folder of the first record that there is."""
    paths = (sink.kept_record() for sink in sinks)
    return next((path.parent for path in paths if path is not None and path.exists()), None)
