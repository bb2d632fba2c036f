"""A record as tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.report import Estimate, OverlapReport
from overlap_callbacks.analysis.results.window import PairTime
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.terminal_power import power_parts

LABELS = {
    "e2e_ideal_ms": "step, ideal (eq. 4)",
    "e2e_overlapped_ms": "step, overlapped (eq. 3)",
    "e2e_sequential_ms": "step, sequential",
    "e2e_sequential_model_ms": "step, sequential by the model (eq. 5)",
    "speedup_vs_sequential": "speed-up of overlap over sequential",
    "gap_to_ideal": "gap to ideal",
    "compute_slowdown": "compute slowdown (eq. 1)",
    "overlap_ratio": "overlap ratio (eq. 2)",
    "comm_ms": "communication in flight",
    "hidden_comm_ms": "  hidden behind compute",
    "exposed_comm_ms": "  exposed",
    "comm_slowdown": "communication slowdown",
    "p2p_ms": "sends and receives in flight",
    "idle_ms": "neither compute nor communication",
    "residual_overlap": "residual overlap in sequential steps",
}
# Relative changes, which are shown with their sign; the other fractions are shares.
CHANGES = frozenset({"speedup_vs_sequential", "gap_to_ideal", "compute_slowdown", "comm_slowdown"})
_CONTROL = "A/A control: both arms ran overlapped, so every difference is chance."
NOTHING_YET = "Nothing has been measured yet: no window is done."
# A line is drawn below these: what step times are, what follows from them, compute, communication, the measurement.
_LAST_OF_SECTION = frozenset({"e2e_sequential_model_ms", "gap_to_ideal", "overlap_ratio", "idle_ms"})
# Longest tables; W&B and the record hold everything.
_MOST_KERNELS, _MOST_PAIRS = 8, 10
_UNITS = {figure.name: figure.unit for figure in FIGURES}


class SanitizedRenderable:
    """What it holds, without the characters that steer a terminal: names in a record may be anybody's."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._content, options):
            yield segment if segment.control else Segment(_UNSHOWABLE.sub("\ufffd", segment.text), segment.style)


# Control characters but the new line, and those that turn the direction of writing.
_UNSHOWABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def verdict(figures: dict[str, Estimate]) -> str:
    """Is overlap worth it here? One sentence."""
    speedup, slowdown = figures.get("speedup_vs_sequential"), figures.get("compute_slowdown")
    if speedup is None:
        return "Not enough was measured to say whether overlap is worth it here."
    interval = _interval(speedup, "speedup_vs_sequential")
    shown = f" (95 % interval {interval})" if interval else ""
    change = f"{abs(speedup.value):.1%} {'longer' if speedup.value >= 0 else 'less'}{shown}"
    if speedup.ci_low is None or speedup.ci_high is None:
        sentence = f"Without overlap, steps take {change}: too few blocks to say more"
    elif speedup.ci_low > 0:
        sentence = f"Overlap is worth it here: without it, steps take {change}"
    elif speedup.ci_high < 0:
        sentence = f"Overlap costs more than it saves here: without it, steps take {change}"
    else:
        sentence = f"Whether overlap is worth it here is undecided: without it, steps take {change}"
    if slowdown is not None:
        sentence += (
            f"; compute kernels run {abs(slowdown.value):.1%} {'slower' if slowdown.value >= 0 else 'faster'} under it"
        )
        if slowdown.ci_low is not None and slowdown.ci_high is not None and slowdown.ci_low <= 0 <= slowdown.ci_high:
            sentence += ", which may be chance"
    return sentence + "."


def tables(record: Record, everything: bool = True) -> RenderableType:
    """The record, for people.

    Args:
        record: what to show.
        everything: all tables; else the verdict, the figures and the notes, which are read in five seconds.
    """
    parts: list[RenderableType] = []
    figures = record.pooled()
    shown = f"{len(record.valid_windows)} of {len(record.windows)} windows"
    partial = None if figures else record.partial
    if partial is not None:
        figures, shown = partial.figures(), "one unfinished window"
    parts += [Text(headline(record), style="bold"), Text(_head(record), style="dim")]
    if figures:
        parts += [Text(), _figure_table(figures, shown)]
    last = next(reversed(record.valid_windows or record.windows), record.unfinished)
    # Kernels and pairs compare with sequential steps, which those of a window that does not count were not.
    counts = bool(record.valid_windows) or partial is not None
    if last is not None:
        details, missing = _details(last, counts)
        if everything:
            for found in details.values():
                parts += found
        elif details:
            parts += [Text(f"overlap show --all has more: {', '.join(details)}", style="dim")]
        if missing:
            parts += [Text(), Text(f"Not measured: {', '.join(missing)}.", style="dim")]
    parts += _problems(record)
    return Group(*parts)


