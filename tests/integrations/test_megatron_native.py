"""Megatron-core's own switches, against what Megatron has in flight in the steps of each mode."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest

from overlap_callbacks import Mode, arms
from overlap_callbacks.integrations.megatron import attach
from tests.distributed import run_ranks
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import (
    LOADS,
    NATIVE_FOUR_RANKS,
    NATIVE_TWO_RANKS,
    NUM_STEPS,
    TOGGLING,
    job,
    train_absent,
    train_attached,
)
from tests.monitor.jobs import KeptReports, kept_logs
from tests.toggling import at_night

# Loading it takes long, and only the ranks need it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
RANKS_LOAD = LOADS


class _Watch:
    """What Megatron does in the steps of one mode: reductions and gathers left in flight, batches not waited for."""

    def __init__(self) -> None:
        self.seen: dict[Mode, Counter[str]] = {mode: Counter() for mode in Mode}
        self.monitor: Any = None

    def __enter__(self) -> _Watch:
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

        reduce, gather, communicate = Buckets.start_grad_sync, Buckets.start_param_sync, P2PCommunicator._communicate

        def start_grad_sync(buckets: Any, *args: Any, **kwargs: Any) -> None:
            under_way = buckets.grad_reduce_handle is not None  # then the call does nothing
            reduce(buckets, *args, **kwargs)
            if not under_way:
                self._note("reduction", buckets.grad_reduce_handle is not None)

        def start_param_sync(buckets: Any, *args: Any, **kwargs: Any) -> None:
            gather(buckets, *args, **kwargs)
            self._note("gather", buckets.param_gather_handle is not None)

        def _communicate(communicator: Any, **kwargs: Any) -> Any:
            self._note("batch", not kwargs.get("wait_on_reqs", True))
            return communicate(communicator, **kwargs)

        Buckets.start_grad_sync, Buckets.start_param_sync = start_grad_sync, start_param_sync
        P2PCommunicator._communicate = _communicate
        self._before = [(Buckets, "start_grad_sync", reduce), (Buckets, "start_param_sync", gather)]
        self._before.append((P2PCommunicator, "_communicate", communicate))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, value in self._before:
            setattr(owner, name, value)

    def _note(self, what: str, in_flight: bool) -> None:
        if self.monitor is not None and self.monitor.in_window:
            self.seen[self.monitor.mode][f"{what} in flight" if in_flight else what] += 1


def _train_natively(rank: int, names: list[str]) -> dict[str, Any]:
    megatron_shims.install()
    found = {}
    for name in names:
        setup = {**NATIVE_TWO_RANKS, **NATIVE_FOUR_RANKS}[name]
        absent = train_absent(setup)
        modes = []
        with _Watch() as watch, job(setup) as training, kept_logs() as logs:
            sink = KeptReports()
            monitor = watch.monitor = attach(
                training.model, training.optimizer, sequential="native", sinks=[sink], **TOGGLING
            )
            for _ in range(NUM_STEPS):
                modes.append(monitor.mode)
                training.step()
            monitor.close()
            watch.monitor = None
            digest = training.digest()
        forced = train_attached(setup, force=True, sequential="native")
        found[name] = {
            "digests": {absent, digest, forced["digest"]},
            "modes": modes,
            "forced_modes": forced["modes"],
            "seen": watch.seen,
            "gate_waited": sum(c.start is not None for log in logs for c in log.collectives) + forced["waited_for"],
            "complete": [report["complete"] for report in sink.facts()],
        }
    return found


@pytest.mark.parametrize(
    ("names", "size"),
    [
        (["dp_distributed_optimizer", "pp_interleaved"], 2),
        pytest.param(["dp", "dp_accumulating"], 2, marks=pytest.mark.nightly),
        pytest.param(["pp_interleaved_dp"], 4, marks=pytest.mark.nightly),
        pytest.param(["pp_dp"], 4, marks=pytest.mark.nightly),
    ],
)
def test_the_native_form_leaves_weights_bit_identical_and_nothing_in_flight(names: list[str], size: int) -> None:
    ranks = run_ranks(_train_natively, size, names, timeout_s=200)
    for name in names:
        setup = {**NATIVE_TWO_RANKS, **NATIVE_FOUR_RANKS}[name]
        for found in (rank[name] for rank in ranks):
            assert len(found["digests"]) == 1
            assert found["modes"][3:19] == [Mode.OVERLAPPED, Mode.SEQUENTIAL] * 8
            assert found["forced_modes"][3:] == [Mode.SEQUENTIAL] * (NUM_STEPS - 3)
            assert found["gate_waited"] == 0

            overlapped, sequential = found["seen"][Mode.OVERLAPPED], found["seen"][Mode.SEQUENTIAL]
            assert not any("in flight" in what for what in sequential), name
            # The recorded step is an overlapped one more.
            assert overlapped["reduction in flight"] * 8 == sequential["reduction"] * 9
            if setup.overlap_param_gather:
                assert overlapped["gather in flight"] * 8 == sequential["gather"] * 9
            if setup.overlap_p2p_comm:
                assert overlapped["batch in flight"] > 0
        assert all(rank[name]["complete"] == [True] for rank in ranks[:1])


def _train_in_turns(rank: int, name: str) -> dict[str, Any]:
    """Windows of the gate and of Megatron's own switches take turns."""
    megatron_shims.install()
    setup = NATIVE_TWO_RANKS[name]
    absent = train_absent(setup)
    often = {**TOGGLING, "every_n_steps": 6, "repeats": 2}
    seen = set()
    with job(setup) as training:
        monitor = attach(training.model, training.optimizer, arms=[arms.Sequential(), arms.Native()], sinks=[], **often)
        for _ in range(NUM_STEPS):
            seen.add((monitor.arm is not None, monitor.mode))
            training.step()
        monitor.close()
        return {"digests": {absent, training.digest()}, "seen": seen}


