"""What the gate writes down of every collective, against figures worked out by hand, on two ranks.

The tensors are float32 (4 bytes an element) unless a case says otherwise.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_callbacks.gate.deadlock import CollectiveSequence, find_conflict
from overlap_callbacks.gate.dispatcher import OWN_KEY
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.serialiser import NotSerialised
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from tests.distributed import captured_log, run_ranks
from tests.gate.collective_cases import (
    CASES,
    NEVER_SAY_COMPLETE,
    POINT_TO_POINT_CASES,
    SUM_3,
    WITHOUT_WORK,
    Seen,
    all_reduce,
    ramp,
)
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
        try:
            result, log = observe(gate, lambda case=case: case.use(rank))
        except RuntimeError as error:
            # Not this case's alone to fail: tests/known_failures.py says which versions refuse what.
            if "does not support" not in str(error):
                raise
            continue
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
def test_a_step_without_foreign_communication_names_no_group(cases_on_ranks, name):
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


def issue_of_both_kinds(rank: int) -> list[tuple[str, bool, bool, int]]:
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=False)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(2))
    dist.all_gather_into_tensor(torch.zeros(2), torch.ones(1), async_op=True).wait()
    dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
    log = gate.end_step()
    gate.close()
    assert not any(c.on_device for c in log.collectives)  # Gloo, on the CPU
    return [(c.operator, c.asynchronous, c.point_to_point, c.group_size) for c in log.collectives]


def test_a_collective_is_recorded_as_asynchronous_although_the_dispatcher_omits_defaults():
    for found, message in zip(run_ranks(issue_of_both_kinds, 2), ("send", "recv_"), strict=True):
        assert found == [
            ("allreduce_", False, False, 2),
            ("allreduce_", True, False, 2),
            ("_reduce_scatter_base_", False, False, 2),
            ("_allgather_base_", True, False, 2),
            (message, True, True, 2),
        ]


def on_a_group_that_torch_does_not_know(rank: int) -> dict[str, Any]:
    """A group that somebody made from its parts, without ``new_group``."""
    store = dist.PrefixStore("of its own", dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, 2)
    backend = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=30))
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    gate, found = Gate(), {}
    gate.register()
    for sequential in (False, True):
        tensor = ramp(rank, 3)

        def use(tensor: torch.Tensor = tensor) -> torch.Tensor:
            group.allreduce([tensor]).wait()
            dist.all_reduce(torch.ones(1))
            return tensor

        keys = [("allreduce_", "unregistered"), ("allreduce_", dist.group.WORLD.group_name)]
        result, log = observe(gate, use, sequential, keys)
        found[f"{sequential}"] = (result, [c.start is not None for c in log.collectives], dict(log.not_serialised))
    order = CollectiveSequence.of(log.collectives, rank)
    found["groups"] = [(c.group.label, c.group.ranks, c.group_size) for c in log.collectives]
    found["conflict"] = find_conflict({0: order, 1: order})
    found["error"] = repr(gate.last_error)
    gate.close()
    return found


def test_on_a_group_that_torch_does_not_know_a_collective_is_recorded_and_let_pass():
    for found in run_ranks(on_a_group_that_torch_does_not_know, 2):
        assert found["error"] == "None"
        assert found["groups"][0] == ("unregistered", (), 2)
        assert found["groups"][1][1:] == ((0, 1), 2)
        assert found["False"] == (SUM_3, [False, False], {})
        assert found["True"] == (SUM_3, [False, True], {NotSerialised.UNKNOWN_GROUP: 1})
        assert found["conflict"] is None


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
