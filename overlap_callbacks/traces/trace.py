"""A trace file that was read: its kernels, steps and collectives, and what the file tells of the job."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overlap_callbacks.analysis import safe_text
from overlap_callbacks.analysis.intervals import distinct_values
from overlap_callbacks.analysis.kernels.table import Indices, KernelTable
from overlap_callbacks.traces.collectives import Collectives
from overlap_callbacks.traces.doubts import KernelFacts, doubts_of
from overlap_callbacks.traces.launches import Launches
from overlap_callbacks.traces.metadata import with_groups
from overlap_callbacks.traces.steps import TraceStep, mark_cut

# No job has more: a number beyond is damage.
_MOST_RANKS = 2**31


@dataclass(frozen=True)
class Trace:
    """One trace file.

    Attributes:
        path: the file.
        kernels: its kernels; their ``step`` is an index into ``steps``.
        device: number of the device of each row of ``kernels``; shape (n,).
        steps: its steps, ascending in time. Empty if the file has none; then the whole file counts as one step.
        collectives: what is known about each communication kernel.
        on_host: whether the file has no kernels of a device and was read as a CPU job.
        rank: rank in the job; None if the file does not tell.
        world_size: ranks of the job; None if the file does not tell.
        device_names: names of the devices that the file lists, by their numbers.
        problems: what is wrong or doubtful, in words.
        warnings: those of ``problems`` that must be read before any figure.
        launches: the host's side of the kernels; None of a CPU job.
        is_cut: whether the file ends before its events do, so that it lacks kernels.
    """

    path: Path
    kernels: KernelTable
    device: Indices
    steps: tuple[TraceStep, ...]
    collectives: Collectives
    on_host: bool
    rank: int | None
    world_size: int | None
    device_names: dict[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    launches: Launches | None = None
    is_cut: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that ran kernels."""
        return tuple(distinct_values(self.device).tolist())

    def by_device(self) -> dict[int, Trace]:
        """One trace per device, with the kernels of that device alone: devices do not share time."""
        devices = self.devices
        if len(devices) < 2:
            return {device: self for device in devices}
        order = np.argsort(self.device, kind="stable")
        bounds = np.searchsorted(self.device[order], [*devices, devices[-1] + 1]).tolist()
        rows = {device: order[first:last] for device, first, last in zip(devices, bounds, bounds[1:], strict=False)}
        return {
            device: dataclasses.replace(
                self,
                kernels=self.kernels[of_device],
                device=self.device[of_device],
                collectives=self.collectives.of_kernels(of_device),
                launches=None if self.launches is None else self.launches[of_device],
            )
            for device, of_device in rows.items()
        }


def trace_with_head(
    path: Path,
    head: dict[str, Any],
    facts: KernelFacts,
    kernels: KernelTable,
    device: Indices,
    steps: tuple[TraceStep, ...],
    collectives: Collectives,
    problems: list[str],
    *,
    is_cut: bool,
    on_host: bool = False,
) -> Trace:
    """The parts of a trace, with what the fields around the events tell of the job.

    Args:
        path: the file.
        head: the fields of the document around the events.
        facts: of its kernels.
        kernels: its kernels, or some of them.
        device: number of the device of each row.
        steps: its steps, ascending in time.
        collectives: what is known about each communication kernel.
        problems: what is wrong or doubtful so far, in words.
        is_cut: whether the file ends before its events do.
        on_host: whether the file was read as a CPU job.
    """
    problems += doubts_of(facts, steps)
    rank, world_size = _job(head, problems)
    warnings = []
    if is_cut:
        steps, named = mark_cut(steps, facts.steps)
        lacks = "the file is cut off, so its totals lack kernels, and their time looks idle"
        warnings.append(f"{lacks}: {named}" if named else lacks)
    if world_size is not None and world_size > 1 and not facts.communicates:
        names = ", ".join(facts.suspects()) or "none sounds like it"
        warnings.append(
            f"the job has {world_size} ranks, but nothing in this file communicates, by its name; what does can be "
            f"named with --communication REGEX. What looks most like it: {names}"
        )
    return Trace(
        path=path,
        kernels=kernels,
        device=device,
        steps=steps,
        collectives=with_groups(collectives, head.get("distributedInfo")),
        on_host=on_host,
        rank=rank,
        world_size=world_size,
        device_names=_device_names(head),
        problems=(*warnings, *problems),
        warnings=tuple(warnings),
        is_cut=is_cut,
    )


def _job(head: dict[str, Any], problems: list[str]) -> tuple[int | None, int | None]:
    """Rank and world size; None for each that the file does not tell."""
    info = head.get("distributedInfo")
    if info is None:
        return None, None
    rank, world_size = (info.get(key) if isinstance(info, dict) else None for key in ("rank", "world_size"))
    if type(rank) is not int or not 0 <= rank < _MOST_RANKS:  # true is an int too
        problems.append("the file's distributedInfo cannot be read: its rank is not known")
        return None, None
    return rank, world_size if type(world_size) is int and 0 < world_size <= _MOST_RANKS else None


def _device_names(head: dict[str, Any]) -> dict[int, str]:
    devices = head.get("deviceProperties")
    names = {}
    for device in devices if isinstance(devices, list) else []:
        if isinstance(device, dict) and isinstance(device.get("id"), int):
            names[device["id"]] = safe_text.clean(str(device.get("name", "")))
    return names
