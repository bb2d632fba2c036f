"""What a process reports of itself; torch's calls about a GPU and the driver's files are stand-ins."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_callbacks.analysis.environment.job import cpus_of
from overlap_callbacks.instruments import device, environment
from overlap_callbacks.instruments.environment import EnvironmentReader, cpu_list
from tests.margins import near

H200 = {
    "name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 150_000_000_000,
    "uuid": "00000000-0000-4000-8000-000000000001", "pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0,
}  # fmt: skip
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version: 12.2.0\n"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A process that trains on the second GPU."""
    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 3))
    asked: dict[str, Any] = {"index": []}

    def properties(of: torch.device) -> Any:
        asked["index"].append(of.index)
        return SimpleNamespace(**H200)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(environment, "nvlink_devices", lambda uuid, pci: ("0000:3c:00.0",))
    asked["driver"] = tmp_path / "version"
    asked["driver"].write_text(OPEN_DRIVER)
    monkeypatch.setattr(environment, "_NVIDIA_DRIVER", asked["driver"])
    return asked


def test_a_cpu_job_is_described_without_touching_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("this would create a CUDA context")

    monkeypatch.setattr(device, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("current_device", "get_device_properties", "_lazy_init", "init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    found = EnvironmentReader("pytorch 2.13").read()
    assert (found.device, found.framework, found.torch) == ("cpu", "pytorch 2.13", str(torch.__version__))
    assert cpus_of(found.cpus) == os.sched_getaffinity(0)
    assert found.num_threads == torch.get_num_threads()
    assert found.hostname
    assert found.variables["OMP_NUM_THREADS"] == "3"
    assert "secret" not in str(found)


def test_a_gpu_is_described_by_what_torch_and_the_driver_say(gpu: dict[str, Any]) -> None:
    reader = EnvironmentReader()
    found = reader.read()
    assert (found.device, found.compute_capability, found.num_sms) == ("NVIDIA H200", "9.0", 132)
    assert (found.nccl, found.driver) == ("2.28.3", "550.54.15")
    assert (found.device_uuid, found.pci_bus_id) == (H200["uuid"], "0000:3b:00.0")
    assert found.nvlink_devices == ("0000:3c:00.0",)
    reader.read()
    assert gpu["index"] == [1], "once, and of the device that this rank trains on"


def test_each_kind_of_driver_has_its_version(gpu: dict[str, Any]) -> None:
    gpu["driver"].write_text(CLOSED_DRIVER)
    assert EnvironmentReader().read().driver == "535.104.05"


def test_the_device_is_that_of_the_thread_that_made_the_reader(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = EnvironmentReader()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # as on any other thread
    reader.read()
    assert gpu["index"] == [1]


def test_a_part_that_raises_is_left_out_and_the_rest_is_there(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("PyTorch was not compiled with NCCL")

    monkeypatch.setattr(torch.cuda.nccl, "version", fail)
    monkeypatch.setattr(environment, "nvlink_devices", fail)
    gpu["driver"].unlink()
    found = EnvironmentReader().read()
    assert (found.nccl, found.driver, found.nvlink_devices) == ("", "", None)
    assert found.num_sms == 132
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    found = EnvironmentReader().read()
    assert found.torch == str(torch.__version__)


def test_a_driver_that_hangs_does_not_keep_the_report(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(environment, "nvlink_devices", lambda *_: hang.wait(60))
    monkeypatch.setattr(environment, "_DRIVER_TIMEOUT_S", 0.05)
    began = time.monotonic()
    assert EnvironmentReader().read().nvlink_devices is None
    assert near(time.monotonic() - began, 60.0)
    hang.set()


@pytest.mark.parametrize(("machine", "link"), [("x86_64", "PCIe"), ("AMD64", "PCIe"), ("aarch64", ""), ("ppc64le", "")])
def test_pcie_is_known_on_hosts_that_have_no_other_link(
    gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch, machine: str, link: str
) -> None:
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    assert EnvironmentReader().read().host_link == link
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert EnvironmentReader().read().host_link == ""


def test_amd_has_its_architecture_and_no_nvlink(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0.1")
    monkeypatch.setitem(H200, "gcnArchName", "gfx942:sramecc+")
    monkeypatch.setattr(environment, "_AMD_DRIVER", gpu["driver"])
    gpu["driver"].write_text("6.12.12\n")
    found = EnvironmentReader().read()
    assert (found.compute_capability, found.driver, found.nvlink_devices) == ("gfx942:sramecc+", "6.12.12", None)


@pytest.mark.parametrize(("cpus", "text"), [({0, 1, 2, 5}, "0-2,5"), ({3}, "3"), (set(), "")])
def test_cpus_are_written_as_linux_does(cpus: set[int], text: str) -> None:
    assert cpu_list(cpus) == text
    assert cpus_of(text) == cpus


def test_an_accelerator_of_another_vendor_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "in_use", lambda: torch.device("xpu", 0))
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda of: "Intel Data Center GPU Max 1550")
    found = EnvironmentReader().read()
    assert (found.device, found.nccl, found.num_sms) == ("Intel Data Center GPU Max 1550", "", 0)
