"""Which mode and which instruments a step has.

Everything here is a pure function of the step number and the configuration: no clock, no randomness, no communication.
So every rank decides alike, and a job that resumes from a checkpoint continues where it was.

A window opens every ``every_n_steps`` steps, and its steps are, in this order:

1. one **recorded** step, overlapped: its collectives are written down for the order check;
2. the **timed** blocks: ``blocks`` repeated ``repeats`` times, each of ``warmup_steps`` uncounted and
   ``steps_per_block`` counted steps. ``O`` is overlapped, ``S`` sequential. ``OSSO`` is balanced: drift that is linear
   in time cancels;
3. the **profiled** blocks: the same order, one counted step each, under ``torch.profiler``.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Any

from overlap_callbacks import _validation
from overlap_callbacks.analysis.results.mode import Mode


class Part(enum.Enum):
    """The part of a window that a step belongs to."""

    RECORDED = "recorded"
    TIMED = "timed"
    PROFILED = "profiled"


@dataclass(frozen=True)
class Plan:
    """What one step is to do.

    Attributes:
        window: number of the window, from 0.
        offset: number of the step within its window, from 0.
        part: the part of the window.
        block: number of the block within its part, from 0; -1 in the recorded step.
        arm: the side of the comparison on which the step counts: ``SEQUENTIAL`` for what the job as configured is
            compared with, also where that is another arm.
        mode: the mode in which the step runs. It differs from ``arm`` in a control (A/A) schedule, and where the arm's
            steps are not sequential.
        counted: False for warm-up steps and for the recorded step.
        last: whether it is the window's last step.
        turned: whether the arm's switch is turned, and steps are not sequential all the same.
    """

    window: int
    offset: int
    part: Part
    block: int
    arm: Mode
    mode: Mode
    counted: bool
    last: bool
    turned: bool = False


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The plan of every step, as a pure function of its number.

    Attributes:
        every_n_steps: steps from the start of one window to the start of the next.
        first_step: step at which the first window opens. Leave out the first steps of a job, in which allocators,
            autotuners and DDP's buckets settle.
        blocks: order of the blocks, of ``O`` (overlapped) and ``S`` (sequential), as many of one as of the other.
        repeats: how often ``blocks`` is repeated in the timed part. With fewer than 4 blocks of a mode in all there is
            no confidence interval.
        steps_per_block: counted steps of a timed block.
        warmup_steps: uncounted steps at the start of every block.
        profiled_steps: counted steps of each mode under the profiler, 0 for none; a multiple of the number of ``O`` in
            ``blocks``.
        min_block_seconds: minimum duration of a timed block's counted steps, for power sensors that average over time.
            Rank 0 converts it to steps for each window, and tells the others with the order check's ruling. A window
            still fits into ``every_n_steps``. 0 for blocks of ``steps_per_block``.
        control: an A/A run: the ``S`` blocks run overlapped too, so that every difference reported is an error of
            measurement.

    Raises:
        TypeError: a count is not a whole number, or ``min_block_seconds`` is no number.
        ValueError: a count is too small, ``blocks`` has other letters or is not balanced, or the window is longer than
            ``every_n_steps``.
    """

    every_n_steps: int = 500
    first_step: int = 20
    blocks: str = "OSSO"
    repeats: int = 4
    steps_per_block: int = 2
    warmup_steps: int = 1
    profiled_steps: int = 4
    min_block_seconds: float = 0.0
    control: bool = False
    _offsets: tuple[Plan, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            object.__setattr__(self, name, _validation.count(name, getattr(self, name), minimum=minimum))
        object.__setattr__(
            self, "min_block_seconds", _validation.seconds("min_block_seconds", self.min_block_seconds, zero=True)
        )
        self._check_blocks()
        if not isinstance(self.control, bool):
            raise TypeError(f"control must be True or False, got {self.control!r}")
        object.__setattr__(self, "_offsets", tuple(self._plans()))
        if self.every_n_steps < self.window_steps:
            raise ValueError(
                f"every_n_steps={self.every_n_steps} is shorter than a window of {self.window_steps} steps "
                f"(1 recorded, {self.repeats} x {self.blocks!r} blocks of {self.warmup_steps} + {self.steps_per_block} "
                f"steps, {self.profiled_steps} profiled steps of each mode with their warm-up): give every_n_steps of "
                f"at least {self.window_steps}, or fewer repeats, steps_per_block or profiled_steps"
            )

    def _check_blocks(self) -> None:
        blocks = self.blocks
        if not isinstance(blocks, str):
            raise TypeError(f"blocks must be a string of 'O' and 'S', got {blocks!r} (a {type(blocks).__name__})")
        unknown = sorted(set(blocks) - set(_ARMS))
        if unknown:
            raise ValueError(
                f"blocks={blocks!r} has unknown letters {unknown}; allowed are 'O' (overlapped) and 'S' (sequential)"
            )
        overlapped = blocks.count("O")
        if not overlapped or overlapped != blocks.count("S"):
            raise ValueError(f"blocks={blocks!r} must hold as many 'O' as 'S', and at least one of each (say 'OSSO')")
        if self.profiled_steps % overlapped:
            raise ValueError(
                f"profiled_steps={self.profiled_steps} must be a multiple of {overlapped}, the number of 'O' in "
                f"blocks={blocks!r}, so that the profiled blocks are balanced too (0 switches profiling off)"
            )

    def _plans(self) -> list[Plan]:
        """The plans of a window's steps; ``window`` is filled in by ``plan``."""
        timed = [(Part.TIMED, i, arm, self.steps_per_block) for i, arm in enumerate(self.blocks * self.repeats)]
        groups = self.profiled_steps // self.blocks.count("O")
        profiled = [(Part.PROFILED, i, arm, 1) for i, arm in enumerate(self.blocks * groups)]
        steps = [(Part.RECORDED, -1, Mode.OVERLAPPED, False)]
        for part, block, letter, counted_steps in timed + profiled:
            steps += [(part, block, _ARMS[letter], False)] * self.warmup_steps
            steps += [(part, block, _ARMS[letter], True)] * counted_steps
        return [
            Plan(
                window=0,
                offset=offset,
                part=part,
                block=block,
                arm=arm,
                mode=Mode.OVERLAPPED if self.control else arm,
                counted=counted,
                last=offset == len(steps) - 1,
            )
            for offset, (part, block, arm, counted) in enumerate(steps)
        ]

    @property
    def window_steps(self) -> int:
        """Steps of one window, recorded, warm-up and profiled steps included."""
        return len(self._offsets)

    @property
    def timed_blocks(self) -> int:
        """Blocks of the timed part of a window, both modes together."""
        return len(self.blocks) * self.repeats

    @property
    def decided_by(self) -> int:
        """Offset of the first step of a window that depends on how many steps its blocks have."""
        return 1 if self.blocks[0] == "S" else 1 + self.warmup_steps + self.steps_per_block

    def steps_that_take(self, block_s: float, step_s: float) -> int:
        """Counted steps of a timed block that last ``block_s``.

        At least ``steps_per_block``, and at most as many as ``every_n_steps`` leaves room for.

        Args:
            block_s: time in seconds.
            step_s: time of a step; 0 or less if it is not known.
        """
        wanted = self.steps_wanted(block_s, step_s)
        spare = (self.every_n_steps - self.window_steps) // self.timed_blocks
        return min(max(self.steps_per_block, wanted), self.steps_per_block + spare)

    @staticmethod
    def steps_wanted(block_s: float, step_s: float) -> int:
        """Steps that last ``block_s``, whether they fit or not; 0 if the time of a step is not known."""
        return math.ceil(block_s / step_s - 1e-9) if step_s > 0 else 0

    def stretched(self, steps_per_block: int) -> Schedule:
        """The same schedule with longer timed blocks."""
        return self if steps_per_block == self.steps_per_block else replace(self, steps_per_block=steps_per_block)

    def overlapped(self) -> Schedule:
        """The same schedule for an arm whose steps are not sequential: the ``S`` blocks run overlapped, and turned."""
        schedule = replace(self)
        if not self.control:
            turned = [replace(p, mode=Mode.OVERLAPPED, turned=p.arm is Mode.SEQUENTIAL) for p in self._offsets]
            object.__setattr__(schedule, "_offsets", tuple(turned))
        return schedule

    def plan(self, step: int) -> Plan | None:
        """What step ``step`` is to do; None outside a window."""
        window, offset = divmod(step - self.first_step, self.every_n_steps)
        if window < 0 or offset >= self.window_steps:
            return None
        plan = self._offsets[offset]
        return plan if window == 0 else _in_window(plan, window)

    def next_window_step(self, step: int) -> int:
        """First step of the first window that starts at ``step`` or later."""
        windows = -((self.first_step - step) // self.every_n_steps)
        return self.first_step + max(0, windows) * self.every_n_steps

    def as_dict(self) -> dict[str, Any]:
        """The configuration, for the record."""
        return {name: getattr(self, name) for name in (*_MINIMUM, "blocks", "min_block_seconds", "control")}


def _in_window(plan: Plan, window: int) -> Plan:
    return Plan(window, plan.offset, plan.part, plan.block, plan.arm, plan.mode, plan.counted, plan.last, plan.turned)


_ARMS = {"O": Mode.OVERLAPPED, "S": Mode.SEQUENTIAL}
_MINIMUM = {
    "every_n_steps": 1,
    "first_step": 0,
    "repeats": 1,
    "steps_per_block": 1,
    "warmup_steps": 0,
    "profiled_steps": 0,
}
