"""Does a job that decides about arms keep the right one, at what cost? Windows are drawn again, and the truth is known.

    python benchmarks/deciding.py [--runs 1000] [--json benchmarks/results/deciding.json]
    python benchmarks/deciding.py --only "nothing differs, recorded" --runs 100

A replay is a job of ``SLOTS`` possible windows, one every 500 steps of 0.1 s, or as ``JOBS`` says. ``Decider`` says
what each measures. What a window of an arm says is the arm's true effect at that time plus the error of a window, drawn
from:

- recorded: the 800 windows of ``results/arms-cpu.json``, of running jobs on two Gloo ranks whose truth was measured;
- effect varies, drift, rare stalls: step times through the library's own arithmetic, as in ``intervals.py``;
- rhythm, rhythm unknown: the same, with every k-th step 50 % longer, which windows know or do not.

An arm that is kept makes the steps between windows faster or slower by its effect at that time. ``wrong`` is the share
of jobs that at some time choose an arm that is then slower than the job as configured; ``kept_on``, of those that keep
it ``PATIENCE`` windows after it turned slower; ``lost``, of those that took longer than without the library by more
than the budget. ``over_budget_s`` is the most, over all jobs, by which the cost exceeded the budget and the dearest
window; it is of windows. What an arm costs that is kept and turns slower is in ``behind``: the share of jobs that at
some moment were later than without the library by more than the budget and the dearest window, and by how much.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import intervals
from overlap_callbacks.analysis.arm_costs import Stretch
from overlap_callbacks.analysis.deciding import Choice, Decider
from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.decision import Why
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.analysis.statistics import t_quantile
from overlap_callbacks.monitor.schedule import Part, Schedule

RESULTS = Path(__file__).resolve().parent / "results"
SLOTS, ARM_STEPS = 160, 32
WINDOW_STEPS, COST_ERROR_STEPS = 2, 0.5  # what a window costs apart from the arm, and how well that is known
BUDGET, WRONG = 0.005, 0.05
NOTICE_S, AT_ONCE_S = 2.0, 0.5  # least time until all ranks have turned an arm off; where rank 0 goes first
PATIENCE = 64
SLOWS_DOWN = "four arms, the job slows down"  # by a tenth, for a reason of its own
# Degrees of freedom of a recorded window's own error: 16 blocks, less a trend and the modes.
_RECORDED_DEGREES = 11.0

Floats = intervals.Floats
Effects = Mapping[str, Callable[[int], float]]  # speed-up of each arm, by window


class Job(NamedTuple):
    """Its step as configured, how many lie between windows, and by how much the time from window to window varies."""

    step_s: float = 0.1
    steps: int = 500
    pace_error: float = 0.02

    @property
    def training_s(self) -> float:
        return SLOTS * self.steps * self.step_s


class Errors(NamedTuple):
    """Errors of windows, on the scale of logarithms: their values, and what each says of them. Shapes (n,)."""

    value: Floats
    error: Floats
    degrees: Floats


def recorded() -> Errors:
    """Of the windows of ``arms-cpu.json``: each job's about its mean."""
    parts = []
    for run in json.loads((RESULTS / "arms-cpu.json").read_text())["runs"]:
        low, value, high = np.log1p(np.array(run["windows"]).T)
        error = (high - low) / 2 / t_quantile(_RECORDED_DEGREES)
        parts.append((value - value.mean(), error, np.full(len(value), _RECORDED_DEGREES)))
    return Errors(*np.concatenate(parts, axis=1))


def simulated(rng: np.random.Generator, noise: str, number: int) -> Errors:
    """Of step times with one of the noises of ``intervals.py``; ``rhythm`` for one that windows do not know."""
    if noise.startswith("rhythm"):
        found = _with_rhythms(rng, number, known=noise == "rhythm")
    else:
        found = intervals.simulated(rng, noise, 4, number)
    # Windows are of sequential steps; which way round makes no difference to errors.
    return Errors(np.log1p(found.value) - intervals.EFFECT, found.error, found.degrees)


def _with_rhythms(rng: np.random.Generator, number: int, *, known: bool) -> intervals.Windows:
    schedule = Schedule()
    parts = [schedule.part(Part.TIMED, swapped=swapped) for swapped in (False, True)]
    found = []
    for place in range(number):
        part, rhythm = parts[place % 2], Rhythm(int(rng.integers(3, 24)), int(rng.integers(24)), 50.0, 100.0)
        first, offsets = int(rng.integers(1000)), np.arange(len(part))
        logs = rng.normal(0, 0.01, len(part)) + intervals.LONGER * rhythm.hits(first + offsets)
        told = (rhythm,) if known else ()
        part = part if known else intervals._without_stalls(part, logs, first, told)
        found.append(intervals._window(part, logs, intervals.EFFECT, first, told))
    return intervals._measured(iter(found), np.full(number, intervals.EFFECT))


