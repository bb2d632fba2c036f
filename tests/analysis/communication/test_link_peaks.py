"""Effective bandwidth by size, and the peaks of links that a record tells."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.communication.link_peaks import LINKS, Peaks, bandwidths, link_of, peaks_of
from overlap_callbacks.analysis.environment.job import add_environments, environment_of, pooled_environment
from overlap_callbacks.analysis.results.arrivals import ONE_HOST, SEVERAL_HOSTS, SizeTransfer
from tests.environments import gpu_rank


def row(**changes: Any) -> SizeTransfer:
    fields = {
        "operator": "allreduce_", "dimension": "data", "group_size": 4, "reach": ONE_HOST, "size": 20, "calls": 2,
        "bytes": 2 * 2**20, "transfer_ms": 0.2,
    }  # fmt: skip
    return SizeTransfer(**{**fields, **changes})


def test_bandwidth_is_of_the_wire_and_its_share_of_the_link_that_the_group_needs() -> None:
    peaks = Peaks(link_of("nvlink4", "--link-peak"), link_of("50", "--network-peak"))
    within, between, unknown = bandwidths(
        [row(), row(reach=SEVERAL_HOSTS), row(reach="", operator="_allgather_base_")], peaks
    )
    # 1 MiB in 0.1 ms; an all-reduce of four ranks sends 6/4 of it.
    assert within.gb_s == pytest.approx(1.5 * 2**20 / 0.1e-3 / 1e9)
    assert (within.mean_bytes, within.transfer_ms) == (2**20, 0.1)
    assert within.peak_fraction == pytest.approx(within.gb_s / 450)
    assert between.peak_fraction == pytest.approx(between.gb_s / 50)
    assert unknown.gb_s == pytest.approx(within.gb_s / 2)
    assert unknown.peak_fraction is None


def test_rows_that_cannot_be_are_left_out() -> None:
    broken = [
        row(calls=0), row(bytes=-1), row(transfer_ms=0.0), row(transfer_ms=float("nan")), row(group_size=1),
        row(size=99),
    ]  # fmt: skip
    assert bandwidths(broken, Peaks()) == []


@pytest.mark.parametrize(
    ("device", "nvlink", "name"),
    [
        ("NVIDIA H200", True, "nvlink4"),
        ("NVIDIA H100 80GB HBM3", True, "nvlink4"),
        ("NVIDIA A100-SXM4-80GB", True, "nvlink3"),
        ("Tesla V100-SXM2-16GB", True, "nvlink2"),
        ("NVIDIA B200", True, "nvlink5"),
        ("NVIDIA H800", True, "nvlink-8x25"),
        ("NVIDIA H100 PCIe", True, None),  # a bridge between two cards
        ("NVIDIA H100 PCIe", False, "pcie5"),
        ("NVIDIA L40S", False, "pcie4"),
        ("Tesla T4", False, "pcie3"),
        ("Some other", True, None),
    ],
)
def test_the_link_within_a_host_follows_from_transport_and_device(device: str, nvlink: bool, name: str | None) -> None:
    ranks = [gpu_rank(rank, per_host=2, device=device, host_link="PCIe") for rank in range(2)]
    if not nvlink:
        ranks = [msgspec.structs.replace(own, nvlink_devices=()) for own in ranks]
    sums = add_environments([environment_of(rank, own) for rank, own in enumerate(ranks)])
    found = peaks_of(pooled_environment(sums, "nccl"))
    assert (found.within and found.within.name, found.between) == (name, None)
    assert peaks_of(pooled_environment(sums, "nccl"), Peaks(link_of("80", "x"))).within == link_of("80", "x")
    assert peaks_of(pooled_environment(sums, "gloo")) == Peaks()
    assert peaks_of(None) == Peaks()


def test_links_are_given_by_name_or_in_gb_s() -> None:
    assert link_of("IB-NDR", "--network-peak").gb_s == 50
    assert link_of("12.5", "--network-peak").gb_s == 12.5
    assert len({link.name for link in LINKS}) == len(LINKS)
    for wrong in ("fast", "-1", "0", "nan", "inf"):
        with pytest.raises(
            ValueError, match=r"--network-peak must be a positive number of GB/s, or one of nvlink1, .*; got"
        ):
            link_of(wrong, "--network-peak")
