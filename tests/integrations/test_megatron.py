"""Megatron-core on Gloo, with the shims of ``megatron_shims``; Megatron-LM by a small tree that calls as it does."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks import Mode
from overlap_callbacks.gate.serialiser import CompletedWork
from overlap_callbacks.gate.step_log import StepLog
from overlap_callbacks.integrations.megatron import attach, hook_pretrain
from overlap_callbacks.report import record
from tests.distributed import captured_log, run_ranks
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import BATCH, SEQUENCE, VOCABULARY, Job, Setup, job
from tests.monitor.jobs import KeptReports, dispatch_table, kept_logs
from tests.wandb_reader import SETTINGS, read_run

Session = Callable[[str], list[Any]]

NUM_STEPS = 20
# One recorded step, then the mode changes at every step: 17 steps from step 2 on.
TOGGLING: dict[str, Any] = {"every_n_steps": 100, "first_step": 2, "blocks": "OS", "repeats": 8, "steps_per_block": 1}
TOGGLING |= {"warmup_steps": 0, "profiled_steps": 0, "max_overhead": None, "strict": True}

TWO_RANKS = {
    "dp": Setup(),
    "dp_distributed_optimizer": Setup(distributed_optimizer=True, overlap_param_gather=True),
    "tp": Setup(tp=2),
    "tp_sequence_parallel": Setup(tp=2, sequence_parallel=True),
    "pp": Setup(pp=2, micro_batches=4),
    "pp_interleaved": Setup(pp=2, chunks=2, micro_batches=4, overlap_p2p_comm=True),
    "ep": Setup(ep=2, moe=True),
}
FOUR_RANKS = {
    "tp_pp": Setup(tp=2, pp=2, micro_batches=2),
    "tp_dp": Setup(tp=2, sequence_parallel=True, distributed_optimizer=True, overlap_param_gather=True),
    "pp_interleaved_4_stages": Setup(pp=4, chunks=2, layers=8, micro_batches=8, overlap_p2p_comm=True),
}

# -- worked out by hand: (operator, dimension, ranks of the group) -> messages, bytes read, bytes written, of rank 0.

_HIDDEN, _LAYERS, _FLOAT = 32, 4, 4
_ACTIVATION = SEQUENCE * BATCH * _HIDDEN * _FLOAT
_TOKENS = SEQUENCE * BATCH * _FLOAT
# Two norms with bias; attention's projections of 3h and h, the MLP's of 4h and h, all with bias.
_LAYER = 2 * 2 * _HIDDEN + (3 + 1 + 4 + 4) * _HIDDEN**2 + (3 + 1 + 4 + 1) * _HIDDEN
# The word and position embeddings, the layers, the last norm; the output layer shares the word embedding.
_PARAMETERS = (VOCABULARY + SEQUENCE) * _HIDDEN + _LAYERS * _LAYER + 2 * _HIDDEN

# The maximum, the predicted logit and the sum of the loss, for each token; on one rank too.
_LOSS = (3, 3 * _TOKENS, 3 * _TOKENS)
_NORM = (1, _FLOAT, _FLOAT)

BYTES: dict[str, dict[tuple[str, str, int], tuple[int, int, int]]] = {
    "dp": {
        ("allreduce_coalesced_", "data", 2): (8, _FLOAT * _PARAMETERS, _FLOAT * _PARAMETERS),
        ("allreduce_", "tensor", 1): _LOSS,
        ("allreduce_", "model", 1): _NORM,
    },
    "tp": {
        # The embedding's output; in each layer attention's and the MLP's output, and their inputs' gradients; the
        # gradient of the output layer's input; the loss.
        ("allreduce_", "tensor", 2): (
            1 + 4 * _LAYERS + 1 + 3,
            (2 + 4 * _LAYERS) * _ACTIVATION + 3 * _TOKENS,
            (2 + 4 * _LAYERS) * _ACTIVATION + 3 * _TOKENS,
        ),
        ("allreduce_", "model", 2): _NORM,
    },
    "tp_sequence_parallel": {
        # In each layer two gathers forward, and backward two of gradients and two of inputs; for the output layer one
        # each of the input, forward and backward; one of the embedding's gradient.
        ("_allgather_base_", "tensor", 2): (
            6 * _LAYERS + 3,
            (6 * _LAYERS + 3) * _ACTIVATION // 2,
            (6 * _LAYERS + 3) * _ACTIVATION,
        ),
        ("_reduce_scatter_base_", "tensor", 2): (
            4 * _LAYERS + 1,
            (4 * _LAYERS + 1) * _ACTIVATION,
            (4 * _LAYERS + 1) * _ACTIVATION // 2,
        ),
        ("allreduce_", "model", 2): _NORM,
    },
    "pp": {
        ("send", "pipeline", 2): (4, 4 * _ACTIVATION, 0),
        ("recv_", "pipeline", 2): (4, 0, 4 * _ACTIVATION),
        ("allreduce_", "embedding", 2): (1, _FLOAT * VOCABULARY * _HIDDEN, _FLOAT * VOCABULARY * _HIDDEN),
        ("allreduce_", "model", 2): _NORM,
    },
}

# Messages alone, of rank 0. Buckets of gradients over one rank, as tensor and pipeline jobs have them, are sent too.
MESSAGES = {
    "dp": {"allreduce_coalesced_": 8, "allreduce_": 4},
    "dp_distributed_optimizer": {
        "reduce_scatter_tensor_coalesced_": 8,
        "allgather_into_tensor_coalesced_": 8,
        "allreduce_": 4,
    },
    "tp": {"allreduce_": 22, "allreduce_coalesced_": 5},
    "tp_sequence_parallel": {
        "_allgather_base_": 27,
        "_reduce_scatter_base_": 17,
        "allreduce_": 6,
        "allreduce_coalesced_": 5,
    },
    "pp": {"send": 4, "recv_": 4, "allreduce_": 2, "allreduce_coalesced_": 4},
    "pp_interleaved": {"send": 12, "recv_": 12, "allreduce_": 2, "allreduce_coalesced_": 3},
    "ep": {"alltoall_base_": 24, "_allgather_base_": 4, "allreduce_": 5, "allreduce_coalesced_": 11},
    # The first stage has no loss: per micro-batch the embedding's reduction and four of each of two layers.
    "tp_pp": {"allreduce_": 20, "send": 2, "recv_": 2, "allreduce_coalesced_": 3},
    "tp_dp": {
        "_allgather_base_": 27,
        "_reduce_scatter_base_": 17,
        "allreduce_": 6,
        "reduce_scatter_tensor_coalesced_": 5,
        "allgather_into_tensor_coalesced_": 5,
    },
}


def _messages(log: StepLog) -> dict[tuple[str, str, int], tuple[int, int, int]]:
    found: dict[tuple[str, str, int], tuple[int, int, int]] = {}
    for c in log.collectives:
        key = (c.operator, c.group.dimension, len(c.group.ranks))
        messages, bytes_in, bytes_out = found.get(key, (0, 0, 0))
        found[key] = (messages + 1, bytes_in + c.bytes_in, bytes_out + c.bytes_out)
    return found


def _absent(setup: Setup, steps: int = NUM_STEPS) -> str:
    with job(setup) as training:
        for _ in range(steps):
            training.step()
        return training.digest()


def _attached(setup: Setup, force: bool = False, steps: int = NUM_STEPS, **options: Any) -> dict[str, Any]:
    """Train with the library; what it did."""
    sink, modes, waits = KeptReports(), [], Counter()
    wait = CompletedWork.wait

    def counted_wait(work: CompletedWork, timeout: Any = None) -> bool:
        waits["done"] += 1
        return wait(work, timeout)

    with job(setup) as training, kept_logs() as logs:
        CompletedWork.wait = counted_wait
        monitor = attach(training.model, training.optimizer, sinks=[sink], **{**TOGGLING, **options})
        if force:
            monitor.force(Mode.SEQUENTIAL)
        for _ in range(steps):
            modes.append(monitor.mode)
            training.step()
        monitor.close()
        CompletedWork.wait = wait
        return {
            "digest": training.digest(),
            "modes": modes,
            "reports": sink.facts(),
            "dimensions": {(c.operator, c.dimension) for r in sink.reports for c in r.collectives},
            "messages": [_messages(log) for log in logs],
            "left_out": [str(log.divergence) for log in logs if log.divergence is not None],
            "waited_for": sum(c.start is not None for log in logs for c in log.collectives),
            "done_works": waits["done"],
        }


def _train_all_ways(rank: int, names: list[str]) -> dict[str, Any]:
    megatron_shims.install()
    found = {}
    for name in names:
        setup = {**TWO_RANKS, **FOUR_RANKS}[name]
        found[name] = {"absent": _absent(setup), "toggled": _attached(setup), "forced": _attached(setup, force=True)}
    return found


@pytest.fixture(scope="module")
def trained() -> Callable[[str], list[dict[str, Any]]]:
    """What each rank found of a setup; all setups of as many ranks are trained in one go, since Megatron loads long."""
    ranks: dict[int, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        setups, size = (TWO_RANKS, 2) if name in TWO_RANKS else (FOUR_RANKS, 4)
        if size not in ranks:
            ranks[size] = run_ranks(_train_all_ways, size, list(setups), timeout_s=200)
        return [found[name] for found in ranks[size]]

    return of


def _run_parts(rank: int, folder: str) -> dict[str, tuple[Any, str]]:
    megatron_shims.install()
    found: dict[str, tuple[Any, str]] = {}
    for name, part in PARTS.items():
        try:
            found[name] = (part(folder), "")
        except BaseException:
            found[name] = (None, traceback.format_exc())
    return found


@pytest.fixture(scope="module")
def parts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def parts(parts_folder: Path) -> Session:
    """What the ranks found in one of the ``PARTS``, which share their processes."""
    ranks = run_ranks(_run_parts, 2, str(parts_folder), timeout_s=120)

    def of(name: str) -> list[Any]:
        for rank, found in enumerate(ranks):
            assert not found[name][1], f"rank {rank}: {found[name][1]}"
        return [found[name][0] for found in ranks]

    return of


@pytest.mark.parametrize("name", [*TWO_RANKS, *FOUR_RANKS])
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


@pytest.mark.parametrize("name", MESSAGES)
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


@pytest.mark.parametrize("name", BYTES)
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
        ("tp", {"data", "tensor", "model"}),
        ("pp", {"data", "pipeline", "embedding", "model"}),
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
    for rank in trained("pp"):
        assert rank["forced"]["done_works"] == 0  # 1F1B waits itself


def _toggle_long(rank: int, names: list[str]) -> dict[str, tuple[int, int]]:
    megatron_shims.install()
    found = {}
    for name in names:
        setup = {**TWO_RANKS, **FOUR_RANKS}[name]
        layers = setup.layers if setup.pp > 1 else 2  # every kind of collective is in each layer
        setup = dataclasses.replace(setup, micro_batches=min(2, setup.micro_batches), layers=layers)
        seen = _attached(setup, steps=205, repeats=100, every_n_steps=1000)
        found[name] = (seen["modes"].count(Mode.SEQUENTIAL), len(seen["left_out"]))
    return found


@pytest.mark.parametrize(("size", "names"), [(2, list(TWO_RANKS)), (4, ["tp_pp"])])
def test_nothing_hangs_in_200_toggling_steps(size: int, names: list[str]) -> None:
    for rank in run_ranks(_toggle_long, size, names, timeout_s=240):
        assert rank == dict.fromkeys(names, (100, 0))


def _measure(rank: int, folder: str) -> None:
    megatron_shims.install()
    setup = Setup(hidden=128, bucket=200_000)
    options = {"every_n_steps": 100, "first_step": 4, "repeats": 2, "steps_per_block": 1, "profiled_steps": 4}
    with (
        job(setup) as training,
        attach(training.model, training.optimizer, **options, run_dir=folder, strict=True, max_overhead=None),
    ):
        for _ in range(40):
            training.step()


def test_in_sequential_steps_of_data_parallelism_no_compute_runs_beside_communication(tmp_path: Path) -> None:
    run_ranks(_measure, 2, str(tmp_path))
    (run,) = record.read(tmp_path).runs
    assert run.framework.startswith("megatron-core 0.")
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


def _flush(folder: str) -> tuple[bool, dict[str, Any]]:
    # Stages then wait for what they post last in another order than their neighbours post it; in a sequential step
    # they wait batch by batch.
    setup = dataclasses.replace(TWO_RANKS["pp_interleaved"], config=(("overlap_p2p_comm_warmup_flush", True),))
    absent = _absent(setup)
    attached = _attached(setup)
    return attached["digest"] == absent, attached


def test_the_schedule_that_flushes_its_warm_up_is_serialised_batch_by_batch(parts: Session) -> None:
    for identical, attached in parts("flush"):
        assert identical
        assert attached["modes"].count(Mode.SEQUENTIAL) > 5
        assert attached["left_out"] == []


# -- the native form

NATIVE_TWO_RANKS = {
    "dp": Setup(),
    "dp_accumulating": Setup(micro_batches=3),
    "dp_distributed_optimizer": Setup(distributed_optimizer=True, overlap_param_gather=True, align=True),
    "pp_interleaved": TWO_RANKS["pp_interleaved"],
}
# Stages that reduce together: here the flag alone, without the function beside it, would reduce twice and say nothing.
NATIVE_FOUR_RANKS = {
    "pp_dp": Setup(pp=2, micro_batches=4, distributed_optimizer=True, overlap_param_gather=True, align=True),
    "pp_interleaved_dp": Setup(
        pp=2,
        chunks=2,
        micro_batches=4,
        distributed_optimizer=True,
        overlap_param_gather=True,
        overlap_p2p_comm=True,
        align=True,
    ),
}


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
        absent = _absent(setup)
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
        forced = _attached(setup, force=True, sequential="native")
        found[name] = {
            "digests": {absent, digest, forced["digest"]},
            "modes": modes,
            "forced_modes": forced["modes"],
            "seen": watch.seen,
            "gate_waited": sum(c.start is not None for log in logs for c in log.collectives) + forced["waited_for"],
            "complete": [report["complete"] for report in sink.facts()],
        }
    return found


@pytest.mark.parametrize(("setups", "size"), [(NATIVE_TWO_RANKS, 2), (NATIVE_FOUR_RANKS, 4)])
def test_the_native_form_leaves_weights_bit_identical_and_nothing_in_flight(
    setups: dict[str, Setup], size: int
) -> None:
    ranks = run_ranks(_train_natively, size, list(setups), timeout_s=200)
    for name, setup in setups.items():
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


# name -> setup, sequential, attached by hand, what the refusal says
REFUSED: dict[str, tuple[Setup, str, bool, str]] = {
    "unknown": (Setup(), "both", False, "sequential must be 'gate' or 'native', got 'both' (a str)"),
    "tp": (TWO_RANKS["tp"], "native", False, "tensor_model_parallel_size=2"),
    "ep": (TWO_RANKS["ep"], "native", False, "expert_model_parallel_size=2"),
    "average": (Setup(ddp=(("average_in_collective", True),)), "native", False, "average_in_collective=True"),
    "no_overlap": (Setup(overlap_grad_reduce=False), "native", False, "built without overlap"),
    "by_hand": (TWO_RANKS["dp_distributed_optimizer"], "native", True, "needs the optimizer"),
}


def _refuse(folder: str) -> dict[str, Any]:
    found = {}
    for name, (setup, sequential, by_hand, _) in REFUSED.items():
        with job(setup) as training, captured_log() as lines:
            optimizer = None if by_hand else training.optimizer
            with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is looked at outside
                attach(training.model, optimizer, sequential=sequential, strict=True)
            monitor = attach(training.model, optimizer, sequential=sequential)
            training.step()
            found[name] = (str(error.value), list(lines), monitor.active, "step" in vars(training.optimizer))
    with job(Setup()) as training:
        bare = [chunk.module for chunk in training.model]
        with pytest.raises(ValueError, match="in Megatron-core's DistributedDataParallel"):
            attach(bare, training.optimizer, sequential="native", strict=True)
    return found


def test_the_native_form_is_refused_where_it_is_not_proven_and_training_goes_on_unmeasured(parts: Session) -> None:
    for rank in parts("refuse"):
        for name, (_, _, _, said) in REFUSED.items():
            message, lines, active, wrapped = rank[name]
            assert said in message
            (line,) = lines
            assert message in line
            assert not active
            assert not wrapped


def _switch_off_behind_its_back(folder: str) -> None:
    with job(Setup()) as training:
        monitor = attach(training.model, training.optimizer, sequential="native", sinks=[], **TOGGLING)
        for _ in range(3):
            training.step()
        training.model[0].ddp_config.overlap_grad_reduce = False
        with pytest.raises(RuntimeError, match="overlap_grad_reduce was switched off by somebody else"):
            training.step()  # at whose end a sequential step begins
        assert not monitor.active
        assert training.model[0].ddp_config.overlap_grad_reduce is False
        monitor.close()


def test_a_switch_that_somebody_else_has_turned_is_left_alone(parts: Session) -> None:
    parts("switch")


# -- what is left behind, and errors


def _state(training: Job) -> dict[str, Any]:
    """Everything that attaching may touch."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    configs = {"config": training.config, "ddp": training.model[0].ddp_config}
    return {
        "communicator": dict(vars(P2PCommunicator)),
        "optimizer": sorted(vars(training.optimizer)),
        "step": training.optimizer.step,
        **{name: {f.name: getattr(c, f.name) for f in dataclasses.fields(c)} for name, c in configs.items()},
        "hooks": [
            (name, key, list(value))
            for chunk in training.model
            for name, module in chunk.named_modules()
            for key, value in sorted(vars(module).items())
            if "hooks" in key
        ],
        "attributes": [sorted(vars(module)) for chunk in training.model for module in chunk.modules()],
    }


