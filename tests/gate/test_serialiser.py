"""The waits around a collective: on streams that only keep what they are asked, so no accelerator is needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_callbacks.gate.collectives import Collective, Group, OperatorSpec
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.serialiser import CompletedWork, HostSerialiser, NotSerialised, StreamSerialiser
from overlap_callbacks.gate.step_log import ExpectedSequence
from tests.gate.streams import DEVICE, Device, Stream, Work
from tests.margins import PATIENCE_S

GROUP = Group("0", "", (0, 1), "nccl")
# Streams on which steps issue, the first of them the compute stream; and one on which they never do.
ISSUING = ("compute", "gather", "scatter")
SECOND_COMPUTE = "second compute"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(*ISSUING, SECOND_COMPUTE)
    device.install(monkeypatch)
    return device


def new_serialiser(cuda: Device) -> StreamSerialiser:
    return StreamSerialiser(cuda.streams["compute"])  # type: ignore[arg-type]


SPEC = OperatorSpec(
    name="allreduce_",
    redispatch=lambda *_: None,
    group=1,
    sizes=lambda _: (4, 4, None),
    returns_work=True,
    point_to_point=False,
    peer=-1,
    tag=-1,
)


def new_call(operator: str = "allreduce_") -> Collective:
    return Collective(operator, GROUP, 4, 4, torch.float32, 0, -1, 0, 0)


def issue(
    cuda: Device,
    serialiser: StreamSerialiser,
    stream: str,
    *,
    asynchronous: bool = True,
    operator: str = "allreduce_",
) -> int:
    """One collective of NCCL on a stream, in the order of the gate's kernel. Returns its work."""
    cuda.current = cuda.streams[stream]
    call = new_call(operator)
    serialiser.before(call)
    cuda.log.append("issued")
    work = Work(cuda, Stream(cuda, "communicator")) if asynchronous else None
    number = cuda.current.enqueue() if work is None else work.number
    assert serialiser.after(call, work)  # type: ignore[arg-type]
    assert (call.start.stream, call.end.stream) == (cuda.current, cuda.current)  # type: ignore[union-attr]
    return number


# -- the waits of one collective


def test_an_asynchronous_collective_on_the_compute_stream_is_followed_by_a_wait_for_its_work(cuda: Device) -> None:
    issue(cuda, new_serialiser(cuda), "compute")
    assert cuda.log == ["mark on compute", "issued", "current stream waits for the work", "mark on compute"]


def test_a_collective_on_a_side_stream_waits_for_compute_and_compute_waits_for_it(cuda: Device) -> None:
    issue(cuda, new_serialiser(cuda), "gather")
    assert cuda.log == [
        "event on compute",
        "gather waits for compute",
        "mark on gather",
        "issued",
        "current stream waits for the work",
        "mark on gather",
        "compute waits for gather",
    ]


def test_a_synchronous_collective_of_nccl_has_no_work_and_is_ordered_all_the_same(cuda: Device) -> None:
    issue(cuda, new_serialiser(cuda), "gather", asynchronous=False)
    assert cuda.log[-3:] == ["issued", "mark on gather", "compute waits for gather"]


def test_a_barrier_is_not_waited_for_because_that_would_block_the_host(cuda: Device) -> None:
    issue(cuda, new_serialiser(cuda), "compute", operator="barrier")
    assert "current stream waits for the work" not in cuda.log


def test_a_collective_records_one_event_for_each_known_stream_and_not_one_for_each_pair(cuda: Device) -> None:
    serialiser = new_serialiser(cuda)
    for stream in ISSUING:
        issue(cuda, serialiser, stream)
    before = cuda.events
    issue(cuda, serialiser, "gather")
    # One on each of the two others, and the two marks, the second of which both others wait for.
    assert cuda.events - before == 4


# -- what no compute may do


Program = list[tuple[str, str]]


def run(cuda: Device, program: Program) -> tuple[list[tuple[int, str, int]], list[tuple[int, int, set[str]]]]:
    """Run a step: kernels by place, stream and work; and collectives by place and work, with the streams known then."""
    serialiser, known = new_serialiser(cuda), {"compute"}
    kernels, collectives = [], []
    for place, (what, stream) in enumerate(program):
        cuda.current = cuda.streams[stream]
        if what == "kernel":
            kernels.append((place, stream, cuda.current.enqueue()))
            continue
        known = known | {stream}
        if what == "let pass":
            serialiser.skip(None)
        elif what == "batch":
            order_after = serialiser.before_batch()
            works = [Work(cuda, Stream(cuda, "communicator")) for _ in range(2)]
            for work in works:
                work.wait()
            order_after()
            collectives += [(place, work.number, known) for work in works]
        else:
            asynchronous = what == "asynchronous"
            collectives.append((place, issue(cuda, serialiser, stream, asynchronous=asynchronous), known))
    return kernels, collectives


