"""Every way in which PyTorch parallelises by itself: nothing changes, everything is seen, nothing hangs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleInterleaved1F1B, schedules

from overlap_callbacks import Mode
from overlap_callbacks.gate.collectives import POINT_TO_POINT
from overlap_callbacks.gate.serialiser import CompletedWork
from overlap_callbacks.integrations import _pytorch_pipelining as pipelining
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report import record
from tests.distributed import captured_log, run_ranks
from tests.integrations import parallel_jobs as jobs
from tests.integrations.parallel_jobs import BATCH, MICRO_BATCHES, WIDE, WIDTH, Job, Training, belongings
from tests.monitor.jobs import kept_logs
from tests.toggling import TOGGLING_STEPS, at_night

NUM_STEPS = 20
# Every step may have another mode than the one before it. (In step 1 DDP asks its ranks for the order of buckets.)
TOGGLING: dict[str, Any] = {"first_step": 2, "steps_per_block": 1, "warmup_steps": 0, "profiled_steps": 0}

WEIGHTS = 4 * WIDTH * WIDTH  # bytes of a linear layer's matrix
BIAS = 4 * WIDTH
LAYER = WEIGHTS + BIAS
MICRO_BATCH = 4 * WIDTH * BATCH // MICRO_BATCHES  # bytes of its activations, and of their gradients

# What rank 0 sends and receives in a step: (operator, dimension, bytes in, bytes out) and how often.
Seen = dict[tuple[str, str, int, int], int]

# Each layer is gathered for the forward and again for the backward; its gradient is reduced once.
FSDP2: Seen = {
    ("_allgather_base_", "data", LAYER // 2, LAYER): 3 + 3,
    ("_reduce_scatter_base_", "data", LAYER, LAYER // 2): 3,
}
# A row-split layer sums its output; a column-split one the gradient of its input, but for the model's own input.
TENSOR_PARALLEL: Seen = {("allreduce_", "tensor", 4 * BATCH * WIDTH, 4 * BATCH * WIDTH): 2 + 1}
# Split by columns: half of matrix and bias; by rows: half of the matrix and all of the bias.
COLUMNS, ROWS = LAYER // 2, WEIGHTS // 2 + BIAS
WIDE_LAYER = 4 * (WIDE * WIDE + WIDE)  # two of them fill a bucket of 1 MiB
EACH_STAGE = MICRO_BATCHES

EXPECTED: dict[str, tuple[Callable[..., Job], int, Seen]] = {
    "fsdp2": (jobs.fsdp2, 2, FSDP2),
    "hsdp": (jobs.hsdp, 4, {**FSDP2, ("allreduce_", "data", LAYER // 2, LAYER // 2): 3}),
    "tensor_parallel": (jobs.tensor_parallel, 2, TENSOR_PARALLEL),
    "fsdp2_and_tensor_parallel": (
        jobs.fsdp2_and_tensor_parallel,
        4,
        {
            **TENSOR_PARALLEL,
            ("_allgather_base_", "data", COLUMNS // 2, COLUMNS): 2 + 2,
            ("_allgather_base_", "data", ROWS // 2, ROWS): 2 + 2,
            ("_reduce_scatter_base_", "data", COLUMNS, COLUMNS // 2): 2,
            ("_reduce_scatter_base_", "data", ROWS, ROWS // 2): 2,
        },
    ),
    "gpipe": (
        jobs.gpipe,
        2,
        {("send", "pipeline", MICRO_BATCH, 0): EACH_STAGE, ("recv_", "pipeline", 0, MICRO_BATCH): EACH_STAGE},
    ),
    "1f1b": (
        jobs.one_f_one_b,
        2,
        {("send", "pipeline", MICRO_BATCH, 0): EACH_STAGE, ("recv_", "pipeline", 0, MICRO_BATCH): EACH_STAGE},
    ),
    # Rank 0 has the first and the third of four stages: it sends forward from both, and backward from the third.
    "interleaved_1f1b": (
        jobs.interleaved,
        2,
        {("send", "pipeline", MICRO_BATCH, 0): 3 * EACH_STAGE, ("recv_", "pipeline", 0, MICRO_BATCH): 3 * EACH_STAGE},
    ),
    "compiled_tensor_parallel": (jobs.compiled_tensor_parallel, 2, TENSOR_PARALLEL),
    "compiled_ddp": (jobs.compiled_ddp, 2, {("allreduce_", "data", 2 * WIDE_LAYER, 2 * WIDE_LAYER): 2}),
    # Gloo cannot gather into one tensor for FSDP1, which then gathers into a list.
    "fsdp1": (
        jobs.fsdp1,
        2,
        {
            ("allgather_", "data", LAYER // 2, LAYER): 3 + 3,
            ("_reduce_scatter_base_", "data", LAYER, LAYER // 2): 3,
        },
    ),
}


def train(rank: int, make: Callable[..., Job], **options: Any) -> dict[str, Any]:
    """Train with the library attached; the digest, and what the gate saw."""
    training = Training(rank, make)
    modes, batches = [], []
    with kept_logs() as logs:
        monitor = training.attach(**options)
        post = monitor.post

        def kept_post(*args: Any) -> Any:
            result, handed_on = post(*args)
            batches.append(all(isinstance(work, CompletedWork) for work in handed_on) if handed_on else None)
            return result, handed_on

        monitor.post = kept_post  # type: ignore[method-assign]
        if "first_step" not in options:
            monitor.force(Mode.SEQUENTIAL)
        for _ in range(NUM_STEPS):
            training.step()
            modes.append(monitor.mode)
        monitor.close()
    return {
        "digest": training.digest(),
        "modes": modes,
        "seen": [
            Counter((c.operator, c.group.dimension, c.bytes_in, c.bytes_out) for c in log.collectives) for log in logs
        ],
        "alone": [
            sum(c.start is not None for c in log.collectives if c.operator not in POINT_TO_POINT) for log in logs
        ],
        "messages": sum(c.operator in POINT_TO_POINT for c in logs[0].collectives) if logs else 0,
        "batches_waited": batches.count(True),
        "batches_let_go": batches.count(False),
        "departed": [str(log.divergence) for log in logs if log.divergence is not None],
    }


def train_all_ways(rank: int, name: str, folder: str) -> dict[str, Any]:
    make = EXPECTED[name][0]
    absent = Training(rank, make)
    for _ in range(NUM_STEPS):
        absent.step()
    found = {
        "absent": absent.digest(),
        "attached": train(rank, make, first_step=1000),
        "toggled": train(rank, make, **TOGGLING, spread=False, every_n_steps=1000),
        "forced": train(rank, make),
    }
    profiled = Training(rank, make)
    monitor = profiled.attach(
        **{**TOGGLING, "profiled_steps": 4}, repeats=1, spread=False, every_n_steps=1000, sinks=None, run_dir=folder
    )
    for _ in range(3 + monitor.schedule.window_steps):
        profiled.step()
    monitor.close()
    return found


def check_batches(name: str, found: dict[str, Any], sequential_steps: int) -> None:
    """In sequential steps every batch of sends and receives was waited for, and in no other."""
    each_step, rest = divmod(found["batches_waited"], sequential_steps)
    assert each_step > 0
    assert rest == 0
    # Before its first step a schedule asks its neighbours something, in up to two batches more.
    assert found["batches_let_go"] - each_step * (NUM_STEPS - sequential_steps) in (0, 1, 2)


# A combination of what two others have stays for the night.
@pytest.mark.parametrize("name", at_night(EXPECTED, ["fsdp2_and_tensor_parallel", "gpipe", "compiled_tensor_parallel"]))
def test_weights_stay_bit_identical_and_every_collective_is_seen(name: str, tmp_path: Path) -> None:
    _, ranks, expected = EXPECTED[name]
    found = run_ranks(train_all_ways, ranks, name, str(tmp_path), timeout_s=120)
    for rank in found:
        for way in ("attached", "toggled", "forced"):
            assert rank[way]["digest"] == rank["absent"], way
            assert rank[way]["departed"] == []
        toggled, forced = rank["toggled"], rank["forced"]
        assert toggled["modes"].count(Mode.SEQUENTIAL) == 8  # 4 times O S S O
        assert forced["modes"].count(Mode.SEQUENTIAL) == NUM_STEPS - 1
        # Every step has the same collectives, whatever its mode, and in sequential steps each was waited for.
        of_one_step = toggled["seen"][0]
        assert all(seen == of_one_step for seen in toggled["seen"])
        collectives = sum(of_one_step.values()) - toggled["messages"]
        assert forced["alone"][1:] == [collectives] * (NUM_STEPS - 2)
        if toggled["messages"]:
            check_batches(name, toggled, sequential_steps=8)
            check_batches(name, forced, sequential_steps=NUM_STEPS - 2)
    assert dict(found[0]["toggled"]["seen"][0]) == expected
    (window,) = record.read(tmp_path).windows
    assert window.complete
    assert window.residual_overlap is not None
    assert window.residual_overlap.value < 0.05 or not window.valid


# -- nothing hangs


def _toggle(rank: int, make: Callable[..., Job]) -> tuple[bool, int, int]:
    training = Training(rank, make)
    options = {
        **TOGGLING,
        "spread": False,
        "every_n_steps": 1000,
        "repeats": TOGGLING_STEPS // 4,
    }  # O S ... O S S O ... S O
    monitor = training.attach(**options)
    sequential = changes = 0
    before = Mode.OVERLAPPED
    for _ in range(3 + monitor.schedule.window_steps):
        training.step()
        sequential += monitor.mode is Mode.SEQUENTIAL
        changes += monitor.mode is not before
        before = monitor.mode
    alive = monitor.active
    monitor.close()
    return alive, sequential, changes


@pytest.mark.parametrize(
    ("make", "ranks"),
    [
        (jobs.one_f_one_b, 4),
        # The toggled jobs above change their modes in 16 steps.
        *(
            pytest.param(make, ranks, marks=pytest.mark.nightly)
            for name, (make, ranks, _) in EXPECTED.items()
            if name != "1f1b"
        ),
    ],
)
def test_many_steps_of_changing_modes_do_not_hang(make: Callable[..., Job], ranks: int) -> None:
    changes = TOGGLING_STEPS - 2  # at each step, but not at the first and in the middle
    assert run_ranks(_toggle, ranks, make, timeout_s=60) == [(True, TOGGLING_STEPS // 2, changes)] * ranks


def _orders(rank: int) -> list[str]:
    found = []
    for defer in (False, True):
        pipeline = jobs.pipelined(rank, ScheduleInterleaved1F1B, stages_per_rank=2, defer_pp_recv=defer).pipeline
        try:
            pipelining.check_order(pipeline)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.skipif(
    "defer_pp_recv" not in inspect.signature(ScheduleInterleaved1F1B).parameters,
    reason="this torch cannot defer receives",
)
def test_an_interleaved_schedule_that_would_hang_is_refused() -> None:
    for in_time, deferred in run_ranks(_orders, 2):
        assert in_time == ""
        assert deferred.startswith("pipeline=ScheduleInterleaved1F1B would hang")
        assert "leave pipeline out" in deferred


def test_a_schedule_without_an_order_is_accepted_only_if_it_waits_for_each_batch_itself() -> None:
    class Plain(schedules.PipelineScheduleMulti):
        pass

    class OfItsOwn(schedules.PipelineScheduleMulti):
        def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
            pass

    plain, of_its_own = Plain.__new__(Plain), OfItsOwn.__new__(OfItsOwn)
    plain._stages = of_its_own._stages = []
    pipelining.check_order(plain)
    with pytest.raises(ValueError, match="pipeline=OfItsOwn is of a kind whose order is not known"):
        pipelining.check_order(of_its_own)


def _computing_streams(rank: int, make: Callable[..., Job], holder: Callable[[Any], Any], name: str) -> list[Any]:
    """How many streams that only compute are known before the first step, and whether FSDP's is the one after it."""
    training = Training(rank, make)
    with training.attach() as monitor:
        (streams,) = monitor._driver.gate.side_streams
        before = len([*streams])
        training.step()
        return [before, [stream is getattr(holder(training.job.models[0]), name) for stream in streams]]


