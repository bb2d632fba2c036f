"""What torch's profiler records of a device, and what it costs: the ground that live kernel times stand on."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from gpu_steps import figures
from gpu_steps.figures import Recorder
from overlap_callbacks.analysis.kernels.table import KernelTable
from overlap_callbacks.instruments.profiler import Profile
from tests.gpu import not_simulated
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_SLACK_US = 50.0  # the profiler's clock and the host's are two


def run(record: Recorder) -> None:
    record.raw("torch", torch.__config__.show())
    if not record.on_cpu:
        record.raw("device", str(torch.cuda.get_device_properties(0)))
        record.raw("nccl", list(torch.cuda.nccl.version()))
    record.figure("Kineto is there", torch.profiler.kineto_available(), expect=figures.YES)
    record.figure(
        "torch can tell that Kineto stopped early", hasattr(torch.autograd, "_is_kineto_stopped"),
        proves="a profile that was cut off can be noticed in this way too",
    )  # fmt: skip
    check_metadata(record)
    works = workloads(record)
    for name, work in works.items():
        work()  # compiles, allocates and captures outside the profile
        if not record.on_cpu:
            torch.cuda.synchronize()
        check_workload(record, name, work)


def workloads(record: Recorder) -> dict[str, Callable[[], Any]]:
    """What is profiled, by name: each launches kernels in a way of its own."""
    device = "cpu" if record.on_cpu else "cuda"
    a = torch.randn(256 if record.on_cpu else 4096, 256 if record.on_cpu else 4096, device=device)
    found: dict[str, Callable[[], Any]] = {"matrix product": lambda: a @ a, "elementwise": lambda: a.add_(0.0)}
    if record.on_cpu:
        return found
    found["copy to the device"] = _copy_to(a)
    found["copy on the device"] = a.clone
    found["fill"] = lambda: torch.zeros_like(a)
    for name, make in {"graph replay": _graph, "Triton kernel": _triton, "loopback kernel": _loopback}.items():
        if ON_SIMULATED_GPU and (why := not_simulated.STEPS.get(f"probe: {name}")):
            record.raw(f"{name}, why it is missing", why)
            continue
        try:
            found[name] = make(a)
        except Exception as error:  # a machine without a compiler: the others still count
            record.raw(f"{name}, why it is missing", repr(error))
    return found


def _copy_to(a: torch.Tensor) -> Callable[[], Any]:
    host = torch.empty(a.shape, dtype=a.dtype, pin_memory=True)
    return lambda: a.copy_(host, non_blocking=True)


def _graph(a: torch.Tensor) -> Callable[[], Any]:
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries make their handles outside the capture
        a @ a
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        for _ in range(3):
            out = a @ a
        out.add_(1.0)
    return graph.replay


def _triton(a: torch.Tensor) -> Callable[[], Any]:
    from gpu_steps.triton_kernel import double

    double(a)
    return lambda: double(a)


def _loopback(a: torch.Tensor) -> Callable[[], Any]:
    from overlap_callbacks.experiments.loopback.device_link import DeviceLink
    from tests.gpu.loopback import Move

    link, out = DeviceLink(), torch.empty_like(a)
    return lambda: link.launch("all_reduce", [Move(out, a, 2.0)], ctas=24, length_ns=1_000_000)


def check_workload(record: Recorder, name: str, work: Callable[[], Any], calls: int = 20) -> None:
    """Profile some calls with the library's own session, and hold the events against what was done."""
    profile = Profile(on_cuda=not record.on_cpu)
    times = [time.perf_counter()]
    profile.start()
    times.append(time.perf_counter())
    profile.begin_step()
    before_ns = time.time_ns()
    for _ in range(calls):
        work()
    after_ns = time.time_ns()
    profile.end_step()
    if not record.on_cpu:
        torch.cuda.synchronize()
    times.append(time.perf_counter())
    profile.stop()
    times.append(time.perf_counter())
    assert profile.session is not None
    assert profile.session.profiler is not None
    events = profile.session.profiler.kineto_results.events()
    rows = [_row(event) for event in events]
    times.append(time.perf_counter())
    table = profile.kernels()
    start_ms, _, stop_ms, events_ms = (1e3 * (b - a) for a, b in itertools.pairwise(times))
    costs = {"start": start_ms, "stop": stop_ms, "read_events": events_ms}
    record.raw(f"{name}, cost_ms", costs)
    record.raw(f"{name}, activities", dict(Counter(row["activity"] for row in rows)))
    on_device = [row for row in rows if row["activity"] in _ON_DEVICE]
    record.raw(f"{name}, first rows on the device", on_device[:4])
    _check_rows(record, name, calls, rows, (before_ns, after_ns), table)