def _details(window: OverlapReport, counts: bool) -> tuple[dict[str, list[RenderableType]], list[str]]:
    """The tables of a window by their subject, and the subjects that were not measured."""
    power = power_parts(window)
    measured = {
        "kernels": window.kernels, "pairs of kernels": window.pairs, "power": power, "collectives": window.collectives
    }  # fmt: skip
    found: dict[str, list[RenderableType]] = {}
    if window.kernels and counts:
        found["kernels"] = [Text(), _kernel_table(window)]
    if window.pairs and counts:
        title = f"What runs beside what, and what it costs (window {window.window})"
        found["pairs of kernels"] = [Text(), pair_table(window.pairs, title)]
    if len(window.dimensions) > 1:
        found["dimensions"] = [Text(), _dimension_table(window, counts)]
    if power:
        found["power"] = power
    if window.collectives:
        found["collectives"] = [Text(), _collective_table(window)]
    return found, [name for name, parts in measured.items() if not parts]


def headline(record: Record) -> str:
    """The verdict on a run, in one sentence."""
    figures = record.pooled()
    partial = None if figures else record.partial
    if figures or partial is not None:
        if record.runs[-1].schedule.get("control"):
            return _CONTROL
        if partial is not None and partial.speedup_vs_sequential is None:
            return "Too few blocks were measured to say whether overlap is worth it here."
        if partial is None:
            return verdict(figures)
        checked = "" if partial.residual_overlap is not None else ", whose sequential steps no profile has checked"
        return f"{verdict(partial.figures())} That is of one unfinished window{checked}."
    if record.windows:
        return f"None of the {len(record.windows)} windows counts: the notes below say why."
    return NOTHING_YET


def as_json(record: Record) -> dict[str, Any]:
    """The run's figures and its windows', for programs; where no window counts, those of an unfinished one apart."""
    partial = None if record.valid_windows else record.partial
    return {
        "path": str(record.path),
        "run": record.runs[-1],
        "windows": len(record.windows),
        "valid_windows": len(record.valid_windows),
        "verdict": headline(record),
        "figures": record.pooled(),
        "unfinished": None if partial is None else {"window": partial.window, "figures": partial.figures()},
        "by_window": [{"window": w.window, "valid": w.valid, "metrics": w.metrics()} for w in record.windows],
        "problems": sorted({problem for window in record.windows for problem in window.problems}),
    }


def _head(record: Record) -> str:
    run = record.runs[-1]
    parts = (run.framework, f"{run.world_size} ranks", run.backend, run.device, f"started {run.started_at}")
    return one_line(", ".join(part for part in parts if part))


