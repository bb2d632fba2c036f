"""Names of collectives: those of a recorded step are what each framework itself says that it issued, in order."""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks.gate.collectives import SENDS, Collective
from overlap_callbacks.gate.names import StepNames, plain, span
from tests.distributed import run_ranks
from tests.integrations import megatron_jobs, megatron_shims
from tests.integrations import parallel_jobs as jobs
from tests.integrations.parallel_jobs import Job, Training
from tests.monitor.jobs import KeptReports, kept_logs, tiny_schedule

RANKS_LOAD = ("tests.integrations.deepspeed_jobs", *megatron_jobs.LOADS)
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron is not installed")

# The window's recorded step, of which the first step of the log is.
RECORDED, NUM_STEPS = 4, 12
OPTIONS: dict[str, Any] = {"schedule": tiny_schedule(first_step=RECORDED), "max_overhead": None, "strict": True}

# What a framework says of a step, in its own words.
Said = list[str]


def names_of(collectives: tuple[Collective, ...]) -> Said:
    return [f"{'send' if c.operator in SENDS else c.operator.strip('_')}: {c.name}" for c in collectives]


def in_torch(rank: int, make: Callable[..., Job], watch: Callable[[Job], Any]) -> tuple[Said, Said, bool]:
    """The names of a recorded step, what the framework says of it, and whether weights are as without the library."""
    alone = Training(rank, make)
    for _ in range(NUM_STEPS):
        alone.step()
    training = Training(rank, make)
    with kept_logs() as logs, training.attach(**OPTIONS):
        for _ in range(RECORDED):
            training.step()
        with watch(training.job) as said:
            training.step()
        for _ in range(RECORDED + 1, NUM_STEPS):
            training.step()
    return names_of(logs[0].collectives), said, alone.digest() == training.digest()


# -- DDP: a hook is told each bucket's number and parameters


def ddp_with_hook(rank: int, **options: Any) -> Job:
    model = DistributedDataParallel(jobs.layers(6), bucket_cap_mb=0.002, **options)

    def latest(state: Any, bucket: Any) -> Any:
        return HOOK[0](state, bucket)

    latest.__annotations__ = {}  # torch insists on its own types
    model.register_comm_hook(None, latest)
    return Job([model], jobs.backward_of(model), data_rank=rank)


def ddp_with_unused(rank: int) -> Job:
    """A reducer that keeps its first buckets."""
    return ddp_with_hook(rank, find_unused_parameters=True)


HOOK: list[Any] = [allreduce_hook]


@contextlib.contextmanager
def told_to_hook(job: Job) -> Iterator[Said]:
    names = {id(parameter): name for name, parameter in job.models[0].module.named_parameters()}  # type: ignore[union-attr]
    said: Said = []

    def hook(state: Any, bucket: Any) -> Any:
        own = [names[id(parameter)] for parameter in bucket.parameters()]
        said.append(f"allreduce: bucket {bucket.index()}: {' … '.join(dict.fromkeys([own[0], own[-1]]))}")
        return allreduce_hook(state, bucket)

    HOOK[0] = hook
    try:
        yield said
    finally:
        HOOK[0] = allreduce_hook


# -- FSDP2: its ranges in profiles


@contextlib.contextmanager
def ranges(_: Job) -> Iterator[Said]:
    said: Said = []
    record = _fsdp_param_group.record_function

    def heard(label: str) -> Any:
        for operator, prefix in OPERATORS.items():
            if label.startswith(f"{prefix} (") or label == prefix:
                said.append(f"{operator}: {label.removeprefix(prefix).strip(' ()') or 'root'}")
        return record(label)

    with mock.patch.object(_fsdp_param_group, "record_function", heard):
        yield said


OPERATORS = {"allgather_base": "FSDP::all_gather", "reduce_scatter_base": "FSDP::post_backward_reduce"}


# -- FSDP1: the modules that it has wrapped


