"""Which driver caps the GPUs of this machine."""

from __future__ import annotations

from overlap_callbacks.experiments.caps.amd import AmdDriver
from overlap_callbacks.experiments.caps.nvml import NvmlDriver
from overlap_callbacks.experiments.caps.settings import CapError, Driver


def find_driver() -> Driver:
    """The driver of the GPUs: NVIDIA's, else AMD's.

    Raises:
        CapError: there is neither; the message says what each of them lacks.
    """
    reasons: list[str] = []
    for make in (NvmlDriver, AmdDriver):
        try:
            driver: Driver = make()
            if driver.uuids():
                return driver
            driver.close()
            reasons.append(f"no caps: {make.__name__.removesuffix('Driver')} knows no GPU")
        except CapError as error:
            reasons.append(str(error))
    raise CapError("; ".join(reasons))
