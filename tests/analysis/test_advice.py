"""Each advice: on a job that has the fault, with the condition and what it could win, and on one that has not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.advice import DOCS, Advice, advice_for, reductions_of
from overlap_callbacks.analysis.bottleneck import bottleneck_of
from overlap_callbacks.analysis.gains import JobFacts
from overlap_callbacks.analysis.results.environment import Finding, Severity
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.exposure import FIRST, LAST, ExposedCollective, Exposure
from overlap_callbacks.analysis.results.kernel_times import CLOCK, SMS, KernelTime, SlowdownShare, SlowdownShares
from overlap_callbacks.analysis.results.messages import DimensionTraffic, Traffic
from overlap_callbacks.analysis.results.power import JobPower, SourceInfo
from overlap_callbacks.analysis.results.report import PipelineBubble
from overlap_callbacks.analysis.results.step_parts import Bound, LateRank, StepParts
from overlap_callbacks.analysis.results.window import CollectiveTime, DimensionTime
from tests.docs.conftest import DOCS as PAGES
from tests.environments import cpu_rank, gpu_rank, job_environment, samples
from tests.report.runs import window

# A step of 100 ms; of compute beside communication, exposed, waiting, the bubble, idle.
COMPUTE = StepParts(95.0, 0.0, 4.0, 0.0, 0.0, 1.0)
EXPOSED = StepParts(60.0, 0.0, 30.0, 0.0, 0.0, 10.0)
CONTENTION = StepParts(70.0, 20.0, 5.0, 0.0, 0.0, 5.0)
LAUNCH = StepParts(45.0, 0.0, 5.0, 0.0, 0.0, 50.0)
BUBBLE = StepParts(60.0, 0.0, 5.0, 0.0, 30.0, 5.0)
WAITING = StepParts(60.0, 0.0, 5.0, 30.0, 0.0, 5.0)
ON_HOST = StepParts(60.0, 0.0, 5.0, 0.0, 0.0, 5.0, 30.0)
MB = 10**6


def collective(operator: str, messages: int, size_bytes: int, dimension: str = "data") -> CollectiveTime:
    return CollectiveTime(operator, "g", 8, "nccl", messages, size_bytes, size_bytes, 10.0, dimension)


def dimension(name: str) -> DimensionTime:
    return DimensionTime(name, 4, MB, 40.0, 30.0, 40.0, 40.0)


def job(parts: StepParts, *collectives: CollectiveTime, **changes: Any) -> JobFacts:
    """A job on GPUs with NCCL; changes of the window, and of what is known of the job."""
    known = {name: changes.pop(name) for name in JobFacts._fields if name in changes}
    empty = {"dimensions": (), "kernels": (), "findings": (), "pipeline": None, "traffic": None, "power": None,
             "exposure": None}  # fmt: skip
    fields = {**empty, "backend": "nccl", "device": "NVIDIA H200", "collectives": collectives, **changes}
    return JobFacts(parts, msgspec.structs.replace(window(0), **fields), **known)


def advice(bound: Bound, facts: JobFacts, *more: Any) -> dict[str, Advice]:
    return {found.topic: found for found in advice_for(bound, facts, *more)}


# -- each gradient at each micro-batch

DDP = {"ddp_bucket_cap_bytes": 25 * MB, "ddp_comm_hook": "none", "parameters": 887_500, "parameter_types": "float32"}
FSDP2 = {"fsdp_units": 3, "parameters": 887_500, "parameter_types": "float32"}
ZERO = {"zero_stage": 1, "parameters": 887_500, "parameter_types": "float32"}


def test_gradients_that_are_reduced_at_each_micro_batch_are_to_be_deferred() -> None:
    parts = StepParts(111.0, 0.0, 196.0, 0.0, 0.0, 0.0)
    found = advice(Bound.COMMUNICATION, job(parts, collective("allreduce_", 8, 14_200_000), configuration=DDP))
    first = next(iter(found.values()))
    assert first.topic == "defer-reductions"
    assert first.what == (
        "Each gradient is reduced 4 times a step: defer it to the last micro-batch (DDP's no_sync around the others)."
    )
    assert first.why == (
        "A step reduces 13.5 MiB for 3.39 MiB of gradients. Reducing them once could save up to 147.0 ms of exposed "
        "time in a step of 307.0 ms."
    )
    assert "accumulate" not in found["fewer-bytes"].what


@pytest.mark.parametrize(
    ("operator", "configuration", "size_bytes", "how"),
    [
        ("_reduce_scatter_base_", FSDP2, 14_300_000, "set_requires_gradient_sync(False)"),
        ("_reduce_scatter_base_", {**FSDP2, "fsdp_sharding": "FULL_SHARD"}, 14_200_000, "FSDP's no_sync"),
        ("_reduce_scatter_base_", {**FSDP2, "fsdp_param_dtype": "torch.bfloat16"}, 7_100_000, "gradient_sync"),
        ("_reduce_scatter_base_", {**FSDP2, "fsdp_reduce_dtype": "torch.bfloat16"}, 7_100_000, "gradient_sync"),
        ("allreduce_", {**DDP, "ddp_comm_hook": "bf16_compress_hook"}, 7_100_000, "no_sync"),
        ("allreduce_", {**DDP, "parameters": 10**9, "trained_parameters": 887_500}, 14_200_000, "no_sync"),
        ("allreduce_", ZERO, 14_200_000, "to the last micro-batch."),
        ("allreduce_", {**ZERO, "zero_stage": 2}, 14_200_000, "ZeRO does up to stage 1 (this is stage 2)"),
    ],
)
@pytest.mark.parametrize("world", ["data", "world"])
def test_the_advice_names_the_setting_of_whatever_reduces_them(
    operator: str, configuration: dict[str, Any], size_bytes: int, how: str, world: str
) -> None:
    facts = job(EXPOSED, collective(operator, 12, size_bytes, world), configuration=configuration)
    found = advice(Bound.COMMUNICATION, facts)["defer-reductions"]
    assert "reduced 4 times a step" in found.what
    assert how in found.what
    assert "up to 22.50 ms of exposed time in a step of 100.0 ms" in found.why


def test_they_are_worth_a_word_whatever_bounds_the_step() -> None:
    facts = job(CONTENTION, collective("allreduce_", 8, 14_200_000), configuration=DDP)
    why = advice(Bound.COMPUTE, facts)["defer-reductions"].why
    assert "up to 18.75 ms of exposed and lost time in a step" in why
    hidden = job(StepParts(98.0, 0.0, 1.0, 0.0, 0.0, 1.0), collective("allreduce_", 8, 14_200_000), configuration=DDP)
    assert "defer-reductions" not in advice(Bound.COMPUTE, hidden)


@pytest.mark.parametrize(
    ("collectives", "configuration"),
    [
        ([collective("allreduce_", 2, 3_550_000)], DDP),  # once a step, as it should be
        ([collective("allreduce_", 8, 14_200_000)], {}),  # nothing is known of the model
        ([collective("allreduce_", 8, 14_200_000, "tensor")], DDP),  # activations
        ([collective("allreduce_", 8, 14_200_000, "other")], DDP),
        ([collective("allreduce_", 8, 14_200_000)], {**DDP, "ddp_comm_hook": "powerSGD_hook"}),
        ([collective("allreduce_", 8, 14_200_000)], {**DDP, "parameter_types": "bfloat16, float32"}),
        ([collective("allreduce_", 8, 12_400_000)], DDP),  # no whole multiple
        ([collective("_allgather_base_", 8, 14_200_000)], FSDP2),  # parameters, not gradients
        (
            [collective("_reduce_scatter_base_", 3, 3_550_000), collective("allreduce_", 30, 14_200_000)],
            FSDP2,
        ),
        ([collective("allreduce_", 8, 14_200_000)], {"parameters": 887_500, "parameter_types": "float32"}),
    ],
)
def test_reductions_that_run_once_or_are_unknown_are_not_deferred(
    collectives: list[CollectiveTime], configuration: dict[str, Any]
) -> None:
    facts = job(EXPOSED, *collectives, configuration=configuration)
    found = reductions_of(facts)
    assert found is None or found.times == 1
    assert "defer-reductions" not in advice(Bound.COMMUNICATION, facts)


# -- the same for programs


def test_each_gain_is_a_prediction_with_bounds() -> None:
    """The exposed time has an interval; fewer collectives take the host less; equal parts are saved for certain."""
    small = {**DDP, "ddp_bucket_cap_bytes": MB}
    facts = job(
        EXPOSED, collective("allreduce_", 8, 14_200_000), configuration=small, exposed=(0.5, 1.5), step_ms=200.0
    )  # of 30 ms exposed and 10 ms idle in 100
    found = {topic: one.prediction for topic, one in advice(Bound.COMMUNICATION, facts).items() if one.prediction}
    bounds = {topic: (one.rises, one.step_ms, one.low_ms, one.high_ms) for topic, one in found.items()}
    assert bounds == {
        "defer-reductions": (None, 200.0, 22.5, pytest.approx(2 * (0.75 * 30 * 1.5 + 0.75 * 10))),
        "buckets": (True, 200.0, 0.0, pytest.approx(2 * (30 * 1.5 + 10))),
        "fewer-bytes": (None, 200.0, 0.0, pytest.approx(2 * 15 * 1.5)),
    }
    assert (
        found["defer-reductions"].assumes == "it saves its share of exposed time, or of the host; nothing else changes"
    )
    assert found["buckets"].settings


def test_a_prediction_is_at_most_the_whole_step_and_other_losses_have_no_interval() -> None:
    facts = job(EXPOSED, collective("allreduce_", 8, 8 * MB), exposed=(0.0, 9.0))
    prediction = advice(Bound.COMMUNICATION, facts)["buckets"].prediction
    assert prediction is not None
    assert prediction.high_ms == 100.0
    prediction = advice(Bound.LAUNCH, job(LAUNCH, exposed=(0.0, 9.0)))["micro-batch"].prediction
    assert prediction is not None
    assert prediction.high_ms == 50.0


# -- communication


@pytest.mark.parametrize(
    ("collectives", "changes", "expected"),
    [
        ([collective("allreduce_", 8, 8 * MB)], {}, ["buckets", "fewer-bytes"]),
        ([collective("allreduce_", 8, 8 * 25 * MB)], {}, ["fewer-bytes"]),
        ([collective("allreduce_", 1, 400 * MB)], {}, ["buckets", "fewer-bytes"]),
        ([collective("_allgather_base_", 8, 1000 * MB), collective("_reduce_scatter_base_", 8, 400 * MB)], {},
         ["prefetch", "fewer-bytes"]),
        ([], {"dimensions": (dimension("tensor"),)}, ["mapping"]),
    ],
)  # fmt: skip
def test_advice_fits_what_communicates(
    collectives: list[CollectiveTime], changes: dict[str, Any], expected: list[str]
) -> None:
    found = advice(Bound.COMMUNICATION, job(EXPOSED, *collectives, **changes))
    assert list(found) == expected
    assert all("up to " in row.why and " in a step of 100.0 ms" in row.why for row in found.values())


def test_larger_buckets_cannot_help_where_all_gradients_fit_into_one_bucket() -> None:
    short = collective("allreduce_", 2, 3_550_000)
    assert "buckets" not in advice(Bound.COMMUNICATION, job(EXPOSED, short, configuration=DDP))
    small = {**DDP, "ddp_bucket_cap_bytes": MB}
    assert "Raise" in advice(Bound.COMMUNICATION, job(EXPOSED, short, configuration=small))["buckets"].what
    units = advice(
        Bound.COMMUNICATION, job(EXPOSED, collective("_reduce_scatter_base_", 9, 3_550_000), configuration=FSDP2)
    )
    assert units["buckets"].what == "Wrap more layers in each FSDP unit."
    assert "buckets" not in advice(Bound.COMMUNICATION, job(EXPOSED, collective("allreduce_", 1, 3_550_000)))


def bucket_advice(bucket_mb: float, model_mb: float, *, facts: dict[str, Any] = DDP) -> Advice | None:
    """What is said of buckets of this size in a model of so many MiB of gradients."""
    messages = max(1, round(model_mb / bucket_mb))
    configuration = {**facts, "ddp_bucket_cap_bytes": bucket_mb * 2**20, "parameters": model_mb * 2**18}
    row = collective("allreduce_", messages, int(model_mb * 2**20))
    return advice(Bound.COMMUNICATION, job(EXPOSED, row, configuration=configuration)).get("buckets")


def tried(found: Advice | None) -> list[float]:
    return [] if found is None else [float(size) for size in found.tries.removeprefix("--arg bucket-mb=").split(",")]


@pytest.mark.parametrize(
    ("bucket_mb", "model_mb", "what", "sizes"),
    [
        (1, 6, "Raise", [1, 1.5, 3]),
        (3, 6, "", []),
        (1, 12, "Raise", [1, 3, 6]),
        (25, 12, "Lower", [25, 3, 6]),
        (1, 26, "Raise", [1, 6.5, 13]),
        (26, 26, "Lower", [26, 5, 13]),
        (100, 26, "Lower", [100, 5, 13]),
        (1, 800, "Raise", [1, 25, 50]),
        (25, 800, "", []),
        (800, 800, "Lower", [800, 5, 25]),
    ],
)
def test_bucket_sizes_to_try_are_several_buckets_of_the_model_in_both_directions(
    bucket_mb: float, model_mb: float, what: str, sizes: list[float]
) -> None:
    found = bucket_advice(bucket_mb, model_mb)
    assert ("" if found is None else found.what.split()[0]) == what
    assert tried(found) == sizes
    assert all(size <= model_mb / 2 for size in sizes[1:])


@pytest.mark.parametrize("model_mb", [0.5, 3, 6, 12, 26, 60, 110, 400, 3000, 28000])
def test_advice_on_buckets_does_not_go_back_and_forth(model_mb: float) -> None:
    for size in (0.1, 1, 5, 25, 100, 1000):
        found = bucket_advice(size, model_mb)
        for other in tried(found)[1:]:
            again = bucket_advice(other, model_mb)
            assert found is not None
            # It goes on in the same direction, or to a size between the two.
            between = all(min(size, other) < one < max(size, other) for one in tried(again)[1:])
            assert again is None or again.what == found.what or between


def exposed(kind: str, exposed_ms: float, place: str = LAST) -> ExposedCollective:
    return ExposedCollective(kind, "data", 8, place, 8 * MB, 8 * MB, 4, exposed_ms, 1.0, 4, 0.0, 0, exposed_ms)


def test_advice_names_the_bucket_that_is_exposed_and_leaves_hidden_kinds_alone() -> None:
    both = collective("_allgather_base_", 8, 1000 * MB), collective("_reduce_scatter_base_", 8, 8 * MB)

    def found(gather_ms: float, scatter_ms: float) -> dict[str, Advice]:
        rows = (exposed("reduce_scatter", scatter_ms), exposed("all_gather", gather_ms, FIRST))
        facts = job(EXPOSED, *both, configuration=FSDP2, exposure=Exposure(4, 1, rows))
        return advice(Bound.COMMUNICATION, facts)

    assert list(found(10, 10)) == ["prefetch", "buckets", "fewer-bytes"]
    assert "most exposed is the 7.63 MiB reduce-scatter that ends the step" in found(10, 10)["buckets"].why
    # A third of what is exposed is what it can win; by bytes it would be less than a hundredth.
    assert "could win up to 10.00 ms of exposed time in a step" in found(20, 10)["buckets"].why
    assert list(found(10, 0)) == ["prefetch"]
    assert list(found(0, 10)) == ["buckets", "fewer-bytes"]


def test_parameters_are_prefetched_where_the_step_gathers_them_in_its_midst() -> None:
    both = collective("_allgather_base_", 8, 1000 * MB), collective("_reduce_scatter_base_", 8, 400 * MB)
    for configuration, gathers in ((FSDP2, True), ({"zero_stage": 3}, True), (ZERO, False), (DDP, False)):
        found = advice(Bound.COMMUNICATION, job(EXPOSED, *both, configuration=configuration))
        assert ("prefetch" in found) is gathers


def test_gradients_in_16_bits_are_not_to_be_made_shorter() -> None:
    row = collective("allreduce_", 8, 8 * 25 * MB)
    long = advice(Bound.COMMUNICATION, job(EXPOSED, row, configuration=DDP))["fewer-bytes"]
    assert "or reduce them in 16 bits" in long.what
    assert "Half the bytes could win up to 15.00 ms of exposed time in a step" in long.why
    short = job(EXPOSED, row, configuration={**DDP, "parameter_types": "bfloat16"})
    assert "16 bits" not in advice(Bound.COMMUNICATION, short)["fewer-bytes"].what
    assert "fewer-bytes" not in advice(Bound.COMMUNICATION, job(EXPOSED, collective("send", 8, MB, "pipeline")))


def test_groups_that_lie_within_a_node_are_not_to_be_put_there() -> None:
    def mapping(**changes: Any) -> Advice:
        return advice(Bound.COMMUNICATION, job(EXPOSED, dimensions=(dimension("tensor"),), **changes))["mapping"]

    one_host = job_environment(samples(gpu_rank(0), gpu_rank(1)))
    two_hosts = job_environment(samples(gpu_rank(0, per_host=1), gpu_rank(1, per_host=1)))
    within = Traffic((DimensionTraffic("tensor", 8, MB, 1e6, 0.0),))
    across = Traffic((DimensionTraffic("tensor", 8, MB, 1e6, 5e5),))
    assert mapping(environment=one_host).what.startswith("Use fewer ranks in each tensor-parallel group")
    assert mapping(environment=two_hosts, traffic=within).what.startswith("Use fewer ranks")
    found = mapping(environment=two_hosts, traffic=across)
    assert found.what.startswith("Keep each tensor-parallel group within a node")
    assert "488 KiB a step cross between hosts" in found.why
    assert mapping().what.startswith("Keep each")


# -- contention


def divided(clock: float, sms: float = 0.05) -> SlowdownShares:
    """A slowdown of 20 %."""
    return SlowdownShares(0.2, (SlowdownShare(CLOCK, clock, "measured"), SlowdownShare(SMS, sms, "modelled")))


@pytest.mark.parametrize(("clock", "expected"), [(0.12, ["power-cap", "ctas"]), (0.08, ["ctas"]), (0.0, ["ctas"])])
def test_where_most_of_a_slowdown_goes_with_the_clock_the_power_cap_comes_first(
    clock: float, expected: list[str]
) -> None:
    found = advice(Bound.COMPUTE, job(CONTENTION, shares=divided(clock)))
    assert list(found) == expected
    if "power-cap" in found:
        assert "up to 12.00 ms of lost time in a step of 100.0 ms" in found["power-cap"].why


@pytest.mark.parametrize(
    ("limit_w", "what"),
    [
        (500.0, "Raise the power cap from 500 W (the device's own is 700 W), or cool better"),
        (700.0, "Cool better (the power cap of 700 W is the device's own)"),
        (None, "Raise the power cap, or cool better"),
    ],
)
def test_a_power_cap_that_is_the_devices_own_is_not_to_be_raised(limit_w: float | None, what: str) -> None:
    source = SourceInfo("nvml", "NVIDIA H200", "a", "instantaneous", 0.1, None, 0.1, 700.0, limit_w)
    facts = job(CONTENTION, shares=divided(0.15), power=JobPower(1, (0,), source=source))
    assert advice(Bound.COMPUTE, facts)["power-cap"].what == f"{what}: the clock is lower with overlap."


def kernels(num_blocks: int) -> tuple[KernelTime, ...]:
    return (KernelTime("ncclDevKernel_AllReduce", True, 4, 4, 10.0, 9.0, num_blocks),)


def test_nccl_is_to_hold_fewer_sms_where_it_holds_many() -> None:
    own = gpu_rank(variables={"NCCL_MAX_CTAS": "32"})
    found = advice(Bound.COMPUTE, job(CONTENTION, kernels=kernels(32), own=own))["ctas"]
    assert "hold up to 32 SMs meanwhile (NCCL_MAX_CTAS=32): up to 20.00 ms of lost time in a step" in found.why
    assert "ctas" not in advice(Bound.COMPUTE, job(CONTENTION, kernels=kernels(4), own=own))
    assert "ctas" not in advice(Bound.COMPUTE, job(CONTENTION, shares=divided(0.1, sms=0.0)))
    assert advice(Bound.COMPUTE, job(StepParts(95.0, 2.0, 2.0, 0.0, 0.0, 1.0), kernels=kernels(32))).keys() == {
        "faster-compute"
    }


def test_gloos_threads_are_to_have_cores_where_torch_has_several_threads() -> None:
    changes: dict[str, Any] = {"backend": "gloo", "device": "cpu"}
    found = advice(Bound.COMPUTE, job(CONTENTION, own=cpu_rank(num_threads=8), **changes))["ctas"]
    assert "up to 20.00 ms of lost time" in found.why
    assert "ctas" not in advice(Bound.COMPUTE, job(CONTENTION, own=cpu_rank(num_threads=1), **changes))


# -- compute, launches, the bubble, stragglers, overlap itself, settings


def test_compute_is_to_be_faster_and_lower_precision_is_no_advice_where_it_is_low() -> None:
    found = advice(Bound.COMPUTE, job(COMPUTE, precision="fp32"))
    assert list(found) == ["faster-compute"]
    assert found["faster-compute"].why == (
        "Compute takes 95.00 ms: less communication could win up to 4.00 ms of exposed time in a step of 100.0 ms."
    )
    assert "lower precision" in found["faster-compute"].what
    # What no communication would win is not what faster compute would.
    assert found["faster-compute"].short.endswith("torch.compile. Then compare: overlap report THIS_RUN THE_NEXT")
    for known in ({"precision": "bf16"}, {"configuration": {"parameter_types": "bfloat16"}}, {"precision": "fp8"}):
        assert "lower precision" not in advice(Bound.COMPUTE, job(COMPUTE, **known))["faster-compute"].what


def test_cuda_graphs_are_for_devices() -> None:
    found = advice(Bound.LAUNCH, job(LAUNCH))
    assert list(found) == ["cuda-graphs", "micro-batch"]
    assert "CUDA graphs" in found["cuda-graphs"].what
    assert all("up to 50.00 ms of idle time in a step of 100.0 ms" in row.why for row in found.values())
    assert "CUDA graphs" not in advice(Bound.LAUNCH, job(LAUNCH, device="cpu", backend="gloo"))["cuda-graphs"].what


FUSED = "void at::native::multi_tensor_apply_kernel<at::native::FusedOptimizerTensorListMetadata<4>, at::native::Fused"


@pytest.mark.parametrize(
    ("names", "launch", "compute"),
    [
        (
            ["gemm", "triton_tem_fused_flex_attention_2"],
            "torch.compile, CUDA graphs, fused optimizers",
            "fused kernels, torch.compile",
        ),
        (["gemm", "triton_poi_fused_add_mul_0"], "CUDA graphs, fused optimizers", "fused kernels"),
        (["aten::_fused_adamw_"], "torch.compile, CUDA graphs", "fused kernels, torch.compile"),
        ([FUSED], "torch.compile, CUDA graphs", "fused kernels, torch.compile"),
        ([FUSED, "triton_red_fused_native_layer_norm_3"], "CUDA graphs", "fused kernels"),
    ],
)
def test_what_the_names_of_kernels_show_to_be_in_use_is_not_advised(
    names: list[str], launch: str, compute: str
) -> None:
    shown = tuple([KernelTime(name, False, 4, 4, 10.0, 9.0, 64) for name in names])
    assert advice(Bound.LAUNCH, job(LAUNCH, kernels=shown))["cuda-graphs"].what == f"Launch less: {launch}."
    found = advice(Bound.COMPUTE, job(COMPUTE, kernels=shown, precision="bf16"))["faster-compute"]
    assert found.what == f"Make compute itself faster: {compute}."


@pytest.mark.parametrize(
    ("configuration", "given"),
    [
        ({"ddp_find_unused_parameters": True, "ddp_static_graph": False}, True),
        ({"ddp_find_unused_parameters": True, "ddp_static_graph": True}, False),
        ({"ddp_find_unused_parameters": False}, False),
        ({"fsdp_units": 3}, False),
        ({}, False),
    ],
)
def test_unused_parameters_are_searched_if_ddp_is_configured_so(configuration: dict[str, Any], given: bool) -> None:
    assert ("find-unused-parameters" in advice(Bound.LAUNCH, job(LAUNCH, configuration=configuration))) is given


def test_a_pipeline_is_to_have_more_micro_batches_and_chunks_where_it_has_none() -> None:
    found = advice(Bound.BUBBLE, job(BUBBLE, pipeline=PipelineBubble(4, 6, 1, ())))
    assert list(found) == ["micro-batches", "interleaving"]
    # Of 3/9 to 3/15 of a step: 30 ms become 18.
    assert (
        "4 stages with 6 micro-batches wait for 33.3% of it, with twice as many for 20.0%" in found["micro-batches"].why
    )
    assert "up to 12.00 ms of bubble in a step of 100.0 ms" in found["micro-batches"].why
    assert "up to 15.00 ms of bubble" in found["interleaving"].why
    assert list(advice(Bound.BUBBLE, job(BUBBLE, pipeline=PipelineBubble(4, 6, 2, ())))) == ["micro-batches"]
    assert list(advice(Bound.BUBBLE, job(BUBBLE))) == ["micro-batches", "interleaving"]


def test_what_the_others_wait_for_is_what_a_late_rank_could_win() -> None:
    for late in (LateRank(3, 30.0, busy=True), LateRank(3, 30.0, busy=False), None):
        found = advice(Bound.STRAGGLER, job(WAITING), late)["straggler"]
        assert "could win up to 30.00 ms of waiting in a step of 100.0 ms" in found.why


def test_overlap_is_to_be_switched_off_where_it_costs_more_than_it_saves() -> None:
    found = bottleneck_of([window(0)], Estimate(-0.1, -0.12, -0.08, 4, 4))
    assert found is not None
    assert found.advice[0] == Advice(
        "overlap-off",
        "Switch overlap off.",
        "Sequential steps are shorter here: that could win 10.0% of a step with overlap (95% interval 8.0% or more).",
        "10.0% of a step with overlap",
    )
    for other in (Estimate(-0.1, -0.3, 0.1, 4, 4), Estimate(0.1, 0.08, 0.12, 4, 4), None):
        found = bottleneck_of([window(0)], other)
        assert found is not None
        assert "overlap-off" not in {row.topic for row in found.advice}


def test_a_serious_setting_comes_before_all_other_advice() -> None:
    finding = Finding(
        "cuda-launch-blocking", Severity.SERIOUS, "CUDA_LAUNCH_BLOCKING=1: so nothing overlaps.", "Unset it.", ""
    )
    found = list(advice_for(Bound.LAUNCH, job(LAUNCH, findings=(finding,))))
    most = "up to 55.00 ms of time without compute in a step of 100.0 ms"  # all but compute
    why = f"CUDA_LAUNCH_BLOCKING=1: so nothing overlaps. That could win {most}."
    assert found[0][:4] == ("settings", "Unset it.", why, most)
    note = msgspec.structs.replace(finding, severity=Severity.NOTE)
    assert "settings" not in advice(Bound.LAUNCH, job(LAUNCH, findings=(note,)))


def test_every_advice_has_its_section_in_the_docs_and_says_what_it_could_win() -> None:
    found: list[Advice] = []
    both = collective("_allgather_base_", 8, 1000 * MB), collective("_reduce_scatter_base_", 8, 4 * MB)
    unused = {"ddp_find_unused_parameters": True}
    serious = Finding("a", Severity.SERIOUS, "A.", "Unset it.", "")
    for bound, facts in (
        (Bound.COMMUNICATION, job(EXPOSED, *both, findings=(serious,))),
        (Bound.COMMUNICATION, job(EXPOSED, collective("allreduce_", 8, 14_200_000), configuration=DDP)),
        (Bound.COMMUNICATION, job(EXPOSED, dimensions=(dimension("expert"),))),
        (Bound.COMPUTE, job(COMPUTE)),
        (Bound.COMPUTE, job(CONTENTION, shares=divided(0.15))),
        (Bound.LAUNCH, job(LAUNCH, configuration=unused)),
        (Bound.BUBBLE, job(BUBBLE)),
        (Bound.STRAGGLER, job(WAITING)),
        (Bound.HOST_COMMUNICATION, job(ON_HOST)),
    ):
        found += advice_for(bound, facts)
    assert all("up to " in row.why for row in found)
    page = (PAGES / DOCS.removeprefix("docs/")).read_text()
    sections = {line.removeprefix("### ") for line in page.splitlines() if line.startswith("### ")}
    assert {row.topic for row in found} | {"overlap-off"} == sections


def test_gains_are_of_a_step_without_the_profiler_where_its_time_is_known() -> None:
    known = {"ddp_bucket_cap_bytes": 2**20}
    facts = job(EXPOSED, collective("allreduce_", 60, 120 * MB), configuration=known, step_ms=80.0)
    found = advice(Bound.COMMUNICATION, facts)["buckets"]
    assert found.why.endswith("That could win up to 24.00 ms of exposed time in a step of 80.00 ms.")
    assert found.short.startswith("Raise the bucket size: up to 24.00 ms of exposed time a step. Try: overlap tune --")
    assert found.short.endswith(" --arg bucket-mb=1,25,50 -- COMMAND")
    assert Advice("settings", "Unset it.", "").short == "Unset it. Then compare: overlap report THIS_RUN THE_NEXT"
