"""Measures the points of a plan one after another, on one rank; rank 0 writes the results."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks._version import __version__
from overlap_callbacks.analysis.results.bench import (
    FILE_NAME,
    SCHEMA,
    Failed,
    GemmPoint,
    GemmRound,
    Plan,
    Resumed,
    Start,
    TransferPoint,
    TransferRound,
)
from overlap_callbacks.experiments.bench.collective_bench import measure_transfer, transfer_of
from overlap_callbacks.experiments.bench.gemm_bench import Work, flop, measure_gemm, message_dtype, product
from overlap_callbacks.experiments.bench.results import Bench
from overlap_callbacks.experiments.bench.site import Ranks, Site, open_site, reduction
from overlap_callbacks.experiments.capping import Cap, NotPossibleError, capped_part, caps_of
from overlap_callbacks.experiments.machine import cpu_name
from overlap_callbacks.experiments.supervisor import Limits
from overlap_callbacks.experiments.sweep import CannotGoOnError, LinesFile, Point, Progress, run
from overlap_callbacks.instruments.caps.capped import capped
from overlap_callbacks.instruments.caps.settings import Caps
from overlap_callbacks.instruments.environment import EnvironmentReader

UNITS = {
    "gemm_ms": "ms", "all_reduce_ms": "ms", "time_ms": "ms", "power_w": "W", "sm_clock_mhz": "MHz", "length_s": "s",
    "message_bytes": "bytes", "flop": "floating-point operations",
}  # fmt: skip


class Stop:
    """Whether a stop was requested, by Ctrl-C or by a launcher. The current point is still measured."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._request)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True


def run_session(
    plan: Plan, folder: Path, command: str, stop: Stop, on_progress: Callable[[Progress], None], cap: Cap = capped
) -> None:
    """Measure what is missing from a results folder, as one rank of the job described by the environment.

    Args:
        plan: what is measured.
        folder: of the results. Only rank 0 reads and writes it.
        command: the command line, for the file.
        stop: ends the session after the current point.
        on_progress: called on rank 0 on every change.
        cap: caps the GPUs of this host, where points ask for it.
    """
    local_rank = os.environ.get("LOCAL_RANK", "0")
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(open_site(plan, int(local_rank)))
        caps = stack.enter_context(contextlib.closing(CapsInForce(site.ranks, sets=local_rank == "0", cap=cap)))
        bench, file = None, None
        if site.ranks.rank == 0:
            bench, file = _opened(plan, folder, command, site)
            stack.enter_context(contextlib.closing(file))
        everywhere: Bench = site.ranks.agree(bench)

        def measure(point: Point, _: Limits, __: contextlib.ExitStack) -> GemmRound | TransferRound | Failed | None:
            if site.ranks.agree(stop.requested):
                return None
            one = point.setting
            refused = caps.change(caps_of(one)) if isinstance(one, GemmPoint) else ""
            return _failed(one, refused) if refused else _measure(plan, point.repeat, one, site)

        run(everywhere, measure, file, on_progress=on_progress if file is not None else lambda _: None)


def _opened(plan: Plan, folder: Path, command: str, site: Site) -> tuple[Bench, LinesFile]:
    """The benchmark so far, and its file, to append lines to."""
    if (folder / FILE_NAME).exists():
        bench = Bench.read(folder)
        file = bench.open()
        file.write(Resumed(at=_now(), **_versions(site)))
        return bench, file
    bench = Bench(folder, _start(plan, command, site))
    return bench, bench.open()


def _measure(
    plan: Plan, number: int, point: GemmPoint | TransferPoint, site: Site
) -> GemmRound | TransferRound | Failed:
    if isinstance(point, GemmPoint):
        work: Any = _on_every_rank(site, lambda: _gemm_work(point, site))
        if isinstance(work, str):
            return _failed(point, work)
        return measure_gemm(point, number, work, site, plan.block_s)
    group, members, every = site.group(point.group)
    transfer: Any = _on_every_rank(site, lambda: [transfer_of(point, group, members, site.device)])
    refused = transfer if isinstance(transfer, str) else _on_every_rank(site, lambda: _once(transfer[0]))
    if isinstance(refused, str):
        return _failed(point, refused)
    return measure_transfer(point, number, every, transfer[0], site, plan.block_s)


def _failed(point: GemmPoint | TransferPoint, reason: str) -> Failed:
    return Failed(gemm=point, reason=reason) if isinstance(point, GemmPoint) else Failed(transfer=point, reason=reason)


def _gemm_work(point: GemmPoint, site: Site) -> Work:
    kind = message_dtype(point.dtype)
    operation, message_of = reduction(site.device)
    message = message_of(point.message_bytes // kind.itemsize, kind)
    asynchronous = site.device.type == "cuda"
    group = site.group_of_ctas(point.ctas)

    def transfer() -> Any:
        return dist.all_reduce(message, op=operation, group=group, async_op=asynchronous)

    multiply = product(point.dtype, point.n, site.device)
    multiply()
    site.synchronise()
    return Work(multiply, transfer, flop(point.n))


def _once(transfer: Callable[[], Any] | None) -> None:
    work = None if transfer is None else transfer()
    if isinstance(work, dist.Work):
        work.wait()


def _on_every_rank(site: Site, make: Callable[[], Any]) -> Any:
    """The result of ``make`` if it works on every rank; otherwise, on all, the error of the first rank that failed."""
    made, reason = None, ""
    try:
        made = make()
        site.synchronise()
    except (RuntimeError, NotImplementedError, MemoryError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    reasons = [said for said in site.ranks.gather(reason) if said]
    return reasons[0] if reasons else made


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _versions(site: Site) -> dict[str, str]:
    on_gpu = site.device.type == "cuda"
    return {
        "library_version": __version__,
        "torch_version": str(torch.__version__),
        "device_name": torch.cuda.get_device_name(site.device) if on_gpu else cpu_name(),
    }


def _start(plan: Plan, command: str, site: Site) -> Start:
    return Start(
        schema=SCHEMA,
        plan=plan,
        command=command,
        started_at=_now(),
        python_version=platform.python_version(),
        power_source=site.sensors.source,
        power_missing=site.sensors.missing,
        environment=EnvironmentReader().read(),
        units=UNITS,
        **_versions(site),
    )


# -- power caps


class CapsInForce:
    """Caps that change from point to point, and are restored at the end; a rank that ``sets`` them caps its host."""

    def __init__(self, ranks: Ranks, *, sets: bool, cap: Cap = capped) -> None:
        self._ranks = ranks
        self._sets = sets
        self._cap = cap
        self._now = Caps()
        self._reason = ""
        self._stack = contextlib.ExitStack()

    def change(self, wanted: Caps) -> str:
        """Apply other caps. All ranks call it together.

        Returns:
            Why they cannot be applied, on the first host where that is so; empty if they apply on all.

        Raises:
            CannotGoOnError: on all ranks: the earlier settings of some host cannot be restored.
        """
        if wanted == self._now:
            return self._reason
        left, reason = "", ""
        if self._sets:
            try:
                self._stack.close()
                self._stack.enter_context(capped_part(wanted, self._cap))
            except CannotGoOnError as error:
                left = str(error)
            except NotPossibleError as error:
                reason = str(error)
        said = self._ranks.gather((left, reason))
        lost = next((text for text, _ in said if text), "")
        if lost:
            raise CannotGoOnError(lost)
        self._now = wanted
        self._reason = next((text for _, text in said if text), "")
        return self._reason

    def close(self) -> None:
        """Restore the earlier settings, or raise a ``CannotGoOnError`` with the command to type."""
        self._stack.close()
