"""Megatron-core on Gloo, with the shims of ``megatron_shims``; Megatron-LM by a small tree that calls as it does."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from overlap_callbacks import Mode
from overlap_callbacks.gate.step_log import ExpectedSequence
from overlap_callbacks.integrations._megatron_steps import MegatronCore, shared_expert_streams
from overlap_callbacks.integrations.megatron import attach
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.gate.streams import Device
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import (
    BATCH,
    FOUR_RANKS,
    LOADS,
    NUM_STEPS,
    SEQUENCE,
    TWO_RANKS,
    Setup,
    job,
    train_absent,
    train_attached,
)
from tests.integrations.megatron_messages import BYTES, MESSAGES
from tests.integrations.megatron_parts import REFUSED, run_parts
from tests.toggling import TOGGLING_STEPS, asked_for, at_night
from tests.wandb_reader import read_run

# Loading it takes long, and only the ranks need it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed")
RANKS_LOAD = LOADS

Session = Callable[[str], list[Any]]
# Combinations of what the others have: tp_pp the first two's collectives, and tp_sequence_parallel, pp_interleaved, and
# the two of tp_dp, those of dp_distributed_optimizer over other groups.
NIGHTLY = ("tp", "tp_sequence_parallel", "pp", "pp_interleaved_4_stages", "tp_dp")


def _train_all_ways(rank: int, names: list[str]) -> dict[str, Any]:
    megatron_shims.install()
    found = {}
    for name in names:
        setup = {**TWO_RANKS, **FOUR_RANKS}[name]
        found[name] = {
            "absent": train_absent(setup),
            "toggled": train_attached(setup),
            "forced": train_attached(setup, force=True),
        }
    return found


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, Any]]]:
    """What each rank found of a setup; all setups of as many ranks are trained in one go, since Megatron loads long."""
    ranks: dict[int, list[dict[str, Any]]] = {}
    asked = asked_for(request, "name") | {"pp_interleaved", "tp_pp"}  # one test names these

    def of(name: str) -> list[dict[str, Any]]:
        setups, size = (TWO_RANKS, 2) if name in TWO_RANKS else (FOUR_RANKS, 4)
        if size not in ranks:
            ranks[size] = run_ranks(_train_all_ways, size, [name for name in setups if name in asked], timeout_s=200)
        return [found[name] for found in ranks[size]]

    return of


@pytest.fixture(scope="module")
def parts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def parts(parts_folder: Path) -> Session:
    """What the ranks found in one of the ``PARTS``, which share their processes."""
    ranks = run_ranks(run_parts, 2, str(parts_folder), timeout_s=135)  # 15 s of it are waits of its own

    def of(name: str) -> list[Any]:
        for rank, found in enumerate(ranks):
            assert not found[name][1], f"rank {rank}: {found[name][1]}"
        return [found[name][0] for found in ranks]

    return of


@pytest.mark.parametrize("name", at_night([*TWO_RANKS, *FOUR_RANKS], NIGHTLY))
def test_weights_are_bit_identical_without_with_toggling_and_in_forced_sequential_mode(
    name: str, trained: Callable[[str], list[dict[str, Any]]]
) -> None:
    for rank in trained(name):
        toggled, forced = rank["toggled"], rank["forced"]
        assert toggled["digest"] == rank["absent"]
        assert forced["digest"] == rank["absent"]

        # The first step seen by the monitor is the second: steps 2 (recorded), then 3 to 18.
        assert toggled["modes"][3:19] == [Mode.OVERLAPPED, Mode.SEQUENTIAL] * 8
        assert toggled["modes"].count(Mode.SEQUENTIAL) == 8
        assert forced["modes"][3:] == [Mode.SEQUENTIAL] * (NUM_STEPS - 3)
        assert toggled["left_out"] == forced["left_out"] == []
        assert toggled["waited_for"] >= 8
    reports = trained(name)[0]["toggled"]["reports"]
    assert [(report["complete"], report["problems"]) for report in reports] == [(True, [])]
    assert len(reports[0]["ranks"]) == len(trained(name))


@pytest.mark.parametrize("name", at_night(MESSAGES, NIGHTLY))
def test_the_messages_recorded_are_those_that_megatron_sends(
    name: str, trained: Callable[[str], list[dict[str, Any]]]
) -> None:
    rank = trained(name)[0]
    logs = rank["toggled"]["messages"] + rank["forced"]["messages"]
    # The window's recorded step and its 16 timed ones. Forced: all steps but the one that had begun before.
    assert len(logs) == 1 + 16 + NUM_STEPS - 1
    for log in logs:
        counts: Counter[str] = Counter()
        for (operator, _, _), (messages, _, _) in log.items():
            counts[operator] += messages
        assert counts == MESSAGES[name]


@pytest.mark.parametrize("name", at_night(BYTES, NIGHTLY))
def test_messages_and_bytes_of_each_dimension_are_as_worked_out_by_hand(
    name: str, trained: Callable[[str], list[dict[str, Any]]]
) -> None:
    (first, *_) = trained(name)
    found = first["toggled"]["messages"][0]
    assert {key: found[key] for key in BYTES[name]} == BYTES[name]


@pytest.mark.parametrize(
    ("name", "dimensions"),
    [
        ("dp_distributed_optimizer", {"data", "tensor", "model"}),
        pytest.param("tp", {"data", "tensor", "model"}, marks=pytest.mark.nightly),
        pytest.param("pp", {"data", "pipeline", "embedding", "model"}, marks=pytest.mark.nightly),
        ("pp_interleaved", {"data", "pipeline", "embedding", "model"}),
        ("ep", {"data", "tensor", "expert", "model"}),
        ("tp_pp", {"data", "tensor", "pipeline", "embedding", "model"}),
    ],
)
def test_the_report_says_which_dimension_sends_what(
    name: str, dimensions: set[str], trained: Callable[[str], list[dict[str, Any]]]
) -> None:
    found = trained(name)[0]["toggled"]["dimensions"]
    assert {dimension for _, dimension in found} == dimensions
    assert {dimension for operator, dimension in found if operator in ("send", "recv_")} <= {"pipeline"}
    assert {dimension for operator, dimension in found if "alltoall" in operator} <= {"expert"}


def test_sends_and_receives_of_the_interleaved_schedule_are_waited_for_and_handed_on_as_done(
    trained: Callable[[str], list[dict[str, Any]]],
) -> None:
    # Of the 24 of a step: the others the schedule itself waits for before it goes on.
    for rank, expected in zip(trained("pp_interleaved"), (12, 16), strict=True):
        for seen in (rank["toggled"], rank["forced"]):
            assert seen["done_works"] == expected * seen["modes"].count(Mode.SEQUENTIAL)
    for rank in trained("tp_pp"):
        assert rank["forced"]["done_works"] == 0  # 1F1B waits itself


def _toggle_long(rank: int, names: list[str]) -> dict[str, tuple[int, int]]:
    megatron_shims.install()
    found = {}
    for name in names:
        setup = {**TWO_RANKS, **FOUR_RANKS}[name]
        layers = setup.layers if setup.pp > 1 else 2  # every kind of collective is in each layer
        setup = dataclasses.replace(setup, micro_batches=min(2, setup.micro_batches), layers=layers)
        repeats = toggles_of(name)
        seen = train_attached(setup, steps=2 * repeats + 5, repeats=repeats, spread=False, every_n_steps=1000)
        found[name] = (seen["modes"].count(Mode.SEQUENTIAL), len(seen["left_out"]))
    return found


def toggles_of(name: str) -> int:
    """How often a job changes its mode and back: one of each kind of groups in all steps, its variants in a quarter."""
    return TOGGLING_STEPS // (2 if name in ("dp", "tp", "pp", "tp_pp") else 8)


# The toggled jobs above change their modes in 16 steps.
@pytest.mark.nightly
@pytest.mark.parametrize(("size", "names"), [(4, ["tp_pp"]), (2, list(TWO_RANKS))])
def test_nothing_hangs_in_many_toggling_steps(size: int, names: list[str]) -> None:
    for rank in run_ranks(_toggle_long, size, names, timeout_s=240):
        assert rank == {name: (toggles_of(name), 0) for name in names}


def _measure(rank: int, folder: str) -> None:
    megatron_shims.install()
    setup = Setup(hidden=128, bucket=200_000)
    options = {
        "spread": False,
        "every_n_steps": 100,
        "first_step": 4,
        "repeats": 2,
        "steps_per_block": 1,
        "profiled_steps": 4,
    }
    with (
        job(setup) as training,
        attach(training.model, training.optimizer, **options, run_dir=folder, strict=True, max_overhead=None),
    ):
        for _ in range(40):
            training.step()


def test_compute_never_overlaps_communication_in_sequential_steps_of_data_parallelism(tmp_path: Path) -> None:
    run_ranks(_measure, 2, str(tmp_path))
    (run,) = record.read(tmp_path).runs
    assert run.framework.startswith("megatron-core 0.")
    assert run.configuration["ddp_bucket_size"] == 200_000
    assert run.configuration.keys() >= {"model", "shapes", "hidden_size", "ddp_overlap_grad_reduce"}
    (window,) = record.read(tmp_path).windows
    assert window.complete
    assert window.valid
    assert window.residual_overlap is not None
    assert window.residual_overlap.value < 0.05
    assert window.overlap_ratio is not None
    assert window.overlap_ratio.value > window.residual_overlap.value
    data = next(time for time in window.dimensions if time.dimension == "data")
    assert data.comm_ms > 0
    assert data.bytes_in == next(c.bytes_in for c in window.collectives if c.dimension == "data")


def test_the_schedule_that_flushes_its_warm_up_is_serialised_batch_by_batch(parts: Session) -> None:
    for identical, attached in parts("flush"):
        assert identical
        assert attached["modes"].count(Mode.SEQUENTIAL) > 5
        assert attached["left_out"] == []


# -- the native form


def test_the_native_form_is_refused_where_it_is_not_proven_and_training_goes_on_unmeasured(parts: Session) -> None:
    for number, rank in enumerate(parts("refuse")):
        for name, (_, _, _, said) in REFUSED.items():
            message, lines, active, wrapped = rank[name]
            assert said in message
            assert len(lines) == (number == 0 and name != "unknown")  # a wrong value raises instead, on all ranks
            assert all(message in line for line in lines)
            assert not active
            assert not wrapped


def test_a_switch_that_somebody_else_has_turned_is_left_alone(parts: Session) -> None:
    parts("switch")


# -- what is left behind, and errors


def test_everything_is_as_before_after_close_even_in_the_middle_of_a_sequential_step(parts: Session) -> None:
    assert parts("state") == [[], []]


def test_misuse_and_missing_packages_give_clear_errors(parts: Session) -> None:
    parts("misuse")


# -- steps


def test_a_step_that_the_optimizer_skips_does_not_count_and_leaves_the_window_whole(parts: Session) -> None:
    for absent, attached, _ in parts("overflow"):
        assert absent == attached
    complete, blocks = parts("overflow")[0][2]
    assert complete
    assert blocks == [0, 1, 2, 3, 4, *range(6, 16)]  # step 8 is the sixth of the timed ones


def test_steps_may_be_marked_by_hand(parts: Session) -> None:
    for modes, identical in parts("by_hand"):
        assert modes[3:19] == [Mode.OVERLAPPED, Mode.SEQUENTIAL] * 8
        assert identical


# -- Megatron-LM


def test_pretrain_is_measured_and_logged_to_the_run_on_the_last_rank(parts: Session, parts_folder: Path) -> None:
    assert parts("pretrain") == [{"identical": True, "said": []}] * 2
    gate, native = (record.read(parts_folder / sequential).windows[0] for sequential in ("gate", "native"))
    for window in (gate, native):
        assert window.complete
        assert window.first_step == 2
        assert window.tokens_per_step == 2 * BATCH * SEQUENCE
    # The evaluation gathered the parameters for the step after it, the eighth: it lacks part of the checked sequence.
    assert [block.block for block in gate.samples[0].timed] == [*range(7), *range(8, 16)]
    assert [block.block for block in native.samples[0].timed] == list(range(16))
    run = read_run(parts_folder)
    assert run.values("loss") == [1.0] * NUM_STEPS
    assert run.values("overlap/step") == [2]
    assert run.values("overlap/e2e_sequential_ms") == [native.metrics()["overlap/e2e_sequential_ms"]]


def test_a_late_report_of_rank_0_reaches_the_last_rank_and_an_unread_one_is_deleted(
    parts: Session,
) -> None:
    first, last = parts("pretrain_apart")
    assert last["late"] == {"logged": [2], "lines": [], "left": []}
    assert not any("has taken none" in line for line in first["late"]["lines"])
    assert last["dead"]["logged"] == []
    assert first["dead"]["left"] == last["dead"]["left"] == []
    assert [line for line in first["dead"]["lines"] if "the last rank has taken none of the last 1 reports" in line]


def test_pretrain_without_an_inbox_is_measured_and_if_strict_ends_with_all_put_back(
    parts: Session, parts_folder: Path
) -> None:
    first, last = parts("pretrain_without_inbox")
    for found in (first, last):
        assert found["restored"] == {"communicator": True, "step": True}
        assert found["own"]
    assert first["lines"] == []
    (line,) = last["lines"]
    assert "WandbSink failed and is not used again, the rest goes on: no writer" in line
    (window,) = record.read(parts_folder / "without_inbox").windows
    assert window.complete
    assert window.ranks == (0, 1)
    assert window.tokens_per_step is None  # the arguments are not to be had


def test_pretrain_ends_as_it_would_when_it_fails_exits_or_cannot_be_measured(parts: Session) -> None:
    (line,), others = parts("pretrain_badly")
    assert "measuring is switched off on all ranks, training goes on" in line
    assert "tensor_model_parallel_size=2" in line
    assert others == []


class SharedExpertMLP(nn.Module):
    """Stands for Megatron's, which is known by its name."""

    stream: object = None


