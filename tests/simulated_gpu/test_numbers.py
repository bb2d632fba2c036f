"""Kernels of the simulated device that compute: their results are those of the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed import run_alone, run_ranks
from tests.simulated_gpu import jobs
from tests.simulated_gpu.operators import CLOSE, EXACT, differences
from tests.simulated_gpu.parameters import Parameters

# torch.cuda._sleep counts cycles of 1.98 GHz. On a busy machine the host may take so long to issue a few kernels.
CYCLES_PER_MS, LEAD_MS = 1_980_000, 300


def on_device(function: Any, *args: Any, **parameters: Any) -> Any:
    return run_alone(_call, function, Parameters(computes=True, stall_s=30, **parameters), *args)


def _call(function: Any, parameters: Parameters, *args: Any) -> Any:
    parameters.apply()
    return function(*args)


def _all_differences() -> dict[str, str]:
    torch.set_num_threads(1)
    found = {name: differences(case, exact=True) for name, case in EXACT.items()}
    return found | {name: differences(case, exact=False) for name, case in CLOSE.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    # Kernels are short, so that time is not the host's.
    return on_device(_all_differences, kernel_us=1, launch_us=1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [*EXACT, *CLOSE])
def test_an_operator_computes_what_the_cpu_does(found: dict[str, str], name: str) -> None:
    assert found[name] == ""


def _raced(waits: bool) -> list[list[float]]:
    """What another stream reads of a result, of a copy and of a product that could begin at the same time."""
    side, found = torch.cuda.Stream(), []
    for write in (lambda x: x.mul_(2), lambda x: x.copy_(torch.full_like(x, 2)), lambda x: torch.mm(x, x, out=x)):
        numbers, ready, written = torch.ones(2, 2, device="cuda"), torch.cuda.Event(), torch.cuda.Event()
        torch.cuda._sleep(LEAD_MS * CYCLES_PER_MS)  # so that the host is ahead
        ready.record()
        write(numbers)
        written.record()
        with torch.cuda.stream(side):
            side.wait_event(written if waits else ready)
            seen = numbers + 0
        torch.cuda.synchronize()
        found.append(seen.cpu().flatten().tolist())
    return found


def test_a_wait_that_is_missing_between_streams_always_shows_in_the_numbers() -> None:
    assert on_device(_raced, True) == [[2.0] * 4] * 3
    for _ in range(2):
        assert not any(2.0 in seen for seen in on_device(_raced, False))


def _overwritten(waits: bool) -> list[list[float]]:
    """What comes of a kernel, a copy and a product while another stream writes to what they read."""
    side, found = torch.cuda.Stream(), []
    for read in (lambda x: x + 1, lambda x: x.clone(), lambda x: x @ x):
        numbers, ready, done = torch.ones(2, 2, device="cuda"), torch.cuda.Event(), torch.cuda.Event()
        torch.cuda._sleep(LEAD_MS * CYCLES_PER_MS)
        ready.record()
        result = read(numbers)
        done.record()
        with torch.cuda.stream(side):
            side.wait_event(done if waits else ready)
            numbers.mul_(0)
        torch.cuda.synchronize()
        found.append(result.cpu().flatten().tolist())
    return found


def test_a_wait_that_is_missing_before_a_stream_overwrites_what_another_reads_always_shows_in_the_numbers() -> None:
    assert on_device(_overwritten, True) == [[2.0] * 4, [1.0] * 4, [2.0] * 4]
    for _ in range(2):
        assert all(math.isnan(number) for result in on_device(_overwritten, False) for number in result)


def _overwritten_in_flight(rank: int, parameters: Parameters, waits: bool) -> dict[str, list[float]]:
    """What comes of communication while compute writes to what it reads."""
    found = {}
    with jobs.on_device(rank, parameters) as device:

        def run(name: str, issue: Callable[[torch.Tensor], tuple[Any, torch.Tensor]]) -> None:
            numbers = torch.ones(4, device=device)
            work, result = issue(numbers)
            if waits:
                work.wait()
            numbers.mul_(3)
            work.wait()
            found[name] = result.tolist()

        def reduce_scatter(numbers: torch.Tensor) -> tuple[Any, torch.Tensor]:
            result = torch.empty(2, device=device)
            return dist.reduce_scatter_tensor(result, numbers, async_op=True), result

        def send(numbers: torch.Tensor) -> tuple[Any, torch.Tensor]:
            received = torch.empty_like(numbers)
            pair = [dist.P2POp(dist.isend, numbers, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
            return dist.batch_isend_irecv(pair)[-1], numbers

        dist.all_reduce(torch.ones(1, device=device))
        run("all_reduce", lambda numbers: (dist.all_reduce(numbers, async_op=True), numbers))
        run("reduce_scatter", reduce_scatter)
        run("send", send)
    return found


def test_a_wait_that_is_missing_before_compute_overwrites_what_is_communicated_shows_in_the_numbers() -> None:
    told = Parameters(computes=True, stall_s=30, kernel_us=300, collective_us=100_000)
    right, wrong = (
        run_ranks(_overwritten_in_flight, 2, told, waits, backend="", timeout_s=90) for waits in (True, False)
    )
    assert right == [{"all_reduce": [6.0] * 4, "reduce_scatter": [2.0] * 2, "send": [3.0] * 4}] * 2
    assert all(math.isnan(number) for found in wrong for result in found.values() for number in result)


def _refused() -> list[str]:
    messages = []
    for unknown in (
        lambda x: x.cumsum(0),
        lambda x: x.kthvalue(2),
        lambda x: F.pad(x, (1, 1), "reflect"),
        lambda x: torch.ops.aten._scaled_dot_product_efficient_attention(*[x.unsqueeze(0)] * 3, None, False, 0.5),
    ):
        try:
            unknown(torch.ones(4, 4, 8, device="cuda"))
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    for message, name in zip(on_device(_refused), ("scan", "KthValue", "reflection_pad1d", "fmha"), strict=True):
        assert "the simulated GPU cannot compute" in message
        assert name in message


COUNT = 20_000


def _drawn(seed: int) -> dict[str, list[float]]:
    torch.manual_seed(seed)
    ones = torch.ones(COUNT, device="cuda", requires_grad=True)
    dropped = F.dropout(ones, 0.3)
    dropped.backward(torch.full_like(ones, 2.0))
    assert ones.grad is not None
    found = {
        "dropped": dropped,
        "gradient": ones.grad,
        "dropped again": F.dropout(ones, 0.3),
        "uniform": torch.rand(COUNT, device="cuda"),
        "normal": torch.randn(COUNT, device="cuda"),
        "between": torch.empty(COUNT, device="cuda").uniform_(-1, 3),
        "wide": torch.empty(COUNT, device="cuda").normal_(3, 2),
        "strided": torch.empty(COUNT, 2, device="cuda")[:, 0].uniform_(-1, 3),
        "of 16 bit": torch.empty(COUNT, device="cuda", dtype=torch.bfloat16).uniform_(-1, 3),
        "of 64 bit": torch.empty(COUNT, device="cuda", dtype=torch.float64).uniform_(-1, 3),
        "normal of 64 bit": torch.randn(COUNT, device="cuda", dtype=torch.float64),
        "coins": torch.empty(COUNT, device="cuda").bernoulli_(0.3),
        "integers": torch.randint(-3, 7, (COUNT,), device="cuda"),
    }
    return {name: tensor.tolist() for name, tensor in found.items()}


def _draw_three_times() -> list[dict[str, list[float]]]:
    return [_drawn(seed) for seed in (5, 5, 6)]


def test_random_numbers_follow_from_the_seed_and_have_their_distribution() -> None:
    found, again, other = on_device(_draw_three_times, kernel_us=1)
    assert found == again
    for name, numbers in found.items():
        assert numbers != other[name], name
    assert {round(number, 5) for number in found["dropped"]} == {0.0, round(1 / 0.7, 5)}
    assert found["gradient"] == [2 * number for number in found["dropped"]]
    assert found["dropped"] != found["dropped again"]
    assert 0 <= min(found["uniform"]) < max(found["uniform"]) < 1
    for name in ("between", "strided", "of 16 bit", "of 64 bit"):
        assert -1 <= min(found[name]) < max(found[name]) < 3
    assert set(found["integers"]) == set(range(-3, 7))
    mean_and_variance = {
        "dropped": (1, 0.3 / 0.7), "uniform": (1 / 2, 1 / 12), "between": (1, 4 / 3), "strided": (1, 4 / 3),
        "of 16 bit": (1, 4 / 3), "of 64 bit": (1, 4 / 3), "normal": (0, 1), "normal of 64 bit": (0, 1), "wide": (3, 4),
        "coins": (0.3, 0.21), "integers": (1.5, 8.25),
    }  # fmt: skip
    for name, (mean, variance) in mean_and_variance.items():
        numbers = torch.tensor(found[name], dtype=torch.float64)
        near = 5 * (variance / COUNT) ** 0.5
        assert numbers.mean().item() == pytest.approx(mean, abs=near), name
        assert numbers.var().item() == pytest.approx(variance, rel=0.05), name
        centred = numbers - mean
        assert abs((centred[1:] * centred[:-1]).mean().item()) < near * variance**0.5, name


def _scaled(device: str) -> tuple[list[float], list[list[float]]]:
    """Scales and weights after each of seven steps, the fourth of which overflows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
    scales, weights = [], []
    for step in range(7):
        rows = torch.linspace(-1, 1, 32).view(4, 8).to(device)
        scaler.scale(layers(rows).square().mean()).backward()
        if step == 3:
            layers[0].bias.grad[2].fill_(float("inf"))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        weights.append([number for parameter in layers.parameters() for number in parameter.flatten().tolist()])
    return scales, weights


def test_a_scaler_skips_a_step_that_overflows_and_else_trains_as_on_the_cpu() -> None:
    scales, weights = on_device(_scaled, "cuda")
    assert scales == [8, 16, 16, 8, 8, 16, 16]
    assert weights[2] == weights[3]
    _, expected = _scaled("cpu")
    for found, right in zip(weights, expected, strict=True):
        assert found == pytest.approx(right, rel=1e-5, abs=1e-6)
