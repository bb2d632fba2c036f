"""What the library itself costs, measured side by side in one run.

    python benchmarks/overhead.py [--quick]

Each figure compares two arms that alternate in short blocks within the same processes, so that a drift of the machine
hits both alike. Host times are CPU-bound and vary with the machine; the ratios are what to look at.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from overlap_callbacks import OverlapMonitor, Schedule, __version__
from overlap_callbacks.gate.gate import Gate

GOALS = {
    "monitor, per step outside a window": "under 1 us",
    "gate, pass-through, added to a collective": "at most 7 us",
    "gate, recording, added to a collective": "at most 10 us",
    "1 MiB Gloo all-reduce, with / without": "at most 1.03",
    "DDP demo's median step, attached and idle / absent": "within 0.5 %",
}


def median_us(times_ns: list[int]) -> float:
    return statistics.median(times_ns) / 1e3


def timed_ns(action: Callable[[], Any], calls: int) -> int:
    start = time.perf_counter_ns()
    for _ in range(calls):
        action()
    return (time.perf_counter_ns() - start) // calls


def monitor_step_us(rounds: int) -> tuple[float, float]:
    """``step_begin`` and ``step_end`` of an idle monitor, against an empty method call pair; us per step."""

    class Empty:
        def begin(self, step: int) -> None:
            pass

        def end(self, step: int) -> None:
            pass

    monitor = OverlapMonitor(Schedule(first_step=10**9), sinks=[])
    monitor.step_begin(0)
    monitor.step_end(0)
    empty, step = Empty(), 1
    with_monitor, without = [], []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for i in range(step, step + 1000):
            monitor.step_begin(i)
            monitor.step_end(i)
        with_monitor.append((time.perf_counter_ns() - start) // 1000)
        start = time.perf_counter_ns()
        for i in range(step, step + 1000):
            empty.begin(i)
            empty.end(i)
        without.append((time.perf_counter_ns() - start) // 1000)
        step += 1000
    monitor.close()
    return median_us(with_monitor), median_us(without)


def gate_on_null_backend(rounds: int) -> dict[str, float]:
    """An all-reduce on torch's fake backend, which does nothing, in us.

    Absent, with a kernel that does nothing but redispatch (what torch takes to call into Python and back), pass-through
    and recording.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor = torch.ones(1)
    gate = Gate()

    def all_reduce() -> None:
        dist.all_reduce(tensor, async_op=True)

    arms = ("absent", "empty kernel", "pass-through", "recording", "register", "remove")
    times: dict[str, list[int]] = {arm: [] for arm in arms}
    redispatch = torch.ops.c10d.allreduce_.default._handle.redispatch_boxed
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def empty_kernel(keyset: Any, *args: Any) -> Any:
        return redispatch(keyset & below, *args)

    for _ in range(rounds):
        times["absent"].append(timed_ns(all_reduce, 300))
        library = torch.library.Library("c10d", "IMPL")
        library.impl("allreduce_", empty_kernel, "BackendSelect", with_keyset=True)
        times["empty kernel"].append(timed_ns(all_reduce, 300))
        library._destroy()
        start = time.perf_counter_ns()
        gate.register()
        times["register"].append(time.perf_counter_ns() - start)
        times["pass-through"].append(timed_ns(all_reduce, 300))
        gate.begin_step(sequential=False)
        times["recording"].append(timed_ns(all_reduce, 300))
        gate.end_step()
        start = time.perf_counter_ns()
        gate.remove()
        times["remove"].append(time.perf_counter_ns() - start)
    gate.close()
    dist.destroy_process_group()
    return {name: median_us(values) for name, values in times.items()}


def memory_kib(cycles: int) -> tuple[float, float]:
    """What a registered gate holds, and how much the process grows over many cycles of register and remove; KiB."""

    def resident_kib() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024

    gate = Gate()
    for _ in range(20):
        gate.register()
        gate.remove()
    start = resident_kib()
    for _ in range(cycles):
        gate.register()
        gate.remove()
    grown = resident_kib() - start
    gate.close()
    tracemalloc.start()
    gate = Gate()
    gate.register()
    held = tracemalloc.get_traced_memory()[0] / 1024
    tracemalloc.stop()
    gate.close()
    return held, grown


