"""CUDA graphs on the simulated device: captured and replayed by torch, by CUDA's rules."""

from __future__ import annotations

import ctypes
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tests.campaign.cases  # noqa: F401  (enters the cases)
from tests.campaign.case import CASES
from tests.campaign.command import run_case
from tests.campaign.processes import zygotes
from tests.distributed import run_ranks
from tests.simulated_gpu import capture_rules as rules
from tests.simulated_gpu.jobs import on_device as rank_on_device
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.test_device import CYCLES_PER_MS, on_device
from tests.simulated_gpu.truth import DeviceLog

WIDTH, ROWS, STEPS = 16, 8, 5
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, capturable=True),
    "adam in a loop": lambda parameters: torch.optim.Adam(parameters, lr=0.01, capturable=True, foreach=False),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, capturable=True, fused=True),
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, WIDTH))
    return nn.Sequential(*layers).cuda()


def _batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator))] * 2 + [
        (torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator))
        for _ in range(STEPS)
    ]


def on_side_stream(function: Callable[[], object], times: int = 3) -> None:
    """What torch's documentation asks for before a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(side)


def _trained(optimizer: str, captured: bool) -> tuple[list[float], list[list[float]]]:
    """Losses and weights of whole steps, replayed from a graph or not."""
    model = _model()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    batch, target = (torch.zeros(ROWS, WIDTH, device="cuda") for _ in range(2))

    def step() -> Tensor:
        stepper.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(batch), target)
        loss.backward()
        stepper.step()
        return loss

    on_side_stream(step)
    graph = torch.cuda.CUDAGraph()
    if captured:
        stepper.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            found = step()
    losses = []
    for inputs, wanted in _batches():
        batch.copy_(inputs)
        target.copy_(wanted)
        if captured:
            graph.replay()
        else:
            found = step()
        losses.append(float(found.detach()))
    return losses, [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


def _partial(captured: bool) -> tuple[list[float], list[list[float]]]:
    """The same where parts of the model are graphed callables."""
    model = _model()
    first, _, drop, last = model
    head: Any = nn.Sequential(first, nn.GELU())
    if captured:
        samples = (
            (torch.zeros(ROWS, WIDTH, device="cuda"),),
            (torch.zeros(ROWS, 32, device="cuda", requires_grad=True),),
        )
        head, last = torch.cuda.make_graphed_callables((head, last), samples)  # type: ignore[no-untyped-call]
    stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(2)
    losses = []
    for inputs, wanted in _batches():
        loss = F.mse_loss(last(drop(head(inputs.cuda()))), wanted.cuda())
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        losses.append(float(loss.detach()))
    return losses, [parameter.detach().cpu().flatten().tolist() for parameter in model.parameters()]


def _all_trained() -> dict[str, list[Any]]:
    torch.set_num_threads(1)
    found = {name: [_trained(name, captured) for captured in (False, True)] for name in OPTIMIZERS}
    return {**found, "parts": [_partial(captured) for captured in (False, True)]}


def test_steps_that_are_replayed_compute_the_same_numbers() -> None:
    for name, (eager, replayed) in on_device(_all_trained, computes=True, stall_s=30).items():
        assert eager == replayed, name
        assert len(set(eager[0])) == len(eager[0])


def _replayed_nodes() -> dict[str, Any]:
    runtime = ctypes.CDLL("libcudart.so.13")
    called: list[float] = []
    numbers, value, other = torch.arange(4.0, device="cuda"), 3.0, torch.zeros(4, device="cuda")
    pinned, drawn = torch.zeros(4).pin_memory(), torch.zeros(1000, device="cuda")
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: called.append(float(pinned[0])))
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(value)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other.copy_(numbers).mul_(2)
        drawn.uniform_()
        torch.cuda.current_stream().wait_stream(side)
        numbers.add_(other)
        pinned.copy_(numbers, non_blocking=True)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert runtime.cudaLaunchHostFunc(stream, function, None) == 0
    value = 100.0
    captured = numbers.tolist(), list(called)
    draws = []
    for number in range(3):
        with torch.cuda.stream(torch.cuda.Stream() if number else torch.cuda.current_stream()):
            graph.replay()
            draws.append(drawn.cpu())
    torch.cuda.synchronize()
    torch.manual_seed(5)
    graph.replay()
    first = drawn.cpu()
    torch.manual_seed(5)
    eager = torch.empty(1000, device="cuda").uniform_().cpu()
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    numbers.zero_()
    within, around = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(within):
        numbers.add_(1)
        numbers.mul_(2)
    with torch.cuda.graph(around):
        numbers.add_(3)
        within.replay()
        numbers.add_(5)
    around.replay()
    around.replay()
    different = not any(torch.equal(draws[i], draws[j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    return {
        "captured": captured,
        "called": called[:3],
        "calls": len(called),
        "draws differ": different,
        "as eager": torch.equal(first, eager),
        "graph in a graph": numbers.tolist(),
    }


def test_a_graph_does_anew_what_was_captured_with_the_arguments_of_the_capture() -> None:
    found = on_device(_replayed_nodes, computes=True, stall_s=30)
    assert found["captured"] == ([0.0, 1.0, 2.0, 3.0], [])
    # Each replay: 3 is added, and the double of that.
    assert found["called"] == [9.0, 36.0, 117.0]
    assert found["calls"] == 204
    assert found["draws differ"]
    assert found["as eager"]
    assert found["graph in a graph"] == [39.0] * 4


def _collectives(rank: int, parameters: Parameters) -> tuple[list[bool], str]:
    """Whether replayed collectives give what eager ones do; and how a capture ends if nobody waits for a collective."""
    torch.set_num_threads(1)
    with rank_on_device(rank, parameters) as device:
        source, pair = torch.zeros(8, device=device), torch.zeros(16, device=device)
        found = {name: torch.zeros(8, device=device) for name in ("reduced", "scattered", "sent", "spread", "later")}
        gathered, other = torch.zeros(16, device=device), 1 - rank

        def body() -> None:
            for name in ("reduced", "spread", "later"):
                found[name].copy_(source)
            work = dist.all_reduce(found["later"], async_op=True)
            dist.all_reduce(found["reduced"], op=dist.ReduceOp.AVG)
            dist.all_gather_into_tensor(gathered, source)
            pair.copy_(gathered)
            dist.reduce_scatter_tensor(found["scattered"], pair.mul_(2))
            dist.broadcast(found["spread"], 0)
            messages = [dist.P2POp(dist.isend, source, other), dist.P2POp(dist.irecv, found["sent"], other)]
            for message in dist.batch_isend_irecv(messages):
                message.wait()
            work.wait()

        def results() -> list[list[float]]:
            return [one.tolist() for one in (*found.values(), gathered)]

        on_side_stream(body)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        same = []
        for number in range(3):
            source.copy_(torch.arange(8.0) + 10 * rank + number)
            body()
            eager = results()
            for one in (*found.values(), gathered):
                one.fill_(-1)
            with torch.cuda.stream(torch.cuda.Stream() if number else torch.cuda.current_stream()):
                graph.replay()
                same.append(results() == eager)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                dist.all_reduce(source, async_op=True)
        except RuntimeError as error:
            return same, str(error)
        return same, ""


def test_collectives_of_a_graph_are_done_anew_by_each_launch() -> None:
    for same, error in run_ranks(_collectives, 2, Parameters(computes=True, stall_s=30), backend="", timeout_s=150):
        assert same == [True] * 3
        assert "capturing stream has unjoined work" in error


def _pools() -> list[Any]:
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        one = torch.ones(8 << 20, device="cuda") * 2
        kept = one.sum()
        del one
    held = before - torch.cuda.mem_get_info()[0]
    with torch.cuda.graph(second, pool=first.pool()):
        other = torch.ones(8 << 20, device="cuda") * 3
        kept_too = other.sum()
        del other
    same = before - torch.cuda.mem_get_info()[0] == held
    first.replay()
    second.replay()
    torch.cuda.synchronize()
    del kept, kept_too
    first.reset()
    second.reset()
    torch.cuda.empty_cache()
    return [held >= 64 << 20, same, torch.cuda.mem_get_info()[0] == before]


def test_graphs_have_memory_of_their_own_that_they_can_share_and_give_back() -> None:
    assert on_device(_pools) == [True, True, True]


def _branches(trace: str) -> tuple[int, float, str]:
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    inner: Any = torch.cuda.Event()
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))  # others may ask for them
    with torch.cuda.graph(graph):
        torch.cuda._sleep(CYCLES_PER_MS)
        begin.record()
        inner.record()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(5 * CYCLES_PER_MS)
        with torch.cuda.stream(side):
            torch.cuda._sleep(2 * CYCLES_PER_MS)
            torch.cuda._sleep(4 * CYCLES_PER_MS)
        torch.cuda.current_stream().wait_stream(side)
        end.record()
        torch.cuda._sleep(3 * CYCLES_PER_MS)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
    found.export_chrome_trace(trace)
    try:
        inner.query()
    except RuntimeError as error:
        return os.getpid(), begin.elapsed_time(end), str(error)
    return os.getpid(), begin.elapsed_time(end), ""


def test_branches_of_a_graph_run_side_by_side_and_its_launches_one_after_the_other(tmp_path: Path) -> None:
    process, between_ms, error = on_device(_branches, str(tmp_path / "trace.json"), log=tmp_path / "log")
    assert between_ms == pytest.approx(6, abs=1e-4)
    assert "operation not permitted on an event last recorded in a capturing stream" in error
    launches = defaultdict(list)
    for task in DeviceLog.read(tmp_path / "log", process).tasks:
        launches[task.correlation].append(task)
    one, other = (sorted(tasks, key=lambda task: task.start) for tasks in launches.values())
    for first, *branches, last in (one, other):
        lengths = sorted(round(task.duration_ns / 1e6) for task in (first, *branches, last))
        assert lengths == [1, 2, 3, 4, 5]
        assert first.end == branches[0].start == branches[1].start
        assert last.start == max(task.end for task in branches)
    assert other[0].start >= one[-1].end
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    (graph_id,) = {event["args"]["graph id"] for event in kernels}
    assert graph_id > 0
    assert len(kernels) == 2 * len({event["args"]["graph node id"] for event in kernels}) == 10
    calls = {event["args"]["correlation"] for event in events if event["name"] == "cudaGraphLaunch"}
    assert {event["args"]["correlation"] for event in kernels} == calls == set(launches)


def _rules() -> tuple[Any, ...]:
    return rules.misused(), rules.well_used(), rules.by_mode(), rules.begun_and_ended()


def test_captures_are_spoilt_by_what_cuda_forbids_and_by_nothing_else() -> None:
    misused, well_used, by_mode, begun_and_ended = on_device(_rules)
    for name, (_, error) in rules.MISUSES.items():
        ended = rules.UNMATCHED if error == rules.UNMATCHED else rules.INVALIDATED
        assert misused[name] == (error, 2, rules.INVALIDATED, rules.OK), (name, ended)
    assert well_used == dict.fromkeys(rules.FINE, (rules.OK, rules.OK))
    forbidden = {
        # A capture of a thread's own forbids it to that thread, unless one of the two is relaxed.
        (rules.GLOBAL, True, rules.GLOBAL),
        (rules.GLOBAL, True, rules.THREAD_LOCAL),
        (rules.THREAD_LOCAL, True, rules.GLOBAL),
        (rules.THREAD_LOCAL, True, rules.THREAD_LOCAL),
        # A global one to all others as well.
        (rules.GLOBAL, False, rules.GLOBAL),
    }
    for case, found in by_mode.items():
        wanted = (rules.UNSUPPORTED, rules.INVALIDATED) if case in forbidden else (rules.OK, rules.OK)
        assert found == wanted, case
    assert begun_and_ended == {
        "end without a begin": rules.ILLEGAL,
        "begin on the legacy stream": rules.UNSUPPORTED,
        "begin": rules.OK,
        "begin twice": rules.ILLEGAL,
        "end on another thread": rules.WRONG_THREAD,
        "end": rules.OK,
        "end of a fork that is not joined": rules.UNJOINED,
        "its stream after it": rules.OK,
    }


def _refused(misuse: Callable[[torch.cuda.Event, Tensor], object]) -> list[str]:
    outside, numbers = torch.cuda.Event(), torch.ones(4, device="cuda")
    outside.record()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            numbers.mul_(2)
            misuse(outside, numbers)
    except RuntimeError as error:
        return [str(one).split("\n")[0] for one in (error, error.__context__) if one is not None]
    return []


def _ask(event: torch.cuda.Event, _: Tensor) -> None:
    event.query()


def _read(_: torch.cuda.Event, numbers: Tensor) -> None:
    numbers.sum().item()


def _wait(event: torch.cuda.Event, _: Tensor) -> None:
    torch.cuda.current_stream().wait_event(event)


def _fork(_: torch.cuda.Event, numbers: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        numbers.mul_(2)


@pytest.mark.parametrize(
    ("misuse", "why"),
    [
        (_ask, "operation not permitted when stream is capturing"),
        (_read, "operation not permitted when stream is capturing"),
        (_wait, "dependency created on uncaptured work in another stream"),
        (_fork, "capturing stream has unjoined work"),
    ],
)
def test_torch_says_what_spoilt_a_capture(misuse: Any, why: str) -> None:
    found = on_device(_refused, misuse)
    assert any(why in text for text in found)
    if misuse is not _fork:
        assert "operation failed due to a previous error during capture" in found[0]


@pytest.mark.nightly
def test_the_campaigns_job_with_a_graph_ends_as_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in Parameters(computes=True).environment().items():
        monkeypatch.setenv(name, value)
    with zygotes() as both:
        outcome = run_case(CASES["cuda-graphs"], *both, quick=True)
    assert "skipped" not in outcome
    assert outcome["failures"] == []