def _look_before_and_after(folder: str) -> list[str]:
    different = []
    for name, sequential in (
        ("dp_distributed_optimizer", "gate"),
        ("dp_distributed_optimizer", "native"),
        ("pp_interleaved", "native"),
    ):
        with job({**TWO_RANKS, **NATIVE_TWO_RANKS}[name]) as training:
            for _ in range(2):
                training.step()
            table, before = dispatch_table(), _state(training)
            monitor = attach(training.model, training.optimizer, sequential=sequential, sinks=[], **TOGGLING)
            assert "step" in vars(training.optimizer)
            for _ in range(4):  # ends in the middle of a window, with the next step to be sequential
                training.step()
            assert monitor.mode is Mode.SEQUENTIAL
            monitor.close()
            after = _state(training)
            different += [f"{name} {sequential} {key}" for key in before if before[key] != after[key]]
            assert dispatch_table() == table
            training.step()
    return different


def test_everything_is_as_before_after_close_even_in_the_middle_of_a_sequential_step(parts: Session) -> None:
    assert parts("state") == [[], []]


def _misuse(folder: str) -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"optimizer must be Megatron's, of get_megatron_optimizer\(\), got a SGD"):
        attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for wrong in (None, [], [model, "chunk"]):
        with pytest.raises(TypeError, match="model_chunks must be a module or a list of modules"):
            attach(wrong, None)
    with pytest.raises(RuntimeError, match=r"call initialize_model_parallel\(\) first"):
        attach(model, None, strict=True)
    with captured_log() as lines:
        assert not attach(model, None).active
    assert len(lines) == 1
    with job(Setup()) as training:
        with pytest.raises(TypeError, match=r"unknown options \['every_step'\]"):
            attach(training.model, training.optimizer, every_step=3)
        with pytest.raises(ValueError, match="start_step must be"):
            attach(training.model, training.optimizer, start_step=-1, strict=True)
        with attach(training.model, training.optimizer, sinks=[]):
            with pytest.raises(RuntimeError, match=r"has a monitor already, of attach\(\)"):
                attach(training.model, training.optimizer, strict=True)
            with pytest.raises(RuntimeError, match=r"has a monitor already, of attach\(\)"):
                hook_pretrain(strict=True)
            with captured_log() as lines:
                assert not attach(training.model, training.optimizer).active
                hook_pretrain()
            assert len(lines) == 2
        attach(training.model, training.optimizer, sinks=[]).close()

        with pytest.raises(ImportError, match=r"hook_pretrain needs Megatron-LM, with megatron\.training\.training"):
            hook_pretrain()
        communicator = p2p_communication.P2PCommunicator
        del p2p_communication.P2PCommunicator
        with pytest.raises(
            ImportError, match=r"megatron-core 0\.\S+ lacks .*P2PCommunicator.*known to work: 0\.14\.0, "
        ):
            attach(training.model, training.optimizer)
        p2p_communication.P2PCommunicator = communicator
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "megatron"}
    sys.modules["megatron"] = None  # type: ignore[assignment]
    with pytest.raises(ImportError, match=r"pip install 'overlap-callbacks\[megatron\]'"):
        attach(model, None)
    sys.modules.update(hidden)


