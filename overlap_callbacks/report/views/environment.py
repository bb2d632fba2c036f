"""What the run ran on, and which of its settings are known traps."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import count, page_text
from overlap_callbacks.analysis.results.environment import Finding, JobEnvironment, Severity
from overlap_callbacks.report import environment_words as words
from overlap_callbacks.report.views.elements import Block, Cell, Facts, Note, Section, Table, heads
from overlap_callbacks.report.views.run import RunView
from overlap_callbacks.report.views.tables import name_cell

_RANK = {severity: number for number, severity in enumerate(Severity)}


def environment(view: RunView) -> Section | None:
    """Findings, software, variables, hosts and devices; None for a record of an older version."""
    record = view.record
    own, job, findings = words.environment_of(record), words.job_environment_of(record), words.findings_of(record)
    if own is None:
        return None
    blocks: list[Block] = []
    if findings:
        blocks.append(_finding_table(findings))
    blocks.append(Facts("Software and device", _facts(words.software(own))))
    memory = words.memory_window(record)
    if memory is not None:
        title = f"Most memory that tensors hold at a time, on any rank (window {memory.window})"
        blocks.append(Facts(title, _facts(words.memory_words(memory.memory))))
    if job is not None and job.transports:
        told = [(f"Between {t.between}", f"{t.transport} ({t.basis})") for t in job.transports]
        blocks.append(Facts("What carries messages", _facts(told)))
    if own.variables:
        variables = tuple((name_cell(name), name_cell(value)) for name, value in own.variables.items())
        blocks.append(Table("Environment variables", heads("*Variable", "*Value"), variables, _variables_of(job)))
    if job is not None:
        blocks += _job_blocks(job)
    return Section("What did it run on?", _answer(job, findings), blocks)


def environment_facts(view: RunView) -> tuple[tuple[str, str], ...]:
    """Name and value of software, device and variables, to be held against those of another run."""
    own = words.environment_of(view.record)
    # Versions of torch and the device's name stand with what else is known of the run.
    known = () if own is None else (*words.software(own)[1:], *own.variables.items())
    return _facts([(name, value) for name, value in known if name != "Device"])


def warnings(view: RunView) -> list[Note]:
    """What must be known before the figures are read: the serious findings."""
    return [
        Note(page_text(f"{finding.message} {finding.action}"), warning=True)
        for finding in words.findings_of(view.record)
        if finding.severity is Severity.SERIOUS
    ]


def _variables_of(job: JobEnvironment | None) -> str:
    if job is None or not job.places:
        return "Of rank 0."
    others = "those of other ranks that differ are below" if job.differing else "the other ranks have the same"
    return f"Of rank {job.places[0].rank}; {others}."


def _answer(job: JobEnvironment | None, findings: tuple[Finding, ...]) -> str:
    answer = "" if job is None else f"{page_text(words.where(job))}. "
    if not findings:
        return f"{answer}No known trap was found in its settings." if job is not None else ""
    serious = sum(finding.severity is Severity.SERIOUS for finding in findings)
    return f"{answer}{count(len(findings), 'finding')}" + (f", {serious} serious." if serious else ".")


def _facts(facts: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((page_text(name, 80), page_text(value)) for name, value in facts)


def _finding_table(findings: tuple[Finding, ...]) -> Table:
    rows = tuple(
        (
            Cell(finding.severity.value, _RANK[finding.severity]),
            name_cell(finding.message),
            name_cell(finding.action),
            name_cell(finding.source, _short_address(finding.source)),
        )
        for finding in findings
    )
    columns = heads("*How much", "*What was found", "*What to do", "*Source")
    return Table("Findings in the environment", columns, rows, first=True)


def _short_address(address: str) -> str:
    """Host and last part of an address."""
    host, _, path = address.removeprefix("https://").partition("/")
    return f"{host}: {path.rpartition('/')[2]}" if path else host


def _job_blocks(job: JobEnvironment) -> list[Block]:
    blocks: list[Block] = []
    if job.differing:
        differing = tuple((name_cell(d.name), name_cell(words.difference_words(d))) for d in job.differing)
        blocks.append(Table("What is not alike on all ranks", heads("*What", "*Values"), differing))
    rows = tuple(
        (
            Cell(str(place.rank), place.rank),
            name_cell(place.hostname),
            name_cell(place.device),
            name_cell(place.device_uuid),
            name_cell(place.pci_bus_id),
        )
        for place in job.places
    )
    left_out = job.num_ranks - len(job.places)
    caption = f"The first {len(job.places)} of {job.num_ranks:,} ranks." if left_out else ""
    columns = heads("Rank", "*Host", "*Device", "*UUID", "*PCI address")
    blocks.append(Table("Where the ranks run", columns, rows, caption, folded=True))
    return blocks
