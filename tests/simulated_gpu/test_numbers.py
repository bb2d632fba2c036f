"""Kernels of the simulated device that compute: their results are those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_alone
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


def _refused() -> list[str]:
    messages = []
    for unknown in (lambda x: x.cumsum(0), lambda x: x.sort(), lambda x: torch.nn.functional.pad(x, (1, 1), "reflect")):
        try:
            unknown(torch.ones(4, 4, 8, device="cuda"))
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_computed_is_refused_by_name() -> None:
    for message, name in zip(on_device(_refused), ("scan", "ort", "reflection_pad1d"), strict=True):
        assert "the simulated GPU cannot compute" in message
        assert name in message
