"""What a window costs rank 0 of a job of thousands of ranks: simulated, against a real store.

    python benchmarks/scale.py --ranks 4096 [--collectives 4000] [--windows 3] [--processes 2] [--json [FILE]]

One process serves a ``TCPStore``. Rank 0 has a process of its own, with the library's own threads: the order check and
the report of each window, to the line of the record. Some further processes play all other ranks in turn, with the same
code: what each hands in to the order check, its part of the report, and the putting together on the way up. What a rank
measured is made up, in the size of a real window; the rest is real. Rank 0 begins when its children have sent, so that
its time is not that of two cores that play thousands of ranks. CPU time is of rank 0's process, all threads. It is the
median over the windows; the first, which also loads what is needed, is left out. Then the ranks check 64 different
orders.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import platform
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from overlap_callbacks import OverlapReport, Schedule
from overlap_callbacks.analysis.job.part import encode, part_of
from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.kernel_times import KernelTime, PairTime
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.window import CollectiveTime, ProfiledBlock, RankWindow, TimedBlock
from overlap_callbacks.gate.deadlock import CollectiveSequence, Item
from overlap_callbacks.monitor.background import reporter as reporting
from overlap_callbacks.monitor.background.budget import WindowBudget
from overlap_callbacks.monitor.background.order_check import (
    Decision,
    OrderChecker,
    Ruling,
    forward_ruling,
    submit,
)
from overlap_callbacks.monitor.background.reporter import Reporter, gather_from_children
from overlap_callbacks.monitor.background.store import Connection, Job, StoreChannel
from overlap_callbacks.monitor.background.submissions import OrderMessage, RecordedKinds, Submissions, WindowConfig
from overlap_callbacks.monitor.background.tree import Exchange, Tree
from overlap_callbacks.monitor.config import MonitorConfig
from overlap_callbacks.monitor.session import run_info
from overlap_callbacks.sinks import JsonlSink
from tests.analysis.communication.layouts import Layout

TIMEOUT_S = 3600.0
DIFFERENT = 64
SCHEDULE = Schedule()


class CountingStore:
    """A client of the store that counts what it sends and gets."""

    def __init__(self, port: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=TIMEOUT_S))
        self.num_bytes = 0

    def set(self, key: str, value: bytes) -> None:
        self.num_bytes += len(key) + len(value)
        self._store.set(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        found = self._store.compare_set(key, expected, desired)
        self.num_bytes += len(key) + len(expected) + len(desired) + len(found)
        return found

    def check(self, keys: list[str]) -> bool:
        self.num_bytes += sum(map(len, keys))
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        self.num_bytes += len(key)
        return self._store.delete_key(key)


class Client:
    """The connection of one process, and how often it was made."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.made = 0
        self.store: CountingStore | None = None
        self.connection = Connection(self._connect)

    def _connect(self) -> CountingStore:
        self.made += 1
        self.store = CountingStore(self.port)
        return self.store

    def channel(self, rank: int, ranks: int) -> StoreChannel:
        return StoreChannel(Job(rank, ranks, "gloo"), "scale", self.connection)

    @property
    def num_bytes(self) -> int:
        return 0 if self.store is None else self.store.num_bytes


# -- what ranks have to say


def layout_of(ranks: int) -> Layout:
    """Dimensions of the job: tensor and pipeline of 8 each where the ranks are enough."""
    return Layout(8, 8, ranks // 64) if ranks % 64 == 0 else Layout(1, 1, ranks)


def environment_of(rank: int, ranks: int) -> RankEnvironment:
    """What a rank of a large job would tell of itself."""
    layout = layout_of(ranks)
    host, place = divmod(rank, layout.ranks_per_host)
    return RankEnvironment(
        hostname=f"gpu-node-{host:04d}", host_id=f"{host:032x}", cpus="0-95", num_threads=12, torch="2.13.0",
        cuda="13.0", nccl="2.28.3", driver="580.82.07", device="NVIDIA H100 80GB HBM3", compute_capability="9.0",
        num_sms=132, memory_bytes=85_000_000_000, device_uuid=f"GPU-{rank:032x}", pci_bus_id=f"0000:{place:02x}:00.0",
        nvlink_devices=tuple([f"0000:{each:02x}:00.0" for each in range(layout.ranks_per_host) if each != place]),
        framework="megatron 0.16.1", variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "WARN"},
    )  # fmt: skip