def test_misuse_and_missing_packages_are_told_clearly(parts: Session) -> None:
    parts("misuse")


# -- steps


def _overflow(folder: str) -> tuple[str, str, Any]:
    def train(training: Job) -> str:
        for step in range(NUM_STEPS):
            training.forward_backward(step)
            if step == 8:
                training.model[0].buffers[0].grad_data.fill_(float("inf"))
            succeeded, _, _ = training.optimizer.step()
            assert succeeded is (step != 8)
        return training.digest()

    setup = Setup(fp16=16.0)
    with job(setup) as training:
        absent = train(training)
    with job(setup) as training:
        with attach(training.model, training.optimizer, **TOGGLING, run_dir=folder):
            attached = train(training)
        (window,) = record.read(folder).windows if dist.get_rank() == 0 else (None,)
        found = None if window is None else (window.complete, [block.block for block in window.samples[0].timed])
        return absent, attached, found


def test_a_step_that_the_optimizer_skips_does_not_count_and_leaves_the_window_whole(parts: Session) -> None:
    for absent, attached, _ in parts("overflow"):
        assert absent == attached
    complete, blocks = parts("overflow")[0][2]
    assert complete
    assert blocks == [0, 1, 2, 3, 4, *range(6, 16)]  # step 8 is the sixth of the timed ones