def one_line(text: str, longest: int = 300) -> str:
    """Text of a record as a line of its own: no name may look like a line of ours, or fill the terminal."""
    text = name_rules.clean(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _figure_table(figures: dict[str, Estimate], shown: str) -> Table:
    table = Table(title=f"Means over {shown}", title_justify="left")
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    table.add_column("steps", justify="right")
    for name, label in LABELS.items():
        figure = figures.get(name)
        if figure is None and name == "p2p_ms":
            continue  # most jobs have none
        if figure is None:
            table.add_row(label, "not measured", "", "", style="dim")
        else:
            table.add_row(label, _value(figure.value, name), _interval(figure, name), str(figure.num_steps))
        if name in _LAST_OF_SECTION:
            table.add_section()
    return table


def _kernel_table(window: OverlapReport) -> Table:
    table = Table(title=f"Kernels that lose most time under overlap (window {window.window})", title_justify="left")
    table.add_column("kernel")
    for column in ("slowdown", "lost", "overlapped", "sequential"):
        table.add_column(column, justify="right", no_wrap=True)
    for kernel in window.kernels[:_MOST_KERNELS]:
        slowdown = "" if kernel.slowdown is None else f"{kernel.slowdown:+.1%}"
        times = (f"{number(ms, 2)} ms" for ms in (kernel.lost_ms, kernel.overlapped_ms, kernel.sequential_ms))
        table.add_row(kernel_name(kernel.name), slowdown, *times)
    if len(window.kernels) > _MOST_KERNELS:
        table.add_row(f"... {len(window.kernels) - _MOST_KERNELS} more", style="dim")
    return table


def pair_table(pairs: Sequence[PairTime], title: str) -> Table:
    """Kernel families beside collectives, and the other way round, the dearest first."""
    table = Table(title=Text(title), title_justify="left")
    table.add_column("kernels")
    table.add_column("beside")
    for column in ("slowdown", "lost", "time", "alone"):
        table.add_column(column, justify="right", no_wrap=True)
    for pair in pairs[:_MOST_PAIRS]:
        slowdown = "" if pair.slowdown is None else f"{pair.slowdown:+.1%}"
        times = (f"{number(ms, 2)} ms" for ms in (pair.lost_ms, pair.time_ms, pair.alone_ms))
        table.add_row(shortened(pair.victim), shortened(pair.beside), slowdown, *times)
    if len(pairs) > _MOST_PAIRS:
        table.add_row(f"... {len(pairs) - _MOST_PAIRS} more", style="dim")
    return table


def _dimension_table(window: OverlapReport, counts: bool) -> Table:
    table = Table(
        title=f"Communication by dimension of parallelism, per step (window {window.window})", title_justify="left"
    )
    table.add_column("dimension")
    for column in ("messages", "MB", "ms", "exposed", "slowdown"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in window.dimensions:
        slowdown = "" if row.slowdown is None or not counts else f"{row.slowdown:+.1%}"
        cells = (str(row.messages), f"{row.bytes_in / 1e6:.2f}", number(row.comm_ms, 2), number(row.exposed_ms, 2))
        table.add_row(shortened(row.dimension), *cells, slowdown)
    return table


def _collective_table(window: OverlapReport) -> Table:
    table = Table(title="Collectives of a step, on rank 0", title_justify="left")
    table.add_column("collective")
    table.add_column("group")
    for column in ("ranks", "messages", "MB", "alone, ms"):
        table.add_column(column, justify="right")
    for row in window.collectives:
        alone = "" if row.isolated_ms is None else f"{row.isolated_ms:.2f}"
        cells = (str(row.group_size), str(row.messages), f"{row.bytes_in / 1e6:.2f}", alone)
        table.add_row(shortened(row.operator.strip("_")), shortened(row.group), *cells)
    return table


def kernel_name(name: str) -> Text:
    """A kernel's name without what all kernels of torch begin with, so that the rest of it can be seen."""
    return shortened(_COMMON_PARTS.sub("", name) or name)


_COMMON_PARTS = re.compile(r"^void |\(anonymous namespace\)::|at::native::|c10::")


def number(value: float, digits: int = 3) -> str:
    """A number of so many decimals, without the sign of a zero."""
    return f"{value:.{digits}f}".replace("-0." + "0" * digits, "0." + "0" * digits)


def shortened(name: str) -> Text:
    """A name as it is, without markup, cut off where the table is too narrow for it."""
    return Text(one_line(name), no_wrap=True, overflow="ellipsis")


def _problems(record: Record) -> list[RenderableType]:
    found = dict.fromkeys(problem for window in record.windows for problem in window.problems)
    lines = [f"- {one_line(problem)}" for problem in found]
    left_out = len(record.windows) - len(record.valid_windows)
    if left_out:
        kinds = {
            "not valid": sum(not window.valid for window in record.windows),
            "cut short": sum(window.valid and not window.complete for window in record.windows),
        }
        kinds["of the other kind (control, or not)"] = left_out - sum(kinds.values())
        why = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        lines.insert(0, f"- {left_out} of {len(record.windows)} windows do not count: {why}")
    if record.unfinished is not None:
        lines.append(f"- window {record.unfinished.window} is unfinished: {record.unfinished.problems[0]}")
    if record.broken_lines:
        lines.append(f"- {record.broken_lines} lines of the record could not be read")
    return [Text(), Text("Notes", style="bold"), Text("\n".join(lines))] if lines else []


def _value(value: float, name: str) -> str:
    if _UNITS[name] == "ms":
        return f"{value:.2f} ms"
    return f"{value:+.1%}" if name in CHANGES else f"{value:.1%}"


def _interval(figure: Estimate, name: str) -> str:
    if figure.ci_low is None or figure.ci_high is None:
        return ""
    return " to ".join(_value(bound, name).removesuffix(" ms") for bound in (figure.ci_low, figure.ci_high))