def two_ranks(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(rank, *args)`` on two Gloo ranks; rank 0's result."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(function, args, folder), nprocs=2)
        return json.loads(Path(folder, "result").read_text())


def _rank(rank: int, function: Callable[..., Any], args: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    result = function(rank, *args)
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def gloo_all_reduce(rank: int, rounds: int) -> dict[str, float]:
    """A 1 MiB all-reduce with the gate registered as a pass-through, and without; medians in us, and their ratio."""
    tensor = torch.ones(2**18)
    gate = Gate()
    times: dict[str, list[int]] = {"without": [], "with": []}
    for i in range(rounds):
        # ABBA: the arm that goes first alternates.
        for arm in ("without", "with") if i % 2 else ("with", "without"):
            if arm == "with":
                gate.register()
            dist.barrier()
            for j in range(25):
                start = time.perf_counter_ns()
                dist.all_reduce(tensor)
                if j >= 5:  # in a job the gate is registered once: what comes right after that is not counted
                    times[arm].append(time.perf_counter_ns() - start)
            if arm == "with":
                gate.remove()
    gate.close()
    return {arm: median_us(values) for arm, values in times.items()} | _ratio(times, 20)


def ddp_steps(rank: int, rounds: int) -> dict[str, float]:
    """The demo's step with the library attached and idle (the gate registered), and absent; medians in us, ratio.

    A third arm, absent again, shows by its own ratio what the machine's noise amounts to.
    """
    from overlap_callbacks.cli.demo.config import DemoConfig
    from overlap_callbacks.cli.demo.model import GPT
    from overlap_callbacks.cli.demo.text import GeneratedText

    config = DemoConfig()
    torch.manual_seed(0)
    model = GPT(config.layers, config.hidden, config.heads, config.sequence)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=config.bucket_mb)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    batches = iter(GeneratedText(rank, config.batch, config.sequence))
    monitor = OverlapMonitor(Schedule(first_step=10**9), sinks=[])
    gate = Gate()
    times: dict[str, list[int]] = {"without": [], "with": [], "again": []}
    cpu: dict[str, list[int]] = {arm: [] for arm in times}
    orders = list(itertools.permutations(times))
    step = 0
    for i in range(rounds + 1):
        for arm in orders[i % len(orders)]:
            if arm == "with":
                gate.register()
            for j in range(4):
                tokens, targets = next(batches)
                start, cpu_start = time.perf_counter_ns(), time.process_time_ns()
                if arm == "with":
                    monitor.step_begin(step)
                optimizer.zero_grad()
                ddp(tokens, targets).backward()
                optimizer.step()
                if arm == "with":
                    monitor.step_end(step)
                if i and j:  # the first round settles DDP's buckets, the first step of a block the caches
                    times[arm].append(time.perf_counter_ns() - start)
                    cpu[arm].append(time.process_time_ns() - cpu_start)
                step += 1
            if arm == "with":
                gate.remove()
    gate.close()
    monitor.close()
    found = {arm: median_us(times[arm]) for arm in ("with", "without")} | _ratio(times, 3)
    for name, other in (
        ("noise", {**times, "with": times["again"]}),
        ("cpu", cpu),
        ("cpu_noise", {**cpu, "with": cpu["again"]}),
    ):
        found |= {f"{name}_{key}": value for key, value in _ratio(other, 3).items()}
    return found


def _ratio(times: dict[str, list[int]], block: int) -> dict[str, float]:
    """Median over neighbouring blocks of the ratio of their medians, with its 95 % interval.

    The interval is that of a median (order statistics, binomial): a machine with other tenants has steps of several
    times the usual length, which a mean would follow.
    """
    import numpy as np
    from scipy import stats

    medians = {arm: np.median(np.array(values).reshape(-1, block), axis=1) for arm, values in times.items()}
    ratios = np.sort(medians["with"] / medians["without"])
    below = int(stats.binom.ppf(0.025, len(ratios), 0.5))
    low, high = ratios[max(below - 1, 0)], ratios[min(len(ratios) - below, len(ratios) - 1)]
    return {"ratio": float(np.median(ratios)), "low": float(low), "high": float(high)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    scale = 0.1 if arguments.quick else 1.0

    def rounds(full: int) -> int:
        return max(4, int(full * scale))

    figures: dict[str, Any] = {}

    def show(name: str, value: str, **raw: Any) -> None:
        figures[name] = {"shown": value, **raw}
        goal = f"   goal: {GOALS[name]}" if name in GOALS else ""
        print(f"{name:<54} {value}{goal}", flush=True)

    print(f"overlap-callbacks {__version__}, torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    with_monitor, empty = monitor_step_us(rounds(300))
    show("monitor, per step outside a window", f"{with_monitor:.2f} us (two empty calls: {empty:.2f})", us=with_monitor)
    null = gate_on_null_backend(rounds(150))
    floor = null["empty kernel"] - null["absent"]
    show("torch's own boxing into Python and back", f"{floor:.1f} us on top of {null['absent']:.1f}", us=floor)
    for arm in ("pass-through", "recording"):
        added = null[arm] - null["absent"]
        show(f"gate, {arm}, added to a collective", f"{added:.1f} us, {added - floor:.1f} of it ours", us=added)
    show("gate, registering", f"{null['register']:.0f} us", us=null["register"])
    show("gate, removing", f"{null['remove']:.0f} us", us=null["remove"])
    held, grown = memory_kib(rounds(1000))
    show("gate, memory held", f"{held:.0f} KiB", kib=held)
    show(f"process, growth over {rounds(1000)} cycles of registering", f"{grown:.0f} KiB", kib=grown)
    for name, function, count in (
        ("1 MiB Gloo all-reduce, with / without", gloo_all_reduce, rounds(400)),
        ("DDP demo's median step, attached and idle / absent", ddp_steps, rounds(150)),
    ):
        found = two_ranks(function, count)
        interval = f"95 % interval {found['low']:.4f} to {found['high']:.4f}"
        arms = f"{found['with']:.0f} / {found['without']:.0f} us"
        show(name, f"{found['ratio']:.4f} ({interval}; {arms})", **found)
        if "noise_ratio" in found:
            for prefix, what in (
                ("noise", "the machine's noise, absent / absent"),
                ("cpu", "in CPU time, attached and idle / absent"),
                ("cpu_noise", "in CPU time, absent / absent"),
            ):
                ratio, low, high = (found[f"{prefix}_{key}"] for key in ("ratio", "low", "high"))
                print(f"{'':<54} {what}: {ratio:.4f} ({low:.4f} to {high:.4f})")
    if arguments.json:
        environment = {"date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__), "device": "cpu",
                       "cores": os.cpu_count(), "python": platform.python_version(), "version": __version__,
                       "command": " ".join(sys.argv)}  # fmt: skip
        arguments.json.write_text(json.dumps({"environment": environment, "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
