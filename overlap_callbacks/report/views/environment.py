"""The environment of the run, and its settings that are known traps."""

from __future__ import annotations

from collections.abc import Iterable

from overlap_callbacks.analysis.formatting import count, page_text
from overlap_callbacks.analysis.results.environment import (
    Difference,
    Finding,
    JobEnvironment,
    RankEnvironment,
    Severity,
)
from overlap_callbacks.analysis.results.window import MemoryPeak
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import Block, Cell, Column, Facts, Note, Section, name_cell, table_of

_RANK = {severity: number for number, severity in enumerate(Severity)}


def environment(record: Record) -> list[Section]:
    """Findings, software, variables, hosts and devices; nothing for a record of an older version."""
    own, job, findings = record.environment, record.job_environment, record.findings
    if own is None:
        return []
    blocks: list[Block] = []
    if findings:
        blocks.append(_finding_table(findings))
    blocks.append(Facts("Software and device", _facts(_software(own))))
    memory = record.summary.latest("memory")
    if memory is not None:
        title = f"Most memory that tensors hold at a time, on any rank (window {memory.window})"
        peaks = [(f"{peak.mode.value.capitalize()} steps", _memory_peak(peak)) for peak in memory.memory]
        blocks.append(Facts(title, _facts(peaks)))
    if job is not None and job.transports:
        told = [(f"Between {t.between}", f"{t.transport} ({t.basis})") for t in job.transports]
        blocks.append(Facts("What carries messages", _facts(told)))
    if own.variables:
        blocks.append(_pairs("Environment variables", "*Variable", "*Value", own.variables.items(), _variables_of(job)))
    if job is not None:
        blocks += _job_blocks(job)
    return [Section("What did it run on?", _answer(job, findings), blocks)]


def environment_facts(record: Record) -> tuple[tuple[str, str], ...]:
    """Name and value of software, device and variables, for comparison with another run."""
    own = record.environment
    # The torch version and the device's name are among the run's other facts.
    known = () if own is None else (*_software(own)[1:], *own.variables.items())
    return _facts([(name, value) for name, value in known if name != "Device"])


def warnings(record: Record) -> list[Note]:
    """The serious findings, to be read before the figures."""
    return [
        Note(page_text(f"{finding.message} {finding.action}"), warning=True)
        for finding in record.findings
        if finding.severity is Severity.SERIOUS
    ]


def _variables_of(job: JobEnvironment | None) -> str:
    if job is None or not job.places:
        return "Of rank 0."
    others = "those of other ranks that differ are below" if job.differing else "the other ranks have the same"
    return f"Of rank {job.places[0].rank}; {others}."


def _answer(job: JobEnvironment | None, findings: tuple[Finding, ...]) -> str:
    answer = "" if job is None else f"{page_text(_where(job))}. "
    if not findings:
        return f"{answer}No known trap was found in its settings." if job is not None else ""
    serious = sum(finding.severity is Severity.SERIOUS for finding in findings)
    return f"{answer}{count(len(findings), 'finding')}" + (f", {serious} serious." if serious else ".")


def _facts(facts: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((page_text(name, 80), page_text(value)) for name, value in facts)


def _pairs(title: str, name: str, value: str, rows: Iterable[tuple[str, str]], caption: str = "") -> Block:
    return table_of(title, rows, Column(name, lambda row: row[0]), Column(value, lambda row: row[1]), caption=caption)


def _finding_table(findings: tuple[Finding, ...]) -> Block:
    return table_of(
        "Findings in the environment",
        findings,
        Column("*How much", lambda finding: Cell(finding.severity.value, _RANK[finding.severity])),
        Column("*What was found", lambda finding: finding.message),
        Column("*What to do", lambda finding: finding.action),
        Column("*Source", lambda finding: name_cell(finding.source, _short_address(finding.source))),
    )


def _short_address(address: str) -> str:
    """Host and last part of an address."""
    host, _, path = address.removeprefix("https://").partition("/")
    return f"{host}: {path.rpartition('/')[2]}" if path else host


def _job_blocks(job: JobEnvironment) -> list[Block]:
    blocks: list[Block] = []
    if job.differing:
        differing = [(difference.name, _values_of(difference)) for difference in job.differing]
        blocks.append(_pairs("What differs between ranks", "*What", "*Values", differing))
    places = table_of(
        "Where the ranks run",
        job.places,
        Column("Rank", lambda place: Cell(str(place.rank), place.rank)),
        Column("*Host", lambda place: place.hostname),
        Column("*Device", lambda place: place.device),
        Column("*UUID", lambda place: place.device_uuid),
        Column("*PCI address", lambda place: place.pci_bus_id),
        caption=f"The first {len(job.places)} of {job.num_ranks:,} ranks." if job.num_ranks > len(job.places) else "",
        folded=True,
    )
    return [*blocks, places]


# -- text


def _where(job: JobEnvironment) -> str:
    """Ranks, hosts and devices."""
    text = f"{count(job.num_ranks, 'rank')} on {count(job.num_hosts, 'host')}"
    if job.num_devices is not None:
        text += f", with {count(job.num_devices, 'device')} ({job.lowest_rank.device})"
    elif job.lowest_rank.device == "cpu":
        text += ", on the CPU"
    return text


def _software(environment: RankEnvironment) -> list[tuple[str, str]]:
    """Name and value of the known facts of software and device."""
    on_amd = bool(environment.hip)
    memory = f"{environment.memory_bytes / 2**30:.1f} GiB" if environment.memory_bytes else ""
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


def _values_of(difference: Difference) -> str:
    """Which ranks have which value."""
    parts = [f"{'not set' if value.value is None else value.value} on {value.ranks}" for value in difference.values]
    left_out = difference.num_values - len(difference.values)
    return "; ".join(parts) + (f"; and {left_out} more values" if left_out else "")


def _memory_peak(peak: MemoryPeak) -> str:
    if peak.peak_bytes is not None:
        return _gb(peak.peak_bytes)
    if peak.at_most_bytes is not None:
        return f"at most {_gb(peak.at_most_bytes)}"
    return f"at least {_gb(peak.at_least_bytes)}"


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