def _state_of_fsdp2(model: Any) -> Any:
    return model._get_fsdp_state()._comm_ctx


def test_the_stream_on_which_fsdp2_copies_is_ordered_once_it_is_there() -> None:
    found = run_ranks(_computing_streams, 2, jobs.fsdp2, _state_of_fsdp2, "all_gather_copy_in_stream")
    assert found == [[0, [True]]] * 2


# -- nothing is left behind


def _attach_train_close(rank: int, make: Callable[..., Job], sequential: str) -> list[str]:
    training = Training(rank, make)
    for _ in range(3):
        training.step()
    before = belongings(training.job)
    monitor = training.attach(sequential=sequential, spread=False, every_n_steps=100, **TOGGLING)
    for _ in range(10):  # ends in the middle of the window, and after a sequential step
        training.step()
    monitor.close()
    after = belongings(training.job)
    training.step()
    return sorted(name for name in before.keys() | after.keys() if before.get(name, "-") != after.get(name, "-"))


@pytest.mark.parametrize(
    ("make", "sequential"),
    [
        (jobs.ddp, "gate"),
        (jobs.ddp, "native"),
        (jobs.ddp_with_switchable_hook, "native"),
        (jobs.fsdp2, "gate"),
        (jobs.fsdp2, "native"),
        (jobs.fsdp1, "native"),
        (jobs.tensor_parallel, "gate"),
        (jobs.one_f_one_b, "gate"),
        (jobs.interleaved, "gate"),
    ],
)
def test_model_optimizer_and_schedule_are_as_before_after_close(make: Callable[..., Job], sequential: str) -> None:
    assert run_ranks(_attach_train_close, 2, make, sequential) == [[], []]


