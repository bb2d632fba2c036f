"""What is predicted is what the gate records, message by message and byte by byte."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from overlap_callbacks.analysis.communication.job_shape import JobShape
from overlap_callbacks.analysis.communication.model_shape import ModelShape
from overlap_callbacks.analysis.communication.predicted import predicted_messages
from overlap_callbacks.analysis.communication.rank_grids import ranks_in
from overlap_callbacks.analysis.communication.volumes import rank_rows
from tests.distributed import run_ranks
from tests.integrations import megatron_recorded, predicted_jobs
from tests.toggling import asked_for, at_night

# Job -> ranks, function of ``predicted_jobs``, its arguments, and what the prediction is told.
JOBS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    f"{name} {model}": (ranks, kind, {"name": model, **arguments}, told)
    for model in ("gpt", "llama")
    for name, ranks, kind, arguments, told in (
        ("ddp", 2, "data_parallel", {"bucket_mb": 0.03}, {"layout": "ddp", "bucket": int(0.03 * 2**20)}),
        ("fsdp2", 2, "fully_sharded", {}, {"layout": "fsdp2"}),
        ("fsdp2 in 16 bit", 2, "fully_sharded", {"bf16": True}, {"layout": "fsdp2", "dtype": "bf16"}),
        ("zero1", 2, "zero", {"stage": 1, "reduce_bucket_size": 5000}, {"layout": "zero1", "bucket": 5000}),
        (
            "zero2 in 16 bit", 2, "zero", {"stage": 2, "reduce_bucket_size": 5000, "bf16": True},
            {"layout": "zero2", "bucket": 5000, "dtype": "bf16", "gradient_dtype": "bf16"},
        ),
        (
            "zero3", 2, "zero", {"stage": 3, "stage3_param_persistence_threshold": 1000},
            {"layout": "zero3", "bucket": 400, "persistence": 1000},
        ),
        ("hsdp", 4, "fully_sharded", {"replicas": 2}, {"layout": "hsdp", "replicas": 2}),
        ("fsdp2 padded", 4, "fully_sharded", {}, {"layout": "fsdp2"}),
    )
}  # fmt: skip
# How messages go by the layout is seen with GPT-2, what LLaMA's weights change in one job of each kind.
NIGHTLY = [f"{name} llama" for name in ("fsdp2 in 16 bit", "zero1", "zero2 in 16 bit", "hsdp", "fsdp2 padded")]
# What 16 bit, untied weights and recomputation change is seen in one job of each kind of groups.
MEGATRON_NIGHTLY = (
    "data, distributed optimizer in 16 bit", "tensor in 16 bit", "tensor, selective recomputation",
    "sequence, full recomputation", "pipeline, untied", "pipeline in 16 bit", "tensor and data",
)  # fmt: skip
MODELS = {
    "gpt": {},
    "llama": {
        "kv_heads": 2, "ffn": 88, "gated": True, "biases": False, "norm_biases": False, "learned_positions": False,
        "tied": False,
    },
}  # fmt: skip
STAGES = {"pipeline of four, uneven": (2, 2, 1, 1)}

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"
)


def predicted(job: JobShape, rank: int) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for row in rank_rows(job, rank):
        found[row.dimension, row.operator, row.bytes_each, row.group_size, row.peer] += row.messages
    return found


def predicted_groups(job: JobShape, rank: int) -> set[tuple[str, str, tuple[int, ...]]]:
    """Dimension, operator and ranks of the groups of a rank, without sends and receives."""
    found = set()
    for group in predicted_messages(job).groups:
        if group.operator in ("send", "recv_") or rank not in ranks_in(group.ranks):
            continue
        for first in ranks_in(group.firsts):
            members = tuple((first + ranks_in(group.offsets)).tolist())
            if rank in members:
                found.add((group.dimension, group.operator, members))
    return found


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> Callable[[int], list[dict[str, Counter[Any]]]]:
    """What each rank recorded of all jobs of as many ranks, which share their processes."""
    ranks: dict[int, list[dict[str, Counter[Any]]]] = {}
    asked = asked_for(request, "name")

    def of(world_size: int) -> list[dict[str, Counter[Any]]]:
        if world_size not in ranks:
            setups = megatron_recorded.TWO_RANKS if world_size == 2 else megatron_recorded.FOUR_RANKS
            setups = {name: setup for name, setup in setups.items() if name in asked}
            ranks[world_size] = run_ranks(megatron_recorded.record_all, world_size, setups, timeout_s=200)
        return ranks[world_size]

    return of


@needs_megatron
@pytest.mark.parametrize(
    "name", at_night([*megatron_recorded.TWO_RANKS, *megatron_recorded.FOUR_RANKS], MEGATRON_NIGHTLY)
)
def test_megatron_core_sends_what_is_predicted(name: str, recorded: Any) -> None:
    world_size = 2 if name in megatron_recorded.TWO_RANKS else 4
    setup = {**megatron_recorded.TWO_RANKS, **megatron_recorded.FOUR_RANKS}[name]
    job = megatron_recorded.shape_of(setup, world_size, STAGES.get(name, ()))
    for rank, found in enumerate(recorded(world_size)):
        sizes: Counter[Any] = Counter()
        for (dimension, operator, size, ranks, peer), messages in found[name].items():
            sizes[dimension, operator, size, len(ranks), peer] += messages
        assert predicted(job, rank) == sizes, f"rank {rank}"
        groups = {(*key[:2], key[3]) for key in found[name] if key[4] < 0 and len(key[3]) > 1}
        assert predicted_groups(job, rank) == groups, f"rank {rank}"


@pytest.fixture(scope="module")
def sharded(request: pytest.FixtureRequest) -> Callable[[int], list[dict[str, Counter[Any]]]]:
    """The same for the jobs of ``JOBS``."""
    ranks: dict[int, list[dict[str, Counter[Any]]]] = {}
    asked = asked_for(request, "job")

    def of(world_size: int) -> list[dict[str, Counter[Any]]]:
        if world_size not in ranks:
            jobs = {
                name: (kind, arguments)
                for name, (size, kind, arguments, _) in JOBS.items()
                if size == world_size and name in asked
            }
            ranks[world_size] = run_ranks(predicted_jobs.run_jobs, world_size, jobs, timeout_s=200)
        return ranks[world_size]

    return of


@pytest.mark.parametrize("job", at_night(JOBS, NIGHTLY))
def test_sharded_jobs_send_what_is_predicted(job: str, sharded: Any) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    world_size, _, arguments, told = JOBS[job]
    sizes = {
        "layers": predicted_jobs.LAYERS, "hidden": predicted_jobs.HIDDEN, "heads": predicted_jobs.HEADS,
        "sequence": predicted_jobs.SEQUENCE, "vocabulary": predicted_jobs.VOCABULARY,
    }  # fmt: skip
    shape = JobShape(
        model=ModelShape(**sizes, **MODELS[arguments["name"]]),
        d=world_size,
        micro_batch=predicted_jobs.BATCH,
        global_batch=predicted_jobs.BATCH * predicted_jobs.MICRO_BATCHES * world_size,
        **{"dtype": "fp32", "gradient_dtype": "fp32", **told},
    )
    shape.check()
    for rank, found in enumerate(sharded(world_size)):
        expected: Counter[Any] = Counter()
        for (dimension, operator, size, ranks, _), messages in predicted(shape, rank).items():
            expected[dimension, operator, size, ranks] += messages
        assert expected == found[job], f"rank {rank}"
