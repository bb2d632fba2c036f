"""What reading power costs: CPU time, and the step time of training beside it.

    python benchmarks/power.py [--quick] [--json FILE]

Side by side in one run: training alone, training beside this library's sampler, and, where ``zeus`` is installed,
training beside its ``PowerMonitor``, both reading instantaneous power of one GPU. Where there is no GPU, fake drivers
of NVIDIA and AMD are built and read through the real bindings: then the times hold all but the drivers' own work, and
the output says so.

The share of a core is taken twice: in a process that does nothing else, where all that a tick needs has gone cold since
the tick before, and beside training, where the core is awake.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.about import about
from overlap_callbacks import __version__
from overlap_callbacks.instruments.power.discovery import DeviceIdentity, NoPower, find_source
from overlap_callbacks.instruments.power.sampler import Sampler
from overlap_callbacks.instruments.power.source import PowerSource

FAKE = "OVERLAP_BENCHMARK_FAKE_DRIVER"
GOALS = {0.1: "under 0.1 % of a core", 0.02: "under 1 % of a core"}
STEPS_PER_BLOCK = 20


def with_a_driver() -> bool:
    """Whether the driver is a fake one; starts this program again with one where there is no other."""
    if os.environ.get(FAKE):
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        return False
    except OSError:
        pass
    from tests.instruments.power.fakes import build

    if build.compiler() is None:
        sys.exit("there is no NVIDIA driver, and no C compiler to build a fake one with")
    folders = str(build.nvml().parent), str(build.amdsmi().parent), os.environ.get("LD_LIBRARY_PATH", "")
    path = os.pathsep.join(part for part in folders if part)
    environment = {**os.environ, FAKE: "1", "LD_LIBRARY_PATH": path, "FAKE_SCRIPT": "gpus=1;base_w=250"}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def make_source() -> PowerSource:
    import pynvml

    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    pynvml.nvmlShutdown()
    source = find_source(DeviceIdentity("nvidia", uuid=uuid))
    if isinstance(source, NoPower):
        sys.exit(source.reason)
    return source


def make_amd_source() -> PowerSource:
    """The fake one: how torch names a real AMD device is not known without it."""
    ctypes.CDLL("libamd_smi.so")  # the package looks for it among the loaded ones, not on LD_LIBRARY_PATH
    source = find_source(DeviceIdentity("amd", pci_bus_id="0000:20:00.0"))
    if isinstance(source, NoPower):
        sys.exit(source.reason)
    return source


def cpu_ns(pid: int) -> int:
    """CPU time of a process so far, all its threads, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


class Zeus:
    """zeus's ``PowerMonitor``, which reads in a process of its own; stopped and continued by signals."""

    def __init__(self, interval_s: float) -> None:
        from zeus.monitor.power import PowerMonitor

        start = time.perf_counter()
        self._monitor = PowerMonitor(
            gpu_indices=[0], update_period=interval_s, max_samples_per_gpu=1000, power_domains=["device_instant"]
        )
        self.start_s = time.perf_counter() - start
        (process,) = self._monitor.processes.values()
        assert process.pid is not None
        self.pid = process.pid
        self.pause()

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def close(self) -> None:
        self.resume()
        self._monitor.stop()


def read_us(source: PowerSource, reads: int) -> float:
    """CPU time of one read, median, in us; driver included."""
    times = []
    for _ in range(reads):
        start = time.thread_time_ns()
        source.sample()
        times.append(time.thread_time_ns() - start)
    return statistics.median(times) / 1e3


Beside = Callable[[float], object]  # what the main thread does for so many seconds


