"""What of ``tests/gpu`` and of the steps of ``benchmarks/gpu.py`` cannot run on the simulated GPU, and why.

There these are skipped with the reason, and nothing else may be (``conftest.py``).
"""

from __future__ import annotations

_LINK = "the loopback link is a compiled kernel; tests/simulated_gpu has its jobs as two ranks on two devices"
_NUMBERS = "these jobs are too large for kernels that compute; tests/simulated_gpu/matrix.md has small ones"
_POWER = "asks whether a real sensor means what the library takes it to mean"

# Files of tests/gpu, and single tests by how their names begin.
TESTS = {
    "test_loopback.py": _LINK,
    "test_loopback_device.py": _LINK,
    "test_loopback_known.py": "is for a CPU alone",
    "test_loopback_link.py": _LINK,
    "test_loopback_refusals.py": _LINK,
    "test_parallel_forms.py::test_weights_and_losses_are_bit_identical": _NUMBERS,
    "test_power.py": _POWER,
    "test_race_check.py": _NUMBERS,
}

# Steps, and parts of steps.
STEPS = {
    "gate-cost": "measures what a real device and its driver take",
    "tests-link": _LINK,
    "tests-jobs": _LINK,
    "tests-figures": _LINK,
    "tests-refusals": _LINK,
    "power": _POWER,
    "probe: Triton kernel": "Triton compiles machine code",
    "probe: loopback kernel": _LINK,
    "negative: too_many_kernels": "150,000 launches a step take too long on two cores; the step overflow has as many",
}


def reason(test: str) -> str | None:
    """Why a test, by its pytest name, cannot run; None if it can."""
    name = test.rpartition("tests/gpu/")[2]
    return next((why for beginning, why in TESTS.items() if name.startswith(beginning)), None)
