"""Kernels of the simulated device that compute: their results are those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_alone
from tests.simulated_gpu.operators import CLOSE, EXACT, differences
from tests.simulated_gpu.parameters import Parameters


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