@contextlib.contextmanager
def handles(job: Job) -> Iterator[Said]:
    from torch.distributed.fsdp import _flat_param, _runtime_utils

    fsdp = [(plain(name), m) for name, m in job.models[0].named_modules() if isinstance(m, FullyShardedDataParallel)]
    names = {id(module._handle): name for name, module in fsdp if module._handle is not None}
    said: Said = []
    gather, reduce = _flat_param.FlatParamHandle._all_gather_flat_param, _runtime_utils._reduce_grad

    def gathered(handle: Any, *args: Any) -> Any:
        said.append(f"allgather: {names[id(handle)] or 'root'}")
        return gather(handle, *args)

    def reduced(state: Any, handle: Any) -> Any:
        said.append(f"reduce_scatter_base: {names[id(handle)] or 'root'}")
        return reduce(state, handle)

    with (
        mock.patch.object(_flat_param.FlatParamHandle, "_all_gather_flat_param", gathered),
        mock.patch.object(_runtime_utils, "_reduce_grad", reduced),
    ):
        yield said


# -- pipelines: a stage is asked for the messages of each micro-batch


@contextlib.contextmanager
def asked_of_stages(_: Job) -> Iterator[Said]:
    said: Said = []
    words = {"fwd": "forward", "bwd": "backward", "send": "send", "recv": "receive"}

    def listening(name: str) -> Any:
        inner = getattr(PipelineStage, name)
        _, direction, side, _ = name.split("_")

        def ask(stage: Any, micro_batch: int) -> Any:
            operations = inner(stage, micro_batch)
            kind = f"{words[direction]} {words[side]}"
            operator = "send" if side == "send" else "recv"
            said.extend(
                [f"{operator}: stage {stage.stage_index}, {kind} of micro-batch {micro_batch}"] * len(operations)
            )
            return operations

        return mock.patch.object(PipelineStage, name, ask)

    with contextlib.ExitStack() as patches:
        for name in ("get_fwd_send_ops", "get_bwd_send_ops", "get_fwd_recv_ops", "get_bwd_recv_ops"):
            patches.enter_context(listening(name))
        yield said


CASES: dict[str, tuple[Callable[..., Job], Callable[[Job], Any], int]] = {
    "ddp": (ddp_with_hook, told_to_hook, 3),
    "ddp_with_unused": (ddp_with_unused, told_to_hook, 3),
    "fsdp2": (jobs.fsdp2, ranges, 9),
    "fsdp1": (jobs.fsdp1, handles, 9),
    "gpipe": (jobs.gpipe, asked_of_stages, 8),
    "1f1b": (jobs.one_f_one_b, asked_of_stages, 8),
    "interleaved": (jobs.interleaved, asked_of_stages, 24),
}
# A schedule asks for some messages before it posts those of the other direction.
ANY_ORDER = ("1f1b", "interleaved")


def _torch(rank: int, case: str) -> tuple[Said, Said, bool]:
    make, watch, _ = CASES[case]
    return in_torch(rank, make, watch)


@pytest.mark.parametrize("case", CASES)
def test_names_are_those_that_torch_tells(case: str) -> None:
    for names, said, same in run_ranks(_torch, 2, case):
        if case == "ddp_with_unused":
            assert names.pop() == "allreduce: "  # which parameters were used
        if case in ANY_ORDER:
            names, said = sorted(names), sorted(said)  # noqa: PLW2901
        assert names == said
        assert len(said) >= CASES[case][2] - 8 * (case == "interleaved")
        assert same


# -- tensor parallel: the module that runs


