from __future__ import annotations

import itertools
import re

import pytest

from overlap_callbacks.analysis.peaks import DEVICES, PRECISIONS, peak_of


@pytest.mark.parametrize(
    ("device", "precision", "tflop_per_s"),
    [
        # Half of what data sheets give with sparsity: 1,979 and 3,958 (H100 SXM), 1,513 (PCIe), 1,671 (NVL).
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA B200", "fp8", 4500.0),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X", "bf16", 191.5),
    ],
)
def test_a_device_has_its_own_dense_peak(device: str, precision: str, tflop_per_s: float) -> None:
    found = peak_of(device, precision)
    assert found is not None
    assert found.flop_per_s == pytest.approx(tflop_per_s * 1e12)
    assert found.source.startswith("https://")


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "bf16"),
        ("", "bf16"),
        ("NVIDIA H100", "bf16"),  # which of three?
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA H300", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),  # it has no such cores
        ("NVIDIA A100-SXM4-80GB", "fp8"),
    ],
)
def test_what_is_not_known_has_no_peak(device: str, precision: str) -> None:
    assert peak_of(device, precision) is None


def test_rates_rise_as_precision_falls_and_each_row_has_a_pattern_and_a_document() -> None:
    for device in DEVICES:
        re.compile(device.name)
        assert device.source.startswith("https://")
        assert device.tflop_per_s.keys() <= set(PRECISIONS)
        # Ada has as many of tf32 as of fp32.
        rates = [device.tflop_per_s[name] for name in ("fp32", "tf32", "fp16", "fp8") if name in device.tflop_per_s]
        assert all(slower <= faster for slower, faster in itertools.pairwise(rates)), device.name