# -- the arms


def _always(**effects: float) -> Effects:
    return {name: (lambda _, effect=effect: effect) for name, effect in effects.items()}


def _changing(before: float, after: float, at: int = 80) -> Callable[[int], float]:
    return lambda window: before if window < at else after


FOUR = _always(faster=0.05, same=0.0, slower=-0.05, slow=-0.20)
SCENARIOS: dict[str, Effects] = {
    "four arms": FOUR,
    "two are faster": _always(faster=0.05, fast=0.02, slower=-0.05, slow=-0.20),
    "nothing differs": _always(a=0.0, b=0.0, c=0.0, d=0.0),
    "all are slower": _always(a=-0.01, b=-0.02, c=-0.05, d=-0.20),
    "all are a little slower": _always(a=-0.002, b=-0.002, c=-0.002, d=-0.002),
    "stops winning": {**FOUR, "faster": _changing(0.05, 0.0)},
    "turns slower": {**FOUR, "faster": _changing(0.05, -0.05)},
    "turns three times slower": {**FOUR, "faster": _changing(0.05, -0.667)},
    "turns slow": {**FOUR, "faster": _changing(0.05, -0.30)},
    "wins less": {**FOUR, "faster": _changing(0.08, 0.03)},
    "turns faster": {**FOUR, "same": _changing(0.0, 0.10)},
}
# Arms that windows see win, and that lose between them, where they are always on: only the job's pace shows it.
WHEN_KEPT: dict[str, Effects] = {"loses when always on": _always(faster=-0.01)}
SCENARIOS |= dict.fromkeys(WHEN_KEPT, FOUR)
# The arm turns slower as soon as it is turned on between windows for the first time.
AT_ONCE: dict[str, Effects] = {
    "turns slower at once": _always(faster=-0.05),
    "turns three times slower at once": _always(faster=-0.667),
}
# The same in jobs whose steps are long: nobody can look within one. And in jobs whose pace varies more.
JOBS: dict[str, Job] = {}
for kind, job in (("long steps", Job(10.0, 200)), ("pace varies by 5 %", Job(pace_error=0.05))):
    for name in ("turns slower at once", "turns three times slower at once", "turns slower", "loses when always on"):
        JOBS[f"{name}, {kind}"] = job
        AT_ONCE |= {f"{name}, {kind}": AT_ONCE[name]} if name in AT_ONCE else {}
        WHEN_KEPT |= {f"{name}, {kind}": WHEN_KEPT[name]} if name in WHEN_KEPT else {}
        SCENARIOS[f"{name}, {kind}"] = SCENARIOS.get(name, FOUR)
SCENARIOS |= dict.fromkeys(AT_ONCE, FOUR)
SCENARIOS[SLOWS_DOWN] = FOUR
NOISES = ("recorded", "effect varies", "drift", "rhythm", "rhythm unknown", "rare stalls")
# Every scenario with recorded windows; these with all noises.
WITH_ALL = ("four arms", "nothing differs", "all are a little slower", "turns slower")
ROWS = [f"{name}, {noise}" for noise in NOISES for name in SCENARIOS if noise == "recorded" or name in WITH_ALL]


class Replay(NamedTuple):
    """One job.

    Attributes:
        chosen: arms in the order in which they were chosen, with the slot and the effect then.
        kept: at the end.
        kept_slots: effects of the kept arm in each slot; 0 for the user's own setting.
        given_up: slots in which an arm was given up.
        over_s: the most by which the cost exceeded the budget, less the dearest window.
        behind_s: the most by which the job was later than without the library, less the budget and the dearest window.
        cost_s, won_s: of all windows, and training time won in all, that cost included.
    """

    chosen: list[tuple[str, int, float]]
    kept: str
    kept_slots: list[float]
    given_up: list[int]
    over_s: float
    behind_s: float
    cost_s: float
    won_s: float
    windows: int


