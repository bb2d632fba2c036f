"""The race check on DeepSpeed's ZeRO-1: a step of a real engine is repeated, and nothing is left changed."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from overlap_callbacks.analysis.results.race import RaceCheck, RaceVerdict
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import KeptReports, tiny_schedule

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
RANKS_LOAD = ("tests.integrations.deepspeed_jobs",)

STEPS = 14
# Arguments of deepspeed_jobs.config.
JOBS: dict[str, dict[str, Any]] = {
    "overlapping": {},
    "not overlapping": {"zero": {"overlap_comm": False}},
    "accumulating": {"micro_batches": 2},
    "bf16": {"dtype": "bf16"},
    "fp16 that overflows": {"dtype": "fp16"},
    "with a clip": {"gradient_clipping": 0.1},
}
# Times of day, and the number that torch gives to a backward pass.
VARIES = ("_time", "_task_id")
Repeat = Callable[[Any, Any, int], None]


def once(training: Any, batch: Any, number: int) -> None:
    training.engine.backward(training.engine(batch).float().square().mean())


def first_differs(training: Any, batch: Any, number: int) -> None:
    training.engine.backward((training.engine(batch).float() * (1.5 if number == 0 else 1.0)).square().mean())


def each_differs(training: Any, batch: Any, number: int) -> None:
    training.engine.backward((training.engine(batch).float() * (1 + number)).square().mean())


def steps_the_engine(training: Any, batch: Any, number: int) -> None:
    once(training, batch, number)
    training.engine.step()


def steps_the_optimizer(training: Any, batch: Any, number: int) -> None:
    once(training, batch, number)
    training.engine.optimizer.step()


def fails(training: Any, batch: Any, number: int) -> None:
    once(training, batch, number)
    raise ValueError("no batch is held")


def engine_state(engine: Any) -> dict[str, str]:
    """Plain values and containers of the engine and of what ZeRO keeps, by name; what varies anyway is left out."""
    optimizer = engine.optimizer
    holders = {"engine": engine, "optimizer": optimizer, "scaler": optimizer.loss_scaler, "timer": engine.tput_timer}
    holders["hooks"] = getattr(optimizer, "_backward_hook_state", optimizer)
    holders |= {f"bucket {dtype}": bucket for dtype, bucket in getattr(optimizer, "ipg_buckets", {}).items()}
    found = {}
    for name, holder in holders.items():
        for field, value in vars(holder).items():
            if not field.endswith(VARIES) and (value is None or isinstance(value, (bool, int, float, str, dict, list))):
                if holder is engine and isinstance(value, (dict, list)):
                    continue
                found[f"{name} {field}"] = in_words(value)
    found["accumulated"] = in_words([getattr(p, "grad_accum", None) for p in engine.module.parameters()])
    return found


def in_words(value: Any) -> str:
    import torch

    if isinstance(value, dict):
        # Keys may be addresses of parameters.
        return f"{{{', '.join([in_words(one) for one in value.values()])}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(in_words, value))}]"
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta":
            return f"meta {tuple(value.shape)}"
        return hashlib.sha256(value.detach().float().contiguous().numpy().tobytes()).hexdigest()[:8]
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def optimizer_state(engine: Any) -> str:
    return in_words([[*state.values()] for state in engine.optimizer.optimizer.state.values()])


def train(rank: int, options: dict[str, Any], repeat: Repeat | None) -> dict[str, Any]:
    import torch

    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    training = jobs.Training(rank, jobs.config(1, **options))
    held, kept, calls = training.batch(), KeptReports(), 0
    monitor = None

    def repeat_step() -> None:
        nonlocal calls
        calls += 1
        assert repeat is not None
        repeat(training, held, (calls - 1) % 4)

    with captured_log() as lines:
        if repeat is not None:
            monitor = attach(
                training.engine, repeat_step=repeat_step, check_gradients=True, schedule=tiny_schedule(),
                sinks=[kept], max_overhead=None, power=False,
            )  # fmt: skip
        for _ in range(STEPS):
            training.step()
        if monitor is not None:
            monitor.close()
    races: list[RaceCheck] = [report.race for report in kept.reports if report.race is not None]
    return {
        "weights": training.digest(),
        "optimizer": optimizer_state(training.engine),
        "engine": engine_state(training.engine),
        "random": torch.get_rng_state().sum().item(),
        "calls": calls,
        "races": races,
        "lines": lines,
    }


def every_job(rank: int) -> dict[str, Any]:
    from tests.integrations import deepspeed_jobs as jobs

    jobs.set_up(rank)
    found: dict[str, Any] = {}
    for job, options in JOBS.items():
        found[job] = train(rank, options, None), train(rank, options, once)
    plain = train(rank, {}, None)
    for function in (first_differs, each_differs, steps_the_engine, steps_the_optimizer, fails):
        found[function.__name__] = plain, train(rank, {}, function)
    found["zero2"] = train_stage_two(rank)
    return found


def train_stage_two(rank: int) -> list[RaceCheck]:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs as jobs

    training, kept = jobs.Training(rank, jobs.config(2)), KeptReports()
    options: dict[str, Any] = {"schedule": tiny_schedule(), "sinks": [kept], "max_overhead": None, "power": False}
    monitor = attach(training.engine, repeat_step=lambda: None, check_gradients=True, **options)
    for _ in range(STEPS):
        training.step()
    monitor.close()
    return [report.race for report in kept.reports if report.race is not None]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank saw of every job: one launch, because loading DeepSpeed takes long."""
    return run_ranks(every_job, 2, timeout_s=240)


