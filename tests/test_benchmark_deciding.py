"""Benchmarks of jobs that decide: some replays, and the committed tables hold what docs/arms.md promises."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import deciding as bench
from benchmarks import deciding_live

TABLE = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "deciding.json"
LIVE_TABLE = TABLE.with_name("deciding-live.json")


def jobs_of(scenario: str, number: int = 8) -> list[bench.Replay]:
    errors = bench.recorded()
    return [bench.replay(np.random.default_rng([7, job]), bench.SCENARIOS[scenario], errors) for job in range(number)]


def test_the_best_of_four_arms_is_kept_within_the_budget() -> None:
    jobs = jobs_of("four arms")
    assert sum(job.kept == "faster" for job in jobs) >= 6
    assert all(job.over_s <= 0 for job in jobs)
    assert np.median([job.won_s for job in jobs]) > 0


def test_nothing_is_kept_where_nothing_differs() -> None:
    assert sum(bool(job.chosen) for job in jobs_of("nothing differs")) <= 1


def test_an_arm_that_turns_slower_is_given_up_before_it_costs_what_it_won() -> None:
    for job in jobs_of("turns slower"):
        assert job.kept != "faster"
        if job.chosen[:1] and job.chosen[0][1] < 40:
            assert job.won_s > 0


def test_the_table_holds_what_is_promised() -> None:
    rows = json.loads(TABLE.read_text())["jobs"]
    assert set(rows) == set(bench.ROWS)
    for name, row in rows.items():
        assert row["jobs"] >= 1000, name
        if name.startswith(tuple(bench.WHEN_KEPT)):  # windows cannot tell; the job's pace does
            # Within so many windows, where the pace varies little enough to show it.
            assert row["given_up"] >= 0.95 or "pace varies" in name, name
            assert row["behind"] <= bench.WRONG, name
            continue
        assert not row["behind"], name
        assert row["wrong"] <= bench.WRONG, name
        assert row["over_budget_s"] <= 0, name
        assert row["lost"] <= bench.WRONG, name
        assert row.get("kept_on", 0) <= bench.WRONG, name
        if name.startswith(("nothing differs", "all are")):
            assert row["kept_nothing_ever"] >= 1 - bench.WRONG, name
    assert rows["four arms, recorded"]["kept_at_end"]["faster"] == pytest.approx(1, abs=0.1)


def test_the_table_of_live_jobs_holds_what_is_promised() -> None:
    jobs = json.loads(LIVE_TABLE.read_text())["jobs"]
    assert len(jobs) == len({job["seed"] for job in jobs}) == 20
    assert {job["kind"] for job in jobs} == set(deciding_live.KINDS)
    assert sum(job["wrong"] for job in jobs) <= bench.WRONG * len(jobs)
    for job in jobs:
        assert job["identical"], job
        assert job["alike"], job
        assert job["put_back"], job
        assert job["over_budget_s"] <= 0, job
        assert job["behind_s"] <= 0, job
        if job["kind"] == "none":
            assert not job["kept_steps"], job
