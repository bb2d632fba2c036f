"""What a record must not say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.environment.privacy import (
    ANOTHER_HOST,
    MAX_VALUE_LENGTH,
    MAX_VARIABLES,
    HiddenNames,
    environment_variables,
    hidden_environment,
    hidden_window,
    mark_of,
    numbered,
)
from overlap_callbacks.analysis.job.part import merge, part_of
from overlap_callbacks.analysis.job.report import report_of
from overlap_callbacks.analysis.results.report import OverlapReport
from tests.analysis.communication.layouts import Layout
from tests.environments import gpu_rank
from tests.report.runs import rank_window


def hidden_report(num_ranks: int, per_host: int, **changes: Any) -> OverlapReport:
    """The report of a job on hosts ``secret-0``, ``secret-1``, ..., of which the last has the lowest ranks."""
    layout = Layout(tp=per_host, pp=1, dp=num_ranks // per_host, ranks_per_host=per_host)
    num_hosts = num_ranks // per_host
    parts = []
    for rank in range(num_ranks):
        host = num_hosts - 1 - rank // per_host
        name = f"secret-{host}"
        environment = gpu_rank(
            rank,
            hostname=name,
            host_id=f"{host:012x}",
            num_threads=96,
            device="cpu",
            variables={"NCCL_DEBUG_FILE": f"/logs/{name}.example.org/nccl", "NCCL_HOSTID": name},
        )
        hide = HiddenNames({name: mark_of(environment.host_id)})
        window = rank_window(0, rank, problems=(f"the sensor of {name} is gone",), messages=layout.messages(rank))
        window = msgspec.structs.replace(window, **changes)
        window = msgspec.structs.replace(hidden_window(window, hide), environment=hidden_environment(environment, hide))
        parts.append(part_of(window))
    return report_of(merge(parts), world_size=num_ranks, every_n_steps=500)


def test_a_report_has_numbers_in_the_order_of_the_lowest_ranks() -> None:
    report = hidden_report(8, 2)
    assert report.environment is not None
    assert [place.hostname for place in report.environment.places] == [f"host {n}" for n in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert (report.environment.lowest_rank.hostname, report.environment.lowest_rank.host_id) == ("host 0", "")
    assert report.environment.num_hosts == 4
    assert report.environment.crowded_host == "2 ranks on host 0 have 192 threads for 96 CPUs"
    assert any("the sensor of host 3 is gone" in problem for problem in report.problems)


def test_no_name_no_domain_and_no_mark_is_left_anywhere() -> None:
    text = msgspec.json.encode(hidden_report(8, 2)).decode()
    for unwanted in ("secret", "example.org", "host:", "NCCL_HOSTID"):
        assert unwanted not in text
    assert "/logs/host 0/nccl" in text


def test_of_many_hosts_those_without_a_known_number_are_another_host() -> None:
    report = hidden_report(130, 1)  # more than are kept one by one
    text = msgspec.json.encode(report).decode()
    assert "secret" not in text
    assert "host:" not in text
    assert report.environment is not None
    assert report.environment.num_hosts == 130
    assert report.environment.places[63].hostname == "host 63"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cannot connect to node-7:29500", "cannot connect to X:29500"),
        ("on NODE-7.cluster.example.org.", "on X."),
        ("node-71, my-node-7 and node-7-b are others", "node-71, my-node-7 and node-7-b are others"),
        ("/scratch/node-7/run", "/scratch/X/run"),
        ("10.0.0.7 and 10.0.0.70", "Y and 10.0.0.70"),
        ("localhost and 127.0.0.1 are no secret", "localhost and 127.0.0.1 are no secret"),
    ],
)
def test_names_are_replaced_as_whole_words_with_their_domains(text: str, expected: str) -> None:
    names = {"node-7.cluster.example.org": "X", "10.0.0.7": "Y", "localhost": "Z", "127.0.0.1": "Z", "": "Z"}
    assert HiddenNames(names)(text) == expected


def test_without_any_name_nothing_changes() -> None:
    assert HiddenNames({})("any text") == "any text"


def test_what_has_no_marks_stays_the_same_object() -> None:
    report = hidden_report(2, 2)
    assert numbered(report, {}) is report
    assert numbered((mark_of("a"), mark_of("b")), {mark_of("a"): 3}) == ("host 3", ANOTHER_HOST)


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_MAX_CTAS", "RCCL_MSCCL_ENABLE", "TORCH_NCCL_BLOCKING_WAIT", "CUDA_DEVICE_MAX_CONNECTIONS",
        "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING",
        "NVTE_FUSED_ATTN", "HSA_ENABLE_SDMA", "GPU_MAX_HW_QUEUES", "OMP_NUM_THREADS",
    ],
)  # fmt: skip
def test_variables_of_communication_and_scheduling_are_kept(name: str) -> None:
    assert environment_variables({name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PATH", "HOME", "USER", "http_proxy", "MASTER_ADDR",
        # On the allow list by their prefixes, but not by their names.
        "NCCL_PSK", "NCCL_AUTH", "NCCL_TOKEN", "NVTE_SECRET", "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY",
        "GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT", "UCX_PASSWORD", "NVSHMEM_CREDENTIALS",
        # Not the prefix itself.
        "MY_NCCL_DEBUG", "OMP_NUM_THREADS_OF_MINE",
    ],
)  # fmt: skip
def test_secrets_and_all_others_are_left_out(name: str) -> None:
    assert environment_variables({name: "x"}) == {}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("/home/alice/topo.xml", "/home/…/topo.xml"),
        ("/Users/bob/a:/home/alice/b", "/Users/…/a:/home/…/b"),
        ("/etc/nccl.conf", "/etc/nccl.conf"),
        ("tcp://alice:pw@host:1", "tcp://…@host:1"),
        ("Ring,Tree", "Ring,Tree"),
    ],
)
def test_users_are_left_out_of_values(value: str, kept: str) -> None:
    assert environment_variables({"NCCL_TOPO_FILE": value}) == {"NCCL_TOPO_FILE": kept}


def test_what_is_kept_is_bounded() -> None:
    kept = environment_variables({f"NCCL_X{number:04d}": "v" * 10_000 for number in range(1000)})
    assert len(kept) == MAX_VARIABLES
    assert {len(value) for value in kept.values()} == {MAX_VALUE_LENGTH}
    assert list(kept) == sorted(kept)