def test_a_sequential_step_orders_the_stream_of_shared_experts_with_a_batch_of_sends_and_receives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, posted = Device("compute", "experts"), []
    compute, experts = cuda.streams["compute"], cuda.streams["experts"]

    class Communicator:
        def _communicate(self) -> tuple[None, None, None]:
            posted.append(compute.enqueue())
            return None, None, None

    groups: Any = SimpleNamespace(model_parallel_is_initialized=lambda: True)
    core = MegatronCore("megatron-core", Communicator, nn.Module, torch.optim.SGD, groups, SimpleNamespace())
    monkeypatch.setattr(MegatronCore, "load", lambda: core)
    layer = SharedExpertMLP()
    layer.stream = experts
    monitor = attach(nn.Sequential(nn.Linear(1, 1), layer), None, run_dir=tmp_path, strict=True)
    gate = monitor._driver.gate
    cuda.install(monkeypatch)
    gate.register()
    gate.begin_step(sequential=True, expected=ExpectedSequence([], batches=[()]), compute_stream=compute)  # type: ignore[arg-type]
    before = experts.enqueue()
    Communicator()._communicate()
    after = experts.enqueue()
    gate.end_step()
    monitor.close()
    assert gate.last_error is None, repr(gate.last_error)
    assert gate.side_streams == [[experts]]
    assert cuda.is_before(before, posted[0])
    assert cuda.is_before(posted[0], after)


def test_the_streams_of_shared_experts_are_found_once_each() -> None:
    shared, lone = object(), object()
    experts = [SharedExpertMLP() for _ in range(4)]
    for expert, stream in zip(experts, (shared, shared, lone, None), strict=True):
        expert.stream = stream
    chunks = [nn.Sequential(*experts[:2]), nn.Sequential(nn.Linear(1, 1), *experts[2:])]
    assert shared_expert_streams(chunks) == [shared, lone]
