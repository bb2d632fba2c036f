"""Times the steps of a job and does nothing else: for ``overlap tune``, which compares whole runs.

No step is sequential, profiled or recorded; the gate is never registered, no session opens, no switch is turned, and
ranks exchange nothing. Only rank 0 marks the start and end of each step.
"""

from __future__ import annotations

import threading

from overlap_callbacks._threads import Worker
from overlap_callbacks.analysis.results.env_overrides import TimingPlan
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.instruments import clocks
from overlap_callbacks.instruments.environment import EnvironmentReader, hidden_names
from overlap_callbacks.monitor.background.measurement import await_mark
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.faults import current_rank
from overlap_callbacks.monitor.session import SessionSlot, run_info
from overlap_callbacks.monitor.step_runner import NEVER, StepRunner

# Maximum time that the end of the job waits for blocks to be written.
_CLOSE_TIMEOUT_S = 5.0

Steps = list[tuple[clocks.Mark, clocks.Mark]]


class TimingRunner(StepRunner):
    """Times blocks of steps on rank 0, and writes each to the record once the device has passed it."""

    # One per process: the steps of two monitors would mix in one record.
    _only_one = threading.Lock()

    def __init__(self, plan: TimingPlan, slot: SessionSlot) -> None:
        super().__init__(slot)
        self.tokens_per_step = slot.config.tokens_per_step  # unused here, as is ``model_chunks``
        self.model_chunks = 1
        self.num_opened = 0  # 1 once steps are timed
        self._plan = plan
        self._config = slot.config
        self._worker = Worker("overlap-callbacks timing", slot.faults.report)
        self._clock: clocks.StepClock | None = None  # None before the first timed step
        self._warm_at: int | None = None  # None before the first step
        self._first_step = 0
        self._num_blocks = 0
        self._has_lock = False
        # Of the open block and the open step:
        self._steps: Steps = []
        self._block_begun_ns = 0
        self._start: clocks.Mark = 0
        self._spoilt = False

    def rewind(self) -> None:
        """The step number went back: timing goes on."""
        self._steps = []
        self.next_step = 0

    def begin(self, step: int) -> None:
        if self._clock is None and not self._is_ready(step):
            return
        assert self._clock is not None
        self.next_step = 0  # call ``begin`` at every step
        self._spoilt = False
        if not self._steps:
            self._block_begun_ns = clocks.now()
        self._start = self._clock.mark()
        self.in_step = True

    def end(self) -> None:
        assert self._clock is not None
        self.in_step = False
        end = self._clock.mark()
        if self._spoilt:
            return
        self._steps.append((self._start, end))
        lasted_s = (clocks.now() - self._block_begun_ns) / 1e9
        if len(self._steps) >= self._plan.steps_per_block and lasted_s >= self._plan.min_block_seconds:
            steps, self._steps = self._steps, []
            number, self._num_blocks = self._num_blocks, self._num_blocks + 1
            self._worker.submit(lambda: self._write(number, steps))

    def skip(self, reason: str) -> None:
        self._spoilt = True

    def pause(self) -> None:
        self._spoilt = True

    def abandon(self, reason: str, *, within_step: bool = False, job_ends: bool = False) -> None:
        super().abandon(reason, within_step=within_step, job_ends=job_ends)
        self._steps = []  # the steps of a block must be consecutive

    def close(self) -> None:
        """Write the finished blocks. Safe to call twice."""
        self._worker.close(_CLOSE_TIMEOUT_S)
        for sink in self._config.sinks if self.num_opened else ():
            sink.close()
        if self._has_lock:
            self._has_lock = False
            self._only_one.release()

    def _is_ready(self, step: int) -> bool:
        """Whether the warm-up is over and this rank times steps; creates the clock."""
        if self._warm_at is None:
            self._warm_at = step + self._plan.warmup_steps
        if step < self._warm_at:
            self.next_step = self._warm_at
            return False
        self.next_step = NEVER
        job = Job.current() or Job(current_rank(), 1, "")
        if job.rank:
            return False
        if not self._only_one.acquire(blocking=False):
            self._faults.switch_off(
                "second", "another OverlapMonitor of this process times its steps, and only one can [OC112]"
            )
            return False
        self._has_lock = True
        self._clock, self._first_step, self.num_opened = clocks.StepClock(), step, 1
        hide = None if self._config.hosts else hidden_names()
        environment, device = EnvironmentReader(self._config.framework, hide), self._clock.device
        self._worker.submit(lambda: self._open_sinks(job, device, environment))
        return True

    def _open_sinks(self, job: Job, device: str, environment: EnvironmentReader) -> None:
        """Runs on the worker's thread."""
        run = run_info(self._config, job, device, environment.read())
        for sink in self._config.sinks:
            sink.open(run)

    def _write(self, number: int, steps: Steps) -> None:
        """On the worker's thread: wait for the device, and write a block."""
        clocks.prepare_own_thread(clocks.device_of(steps[-1][1]))
        if not await_mark(steps[-1][1]):
            return
        block = TimedBlock(Mode.OVERLAPPED, number, tuple([clocks.elapsed_ms(start, end) for start, end in steps]))
        for sink in self._config.sinks:
            sink.block(0, self._first_step, block)
