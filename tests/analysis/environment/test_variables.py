from __future__ import annotations

import pytest

from overlap_callbacks.analysis.environment.privacy import MAX_VALUE_LENGTH, MAX_VARIABLES, environment_variables


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