def replay(
    rng: np.random.Generator,
    effects: Effects,
    errors: Errors,
    *,
    when_kept: Effects | None = None,
    at_once: Effects | None = None,
    slows_down: bool = False,
    job: Job = Job(),  # noqa: B008
) -> Replay:
    """Run one job.

    ``when_kept``: effects of arms between windows, where they are others than in them; ``at_once``, from the first slot
    on in which an arm is turned on.
    """
    when_kept = {**effects, **(when_kept or {})}
    arms = {name: ComparedArm(name, equal_results=True) for name in effects}
    decider = Decider(
        list(arms.values()), budget=BUDGET, wrong=WRONG, keeps=True, least_notice_s=NOTICE_S, steps_apart=job.steps
    )
    drawn = rng.integers(0, len(errors.value), SLOTS)
    now_s = own_s = cost_s = dearest_s = 0.0
    over_s, behind_s, kept, windows, next_window = -math.inf, -math.inf, "", 0, 0
    chosen: list[tuple[str, int, float]] = []
    kept_slots, given_up = [], []
    turned = Turned("", None, job.steps)
    for slot in range(SLOTS):
        if slot >= next_window:
            choice = decider.choose(slot, now_s, ARM_STEPS)
            next_window = choice.next_window
            turned = Turned(decider.kept, decider.turn_on(slot), job.steps)
        else:
            choice = Choice()
            if decider.has_slowed(slot, now_s):
                turned.end()
        if turned.is_on and at_once:
            effects, when_kept = {**effects, **at_once}, {**when_kept, **at_once}
        if choice.arm:
            log_effect = math.log1p(effects[choice.arm](slot))
            extra_s = job.step_s * math.expm1(-log_effect)
            true_s = extra_s if choice.trial else WINDOW_STEPS * job.step_s + ARM_STEPS * extra_s
            cost_s += true_s
            dearest_s = max(dearest_s, true_s)
            charged_s = true_s + COST_ERROR_STEPS * job.step_s * (1 + rng.normal())
            if choice.trial:
                decider.record_trial(choice.arm, extra_s + 0.02 * job.step_s * rng.normal(), charged_s)
            else:
                windows += 1
                value = log_effect + errors.value[drawn[slot]]
                decider.record(
                    _report(arms[choice.arm], slot, value, errors.error[drawn[slot]], errors.degrees[drawn[slot]]),
                    charged_s,
                )
            now_s += true_s
            over_s = max(over_s, cost_s - BUDGET * now_s - dearest_s)
        if decider.kept != kept:
            left_out = decider.decision().left_out
            if kept and any(one.arm == kept and one.why in (Why.STOPPED, Why.NOT_KEPT) for one in left_out):
                given_up.append(slot)
            kept = decider.kept
            if kept:
                chosen.append((kept, slot, when_kept[kept](slot)))
        effect = when_kept[turned.arm](slot) if turned.arm else 0.0
        slot_s = job.steps * job.step_s * math.exp(job.pace_error * rng.normal())
        slot_s *= 1.1 if slows_down and slot >= SLOTS // 2 else 1.0
        share = turned.share_of(slot_s / (1 + effect))
        kept_slots.append(share * effect)
        own_s += slot_s
        now_s += share * slot_s / (1 + effect) + (1 - share) * slot_s
        behind_s = max(behind_s, now_s - own_s - BUDGET * now_s - dearest_s)
    return Replay(chosen, kept, kept_slots, given_up, over_s, behind_s, cost_s, own_s - now_s, windows)


class Turned:
    """A stretch with an arm turned on, as a job's ranks have it: it ends some time after it was to.

    ``steps``: of a slot; after each, what the arm has lost is looked at.
    """

    def __init__(self, arm: str, stretch: Stretch | None, steps: int) -> None:
        self.arm = arm
        self._stretch, self._steps = stretch, steps
        self._left_s = math.inf if stretch is not None else 0.0  # until it goes back

    @property
    def is_on(self) -> bool:
        return self._left_s > 0

    def end(self) -> None:
        """Have all ranks go back."""
        if self._stretch is not None:
            self._left_s = min(self._left_s, self._stretch.notice_s)

    def share_of(self, slot_s: float) -> float:
        """The share of a slot that has the arm; with it the whole slot takes ``slot_s``."""
        stretch = self._stretch
        if stretch is None or self._left_s <= 0:
            return 0.0
        began_s, windows, steps = stretch.on_s, stretch.windows, self._steps
        was_used_up = stretch.is_used_up()
        stretch.on_s, stretch.windows = began_s + slot_s, windows + 1
        if self._left_s == math.inf and not was_used_up and not stretch.is_used_up():
            return 1.0
        stretch.on_s, stretch.windows = began_s, windows
        for step in range(1, steps + 1):
            stretch.has_trained(windows + step / steps, began_s + step * slot_s / steps)
            self._left_s -= slot_s / steps
            if self._left_s <= 0:
                return step / steps
            if stretch.must_end_now():
                self._left_s = min(self._left_s, AT_ONCE_S)
            elif stretch.is_used_up():
                self.end()
        return 1.0