def steps_of(*streams: str) -> st.SearchStrategy[Program]:
    kernel = st.tuples(st.just("kernel"), st.sampled_from((*streams, SECOND_COMPUTE)))
    issued = ("asynchronous", "synchronous", "batch", "let pass")
    collective = st.tuples(st.sampled_from(issued), st.sampled_from(streams))
    return st.lists(kernel | collective, max_size=25)


@given(steps_of(*ISSUING))
def test_no_kernel_on_a_known_stream_overlaps_a_collective(program: Program) -> None:
    cuda = Device(*ISSUING, SECOND_COMPUTE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda.install(monkeypatch)
        kernels, collectives = run(cuda, program)
    for at, collective, known in collectives:
        for place, stream, kernel in kernels:
            if stream not in known:
                continue
            assert cuda.is_before(kernel, collective) if place < at else cuda.is_before(collective, kernel), program


@given(steps_of(*ISSUING))
def test_collectives_run_in_the_order_of_issue(program: Program) -> None:
    cuda = Device(*ISSUING, SECOND_COMPUTE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cuda.install(monkeypatch)
        _, collectives = run(cuda, program)
    for at, first, _ in collectives:
        for place, second, _ in collectives:
            assert at >= place or cuda.is_before(first, second)


def test_kernels_on_the_stream_of_an_earlier_collective_come_before_the_next_one_on_another(cuda: Device) -> None:
    """FSDP2 adds gradients up on its reduce-scatter stream, while the next all-gather is issued on another."""
    kernels, collectives = run(cuda, [("synchronous", "scatter"), ("kernel", "scatter"), ("synchronous", "gather")])
    ((_, _, adding_up),) = kernels
    assert cuda.is_before(adding_up, collectives[1][1])


def test_a_stream_that_only_issued_unserialised_work_is_ordered_with_the_next_collective(cuda: Device) -> None:
    """DeepSpeed gathers in a block with a device on a stream of its own, and copies there what it gathered."""
    program = [("let pass", "gather"), ("kernel", "gather"), ("synchronous", "compute"), ("kernel", "gather")]
    ((_, _, before), (_, _, after)), ((_, collective, _),) = run(cuda, program)
    assert cuda.is_before(before, collective)
    assert cuda.is_before(collective, after)


def test_a_captured_stream_or_one_of_another_device_is_not_ordered_for_unserialised_work(cuda: Device) -> None:
    serialiser: Any = new_serialiser(cuda)
    cuda.current = cuda.streams["gather"]
    serialiser.skip(SimpleNamespace(device=torch.device("cuda", 1)))
    cuda.capturing = True
    serialiser.skip(SimpleNamespace(device=DEVICE))
    cuda.capturing = False
    cuda.log.clear()
    issue(cuda, serialiser, "compute")
    assert not any("gather" in line for line in cuda.log)


def test_a_stream_that_never_issued_is_not_ordered(cuda: Device) -> None:
    kernels, collectives = run(
        cuda, [("kernel", SECOND_COMPUTE), ("asynchronous", "gather"), ("kernel", SECOND_COMPUTE)]
    )
    (_, _, before), (_, _, after) = kernels
    assert not cuda.is_before(before, collectives[0][1])
    assert not cuda.is_before(collectives[0][1], after)


def test_the_next_step_starts_without_the_streams_of_this_one(cuda: Device) -> None:
    issue(cuda, new_serialiser(cuda), "gather")
    cuda.log.clear()
    issue(cuda, new_serialiser(cuda), "scatter")
    assert not any("gather" in line for line in cuda.log)


# -- what cannot be serialised


def test_while_a_graph_is_captured_and_on_another_device_nothing_can_be_serialised(cuda: Device) -> None:
    serialiser: Any = new_serialiser(cuda)
    assert serialiser.obstacle(SimpleNamespace(device=DEVICE)) is None
    assert serialiser.obstacle(SimpleNamespace(device=torch.device("cuda", 1))) is NotSerialised.OTHER_DEVICE
    cuda.capturing = True
    assert serialiser.obstacle(SimpleNamespace(device=DEVICE)) is NotSerialised.CAPTURE
    assert serialiser.obstacle(None) is NotSerialised.CAPTURE
    assert cuda.log == []


def test_a_batch_on_a_side_stream_is_ordered_with_compute_on_both_sides(cuda: Device) -> None:
    cuda.current = cuda.streams["gather"]
    order_after = new_serialiser(cuda).before_batch()
    cuda.log.append("posted")
    order_after()
    assert cuda.log == [
        "event on compute",
        "gather waits for compute",
        "posted",
        "event on gather",
        "compute waits for gather",
    ]


def test_a_batch_on_the_compute_stream_needs_no_waits_between_streams(cuda: Device) -> None:
    new_serialiser(cuda).before_batch()()
    assert cuda.log == []


def test_a_stream_registered_as_computing_is_ordered_without_communicating(cuda: Device) -> None:
    """Shared experts of Megatron without tensor parallelism."""
    second = cuda.streams[SECOND_COMPUTE]
    serialiser = StreamSerialiser(cuda.streams["compute"], [second])  # type: ignore[arg-type,list-item]
    before = second.enqueue()
    collective = issue(cuda, serialiser, "compute")
    after = second.enqueue()
    assert cuda.is_before(before, collective)
    assert cuda.is_before(collective, after)


def test_of_thousands_of_collectives_in_a_step_a_bounded_number_is_timed_and_all_are_ordered(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlap_callbacks.gate.serialiser.MAX_TIMED", 2)
    serialiser, calls = new_serialiser(cuda), [new_call() for _ in range(3)]
    for call in calls:
        serialiser.before(call)
        serialiser.after(call, None)
    assert [(call.start is not None, call.end is not None) for call in calls] == [(True, True)] * 2 + [(False, False)]


class _Unhurried:
    """A work of torchcomms: a wait with a timeout fails, and the work with it."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self.waited = False

    def is_completed(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def wait(self) -> None:
        self.waited = True


@pytest.mark.parametrize(("looks", "done"), [(3, True), (10**9, False)])
def test_a_work_of_torchcomms_is_waited_for_without_a_timeout_and_not_for_ever(
    looks: int, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.distributed_c10d._use_torchcomms_enabled", lambda: True, raising=False)
    work = _Unhurried(looks)
    assert HostSerialiser(PATIENCE_S if done else 0.05).after(new_call(), work) == done  # type: ignore[arg-type]
    assert work.waited == done


class _Works:
    """A work whose wait ends as the test sets it."""

    def __init__(self, ends_with: Exception | None) -> None:
        self._ends_with = ends_with
        self.timeouts: list[float] = []

    def wait(self, timeout: Any) -> None:
        self.timeouts.append(timeout.total_seconds())
        if self._ends_with is not None:
            raise self._ends_with


def test_on_the_host_a_collective_is_waited_for_with_patience_and_its_time_kept() -> None:
    call, work = new_call(), _Works(None)
    serialiser = HostSerialiser(7.0)
    serialiser.before(call)
    assert serialiser.after(call, work)  # type: ignore[arg-type]
    assert work.timeouts == [7.0]
    assert isinstance(call.start, int)
    assert isinstance(call.end, int)
    assert call.start <= call.end


def test_on_the_host_a_collective_that_fails_at_once_is_its_owners_to_notice_and_not_stuck() -> None:
    call = new_call()
    assert HostSerialiser(7.0).after(call, _Works(RuntimeError("a peer died")))  # type: ignore[arg-type]


def test_on_the_host_a_collective_that_outlasts_the_patience_is_stuck_and_has_no_end() -> None:
    call = new_call()
    assert not HostSerialiser(0.0).after(call, _Works(RuntimeError("timed out")))  # type: ignore[arg-type]
    assert call.end is None


def test_a_completed_work_may_be_waited_for_again() -> None:
    work = CompletedWork()
    assert work.wait()
    assert work.wait(timeout=1.0)
    assert work.is_completed()


def test_an_error_in_a_wait_is_kept_and_does_not_escape(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stream: Any) -> None:
        raise RuntimeError("no such stream")

    gate, call = Gate(capacity=1), new_call()
    call.serialiser = new_serialiser(cuda)
    call.serialiser.before(call)
    monkeypatch.setattr(cuda.asked, "mark", fail)
    monkeypatch.setattr(torch.distributed.Work, "unbox", staticmethod(lambda work: work))
    gate.after_call(SPEC, call, None)
    assert "no such stream" in str(gate.last_error)


# -- what a step let pass


@pytest.fixture
def step(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Issues one collective, or a batch of one send, in a sequential step of a job on CUDA. Returns the step's log."""
    monkeypatch.setattr("overlap_callbacks.gate.gate.unbox_group", lambda group: group)

    def run_step(
        tensor: Any,
        *,
        batch: bool = False,
        group: Group = GROUP,
        compute: Any = cuda.streams["compute"],
        sequential: bool = True,
    ) -> Any:
        monkeypatch.setattr(Group, "of", lambda of, dimensions: group)
        name = "send" if batch else "allreduce_"
        changes = {"name": name, "point_to_point": batch, "sizes": lambda _: (4, 4, tensor)}
        spec = OperatorSpec(**{**vars(SPEC), **changes})
        gate = Gate()
        expected = ExpectedSequence([(name, "0")], batches=[((name, "0", -1),)])
        gate.register()
        gate.begin_step(sequential=sequential, expected=expected, compute_stream=compute)
        if batch:
            gate.post(lambda: gate.before_call(spec, ([tensor], "0")), lambda _: [])
        else:
            gate.before_call(spec, ([tensor], "0"))
        log = gate.end_step()
        gate.close()
        assert gate.last_error is None, repr(gate.last_error)
        assert log.divergence is None
        return log

    return run_step


def on(where: torch.device) -> Any:
    return SimpleNamespace(device=where, is_cpu=where.type == "cpu", dtype=torch.float32)


@pytest.mark.parametrize("sequential", [False, True])
def test_steps_of_any_mode_notice_captured_graphs_and_never_ask_for_host_tensors(
    cuda: Device, step: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, sequential: bool
) -> None:
    assert not step(on(DEVICE), sequential=sequential).captured
    cuda.capturing = True
    assert step(on(DEVICE), sequential=sequential).captured
    assert not step(on(torch.device("cpu")), sequential=sequential).captured
    monkeypatch.setattr(cuda.asked, "is_capturing", lambda: pytest.fail("asked"))
    step(on(torch.device("cpu")), sequential=sequential, compute=None)


@pytest.mark.parametrize("batch", [False, True])
def test_what_cannot_be_serialised_is_counted_by_the_reason_and_has_no_time(
    cuda: Device, step: Callable[..., Any], batch: bool
) -> None:
    other = torch.device("cuda", 1)
    assert step(on(DEVICE), batch=batch).not_serialised == {}
    passed = {
        NotSerialised.OTHER_DEVICE: step(on(other), batch=batch),
        NotSerialised.UNKNOWN_GROUP: step(on(DEVICE), batch=batch, group=Group("0", "", (), "nccl", size=2)),
    }
    cuda.capturing = True
    passed[NotSerialised.CAPTURE] = step(on(DEVICE), batch=batch)
    for reason, log in passed.items():
        assert log.not_serialised == {reason: 1}
        assert log.not_serialised_bytes == sum(max(c.bytes_in, c.bytes_out) for c in log.collectives)
        assert [(c.start, c.end) for c in log.collectives] == [(None, None)]
    assert cuda.log.count("event on compute") == 0


def test_the_stream_of_a_message_that_was_let_pass_is_ordered_with_the_next_collective(
    cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overlap_callbacks.gate.gate.unbox_group", lambda group: group)
    monkeypatch.setattr(Group, "of", lambda of, dimensions: GROUP)
    usual = {**vars(SPEC), "sizes": lambda _: (4, 4, on(DEVICE))}
    message, collective = OperatorSpec(**{**usual, "name": "send", "point_to_point": True}), OperatorSpec(**usual)
    gate = Gate()
    gate.register()
    expected = ExpectedSequence([("send", "0"), ("allreduce_", "0")])
    gate.begin_step(sequential=True, expected=expected, compute_stream=cuda.streams["compute"])  # type: ignore[arg-type]
    for spec, stream in ((message, "gather"), (collective, "compute")):
        cuda.current = cuda.streams[stream]
        gate.before_call(spec, ([], "0"))
    log = gate.end_step()
    gate.close()
    assert gate.last_error is None, repr(gate.last_error)
    assert log.not_serialised == {NotSerialised.SINGLE_MESSAGE: 1}
    assert "compute waits for gather" in cuda.log


def test_a_device_that_cannot_be_timed_is_named_and_its_collectives_are_let_pass(
    step: Callable[..., Any],
) -> None:
    log = step(on(torch.device("xpu", 0)), compute=None)
    assert log.unsupported_device == "xpu"
    assert log.not_serialised == {NotSerialised.OTHER_DEVICE: 1}
    assert step(on(torch.device("cpu")), compute=None).unsupported_device == ""
