"""The simulated device does what CUDA promises, at the times that its log tells."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.distributed import run_alone
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.truth import DeviceLog

# torch.cuda._sleep counts cycles of 1.98 GHz.
CYCLES_PER_MS = 1_980_000
# On a busy machine the host may take so long to issue a few kernels.
LEAD_MS = 300


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def on_device(function: Any, *args: Any, **parameters: Any) -> Any:
    return run_alone(_call, function, Parameters(**parameters), *args)


def _call(function: Any, parameters: Parameters, *args: Any) -> Any:
    parameters.apply()
    return function(*args)


def _copies() -> list[bool]:
    numbers = torch.randn(1000, 1000)
    pinned = numbers.pin_memory()
    there = [numbers.cuda(), pinned.to("cuda", non_blocking=True), numbers.to("cuda:1")]
    there += [there[0].clone(), there[0].to("cuda:1"), there[0].t().contiguous().t()[:, :0]]
    back = torch.empty_like(pinned).pin_memory()
    back.copy_(there[0], non_blocking=True)
    torch.cuda.synchronize()
    return [torch.equal(one.cpu(), numbers) for one in there[:5]] + [torch.equal(back, numbers)]


def test_copies_move_what_they_copy_between_the_host_and_two_devices() -> None:
    assert on_device(_copies) == [True] * 6


def _name() -> tuple[str, int]:
    return torch.cuda.get_device_name(), torch.cuda.device_count()


def test_the_device_says_that_it_is_simulated() -> None:
    assert on_device(_name) == ("Simulated GPU (no hardware)", 2)
    assert on_device(_name, devices=1)[1] == 1


def _times() -> dict[str, float]:
    numbers = torch.zeros(1024, 1024, device="cuda")
    half = numbers.bfloat16()
    marks = [_event() for _ in range(4)]
    torch.cuda._sleep(LEAD_MS * CYCLES_PER_MS)  # so that the host is ahead
    marks[0].record()
    torch.mm(numbers, numbers)
    marks[1].record()
    torch.mm(half, half)
    marks[2].record()
    torch.cuda._sleep(3 * CYCLES_PER_MS)
    marks[3].record()
    waiting = marks[0].query()
    torch.cuda.synchronize()
    names = ("f32", "bf16", "sleep")
    found = {name: marks[i].elapsed_time(marks[i + 1]) for i, name in enumerate(names)}
    return {**found, "early": waiting, "late": marks[3].query()}


def test_events_have_the_times_of_the_device() -> None:
    found = on_device(_times, tflops="f32=0.1,bf16=0.4", kernel_us=10)
    flop = 2 * 1024**3
    assert found["f32"] == pytest.approx(0.01 + flop / 0.1e9, abs=1e-4)
    assert found["bf16"] == pytest.approx(0.01 + flop / 0.4e9, abs=1e-4)
    assert found["sleep"] == pytest.approx(3, abs=1e-4)
    assert (found["early"], found["late"]) == (False, True)


def _products() -> list[list[float]]:
    """Milliseconds of a product, one with a bias and two in one, in 32 and in 16 bit, for each setting of torch."""
    factors = [torch.zeros(2, 2048, 2048, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    kinds = (
        lambda both: torch.mm(both[0], both[0]),
        lambda both: torch.nn.functional.linear(both[0], both[0], both[0, 0]),
        lambda both: torch.bmm(both, both),
    )
    for product in kinds:  # torch makes its handles with the first
        product(factors[0])
    found: list[list[float]] = []
    for tf32, carve_out in ((False, None), (True, None), (False, 16), (False, 1), (False, None)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch._C._set_sm_carveout_experimental(carve_out)
        marks = [_event()]
        torch.cuda._sleep(LEAD_MS * CYCLES_PER_MS)  # so that the host is ahead
        marks[0].record()
        for both in factors:
            for product in kinds:
                product(both)
                marks.append(_event())
                marks[-1].record()
        torch.cuda.synchronize()
        found.append([begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)])
    return found


# TF32 has the rate of 32 bit where the device is told no other.
@pytest.mark.parametrize(
    ("tflops", "of_tf32"), [("f32=10,tf32=40,bf16=20", 40), ("f32=10,bf16=20", 10), ("10,bf16=20", 10)]
)
def test_products_of_32_bit_take_the_rate_of_tf32_where_torch_allows_it(tflops: str, of_tf32: int) -> None:
    def each_ms(rate: int) -> list[float]:
        return [0.01 + times * 2 * 2048**3 / (rate * 1e9) for times in (1, 1, 2)]

    plain, in_tf32, *_ = on_device(_products, tflops=tflops, kernel_us=10)
    assert plain == pytest.approx([*each_ms(10), *each_ms(20)], abs=1e-4)
    assert in_tf32 == pytest.approx([*each_ms(of_tf32), *each_ms(20)], abs=1e-4)


def test_a_carve_out_of_multiprocessors_makes_more_waves_of_a_products_blocks() -> None:
    # 2048 by 2048 is 256 tiles: two waves on 128 multiprocessors, three on 112 or 127. Two such products at a time have
    # four waves, and five.
    plain, _, of_16, of_1, after = on_device(_products, rules="gemm=1000", multiprocessors=128)
    for found in (plain, after):
        assert found == pytest.approx([1, 1, 1] * 2, abs=1e-4)
    for found in (of_16, of_1):
        assert found == pytest.approx([1.5, 1.5, 1.25] * 2, abs=1e-4)


def _streams() -> list[float]:
    side, begin, mark, after, beside = torch.cuda.Stream(), _event(), _event(), _event(), _event()
    torch.cuda._sleep(LEAD_MS * CYCLES_PER_MS)
    begin.record()
    with torch.cuda.stream(side):
        side.wait_event(begin)
        torch.cuda._sleep(5 * CYCLES_PER_MS)
        mark.record()
    torch.cuda._sleep(CYCLES_PER_MS)
    beside.record()
    torch.cuda.current_stream().wait_event(mark)
    after.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(one) for one in (beside, mark, after)]


def test_streams_run_side_by_side_and_wait_for_each_others_events() -> None:
    assert on_device(_streams) == pytest.approx([1, 5, 5], abs=1e-4)


def _memory() -> list[Any]:
    before = torch.cuda.mem_get_info()
    held = torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
    found: list[Any] = [before[1], before[0] - torch.cuda.mem_get_info()[0]]
    try:
        torch.empty(700 << 20, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        found.append("out of memory")
    found.append(torch.empty(700 << 20, dtype=torch.uint8, device="cuda:1").numel())
    del held
    torch.cuda.empty_cache()
    return [*found, torch.cuda.mem_get_info()[0] == before[0]]


def test_memory_has_a_limit_on_each_device() -> None:
    assert on_device(_memory, memory_gib=1) == [1 << 30, 700 << 20, "out of memory", 700 << 20, True]


def _in_stream_order() -> list[Any]:
    size = 40 << 20
    side, back = torch.cuda.Stream(), torch.zeros(4, dtype=torch.uint8).pin_memory()
    before = torch.cuda.mem_get_info()[0]
    numbers = torch.full((size,), 7, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(500 * CYCLES_PER_MS)
        back.copy_(numbers[-4:], non_blocking=True)
    numbers.record_stream(side)
    del numbers
    held = [before - torch.cuda.mem_get_info()[0], side.query()]
    # There is no room for both. So it waits until the other stream is done with the first.
    other = torch.full((size,), 8, dtype=torch.uint8, device="cuda")
    reused = [before - torch.cuda.mem_get_info()[0], side.query(), back.tolist(), other[-4:].tolist()]
    del other
    torch.cuda.synchronize()
    return [torch.cuda.get_allocator_backend(), held, reused, torch.cuda.mem_get_info()[0] == before]


def test_memory_that_is_freed_in_stream_order_is_used_again_once_all_streams_are_done_with_it() -> None:
    # torch chooses the allocator when it is loaded.
    command = f"import json; from {__name__} import _in_stream_order as run; print(json.dumps(run()))"
    told = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", **Parameters(memory_gib=1 / 16).environment()}
    done = subprocess.run(
        [sys.executable, "-c", command], env={**os.environ, **told}, stdout=subprocess.PIPE, text=True, check=True
    )
    size = 40 << 20
    assert json.loads(done.stdout) == ["cudaMallocAsync", [size, False], [size, True, [7] * 4, [8] * 4], True]


def _host_function() -> tuple[int, list[Any]]:
    runtime = ctypes.CDLL("libcudart.so.13")
    called: list[Any] = []
    numbers, back = torch.full((4,), 7, device="cuda"), torch.zeros(4, dtype=torch.int64).pin_memory()
    side = torch.cuda.Stream()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def function(argument: int) -> None:
        called.extend([argument, time.monotonic_ns(), back.tolist()])
        time.sleep(0.3)
        called.append(time.monotonic_ns())

    torch.cuda._sleep(20 * CYCLES_PER_MS)
    back.copy_(numbers, non_blocking=True)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert runtime.cudaLaunchHostFunc(stream, function, ctypes.c_void_p(5)) == 0
    torch.cuda._sleep(CYCLES_PER_MS)
    with torch.cuda.stream(side):
        torch.cuda._sleep(25 * CYCLES_PER_MS)
    torch.cuda.synchronize()
    return os.getpid(), called


def test_a_host_function_runs_in_the_order_of_its_stream_alone(tmp_path: Path) -> None:
    process, (argument, begun, copied, ended) = on_device(_host_function, log=tmp_path / "log")
    assert (argument, copied) == (5, [7] * 4)
    tasks = DeviceLog.read(tmp_path / "log", process).tasks
    (function,) = [task for task in tasks if task.task_class == "none"]
    before, after, beside = [task for task in tasks if "spin_kernel" in task.name]
    assert before.end < function.start <= begun < ended <= function.end <= after.start
    # To another stream it does nothing.
    assert beside.end < function.end
    assert beside.duration_ns == pytest.approx(25_000_000, abs=2)


def _numbers() -> list[Any]:
    a, b = torch.arange(5).cuda(), torch.full((3,), 7, device="cuda")
    return [(a + a).tolist(), (a + 4).tolist(), torch.cat([a, b]).tolist(), a.sum().item(), b.tolist()]


def test_integers_are_computed() -> None:
    assert on_device(_numbers) == [[0, 2, 4, 6, 8], [4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 7, 7, 7], 10, [7, 7, 7]]


def _profile() -> tuple[int, list[tuple[str, int, int]]]:
    layers = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)).cuda()
    numbers = torch.randn(64, 512, device="cuda")
    layers(numbers)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        layers(numbers).sum().backward()
        numbers.cpu()
        torch.cuda.synchronize()
    events = found.profiler.kineto_results.events()
    on_gpu = [event for event in events if str(event.device_type()).endswith("CUDA")]
    return os.getpid(), [(event.name(), event.correlation_id(), event.duration_ns()) for event in on_gpu]


def test_the_profiler_sees_what_the_log_has(tmp_path: Path) -> None:
    process, profiled = on_device(_profile, log=tmp_path / "log")
    logged = {task.correlation: task for task in DeviceLog.read(tmp_path / "log", process).tasks}
    kernels = [event for event in profiled if event[1] in logged]
    assert len(kernels) >= 10
    assert any("gemm" in name for name, *_ in kernels)
    assert any(name.startswith("Memcpy DtoH") for name, *_ in kernels)
    for _, correlation, duration_ns in kernels:
        # It reads the processor's ticks, and works out nanoseconds from a few readings of both clocks.
        assert duration_ns == pytest.approx(logged[correlation].duration_ns, rel=1e-4, abs=2)


def _load(milliseconds: int) -> int:
    numbers = torch.zeros(1024, 1024, device="cuda")
    torch.cuda._sleep(20 * CYCLES_PER_MS)
    for _ in range(milliseconds):
        torch.mm(numbers, numbers)
    torch.cuda.synchronize()
    return os.getpid()


def test_the_clock_falls_until_the_power_keeps_to_its_cap(tmp_path: Path) -> None:
    cap_w, idle_w, compute_w = 300, 70, 500
    process = on_device(
        _load, 200, log=tmp_path / "log", rules="gemm=1000", power_cap_w=cap_w, idle_w=idle_w, compute_w=compute_w
    )
    products = [task for task in DeviceLog.read(tmp_path / "log", process).tasks if "gemm" in task.name]
    settled = products[100:]
    # Power follows the cube of the clock.
    true_clock = ((cap_w - idle_w) / compute_w) ** (1 / 3)
    mean_ns = sum(task.duration_ns for task in settled) / len(settled)
    assert 1e6 / mean_ns == pytest.approx(true_clock, rel=0.01)
    assert sum(task.watts for task in settled) / len(settled) == pytest.approx(cap_w, rel=0.01)
    assert products[0].watts > idle_w


def _comparisons() -> tuple[list[Any], list[Any]]:
    a, b = torch.tensor([1, 2, 3]), torch.tensor([2, 2, 2])
    signs = (torch.ge, torch.gt, torch.le, torch.lt, torch.eq, torch.ne)
    wrong = [sign for sign in signs if not torch.equal(sign(a.cuda(), b.cuda()).cpu(), sign(a, b))]
    # Memory that held other numbers before.
    numbers = torch.full((1000,), float("nan")).cuda()
    return wrong, [numbers.amax().item(), numbers.norm().item(), torch.isnan(numbers).any().item()]


def test_integers_are_compared_and_results_that_are_not_computed_are_zero() -> None:
    assert on_device(_comparisons) == ([], [0.0, 0.0, False])
