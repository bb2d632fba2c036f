"""What the gate writes down of every collective, against figures worked out by hand, on two ranks.

The tensors are float32 (4 bytes an element) unless a case says otherwise.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from overlap_callbacks.gate.deadlock import CollectiveSequence
from overlap_callbacks.gate.dispatcher import OWN_KEY
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import (
    KeptReports,
    Training,
    c10d_operators,
    digest_without_library,
    kept_logs,
    kernels_are_registered,
    new_monitor,
    run_steps,
    tiny_schedule,
)

FLOAT, INT64, BYTES = "torch.float32", "torch.int64", "torch.uint8"

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
            ("allgather_", 8, 16, INT64),
            ("allgather_", pickled_bytes({"rank": 0}), 2 * pickled_bytes({"rank": 0}), BYTES),
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


@dataclass(frozen=True)
class Observed:
    """One case on one rank, in one mode."""

    result: Any
    seen: list[Seen]
    serialised: list[bool]
    groups: set[tuple[tuple[int, ...], str]]
    peers: list[tuple[int, int]]
    coalesced: list[bool]
    complete: bool
    quiet: bool
    foreign: tuple[str, ...]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def observe(
    gate: Gate, use: Callable[[], Any], sequential: bool = False, keys: Any = (), watch: bool = False
) -> tuple[Any, StepLog]:
    gate.begin_step(sequential=sequential, expected=ExpectedSequence(keys), watch=watch)
    try:
        result = plain(use())
    finally:
        log = gate.end_step()
    return result, log


def observed(result: Any, log: StepLog) -> Observed:
    found = log.collectives
    return Observed(
        result=result,
        seen=[(c.operator, c.bytes_in, c.bytes_out, str(c.dtype)) for c in found],
        serialised=[c.start is not None and c.end is not None and c.start <= c.end for c in found],
        groups={(c.group.ranks, c.group.backend) for c in found},
        peers=[(c.peer, c.tag) for c in found],
        coalesced=[c.coalesced for c in found],
        complete=log.dropped == 0 and log.divergence is None,
        quiet=log.quiet,
        foreign=log.foreign,
    )


def observe_all_cases(rank: int) -> dict[tuple[str, str], Observed]:
    gate, found = Gate(), {}
    gate.register()
    for name, case in CASES.items():
        result, log = observe(gate, lambda case=case: case.use(rank))
        found[name, "overlapped"] = observed(result, log)
        keys = [c.key for c in log.collectives]
        result, log = observe(gate, lambda case=case: case.use(rank), sequential=True, keys=keys)
        found[name, "sequential"] = observed(result, log)
        for mode in ("watched", "watched sequential"):
            sequential = mode != "watched"
            result, log = observe(gate, lambda case=case: case.use(rank), sequential, keys, watch=True)
            found[name, mode] = observed(result, log)
    assert gate.last_error is None, repr(gate.last_error)
    gate.close()
    return found


@pytest.fixture(scope="module")
def cases_on_ranks() -> list[dict[tuple[str, str], Observed]]:
    return run_ranks(observe_all_cases, 2)


@pytest.mark.parametrize("mode", ["overlapped", "sequential"])
@pytest.mark.parametrize("name", CASES)
def test_a_collective_is_recorded_with_operator_bytes_and_dtype(cases_on_ranks, name, mode):
    seen = [found[name, mode].seen for found in cases_on_ranks]
    assert seen == list(CASES[name].seen)


@pytest.mark.parametrize("mode", ["overlapped", "sequential", "watched", "watched sequential"])
@pytest.mark.parametrize("name", CASES)
def test_a_collective_gives_the_right_result_under_the_gate(cases_on_ranks, name, mode):
    results = [found[name, mode].result for found in cases_on_ranks]
    assert results == list(CASES[name].result)
    assert all(found[name, mode].complete for found in cases_on_ranks)


@pytest.mark.parametrize("name", CASES)
def test_once_its_result_is_there_nothing_is_in_flight_as_far_as_a_watched_step_knows(cases_on_ranks, name):
    for found in cases_on_ranks:
        assert found[name, "watched"].quiet == (name not in NEVER_SAY_COMPLETE)
        assert found[name, "watched sequential"].quiet
        assert not found[name, "overlapped"].quiet  # nobody looked


@pytest.mark.parametrize("name", CASES)
def test_a_step_in_which_nobody_else_communicates_names_no_group(cases_on_ranks, name):
    for found in cases_on_ranks:
        assert {case.foreign for (of_case, _), case in found.items() if of_case == name} == {()}


@pytest.mark.parametrize("name", CASES)
def test_only_collectives_with_work_of_their_own_are_serialised_and_only_in_sequential_mode(cases_on_ranks, name):
    for found in cases_on_ranks:
        expected = name not in POINT_TO_POINT_CASES | WITHOUT_WORK
        assert found[name, "overlapped"].serialised == [False] * len(found[name, "overlapped"].seen)
        assert found[name, "sequential"].serialised == [expected] * len(found[name, "sequential"].seen)


def test_every_collective_of_the_default_group_carries_its_ranks_and_backend(cases_on_ranks):
    for found in cases_on_ranks:
        for case in found.values():
            assert case.groups == {((0, 1), "gloo")}


def test_a_send_and_a_receive_carry_peer_and_tag(cases_on_ranks):
    sender, receiver = (found["send_and_receive", "overlapped"].peers for found in cases_on_ranks)
    assert (sender, receiver) == ([(1, 7)], [(0, 7)])
    assert cases_on_ranks[1]["receive_from_anyone", "overlapped"].peers == [(-1, 0)]


# -- groups and order


def observe_groups_and_order(rank: int) -> dict[str, Any]:
    alone = [dist.new_group([r], group_desc=f"alone {r}") for r in range(2)]
    pair = dist.new_group([1, 0], group_desc="pair")
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=False)
    dist.broadcast(torch.zeros(1), 0, group=pair)
    dist.all_reduce(torch.zeros(2), group=alone[rank])
    dist.barrier()
    dist.all_reduce(torch.zeros(3), group=pair)
    log = gate.end_step()
    gate.close()
    return {
        "names": [c.group.name for c in log.collectives],
        "true_names": [group.group_name for group in (pair, alone[rank], dist.group.WORLD, pair)],
        "descriptions": [c.group.description for c in log.collectives],
        "ranks": [c.group.ranks for c in log.collectives],
        "operators": [c.operator for c in log.collectives],
        "issued": [c.issued_ns for c in log.collectives],
    }


def test_collectives_are_recorded_in_the_order_of_issue_with_their_groups():
    for rank, found in enumerate(run_ranks(observe_groups_and_order, 2)):
        assert found["operators"] == ["broadcast_", "allreduce_", "barrier", "allreduce_"]
        assert found["names"] == found["true_names"]
        assert found["descriptions"][0::3] == ["pair", "pair"]
        assert found["descriptions"][1] == f"alone {rank}"
        assert [sorted(ranks) for ranks in found["ranks"]] == [[0, 1], [rank], [0, 1], [0, 1]]
        assert found["issued"] == sorted(found["issued"])


# -- what sequential means


def issue_before_the_peer_does(rank: int, sequential: bool) -> list[float]:
    """What an asynchronous all-reduce, of which rank 1 issues its part later, leaves on return, and at the end."""
    store = dist.distributed_c10d._get_default_store()
    gate = Gate()
    gate.register()
    tensor = torch.ones(1)
    if rank == 1:
        # In overlapped mode rank 0's call returns first; in sequential mode it cannot.
        store.wait(["issuing" if sequential else "returned"])
    gate.begin_step(sequential=sequential, expected=ExpectedSequence([("allreduce_", dist.group.WORLD.group_name)]))
    if rank == 0:
        store.set("issuing", b"")
    work = dist.all_reduce(tensor, async_op=True)
    found = tensor.tolist()
    if rank == 0:
        store.set("returned", b"")
    gate.end_step()
    work.wait()
    gate.close()
    return [*found, *tensor.tolist()]


def test_a_sequential_collective_is_done_when_its_call_returns():
    assert run_ranks(issue_before_the_peer_does, 2, True) == [[2.0, 2.0]] * 2


def test_an_overlapped_collective_is_not_waited_for():
    # It would hang, otherwise: rank 1 issues its part only once rank 0's call has returned.
    assert [found[-1] for found in run_ranks(issue_before_the_peer_does, 2, False)] == [2.0, 2.0]


def end_a_watched_step_in_flight(rank: int) -> list[bool]:
    """Whether three steps end quiet: with a collective in flight, after it, and with one of another thread's."""
    store = dist.distributed_c10d._get_default_store()
    gate = Gate()
    gate.register()
    if rank == 1:
        store.wait(["ended"])
    gate.begin_step(sequential=False, watch=True)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if rank == 1:
        work.wait()
    in_flight = gate.end_step().quiet
    if rank == 0:
        store.set("ended", b"")
    work.wait()
    gate.begin_step(sequential=False, watch=True)
    dist.all_reduce(torch.ones(1))
    done = gate.end_step().quiet
    gate.begin_step(sequential=False, watch=True)
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
    thread.start()
    thread.join()
    of_another = gate.end_step().quiet
    gate.close()
    return [in_flight, done, of_another]


