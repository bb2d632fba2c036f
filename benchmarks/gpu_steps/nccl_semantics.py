"""What the works and waits of a real backend order, with one rank: NCCL on a GPU, Gloo in the CPU form.

The gate's waits rest on this. One rank needs no second GPU; NCCL then copies what is not in place, and launches nothing
that communicates. On the simulated GPU there are two ranks.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gpu_steps import figures
from gpu_steps.figures import Recorder
from gpu_steps.simulated import ON_SIMULATED_GPU, rank_device
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence
from tests.simulated_gpu.parameters import Parameters

_SLEEP_CYCLES = 1_000_000_000  # half a second: whatever waits for the device shows
_SHORT_MS = 250.0  # half of it


def run(record: Recorder) -> None:
    device = _joined(record)
    group = dist.group.WORLD
    assert group is not None
    dist.all_reduce(torch.zeros(4, device=device))  # makes the communicator
    check_works(record, group, device)
    check_stash(record, group, device)
    check_gate(record, device)
    if not record.on_cpu:  # the CPU backend has no such blocks
        check_open_block(record, group, device)
        check_gate_in_block(record, group, device)
    dist.destroy_process_group()


def _joined(record: Recorder) -> torch.device:
    """The device, in a process group."""
    if ON_SIMULATED_GPU and not record.on_cpu:
        Parameters(most_data_bytes=2**40).apply()  # what is sent is looked at
        return rank_device()
    device = torch.device("cpu") if record.on_cpu else torch.device("cuda", 0)
    if not record.on_cpu:
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo" if record.on_cpu else "nccl", store=store, rank=0, world_size=1)
    return device


def holds(tensor: torch.Tensor, number: float) -> bool:
    """Whether all of a tensor is this number."""
    return bool((tensor.cpu() == number).all())


def all_reduce(group: dist.ProcessGroup, tensor: torch.Tensor, asynchronous: bool) -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    return group.allreduce([tensor], options)


def check_works(record: Recorder, group: dist.ProcessGroup, device: torch.device) -> None:
    """Whether there is a work, and that waiting for it blocks the stream and not the host."""
    tensor = torch.ones(1024, device=device)
    record.figure(
        "a synchronous collective has no work", all_reduce(group, tensor, False) is None,
        proves="the gate must not wait for what is not there",
        expect=None if record.on_cpu else figures.YES,
    )  # fmt: skip
    record.figure(
        "an asynchronous collective has a work", all_reduce(group, tensor, True) is not None,
        proves="the gate has something to wait for", expect=figures.YES,
    )  # fmt: skip
    _sleep(device)
    work = all_reduce(group, tensor, True)
    first_ms, second_ms = _host_ms(work.wait), _host_ms(work.wait)
    busy = None if record.on_cpu else not torch.cuda.current_stream().query()
    for name, host_ms in (("wait()", first_ms), ("a second wait()", second_ms)):
        record.figure(
            f"{name}, host time", host_ms, "ms",
            proves="the host does not wait for the device", expect=figures.below(_SHORT_MS),
        )  # fmt: skip
    if not record.on_cpu:
        record.figure(
            "the device was still asleep after both", busy, proves="the waits had something to wait for",
            expect=figures.YES,
        )  # fmt: skip
        torch.cuda.synchronize()
    record.figure("the result is right", holds(tensor, group.size() ** 3), expect=figures.YES)


def check_stash(record: Recorder, group: dist.ProcessGroup, device: torch.device) -> None:
    """Whether memory that a caller drops is held until the wait, and given back after it."""
    if record.on_cpu:
        return
    count = 16 * 2**20
    out = torch.empty(count * group.size(), device=device)
    source = torch.ones(count, device=device)
    torch.cuda.synchronize()
    address = source.data_ptr()
    _sleep(device)
    work = group._allgather_base(out, source)
    del source
    other = torch.empty(count, device=device)
    record.figure(
        "memory of a dropped input is not reused before the wait", other.data_ptr() != address,
        proves="a collective's input stays whole until somebody waits", expect=figures.YES,
    )  # fmt: skip
    other.fill_(2.0)
    work.wait()
    after = torch.empty(count, device=device)
    record.raw("memory of a dropped input is reused after the wait", after.data_ptr() == address)
    after.fill_(3.0)  # ordered after the collective, by the wait
    torch.cuda.synchronize()
    record.figure(
        "the gathered tensor is whole", holds(out, 1),
        proves="an early wait, as the gate's, gives memory back only to work that comes after", expect=figures.YES,
    )  # fmt: skip


def check_gate(record: Recorder, device: torch.device) -> None:
    """The gate itself on the real backend: the result, the marks, the owner's own wait after the gate's."""
    tensor, size = torch.ones(2**20, device=device), dist.get_world_size()
    out = torch.empty(size * 2**20, device=device)

    def issue() -> Any:
        _sleep(device)
        work = dist.all_gather_into_tensor(out, tensor, async_op=True)
        dist.all_reduce(tensor)  # synchronous: there is no work
        return work

    gc.collect()  # not below: it takes as long as what is looked for
    start = time.perf_counter()
    work, log = in_sequential_step(issue, device)
    host_ms = 1e3 * (time.perf_counter() - start)
    work.wait()
    if not record.on_cpu:
        record.figure("a sequential step of the gate, host time", host_ms, "ms",
                      proves="serialising does not block the host", expect=figures.below(_SHORT_MS))  # fmt: skip
        torch.cuda.synchronize()
    marks = [collective.start is not None and collective.end is not None for collective in log.collectives]
    record.figure("collectives that the gate serialised, of 2", sum(marks), expect=figures.equal(2))
    record.figure("the gate's step has the right result", holds(out, 1) and holds(tensor, size), expect=figures.YES)


def in_sequential_step(issue: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
    """What ``issue`` returns, and the gate's log of a sequential step around it."""
    gate = Gate()
    gate.register()
    try:
        gate.begin_step(
            sequential=True,
            expected=ExpectedSequence(single_group=dist.group.WORLD.group_name),  # type: ignore[union-attr]
            compute_stream=torch.cuda.current_stream() if device.type == "cuda" else None,
        )
        result = issue()
        log = gate.end_step()
        if gate.last_error is not None:
            raise gate.last_error
        return result, log
    finally:
        gate.close()