def _row(event: Any) -> dict[str, Any]:
    """What the library reads of an event. Before about torch 2.10 events do not tell their activity."""
    return {
        "activity": str(event.activity_type()) if hasattr(event, "activity_type") else "unknown",
        "name": event.name(),
        "start_ns": event.start_ns(),
        "duration_ns": event.duration_ns(),
        "correlation": event.correlation_id(),
        "stream": event.device_resource_id(),
        "metadata": event.metadata_json()[:300] if hasattr(event, "metadata_json") else None,
    }


def _check_rows(
    record: Recorder, name: str, calls: int, rows: list[dict[str, Any]], span: tuple[int, int], table: KernelTable
) -> None:
    in_step = int((table.step == 0).sum())
    if record.on_cpu:
        record.figure(f"{name}: calls in the table", in_step, expect=figures.above(0))
        return
    on_device = [row for row in rows if row["activity"] in _ON_DEVICE]
    record.figure(
        f"{name}: events on the device / calls", len(on_device) / calls, proves="nothing is lost",
        expect=figures.Expectation("a whole number above 0", lambda ratio: ratio > 0 and ratio == int(ratio)),
    )  # fmt: skip
    launches = {row["correlation"]: row for row in rows if row["activity"] in _LAUNCHES}
    launched = [launches[row["correlation"]] for row in on_device if row["correlation"] in launches]
    record.figure(
        f"{name}: share of device events with a launch", len(launched) / max(len(on_device), 1),
        proves="a kernel can be placed in the step that launched it", expect=figures.equal(1.0),
    )  # fmt: skip
    record.raw(f"{name}, launched by", dict(Counter(row["name"] for row in launched)))
    record.figure(
        f"{name}: rows of the table in the step / device events", in_step / max(len(on_device), 1),
        proves="the library's table holds what the profiler recorded", expect=figures.equal(1.0),
    )  # fmt: skip
    if launched:
        outside = [max(span[0] - row["start_ns"], row["start_ns"] - span[1], 0) / 1e3 for row in launched]
        record.figure(
            f"{name}: launches outside the host's bounds, at most", max(outside), "us",
            proves="the profiler's clock agrees with time.time_ns", expect=figures.below(_SLACK_US),
        )  # fmt: skip
    if any(row["activity"] == "kernel" for row in on_device):
        shapes = {table.shapes[number] for number in table.shape[table.step == 0].tolist()}
        record.raw(f"{name}, launch shapes", sorted(shapes))
        record.figure(
            f"{name}: launch shapes are read", bool(shapes - {""}),
            proves="kernels of one name and different grids are told apart", expect=figures.YES,
        )  # fmt: skip


def check_metadata(record: Recorder) -> None:
    """What an event's metadata holds with and without the option that asks for it."""
    activity = torch.profiler.ProfilerActivity.CPU if record.on_cpu else torch.profiler.ProfilerActivity.CUDA
    a = torch.randn(64, 64, device="cpu" if record.on_cpu else "cuda")
    a @ a
    for asked in (False, True):
        try:
            config = torch._C._profiler._ExperimentalConfig(expose_kineto_event_metadata=asked)
        except TypeError:
            record.raw("metadata", "this torch has no expose_kineto_event_metadata")
            return
        start = time.perf_counter()
        with torch.profiler.profile(activities=[activity], experimental_config=config) as session:
            a @ a
            if not record.on_cpu:
                torch.cuda.synchronize()
        record.raw(f"profile, expose_kineto_event_metadata={asked}, ms in all", 1e3 * (time.perf_counter() - start))
        assert session.profiler is not None
        events: Any = session.profiler.kineto_results.events()
        texts = [event.metadata_json() for event in events if record.on_cpu or _is_kernel(event)]
        record.raw(f"metadata, expose_kineto_event_metadata={asked}", texts[:3])
        record.figure(
            f"metadata with expose_kineto_event_metadata={asked}", any(texts),
            proves="the option is needed for launch shapes" if not asked else "the option gives launch shapes",
            expect=figures.equal(asked),
        )  # fmt: skip


def _is_kernel(event: Any) -> bool:
    return hasattr(event, "activity_type") and str(event.activity_type()) == "kernel"
