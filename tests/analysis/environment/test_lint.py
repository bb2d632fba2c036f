from __future__ import annotations

from typing import Any

import pytest

from overlap_callbacks.analysis.environment.lint import RULES
from overlap_callbacks.analysis.results.environment import Finding, RankEnvironment, Severity
from overlap_callbacks.analysis.results.kernel_times import KernelTime
from overlap_callbacks.analysis.results.window import CollectiveTime
from tests.environments import cpu_rank, gpu_rank, job_environment, lint, samples

AMD: dict[str, Any] = {
    "hip": "7.0", "cuda": "", "device": "AMD Instinct MI300X", "compute_capability": "gfx942", "nvlink_devices": None,
}  # fmt: skip


def findings(*ranks: RankEnvironment, **changes: Any) -> dict[str, Finding]:
    windows = samples(*ranks, **changes)
    return {finding.rule: finding for finding in lint(job_environment(windows), windows)}


def with_variables(ranks: int = 2, per_host: int = 8, hardware: Any = None, **variables: str) -> dict[str, Finding]:
    return findings(*(gpu_rank(r, per_host=per_host, variables=variables, **(hardware or {})) for r in range(ranks)))


def kernel(num_blocks: int, name: str = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)") -> tuple[KernelTime, ...]:
    return (KernelTime(name, True, 4, 4, 10.0, 9.0, num_blocks), KernelTime("gemm", False, 4, 4, 10.0, 9.0, 4096))


def collectives(*dimensions: str) -> tuple[CollectiveTime, ...]:
    return tuple(CollectiveTime("allreduce_", d, 2, "nccl", 1, 8, 8, None, d) for d in dimensions)


def test_a_plain_job_has_no_findings() -> None:
    assert findings(gpu_rank(0), gpu_rank(1), kernels=kernel(16)) == {}
    assert findings(cpu_rank(), cpu_rank()) == {}
    assert lint(None, []) == ()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "cuda-launch-blocking"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "nccl-blocking-wait"),
        ("NCCL_BLOCKING_WAIT", "1", "nccl-blocking-wait"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "torch-distributed-debug"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "max-connections-one"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "no-memory-caching"),
        ("NCCL_P2P_DISABLE", "1", "nccl-p2p-off"),
        ("NCCL_P2P_LEVEL", "LOC", "nccl-p2p-off"),
        ("NCCL_SHM_DISABLE", "1", "nccl-shm-off"),
        ("NCCL_PROTO", "LL", "nccl-protocol"),
        ("NCCL_CHECK_POINTERS", "1", "nccl-argument-checks"),
        ("NCCL_CHECK_MODE", "DEBUG_LOCAL", "nccl-argument-checks"),
        ("NCCL_DEBUG", "TRACE", "nccl-trace-log"),
    ],
)
def test_a_trap_is_found_where_it_is_set(name: str, value: str, rule: str) -> None:
    found = with_variables(**{name: value})
    assert set(found) == {rule}
    assert f"{name}={value}" in found[rule].message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_LAUNCH_BLOCKING", "0"), ("TORCH_NCCL_BLOCKING_WAIT", "0"), ("TORCH_DISTRIBUTED_DEBUG", "INFO"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8"), ("NCCL_P2P_DISABLE", "0"), ("NCCL_P2P_LEVEL", "NVL"),
        ("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG", "WARN"), ("NCCL_IB_DISABLE", "1"), ("GPU_MAX_HW_QUEUES", "1"),
        ("NCCL_MAX_CTAS", "many"), ("NCCL_CHECK_MODE", "DEFAULT"), ("NCCL_CHECK_POINTERS", "0"), ("NCCL_PROTO", ""),
        ("NCCL_SHM_DISABLE", "0"), ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0"), ("NCCL_BLOCKING_WAIT", "0"),
        ("HIP_LAUNCH_BLOCKING", "1"), ("AMD_SERIALIZE_KERNEL", "3"),
    ],
)  # fmt: skip
def test_harmless_settings_give_no_finding(name: str, value: str) -> None:
    assert with_variables(**{name: value}) == {}


def test_the_rank_that_has_the_trap_is_named() -> None:
    found = findings(gpu_rank(0), gpu_rank(1, variables={"CUDA_LAUNCH_BLOCKING": "1"}))
    assert "on rank 1" in found["cuda-launch-blocking"].message
    assert "differ in CUDA_LAUNCH_BLOCKING" in found["ranks-differ"].message