def _tensor_parallel(rank: int) -> tuple[Said, bool, bool]:
    """Names, whether modules were watched around the recorded step or at the end, and whether weights are the same."""
    alone = Training(rank, jobs.tensor_parallel)
    for _ in range(NUM_STEPS):
        alone.step()
    training, hooks = Training(rank, jobs.tensor_parallel), torch.nn.modules.module
    watched = []
    training.job.models[0].register_forward_hook(lambda *_: watched.append(bool(hooks._global_forward_hooks)))
    with kept_logs() as logs, training.attach(**OPTIONS):
        for _ in range(NUM_STEPS):
            training.step()
    around = [*watched[:RECORDED], *watched[RECORDED + 1 : RECORDED + 4], bool(hooks._global_forward_pre_hooks)]
    return [c.name for c in logs[0].collectives], any(around), alone.digest() == training.digest()


def test_a_collective_of_a_forward_or_backward_pass_has_its_modules_name() -> None:
    # The layers that split by rows sum their outputs; a layer that splits by columns, its input's gradients. The first
    # layer's input has none.
    assert run_ranks(_tensor_parallel, 2) == [(["2", "6", "4"], False, True)] * 2


# -- ZeRO


def _zero(rank: int, stage: int) -> tuple[Said, Said, bool]:
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinators
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from deepspeed.utils import debug

    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs

    deepspeed_jobs.set_up(rank)
    settings = deepspeed_jobs.config(stage, micro_batches=2)
    alone = deepspeed_jobs.Training(rank, settings)
    for _ in range(NUM_STEPS):
        alone.step()
    training = deepspeed_jobs.Training(rank, settings)
    debug.debug_extract_module_and_param_names(training.engine.module)
    said: Said = []

    def listen(owner: Any, method: str, parameters_of: Callable[..., list[Any]], kind: str) -> None:
        inner = getattr(owner, method)

        def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = [debug.debug_param2name(parameter) for parameter in parameters_of(self, *args)]
            if own and patched.get("on"):
                said.append(f"{kind}: {' … '.join(dict.fromkeys([own[0], own[-1]]))}")
            return inner(self, *args, **kwargs)

        patches.append(mock.patch.object(owner, method, heard))

    patches: list[Any] = []
    patched: dict[str, bool] = {}
    if stage == 2:
        listen(
            stage_1_and_2.DeepSpeedZeroOptimizer, "reduce_ipg_grads",
            lambda self, dtype=None: [
                self.bit16_groups[group][place]
                for bucket in self.ipg_buckets.values()
                for group, place, *_ in bucket.params
            ],
            "bucket",
        )  # fmt: skip
    else:
        listen(
            stage3.DeepSpeedZeroOptimizer_Stage3, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
            lambda self, dtype: self.ipg_buckets[dtype].params, "bucket",
        )  # fmt: skip
        listen(
            coordinators.PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__all_gather_params_",
            # A set, whose order differs between ranks; DeepSpeed gathers by number.
            lambda self, parameters, *_: sorted(
                [p for p in parameters if p.ds_status.name == "NOT_AVAILABLE"], key=lambda p: p.ds_id
            ), "gather",
        )  # fmt: skip
    with contextlib.ExitStack() as stack, kept_logs() as logs, attach(training.engine, sinks=[], **OPTIONS):
        for patch in patches:
            stack.enter_context(patch)
        for step in range(NUM_STEPS):
            patched["on"] = step == RECORDED
            training.step()
    found = []
    for call in logs[0].collectives:
        kind, colon, text = call.name.partition(": ")
        if stage == 2 and kind.startswith("group"):
            continue  # the gather after the step, which has a test of its own
        found.append(f"bucket: {text}" if colon and kind.startswith("bucket") else f"gather: {call.name}")
    # A bucket is several collectives, one for the part of each rank; others (a norm, an overflow) have no name.
    in_order = [
        name for name, before in zip(found, ["", *found], strict=False) if name != before or name.startswith("gather")
    ]
    return [name for name in in_order if name != "gather: "], said, alone.digest() == training.digest()


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_names_are_those_of_zero(stage: int) -> None:
    of_ranks = run_ranks(_zero, 2, stage)
    assert of_ranks[0] == of_ranks[1]  # waiting is compared by name
    for names, said, same in of_ranks:
        assert names == said
        assert len(said) >= (4 if stage == 2 else 12)
        assert same


