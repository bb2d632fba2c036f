"""A record as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.formatting import PLAIN, count
from overlap_callbacks.analysis.headline import run_headline
from overlap_callbacks.analysis.measuring_cost import cost_of_run
from overlap_callbacks.analysis.race import race_sentence
from overlap_callbacks.analysis.results.catalogue import SUMMARY
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.race import RaceVerdict
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.report_parts import compute_slowdowns
from overlap_callbacks.analysis.throughput import run_throughput
from overlap_callbacks.analysis.verdict import run_verdict
from overlap_callbacks.report.communication_json import communication_as_json
from overlap_callbacks.report.environment_words import findings_of, job_environment_of
from overlap_callbacks.report.expert_words import loads_in_words
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.step_words import parts_sentence
from overlap_callbacks.report.terminal_arms import arm_parts, arms_as_json
from overlap_callbacks.report.terminal_bottleneck import advice_parts, bottleneck_as_json
from overlap_callbacks.report.terminal_causes import cause_parts
from overlap_callbacks.report.terminal_cells import name_cell, one_line
from overlap_callbacks.report.terminal_communication import communication_details
from overlap_callbacks.report.terminal_environment import environment_parts, finding_parts
from overlap_callbacks.report.terminal_kernels import kernel_parts, pair_parts, pair_table
from overlap_callbacks.report.terminal_parts import change, row_label
from overlap_callbacks.report.terminal_power import power_parts
from overlap_callbacks.report.throughput_words import throughput_facts
from overlap_callbacks.report.window_words import left_out, race_of, unreadable, which, windows_that_count

# Maximum of different notes on windows.
_MAX_PROBLEMS = 50


def tables(record: Record, everything: bool = True) -> RenderableType:
    """The record, for people.

    Args:
        record: what to show.
        everything: whether to show all tables; if not, only the verdict, the figures and the notes.
    """
    summary = record.summary
    figures, windows = summary.pooled(), summary.valid_windows
    pooled_from = f"{len(windows)} of {count(len(record.windows), 'window')}"
    partial = None if figures else summary.partial
    if partial is not None:
        figures, pooled_from = partial.figures(), "one unfinished window"
    headline = run_headline(summary, len(record.arms))
    parts: list[RenderableType] = [
        Text(one_line(headline.sentence, 1000), style="bold"),
        *[Text(one_line(line, 1000)) for line in headline.more],
        Text(_head(record), style="dim"),
    ]
    if figures:
        parts += [Text(), _figure_table(figures, pooled_from)]
    of_step = summary.step_parts()
    if of_step is not None:
        parts += [Text(), Text(parts_sentence(of_step, figures))]
    parts += arm_parts(record)
    parts += _race_parts(record)
    parts += _throughput_parts(windows)
    parts += _cost_parts(record)
    parts += advice_parts(record)
    last = next(reversed(windows or record.windows), record.unfinished)
    if last is not None:
        last = record.whole(last)
    # Kernels and pairs are compared with sequential steps. In a window that does not count, those were not sequential.
    counts = bool(windows) or partial is not None
    if last is not None:
        details, missing = _details(last, counts, summary.latest_with_watts() or last)
        details |= communication_details(record)
        ran_on = environment_parts(record)
        if ran_on:
            details["environment"] = ran_on
        if everything:
            for detail in details.values():
                parts += detail
        elif details:
            parts += [Text(f"overlap show --all has more: {', '.join(details)}", style="dim")]
        if missing:
            parts += [Text(), Text(f"Not measured: {', '.join(missing)}.", style="dim")]
    parts += finding_parts(record)
    parts += _notes(record)
    return Group(*parts)


def _details(
    window: OverlapReport, counts: bool, powered: OverlapReport
) -> tuple[dict[str, list[RenderableType]], list[str]]:
    """The tables of a window by their subject, that of power of its own window, and the subjects not measured."""
    power = power_parts(powered)
    measured = {
        "kernels": window.kernels, "pairs of kernels": window.pairs, "power": power, "collectives": window.collectives
    }  # fmt: skip
    details: dict[str, list[RenderableType]] = {}
    causes = cause_parts(window) if counts else []
    if causes:
        details["causes of the slowdown"] = causes
    if window.kernels and counts:
        details["kernels"] = kernel_parts(window)
    if window.pairs and counts:
        details["pairs of kernels"] = pair_parts(window.pairs, f"(window {window.window})")
    if len(window.dimensions) > 1:
        details["dimensions"] = [Text(), _dimension_table(window, counts)]
        if window.dimension_pairs and counts:
            title = f"Slowdown by dimension of parallelism in flight (window {window.window})"
            details["dimensions"] += [Text(), pair_table(window.dimension_pairs, title)]
    if window.experts is not None:
        details["experts"] = [Text(), Text(one_line(f"Experts: {loads_in_words(window.experts)}", 1000))]
    if power:
        details["power"] = power
    if window.collectives:
        details["collectives"] = [Text(), _collective_table(window)]
    return details, [name for name, parts in measured.items() if not parts]


def as_json(record: Record) -> dict[str, Any]:
    """The run's figures and its windows', for programs; where no window counts, those of an unfinished one apart."""
    partial = None if record.valid_windows else record.partial
    return {
        "path": str(record.path),
        "run": record.runs[-1],
        "windows": len(record.windows),
        "valid_windows": len(record.valid_windows),
        "verdict": run_verdict(record.summary, len(record.arms)),
        "bottleneck": bottleneck_as_json(record),
        "figures": record.pooled(),
        "all_looks": record.running,
        "arms": arms_as_json(record),
        "race": race_of(record),
        "throughput": run_throughput(record.valid_windows),
        "measuring_cost": _cost(record),
        "unfinished": None if partial is None else {"window": partial.window, "figures": partial.figures()},
        "communication": communication_as_json(record),
        "by_window": [
            {"window": w.window, "valid": w.valid, "verified": w.verified, "metrics": record.whole(w).metrics()}
            for w in record.windows
        ],
        "environment": job_environment_of(record),
        "findings": findings_of(record),
        "problems": sorted({problem for window in record.windows for problem in window.problems}),
    }


def _race_parts(record: Record) -> list[RenderableType]:
    race = race_of(record)
    if race is None:
        return []
    bad = race.verdict is RaceVerdict.RACE
    return [Text(), Text(one_line(race_sentence(race), 4000), style="bold red" if bad else "")]


def _throughput_parts(windows: Sequence[OverlapReport]) -> list[RenderableType]:
    throughput = run_throughput(windows)
    if throughput is None:
        return []
    said = [f"{label} {value} ({basis})" for label, value, basis in throughput_facts(throughput)]
    return [Text(), Text(one_line(f"Throughput: {'; '.join(said)}.", 1000))]


def _cost_parts(record: Record) -> list[RenderableType]:
    cost = _cost(record)
    return [] if cost is None else [Text(), Text(f"Cost of measuring: {PLAIN.measuring_cost(cost)}.")]


def _cost(record: Record) -> Estimate | None:
    return cost_of_run(
        [*record.windows, *record.arms], record.runs[-1].schedule.get("every_n_steps", 0) if record.runs else 0
    )


def _head(record: Record) -> str:
    run = record.runs[-1]
    parts = (run.framework, count(run.world_size, "rank"), run.backend, run.device, f"started {run.started_at}")
    return one_line(", ".join(part for part in parts if part))


def _figure_table(figures: dict[str, Estimate], pooled_from: str) -> Table:
    table = Table(title=f"Means over {pooled_from}", title_justify="left")
    table.add_column("")
    table.add_column("value", justify="right")
    table.add_column("95% interval", justify="right")
    table.add_column("steps", justify="right")
    for section in SUMMARY:
        for figure in section:
            estimate = figures.get(figure.name)
            if estimate is not None and figure.optional and not PLAIN.shows(estimate.value, figure.unit):
                continue
            if estimate is not None:
                value, interval = PLAIN.figure(figure, estimate.value), PLAIN.figure_interval(figure, estimate)
                table.add_row(row_label(figure), value, interval.removesuffix(" ms"), str(estimate.num_steps))
            elif not figure.optional:
                table.add_row(row_label(figure), "not measured", "", "", style="dim")
        table.add_section()
    return table


def _dimension_table(window: OverlapReport, counts: bool) -> Table:
    table = Table(
        title=f"Communication by dimension of parallelism, ms per step (window {window.window})", title_justify="left"
    )
    table.add_column("dimension")
    for column in ("messages", "MB", "in\nflight", "exposed", "its own\nslowdown", "slowdown\nof compute"):
        table.add_column(column, justify="right", no_wrap=True)
    of_compute = compute_slowdowns(window.dimension_pairs) if counts else {}
    for row in window.dimensions:
        slowdown = change(row.slowdown if counts else None)
        cells = (
            str(row.messages),
            *[PLAIN.by_size(value) for value in (row.bytes_in / 1e6, row.comm_ms, row.exposed_ms)],
        )
        table.add_row(name_cell(row.dimension), *cells, slowdown, change(of_compute.get(row.dimension)))
    return table


def _collective_table(window: OverlapReport) -> Table:
    title = f"Collectives of a step, on rank {window.first_rank} (window {window.window})"
    table = Table(title=title, title_justify="left")
    table.add_column("collective")
    table.add_column("group")
    for column in ("ranks", "messages", "MB", "alone, ms"):
        table.add_column(column, justify="right")
    for row in window.collectives:
        alone = "" if row.isolated_ms is None else PLAIN.by_size(row.isolated_ms)
        cells = (str(row.group_size), str(row.messages), PLAIN.by_size(row.bytes_in / 1e6), alone)
        table.add_row(name_cell(row.operator.strip("_")), name_cell(row.group), *cells)
    return table


def _notes(record: Record) -> list[RenderableType]:
    windows_with: dict[str, list[int]] = {}
    for window in record.windows:
        for problem in window.problems:
            windows_with.setdefault(problem, []).append(window.window)
    several = len(record.windows) > 1
    shown = windows_with
    if len(windows_with) > _MAX_PROBLEMS:  # the most frequent, of equals the newest, in the order of the first window
        by_number = sorted(windows_with, key=lambda problem: (len(windows_with[problem]), windows_with[problem][-1]))
        frequent = by_number[-_MAX_PROBLEMS:]
        shown = {problem: windows_with[problem] for problem in windows_with if problem in set(frequent)}
    lines = [
        f"- {one_line(problem)}" + (f" ({which(numbers)})" if several else "") for problem, numbers in shown.items()
    ]
    more = len(windows_with) - len(shown)
    if more:
        lines.append(f"- {more:,} more notes, no more frequent than these: overlap show --json has them all")
    others = left_out(record.summary)
    if others:
        why = "; ".join(f"{kind}: {numbers}" for kind, numbers in others)
        lines.insert(0, f"- {windows_that_count(record.summary)}; {why}")
    if record.unfinished is not None:
        lines.append(f"- window {record.unfinished.window} is unfinished: {record.unfinished.problems[0]}")
    if record.broken_lines:
        lines.append(f"- {unreadable(record)}")
    return [Text(), Text("Notes", style="bold"), Text("\n".join(lines))] if lines else []
