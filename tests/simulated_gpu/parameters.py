"""What the simulated device is told, as environment variables of the process that it runs in."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from tests.simulated_gpu.build import LIBRARIES

# Whether this process runs on it. torch is not asked: that would use the device, which then reads its parameters.
ON_SIMULATED_GPU = str(LIBRARIES) in os.environ.get("LD_LIBRARY_PATH", "")


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of the simulated device. The device's own defaults hold for what is None.

    Attributes:
        devices: how many this process sees; 2.
        memory_gib: of each device; 16.
        multiprocessors: of each device; 132.
        folder: where the processes of a job meet. It holds copies of what they send: /dev/shm where there is one.
        log: begins the names of the log files, one for each process; none: no log.
        stall_s: print what stands in the queues when nothing moves for so long; 0: never.
        trace: print the names of missing functions when they are called.
        launch_us: from the host's call to the earliest start on an idle stream; 5.
        kernel_us: what every kernel takes at least; 10.
        block_us: what each thread block adds, in kernels that are neither products nor element-wise; 0.01.
        memory_gbs: bandwidth of the device's memory: element-wise kernels and copies on the device; 1000.
        host_link_gbs: bandwidth of copies to and from the host; 20.
        tflops: of products, for all types or by type, as ``bf16=0.2,f32=0.1``; 0.1. ``tf32`` has the rate of
            ``f32`` if it is given none.
        rules: durations by name, ``PATTERN=MICROSECONDS;...``; the first pattern found in a kernel's name holds.
        compute_slowdown: factor of a compute kernel's duration while a collective is in flight; 1.
        communication_slowdown: factor of a collective's duration while a compute kernel is in flight; 1.
        channels: of a collective; 16.
        channels_take_sms: whether each channel takes a multiprocessor from compute; then waves of blocks get more.
        collective_us: what every collective takes at least; 100.
        link_gbs: bandwidth between two devices; 1.
        slow_rank: ``RANK:FACTOR``, factor of the duration of this rank's compute kernels.
        slow_link: ``RANK-RANK:FACTOR``, factor of this link's bandwidth.
        slow_collective: ``KIND:BYTES:MICROSECONDS``, what collectives with this in their kernel's name (``AllReduce``)
            and exactly so many bytes in their whole tensor take more. The device reads it at each collective.
        most_data_bytes: larger messages take their time and move nothing; unlimited.
        computes: whether kernels compute, by their names and arguments. They read when they begin and have written when
            they end; what cannot be computed is refused with an error that names it, and with ``trace`` only named.
        power_cap_w: the power limit, until NVML sets another: above it the clock falls; 700; 0: no power.
        idle_w, compute_w, communication_w: power of an idle device, and what each class adds; 70, 500, 60.
        power_constant_ms: time constant of the power drawn; 20.
        compute_memory, communication_memory: shares of the memory's bandwidth that each class uses; 0.3, 0.1.
        faults: ``[RANK:]FAULT=VALUE[@POINT=NUMBER];...``. Without a rank all have it. A fault comes when the kernel or
            collective of this number begins (``@kernel=900``, ``@collective=40``), else from the start. ``signal=9``:
            the process gets it. ``device=719``: the device is lost, and every call fails with this error. ``nccl=6``:
            communicators have this error, and their collectives hang. ``overflow=500``: CUPTI drops records beyond so
            many between two flushes. ``lost_records=7``: of so many kernels one has no record. ``late_records=5000``:
            records of the last microseconds come with the next flush. ``cupti_held=1``: another subscriber holds CUPTI.
            ``sensors=15``: NVML's calls fail with this error.
    """

    devices: int | None = None
    memory_gib: float | None = None
    multiprocessors: int | None = None
    folder: Path | None = None
    log: Path | None = None
    stall_s: float | None = None
    trace: bool | None = None
    launch_us: float | None = None
    kernel_us: float | None = None
    block_us: float | None = None
    memory_gbs: float | None = None
    host_link_gbs: float | None = None
    tflops: str | float | None = None
    rules: str | None = None
    compute_slowdown: float | None = None
    communication_slowdown: float | None = None
    channels: int | None = None
    channels_take_sms: bool | None = None
    collective_us: float | None = None
    link_gbs: float | None = None
    slow_rank: str | None = None
    slow_link: str | None = None
    slow_collective: str | None = None
    most_data_bytes: int | None = None
    computes: bool | None = None
    power_cap_w: float | None = None
    idle_w: float | None = None
    compute_w: float | None = None
    communication_w: float | None = None
    power_constant_ms: float | None = None
    compute_memory: float | None = None
    communication_memory: float | None = None
    faults: str | None = None

    def environment(self) -> dict[str, str]:
        """The variables that tell it to the device."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            f"SIMGPU_{name.upper()}": str(int(value) if isinstance(value, bool) else value)
            for name, value in given.items()
            if value is not None
        }

    def apply(self) -> None:
        """Set them in this process. The device reads them when it is first used."""
        os.environ.update(self.environment())