def test_names_of_a_hosts_parts_may_differ() -> None:
    assert findings(*(gpu_rank(r, variables={"NCCL_IB_HCA": f"mlx5_{r}"}) for r in range(2))) == {}


def test_infiniband_matters_between_hosts() -> None:
    assert set(with_variables(per_host=1, NCCL_IB_DISABLE="1")) == {"nccl-ib-off"}


def test_direct_access_matters_within_a_host() -> None:
    assert with_variables(per_host=1, NCCL_P2P_DISABLE="1") == {}


@pytest.mark.parametrize("name", ["CUDA_LAUNCH_BLOCKING", "NCCL_BLOCKING_WAIT", "PYTORCH_NO_CUDA_MEMORY_CACHING"])
def test_traps_of_devices_are_none_on_a_cpu(name: str) -> None:
    assert findings(*[cpu_rank(variables={name: "1"})] * 2) == {}


def test_amd_has_traps_of_its_own() -> None:
    assert set(with_variables(hardware=AMD, GPU_MAX_HW_QUEUES="1")) == {"hip-one-queue"}
    assert with_variables(hardware=AMD, GPU_MAX_HW_QUEUES="2") == {}
    for name, value in (("AMD_SERIALIZE_KERNEL", "3"), ("HIP_LAUNCH_BLOCKING", "1")):
        assert set(with_variables(hardware=AMD, **{name: value})) == {"hip-serialised-kernels"}
        assert with_variables(hardware=AMD, **{name: "0"}) == {}
    assert with_variables(hardware=AMD, CUDA_DEVICE_MAX_CONNECTIONS="1") == {}


TIMING = ["TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING", "NCCL_DESYNC_DEBUG"]