def window_of(rank: int, number: int, ranks: int) -> RankWindow:
    """A window as a rank would have measured it, of real size: 24 blocks, 200 kernels, 60 pairs, 12 collectives."""
    draw = np.random.default_rng((rank, number))
    arms = (Mode.OVERLAPPED, Mode.SEQUENTIAL, Mode.SEQUENTIAL, Mode.OVERLAPPED)
    noise = iter(draw.lognormal(0.0, 0.02, 1000).tolist())

    def block_of(block: int, arm: Mode) -> ProfiledBlock:
        overlapped = arm is Mode.OVERLAPPED
        return ProfiledBlock(
            mode=arm, block=block, num_steps=1, compute_ms=(66.0 if overlapped else 60.0) * next(noise),
            compute_busy_ms=60.0 * next(noise), comm_ms=30.0 * next(noise), comm_busy_ms=28.0 * next(noise),
            hidden_comm_ms=20.0 * next(noise) if overlapped else 0.0,
            covered_compute_ms=22.0 * next(noise) if overlapped else 0.0, copy_ms=0.5 * next(noise),
            idle_ms=5.0 * next(noise), step_ms=100.0 * next(noise),
        )  # fmt: skip

    return RankWindow(
        rank=rank, window=number, first_step=20 + 500 * number, num_steps=65, complete=True, backend="gloo",
        device="cpu", wall_ms=7500.0 * next(noise),
        timed=tuple([
            TimedBlock(arm, block, ((100.0 if arm is Mode.OVERLAPPED else 120.0) * next(noise), 100.0 * next(noise)))
            for block, arm in enumerate(arms * 4)
        ]),
        profiled=tuple([block_of(block, arm) for block, arm in enumerate(arms * 2)]),
        kernels=tuple([
            KernelTime(f"aten::kernel_with_a_long_name_{kernel:03d}<float, {kernel % 7}>", kernel % 10 == 0, 10.0,
                       10.0, 0.33 * next(noise), 0.30 * next(noise), 0)
            for kernel in range(200)
        ]),
        pairs=tuple([
            PairTime(f"family {pair % 12}", False, f"collective {pair // 12}", 10.0, 1.0, next(noise), next(noise))
            for pair in range(60)
        ]),
        collectives=tuple([
            CollectiveTime("allreduce_", f"group {number}", 8, "gloo", 10, 4096, 4096, next(noise), "data", 4096.0)
            for number in range(12)
        ]),
        report_cpu_ms=20.0 * next(noise),
        terms="terms",
        environment=environment_of(rank, ranks),
        messages=layout_of(ranks).messages(rank),
    )  # fmt: skip


def order_of(kind: int, different: int, ranks: int, collectives: int) -> CollectiveSequence:
    """The sequence of a step of all ranks of one kind: collectives of all, and of the kind's own group."""
    own = [Item("allgather_", f"kind {kind}")] * (1 + kind)
    every = [Item("allreduce_" if number % 2 else "_reduce_scatter_base_", "0") for number in range(collectives)]
    groups = {"0": tuple(range(ranks)), f"kind {kind}": tuple(range(kind, ranks, different))}
    return CollectiveSequence(items=tuple(own + every), groups=groups)


CONFIG = WindowConfig(20, SCHEDULE.as_dict())


# -- the other ranks