def orders_in_open_block(num_ranks: int) -> bool:
    """Whether a wait within an open block orders its collectives.

    They are launched when the block ends. On one rank there is nothing to launch: NCCL enqueues the copy at once (its
    ``taskAppend`` calls ``ncclLaunchOneRank``, from 2.27 to 2.30 at least).
    """
    return num_ranks == 1


def check_open_block(record: Recorder, group: dist.ProcessGroup, device: torch.device) -> None:
    """What a wait orders inside an open block of coalesced collectives: nothing has been launched yet."""
    source = torch.ones(2**20, device=device)
    out = torch.zeros(2**20 * group.size(), device=device)
    torch.cuda.synchronize()
    group._start_coalescing(device)
    work = group.allgather_into_tensor_coalesced([out], [source])
    if work is not None:
        work.wait()
    seen = out.clone()
    torch.cuda.synchronize()
    ended = group._end_coalescing(device)
    if ended is not None:
        ended.wait()
    torch.cuda.synchronize()
    record.raw("a work inside an open block", str(work))
    record.figure(
        "a wait inside an open block orders the collective", holds(seen, 1),
        proves="no, of several ranks: the gate must not wait there: it is launched when the block ends",
        expect=figures.equal(orders_in_open_block(group.size())),
    )  # fmt: skip
    record.figure("the block's result is right", holds(out, 1), expect=figures.YES)


def check_gate_in_block(record: Recorder, group: dist.ProcessGroup, device: torch.device) -> None:
    """The gate in such a block: it must leave the members alone, and the result must be right."""
    tensors = [torch.ones(2**20, device=device) for _ in range(3)]

    def issue() -> None:
        with dist.distributed_c10d._coalescing_manager(group, device=device, async_ops=True) as block:
            for tensor in tensors:
                dist.all_reduce(tensor)
        block.wait()

    _, log = in_sequential_step(issue, device)
    torch.cuda.synchronize()
    serialised = [str(collective) for collective in log.collectives if collective.start is not None]
    record.raw("collectives of a block with a device", [str(collective) for collective in log.collectives])
    record.figure(
        "members of a block with a device that the gate waits for", len(serialised),
        proves="nothing is given back before it is used", expect=figures.equal(0),
    )  # fmt: skip
    right = all(holds(tensor, group.size()) for tensor in tensors)
    record.figure("its result is right", right, expect=figures.YES)


def _sleep(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(_SLEEP_CYCLES)


def _host_ms(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)