def unchanged(found: list[dict[str, Any]], job: str) -> None:
    for rank in found:
        plain, checked = rank[job]
        assert checked["weights"] == plain["weights"], job
        assert checked["optimizer"] == plain["optimizer"], job
        assert checked["random"] == plain["random"], job
        differing = {
            name: (plain["engine"].get(name), checked["engine"].get(name))
            for name in {**plain["engine"], **checked["engine"]}
            if plain["engine"].get(name) != checked["engine"].get(name)
        }
        assert differing == {}, job


@pytest.mark.parametrize("job", JOBS)
def test_training_is_bit_identical_and_no_race_is_found(found: list[dict[str, Any]], job: str) -> None:
    unchanged(found, job)
    # A window in which steps overflowed may not be complete, and is then not checked.
    windows = {4, 8} if "overflows" in job else {8}
    for rank in found:
        assert rank[job][1]["calls"] in windows
        assert rank[job][1]["lines"] == []
    races = found[0][job][1]["races"]
    assert [race.verdict for race in races] == [RaceVerdict.EQUAL] * (found[0][job][1]["calls"] // 4)
    # Of 4 layers, each rank has the part that its optimizer steps.
    assert all(race.num_ranks == 2 and race.num_gradients >= 2 and race.held_bytes > 0 for race in races)


def test_differing_gradients_are_distinguished(found: list[dict[str, Any]]) -> None:
    unchanged(found, "first_differs")
    unchanged(found, "each_differs")
    (race, *_) = found[0]["first_differs"][1]["races"]
    assert race.verdict is RaceVerdict.RACE
    assert {row.parameter for row in race.differences} <= {f"{layer}.weight" for layer in range(0, 8, 2)}
    races = found[0]["each_differs"][1]["races"]
    assert {race.verdict for race in races} == {RaceVerdict.NOT_REPEATABLE}


@pytest.mark.parametrize("function", ["steps_the_engine", "steps_the_optimizer", "fails"])
def test_a_function_that_does_something_else_ends_the_check_and_changes_nothing(
    found: list[dict[str, Any]], function: str
) -> None:
    unchanged(found, function)
    (race,) = found[0][function][1]["races"]
    assert race.verdict is RaceVerdict.NOT_CHECKED
    says = "no batch is held" if function == "fails" else "it would have stepped an optimizer"
    assert says in race.reason


def test_other_stages_are_refused_in_words(found: list[dict[str, Any]]) -> None:
    (race,) = found[0]["zero2"]
    assert race.verdict is RaceVerdict.NOT_CHECKED
    assert "of DeepSpeed, steps of ZeRO-1 alone can be repeated" in race.reason
