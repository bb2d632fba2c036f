from __future__ import annotations

import msgspec
import pytest

from overlap_callbacks.analysis.environment.job import (
    BETWEEN,
    MAX_PLACES,
    UNKNOWN,
    WITHIN,
    add_environments,
    cpus_of,
    environment_of,
    pooled_environment,
)
from overlap_callbacks.analysis.results.environment import JobEnvironment, RankEnvironment
from tests.environments import cpu_rank, gpu_rank, job_environment, samples
from tests.samples import aggregate_windows, window


def job(*environments: RankEnvironment) -> JobEnvironment:
    found = job_environment(samples(*environments))
    assert found is not None
    return found


def test_hosts_and_devices_are_counted_over_all_ranks() -> None:
    found = job(*(gpu_rank(rank) for rank in range(16)))
    assert (found.num_ranks, found.num_hosts, found.num_devices) == (16, 2, 16)
    assert found.places[9].hostname == "node-1"
    assert found.lowest_rank == gpu_rank(0)
    assert not found.differing


def test_ranks_that_share_a_device_are_one_device() -> None:
    assert job(gpu_rank(0), gpu_rank(0)).num_devices == 1


def test_containers_of_one_machine_are_one_host() -> None:
    assert job(gpu_rank(0, hostname="a"), gpu_rank(1, hostname="b")).num_hosts == 1


def test_without_an_identity_devices_are_not_counted() -> None:
    assert job(gpu_rank(0), gpu_rank(1, device_uuid="", pci_bus_id="")).num_devices is None
    assert job(cpu_rank(), cpu_rank()).num_devices is None


def test_a_large_job_is_kept_in_little() -> None:
    ranks = [gpu_rank(rank, variables={f"NCCL_X{n}": str(rank) for n in range(100)}) for rank in range(1024)]
    found = job(*ranks)
    assert (found.num_ranks, found.num_hosts, found.num_devices) == (1024, 128, 1024)
    assert len(found.places) == MAX_PLACES
    assert len(msgspec.json.encode(found)) < 100_000


def test_what_one_rank_alone_has_is_named() -> None:
    ranks = [gpu_rank(rank) for rank in range(4)]
    ranks[2] = gpu_rank(2, variables={"NCCL_MAX_CTAS": "4"}, nccl="2.27.3")
    differing = {difference.name: difference for difference in job(*ranks).differing}
    assert set(differing) == {"nccl", "NCCL_MAX_CTAS"}
    unset, set_to = differing["NCCL_MAX_CTAS"].values
    assert (unset.value, unset.num_ranks) == (None, 3)
    assert (set_to.value, set_to.ranks) == ("4", "rank 2")


@pytest.mark.parametrize(
    ("ranks", "crowded"),
    [
        ([cpu_rank(cpus="0-3", num_threads=2)] * 2, False),
        ([cpu_rank(cpus="0-3", num_threads=4)] * 2, True),
        # Pinned to CPUs of their own, they are not in each other's way.
        ([cpu_rank(cpus="0-3", num_threads=4), cpu_rank(cpus="4-7", num_threads=4)], False),
        # On hosts of their own neither.
        ([cpu_rank(cpus="0-3", num_threads=4), cpu_rank(cpus="0-3", num_threads=4, host_id="b")], False),
        ([cpu_rank(cpus="", num_threads=4)] * 2, False),
    ],
)
def test_threads_are_compared_with_the_cpus_of_their_host(ranks: list[RankEnvironment], crowded: bool) -> None:
    assert bool(job(*ranks).crowded_host) is crowded


def test_lists_of_cpus_are_read_as_linux_writes_them() -> None:
    assert cpus_of("0-2,5,7-7") == {0, 1, 2, 5, 7}
    assert cpus_of("odd") == set()


def test_the_report_has_the_environment_once() -> None:
    report = aggregate_windows(samples(gpu_rank(0), gpu_rank(1)), world_size=2, every_n_steps=500)
    assert report.environment is not None
    assert all(sample.environment is None for sample in report.samples)


def test_ranks_without_an_environment_are_not_guessed() -> None:
    assert job_environment([window(0), window(1)]) is None


def told(*ranks: RankEnvironment, backend: str = "nccl") -> dict[str, str]:
    sums = add_environments([environment_of(*rank) for rank in enumerate(ranks)])
    found = pooled_environment(sums, backend).transports
    assert all(transport.basis for transport in found)
    return {transport.between: transport.transport for transport in found}


def test_nvlink_depends_on_each_pair_of_a_host() -> None:
    assert told(gpu_rank(0), gpu_rank(1)) == {WITHIN: "NVLink connects all GPUs of a host"}
    alone = {"nvlink_devices": ()}
    assert told(gpu_rank(0, **alone), gpu_rank(1, **alone)) == {WITHIN: "no NVLink connects the GPUs of a host"}
    bridged = [gpu_rank(rank, nvlink_devices=(f"0000:{0x10 + (rank ^ 1):02x}:00.0",)) for rank in range(4)]
    assert told(*bridged) == {WITHIN: "NVLink connects some GPUs of a host"}