@pytest.mark.parametrize("first_closed", [0, 1])
def test_of_two_monitors_the_last_to_close_puts_torchs_own_batches_back(first_closed: int) -> None:
    own = schedules._batch_p2p
    posted: list[str] = []

    class Monitor:
        def __init__(self, name: str) -> None:
            self.name = name

        def post(self, issue: Callable[[], Any], works_of: Callable[[Any], Any]) -> tuple[Any, Any]:
            posted.append(self.name)
            result = issue()
            return result, works_of(result)

    restores = [pipelining.wait_for_batches(Monitor(name)) for name in ("a", "b")]  # type: ignore[arg-type]
    assert schedules._batch_p2p([]) == []
    assert sorted(posted) == ["a", "b"]
    restores[first_closed]()
    posted.clear()
    assert schedules._batch_p2p([]) == []
    assert posted == [["b"], ["a"]][first_closed]
    restores[1 - first_closed]()
    assert schedules._batch_p2p is own
    pipelining.wait_for_batches(Monitor("c"))()  # type: ignore[arg-type]
    assert schedules._batch_p2p is own


# -- mistakes


def _mistakes(rank: int) -> dict[str, str]:
    ddp, plain = jobs.ddp(rank), torch.nn.Linear(2, 2)
    hooked, builtin = jobs.ddp(rank, jobs.fp16_compress_hook), jobs.ddp(rank)
    builtin.models[0]._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    calls: dict[str, dict[str, Any]] = {
        "unknown": {"sequential": "natif"},
        "not even a word": {"sequential": 3},
        "no model": {"sequential": "native"},
        "plain model": {"sequential": "native", "model": plain},
        "hook": {"sequential": "native", "model": hooked.models},
        "builtin hook": {"sequential": "native", "model": builtin.models},
    }
    found = {}
    for name, options in calls.items():
        with pytest.raises(ValueError, match="sequential") as raised:
            attach(ddp.optimizer, strict=True, **options)
        found[name] = str(raised.value)
        if name in ("unknown", "not even a word", "no model"):  # the same on all ranks
            with pytest.raises(ValueError, match="sequential"):
                attach(ddp.optimizer, **options)
            continue
        with captured_log() as lines:
            assert not attach(ddp.optimizer, **options).active  # costs the measuring, not the job
        assert len(lines) == (rank == 0)
        assert all(found[name] in line for line in lines)
    with attach(ddp.optimizer, strict=True):
        with pytest.raises(ValueError, match="optimizer") as raised:
            attach(ddp.optimizer, strict=True)
        found["twice"] = str(raised.value)
    attach(ddp.optimizer, strict=True).close()  # closed, it may be attached to again
    return found


