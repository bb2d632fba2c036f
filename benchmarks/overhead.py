"""What the library itself costs, measured side by side in one run.

    python benchmarks/overhead.py [--quick] [--parts] [--json FILE]

Each figure compares arms that alternate in short blocks within the same processes, so that a drift of the machine
hits all alike. Host times are CPU-bound and vary with the machine; the ratios are what to look at. Times of one
collective on the backend ``fake`` are CPU time.

The arms of a collective:

- absent: the gate's kernels are not registered. (A job never removes them; this script, in which no other thread
  communicates, may.)
- between windows: registered, and the key off. This is what a job pays in all steps but those of windows.
- recording: within a step of a window.
- at BackendSelect: the form for jobs that use torch.compile, between windows and recording.

The JSON file has an ``environment`` and ``figures``, each with the line that was ``shown`` and its numbers:

- ``monitor, per step outside a window``: ``us``, and ``empty_us`` of two calls that do nothing.
- ``parts of a step, with the optimizer alone`` and ``with the model``: ``us`` added to a step of a small model on one
  rank, in CPU time of the training thread: the median difference to an equal model's step beside it; ``low`` and
  ``high``; ``undisturbed_us``: the difference of the fastest tenths, for a machine with other tenants. The same of
  empty functions in the library's places, as ``empty_...``: what torch's calls of them cost; of the library to those as
  ``over_empty_...``; of absent to absent as ``noise_...``; all after 8 MiB of other data as ``cold_...``.
  ``reporting_us`` a step on the library's own threads; ``load`` of the machine.
- ``gate, one collective``: medians in us of each arm (``absent_us``, ``between_windows_us``, ``recording_us``,
  ``backend_select_between_windows_us``, ``backend_select_recording_us``, ``boxing_us``: a kernel that only
  redispatches); ``ratio``, ``low`` and ``high`` of between windows to absent, with the 95 % interval; and
  ``noise_ratio``, ``noise_low``, ``noise_high`` of absent to absent.
- ``gate, recording, added to a collective`` and ``gate, between windows, added to a collective``: ``us``.
- ``gate, a measured step without collectives``: ``us`` of ``begin_step`` and ``end_step``.
- ``gate, registering``: ``us``, once in a process. ``gate, memory held``: ``kib``. ``process, growth over ... measured
  steps``: ``kib``.
- ``1 MiB Gloo all-reduce, with / without`` and ``DDP demo's median step, attached and idle / absent``: ``with`` and
  ``without`` in us, ``ratio``, ``low``, ``high``, and the same of absent to absent as ``noise_...``; for the demo also
  of CPU time, as ``cpu_...`` and ``cpu_noise_...``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step_parts import parts_of_a_step, show_parts
from overlap_callbacks import OverlapMonitor, Schedule, __version__
from overlap_callbacks.gate.dispatcher import OWN_KEY, dispatcher
from overlap_callbacks.gate.gate import Gate

GOALS = {
    "monitor, per step outside a window": "under 1 us",
    "parts of a step, with the optimizer alone": "at most 2 us",
    "parts of a step, with the model": "at most 2 us, and 20 us after other work: 0.1 % of a step of 20 ms",
    "gate, one collective": "between windows 1.00 to 1.02 times absent",
    "gate, recording, added to a collective": "at most 10 us",
    "1 MiB Gloo all-reduce, with / without": "within absent / absent",
    "DDP demo's median step, attached and idle / absent": "within 0.5 %",
}


def median_us(times_ns: Sequence[float]) -> float:
    return statistics.median(times_ns) / 1e3


def timed_ns(action: Callable[[], Any], calls: int) -> float:
    """CPU time of one call: nothing waits here, and other tenants of the machine do not count."""
    for _ in range(calls // 5):  # the first calls after registering find cold caches
        action()
    start = time.thread_time_ns()
    for _ in range(calls):
        action()
    return (time.thread_time_ns() - start) / calls


def monitor_step_us(rounds: int) -> tuple[float, float]:
    """``step_begin`` and ``step_end`` of an idle monitor, against an empty method call pair; us per step.

    CPU time of the training thread: steps as short as these keep the reporting thread busy with their parts.
    """

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
        start = time.thread_time_ns()
        for i in range(step, step + 1000):
            monitor.step_begin(i)
            monitor.step_end(i)
        with_monitor.append((time.thread_time_ns() - start) // 1000)
        start = time.thread_time_ns()
        for i in range(step, step + 1000):
            empty.begin(i)
            empty.end(i)
        without.append((time.thread_time_ns() - start) // 1000)
        step += 1000
    monitor.close()
    return median_us(with_monitor), median_us(without)


def install(placement: Any) -> None:
    """Register the gate's kernels at one key, as the gate does."""
    dispatcher.placement = placement
    placement.install(dispatcher)