def _by_hand(folder: str) -> tuple[list[Mode], bool]:
    absent, modes = _absent(TWO_RANKS["pp_interleaved"]), []
    with job(TWO_RANKS["pp_interleaved"]) as training:
        own = training.optimizer.step
        with attach(training.model, None, sinks=[], **TOGGLING) as monitor:
            for _ in range(NUM_STEPS):
                with monitor.step():
                    modes.append(monitor.mode)
                    training.step()
            assert training.optimizer.step == own
        return modes, training.digest() == absent


def test_steps_may_be_marked_by_hand(parts: Session) -> None:
    for modes, identical in parts("by_hand"):
        assert modes[3:19] == [Mode.OVERLAPPED, Mode.SEQUENTIAL] * 8
        assert identical


# -- Megatron-LM, by a tree of modules that calls train_step as its own does


def _megatron_lm(training: Job, writer: Any, fail_at: int = -1) -> ModuleType:
    """``megatron.training.training`` with what matters of ``pretrain``, ``train`` and ``train_step``."""
    module = ModuleType("megatron.training.training")
    gathers = training.setup.overlap_param_gather

    def train_step(forward_step_func, data_iterator, model, optimizer, scheduler, config, forward_backward, iteration):
        assert model is training.model
        if iteration == fail_at:
            raise ZeroDivisionError("in train_step")
        succeeded, norm, zeros = training.step()
        return {}, int(not succeeded), False, False, 0, norm, zeros

    def train(model, optimizer, iterations):
        # As there: in the first step no hooks, so that errors in loading do not spread.
        param_sync_func, training.config.param_sync_func = training.config.param_sync_func, None
        if gathers:
            model[0].disable_forward_pre_hook(param_sync=False)
        for iteration in range(iterations):
            step = module.train_step  # a global there, looked up in each iteration
            step(None, None, model, optimizer, None, training.config, None, iteration=iteration)
            if iteration == 0:
                training.config.param_sync_func = param_sync_func
                if gathers:
                    model[0].enable_forward_pre_hook()
            if writer is not None:
                writer.log({"loss": 1.0}, iteration + 1)
            if iteration == 9 and gathers:  # an evaluation
                model[0].disable_forward_pre_hook()
                model[0].enable_forward_pre_hook()
        if fail_at > iterations:
            sys.exit(3)
        return iterations

    def pretrain(iterations):
        done = module.train(training.model, training.optimizer, iterations)
        dist.all_reduce(torch.ones(1))  # an evaluation at the end
        return done

    arguments = SimpleNamespace(seq_length=SEQUENCE, global_batch_size=2 * BATCH, rampup_batch_size=None)
    module.__dict__.update(train_step=train_step, train=train, pretrain=pretrain, get_wandb_writer=lambda: writer)
    module.__dict__.update(get_args=lambda: arguments)
    parent = ModuleType("megatron.training")
    parent.training = module  # type: ignore[attr-defined]
    sys.modules.update({"megatron.training": parent, module.__name__: module})
    return module