def _report(arm: ComparedArm, window: int, log_speedup: float, error: float, degrees: float) -> ArmReport:
    half = error * t_quantile(degrees)
    value, low, high = (math.expm1(log_speedup + by) for by in (0.0, -half, half))
    return ArmReport(
        arm=arm, num_ranks=2, window=window, first_step=500 * window, num_steps=48, complete=True,
        control=False, world_size=2, backend="gloo", device="cpu", valid=True, problems=(),
        speedup=Estimate(value, low, high, 32, 16, error, degrees),
    )  # fmt: skip


def judged(replays: list[Replay], effects: Effects, training_s: float) -> dict[str, Any]:
    """What became of the jobs of a scenario, of so much training as configured each."""
    at_end = {name: effect(SLOTS - 1) for name, effect in effects.items()}
    best = max(at_end, key=lambda name: at_end[name])
    changes = [slot for slot in range(1, SLOTS) if any(of(slot) != of(slot - 1) for of in effects.values())]
    number = len(replays)
    first = sorted(job.chosen[0][1] for job in replays if job.chosen)
    found: dict[str, Any] = {
        "jobs": number,
        "wrong": sum(any(effect < 0 for _, _, effect in job.chosen) for job in replays) / number,
        "kept_nothing_ever": sum(not job.chosen for job in replays) / number,
        "kept_at_end": {
            name: share for name in ("", *effects) if (share := sum(job.kept == name for job in replays) / number)
        },
        "best": best if at_end[best] > 0 else "",
        "chosen_after_slots": _quantiles(first),
        "given_up": sum(bool(job.given_up) for job in replays) / number,
        "cost_of_training": _quantiles([job.cost_s / training_s for job in replays]),
        "over_budget_s": max(job.over_s for job in replays),
        "behind": sum(job.behind_s > 0 for job in replays) / number,
        "behind_s": _quantiles([max(0.0, job.behind_s) for job in replays]),
        "lost": sum(job.won_s < -BUDGET * training_s for job in replays) / number,
        "won_of_training": _quantiles([job.won_s / training_s for job in replays]),
        "windows": _quantiles([job.windows for job in replays]),
    }
    if changes:
        late = [job.kept_slots[changes[0] + PATIENCE] < 0 for job in replays]
        found["kept_on"] = sum(late) / number
        if changes[0] > 0:
            slower = [sum(effect < 0 for effect in job.kept_slots[changes[0] :]) for job in replays]
            found["slots_slower_after_change"] = _quantiles(slower)
            before = [any(slot < changes[0] for slot in job.given_up) for job in replays]
            found["given_up_before"] = sum(before) / number
    return found


def _quantiles(values: list[Any]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        name: round(float(np.quantile(values, share)), 4)
        for name, share in (("5%", 0.05), ("median", 0.5), ("95%", 0.95))
    }


def measure(number: int, only: list[str] | None, found: dict[str, Any]) -> Iterator[str]:
    """Replay ``number`` jobs of each scenario that is not ``found``; ``only`` some, by name. Yields each when found."""
    for place, noise in enumerate(NOISES):
        rows = [name for name in SCENARIOS if f"{name}, {noise}" in ROWS]
        rows = [name for name in rows if only is None or f"{name}, {noise}" in only]
        rows = [name for name in rows if f"{name}, {noise}" not in found]
        errors = None
        for name in rows:
            if errors is None:
                rng = np.random.default_rng([36, place])
                errors = recorded() if noise == "recorded" else simulated(rng, noise, 400)
            always, at_once, job, slows = (
                WHEN_KEPT.get(name),
                AT_ONCE.get(name),
                JOBS.get(name, Job()),
                name == SLOWS_DOWN,
            )
            jobs = [
                replay(rng, SCENARIOS[name], errors, when_kept=always, at_once=at_once, slows_down=slows, job=job)
                for rng in [np.random.default_rng([36, seed]) for seed in range(number)]
            ]
            found[f"{name}, {noise}"] = judged(jobs, {**SCENARIOS[name], **(at_once or {})}, job.training_s)
            yield f"{name}, {noise}"


def main() -> None:
    """Replay, print the table, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--only", nargs="+", help="rows, by name")
    parser.add_argument("--json", type=Path, help="write the table to this file too, row by row; rows in it stay")
    arguments = parser.parse_args()
    file = arguments.json
    found = json.loads(file.read_text())["jobs"] if file and file.exists() else {}
    about = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "numpy": np.__version__}
    for name in measure(arguments.runs, arguments.only, found):
        print(f"{name}: {found[name]}", flush=True)
        if file:
            file.write_text(json.dumps({**about, "jobs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
