from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.power.discovery import (
    DeviceIdentity,
    NoPower,
    find_source,
    from_properties,
    identify,
)


class Uuid:
    """As torch's: it prints without a prefix."""

    def __str__(self) -> str:
        return "3d42b8fc-0000-4000-8000-000000000001"


def test_torchs_properties_become_an_identity() -> None:
    properties = SimpleNamespace(name="NVIDIA H200", uuid=Uuid(), pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=2)
    assert from_properties(properties, hip=False) == DeviceIdentity(
        "nvidia", "3d42b8fc-0000-4000-8000-000000000001", "0001:c1:02.0", "NVIDIA H200"
    )
    assert from_properties(properties, hip=True).vendor == "amd"


def test_a_torch_that_says_less_gives_less() -> None:
    assert from_properties(SimpleNamespace(name="GPU"), hip=False) == DeviceIdentity("nvidia", name="GPU")


def test_the_index_is_that_of_torch_and_asks_no_environment(monkeypatch) -> None:
    # The runtime has applied CUDA_VISIBLE_DEVICES by then: to apply it again would find another device.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    asked = []

    def properties(of):
        asked.append(of.index)
        return SimpleNamespace(name="GPU", uuid=f"uuid-{of.index}")

    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "hip", None)
    assert identify().uuid == "uuid-3"
    assert identify(1).uuid == "uuid-1"
    assert asked == [3, 1]


def test_a_process_that_does_not_use_cuda_is_on_the_cpu_and_gets_no_context(monkeypatch) -> None:
    def never(*_):
        raise AssertionError("this would create a CUDA context")

    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", never)
    monkeypatch.setattr(torch.cuda, "current_device", never)
    assert identify().vendor == "cpu"


def test_an_accelerator_of_another_vendor_is_named_and_has_no_power(monkeypatch) -> None:
    monkeypatch.setattr(device, "in_use", lambda: torch.device("xpu", 0))
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda of: "Intel Data Center GPU Max 1550")
    assert identify() == DeviceIdentity("xpu", name="Intel Data Center GPU Max 1550")
    found = find_source(identify())
    assert isinstance(found, NoPower)
    assert "'xpu'" in found.reason


def test_any_exception_of_a_vendors_package_means_no_power(monkeypatch) -> None:
    def broken(*_, **__):
        raise RuntimeError("boom")

    monkeypatch.setattr("overlap_callbacks.instruments.power.nvml.NvmlSource.__init__", broken)
    assert find_source(DeviceIdentity("nvidia")) == NoPower("no power: RuntimeError: boom")


@pytest.mark.parametrize("module", ["discovery", "sampler", "nvml", "amd", "rapl"])
def test_importing_a_part_imports_no_vendors_package_and_no_torch(module) -> None:
    code = (
        f"import overlap_callbacks.instruments.power.{module}, sys\n"
        "print(*(name for name in ('torch', 'pynvml', 'amdsmi') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_what_a_source_of_your_own_needs_is_exported_without_torch_or_a_vendor_s_library() -> None:
    code = (
        "import sys\n"
        "from overlap_callbacks.instruments.power import *\n"
        "assert issubclass(DeviceLostError, PowerError) and PowerSource and Reading and SourceInfo and Utilisation\n"
        "print(*sorted({'torch', 'pynvml', 'amdsmi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# -- whose devices a process reads


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch):
    """A node as a process sees it: its rank and size by the launcher, and the devices by torch."""
    from overlap_callbacks.instruments.power import discovery as find

    def of(rank: int | None, size: int, devices: int) -> None:
        for name, value in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)):
            if rank is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(device, "count", lambda: devices)

        def identify(index: int | None = None) -> DeviceIdentity:
            number = (rank or 0) % max(devices, 1) if index is None else index
            return DeviceIdentity("nvidia", uuid=f"{number}") if devices else DeviceIdentity("cpu")

        monkeypatch.setattr(find, "identify", identify)

    return of


@pytest.mark.parametrize(
    ("rank", "size", "devices", "per_node", "read"),
    [
        (0, 4, 4, False, ["0"]),
        (2, 4, 4, False, ["2"]),
        (0, 4, 4, True, ["0", "1", "2", "3"]),
        (2, 4, 4, True, []),
        (0, 2, 8, True, ["0", "1"]),  # the others are another job's
        (0, 4, 1, True, ["0"]),  # each rank sees a device of its own
        (3, 4, 1, True, ["0"]),
        (None, 0, 4, True, ["0"]),  # no launcher says who is first
        (0, 2, 0, True, [""]),
        (1, 2, 0, True, []),
    ],
)
def test_a_process_reads_its_own_device_or_the_first_of_a_node_all_of_them(node, rank, size, devices, per_node, read):
    from overlap_callbacks.instruments.power.discovery import devices_to_read

    node(rank, size, devices)
    assert [identity.uuid for identity in devices_to_read(per_node)] == read