@pytest.mark.parametrize(
    "name", at_night(["dp_distributed_optimizer", "dp_accumulating", "pp_interleaved"], ["dp_accumulating"])
)
def test_the_gate_and_the_native_form_take_turns_as_arms(name: str) -> None:
    for rank in run_ranks(_train_in_turns, 2, name, timeout_s=200):
        assert len(rank["digests"]) == 1
        assert rank["seen"] == {(False, Mode.OVERLAPPED), (False, Mode.SEQUENTIAL), (True, Mode.SEQUENTIAL)}


def _switches(training: Any) -> list[object]:
    """What the native form of the arm turns."""
    configs = [config for chunk in training.model for config in (chunk.ddp_config, chunk.config)]
    names = ("overlap_grad_reduce", "overlap_p2p_comm", "grad_sync_func", "param_sync_func")
    return [getattr(config, name, None) for config in configs for name in names]


def _end_in_arm(rank: int, name: str, how: str) -> dict[str, Any]:
    """End a monitor in a step of its arm."""
    often = {**TOGGLING, "every_n_steps": 6, "repeats": 2}
    with job(NATIVE_TWO_RANKS[name]) as training:
        before = _switches(training)
        monitor = attach(training.model, training.optimizer, arms=[arms.Native()], sinks=[], **often)
        turned = False
        while not turned and len(training.losses) < NUM_STEPS:
            training.step()
            turned = monitor.arm is not None and _switches(training) != before
        if how == "close":
            monitor.close()
        elif how == "force":
            monitor.force(Mode.OVERLAPPED)
        else:
            monitor.abort_step()  # what an exception in ``with monitor.step()`` does
        training.step()
        now = _switches(training)
        monitor.close()
        return {"turned": turned, "same": now == before, "after": _switches(training) == before}


def _end_in_arm_all_ways(rank: int, name: str) -> list[dict[str, Any]]:
    megatron_shims.install()
    return [_end_in_arm(rank, name, how) for how in ("close", "force", "exception")]


@pytest.mark.parametrize("name", ["dp_distributed_optimizer", "pp_interleaved"])
def test_the_native_form_as_an_arm_is_put_back_however_its_window_ends(name: str) -> None:
    for ways in run_ranks(_end_in_arm_all_ways, 2, name, timeout_s=200):
        assert ways == [{"turned": True, "same": True, "after": True}] * 3