def train_for(seconds: float) -> None:
    """Train as ``step_times`` does."""
    step, end = make_step(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()


def sampler_share(source: PowerSource, interval_s: float, seconds: float, beside: Beside) -> dict[str, float]:
    """Share of a core that the sampler's thread takes, and the ticks that it left out."""
    sampler = Sampler(source, interval_s=interval_s)
    start = time.perf_counter()
    sampler.start()
    beside(seconds)
    sampler.stop(10)
    elapsed_s = time.perf_counter() - start
    return {"share": sampler.cpu_s / elapsed_s, "readings": len(sampler.readings()), "late": sampler.late}


def waking_share(interval_s: float, seconds: float, beside: Beside) -> dict[str, float]:
    """Share of a core that a thread takes which wakes as often and does nothing: what no Python sampler goes below."""
    taken_s, elapsed_s = 0.0, 1.0

    def wake() -> None:
        nonlocal taken_s, elapsed_s
        lock = threading.Lock()
        lock.acquire()
        start = time.perf_counter()
        for tick in range(1, round(seconds / interval_s) + 1):
            lock.acquire(timeout=max(start + tick * interval_s - time.perf_counter(), 0))
        taken_s, elapsed_s = time.thread_time(), time.perf_counter() - start

    thread = threading.Thread(target=wake)
    thread.start()
    beside(seconds)
    thread.join()
    return {"share": taken_s / elapsed_s}


def zeus_share(interval_s: float, seconds: float, beside: Beside) -> dict[str, float]:
    """Share of a core that zeus's process takes once it runs."""
    zeus = Zeus(interval_s)
    zeus.resume()
    time.sleep(0.5)
    start, before = time.perf_counter(), cpu_ns(zeus.pid)
    beside(seconds)
    share = (cpu_ns(zeus.pid) - before) / 1e9 / (time.perf_counter() - start)
    zeus.close()
    return {"share": share, "start_s": zeus.start_s}


def make_step() -> Callable[[], None]:
    """A training step of a small model."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(256, 512, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def step_times(arms: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], rounds: int) -> dict[str, np.ndarray]:
    """Median step time of each block, by arm; the arms take turns in changing order.

    Args:
        arms: what starts and what stops each.
        rounds: blocks of each arm.
    """
    step = make_step()
    medians: dict[str, list[float]] = {arm: [] for arm in arms}
    orders = list(itertools.permutations(arms))
    for i in range(rounds + 1):
        for arm in orders[(i * 7) % len(orders)]:
            start_arm, stop_arm = arms[arm]
            start_arm()
            times = []
            for j in range(STEPS_PER_BLOCK):
                start = time.perf_counter_ns()
                step()
                if j:  # the first step of a block pays for what the arm before left in the caches
                    times.append(time.perf_counter_ns() - start)
            stop_arm()
            if i:
                medians[arm].append(statistics.median(times) / 1e6)
    return {arm: np.array(values) for arm, values in medians.items()}


def ratio_to(base: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Median of the blocks' ratios, with the 95 % interval of a median."""
    from scipy import stats

    ratios = np.sort(other / base)
    below = int(stats.binom.ppf(0.025, len(ratios), 0.5))
    low, high = ratios[max(below - 1, 0)], ratios[min(len(ratios) - below, len(ratios) - 1)]
    return {"ratio": float(np.median(ratios)), "low": float(low), "high": float(high)}


def shares(
    source: PowerSource, amd: PowerSource | None, seconds: float, where: str, beside: Beside, *, zeus: bool
) -> dict[str, Any]:
    """Shares of a core at each interval, printed; the sampler's, and what it is compared with."""
    figures = {}
    for interval_s in (0.1, 0.02):
        rows: dict[str, Callable[[], dict[str, float]]] = {}
        rows["sampler"] = functools.partial(sampler_share, source, interval_s, seconds, beside)
        if amd is not None and interval_s == amd.default_interval_s:
            rows["sampler, AMD"] = functools.partial(sampler_share, amd, interval_s, seconds, beside)
        rows["a thread that only wakes"] = functools.partial(waking_share, interval_s, seconds, beside)
        if zeus:
            rows["zeus, a process of its own"] = functools.partial(zeus_share, interval_s, seconds, beside)
        for row, measure in rows.items():
            name = f"{row}, at {interval_s * 1e3:.0f} ms"
            figures[f"{name}, {where}"] = cost = measure()
            goal = f"   goal: {GOALS[interval_s]}" if "late" in cost else ""
            late = f", {cost['late']:.0f} ticks left out" if cost.get("late") else ""
            print(f"  {name:<38} {cost['share']:.3%}{late}{goal}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    fake = with_a_driver()
    torch.set_num_threads(1)
    seconds, rounds = (2.0, 4) if options.quick else (20.0, 60)
    try:
        from zeus import __version__ as zeus_version
    except ImportError:
        zeus_version = None
    source = make_source()
    driver = (
        "FAKE drivers: their own work is not in these times" if fake else f"the driver of {source.info.device_name}"
    )
    zeus_words = f"zeus {zeus_version}" if zeus_version else "zeus is not installed: its rows are left out"
    print(f"overlap-callbacks {__version__}, torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}; {driver}; {zeus_words}")
    figures: dict[str, Any] = {"fake_driver": fake}

    figures["read_us"] = read_us(source, 200 if options.quick else 2000)
    print(f"one read, CPU time: {figures['read_us']:.0f} us")
    amd = make_amd_source() if fake else None
    for where, beside in (("alone", time.sleep), ("beside training", train_for)):
        print(f"{where}, share of a core:")
        figures.update(shares(source, amd, seconds, where, beside, zeus=zeus_version is not None))
    if amd is not None:
        amd.close()

    samplers = {interval_s: Sampler(source, interval_s=interval_s) for interval_s in (0.1, 0.02)}
    arms: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "alone": (lambda: None, lambda: None),
        "alone, again": (lambda: None, lambda: None),
    }
    for interval_s, sampler in samplers.items():
        arms[f"sampler at {interval_s * 1e3:.0f} ms"] = (sampler.start, lambda sampler=sampler: sampler.stop(10))
    zeus = Zeus(0.1) if zeus_version else None
    if zeus is not None:
        arms["zeus at 100 ms"] = (zeus.resume, zeus.pause)
    times = step_times(arms, rounds)
    if zeus is not None:
        zeus.close()
    print(f"step time alone: {np.median(times['alone']):.2f} ms; beside it, as a ratio to training alone:")
    for arm in list(arms)[1:]:
        ratio = ratio_to(times["alone"], times[arm])
        figures[f"step time, {arm}"] = ratio
        print(f"  {arm:<20} {ratio['ratio']:.4f} (95 % interval {ratio['low']:.4f} to {ratio['high']:.4f})")
    source.close()
    if options.json:
        device = "fake driver" if fake else source.info.device_name
        environment = about("torch", zeus=zeus_version, device=device)
        options.json.write_text(json.dumps({"environment": environment, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":  # zeus starts a process that imports this file
    main()