def _pretrain(folder: str) -> dict[str, Any]:
    import wandb

    setup = NATIVE_TWO_RANKS["dp_distributed_optimizer"]
    absent = _absent(setup)
    writer = None
    if dist.get_rank() == dist.get_world_size() - 1:
        wandb.init(project="test", dir=folder, settings=wandb.Settings(**SETTINGS))
        writer = wandb
    digests = []
    for sequential in ("gate", "native"):
        with job(setup) as training:
            lm = _megatron_lm(training, writer if sequential == "native" else None)
            own = dict(vars(lm))
            hook_pretrain(sequential=sequential, run_dir=str(Path(folder, sequential)), **TOGGLING)
            assert lm.train is not own["train"]
            with pytest.raises(RuntimeError, match=r"has a monitor already, of hook_pretrain\(\)"):
                hook_pretrain(strict=True)
            before = _state(training)
            assert lm.pretrain(NUM_STEPS) == NUM_STEPS
            assert dict(vars(lm)) == own
            after = _state(training)
            digests.append(training.digest())
            for key in ("communicator", "step", "config", "ddp"):
                assert before[key] == after[key], key
            if writer is not None and sequential == "native":
                wandb.finish()
    return {"identical": set(digests) == {absent}}


def test_pretrain_is_measured_and_logged_to_the_run_on_the_last_rank(parts: Session, parts_folder: Path) -> None:
    assert parts("pretrain") == [{"identical": True}] * 2
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