def test_what_cannot_be_is_said_by_name_of_the_parameter() -> None:
    for found in run_ranks(_mistakes, 2):
        assert found["unknown"] == "sequential must be 'gate' or 'native', got 'natif' (a str)"
        assert found["not even a word"] == "sequential must be 'gate' or 'native', got 3 (a int)"
        assert "needs the model: attach(optimizer, model=model" in found["no model"]
        assert "DDP or FSDP in it, and this one has neither" in found["plain model"]
        assert "communication hook fp16_compress_hook" in found["hook"]
        assert "switchable(hook)" in found["hook"]
        assert "builtin communication hook" in found["builtin hook"]
        said = "optimizer is attached to already: use that monitor, which goes on, or overlap_callbacks.close() it "
        assert found["twice"] == f"{said}first"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, r"model must be a torch.nn.Module or a list of them, got 3 \(a int\)"),
        ({"model": ["net"]}, r"model must be a torch.nn.Module or a list of them, got 'net' \(a str\)"),
        ({"pipeline": "1F1B"}, r"pipeline must be a schedule of torch.distributed.pipelining, got '1F1B' \(a str\)"),
    ],
)
def test_wrong_types_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match=message):
        attach(optimizer, **options)


def test_attaching_before_there_is_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(RuntimeError, match=r"before torch.distributed.init_process_group"):
        attach(optimizer, strict=True)
    with captured_log() as lines:
        assert not attach(optimizer).active
    assert len(lines) == 1