def remove(placement: Any) -> None:
    """What a job never does: take the kernels out. Only while no thread communicates."""
    for library in placement._libraries:
        library._destroy()
    placement._libraries.clear()
    dispatcher.placement = None


def gate_on_null_backend(rounds: int) -> dict[str, Any]:
    """An all-reduce on torch's fake backend, which does nothing; medians of each arm in us, and ratios to absent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    tensor, calls = torch.ones(1), 300

    def all_reduce() -> None:
        dist.all_reduce(tensor, async_op=True)

    key: Any = torch._C._parse_dispatch_key(OWN_KEY)
    redispatch = torch.ops.c10d.allreduce_.default._handle.redispatch_boxed
    below = torch._C._dispatch_keyset_full_after(key)

    def empty_kernel(keyset: Any, *args: Any) -> Any:
        return redispatch(keyset & below, *args)

    def absent() -> float:
        return timed_ns(all_reduce, calls)

    def boxing() -> float:
        library = torch.library.Library("c10d", "IMPL")
        library.impl("allreduce_", empty_kernel, OWN_KEY, with_keyset=True)
        others = torch.library.Library("_", "IMPL")
        others.fallback(torch.library.fallthrough_kernel, OWN_KEY)
        torch._C._dispatch_tls_set_dispatch_key_included(key, True)
        cost_ns = timed_ns(all_reduce, calls)
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)
        library._destroy()
        others._destroy()
        return cost_ns

    def with_gate(placement: Any, recording: bool) -> float:
        gate = Gate()
        install(placement)
        if recording:
            gate.begin_step(sequential=False)
        cost_ns = timed_ns(all_reduce, calls)
        if recording:
            gate.end_step()
        gate.close()
        remove(placement)
        return cost_ns

    own, shared = dispatcher.own_key, dispatcher.backend_select
    arms: dict[str, Callable[[], float]] = {
        "absent": absent,
        "between_windows": lambda: with_gate(own, recording=False),
        "again": absent,
        "recording": lambda: with_gate(own, recording=True),
        "backend_select_between_windows": lambda: with_gate(shared, recording=False),
        "backend_select_recording": lambda: with_gate(shared, recording=True),
        "boxing": boxing,
    }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    order = random.Random(0)  # a fixed order would favour the arms that come after a warm one
    for _ in range(rounds):
        for name in order.sample(list(arms), len(arms)):
            times[name].append(arms[name]())
    registering, gate = [], Gate()
    for _ in range(max(rounds // 4, 4)):
        start = time.perf_counter_ns()
        install(own)
        registering.append(time.perf_counter_ns() - start)
        remove(own)
    gate.register()
    steps = [timed_ns(lambda: (gate.begin_step(sequential=False), gate.end_step()), 100) for _ in range(rounds)]
    gate.close()
    remove(own)
    dist.destroy_process_group()
    ratios = _ratio({"with": times["between_windows"], "without": times["absent"]}, 1)
    noise = _ratio({"with": times["again"], "without": times["absent"]}, 1)
    return {
        **{f"{name}_us": median_us(values) for name, values in times.items() if name != "again"},
        **ratios,
        **{f"noise_{name}": value for name, value in noise.items()},
        "registering_us": median_us(registering),
        "step_us": median_us(steps),
    }


def memory_kib(steps: int) -> tuple[float, float]:
    """What a registered gate holds, and how much the process grows over many measured steps; KiB."""

    def resident_kib() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024

    tracemalloc.start()
    gate = Gate()
    gate.register()
    held = tracemalloc.get_traced_memory()[0] / 1024
    tracemalloc.stop()

    def measure(count: int) -> None:
        for _ in range(count):
            gate.begin_step(sequential=False)
            gate.end_step()

    measure(20)
    start = resident_kib()
    measure(steps)
    grown = resident_kib() - start
    gate.close()
    remove(dispatcher.own_key)
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
    """A 1 MiB all-reduce between windows, and without the gate, twice; medians in us, and ratios."""
    tensor = torch.ones(2**18)
    times: dict[str, list[int]] = {"without": [], "with": [], "again": []}
    orders = list(itertools.permutations(times))
    for i in range(rounds):
        for arm in orders[i % len(orders)]:
            if arm == "with":
                install(dispatcher.own_key)
            dist.barrier()
            for j in range(25):
                start = time.perf_counter_ns()
                dist.all_reduce(tensor)
                if j >= 5:  # in a job the gate is registered once: what comes right after that is not counted
                    times[arm].append(time.perf_counter_ns() - start)
            if arm == "with":
                remove(dispatcher.own_key)
    figures = {arm: median_us(times[arm]) for arm in ("with", "without")} | _ratio(times, 20)
    noise = _ratio({**times, "with": times["again"]}, 20)
    return figures | {f"noise_{key}": value for key, value in noise.items()}


def ddp_steps(rank: int, rounds: int) -> dict[str, float]:
    """The demo's step with the library attached and idle (the gate registered), and absent; medians in us, ratio.

    A third arm, absent again, shows by its own ratio what the machine's noise amounts to.
    """
    from overlap_callbacks.cli.demo.model import GPT, GeneratedText
    from overlap_callbacks.cli.demo.worker import DemoConfig

    config = DemoConfig()
    torch.manual_seed(0)
    model = GPT(config.layers, config.hidden, config.heads, config.sequence)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=config.bucket_mb)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    batches = iter(GeneratedText(rank, config.batch, config.sequence))
    monitor = OverlapMonitor(Schedule(first_step=10**9), sinks=[])
    times: dict[str, list[int]] = {"without": [], "with": [], "again": []}
    cpu: dict[str, list[int]] = {arm: [] for arm in times}
    orders = list(itertools.permutations(times))
    step = 0
    for i in range(rounds + 1):
        for arm in orders[i % len(orders)]:
            if arm == "with":
                install(dispatcher.own_key)
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
                remove(dispatcher.own_key)
    monitor.close()
    figures = {arm: median_us(times[arm]) for arm in ("with", "without")} | _ratio(times, 3)
    for name, other in (
        ("noise", {**times, "with": times["again"]}),
        ("cpu", cpu),
        ("cpu_noise", {**cpu, "with": cpu["again"]}),
    ):
        figures |= {f"{name}_{key}": value for key, value in _ratio(other, 3).items()}
    return figures


def _ratio(times: Mapping[str, Sequence[float]], block: int) -> dict[str, float]:
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
    parser.add_argument("--parts", action="store_true", help="only what each step costs, not collectives")
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

    def write() -> None:
        if arguments.json:
            environment = {"date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__), "device": "cpu",
                           "cores": os.cpu_count(), "python": platform.python_version(), "version": __version__,
                           "command": " ".join(sys.argv)}  # fmt: skip
            arguments.json.write_text(json.dumps({"environment": environment, "figures": figures}, indent=2) + "\n")

    print(f"overlap-callbacks {__version__}, torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    with_monitor, empty = monitor_step_us(rounds(300))
    shown = f"{with_monitor:.2f} us (two empty calls: {empty:.2f})"
    show("monitor, per step outside a window", shown, us=with_monitor, empty_us=empty)
    show_parts(show, parts_of_a_step(rounds(8000)))
    if arguments.parts:
        return write()
    null = gate_on_null_backend(rounds(150))
    registering_us, step_us = null.pop("registering_us"), null.pop("step_us")
    shown = f"{null['ratio']:.4f} ({null['low']:.4f} to {null['high']:.4f}) times absent between windows"
    show("gate, one collective", shown, **null)
    noise = f"{null['noise_ratio']:.4f} ({null['noise_low']:.4f} to {null['noise_high']:.4f})"
    print(f"{'':<54} the machine's noise, absent / absent: {noise}")
    for arm in ("absent", "between_windows", "recording", "backend_select_between_windows", "backend_select_recording"):
        print(f"{'':<54} {arm.replace('_', ' ')}: {null[f'{arm}_us']:.2f} us")
    print(f"{'':<54} a kernel that only redispatches: {null['boxing_us']:.2f} us")
    for arm in ("between windows", "recording"):
        added = null[f"{arm.replace(' ', '_')}_us"] - null["absent_us"]
        show(f"gate, {arm}, added to a collective", f"{added:.2f} us", us=added)
    show("gate, a measured step without collectives", f"{step_us:.1f} us", us=step_us)
    show("gate, registering", f"{registering_us:.0f} us, once in a process", us=registering_us)
    held, grown = memory_kib(rounds(10_000))
    show("gate, memory held", f"{held:.0f} KiB", kib=held)
    show(f"process, growth over {rounds(10_000)} measured steps", f"{grown:.0f} KiB", kib=grown)
    for name, function, count in (
        ("1 MiB Gloo all-reduce, with / without", gloo_all_reduce, rounds(400)),
        ("DDP demo's median step, attached and idle / absent", ddp_steps, rounds(150)),
    ):
        measured = two_ranks(function, count)
        interval = f"95 % interval {measured['low']:.4f} to {measured['high']:.4f}"
        arms = f"{measured['with']:.0f} / {measured['without']:.0f} us"
        show(name, f"{measured['ratio']:.4f} ({interval}; {arms})", **measured)
        if "noise_ratio" in measured:
            for prefix, what in (
                ("noise", "the machine's noise, absent / absent"),
                ("cpu", "in CPU time, attached and idle / absent"),
                ("cpu_noise", "in CPU time, absent / absent"),
            ):
                if f"{prefix}_ratio" not in measured:
                    continue
                ratio, low, high = (measured[f"{prefix}_{key}"] for key in ("ratio", "low", "high"))
                print(f"{'':<54} {what}: {ratio:.4f} ({low:.4f} to {high:.4f})")
    write()


if __name__ == "__main__":
    main()