class Players:
    """Plays some ranks, one after the other: each level of the tree after the one below."""

    def __init__(self, port: int, ranks: int, mine: list[int]) -> None:
        self.client = Client(port)
        self.trees = sorted([Tree(rank, ranks) for rank in mine], key=lambda tree: tree.level)
        self.ranks = ranks
        self.orders, self.reports = (
            {
                tree.rank: Exchange(self.client.channel(tree.rank, ranks), tree, kind, answered=kind == "order")
                for tree in self.trees
            }
            for kind in ("order", "report")
        )

    def submit(self, key: str, different: int, collectives: int) -> None:
        parts = {}
        for kind in range(different):
            recorded = RecordedKinds((order_of(kind, different, self.ranks, collectives),), counts={"0": 7})
            parts[kind] = Submissions.of(0, recorded.kinds, OrderMessage.of(recorded, CONFIG))
        for tree in self.trees:
            ((message, _),) = (of := parts[tree.rank % different]).messages
            own = Submissions([(message, [(tree.rank, tree.rank)])], of.sequences)
            assert submit(self.orders[tree.rank], key, own, TIMEOUT_S, lambda: False) is not None

    def pass_on(self, key: str) -> None:
        for tree in reversed(self.trees):
            ruling = forward_ruling(self.orders[tree.rank], key, TIMEOUT_S, lambda: False)
            assert ruling.decision is Decision.GRANTED, ruling

    def report(self, key: str, number: int) -> None:
        for tree in self.trees:
            exchange, own = self.reports[tree.rank], part_of(window_of(tree.rank, number, tree.world_size))
            part = gather_from_children(exchange, own, key, TIMEOUT_S, lambda _: False)
            assert exchange.send_up(key, encode(part), TIMEOUT_S, lambda: False)

    def wait(self) -> None:
        """Do nothing."""

    def leave(self) -> None:
        for exchange in (*self.orders.values(), *self.reports.values()):
            exchange.leave()


def play(port: int, ranks: int, mine: list[int], steps: Any) -> None:
    """One process: does what rank 0's process tells it to."""
    torch.set_num_threads(1)
    players = Players(port, ranks, mine)
    while (step := steps.recv())[0] != "end":
        getattr(players, step[0])(*step[1:])
        steps.send(players.client.num_bytes)
    players.leave()
    steps.send(players.client.num_bytes)


# -- rank 0


class RankZero:
    """Rank 0 with the library's own threads."""

    def __init__(self, port: int, ranks: int, collectives: int, folder: Path) -> None:
        self.client = Client(port)
        self.ranks, self.collectives = ranks, collectives
        self.record = Record(folder)
        channel = self.client.channel(0, ranks)
        config = MonitorConfig(schedule=SCHEDULE, sinks=[self.record], report_timeout_s=TIMEOUT_S)
        budget = WindowBudget(None)
        self.checker = OrderChecker(channel, timeout_s=TIMEOUT_S, budget=budget, on_error=_raise)
        self.reporter = Reporter(
            channel, config, environment=lambda: environment_of(0, ranks),
            run=lambda: run_info(config, channel.job, "cpu"), budget=budget, on_error=_raise,
            on_sink_error=lambda _, error: _raise(error),
        )  # fmt: skip
        self.checker.open()
        self.reporter.open()

    def check(self, key: str, different: int) -> Ruling:
        recorded = RecordedKinds((order_of(0, different, self.ranks, self.collectives),), counts={"0": 7})
        self.checker.start(key, recorded, 0, config=CONFIG)
        return self.checker.await_ruling()

    def report(self, key: str, window: RankWindow) -> int:
        """The bytes of the record's line."""
        before = self.record.path.stat().st_size if self.record.path.exists() else 0
        self.record.written.clear()
        with mock.patch.object(reporting, "measure", return_value=window):
            closed: Any = SimpleNamespace(
                number=window.window,
                opened_ns=0,
                wall_ms=0.0,
                cost=None,
                compared_with=None,
                steps=(),
                quick=False,
                tried="",
                delayed=None,
                delayed_keys={},
            )
            self.reporter.submit_window(closed, key, None)
            if not self.record.written.wait(TIMEOUT_S):
                raise RuntimeError(f"no report of window {window.window} within {TIMEOUT_S:g} s")
        return self.record.path.stat().st_size - before


