"""Do running jobs that decide keep the right arm, within the budget, and train as without the library?

    python benchmarks/deciding_live.py [--jobs 20] [--json benchmarks/results/deciding-live.json]

Each job has two Gloo ranks and a seed of its own. A step trains a small network and sleeps for a known time: as
configured ``OWN_MS``, with an arm more or less. Of four arms one wins, one changes nothing, two lose. Kinds of jobs:

- plain;
- drift: steps get longer and longer;
- rhythm: every eighth step is longer;
- change: in the middle the arm that wins turns as much slower;
- none: no arm changes anything.

Other jobs share the machine, so the effects are large. Every job is trained again without the library, with the same
seed: losses and weights must be bit-identical.

``wrong`` counts jobs that choose an arm which is then slower than the job as configured, or still have it on
``PATIENCE`` windows after it turned slower. ``over_budget_s`` is the most, at any moment, by which costs exceed the
budget and the dearest window: of what was charged, and of what arms in windows are known to cost. ``behind_s``: the
same of what arms are known to cost in all steps, that of a kept arm included, less what it wins.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.about import about
from overlap_callbacks.analysis import deciding as analysis
from overlap_callbacks.gate.arms import Arm, BaseArm, Keep
from overlap_callbacks.monitor import keeping
from overlap_callbacks.monitor.background import deciding as background
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import run_ranks
from tests.monitor.jobs import Training, new_monitor, tiny_schedule

OWN_MS = 10.0
# By how much a step with each arm is longer, in ms.
ARMS_MS = {"wins": -6.0, "same": 0.0, "loses": 6.0, "loses_much": 20.0}
KINDS = ("plain", "drift", "rhythm", "change", "none")
STEPS, EVERY = 4800, 48
PATIENCE = 32
_RHYTHM, _RHYTHM_MS, _DRIFT_MS = 8, 5.0, 4.0
# The search of a job of hours in a minute.
SEARCH = Keep(budget=0.2)


class Steps:
    """How long the steps of a job sleep."""

    def __init__(self, kind: str) -> None:
        self.arm = ""
        self._kind = kind

    def arms(self) -> list[BaseArm]:
        return [self._made(name) for name in ARMS_MS]

    def _made(self, name: str) -> Arm:
        return Arm(name, lambda: setattr(self, "arm", name), lambda: setattr(self, "arm", ""), equal_results=True)

    def extra_ms(self, arm: str, step: int) -> float:
        """By how much an arm makes a step longer."""
        turned = arm == "wins" and self._kind == "change" and step >= STEPS // 2
        return 0.0 if self._kind == "none" else ARMS_MS.get(arm, 0.0) * (-1 if turned else 1)

    def sleep(self, step: int) -> None:
        sleep_ms = OWN_MS + self.extra_ms(self.arm, step)
        if self._kind == "drift":
            sleep_ms += _DRIFT_MS * step / STEPS
        if self._kind == "rhythm" and step % _RHYTHM == 0:
            sleep_ms += _RHYTHM_MS
        time.sleep(sleep_ms / 1e3)


class Spending:
    """Costs in the course of a job, and the most by which they exceed the budget and the dearest window."""

    def __init__(self) -> None:
        self.spent_s = self.dearest_s = 0.0
        self.over_s = -float("inf")
        self.began_s: float | None = None

    def spend(self, cost_s: float) -> None:
        self.began_s = self.began_s or time.monotonic()
        self.spent_s += cost_s
        self.dearest_s = max(self.dearest_s, cost_s)
        training_s = time.monotonic() - self.began_s
        self.over_s = max(self.over_s, self.spent_s - SEARCH.budget * training_s - self.dearest_s)


CHARGED = Spending()  # of the rank's process


class _Watched(analysis.Decider):
    """Notes what is charged."""

    def choose(self, *given: Any, **named: Any) -> analysis.Choice:
        CHARGED.spend(0.0)
        return super().choose(*given, **named)

    def record(self, report: Any, cost_s: float | None) -> None:
        CHARGED.spend(cost_s or 0.0)
        super().record(report, cost_s)

    def record_trial(self, name: str, extra_s: float, cost_s: float) -> None:
        CHARGED.spend(cost_s)
        super().record_trial(name, extra_s, cost_s)


class WentBack:
    """Why a rank turned the kept arm off before the next window, with its step: rank 0 alone logs it."""

    def __init__(self) -> None:
        self.step = 0
        self.reasons: list[list[object]] = []
        say_off = keeping.Keeping._say_off

        def note(kept: keeping.Keeping, reason: str) -> None:
            self.reasons.append([self.step, reason])
            say_off(kept, reason)

        keeping.Keeping._say_off = note  # type: ignore[method-assign]  # in this process, the rank's own


def train(rank: int, seed: int, kind: str, folder: str) -> dict[str, Any]:
    """One rank's part of a job; without a folder, without the library, and without the sleep."""
    torch.set_num_threads(1)
    training, steps = Training(rank), Steps(kind)
    training._data.manual_seed(1000 * seed + rank)
    if not folder:
        for _ in range(STEPS):
            training.step()
        return {"digest": training.digest()}
    background.Decider = _Watched  # type: ignore[misc]  # in this process, the rank's own
    schedule = tiny_schedule(repeats=4, every_n_steps=EVERY)
    monitor = new_monitor(JsonlSink(folder), arms=steps.arms(), decide=SEARCH, schedule=schedule)
    arms: list[str] = []  # of each step
    kept: list[str] = []  # of each step outside windows
    known, window_s, began_s = Spending(), 0.0, time.monotonic()
    behind_s, all_s = -float("inf"), 0.0
    went_back = WentBack()
    for step in range(STEPS):
        went_back.step = step
        monitor.step_begin(step)
        within = monitor.in_window
        training.step()
        steps.sleep(step)
        arms.append(steps.arm)
        kept.append("" if within else steps.arm)
        all_s += steps.extra_ms(steps.arm, step) / 1e3
        behind_s = max(behind_s, all_s - SEARCH.budget * (time.monotonic() - began_s) - known.dearest_s)
        window_s += steps.extra_ms(steps.arm, step) / 1e3 if within else 0.0
        monitor.step_end(step)
        if within and not monitor.in_window:
            known.spend(max(0.0, window_s))
            window_s = 0.0
    monitor.close()
    return {
        "digest": training.digest(), "arms": arms, "kept": kept, "left": steps.arm, "went_back": went_back.reasons,
        "training_s": time.monotonic() - began_s, "behind_s": behind_s,
        "charged": [CHARGED.spent_s, CHARGED.dearest_s, CHARGED.over_s],
        "known": [known.spent_s, known.dearest_s, known.over_s],
    }  # fmt: skip


