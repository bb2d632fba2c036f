"""Tokens and model FLOP a second, and model FLOP utilisation: of what the user tells, and the time of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from overlap_callbacks.analysis.communication.model_shape import preset
from overlap_callbacks.analysis.peaks import peak_of
from overlap_callbacks.analysis.results.report import OverlapReport, Throughput
from overlap_callbacks.analysis.results.run import Workload

MS_PER_S = 1e3
# Forward 2 and backward 4, for each parameter and token.
FLOP_PER_PARAMETER_AND_TOKEN = 6
GIVEN = "given"


def step_flop(work: Workload) -> tuple[float, str] | None:
    """Model FLOP of a step of the whole job, and what they rest on; None where they are not known.

    Model FLOP are those of one forward and one backward pass. What is recomputed counts nothing.
    """
    if work.flop_per_step is not None:
        return work.flop_per_step, GIVEN
    if work.tokens_per_step is None:
        return None
    if work.model_parameters is not None:
        flop = FLOP_PER_PARAMETER_AND_TOKEN * work.model_parameters * work.tokens_per_step
        return flop, f"6 FLOP for each of {work.model_parameters:,.0f} parameters and each token"
    if work.model_preset is not None:
        model = preset(work.model_preset)
        return model.token_flop * work.tokens_per_step, (
            f"matrix products and attention of {work.model_preset}, sequences of {model.sequence:,} tokens"
        )
    return None


def throughput_of(work: Workload, step_ms: float | None, *, device: str, num_devices: int) -> Throughput | None:
    """What the job does in a second; None where nothing of it is known.

    ``step_ms`` is that of an overlapped step; ``device`` is empty if the devices that do the work are not alike.
    """
    if step_ms is None or step_ms <= 0 or num_devices < 1:
        return None
    step_s = step_ms / MS_PER_S
    flop = step_flop(work)
    if work.tokens_per_step is None and work.samples_per_step is None and flop is None:
        return None
    peak, basis = _peak(work, device)
    per_device = None if flop is None else flop[0] / step_s / num_devices
    return Throughput(
        tokens_per_s=None if work.tokens_per_step is None else work.tokens_per_step / step_s,
        samples_per_s=None if work.samples_per_step is None else work.samples_per_step / step_s,
        flop_per_step=None if flop is None else flop[0],
        flop_basis="" if flop is None else flop[1],
        flop_per_s_per_device=per_device,
        mfu=None if per_device is None or peak is None else per_device / peak,
        peak_flop_per_s=peak,
        peak_basis=basis,
        precision=work.precision or "",
        num_devices=num_devices,
    )


def run_throughput(windows: Sequence[OverlapReport]) -> Throughput | None:
    """The work of the steps of all windows over their time: total tokens over total time; None where none is known.

    So a window of slow steps weighs more. What the rates rest on is that of the last window.
    """
    known = [
        (window.throughput, window.e2e_overlapped_ms.value)
        for window in windows
        if window.throughput is not None and window.e2e_overlapped_ms is not None
    ]
    if not known:
        return None
    last, rates = known[-1][0], {}
    for name in ("tokens_per_s", "samples_per_s", "flop_per_s_per_device", "mfu"):
        values = [(value, step_ms) for each, step_ms in known if (value := getattr(each, name)) is not None]
        if values and getattr(last, name) is not None:
            rates[name] = sum([rate * ms for rate, ms in values]) / sum([ms for _, ms in values])
    return msgspec.structs.replace(last, **rates)


def _peak(work: Workload, device: str) -> tuple[float | None, str]:
    if work.peak_flop_per_s is not None:
        return work.peak_flop_per_s, GIVEN
    found = None if work.precision is None else peak_of(device, work.precision)
    return (None, "") if found is None else (found.flop_per_s, found.source)