def test_a_step_with_a_collective_in_flight_or_of_another_thread_does_not_end_quiet():
    assert run_ranks(end_a_watched_step_in_flight, 2) == [[False, True, False], [True, True, False]]


def coalescing_members(rank: int) -> dict[str, Any]:
    gate = Gate()
    gate.register()

    def broadcast_two() -> list[torch.Tensor]:
        tensors = [ramp(rank, 2), ramp(rank, 3)]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.broadcast(tensor, src=1)
        return tensors

    keys = [("broadcast_", dist.group.WORLD.group_name)] * 2
    result, log = observe(gate, broadcast_two, sequential=True, keys=keys)
    gate.close()
    return {"result": result, "coalesced": [(c.coalesced, c.start) for c in log.collectives]}


def test_members_of_a_coalescing_block_are_marked_and_not_waited_for():
    for found in run_ranks(coalescing_members, 2):
        assert found["coalesced"] == [(True, None)] * 2
        assert found["result"] == [[10.0, 11.0], [10.0, 11.0, 12.0]]


# -- storage


def fill_the_storage(rank: int) -> dict[str, Any]:
    gate = Gate(capacity=3)
    gate.register()
    found: dict[str, Any] = {}
    for sequential in (False, True):
        keys = [("allreduce_", dist.group.WORLD.group_name)] * 5
        result, log = observe(gate, lambda: [all_reduce(rank) for _ in range(5)], sequential, keys)
        found[f"{sequential}"] = (result, len(log.collectives), log.dropped)
        order = CollectiveSequence.of(log.collectives, rank, incomplete=log.dropped > 0)
    _, log = observe(gate, lambda: all_reduce(rank))
    found["after"] = (len(log.collectives), log.dropped)
    found["incomplete"] = order.incomplete
    gate.close()
    return found


