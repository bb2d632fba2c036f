"""What a step of the job trains on, and with which settings, as far as the user tells: plain data."""

from __future__ import annotations

import msgspec

Setting = str | int | float | bool


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the job's work. Everything is optional.

    Attributes:
        tokens_per_step: tokens that one step of the whole job trains on.
        samples_per_step: samples (sequences, images) of it.
        flop_per_step: model FLOP of one step of the whole job; nothing that is recomputed counts.
        model_parameters: parameters that a token passes, of a transformer; of experts, only those that are active.
        model_preset: the model by name, one of those of ``overlap predict``.
        precision: of the matrix products, which decides the peak: ``fp32``, ``tf32``, ``bf16``, ``fp16`` or ``fp8``.
        peak_flop_per_s: of one device; empty for that of the table.
        settings: what the user varies from run to run, by name.
    """

    tokens_per_step: int | None = None
    samples_per_step: int | None = None
    flop_per_step: float | None = None
    model_parameters: float | None = None
    model_preset: str | None = None
    precision: str | None = None
    peak_flop_per_s: float | None = None
    settings: dict[str, Setting] = {}


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What the job does in a second, by the time of its overlapped steps; what is not known is None.

    Attributes:
        tokens_per_s, samples_per_s: of the whole job.
        flop_per_step: model FLOP of one step of the whole job.
        flop_basis: what it rests on, in words.
        flop_per_s_per_device: model FLOP a second, mean over the devices.
        mfu: the same as a fraction of the device's peak: model FLOP utilisation.
        peak_flop_per_s: of one device.
        peak_basis: what it rests on: an address, or that it was given.
        precision: of the peak; empty if the peak was given without.
        num_devices: devices that do the work.
    """

    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    flop_per_step: float | None = None
    flop_basis: str = ""
    flop_per_s_per_device: float | None = None
    mfu: float | None = None
    peak_flop_per_s: float | None = None
    peak_basis: str = ""
    precision: str = ""
    num_devices: int = 0