class Record(JsonlSink):
    """The record, which says when it has a report."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written = threading.Event()

    def log(self, report: OverlapReport) -> None:
        super().log(report)
        self.written.set()


def _raise(error: Exception) -> None:
    raise error


def lead(port: int, arguments: argparse.Namespace, steps: list[Any]) -> dict[str, Any]:
    """Rank 0's part: gives the word, and measures."""

    def all_do(*step: Any) -> int:
        """Have all players do a step; the bytes that they have moved so far."""
        for pipe in steps:
            pipe.send(step)
        return sum(pipe.recv() for pipe in steps)

    with tempfile.TemporaryDirectory() as folder:
        leader = RankZero(port, arguments.ranks, arguments.collectives, Path(folder))
        checks, reports, lines = [], [], []
        for number in range(arguments.windows + 1):
            all_do("submit", f"check{number}", 1, arguments.collectives)
            began = clock()
            assert leader.check(f"check{number}", 1).decision is Decision.GRANTED
            checks.append(since(began))
            all_do("pass_on", f"check{number}")
            all_do("report", f"window{number}", number)
            window = window_of(0, number, arguments.ranks)
            began = clock()
            lines.append(leader.report(f"window{number}", window))
            reports.append(since(began))
        moved = leader.client.num_bytes + all_do("wait")
        different = {}
        for name in ("first", "again"):
            all_do("submit", name, min(DIFFERENT, arguments.ranks), arguments.collectives)
            began = clock()
            assert leader.check(name, min(DIFFERENT, arguments.ranks)).decision is Decision.GRANTED
            different[name] = since(began)
            all_do("pass_on", name)
        leader.checker.close(5.0)
        leader.reporter.close(30.0, others=[leader.checker.exchange])
        all_do("end")
    cpu, walls = (
        [check[which] + report[which] for check, report in zip(checks, reports, strict=True)] for which in (0, 1)
    )
    return {
        "ranks": arguments.ranks,
        "rank0_cpu_s": round(statistics.median(cpu[1:]), 4),
        "rank0_wall_s": round(statistics.median(walls[1:]), 4),
        "record_line_bytes": max(lines),
        "store_bytes": moved // (arguments.windows + 1),
        "connections_per_rank": leader.client.made,
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "rank0_report_cpu_s": round(statistics.median([cpu for cpu, _ in reports[1:]]), 4),
        "rank0_order_check_cpu_s": round(statistics.median([cpu for cpu, _ in checks[1:]]), 4),
        "order_check_of_different_orders": {
            "orders": min(DIFFERENT, arguments.ranks),
            **{f"{name}_cpu_s": round(cpu, 4) for name, (cpu, _) in different.items()},
            **{f"{name}_wall_s": round(wall, 4) for name, (_, wall) in different.items()},
        },
        "collectives": arguments.collectives,
        "windows": arguments.windows,
        "rank0_children": len(Tree(0, arguments.ranks).children),
    }


def clock() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """CPU and wall time in seconds."""
    return time.process_time() - began[0], time.perf_counter() - began[1]


# -- the store, and all together


def serve(pipe: Any) -> None:
    """The store's own process; tells its port, and at the end how many keys are left."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
    pipe.send(store.num_keys())


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--collectives", type=int, default=4000, help="of each rank's step")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="that play the other ranks")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="to a file, or to the output")
    arguments = parser.parse_args(argv)
    if arguments.ranks < 2:
        parser.error(f"--ranks must be at least 2, not {arguments.ranks}")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with Processes(context) as start:
        server = start(serve)
        port = server.recv()
        mine = [list(range(1 + place, arguments.ranks, arguments.processes)) for place in range(arguments.processes)]
        players = [start(play, port, arguments.ranks, of_process, last=True) for of_process in mine if of_process]
        found = lead(port, arguments, players)
        server.send("end")
        found["keys_left"] = server.recv()
    found["date"] = datetime.date.today().isoformat()
    found["versions"] = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                         "msgspec": msgspec.__version__}  # fmt: skip
    found["command"] = " ".join(["python", "benchmarks/scale.py", *(sys.argv[1:] if argv is None else argv)])
    text = json.dumps(found, indent=2)
    if arguments.json == "-":
        print(text)
    else:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))
        if arguments.json:
            Path(arguments.json).write_text(text + "\n")
    return found


class Processes:
    """Processes with a pipe to each; all are ended with the block."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._processes: list[Any] = []

    def __enter__(self) -> Callable[..., Any]:
        return self._start

    def _start(self, function: Callable[..., None], *arguments: Any, last: bool = False) -> Any:
        ours, theirs = self._context.Pipe()
        given = (*arguments, theirs) if last else (theirs, *arguments)
        process = self._context.Process(target=function, args=given, daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()


if __name__ == "__main__":
    main()
