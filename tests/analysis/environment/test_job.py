from __future__ import annotations

import msgspec
import pytest

from overlap_callbacks.analysis.aggregate import aggregate_windows
from overlap_callbacks.analysis.environment.sums import MAX_PLACES, cpus_of
from overlap_callbacks.analysis.results.environment import JobEnvironment, RankEnvironment
from tests.environments import cpu_rank, gpu_rank, job_environment, samples
from tests.samples import window


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
def test_threads_are_held_against_the_cpus_of_their_host(ranks: list[RankEnvironment], crowded: bool) -> None:
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