def _pretrain_badly(folder: str) -> list[str]:
    found = []
    for fail_at, error in ((4, ZeroDivisionError), (1000, SystemExit)):
        with job(Setup()) as training:
            lm = _megatron_lm(training, None, fail_at)
            own = dict(vars(lm))
            hook_pretrain(sinks=[], **TOGGLING)
            with pytest.raises(error):
                lm.pretrain(6)
            assert dict(vars(lm)) == own
    with job(TWO_RANKS["tp"]) as training, captured_log() as lines:
        lm = _megatron_lm(training, None)
        hook_pretrain(sequential="native")
        assert lm.pretrain(3) == 3
        found += lines
    for name in ("megatron.training", "megatron.training.training"):
        del sys.modules[name]
    return found


def _pretrain_without_inbox(folder: str) -> dict[str, Any]:
    def no_arguments() -> Any:
        raise AssertionError("args is not initialized.")  # so says Megatron

    def no_writer() -> Any:
        raise AttributeError("no writer")

    with job(Setup()) as training, captured_log() as lines:
        lm = _megatron_lm(training, None)
        lm.get_args = no_arguments
        if dist.get_rank() == 1:
            lm.get_wandb_writer = no_writer
        before, own = _state(training), dict(vars(lm))
        hook_pretrain(run_dir=str(Path(folder, "without_inbox")), **{**TOGGLING, "strict": False})
        lm.pretrain(NUM_STEPS)
        after, left = _state(training), dict(vars(lm))
        hook_pretrain(sinks=[], **{**TOGGLING, "strict": True})
        lm.get_wandb_writer = no_writer  # on both ranks
        with pytest.raises(AttributeError, match="no writer"):
            lm.pretrain(1)
        after_strict = _state(training)
    for name in ("megatron.training", "megatron.training.training"):
        del sys.modules[name]
    restored = {key: before[key] == after[key] == after_strict[key] for key in ("communicator", "step")}
    return {"lines": lines, "restored": restored, "own": left == own}


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
    for lines in parts("pretrain_badly"):
        (line,) = lines
        assert "measuring is switched off, training goes on" in line
        assert "tensor_model_parallel_size=2" in line


PARTS: dict[str, Callable[[str], Any]] = {
    "flush": _flush,
    "refuse": _refuse,
    "switch": _switch_off_behind_its_back,
    "state": _look_before_and_after,
    "overflow": _overflow,
    "by_hand": _by_hand,
    "pretrain": _pretrain,
    "pretrain_badly": _pretrain_badly,
    "pretrain_without_inbox": _pretrain_without_inbox,
    "misuse": _misuse,
}
