"""Hand-made environments of ranks, and samples that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlap_callbacks.analysis.environment.job import add_environments, environment_of, pooled_environment
from overlap_callbacks.analysis.environment.lint import add_traits, lint_job, traits_of
from overlap_callbacks.analysis.results.environment import Finding, JobEnvironment, RankEnvironment
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


def job_environment(windows: Sequence[RankWindow]) -> JobEnvironment | None:
    """The environment of the ranks that sent theirs, with the backend of the first; None if none did."""
    parts = [environment_of(window.rank, window.environment) for window in windows if window.environment is not None]
    return pooled_environment(add_environments(parts), windows[0].backend) if parts else None


def lint(environment: JobEnvironment | None, samples: Sequence[RankWindow]) -> tuple[Finding, ...]:
    """What the rules find in a job with these windows."""
    return () if environment is None else lint_job(environment, add_traits([traits_of(sample) for sample in samples]))
