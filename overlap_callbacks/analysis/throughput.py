"""Tokens and model FLOP per second, model FLOP utilisation from the devices' peaks, and scaling over runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from overlap_callbacks.analysis.communication.model_shape import preset
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport, Throughput
from overlap_callbacks.analysis.results.run import Workload

MS_PER_S = 1e3
# 2 forward and 4 backward, per parameter and token.
FLOP_PER_PARAMETER_AND_TOKEN = 6
GIVEN = "given"


def step_flop(work: Workload) -> tuple[float, str] | None:
    """Model FLOP of a step of the whole job, and their source; None if not known.

    Model FLOP are those of one forward and one backward pass, without recomputation.
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
    """The job's work per second; None if none of it is known.

    ``step_ms``: time of an overlapped step. ``device`` is empty if the working devices differ.
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
    """Total work of all windows' steps over their total time; None if not known.

    So a window of slow steps weighs more. The source of the rates is that of the last window.
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
    return found or (None, "")


# -- peaks of devices by precision: dense matrix products, from the manufacturers' data sheets. Many figures in NVIDIA's
# data sheets since Ampere are with 2:4 sparsity; those here are without it, half of them. What is not in the table is
# unknown, and gives no figure.

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
_TERA = 1e12


class _Device(NamedTuple):
    """A kind of device.

    Attributes:
        name: regular expression for its full name in torch, without ``NVIDIA`` and the like.
        tflop_per_s: by precision; without those that it lacks, or that its data sheet does not give.
    """

    label: str
    name: str
    tflop_per_s: dict[str, float]
    source: str


def _rates(
    fp32: float, tf32: float = 0.0, half: float = 0.0, fp8: float = 0.0, bf16: float | None = None
) -> dict[str, float]:
    """Rates by precision. Tensor cores have equal rates for bf16 and fp16 since Ampere."""
    rates = {"fp32": fp32, "tf32": tf32, "bf16": half if bf16 is None else bf16, "fp16": half, "fp8": fp8}
    return {precision: rate for precision, rate in rates.items() if rate}


_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_V100 = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_A100 = f"{_NVIDIA}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200"
_BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture"
_T4 = f"{_NVIDIA}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
_A40 = "https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"
_AMPERE_GEFORCE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf"
_ADA_GEFORCE = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"

_HOPPER = _rates(67.0, 494.7, 989.4, 1978.9)

DEVICES = (
    _Device("V100 SXM", r"V100-SXM[23].*", _rates(15.7, half=125.0, bf16=0.0), _V100),
    _Device("V100 PCIe", r"V100-PCIE.*", _rates(14.0, half=112.0, bf16=0.0), _V100),
    _Device("V100S PCIe", r"V100S-PCIE.*", _rates(16.4, half=130.0, bf16=0.0), _V100),
    _Device("T4", r"T4", _rates(8.1, half=65.0, bf16=0.0), _T4),
    _Device("A100", r"A100[- ].*", _rates(19.5, 156.0, 312.0), _A100),
    _Device("A800", r"A800[- ].*", _rates(19.5, 156.0, 312.0), _A100),
    _Device("A10", r"A10", _rates(31.2, 62.5, 125.0), f"{_NVIDIA}/Data-Center/a10/pdf/a10-datasheet.pdf"),
    _Device("A30", r"A30", _rates(10.3, 82.0, 165.0), f"{_NVIDIA}/data-center/products/a30-gpu/pdf/a30-datasheet.pdf"),
    _Device("A40", r"A40", _rates(37.4, 74.8, 149.7), _A40),
    _Device("RTX A6000", r"RTX A6000", _rates(38.7, 77.4, 154.8), _AMPERE_GEFORCE),
    _Device("L4", r"L4", _rates(30.3, 60.0, 121.0, 242.5), "https://www.nvidia.com/en-us/data-center/l4/"),
    _Device("L40", r"L40", _rates(90.5, 90.5, 181.05, 362.0), "https://www.nvidia.com/en-us/data-center/l40/"),
    _Device("L40S", r"L40S", _rates(91.6, 183.0, 362.05, 733.0), "https://www.nvidia.com/en-us/data-center/l40s/"),
    _Device("H100 PCIe", r"H100 PCIe", _rates(51.0, 378.0, 756.0, 1513.0), _H100),
    _Device("H100 NVL", r"H100 NVL", _rates(60.0, 417.5, 835.5, 1670.5), _H100),
    # "H100 80GB HBM3" is the SXM module; the PCIe card has HBM2e.
    _Device("H100, H800 SXM", r"H[18]00 .*(HBM3|SXM).*", _HOPPER, _H100),
    _Device("GH200", r"GH200.*", _HOPPER, "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip"),
    _Device("H200 NVL", r"H200 NVL", _rates(60.0, 417.5, 835.5, 1670.5), _H200),
    _Device("H200", r"H200", _HOPPER, _H200),
    # Its documents disagree on fp32.
    _Device("B200", r"B200", _rates(0.0, 1100.0, 2250.0, 4500.0), _BLACKWELL),
    _Device("GB200", r"GB200", _rates(0.0, 1250.0, 2500.0, 5000.0), _BLACKWELL),
    # On GeForce, 16-bit products accumulated in 32 bits, as in training, run at half the advertised rate.
    _Device("GeForce RTX 3090", r"GeForce RTX 3090", _rates(35.6, 35.6, 71.0), _AMPERE_GEFORCE),
    _Device("GeForce RTX 4090", r"GeForce RTX 4090", _rates(82.6, 82.6, 165.2, 330.3), _ADA_GEFORCE),
    _Device("Instinct MI100", r"Instinct MI100", _rates(46.1, half=184.6, bf16=92.3), f"{_AMD}/mi100.html"),
    # torch sees each of the two dies as a device, with half of the module's rate.
    _Device("Instinct MI250X, a die", r"Instinct MI250X.*", _rates(47.9, half=191.5), f"{_AMD}/mi200/mi250x.html"),
    _Device("Instinct MI250, a die", r"Instinct MI250", _rates(45.3, half=181.0), f"{_AMD}/mi200/mi250.html"),
    _Device("Instinct MI210", r"Instinct MI210", _rates(45.3, half=181.0), f"{_AMD}/mi200/mi210.html"),
    _Device("Instinct MI300X", r"Instinct MI300X.*", _rates(163.4, 653.7, 1307.4, 2614.9), f"{_AMD}/mi300/mi300x.html"),
    _Device("Instinct MI325X", r"Instinct MI325X.*", _rates(163.4, 653.7, 1307.4, 2614.9), f"{_AMD}/mi300/mi325x.html"),
    _Device("Instinct MI300A", r"Instinct MI300A", _rates(122.6, 490.3, 980.6, 1961.2), f"{_AMD}/mi300/mi300a.html"),
)  # fmt: skip