def test_a_full_storage_says_how_many_collectives_are_missing_and_changes_no_result():
    for found in run_ranks(fill_the_storage, 2):
        assert found["False"] == found["True"] == ([SUM_3] * 5, 3, 2)
        assert found["after"] == (1, 0)
        assert found["incomplete"]


def train_with_a_small_storage(rank: int) -> dict[str, Any]:
    training, sink = Training(rank), KeptReports()
    monitor = new_monitor(sink, Gate(capacity=1), schedule=tiny_schedule(every_n_steps=10))
    with captured_log(level=20) as lines, kept_logs() as logs:
        run_steps(training, monitor, 20)
        monitor.close()
    serialised = sum(c.start is not None for log in logs for c in log.collectives)
    same_weights = training.digest() == digest_without_library(rank, 20)
    return {"lines": lines, "serialised": serialised, "same": same_weights, "reports": sink.facts()}


def test_a_step_with_more_collectives_than_storage_is_never_serialised_and_the_log_says_why():
    found = run_ranks(train_with_a_small_storage, 2)
    for rank in found:
        assert rank["serialised"] == 0
        assert rank["same"]
    assert any("more collectives in one step than the gate has storage for" in line for line in found[0]["lines"])
    assert [report["complete"] for report in found[0]["reports"]] == [False, False]
    assert any("storage" in problem for problem in found[0]["reports"][0]["problems"])


# -- DDP


def collectives_of_a_ddp_step(rank: int) -> list[tuple[str, int, int]]:
    # 64 x 64 x 4 bytes = 16 KiB of gradients a layer; DDP closes a bucket as soon as it holds 32 KiB.
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(5)))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=32 / 1024)
    for _ in range(3):  # DDP orders its buckets anew after the first step
        model(torch.randn(2, 64)).sum().backward()
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=False)
    model(torch.randn(2, 64)).sum().backward()
    log = gate.end_step()
    gate.close()
    return [(c.operator, c.bytes_in, c.bytes_out) for c in log.collectives]


def test_a_ddp_step_has_one_all_reduce_for_each_bucket_with_the_bytes_of_its_gradients():
    kib = 1024
    buckets = [("allreduce_", 32 * kib, 32 * kib)] * 2 + [("allreduce_", 16 * kib, 16 * kib)]
    assert run_ranks(collectives_of_a_ddp_step, 2) == [buckets, buckets]


def report_of_a_ddp_job(rank: int) -> list[dict[str, Any]]:
    training, sink = Training(rank), KeptReports()
    monitor = new_monitor(sink)
    run_steps(training, monitor, 8)
    monitor.close()
    return sink.facts()


def test_the_report_holds_the_collectives_of_one_step_with_their_bytes():
    report = run_ranks(report_of_a_ddp_job, 2)[0][0]
    # Linear layers 16 x 32, 32 x 32 and 32 x 1 with biases.
    gradient_bytes = 4 * (16 * 32 + 32 + 32 * 32 + 32 + 32 * 1 + 1)
    ((operator, messages, bytes_in, bytes_out),) = report["collectives"]
    assert (operator, bytes_in, bytes_out) == ("allreduce_", gradient_bytes, gradient_bytes)
    assert messages > 1


# -- registration


def with_a_process_group() -> set[str]:
    """The operators with a ``process_group`` among the arguments of their schema as text."""
    return {name for name in c10d_operators() if "process_group" in schema(name)}


def schema(name: str) -> str:
    return next(line for line in torch._C._dispatch_dump(name).splitlines() if line.startswith("schema:"))


def gated_operators() -> set[str]:
    return {name for name in c10d_operators() if torch._C._dispatch_has_kernel_for_dispatch_key(name, OWN_KEY)}


def operators_before_and_after_registering(rank: int) -> tuple[set[str], set[str], set[str], bool]:
    before = gated_operators()
    gate = Gate()
    with contextlib.closing(gate):
        gate.register()
        gate.register()
        registered = gated_operators()
    gate.close()
    return before, registered, with_a_process_group(), kernels_are_registered()


def test_the_gate_registers_exactly_the_operators_that_take_a_process_group_once_and_for_good():
    ((before, registered, expected, still),) = run_ranks(operators_before_and_after_registering, 1)
    assert before == set()
    assert registered == expected
    assert len(registered) >= 20
    assert still
