"""Do running jobs that decide keep the right arm, and train as without the library? Twenty jobs on two Gloo ranks.

    python benchmarks/deciding_live.py [--jobs 20] [--json benchmarks/results/deciding-live.json]

A step trains a small network and sleeps for a known time: as configured ``OWN_MS``, with an arm less or more. Of four
arms one wins, one changes nothing, two lose. Jobs are of four kinds: plain; with drift, where steps get longer; with
a rhythm, where every eighth step is longer; and of change, where from the middle on the arm that wins loses. Each is
trained again without the library, with the same seed: losses and weights must be bit-identical, and all ranks must have
had the same arm in each step.

``wrong`` counts jobs in which an arm is kept that is slower than the job as configured, at the end or (of change) so
late after it lost that three further windows of it were measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from overlap_callbacks.gate.arms import Arm, BaseArm, Keep
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import run_ranks
from tests.monitor.jobs import Training, new_monitor, tiny_schedule

OWN_MS = 10.0
# By how much a step with each arm is longer, in ms.
ARMS_MS = {"wins": -5.0, "same": 0.0, "loses": 3.0, "loses_much": 20.0}
KINDS = ("plain", "drift", "rhythm", "change")
STEPS, EVERY = 600, 24
_RHYTHM, _RHYTHM_MS, _DRIFT_MS = 8, 5.0, 4.0
# The search of a job of hours in one of seconds.
SEARCH = Keep(budget=1.0)


class Steps:
    """How long the steps of a job sleep."""

    def __init__(self, kind: str) -> None:
        self.arm = ""
        self._kind = kind

    def arms(self) -> list[BaseArm]:
        return [self._made(name) for name in ARMS_MS]

    def _made(self, name: str) -> Arm:
        return Arm(name, lambda: setattr(self, "arm", name), lambda: setattr(self, "arm", ""), equal_results=True)

    def sleep(self, step: int) -> None:
        extra_ms = ARMS_MS.get(self.arm, 0.0)
        if self.arm == "wins" and self._kind == "change" and step >= STEPS // 2:
            extra_ms = -extra_ms
        if self._kind == "drift":
            extra_ms += _DRIFT_MS * step / STEPS
        if self._kind == "rhythm" and step % _RHYTHM == 0:
            extra_ms += _RHYTHM_MS
        time.sleep((OWN_MS + extra_ms) / 1e3)


def train(rank: int, seed: int, kind: str, folder: str) -> dict[str, Any]:
    """One rank's part of a job; without a folder, without the library."""
    torch.set_num_threads(1)
    training, steps = Training(rank), Steps(kind)
    training._data.manual_seed(1000 * seed + rank)
    arms: list[str] = []
    monitor = None
    if folder:
        schedule = tiny_schedule(repeats=2, every_n_steps=EVERY)
        monitor = new_monitor(JsonlSink(folder), arms=steps.arms(), decide=SEARCH, schedule=schedule)
    for step in range(STEPS):
        if monitor is not None:
            monitor.step_begin(step)
        training.step()
        steps.sleep(step)
        arms.append(steps.arm)
        if monitor is not None:
            monitor.step_end(step)
    if monitor is not None:
        monitor.close()
    return {"digest": training.digest(), "arms": arms, "left": steps.arm}


def job(seed: int) -> dict[str, Any]:
    kind = KINDS[seed % len(KINDS)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(train, 2, seed, kind, folder, timeout_s=300.0)
        record = read(folder)
    plain = run_ranks(train, 2, seed, kind, "", timeout_s=300.0)
    decision = record.decision
    kept = "" if decision is None else decision.kept
    turned = STEPS // 2 if kind == "change" else STEPS
    late = [
        report for report in record.arms if report.arm.name == "wins" and report.counts and report.first_step > turned
    ]
    return {
        "seed": seed,
        "kind": kind,
        "kept": kept,
        "wrong": kept in ("loses", "loses_much") or (kept == "wins" and kind == "change" and len(late) >= 3),
        "identical": [rank["digest"] for rank in ranks] == [rank["digest"] for rank in plain],
        "alike": ranks[0]["arms"] == ranks[1]["arms"],
        "put_back": not any(rank["left"] for rank in ranks),
        "kept_share": sum(arm == "wins" for arm in ranks[0]["arms"]) / STEPS,
        "cost_s": None if decision is None else decision.cost_s,
        "training_s": None if decision is None else decision.training_s,
        "left_out": []
        if decision is None
        else [[one.arm, one.why.value, one.num_windows] for one in decision.left_out],
        "windows": len(record.arms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    jobs = []
    for seed in range(options.jobs):
        jobs.append(found := job(seed))
        print(json.dumps(found), flush=True)
    total = {name: sum(bool(found[name]) for found in jobs) for name in ("wrong", "identical", "alike", "put_back")}
    result = {"torch": torch.__version__, "machine": platform.machine(), "steps": STEPS, **total, "jobs": jobs}
    print({name: f"{number}/{len(jobs)}" for name, number in total.items()})
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