_MAKER = re.compile(r"^(NVIDIA|Tesla|Quadro|AMD|Radeon)\s+", re.IGNORECASE)


def peak_of(device: str, precision: str) -> tuple[float, str] | None:
    """FLOP per second of a device by torch's name, and the address of its data sheet; None if not known."""
    name = device.strip()
    while (found := _MAKER.match(name)) is not None:
        name = name[found.end() :]
    if re.search(r"\bMIG\b", name):
        return None
    for known in DEVICES:
        if re.fullmatch(known.name, name, re.IGNORECASE):
            rate = known.tflop_per_s.get(precision)
            return None if rate is None else (rate * _TERA, known.source)
    return None


# -- runs plotted against what varies between them: the ranks, the batch, a setting of the user's. The study's figure 13
# shows these against the world size: scaling factor, effective bandwidth, communication ratio, and exposed
# communication.

WORLD_SIZE = "world_size"
Value = int | float | str


class RunFigures(NamedTuple):
    """One run, for comparison with others.

    Attributes:
        value: its value on the axis.
        work_per_s: tokens, or samples, a second; None if not known. ``Comparison.work`` says which.
        comm_ratio, exposed: communication, and exposed communication, over the step.
        mfu: model FLOP utilisation.
        bandwidths: effective bandwidth in GB/s, by dimension of parallelism.
    """

    name: str
    value: Value
    ranks: int
    step_ms: Estimate | None = None
    work_per_s: Estimate | None = None
    comm_ratio: Estimate | None = None
    exposed: float | None = None
    mfu: float | None = None
    bandwidths: Mapping[str, float] = {}


class ScaledRun(NamedTuple):
    factor: float
    efficiency: float


def scaled(runs: Sequence[RunFigures]) -> dict[str, ScaledRun]:
    """Scaling factor and efficiency of each run with a throughput, by name; empty if all have the same number of ranks.

    The base is the mean over the runs with the fewest ranks.
    """
    # A corrupt record may have no ranks.
    known = [
        (r, r.work_per_s.value) for r in runs if r.work_per_s is not None and r.work_per_s.value > 0 and r.ranks > 0
    ]
    if len({run.ranks for run, _ in known}) < 2:
        return {}
    base_ranks = min(run.ranks for run, _ in known)
    of_base = [work for run, work in known if run.ranks == base_ranks]
    base = sum(of_base) / len(of_base)
    return {run.name: ScaledRun(work / base, work / base / (run.ranks / base_ranks)) for run, work in known}


def is_numeric(runs: Sequence[RunFigures]) -> bool:
    return all(isinstance(run.value, (int, float)) and not isinstance(run.value, bool) for run in runs)


def in_order(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """Sorted by value on the axis: numbers by size, text alphabetically; equal ones in the given order."""
    if is_numeric(runs):
        return sorted(runs, key=lambda run: float(run.value))
    return sorted(runs, key=lambda run: str(run.value))
