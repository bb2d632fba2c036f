"""Which GPUs of a host NVLink connects, from a scripted driver."""

import pytest

from overlap_callbacks.instruments.power.nvml import nvlink_devices
from tests.instruments.power.conftest import Driver

UUID = "fa0e0001-0000-4000-8000-000000000001"  # of the second GPU


def test_bridges_connect_some_gpus_of_a_host(nvml: Driver) -> None:
    nvml.set(gpus=4, nvlink=1)
    assert nvlink_devices(UUID, "") == ("0000:10:00.0",)
    nvml.set(nvlink=2)
    assert nvlink_devices("", "0000:11:00.0") == ("0000:10:00.0", "0000:12:00.0", "0000:13:00.0")
    assert nvml.open == 0


def test_without_a_link_none_is_found_which_is_not_unknown(nvml: Driver) -> None:
    nvml.set(gpus=2, nvlink=0)
    assert nvlink_devices(UUID, "") == ()


@pytest.mark.parametrize("numbers", [{"p2p_rc": 3}, {"init_rc": 9}, {"lost": 1}, {"mig": 1}, {"gpus": 1}])
def test_values_missing_in_nvml_are_unknown(nvml: Driver, numbers: dict[str, float]) -> None:
    nvml.set(nvlink=1, **numbers)
    assert nvlink_devices(UUID, "") is None
    assert nvml.open == 0
