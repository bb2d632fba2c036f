"""Is an injected fault told with the right rank and the right cause? Real jobs of two to four Gloo ranks on this host.

    python benchmarks/faults.py [--runs 50] [--only KIND] [--json benchmarks/results/faults-cpu.json]

Each job trains 22 stretches of 128 steps as it is, and then has a fault: a rank that computes more in its forward or
its backward pass; a rank whose loader is slow; a link between two ranks that delays every message (a proxy through
which Gloo's connections pass); a step that grows at all ranks; or one slow host of two, which are simulated by names.
The first change that the record tells after the fault counts: cause and ranks must be right, of a slow link the two
ranks at its ends, and its first step at most three stretches before the fault. Of a step that grows, no rank may be
named. A job ends once a change is told, or after ten stretches with the fault. A file that exists is gone on with.

Goal: right in 48 of 50.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import random
import re
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlap_callbacks
from overlap_callbacks import Schedule
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import JsonlSink, Sink

STRETCH, QUIET, FAULTY = 128, 22, 10
# Changes that begin earlier are none of the fault's.
SINCE = (QUIET - 3) * STRETCH
# Steps in which all ranks hear that a change is told.
LEAD = 64
KINDS = ("compute", "input", "link", "growing", "host")
WORK_S = 0.0005
_MOST_PORTS = 8
# Ports below and above those that the system gives to Gloo, in both orders of their bytes: Gloo compares the wrong one.
_LOW, _HIGH = range(20_224, 32_000, 256), 65_535


class Fault(NamedTuple):
    """A fault from ``QUIET`` stretches on: its kind, at which ranks, and how much longer the step takes."""

    kind: str
    world_size: int
    ranks: tuple[int, ...]
    extra_s: float
    backward: bool = False

    @property
    def cause(self) -> str:
        return {"input": "input", "link": "communication"}.get(self.kind, "compute")

    @property
    def told_ranks(self) -> tuple[int, ...]:
        return () if self.kind == "growing" else self.ranks


def fault(kind: str, chance: random.Random) -> Fault:
    size = {"link": 2, "host": 4}.get(kind, chance.choice((2, 3, 4)))
    ranks = {
        "link": (0, 1), "host": chance.choice(((0, 1), (2, 3))), "growing": tuple(range(size)),
    }.get(kind, (chance.randrange(size),))  # fmt: skip
    return Fault(kind, size, ranks, chance.uniform(0.008, 0.02), chance.random() < 0.5)


class DelayingProxy:
    """Passes TCP connections on to ports of this host, and every piece of data some time later.

    It is a process of its own, since torch holds the interpreter's lock in some collectives; made before torch has
    threads. Of two ranks of Gloo, the one with the lower port listens: rank 0 has the proxy, with
    ports below all others.
    """

    def __init__(self) -> None:
        context = mp.get_context("fork")
        self.delay_s = context.Value("d", 0.0)
        self._servers = [_low_server() for _ in range(_MOST_PORTS)]
        self._ports = context.Array("i", _MOST_PORTS)
        self._used = 0
        context.Process(target=self._serve, daemon=True).start()

    def before(self, port: int) -> int:
        """A port that leads to ``port``."""
        place, self._used = self._used, self._used + 1
        self._ports[place] = port
        return int(self._servers[place].getsockname()[1])

    def _serve(self) -> None:
        threads = [threading.Thread(target=self._accept, args=(place,)) for place in range(_MOST_PORTS)]
        for thread in threads:
            thread.start()

    def _accept(self, place: int) -> None:
        while True:
            near, _ = self._servers[place].accept()
            far = socket.create_connection(("127.0.0.1", self._ports[place]))
            for each in (near, far):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        while True:
            wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            if select.select([source], [], [], wait_s)[0]:
                data = source.recv(1 << 20)
                if not data:
                    return
                waiting.append((time.monotonic() + self.delay_s.value, data))
            while waiting and waiting[0][0] <= time.monotonic():
                sink.sendall(waiting.popleft()[1])


def _low_server() -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", random.SystemRandom().choice(_LOW)))


class ProxiedStore(dist.Store):
    """A store that tells the other ranks the proxy's ports in place of Gloo's own, and without one a high port."""

    def __init__(self, store: dist.Store, proxy: DelayingProxy | None) -> None:
        super().__init__()
        self.inner, self._proxy = store, proxy

    def set(self, key: str, value: Any) -> None:
        data = value if isinstance(value, bytes) else str(value).encode("latin-1")

        def proxied(found: re.Match[bytes]) -> bytes:
            (port,) = struct.unpack("!H", found[1])
            told = _HIGH if self._proxy is None else self._proxy.before(port)
            return b"\x02\x00" + struct.pack("!H", told) + b"\x7f\x00\x00\x01"

        self.inner.set(key, re.sub(rb"\x02\x00(..)\x7f\x00\x00\x01", proxied, data, flags=re.DOTALL))

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self.inner.wait(keys, *([] if timeout is None else [timeout]))

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)


class Told(Sink):
    """Notes the step at which the job may end, for all ranks: a change is told."""

    def __init__(self, last_step: Any, steps: Any) -> None:
        self._last_step, self._steps = last_step, steps

    def log(self, report: OverlapReport) -> None:
        pass

    def change(self, change: Change) -> None:
        if change.first_step >= SINCE and change.step_ms > 0:
            self._steps.value = min(self._steps.value, self._last_step.value + LEAD)


def train(rank: int, case: Fault, port: int, folder: str, last_step: Any, steps: Any) -> None:
    torch.set_num_threads(1)
    proxy = DelayingProxy() if case.kind == "link" and not rank else None
    store: dist.Store = dist.TCPStore("127.0.0.1", port, case.world_size, rank == 0)
    if case.kind == "link":
        store = ProxiedStore(store, proxy)
    if case.kind == "host":
        name = f"node-{rank // 2}"
        socket.gethostname = platform.node = lambda: name
    patience = datetime.timedelta(minutes=2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size, timeout=patience)
    if isinstance(store, ProxiedStore):  # Gloo has connected; the library uses the real one
        group = dist.group.WORLD
        dist.distributed_c10d._world.pg_map[group] = ("gloo", dist.PrefixStore("default_pg", store.inner))
    layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    extra = {"forward": 0.0, "backward": 0.0}
    layers[0].register_forward_hook(lambda *_: time.sleep(WORK_S + extra["forward"]))
    layers[0].register_full_backward_hook(lambda *_: time.sleep(WORK_S + extra["backward"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # One small window, so that hosts are known, and then steps alone.
    schedule = Schedule(every_n_steps=100_000, repeats=1, profiled_steps=2)
    told = Told(last_step, steps)
    monitor = attach(optimizer, model=model, schedule=schedule, power=False, sinks=[JsonlSink(folder), told])
    data = torch.randn(8, 64, requires_grad=True)
    first = QUIET * STRETCH
    for step in itertools.takewhile(lambda step: step < steps.value, itertools.count()):
        if not rank:
            last_step.value = step
        is_here = step >= first and rank in case.ranks
        grown = (step - first) / (FAULTY * STRETCH) if case.kind == "growing" else 1.0
        extra_s = case.extra_s * grown * is_here
        time.sleep(WORK_S / 2 + extra_s * (case.kind == "input"))
        if case.kind in ("compute", "growing", "host"):
            extra["backward" if case.backward else "forward"] = extra_s
        if proxy is not None:
            proxy.delay_s.value = extra_s / 4  # an all-reduce of Gloo is four messages, one after the other
        model(data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    dist.barrier()
    dist.destroy_process_group()


def outcome(case: Fault) -> dict[str, Any]:
    """What the record of a job with this fault tells first."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        began_s, context = time.monotonic(), mp.get_context("fork")
        shared = context.Value("l", 0), context.Value("l", (QUIET + FAULTY) * STRETCH)
        error = ""
        try:
            mp.start_processes(train, (case, port, folder, *shared), nprocs=case.world_size, start_method="fork")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as failed:
            error = str(failed).strip().splitlines()[-1]
        changes = [] if error else read(folder).changes
    first = QUIET * STRETCH
    since = [change for change in changes if change.first_step >= SINCE and change.step_ms > 0]
    found = since[0] if since else None
    right = found is not None and found.cause == case.cause and found.ranks == case.told_ranks
    return {
        "kind": case.kind, "world_size": case.world_size, "ranks": case.ranks, "extra_ms": round(case.extra_s * 1e3, 2),
        "in": ("backward" if case.backward else "forward") if case.cause == "compute" else case.kind,
        "right": bool(right), "error": error,
        "told": None if found is None else {
            "cause": found.cause, "ranks": found.ranks, "step_ms": round(found.step_ms, 2),
            "stretches_until_told": (found.found_step + 1 - first) / STRETCH, "is_not": found.is_not,
        },
        "false_alarms": len([change for change in changes if change.first_step < SINCE]),
        "seconds": round(time.monotonic() - began_s, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chance = random.Random(38)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rows = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else []
    cases = [fault(options.only or KINDS[run % len(KINDS)], chance) for run in range(options.runs)]
    for case in cases[len(rows) :]:
        rows.append(outcome(case))
        print(rows[-1], flush=True)
        if options.json:
            write(options.json, rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    result = {
        "date": datetime.date.today().isoformat(), "command": f"python {' '.join(sys.argv)}",
        "python": platform.python_version(), "torch": torch.__version__,
        "overlap_callbacks": overlap_callbacks.__version__, "right": sum([row["right"] for row in rows]),
        "of": len(rows), "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
