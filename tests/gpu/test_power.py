"""Power of a real GPU: that the driver means what the fakes take it to mean."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from overlap_callbacks.analysis.power.device import power_figures
from overlap_callbacks.analysis.power.readings import Readings, Segment
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.instruments.power.discovery import NoPower, find_source, identify
from overlap_callbacks.instruments.power.sampler import Sampler
from overlap_callbacks.instruments.power.source import PowerSource


@pytest.fixture
def source() -> Iterator[PowerSource]:
    torch.cuda.init()
    found = find_source(identify())
    if isinstance(found, NoPower):
        pytest.skip(found.reason)  # a GPU in MIG mode, or a container without NVML
    yield found
    found.close()


class Gemms:
    """Keeps the GPU busy with matrix products, on a thread of its own."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Gemms:
        self._thread.start()
        time.sleep(2.0)  # until power is steady
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        while not self._ending.is_set():
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()


def nvidia_smi_w(device_id: str) -> float:
    """What nvidia-smi says now: instantaneous power where it knows it, else the average."""
    for field in ("power.draw.instant", "power.draw"):
        command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", device_id]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            return float(done.stdout.strip())
        except ValueError:
            continue
    pytest.skip(f"nvidia-smi gives no power: {done.stdout} {done.stderr}")


def compare_with_nvidia_smi(source: PowerSource) -> None:
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(20):
        first = source.sample().power_w
        theirs.append(nvidia_smi_w(source.info.device_id))
        second = source.sample().power_w
        assert first is not None
        assert second is not None
        ours.append((first + second) / 2)
        time.sleep(0.1)
    print(f"\n{source.info.power_kind}: {statistics.mean(ours):.1f} W, nvidia-smi {statistics.mean(theirs):.1f} W")
    assert statistics.mean(ours) == pytest.approx(statistics.mean(theirs), rel=0.05)


needs_nvidia_smi = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi")


@needs_nvidia_smi
def test_power_at_idle_agrees_with_nvidia_smi(source: PowerSource) -> None:
    time.sleep(3.0)
    compare_with_nvidia_smi(source)


@needs_nvidia_smi
def test_power_under_load_agrees_with_nvidia_smi(source: PowerSource) -> None:
    idle_w = source.sample().power_w
    with Gemms():
        compare_with_nvidia_smi(source)
        busy_w = source.sample().power_w
    assert idle_w is not None
    assert busy_w is not None
    assert busy_w > 1.2 * idle_w


def test_energy_from_readings_agrees_with_the_counter(source: PowerSource) -> None:
    if not source.info.has_energy:
        pytest.skip("the device has no energy counter")
    sampler = Sampler(source)
    with Gemms():
        start_ns = time.perf_counter_ns()
        sampler.start()
        time.sleep(10.5)
        sampler.stop(10)
        end_ns = time.perf_counter_ns()
    readings = sampler.readings()
    block = Segment(start_ns, end_ns, Mode.OVERLAPPED, 1)
    found = power_figures(source.info, readings, [block], interval_s=sampler.interval_s, late=sampler.late).modes[0]
    counted_w, sampled_w = found.counted_w, found.sampled_w
    print(f"\ncounter {counted_w} W, readings {sampled_w} W, {sampler.late} left out, {found}")
    assert counted_w is not None
    assert sampled_w == pytest.approx(counted_w, rel=0.03)
    assert found.energy_method == "counter"


def test_which_power_there_is_is_named(source: PowerSource) -> None:
    print(f"\n{source.info}")
    assert source.info.power_kind in (
        "instantaneous",
        "1 s average",
        "average, over a time that AMD does not publish",
    )
    assert source.info.tdp_w is None or source.info.tdp_w > 50


def test_a_busy_gpu_is_seen_to_be_busy(source: PowerSource) -> None:
    readings = []
    with Gemms():
        for _ in range(10):
            readings.append(source.sample())
            time.sleep(0.15)
    last = readings[-1]
    print(f"\n{last}")
    assert last.sm_clock_mhz is None or last.sm_clock_mhz > 100
    assert last.temperature_c is None or 10 < last.temperature_c < 120
    assert last.reasons is None or "gpu_idle" not in last.reasons
    for reading in readings:
        use = reading.utilisation
        if use is not None:
            assert use.sm is None or 0.5 < use.sm <= 1.01
            assert use.tensor is None or 0.1 < use.tensor <= 1.01
            assert use.dram is None or 0 <= use.dram <= 1.01


def test_time_of_a_read(source: PowerSource) -> None:
    times_us = []
    for _ in range(100):
        start = time.perf_counter_ns()
        source.sample()
        times_us.append((time.perf_counter_ns() - start) / 1e3)
        time.sleep(0.02)
    ordered = sorted(times_us)
    print(
        f"\none read: median {ordered[50]:.0f} us, 99th percentile {ordered[98]:.0f} us, longest {ordered[-1]:.0f} us"
    )
    readings = Readings.of([source.sample() for _ in range(3)])
    assert len(readings) == 3


@pytest.mark.parametrize("by", ["index", "uuid", "reversed"])
def test_a_device_is_found_whatever_is_visible_and_in_whatever_order(source: PowerSource, by: str) -> None:
    if torch.version.hip is not None:
        pytest.skip("NVIDIA's variable")
    import pynvml

    count = torch.cuda.device_count()
    uuids = [find_device_id(i) for i in range(count)]
    assert len(set(uuids)) == count
    visible = {"index": str(count - 1), "uuid": uuids[-1], "reversed": ",".join(reversed(uuids))}[by]
    code = (
        "import torch; torch.cuda.init()\n"
        "from overlap_callbacks.instruments.power.discovery import *\n"
        "print(find_source(identify(0)).info.device_id)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    if "CUDA_VISIBLE_DEVICES" not in os.environ:  # else an index counts among those visible here
        assert done.stdout.strip() == uuids[-1]
    assert pynvml.nvmlDeviceGetHandleByUUID(done.stdout.strip())


def find_device_id(index: int) -> str:
    found = find_source(identify(index), utilisation=False)
    assert not isinstance(found, NoPower), found.reason
    found.close()
    return found.info.device_id
