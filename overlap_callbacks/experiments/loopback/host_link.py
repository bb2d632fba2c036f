"""The link on a CPU: collectives of Gloo, each joined late by a phantom on its own thread.

So the library sees what it sees in a real CPU job: works and ranges of Gloo, on Gloo's threads. The phantom is kept out
of profiles.
"""

from __future__ import annotations

import datetime
import functools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from overlap_callbacks.experiments.loopback.collectives import AVG, MAX, MIN, SUM, Call, LoopSettings

_TIMEOUT = datetime.timedelta(seconds=60)
_REDUCTIONS = {SUM: dist.ReduceOp.SUM, AVG: dist.ReduceOp.AVG, MIN: dist.ReduceOp.MIN, MAX: dist.ReduceOp.MAX}


class HostLink:
    """Runs collectives on CPU tensors one after another, in order of issue.

    Attributes:
        error: what ended the phantom; None while it runs.
    """

    def __init__(self) -> None:
        self._store = c10d.HashStore()
        self._groups: dict[str, list[Any]] = {}
        self._phantom: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._be_phantom, name="loopback-phantom", daemon=True)
        self._thread.start()
        self._lock = threading.Lock()  # for the order of issue, which must be the same on both sides
        self.error: BaseException | None = None

    def issue(self, call: Call, group: dist.ProcessGroup, settings: LoopSettings) -> dist.Work | None:
        """Issue a collective. It begins when the previous one is done, and takes at least the link's time."""
        with self._lock:
            mine, *others = self._backends(group)
            for part in single_calls(call):
                work: dist.Work = _call_gloo(mine, part)
                length_s = 1e-9 * settings.length_ns(part.num_bytes)
                for theirs in others:
                    self._phantom.put(functools.partial(self._join, theirs, part, work, length_s))
        # The phantom joins the next one only after this one is done, so the last is done after all others.
        if not call.asynchronous:
            work.wait()
        return work

    def _backends(self, group: dist.ProcessGroup) -> list[Any]:
        """Gloo's backend for each rank of a group."""
        name, size = group.group_name, group.size()
        if name not in self._groups:
            made: list[Any] = [None] * size
            store = c10d.PrefixStore(f"{name}/{len(self._groups)}", self._store)

            def make(rank: int) -> None:
                made[rank] = dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)

            phantoms = [threading.Thread(target=make, args=(rank,)) for rank in range(1, size)]
            for phantom in phantoms:
                phantom.start()
            make(0)
            for phantom in phantoms:
                phantom.join()
            self._groups[name] = made
        return self._groups[name]

    def _be_phantom(self) -> None:
        torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]  # of this thread
        while (join := self._phantom.get()) is not None:
            try:
                join()
            except BaseException as error:  # otherwise rank 0 would wait for ever, without a message
                self.error = error
                raise

    def _join(self, theirs: Any, call: Call, work: dist.Work, length_s: float) -> None:
        """The phantom's part of a collective, ``length_s`` later."""
        time.sleep(length_s)
        copies = {id(tensor): tensor.clone() for tensor in (*call.output_tensors, *call.inputs)}
        call = replace(
            call,
            outputs=[[copies[id(t)] for t in o] if isinstance(o, list) else copies[id(o)] for o in call.outputs],
            inputs=[copies[id(tensor)] for tensor in call.inputs],
        )
        self._meet(theirs, call, work)

    def _meet(self, theirs: Any, call: Call, work: dist.Work) -> None:
        _call_gloo(theirs, call).wait()
        work.wait()

    def close(self) -> None:
        self._phantom.put(None)
        self._thread.join(10.0)
        self._groups.clear()


def single_calls(call: Call) -> list[Call]:
    """The Gloo collectives that make up a call: Python has no coalesced reduce-scatters and all-gathers of Gloo."""
    one = {
        "allgather_into_tensor_coalesced_": "_allgather_base_",
        "reduce_scatter_tensor_coalesced_": "_reduce_scatter_base_",
    }
    if call.operator not in one:
        return [call]
    pairs = zip(call.outputs, call.inputs, strict=True)
    return [replace(call, operator=one[call.operator], outputs=[out], inputs=[source]) for out, source in pairs]


def _call_gloo(backend: Any, call: Call) -> Any:
    reduction = None if call.reduction is None else _REDUCTIONS[call.reduction]

    def options(kind: Any) -> Any:
        made = kind()
        made.asyncOp = True
        if reduction is not None:
            made.reduceOp = reduction
        if call.root is not None:
            made.rootRank, made.rootTensor = call.root, 0
        return made

    if call.operator == "allreduce_":
        return backend.allreduce(list(call.outputs), options(c10d.AllreduceOptions))
    if call.operator == "allreduce_coalesced_":
        return backend.allreduce_coalesced(list(call.outputs), options(c10d.AllreduceCoalescedOptions))
    if call.operator == "broadcast_":
        return backend.broadcast(list(call.outputs), options(c10d.BroadcastOptions))
    if call.operator == "allgather_":
        return backend.allgather(list(call.outputs), list(call.inputs), options(c10d.AllgatherOptions))
    (output,), (source,) = call.outputs, call.inputs
    if call.operator == "_allgather_base_":
        return backend._allgather_base(output, source, options(c10d.AllgatherOptions))
    if call.operator == "_reduce_scatter_base_":
        return backend._reduce_scatter_base(output, source, options(c10d.ReduceScatterOptions))
    rows_out, rows_in = (list(rows) for rows in call.splits)
    return backend.alltoall_base(output, source, rows_out, rows_in, options(c10d.AllToAllOptions))
