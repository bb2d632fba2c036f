"""Sends and receives of torch.distributed.pipelining, waited for where a stage posts them.

Every schedule posts through ``schedules._batch_p2p``. In sequential steps the batch is posted as it stands and then
waited for, and the schedule, which waits later, is handed works that are done.

That cannot hang where the stages' batches, each done before the next is posted, come to an end: a batch then finishes
when its neighbour posts the other half. For GPipe and 1F1B that is so for any number of stages and micro-batches: what
they do not wait for by themselves (forward sends while a stage warms up, backward sends while it cools down) meets a
receive that its neighbour posts after earlier messages of the same direction alone. The schedules with several stages
a rank carry the order of all ranks, and it is played through here.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, schedules

from overlap_callbacks import OverlapMonitor

from ._versions import TORCH, check, missing_of

# What is not public of the schedules' module.
_NEEDED = ("_PipelineSchedule", "_batch_p2p", "SEND_F", "SEND_B", "RECV_F", "RECV_B")

# A message: its direction, the stage that receives it, the micro-batch.
Message = tuple[str, int, int]


def check_type(pipeline: Any) -> None:
    """Refuse what is no schedule.

    Raises:
        TypeError: with what was given.
    """
    # Where torch has no such class, check_order() says so.
    if not isinstance(pipeline, getattr(schedules, "_PipelineSchedule", object)):
        found = f"{pipeline!r} (a {type(pipeline).__name__})"
        raise TypeError(f"pipeline must be a schedule of torch.distributed.pipelining, got {found}")


def check_order(pipeline: Any) -> None:
    """Refuse schedules of which it is not known that waiting for each batch comes to an end.

    Raises:
        RuntimeError: this torch lacks something needed.
        ValueError: with the reason, and what to do.
    """
    missing = missing_of(schedules, *_NEEDED)
    if not hasattr(pipeline, "_stages"):
        missing += missing_of(pipeline, "_stage")
    check("torch", str(torch.__version__), TORCH, missing)
    remedy = "leave pipeline out: its sends and receives are then recorded, and not serialised"
    name = type(pipeline).__name__
    if not all(isinstance(stage, PipelineStage) for stage in stages_of(pipeline)):
        raise ValueError(f"pipeline={name} has stages that are no PipelineStage, and may skip neighbours; {remedy}")
    if type(pipeline) in (ScheduleGPipe, Schedule1F1B):
        return
    order = getattr(pipeline, "pipeline_order_with_comms", None)
    if order is None:
        raise ValueError(f"pipeline={name} is of a kind whose order is not known; {remedy}")
    if not comes_to_an_end([messages(actions) for actions in order.values()]):
        raise ValueError(f"pipeline={name} would hang if each send and receive were waited for; {remedy}")


def stages_of(pipeline: Any) -> list[Any]:
    """The stages that this rank runs."""
    return list(pipeline._stages) if hasattr(pipeline, "_stages") else [pipeline._stage]


def groups_of(pipeline: Any) -> list[dist.ProcessGroup]:
    """The groups in which the stages talk to each other."""
    return [stage.group if stage.group is not None else c10d._get_default_group() for stage in stages_of(pipeline)]


def messages(actions: Iterable[Any]) -> list[Message]:
    """What one rank sends and receives, in order."""
    found = []
    for action in actions:
        kind = action.computation_type
        stage, micro_batch = action.stage_index, action.microbatch_index
        if kind == schedules.SEND_F:
            found.append(("forward", stage + 1, micro_batch))
        elif kind == schedules.SEND_B:
            found.append(("backward", stage - 1, micro_batch))
        elif kind in (schedules.RECV_F, schedules.RECV_B):
            found.append(("forward" if kind == schedules.RECV_F else "backward", stage, micro_batch))
    return found


def comes_to_an_end(orders: Sequence[Sequence[Message]]) -> bool:
    """Whether ranks that do one message after the other, each together with its other side, all finish."""
    waiting = [list(reversed(order)) for order in orders]
    while True:
        sides = Counter(order[-1] for order in waiting if order)
        met = {message for message, count in sides.items() if count == 2}
        if not met:
            return not sides
        for order in waiting:
            if order and order[-1] in met:
                order.pop()


class _Batches:
    """Stands in the place of ``schedules._batch_p2p`` as long as there is a monitor that wants it.

    One for all monitors, whichever is closed first: wrapped around each other, a wrapper that is not the outermost
    could not be taken off.
    """

    def __init__(self, original: Callable[..., list[Any]]) -> None:
        self.original = original
        self.monitors: list[OverlapMonitor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        issue: Callable[[], list[Any]] = functools.partial(self.original, *args, **kwargs)
        for monitor in self.monitors:
            issue = functools.partial(_post, monitor, issue)
        return issue()


def _post(monitor: OverlapMonitor, issue: Callable[[], list[Any]]) -> list[Any]:
    return monitor.post(issue, list)[1]


def wait_for_batches(monitor: OverlapMonitor) -> Callable[[], None]:
    """Have every batch of sends and receives go through ``monitor.post``.

    Returns:
        What ends that, and puts torch's own function back once no monitor is left.
    """
    here = schedules._batch_p2p
    batches = here if isinstance(here, _Batches) else _Batches(here)
    batches.monitors.append(monitor)
    schedules._batch_p2p = cast(Any, batches)

    def restore() -> None:
        batches.monitors.remove(monitor)
        if not batches.monitors and schedules._batch_p2p is batches:
            schedules._batch_p2p = batches.original

    return restore
