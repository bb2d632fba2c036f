"""Every use of torch.distributed that communicates, and what the gate is to see of it, worked out by hand.

The tensors are float32 (4 bytes an element) unless a case says otherwise.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

FLOAT, INT64, BYTES = "torch.float32", "torch.int64", "torch.uint8"
# torch 2.15 gathers objects into one tensor, the versions before into a list.
OBJECTS_GATHERED = "_allgather_base_" if torch.__version__ >= (2, 15) else "allgather_"

# One collective: operator, bytes in, bytes out, dtype.
Seen = tuple[str, int, int, str]


@dataclass(frozen=True)
class Case:
    """One use of torch.distributed.

    Attributes:
        use: called with the rank; returns tensors or objects.
        seen: what the gate is to see, on rank 0 and rank 1.
        result: what ``use`` returns there, tensors as lists.
    """

    use: Callable[[int], Any]
    seen: tuple[list[Seen], list[Seen]]
    result: tuple[Any, Any]


def on_both(*seen: Seen) -> tuple[list[Seen], list[Seen]]:
    return list(seen), list(seen)


def ramp(rank: int, count: int) -> torch.Tensor:
    """Rank 0: 0, 1, 2, ...; rank 1: 10, 11, 12, ..."""
    return torch.arange(float(count)) + 10 * rank


def all_reduce(rank: int) -> Any:
    tensor = ramp(rank, 3)
    dist.all_reduce(tensor)
    return tensor


def all_reduce_async(rank: int) -> Any:
    tensor = ramp(rank, 3)
    dist.all_reduce(tensor, async_op=True).wait()
    return tensor


def all_reduce_in_inference_mode(rank: int) -> Any:
    with torch.inference_mode():
        return all_reduce(rank)


def all_reduce_coalesced(rank: int) -> Any:
    tensors = [ramp(rank, 2), ramp(rank, 3)]
    dist.all_reduce_coalesced(tensors)
    return tensors


def all_reduce_in_coalescing_block(rank: int) -> Any:
    tensors = [ramp(rank, 2), ramp(rank, 3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


def all_gather_in_coalescing_block(rank: int) -> Any:
    outputs = [torch.zeros(4), torch.zeros(2)]
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(outputs[0], ramp(rank, 2))
        dist.all_gather_into_tensor(outputs[1], ramp(rank, 1))
    return outputs


def reduce_scatter_in_coalescing_block(rank: int) -> Any:
    outputs = [torch.zeros(2), torch.zeros(1)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(outputs[0], ramp(rank, 4))
        dist.reduce_scatter_tensor(outputs[1], ramp(rank, 2))
    return outputs


def broadcast_of_int64(rank: int) -> Any:
    tensor = torch.arange(4) + 10 * rank
    dist.broadcast(tensor, src=1)
    return tensor


def reduce_to_rank_1(rank: int) -> Any:
    tensor = ramp(rank, 3)
    dist.reduce(tensor, dst=1)
    return tensor if rank == 1 else None  # elsewhere it is unspecified


def all_gather(rank: int) -> Any:
    outputs = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(outputs, ramp(rank, 3))
    return outputs


def all_gather_into_tensor(rank: int) -> Any:
    output = torch.zeros(6)
    dist.all_gather_into_tensor(output, ramp(rank, 3))
    return output


def all_gather_coalesced(rank: int) -> Any:
    outputs = [[torch.zeros(2)], [torch.zeros(2)]]
    dist.all_gather_coalesced(outputs, [ramp(rank, 2)])
    return outputs


def reduce_scatter(rank: int) -> Any:
    output = torch.zeros(2)
    dist.reduce_scatter(output, list(ramp(rank, 4).split(2)))
    return output


def reduce_scatter_tensor(rank: int) -> Any:
    output = torch.zeros(2)
    dist.reduce_scatter_tensor(output, ramp(rank, 4))
    return output


def gather_to_rank_0(rank: int) -> Any:
    outputs = [torch.zeros(3), torch.zeros(3)] if rank == 0 else None
    dist.gather(ramp(rank, 3), outputs, dst=0)
    return outputs


def scatter_from_rank_0(rank: int) -> Any:
    output = torch.zeros(2)
    dist.scatter(output, list(ramp(0, 4).split(2)) if rank == 0 else None, src=0)
    return output


def all_to_all(rank: int) -> Any:
    outputs = [torch.zeros(2), torch.zeros(2)]
    dist.all_to_all(outputs, list(ramp(rank, 4).split(2)))
    return outputs


def all_to_all_single(rank: int) -> Any:
    output = torch.zeros(4)
    dist.all_to_all_single(output, ramp(rank, 4))
    return output


def all_to_all_single_with_splits(rank: int) -> Any:
    output = torch.zeros(4 if rank == 0 else 2)
    dist.all_to_all_single(output, ramp(rank, 3), output_split_sizes=[len(output) // 2] * 2, input_split_sizes=[2, 1])
    return output


def barrier(rank: int) -> Any:
    dist.barrier()


def monitored_barrier(rank: int) -> Any:
    dist.monitored_barrier()


def send_and_receive(rank: int) -> Any:
    tensor = ramp(0, 3)
    if rank == 0:
        dist.send(tensor, dst=1, tag=7)
        return tensor
    received = torch.zeros(3)
    dist.recv(received, src=0, tag=7)
    return received


def receive_from_anyone(rank: int) -> Any:
    if rank == 0:
        dist.send(ramp(0, 3), dst=1)
        return None
    received = torch.zeros(3)
    return [dist.recv(received), received]


def asynchronous_exchange(rank: int) -> Any:
    received = torch.zeros(3)
    sending, receiving = dist.isend(ramp(rank, 3), 1 - rank), dist.irecv(received, 1 - rank)
    sending.wait()
    receiving.wait()
    return received


def batched_exchange(rank: int) -> Any:
    received = torch.zeros(3)
    operations = [dist.P2POp(dist.isend, ramp(rank, 3), 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def all_gather_object(rank: int) -> Any:
    found = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    return found


def broadcast_object(rank: int) -> Any:
    found = [{"rank": rank}]
    dist.broadcast_object_list(found, src=0)
    return found


def differentiable_all_reduce(rank: int) -> Any:
    tensor = ramp(rank, 2).requires_grad_()
    differentiable.all_reduce(tensor).sum().backward()
    return tensor.grad


def functional_all_reduce(rank: int) -> Any:
    return functional.wait_tensor(functional.all_reduce(ramp(rank, 3), "sum", dist.group.WORLD))


def functional_all_reduce_coalesced(rank: int) -> Any:
    found = functional.all_reduce_coalesced([ramp(rank, 2), ramp(rank, 3)], "sum", dist.group.WORLD)
    return [functional.wait_tensor(tensor) for tensor in found]


def functional_all_gather(rank: int) -> Any:
    return functional.wait_tensor(functional.all_gather_tensor(ramp(rank, 2), 0, dist.group.WORLD))


def functional_reduce_scatter(rank: int) -> Any:
    return functional.wait_tensor(functional.reduce_scatter_tensor(ramp(rank, 4), "sum", 0, dist.group.WORLD))


def functional_all_to_all(rank: int) -> Any:
    return functional.wait_tensor(functional.all_to_all_single(ramp(rank, 4), [2, 2], [2, 2], dist.group.WORLD))


def functional_broadcast(rank: int) -> Any:
    return functional.wait_tensor(functional.broadcast(ramp(rank, 3), 0, dist.group.WORLD))


def same(result: Any) -> tuple[Any, Any]:
    return result, result


def pickled_bytes(content: Any) -> int:
    return len(pickle.dumps(content))


SUM_2, SUM_3, SUM_4 = [10.0, 12.0], [10.0, 12.0, 14.0], [10.0, 12.0, 14.0, 16.0]
GATHERED_3 = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]

CASES = {
    "all_reduce": Case(all_reduce, on_both(("allreduce_", 12, 12, FLOAT)), same(SUM_3)),
    "all_reduce_async": Case(all_reduce_async, on_both(("allreduce_", 12, 12, FLOAT)), same(SUM_3)),
    "inference_mode": Case(all_reduce_in_inference_mode, on_both(("allreduce_", 12, 12, FLOAT)), same(SUM_3)),
    "all_reduce_coalesced": Case(
        all_reduce_coalesced, on_both(("allreduce_coalesced_", 20, 20, FLOAT)), same([SUM_2, SUM_3])
    ),
    "coalescing_all_reduce": Case(
        all_reduce_in_coalescing_block, on_both(("allreduce_coalesced_", 20, 20, FLOAT)), same([SUM_2, SUM_3])
    ),
    "coalescing_all_gather": Case(
        all_gather_in_coalescing_block,
        on_both(("allgather_into_tensor_coalesced_", 12, 24, FLOAT)),
        same([[0.0, 1.0, 10.0, 11.0], [0.0, 10.0]]),
    ),
    "coalescing_reduce_scatter": Case(
        reduce_scatter_in_coalescing_block,
        on_both(("reduce_scatter_tensor_coalesced_", 24, 12, FLOAT)),
        ([SUM_4[:2], SUM_2[:1]], [SUM_4[2:], SUM_2[1:]]),
    ),
    "broadcast": Case(broadcast_of_int64, on_both(("broadcast_", 32, 32, INT64)), same([10, 11, 12, 13])),
    "reduce": Case(reduce_to_rank_1, on_both(("reduce_", 12, 12, FLOAT)), (None, SUM_3)),
    "all_gather": Case(all_gather, on_both(("allgather_", 12, 24, FLOAT)), same(GATHERED_3)),
    "all_gather_into_tensor": Case(
        all_gather_into_tensor, on_both(("_allgather_base_", 12, 24, FLOAT)), same([*GATHERED_3[0], *GATHERED_3[1]])
    ),
    "all_gather_coalesced": Case(
        all_gather_coalesced, on_both(("allgather_coalesced_", 8, 16, FLOAT)), same([[[0.0, 1.0]], [[10.0, 11.0]]])
    ),
    "reduce_scatter": Case(reduce_scatter, on_both(("reduce_scatter_", 16, 8, FLOAT)), (SUM_4[:2], SUM_4[2:])),
    "reduce_scatter_tensor": Case(
        reduce_scatter_tensor, on_both(("_reduce_scatter_base_", 16, 8, FLOAT)), (SUM_4[:2], SUM_4[2:])
    ),
    "gather": Case(gather_to_rank_0, ([("gather_", 12, 24, FLOAT)], [("gather_", 12, 0, FLOAT)]), (GATHERED_3, None)),
    "scatter": Case(
        scatter_from_rank_0, ([("scatter_", 16, 8, FLOAT)], [("scatter_", 0, 8, FLOAT)]), ([0.0, 1.0], [2.0, 3.0])
    ),
    "all_to_all": Case(
        all_to_all,
        on_both(("alltoall_", 16, 16, FLOAT)),
        ([[0.0, 1.0], [10.0, 11.0]], [[2.0, 3.0], [12.0, 13.0]]),
    ),
    "all_to_all_single": Case(
        all_to_all_single,
        on_both(("alltoall_base_", 16, 16, FLOAT)),
        ([0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]),
    ),
    "all_to_all_single_with_splits": Case(
        all_to_all_single_with_splits,
        ([("alltoall_base_", 12, 16, FLOAT)], [("alltoall_base_", 12, 8, FLOAT)]),
        ([0.0, 1.0, 10.0, 11.0], [2.0, 12.0]),
    ),
    # torch hands the operator a dummy tensor: of one byte here, and empty there.
    "barrier": Case(barrier, on_both(("barrier", 1, 1, BYTES)), same(None)),
    "monitored_barrier": Case(monitored_barrier, on_both(("monitored_barrier_", 0, 0, FLOAT)), same(None)),
    "send_and_receive": Case(
        send_and_receive, ([("send", 12, 0, FLOAT)], [("recv_", 0, 12, FLOAT)]), same([0.0, 1.0, 2.0])
    ),
    "receive_from_anyone": Case(
        receive_from_anyone,
        ([("send", 12, 0, FLOAT)], [("recv_any_source_", 0, 12, FLOAT)]),
        (None, [0, [0.0, 1.0, 2.0]]),
    ),
    "asynchronous_exchange": Case(
        asynchronous_exchange, on_both(("send", 12, 0, FLOAT), ("recv_", 0, 12, FLOAT)), tuple(reversed(GATHERED_3))
    ),
    "batched_exchange": Case(
        batched_exchange, on_both(("send", 12, 0, FLOAT), ("recv_", 0, 12, FLOAT)), tuple(reversed(GATHERED_3))
    ),
    # Objects travel as their length, an int64, and their pickle.
    "all_gather_object": Case(
        all_gather_object,
        on_both(
            (OBJECTS_GATHERED, 8, 16, INT64),
            (OBJECTS_GATHERED, pickled_bytes({"rank": 0}), 2 * pickled_bytes({"rank": 0}), BYTES),
        ),
        same([{"rank": 0}, {"rank": 1}]),
    ),
    "broadcast_object": Case(
        broadcast_object,
        on_both(
            ("broadcast_", 8, 8, INT64),
            ("broadcast_", pickled_bytes({"rank": 0}), pickled_bytes({"rank": 0}), BYTES),
        ),
        same([{"rank": 0}]),
    ),
    "differentiable_all_reduce": Case(
        differentiable_all_reduce, on_both(*2 * [("allreduce_", 8, 8, FLOAT)]), same([2.0, 2.0])
    ),
    "functional_all_reduce": Case(functional_all_reduce, on_both(("allreduce_", 12, 12, FLOAT)), same(SUM_3)),
    "functional_all_reduce_coalesced": Case(
        functional_all_reduce_coalesced, on_both(("allreduce_coalesced_", 20, 20, FLOAT)), same([SUM_2, SUM_3])
    ),
    "functional_all_gather": Case(
        functional_all_gather,
        on_both(("allgather_into_tensor_coalesced_", 8, 16, FLOAT)),
        same([0.0, 1.0, 10.0, 11.0]),
    ),
    "functional_reduce_scatter": Case(
        functional_reduce_scatter,
        on_both(("reduce_scatter_tensor_coalesced_", 16, 8, FLOAT)),
        (SUM_4[:2], SUM_4[2:]),
    ),
    "functional_all_to_all": Case(
        functional_all_to_all,
        on_both(("alltoall_base_", 16, 16, FLOAT)),
        ([0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]),
    ),
    "functional_broadcast": Case(functional_broadcast, on_both(("broadcast_", 12, 12, FLOAT)), same([0.0, 1.0, 2.0])),
}
POINT_TO_POINT_CASES = {"send_and_receive", "receive_from_anyone", "asynchronous_exchange", "batched_exchange"}
# Its operator gives no Work: it blocks the host of itself.
WITHOUT_WORK = {"monitored_barrier"}
# Gloo's Work of a reduce-scatter has no future, and is not complete even after it was waited for.
NEVER_SAY_COMPLETE = {
    "reduce_scatter",
    "reduce_scatter_tensor",
    "functional_reduce_scatter",
    "coalescing_reduce_scatter",
}
