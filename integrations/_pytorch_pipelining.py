"""Sequential steps of torch.distributed.pipelining: they wait for each batch of sends and receives that a stage posts.

Every schedule posts through ``schedules._batch_p2p``. In sequential steps the whole batch is posted, and then waited
for. The schedule, which waits later, gets completed works.

This cannot hang if all batches finish when each is waited for before the next is posted: a batch finishes once the
neighbour has posted the other half. For GPipe and 1F1B this holds for any number of stages and micro-batches: the
messages that they do not wait for themselves are forward sends during warm-up and backward sends during cool-down, and
the neighbour posts the matching receive after only earlier messages of the same direction. Schedules with several
stages per rank contain the order of all ranks, which is simulated. Those of torch 2.8 contain none: they run in time
steps, and wait for each batch themselves before they post the next.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

from overlap_callbacks import OverlapMonitor

from .base import check_version, missing_of, patch

# A message: its direction, the stage that receives it, the micro-batch.
Message = tuple[str, int, int]

# Non-public names in the schedules' module.
_NEEDED = ("_PipelineSchedule", "_batch_p2p", "SEND_F", "SEND_B", "RECV_F", "RECV_B")


def check_type(pipeline: Any) -> None:
    """Reject anything that is not a schedule, by a TypeError that names what was given."""
    # If torch has no such class, check_order() reports it.
    if not isinstance(pipeline, getattr(schedules, "_PipelineSchedule", object)):
        given = f"{pipeline!r} (a {type(pipeline).__name__})"
        raise TypeError(f"pipeline must be a schedule of torch.distributed.pipelining, got {given}")


def check_order(pipeline: Any) -> None:
    """Reject schedules that might hang if each batch is waited for: a ValueError has the reason, and what to do.

    Raises a RuntimeError if this torch lacks something.
    """
    missing = missing_of(schedules, *_NEEDED)
    if not hasattr(pipeline, "_stages"):
        missing += missing_of(pipeline, "_stage")
    check_version("torch", str(torch.__version__), missing)
    remedy = "leave pipeline out: its sends and receives are then recorded, and not serialised"
    name = type(pipeline).__name__
    if not all(isinstance(stage, PipelineStage) for stage in stages_of(pipeline)):
        raise ValueError(f"pipeline={name} has stages that are no PipelineStage, and may skip neighbours; {remedy}")
    if type(pipeline) in (ScheduleGPipe, Schedule1F1B):
        return
    order = getattr(pipeline, "pipeline_order_with_comms", None)
    if order is None:
        # torch's plain schedules of several stages wait for each batch at once.
        plain = getattr(schedules.PipelineScheduleMulti, "_step_microbatches", None)
        if plain is not None and getattr(type(pipeline), "_step_microbatches", None) is plain:
            return
        raise ValueError(f"pipeline={name} is of a kind whose order is not known; {remedy}")
    if not all_finish([messages(actions) for actions in order.values()]):
        raise ValueError(f"pipeline={name} would hang if each send and receive were waited for; {remedy}")


def stages_of(pipeline: Any) -> list[Any]:
    return list(pipeline._stages) if hasattr(pipeline, "_stages") else [pipeline._stage]


def groups_of(pipeline: Any) -> list[dist.ProcessGroup]:
    return [stage.group if stage.group is not None else c10d._get_default_group() for stage in stages_of(pipeline)]


def messages(actions: Iterable[Any]) -> list[Message]:
    """One rank's sends and receives, in order."""
    in_order: list[Message] = []
    for action in actions:
        kind = action.computation_type
        stage, micro_batch = action.stage_index, action.microbatch_index
        if kind == schedules.SEND_F:
            in_order.append(("forward", stage + 1, micro_batch))
        elif kind == schedules.SEND_B:
            in_order.append(("backward", stage - 1, micro_batch))
        elif kind in (schedules.RECV_F, schedules.RECV_B):
            in_order.append(("forward" if kind == schedules.RECV_F else "backward", stage, micro_batch))
    return in_order


def all_finish(orders: Sequence[Sequence[Message]]) -> bool:
    """Whether all ranks finish if each handles one message at a time, and waits for its counterpart."""
    remaining = [list(reversed(order)) for order in orders]  # the next message is last
    while True:
        sides = Counter(order[-1] for order in remaining if order)
        met = {message for message, count in sides.items() if count == 2}
        if not met:
            return not sides
        for order in remaining:
            if order and order[-1] in met:
                order.pop()


class _Batches:
    """Replaces ``schedules._batch_p2p`` while a monitor needs it.

    All monitors share one: they may be closed in any order, but only the outermost of nested wrappers can be removed.
    """

    def __init__(self, original: Callable[..., list[Any]]) -> None:
        self.monitors: list[OverlapMonitor] = []
        self._original = original
        self.undo = patch(schedules, "_batch_p2p", self)  # last: another thread may call it at once

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        issue: Callable[[], list[Any]] = functools.partial(self._original, *args, **kwargs)
        for monitor in self.monitors:
            issue = functools.partial(_post, monitor, issue)
        return issue()


def _post(monitor: OverlapMonitor, issue: Callable[[], list[Any]]) -> list[Any]:
    return monitor.post(issue, list)[1]


def wait_for_batches(monitor: OverlapMonitor) -> Callable[[], None]:
    """Pass every batch of sends and receives through ``monitor.post``. Returns a function that stops it.

    When no monitor is left, that restores torch's own function.
    """
    current: Any = schedules._batch_p2p
    batches = current if isinstance(current, _Batches) else _Batches(current)
    batches.monitors.append(monitor)

    def stop() -> None:
        batches.monitors.remove(monitor)
        if not batches.monitors:
            batches.undo()

    return stop