# -- DeepSpeed's gather of parameters after a step, and its pipeline


def _deepspeed(rank: int, stage: int, stages: int) -> Said:
    from overlap_callbacks.integrations.deepspeed import attach
    from tests.integrations import deepspeed_jobs

    deepspeed_jobs.set_up(rank)
    training = deepspeed_jobs.Training(rank, deepspeed_jobs.config(stage, micro_batches=2), stages)
    with kept_logs() as logs, attach(training.engine, sinks=[], **OPTIONS):
        for _ in range(NUM_STEPS):
            training.step()
    return [name for name in names_of(logs[0].collectives) if name.split(":")[0] in ("send", "recv", "allgather_base")]


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_zeros_gather_after_a_step_is_of_its_group_of_parameters(stage: int) -> None:
    assert run_ranks(_deepspeed, 2, stage, 0) == [["allgather_base: group 0: 0.weight … 6.weight"]] * 2


def messages(micro_batches: int) -> list[Said]:
    """Those of two stages, sorted."""
    kinds = (("recv: stage 0, backward receive", "send: stage 0, forward send"),
             ("recv: stage 1, forward receive", "send: stage 1, backward send"))  # fmt: skip
    return [[f"{one} of micro-batch {n}" for one in of_stage for n in range(micro_batches)] for of_stage in kinds]


@needs_deepspeed
def test_messages_of_deepspeeds_pipeline_tell_stage_and_micro_batch() -> None:
    assert [sorted(names) for names in run_ranks(_deepspeed, 2, 0, 2)] == messages(2)


# -- Megatron


def _megatron(rank: int, case: str) -> tuple[Said, Said, bool]:
    megatron_shims.install()
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from overlap_callbacks.integrations.megatron import attach

    setup = megatron_jobs.TWO_RANKS[case]
    alone = megatron_jobs.train_absent(setup, NUM_STEPS)
    said: Said = []
    with megatron_jobs.job(setup) as training:
        names = {id(p): name for chunk in training.model for name, p in chunk.module.named_parameters()}
        on = [False]

        def listening(method: str) -> Any:
            inner = getattr(_ParamAndGradBucketGroup, method)

            def heard(group: Any, *args: Any, **kwargs: Any) -> Any:
                own = [names[id(p)] for bucket in group.buckets for p in bucket.params_list]
                before = group.grad_reduce_handle, group.param_gather_handle
                result = inner(group, *args, **kwargs)
                if on[0] and before != (group.grad_reduce_handle, group.param_gather_handle):
                    number = group.buckets[0].bucket_id
                    said.append(f"bucket {number}: {' … '.join(dict.fromkeys([own[0], own[-1]]))}"[:120])
                return result

            return mock.patch.object(_ParamAndGradBucketGroup, method, heard)

        with (
            kept_logs() as logs, listening("start_grad_sync"), listening("start_param_sync"),
            attach(training.model, training.optimizer, sinks=[], **OPTIONS),
        ):  # fmt: skip
            for step in range(NUM_STEPS):
                on[0] = step == RECORDED
                training.step()
        same = alone == training.digest()
    return [c.name for c in logs[0].collectives if "bucket" in c.name or case == "tp"], said, same


@needs_megatron
@pytest.mark.parametrize("case", ["dp", "dp_distributed_optimizer"])
def test_names_are_megatrons_buckets(case: str) -> None:
    for names, said, same in run_ranks(_megatron, 2, case, timeout_s=90.0):
        assert [name[:110] for name in names] == [name[:110] for name in said]
        assert len(said) >= 3
        assert same