def test_pcie_is_named_where_every_gpu_is_known_to_be_on_the_bus_of_its_host() -> None:
    alone = {"nvlink_devices": (), "host_link": "PCIe"}
    assert told(gpu_rank(0, **alone), gpu_rank(1, **alone)) == {WITHIN: "PCIe (no NVLink seen)"}
    # One of the two may be a Grace Hopper, whose GPU reaches its host over NVLink.
    unknown = gpu_rank(1, nvlink_devices=())
    assert told(gpu_rank(0, **alone), unknown) == {WITHIN: "no NVLink connects the GPUs of a host"}
    bridged = [
        gpu_rank(rank, nvlink_devices=(f"0000:{0x10 + (rank ^ 1):02x}:00.0",), host_link="PCIe") for rank in range(4)
    ]
    assert told(*bridged) == {WITHIN: "NVLink connects some GPUs of a host, PCIe the others"}
    # Of two hosts, only the first has ranks that share it.
    assert told(gpu_rank(0, **alone), gpu_rank(1, **alone), gpu_rank(8))[WITHIN] == "PCIe (no NVLink seen)"


def test_pcie_is_named_where_a_setting_forbids_direct_access() -> None:
    off = {"NCCL_P2P_DISABLE": "1"}
    ranks = [gpu_rank(rank, variables=off, host_link="PCIe") for rank in range(2)]
    assert told(*ranks) == {WITHIN: "no direct access between GPUs: PCIe to host memory, or the network"}
    network = off | {"NCCL_SHM_DISABLE": "1"}
    ranks = [gpu_rank(rank, variables=network, host_link="PCIe") for rank in range(2)]
    assert told(*ranks) == {WITHIN: "the network, also within a host"}


def test_one_rank_that_does_not_know_makes_it_unknown() -> None:
    assert told(gpu_rank(0), gpu_rank(1, nvlink_devices=None)) == {WITHIN: UNKNOWN}
    assert told(gpu_rank(0, pci_bus_id=""), gpu_rank(1)) == {WITHIN: UNKNOWN}


def test_a_setting_that_rules_nvlink_out_is_heeded() -> None:
    variables = {"NCCL_P2P_DISABLE": "1"}
    within = told(gpu_rank(0, variables=variables), gpu_rank(1, variables=variables))[WITHIN]
    assert "no direct access" in within


@pytest.mark.parametrize(
    ("variables", "transport"),
    [
        ({}, UNKNOWN),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, UNKNOWN),  # says which interface, should sockets be used
        ({"NCCL_NET": "Socket"}, "TCP sockets"),
        ({"NCCL_NET": "IB"}, "InfiniBand or RoCE"),
        ({"NCCL_NET": "AWS Libfabric"}, "the network plugin AWS Libfabric"),
        ({"NCCL_IB_DISABLE": "1"}, "not InfiniBand or RoCE: TCP sockets, or a network plugin"),
        ({"NCCL_IB_DISABLE": "0"}, UNKNOWN),
    ],
)
def test_the_transport_between_hosts_follows_only_from_settings(variables: dict[str, str], transport: str) -> None:
    hosts = [gpu_rank(rank, per_host=1, variables=variables) for rank in range(2)]
    assert told(*hosts) == {BETWEEN: transport}


def test_differing_settings_decide_nothing() -> None:
    hosts = [gpu_rank(rank, per_host=1, variables={"NCCL_NET": net}) for rank, net in enumerate(("IB", "Socket"))]
    assert told(*hosts) == {BETWEEN: UNKNOWN}


def test_gloo_uses_sockets_by_default() -> None:
    assert told(cpu_rank(), cpu_rank(), backend="gloo") == {WITHIN: "TCP sockets"}
    uv = {"GLOO_DEVICE_TRANSPORT": "UV"}
    assert told(cpu_rank(variables=uv), cpu_rank(variables=uv), backend="gloo") == {WITHIN: "Gloo's transport UV"}
    assert told(cpu_rank(variables=uv), cpu_rank(), backend="gloo") == {WITHIN: UNKNOWN}


def test_of_several_backends_that_of_the_device_counts() -> None:
    both = "cpu:gloo,cuda:nccl"
    assert told(gpu_rank(0), gpu_rank(1), backend=both) == {WITHIN: "NVLink connects all GPUs of a host"}
    assert told(cpu_rank(), cpu_rank(), backend=both) == {WITHIN: "TCP sockets"}


def test_nothing_is_said_of_a_backend_that_is_not_known() -> None:
    assert set(told(gpu_rank(0), gpu_rank(8), gpu_rank(9), backend="ucc").values()) == {UNKNOWN}
