"""The environment of a run in words, for the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.results.environment import (
    Difference,
    Finding,
    JobEnvironment,
    RankEnvironment,
    Severity,
)
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import MemoryPeak
from overlap_callbacks.report.record import Record


def environment_of(record: Record) -> RankEnvironment | None:
    """What the lowest rank heard runs on; before the first report, what rank 0 does. None in older records."""
    job = job_environment_of(record)
    if job is not None:
        return job.lowest_rank
    return record.runs[-1].environment if record.runs else None


def job_environment_of(record: Record) -> JobEnvironment | None:
    """What the ranks run on, as it was reported last."""
    window = record.summary.latest("environment")
    return None if window is None else window.environment


def findings_of(record: Record) -> tuple[Finding, ...]:
    """Every finding of the windows, once, as it was made last; the most serious first."""
    found = {finding.rule: finding for window in record.windows for finding in window.findings}
    return tuple(sorted(found.values(), key=lambda finding: list(Severity).index(finding.severity)))


def memory_window(record: Record) -> OverlapReport | None:
    """The last window with readings of memory."""
    return record.summary.latest("memory")


def where(job: JobEnvironment) -> str:
    """Ranks, hosts and devices, in words."""
    text = f"{count(job.num_ranks, 'rank')} on {count(job.num_hosts, 'host')}"
    if job.num_devices is not None:
        text += f", with {count(job.num_devices, 'device')} ({job.lowest_rank.device})"
    elif job.lowest_rank.device == "cpu":
        text += ", on the CPU"
    return text


def software(environment: RankEnvironment) -> list[tuple[str, str]]:
    """Name and value of what is known of software and device."""
    on_amd = bool(environment.hip)
    memory = f"{environment.memory_bytes / 1e9:.1f} GB" if environment.memory_bytes else ""
    facts = (
        ("PyTorch", environment.torch),
        ("CUDA, of this PyTorch", environment.cuda),
        ("HIP, of this PyTorch", environment.hip),
        ("RCCL" if on_amd else "NCCL", environment.nccl),
        ("Driver", environment.driver),
        ("Device", environment.device),
        ("Architecture" if on_amd else "Compute capability", environment.compute_capability),
        ("Compute units" if on_amd else "SMs", str(environment.num_sms or "")),
        ("Memory of the device", memory),
        ("Threads of a rank", str(environment.num_threads or "")),
        ("CPUs that a rank may use", environment.cpus),
    )
    return [(name, value) for name, value in facts if value]


def difference_words(difference: Difference) -> str:
    """Who has which value."""
    parts = [f"{'not set' if value.value is None else value.value} on {value.ranks}" for value in difference.values]
    left_out = difference.num_values - len(difference.values)
    return "; ".join(parts) + (f"; and {left_out} more values" if left_out else "")


def memory_words(peaks: Sequence[MemoryPeak]) -> list[tuple[str, str]]:
    """Steps of a mode, and what is known of their memory peak."""
    return [(f"{peak.mode.value.capitalize()} steps", _peak(peak)) for peak in peaks]


def _peak(peak: MemoryPeak) -> str:
    if peak.peak_bytes is not None:
        return _gb(peak.peak_bytes)
    if peak.at_most_bytes is not None:
        return f"at most {_gb(peak.at_most_bytes)}"
    return f"at least {_gb(peak.at_least_bytes)}"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