@needs_megatron
def test_names_are_megatrons_tensor_parallel_layers() -> None:
    for names, _, same in run_ranks(_megatron, 2, "tp", timeout_s=90.0):
        layers = [f"decoder.layers.{number}" for number in range(4)]
        # Forward: each block's attention and MLP sum their outputs. Backward: the gradients of what these read.
        for layer in layers:
            for module in (
                "self_attention.linear_proj",
                "mlp.linear_fc2",
                "self_attention.linear_qkv",
                "mlp.linear_fc1",
            ):
                assert f"{layer}.{module}" in names
        assert same


def _megatron_pipeline(rank: int, case: str) -> Said:
    del rank
    megatron_shims.install()
    from overlap_callbacks.integrations.megatron import attach

    with (
        megatron_jobs.job(megatron_jobs.TWO_RANKS[case]) as training, kept_logs() as logs,
        attach(training.model, training.optimizer, sinks=[], **OPTIONS),
    ):  # fmt: skip
        for _ in range(NUM_STEPS):
            training.step()
    return [name for name in names_of(logs[0].collectives) if name.split(":")[0] in ("send", "recv")]


@needs_megatron
def test_messages_of_megatrons_pipeline_tell_stage_and_micro_batch() -> None:
    assert [sorted(names) for names in run_ranks(_megatron_pipeline, 2, "pp", timeout_s=90.0)] == messages(4)


# -- the machinery


class _Owner:
    def __init__(self) -> None:
        self.found, self.is_let_go = "", False

    def issue(self, names: StepNames, call: Collective) -> None:
        held = _Owner()  # the reader sees it
        seen = weakref.ref(held)
        self.found = names.of(call, None)
        del held
        self.is_let_go = seen() is None


def test_names_are_data_and_reading_them_keeps_nothing_and_raises_nothing() -> None:
    def named(name: Any) -> str:
        owner = _Owner()
        names = StepNames({f"{__name__}:_Owner.issue": lambda names, variables: name()}, [])
        owner.issue(names, mock.Mock(operator="allreduce_"))
        assert owner.is_let_go
        return owner.found

    assert named(lambda: "layers.3") == "layers.3"
    assert named(lambda: "a\nb\x1b[31m") == "a\ufffdb\ufffd[31m"
    assert len(named(lambda: "x" * 10_000)) <= 120
    assert named(lambda: 1 / 0) == ""


def test_wrappers_are_left_out_of_names() -> None:
    assert plain("module.module._orig_mod.layers.3._checkpoint_wrapped_module.mlp") == "layers.3.mlp"
    assert span(["a", "b", "", "c"]) == "a … c"
    assert span(["a"]) == "a"
    assert span([]) == ""


# -- in reports


def _reported(rank: int, case: str) -> Any:
    training, sink = Training(rank, CASES[case][0]), KeptReports()
    schedule = tiny_schedule(first_step=RECORDED, every_n_steps=60, repeats=2, profiled_steps=4)
    with training.attach(schedule=schedule, sinks=[sink]):
        for _ in range(40):
            training.step()
    return [report.exposure for report in sink.reports]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("ddp", {"bucket 0: 10.bias … 8.weight", "bucket 1: 6.bias … 4.weight", "bucket 2: 2.bias … 0.weight"}),
        ("fsdp2", {"0", "2", "4"}),
    ],
)
def test_reports_have_times_by_name_over_profiled_steps_and_ranks(case: str, expected: set[str]) -> None:
    (exposure,), nothing = run_ranks(_reported, 2, case)
    assert nothing == []
    assert {row.name for row in exposure.names} == expected
    for field in ("calls", "exposed_ms", "hidden_ms"):
        by_name, by_size = (sum([getattr(row, field) for row in rows]) for rows in (exposure.names, exposure.rows))
        assert by_name == pytest.approx(by_size)
    # Of three buckets, or six gathers and three reductions: steps times ranks of each.
    assert {row.calls / exposure.num_steps / 2 for row in exposure.names} == ({1} if case == "ddp" else {1, 2})
    for row in exposure.names:
        assert row.place == ""
        assert row.waiting_ms is not None
        assert row.waiting_ms >= 0
