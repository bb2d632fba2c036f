"""The schedule: which mode a step runs in, and what is measured in it.

Everything here is a pure function of the step number, the configuration and where rank 0 placed the window's parts
(``overlap_callbacks.monitor.placement``): no clock, no randomness, no communication. So every rank decides the same.

A window opens every ``every_n_steps`` steps, and its steps are, in this order:

1. a few **recorded** steps, overlapped, whose collectives go to the order check. Rank 0's ruling places the rest;
2. the **timed** blocks, each of ``warmup_steps`` uncounted and ``steps_per_block`` counted steps. ``O`` is overlapped,
   ``S`` sequential. The overlapped steps right before and after are marked too: they show how a change of mode settles;
3. in some windows a **long** block of each mode, for sensors of power that need seconds;
4. the **profiled** blocks: one counted step each, under ``torch.profiler``.

Ordinary steps separate these parts. Their number, and the mode of the first block, vary from window to window, so that
periodic events of the job hit both modes equally often. Blocks alternate, and the order is reversed halfway: ``OSSO``
four times is ``OSOSOSOSSOSOSOSO``. Drift that is linear in time cancels, and so does every period of 2, 3, 4, 6, 8 or
12 steps within one window.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from overlap_callbacks import _validation
from overlap_callbacks.analysis.causal import BLOCK_STEPS
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.statistics import MIN_BLOCKS


class Part(enum.Enum):
    """The part of a window that a step belongs to."""

    RECORDED = "recorded"
    AROUND = "around the timed ones"  # overlapped, marked but not counted
    TIMED = "timed"
    LONG = "of a long block"  # one block of each mode after the timed ones, in some windows: for slow power sensors
    PROFILED = "profiled"
    DELAYED = "with delays"  # of causal windows, in place of the timed ones


@dataclass(frozen=True)
class Plan:
    """What one step does.

    Attributes:
        window: number of the window, from 0.
        offset: position of the step within its window, from 0.
        part: the part of the window.
        block: number of the block within its part, from 0; -1 outside blocks.
        arm: the side of the comparison that the step counts for; ``SEQUENTIAL`` for the window's arm, whichever it is.
        mode: the mode the step runs in. Differs from ``arm`` in a control (A/A) schedule, and if the arm's steps are
            not sequential.
        counted: whether it is a counted step of a block rather than warm-up.
        last: whether it is the window's last step.
        turned: whether the arm's switch is turned although steps are not sequential.
        level: of the delays of a causal window's step.
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
    level: int = 0


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """Positions of the parts of one window."""

    timed_start: int  # offset of its first step within the window
    profiled_start: int
    timed_swapped: bool = False  # O and S are swapped in this part
    profiled_swapped: bool = False
    steps_per_block: int = 2  # counted steps of a timed block
    long_steps: int = 0  # counted steps of each mode's long block; 0 for none


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The plan of every step, as a pure function of its number.

    Attributes:
        every_n_steps: steps from the start of one window to the start of the next.
        first_step: step at which the first window opens: after allocators, autotuners and DDP's buckets have settled.
        blocks: order of the blocks, of ``O`` (overlapped) and ``S`` (sequential), as many of one as of the other.
        repeats: how often ``blocks`` is repeated in the timed part. Where each half of ``blocks`` holds as many ``O``
            as ``S``, the first half is repeated, then the second. With fewer than 4 blocks of a mode in all a window
            has no confidence interval.
        steps_per_block: counted steps of a timed block.
        warmup_steps: uncounted steps at the start of every block.
        profiled_steps: counted steps of each mode under the profiler, 0 for none; a multiple of the number of ``O`` in
            ``blocks``.
        min_block_seconds: minimum duration of a timed block's counted steps, for power sensors that average over time.
            Rank 0 converts it to steps for each window, as far as ``every_n_steps`` leaves room. 0 for blocks of
            ``steps_per_block``.
        control: an A/A run: the ``S`` blocks run overlapped too, so that every difference is an error of measurement.
        spread: ordinary steps separate a window's parts, so that no rhythm of the job meets one mode more often. False
            packs a window into ``window_steps`` steps, at a fixed place: for a job of a few steps.

    Raises:
        TypeError, ValueError: an option has the wrong type or value, or the window is longer than ``every_n_steps``.
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
    spread: bool = True
    _offsets: tuple[Plan | None, ...] = field(init=False, repr=False, compare=False, default=())
    # Windows are numbered as if one began every so many steps, at most ``every_n_steps``; 0 if they do begin so.
    _numbered_by: int = field(init=False, repr=False, compare=False, default=0)
    _first_number: int = field(init=False, repr=False, compare=False, default=0)  # of the window at ``first_step``

    def __post_init__(self) -> None:
        for name, minimum in _MINIMUM.items():
            object.__setattr__(self, name, _validation.count(name, getattr(self, name), minimum=minimum))
        object.__setattr__(
            self, "min_block_seconds", _validation.seconds("min_block_seconds", self.min_block_seconds, zero=True)
        )
        self._check_blocks()
        for name in _SWITCHES:
            _validation.flag(name, getattr(self, name))
        if self.window_steps > _MOST_STEPS:
            raise ValueError(
                f"a window of {self.window_steps:,} steps is longer than {_MOST_STEPS:,}: give fewer repeats, "
                "steps_per_block, warmup_steps or profiled_steps"
            )
        if self.every_n_steps < self.window_steps:
            raise ValueError(
                f"every_n_steps={self.every_n_steps} is shorter than a window of {self.window_steps} steps "
                f"(1 recorded, {self.repeats} x {self.blocks!r} blocks of {self.warmup_steps} + {self.steps_per_block} "
                f"steps, {self.profiled_steps} profiled steps of each mode with their warm-up): give every_n_steps of "
                f"at least {self.window_steps}, or fewer repeats, steps_per_block or profiled_steps"
            )
        object.__setattr__(self, "_offsets", tuple(self._recorded()))

    def _check_blocks(self) -> None:
        blocks = self.blocks
        if not isinstance(blocks, str):
            raise TypeError(f"blocks must be a string of 'O' and 'S', got {blocks!r} (a {type(blocks).__name__})")
        object.__setattr__(self, "blocks", _validation.plain(blocks))
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

    def _recorded(self) -> list[Plan]:
        return [_uncounted(Part.RECORDED, offset) for offset in range(self.recorded_steps)]

    def _placed(self, placement: Placement) -> tuple[Plan | None, ...]:
        """The plans of a window's steps by offset; ``plan`` fills in ``window``."""
        timed = self.part(Part.TIMED, placement.steps_per_block, swapped=placement.timed_swapped)
        timed += self.long_part(placement.long_steps, swapped=placement.timed_swapped)
        profiled = self.part(Part.PROFILED, swapped=placement.profiled_swapped)
        timed_end = placement.timed_start + len(timed)
        # Without a profiled part, the steps after the timed part come last.
        around = self.steps_around(placement.steps_per_block)
        end = placement.profiled_start + len(profiled) if profiled else timed_end + around
        plans: list[Plan | None] = [None] * end
        plans[: self.recorded_steps] = self._recorded()
        for start in (placement.timed_start - around, timed_end):
            for offset in range(start, start + around):
                plans[offset] = _uncounted(Part.AROUND, offset)
        for start, steps in ((placement.timed_start, timed), (placement.profiled_start, profiled)):
            for offset, step in enumerate(steps, start):
                plans[offset] = replace(step, offset=offset)
        return tuple(plans)

    def part(self, part: Part, steps_per_block: int | None = None, *, swapped: bool = False) -> list[Plan]:
        """The steps of the timed or the profiled part, with offsets from its own first step.

        ``steps_per_block``: counted steps of a timed block; None for the schedule's. ``swapped``: the modes are
        swapped.
        """
        if part is Part.TIMED:
            groups, counted_steps = self.repeats, steps_per_block or self.steps_per_block
        else:
            groups, counted_steps = self.profiled_steps // self.blocks.count("O"), 1
        return self._blocks(part, _in_order(self.blocks, groups), counted_steps, swapped=swapped)

    def _blocks(self, part: Part, order: str, counted_steps: int, *, swapped: bool = False) -> list[Plan]:
        steps: list[Plan] = []
        for block, letter in enumerate(order):
            arm = _ARMS[letter] if not swapped else _OTHER[_ARMS[letter]]
            mode = Mode.OVERLAPPED if self.control else arm
            for place in range(self.warmup_steps + counted_steps):
                counted = place >= self.warmup_steps
                steps.append(Plan(0, len(steps), part, block, arm, mode, counted=counted, last=False))
        return steps

    def long_part(self, counted_steps: int, *, swapped: bool = False) -> list[Plan]:
        """The steps of each mode's long block, with offsets from its own first step; none for 0 counted steps."""
        return [] if not counted_steps else self._blocks(Part.LONG, "OS", counted_steps, swapped=swapped)

    @property
    def window_steps(self) -> int:
        """Minimum length of a window: one recorded step and those of its blocks, including warm-up."""
        timed = self.timed_blocks * (self.warmup_steps + self.steps_per_block)
        return 1 + timed + 2 * self.profiled_steps * (self.warmup_steps + 1)

    @property
    def recorded_steps(self) -> int:
        """Recorded steps of a window: enough to see the job's kinds of steps, if there is room."""
        return 1 + min(_MORE_RECORDED, self._free_steps // 16)

    @property
    def decided_at(self) -> int:
        """Offset of the first step that depends on the ruling. The order check runs during the steps before it."""
        return self.recorded_steps + min(_WAITING_STEPS, self._free_steps // 16)

    @property
    def soon_decided(self) -> int:
        """Offset of a step soon after the ruling, for what is not measured."""
        return self.decided_at + min(_WAITING_STEPS, (self.every_n_steps - self.decided_at) // 2)

    @property
    def num_planned(self) -> int:
        """Length of a window whose parts are placed."""
        return len(self._offsets)

    @property
    def _free_steps(self) -> int:
        """Steps by which a window may exceed its minimum length."""
        return self.every_n_steps - self.window_steps if self.spread else 0

    def spare_steps(self, steps_per_block: int) -> int:
        """Steps of ``every_n_steps`` left over by blocks of this length and everything before them."""
        blocks = len(self.part(Part.TIMED, steps_per_block)) + len(self.part(Part.PROFILED))
        return self.every_n_steps - self.decided_at - blocks

    def most_long_steps(self, steps_per_block: int) -> int:
        """Maximum counted steps of a long block, given timed blocks of this length; below 1 if there is no room."""
        room = self.spare_steps(steps_per_block) - 2 * self.steps_around(steps_per_block) - _ROOM
        return room // 2 - self.warmup_steps if self.spread else 0

    def steps_around(self, steps_per_block: int) -> int:
        """Marked steps on each side of a timed part with blocks of this length."""
        return min(_STEPS_AROUND, max(0, self.spare_steps(steps_per_block) - _ROOM) // 4) if self.spread else 0

    @property
    def timed_blocks(self) -> int:
        """Timed blocks of a window, both modes together."""
        return len(self.blocks) * self.repeats

    def steps_that_take(self, block_s: float, step_s: float) -> int:
        """Counted steps of a timed block that lasts ``block_s``, limited by the room in ``every_n_steps``."""
        wanted = self.steps_wanted(block_s, step_s)
        spare = self.spare_steps(self.steps_per_block) // self.timed_blocks
        return min(max(self.steps_per_block, wanted), self.steps_per_block + spare)

    @staticmethod
    def steps_wanted(block_s: float, step_s: float) -> int:
        """Steps that last ``block_s``, regardless of room; 0 if the step time is unknown."""
        return math.ceil(block_s / step_s - 1e-9) if step_s > 0 else 0

    def placed(self, placement: Placement, *, turned: bool = False) -> Schedule:
        """The same schedule for a window whose parts rank 0 has placed. ``turned``: its arm is not sequential steps."""
        plans = self._placed(placement)
        if turned and not self.control:
            plans = tuple([p and replace(p, mode=Mode.OVERLAPPED, turned=p.arm is Mode.SEQUENTIAL) for p in plans])
        return self._with(plans)

    def _with(self, plans: Sequence[Plan | None]) -> Schedule:
        """The same schedule, with the plans of a window's steps by offset."""
        *others, last = plans
        assert last is not None
        schedule = self.numbered_by(self._numbered_by)
        object.__setattr__(schedule, "_offsets", (*others, replace(last, last=True)))
        return schedule

    def trial(self, *, turned: bool = False) -> Schedule:
        """The same schedule for a window that tries its arm in a single step, its last; ``turned`` as in ``placed``."""
        own = min(_TRIED_AFTER, self.every_n_steps - self.decided_at - 1)
        plans: list[Plan | None] = [*self._recorded(), *[None] * (self.decided_at - self.recorded_steps)]
        plans += [_uncounted(Part.AROUND, self.decided_at + place) for place in range(own)]
        mode = Mode.OVERLAPPED if turned else Mode.SEQUENTIAL
        tried = Plan(0, len(plans), Part.TIMED, 0, Mode.SEQUENTIAL, mode, counted=False, last=True, turned=turned)
        return self._with([*plans, tried])

    def causal(self, levels: Sequence[int]) -> Schedule:
        """The same schedule for a window whose steps delay collectives, as configured otherwise.

        Its last steps are profiled, and delay nothing.
        """
        plans: list[Plan | None] = [*self._recorded(), *[None] * (self.decided_at - self.recorded_steps)]
        plans += [
            replace(_uncounted(Part.DELAYED, self.decided_at + place), counted=True, level=level)
            for place, level in enumerate(levels)
        ]
        for place in range(self._undelayed_steps):
            plan = _uncounted(Part.PROFILED, len(plans))
            plans.append(replace(plan, block=0, counted=place >= self._undelayed_steps - self.profiled_steps))
        return self._with(plans)

    @property
    def delayed_steps(self) -> int:
        """Steps of a causal window's delays."""
        room = self.every_n_steps - self.decided_at - self._undelayed_steps
        return min(_DELAYED_STEPS, room // BLOCK_STEPS * BLOCK_STEPS)

    @property
    def _undelayed_steps(self) -> int:
        """Profiled steps of a causal window, with warm-up; none where its delays leave no room."""
        steps = max(1, self.warmup_steps) + self.profiled_steps if self.profiled_steps else 0
        return steps if self.every_n_steps - self.decided_at - steps >= BLOCK_STEPS * MIN_BLOCKS else 0

    def arm_steps(self, steps_per_block: int) -> int:
        """Steps that a window has with its arm, given timed blocks of this length."""
        return (len(self.part(Part.TIMED, steps_per_block)) + len(self.part(Part.PROFILED))) // 2

    @property
    def steps_per_number(self) -> int:
        """Steps from one window number to the next."""
        return self._numbered_by or self.every_n_steps

    def numbered_by(self, steps: int) -> Schedule:
        """The same schedule, with the window numbers of one whose windows begin every ``steps`` steps."""
        schedule = self.moved()
        object.__setattr__(schedule, "_numbered_by", steps)
        return schedule

    def moved(
        self, first_step: int | None = None, every_n_steps: int | None = None, first_number: int | None = None
    ) -> Schedule:
        """The same windows at other steps: the first one, with this number, at ``first_step``. None for unchanged."""
        first_step = self.first_step if first_step is None else first_step
        schedule = replace(self, first_step=first_step, every_n_steps=every_n_steps or self.every_n_steps)
        number = self._first_number if first_number is None else first_number
        object.__setattr__(schedule, "_first_number", number)
        return schedule

    def plan(self, step: int) -> Plan | None:
        """The plan of a step; None for an ordinary one. Before the parts are placed, only recorded steps have one."""
        window, offset = divmod(step - self.first_step, self.every_n_steps)
        if window < 0 or offset >= len(self._offsets):
            return None
        plan = self._offsets[offset]
        if self._numbered_by:
            window = window * self.every_n_steps // self._numbered_by
        window += self._first_number
        return plan if window == 0 or plan is None else replace(plan, window=window)

    def steps_left(self, step: int) -> int:
        """Steps of its window after a step, as far as they are placed."""
        return max(0, len(self._offsets) - 1 - (step - self.first_step) % self.every_n_steps)

    def is_decided_at(self, step: int) -> bool:
        """Whether this is the first step of its window that depends on the ruling."""
        return (step - self.first_step) % self.every_n_steps == self.decided_at

    def number_at(self, step: int) -> int:
        """Number of the first window that starts at or after ``step``: no earlier one has it, or a larger one."""
        plan = self.plan(self.next_window_step(step))
        assert plan is not None
        return plan.window

    def next_window_step(self, step: int) -> int:
        """First step of the first window that starts at or after ``step``."""
        windows = -((self.first_step - step) // self.every_n_steps)
        return self.first_step + max(0, windows) * self.every_n_steps

    def as_dict(self) -> dict[str, Any]:
        """The configuration, for the record."""
        return {name: getattr(self, name) for name in (*_MINIMUM, "blocks", "min_block_seconds", *_SWITCHES)}


def _uncounted(part: Part, offset: int) -> Plan:
    return Plan(0, offset, part, -1, Mode.OVERLAPPED, Mode.OVERLAPPED, counted=False, last=False)


def _in_order(blocks: str, groups: int) -> str:
    """The order of a part's blocks; see ``Schedule.repeats``."""
    middle = len(blocks) // 2
    first, second = blocks[:middle], blocks[middle:]
    alternating = len(first) == len(second) and 2 * first.count("O") == len(first)
    return first * groups + second * groups if alternating else blocks * groups


# Maximum steps of a window: a plan of each is kept.
_MOST_STEPS = 1_000_000
# Maximum recorded steps after the first.
_MORE_RECORDED = 7
# Ordinary steps after the recorded ones, during which the ranks' order of collectives is checked.
_WAITING_STEPS = 8
# Steps of a causal window with delays, if there is room.
_DELAYED_STEPS = 54
# Marked steps as configured before the one step of a trial.
_TRIED_AFTER = 4
# Maximum marked steps on each side of the timed part.
_STEPS_AROUND = 24
# Room reserved for shifting the parts; marked steps use only what is left.
_ROOM = 48
_ARMS = {"O": Mode.OVERLAPPED, "S": Mode.SEQUENTIAL}
_OTHER = {Mode.OVERLAPPED: Mode.SEQUENTIAL, Mode.SEQUENTIAL: Mode.OVERLAPPED}
_SWITCHES = ("control", "spread")
_MINIMUM = {
    "every_n_steps": 1,
    "first_step": 0,
    "repeats": 1,
    "steps_per_block": 1,
    "warmup_steps": 0,
    "profiled_steps": 0,
}
