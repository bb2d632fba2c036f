"""The environment of a run for the terminal: its findings, and what it ran on."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import shortened
from overlap_callbacks.analysis.results.environment import Severity
from overlap_callbacks.analysis.safe_text import clean
from overlap_callbacks.report import environment_words as words
from overlap_callbacks.report.record import Record

_MAX_LENGTH = 300
_STYLES = {Severity.SERIOUS: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def finding_parts(record: Record) -> list[RenderableType]:
    """The findings with what to do about each; nothing where there are none."""
    findings = words.findings_of(record)
    if not findings:
        return []
    parts: list[RenderableType] = [Text(), Text("Findings in the environment", style="bold")]
    for finding in findings:
        line = Text("- ")
        line.append(finding.severity.value, style=_STYLES[finding.severity])
        line.append(f": {_line(finding.message)} {_line(finding.action)} ")
        line.append(_line(finding.source), style="dim")
        parts.append(line)
    return parts


def environment_parts(record: Record) -> list[RenderableType]:
    """Software, device, variables and hosts as a table; nothing in a record of an older version."""
    own, job = words.environment_of(record), words.job_environment_of(record)
    if own is None:
        return []
    table = Table(title="What it ran on", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    if job is not None:
        table.add_row("Ranks", _line(words.where(job)))
        for transport in job.transports:
            told = f"{transport.transport} ({transport.basis})"
            table.add_row(f"Between {transport.between}", Text(_line(told)))
    for name, value in words.software(own):
        table.add_row(name, Text(_line(value)))
    memory = words.memory_window(record)
    for name, value in words.memory_words(memory.memory) if memory is not None else ():
        table.add_row(f"Memory peak, {name.lower()}", value)
    for name, value in own.variables.items():
        table.add_row(Text(_line(name)), Text(_line(value)))
    for difference in job.differing if job is not None else ():
        table.add_row(Text(_line(f"{difference.name}, by rank")), Text(_line(words.difference_words(difference))))
    return [Text(), table]


def _line(text: str) -> str:
    return shortened(clean(text), _MAX_LENGTH)