@pytest.mark.parametrize("name", TIMING)
def test_timing_of_collectives_on_one_connection_is_found(name: str) -> None:
    megatron = {
        "framework": "megatron 0.16.1", "variables": {name: "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    }  # fmt: skip
    found = findings(gpu_rank(**megatron), collectives=collectives("tensor"))
    assert set(found) == {"nccl-timing-one-connection"}
    assert f"{name}=1 with CUDA_DEVICE_MAX_CONNECTIONS=1" in found["nccl-timing-one-connection"].message


@pytest.mark.parametrize("name", TIMING)
def test_either_alone_is_harmless_and_so_are_both_on_amd(name: str) -> None:
    assert with_variables(**{name: "1"}) == {}
    assert with_variables(**{name: "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}) == {}
    off = with_variables(**{name: "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert set(off) == {"max-connections-one"}
    assert with_variables(hardware=AMD, **{name: "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == {}


def queues(value: str | None, num_streams: int, **changes: Any) -> dict[str, Finding]:
    variables = {} if value is None else {"GPU_MAX_HW_QUEUES": value}
    return findings(*(gpu_rank(r, variables=variables, **AMD) for r in range(2)), num_streams=num_streams, **changes)


@pytest.mark.parametrize(("value", "num_streams"), [(None, 5), (None, 12), ("2", 3), ("4", 6)])
def test_more_streams_than_hardware_queues_are_found_on_amd(value: str | None, num_streams: int) -> None:
    found = queues(value, num_streams)
    assert set(found) == {"hip-few-queues"}
    message = found["hip-few-queues"].message
    assert f"a step ran kernels on {num_streams} streams" in message
    said = "GPU_MAX_HW_QUEUES is not set, and HIP's default is 4" if value is None else f"GPU_MAX_HW_QUEUES={value}"
    assert message.startswith(said)


@pytest.mark.parametrize(("value", "num_streams"), [(None, 4), (None, 0), ("2", 2), ("8", 8), ("2", 0), ("many", 3)])
def test_as_many_queues_as_streams_are_no_trap(value: str | None, num_streams: int) -> None:
    assert queues(value, num_streams) == {}


def test_one_queue_is_said_once_and_streams_of_other_devices_do_not_count() -> None:
    assert set(queues("1", 3)) == {"hip-one-queue"}
    assert findings(gpu_rank(), num_streams=9) == {}
    assert findings(cpu_rank(), num_streams=9) == {}


def test_the_rank_with_the_fewest_queues_is_named() -> None:
    ranks = [gpu_rank(r, variables={"GPU_MAX_HW_QUEUES": value}, **AMD) for r, value in enumerate(("8", "2"))]
    assert "GPU_MAX_HW_QUEUES=2 on rank 1" in findings(*ranks, num_streams=5)["hip-few-queues"].message


@pytest.mark.parametrize("dimension", ["tensor", "context"])
def test_megatron_needs_one_connection_before_blackwell(dimension: str) -> None:
    megatron = gpu_rank(framework="megatron 0.16.1")
    rows = collectives("data", dimension)
    assert set(findings(megatron, collectives=rows)) == {"max-connections-not-one"}
    one = gpu_rank(framework="megatron 0.16.1", variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert findings(one, collectives=rows) == {}
    eight = gpu_rank(framework="megatron 0.16.1", variables={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    assert set(findings(eight, collectives=rows)) == {"max-connections-not-one"}


def test_megatron_does_not_need_one_connection_from_blackwell_on() -> None:
    blackwell: dict[str, Any] = {"framework": "megatron 0.16.1", "compute_capability": "10.0"}
    rows = collectives("tensor")
    assert findings(gpu_rank(**blackwell), collectives=rows) == {}
    one = gpu_rank(**blackwell, variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert set(findings(one, collectives=rows)) == {"max-connections-one"}


def test_other_frameworks_and_data_parallel_jobs_need_no_single_connection() -> None:
    assert findings(gpu_rank(framework="pytorch 2.13"), collectives=collectives("tensor")) == {}
    assert findings(gpu_rank(framework="megatron 0.16.1"), collectives=collectives("data")) == {}


def limits(num_blocks: int, name: str = "", **variables: str) -> dict[str, Finding]:
    kernels = kernel(num_blocks, name) if name else kernel(num_blocks)
    return findings(gpu_rank(0, variables=variables), gpu_rank(1, variables=variables), kernels=kernels)


def test_kernels_are_compared_with_the_configured_blocks() -> None:
    assert limits(16, NCCL_MAX_CTAS="16") == {}
    found = limits(17, NCCL_MAX_CTAS="16")
    assert found["nccl-max-ctas-exceeded"].message == (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL ran with 17 blocks, though NCCL_MAX_CTAS=16. [OC515]"
    )
    # Of two limits, NCCL takes the more restrictive.
    assert (
        "NCCL_MAX_NCHANNELS=8"
        in limits(9, NCCL_MAX_CTAS="16", NCCL_MAX_NCHANNELS="8")["nccl-max-ctas-exceeded"].message
    )
    assert set(limits(8, NCCL_MIN_CTAS="16")) == {"nccl-min-ctas-not-reached"}
    assert set(limits(16, NCCL_MIN_CTAS="16")) == {"nccl-min-ctas-binds"}
    assert limits(20, NCCL_MIN_CTAS="16") == {}


@pytest.mark.parametrize("name", ["ncclDevKernel_SendRecv(x)", "ncclDevKernel_AllReduce_Sum_bf16_NVLS(x)"])
def test_kernels_with_other_limits_are_not_compared_with_them(name: str) -> None:
    assert limits(17, name, NCCL_MAX_CTAS="16") == {}


def test_an_unknown_grid_is_not_compared() -> None:
    assert limits(0, NCCL_MIN_CTAS="16", NCCL_MAX_CTAS="16") == {}


def test_a_kernel_on_many_sms_is_pointed_at() -> None:
    assert limits(32) == {}  # of 132
    assert "48 blocks on 132 SMs: up to 36%" in limits(48)["nccl-many-sms"].message
    assert findings(gpu_rank(0, num_sms=0), kernels=kernel(48)) == {}  # how many there are is not known


def test_threads_beyond_the_cpus_are_found_in_cpu_jobs() -> None:
    single = cpu_rank(cpus="0", num_threads=1)  # fewer threads are no advice where each rank has one
    assert set(findings(single, single)) == {"more-ranks-than-cpus"}
    crowded = cpu_rank(cpus="0-1", num_threads=2)
    found = findings(crowded, crowded)
    assert found["crowded-cpus"].message.startswith("2 ranks on laptop have 4 threads for 2 CPUs")
    on_gpu = gpu_rank(cpus="0-1", num_threads=16)
    assert findings(on_gpu, on_gpu) == {}


def test_the_most_serious_comes_first() -> None:
    ranks = samples(gpu_rank(variables={"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "TRACE", "NCCL_PROTO": "LL"}))
    severities = [finding.severity for finding in lint(job_environment(ranks), ranks)]
    assert severities == [Severity.SERIOUS, Severity.WARNING, Severity.NOTE]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_names_its_source_and_what_to_do(rule: Any) -> None:
    assert rule.source.startswith("https://")
    assert rule.action.endswith(".")


def test_names_of_rules_are_distinct() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
