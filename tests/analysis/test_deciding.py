"""Which arm is measured next, what is dropped, and which is best."""

from __future__ import annotations

import math

import numpy as np

from overlap_callbacks.analysis.deciding import Decider
from overlap_callbacks.analysis.results.arm import ArmReport, ComparedArm
from overlap_callbacks.analysis.results.decision import Why
from overlap_callbacks.analysis.results.estimate import Estimate

ERROR, DEGREES = 0.03, 10.0


def report(arm: ComparedArm, window: int, log_speedup: float) -> ArmReport:
    return ArmReport(
        arm=arm, num_ranks=2, window=window, first_step=100 * window, num_steps=50, complete=True, control=False,
        world_size=2, backend="gloo", device="cpu", valid=True, problems=(),
        speedup=Estimate(math.expm1(log_speedup), None, None, 16, 8, ERROR, DEGREES),
    )  # fmt: skip


def test_the_fastest_arm_is_kept_and_slower_ones_are_dropped_sooner_the_slower_they_are() -> None:
    effects = {"fast": 0.06, "nothing": 0.0, "slow": -0.02, "slower": -0.3}
    arms = {name: ComparedArm(name, equal_results=True) for name in effects}
    decider = Decider(list(arms.values()), budget=0.005, wrong=0.05, keeps=True)
    rng = np.random.default_rng(1)
    for window in range(100):
        choice = decider.choose(window, now_s=window * 1000.0, arm_steps=24)
        if choice.trial:
            decider.record_trial(choice.arm, extra_s=0.1, cost_s=0.1)
        elif choice.arm:
            value = effects[choice.arm] + rng.normal(0, ERROR)
            decider.record(report(arms[choice.arm], window, value), cost_s=2.0)
    found = decider.decision()
    assert found.kept == "fast"
    windows = {one.arm: one.num_windows for one in found.left_out}
    assert windows["slower"] < windows["slow"] < windows["nothing"]
    assert {one.why for one in found.left_out} <= {Why.SLOWER, Why.BEHIND, Why.NO_GAIN}
