"""Hand-made environments of ranks, and samples that carry them."""

from __future__ import annotations

from typing import Any

from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.window import RankWindow
from tests.samples import window


def gpu_rank(rank: int = 0, *, per_host: int = 8, **changes: Any) -> RankEnvironment:
    """Rank ``rank`` on hosts of H200s, all of whose GPUs NVLink connects."""
    host, slot = divmod(rank, per_host)
    fields: dict[str, Any] = {
        "hostname": f"node-{host}",
        "host_id": f"{host:012x}",
        "cpus": "0-95",
        "num_threads": 1,
        "torch": "2.13.0+cu130",
        "cuda": "13.0",
        "nccl": "2.28.3",
        "driver": "580.65.06",
        "device": "NVIDIA H200",
        "compute_capability": "9.0",
        "num_sms": 132,
        "memory_bytes": 150_000_000_000,
        "device_uuid": f"00000000-0000-4000-8000-{rank:012x}",
        "pci_bus_id": f"0000:{0x10 + slot:02x}:00.0",
        "nvlink_devices": tuple(f"0000:{0x10 + other:02x}:00.0" for other in range(per_host) if other != slot),
    }
    return RankEnvironment(**{**fields, **changes})


def cpu_rank(**changes: Any) -> RankEnvironment:
    """A rank on the one host of a CPU job."""
    fields = {"hostname": "laptop", "host_id": "a", "cpus": "0-7", "num_threads": 1, "torch": "2.13.0+cpu"}
    return RankEnvironment(**{**fields, **changes})


def samples(*environments: RankEnvironment, **changes: Any) -> list[RankWindow]:
    """A window of each rank; of NCCL, unless the ranks train on the CPU."""
    on_gpu = environments[0].device != "cpu"
    fields = {"backend": "nccl", "device": environments[0].device, "num_sms": environments[0].num_sms} if on_gpu else {}
    return [window(rank, environment=e, **{**fields, **changes}) for rank, e in enumerate(environments)]