def job(seed: int) -> dict[str, Any]:
    """Train one job with the library and without, and judge it."""
    kind = KINDS[seed % len(KINDS)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(train, 2, seed, kind, folder, timeout_s=600.0)
        record = read(folder)
    plain = run_ranks(train, 2, seed, kind, "", timeout_s=600.0)
    decision, first = record.decision, ranks[0]  # without a decision, nothing is known of any arm
    spent = {name: [round(1e3 * cost_s, 1) for cost_s in first[name]] for name in ("charged", "known")}
    return {
        "seed": seed,
        "kind": kind,
        "kept": "" if decision is None else decision.kept,
        "wrong": _is_wrong(kind, first["kept"]),
        "identical": [rank["digest"] for rank in ranks] == [rank["digest"] for rank in plain],
        "alike": ranks[0]["arms"] == ranks[1]["arms"],
        "unlike_steps": sum(one != other for one, other in zip(ranks[0]["arms"], ranks[1]["arms"], strict=True)),
        "went_back": [rank["went_back"] for rank in ranks],
        "put_back": not any(rank["left"] for rank in ranks),
        "kept_steps": {arm: number for arm in ARMS_MS if (number := first["kept"].count(arm))},
        "chosen_at_step": next((step for step, arm in enumerate(first["kept"]) if arm), None),
        "training_s": round(first["training_s"], 1),
        "over_budget_s": round(max(first["charged"][2], first["known"][2]), 4),
        "behind_s": round(first["behind_s"], 4),
        "cost_ms": {name: cost[0] for name, cost in spent.items()},
        "dearest_ms": {name: cost[1] for name, cost in spent.items()},
        "left_out": [[one.arm, one.why.value, one.num_windows] for one in (decision.left_out if decision else ())],
        "windows": len(record.arms),
    }


def _is_wrong(kind: str, kept: list[str]) -> bool:
    steps, late = Steps(kind), STEPS // 2 + PATIENCE * EVERY
    on = [step for step, arm in enumerate(kept) if steps.extra_ms(arm, step) > 0]
    if kind != "change":
        return bool(on)
    chosen_late = kept[STEPS // 2 - 1] != "wins" and "wins" not in kept[: STEPS // 2]
    return any(kept[step] != "wins" or step >= late or chosen_late for step in on)


def main() -> None:
    """Run the jobs, print what became of each, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the table to this file too, job by job; jobs in it stay")
    options = parser.parse_args()
    file = options.json
    jobs = json.loads(file.read_text())["jobs"] if file and file.exists() else []
    for seed in range(len(jobs), options.jobs):
        jobs.append(found := job(seed))
        print(json.dumps(found), flush=True)
        total = {name: sum(found[name] for found in jobs) for name in ("wrong", "identical", "alike", "put_back")}
        total["over_budget"] = sum(found["over_budget_s"] > 0 for found in jobs)
        if file:
            result = {**about("torch"), "steps": STEPS, "budget": SEARCH.budget, **total, "jobs": jobs}
            file.write_text(json.dumps(result, indent=1) + "\n")
    print({name: f"{number}/{len(jobs)}" for name, number in total.items()})


if __name__ == "__main__":
    main()
