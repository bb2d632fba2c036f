"""Quality of the measurement (windows, steps, residual overlap, ranks, cost), and its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from overlap_callbacks.analysis.formatting import DASH, PAGE, Style, bytes_in_words, count, page_text, ranges
from overlap_callbacks.analysis.headline import settled_in_words
from overlap_callbacks.analysis.measuring_cost import cost_of_run
from overlap_callbacks.analysis.race import race_sentence
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.race import RaceCheck, RaceVerdict
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.run_summary import CONTROL, COUNTS, CUT_SHORT, NO_CONTROL, NOT_VALID, RunSummary
from overlap_callbacks.analysis.validity import residual_comm_limit, residual_limit
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.record_lines import MAX_LINE_BYTES
from overlap_callbacks.report.views.elements import Block, Cell, Column, Facts, Note, Section, Table, table_of
from overlap_callbacks.report.views.tables import figure_table

# Maximum rows of the tables of windows and of problems; the record has all.
MAX_WINDOWS = 1000
MAX_PROBLEMS = 50
# Of the rows for windows: those for windows that do not count, however old.
MAX_DOUBTFUL = 300
# The figures in the table of windows.
_COLUMNS = ("e2e_overlapped_ms", "e2e_sequential_ms", "compute_slowdown", "residual_overlap")


QUALITY = "How good is the measurement?"


def quality(record: Record, lacking: Sequence[str] = ()) -> Section:
    """What the figures are based on, what makes them doubtful, and what was not measured."""
    blocks: list[Block] = []
    if record.summary.measured:
        blocks.append(Facts("The measurement", tuple(_facts(record))))
    problems = _problem_table(record.windows)
    race = race_of(record)
    if race is not None and race.verdict is not RaceVerdict.RACE:
        blocks.append(Note(page_text(race_sentence(race), 4000)))
    if problems is not None:
        blocks.append(problems)
    if record.unfinished is not None:
        cut = page_text("; ".join(record.unfinished.problems))
        blocks.append(Note(f"Window {record.unfinished.window} is unfinished: {cut}.", warning=True))
    if record.broken_lines:
        blocks.append(Note(f"{unreadable(record)}.", warning=True))
    if lacking:
        blocks.append(Note(" ".join(lacking)))
    if record.summary.measured:
        blocks.append(figure_table(record.figures, record.info.meanings))
    if record.windows:
        blocks.append(_window_table(record))
    return Section(QUALITY, _answer(record), blocks)


def _answer(record: Record) -> str:
    arms = len(record.arms)
    if not record.windows and not arms:
        return "No window was completed."
    answer = f"{windows_that_count(record.summary)}." if record.windows else f"{count(arms, 'window')} of arms."
    cost = cost_in_words(record, PAGE)
    if cost:
        answer += f" Cost of measuring: {cost}."
    return answer


def _facts(record: Record) -> list[tuple[str, str]]:
    windows = record.windows
    facts = [("Windows that count", f"{len(record.valid_windows):,} of {len(windows):,}")]
    facts += [(kind.capitalize(), numbers) for kind, numbers in left_out(record.summary)]
    steps = record.figures.get("speedup_vs_sequential") or record.figures.get("e2e_overlapped_ms")
    if steps is not None:
        facts.append(("Counted steps", f"{steps.num_steps:,}"))
    facts.append(("Residual overlap in sequential steps", _residual(record)))
    error = record.figures.get("sequential_model_error")
    if error is not None:
        label = "Equation 5 against the measured sequential step"
        facts.append((label, PAGE.with_interval(error, "fraction", signed=True)))
    settled = record.summary.settled()
    if settled is not None and not settled.headlined and not record.control:
        facts.append(("Change along a block", settled_in_words(settled)))
    facts.append(("Ranks heard", _ranks(windows)))
    facts.append(("Cost of measuring", cost_in_words(record, PAGE) or "not known"))
    return facts


def _residual(record: Record) -> str:
    values = [window.residual_overlap.value for window in record.windows if window.residual_overlap is not None]
    if not values or record.control:
        return "not measured" if not record.control else "none to measure: both sides ran overlapped"
    limit = max(residual_limit(window.device, window.backend) for window in record.windows)
    text = f"at most {PAGE.percent(max(values))} of compute, limit {PAGE.percent(limit)}"
    of_comm = [w.residual_comm_overlap.value for w in record.windows if w.residual_comm_overlap is not None]
    if of_comm:
        limit = max(residual_comm_limit(window.device, window.backend) for window in record.windows)
        text += f"; at most {PAGE.percent(max(of_comm))} of communication, limit {PAGE.percent(limit)}"
    return text


def _ranks(windows: Sequence[OverlapReport]) -> str:
    if not windows:
        return "none yet: the window is unfinished"
    fewest = min(windows, key=lambda window: window.num_reporting / max(1, window.world_size))
    if fewest.num_reporting == fewest.world_size:
        return f"all {fewest.world_size:,}, in every window"
    lacking = sum(window.num_reporting < window.world_size for window in windows)
    return (
        f"at least {fewest.num_reporting:,} of {fewest.world_size:,}; "
        f"{lacking:,} of {count(len(windows), 'window')} {'lacks' if lacking == 1 else 'lack'} some"
    )


def _problem_table(windows: Sequence[OverlapReport]) -> Table | None:
    windows_with: dict[str, list[int]] = {}
    for window in windows:
        for problem in window.problems:
            windows_with.setdefault(problem, []).append(window.window)
    if not windows_with:
        return None
    # Most frequent first; of equally frequent ones, newest first.
    shown = sorted(windows_with.items(), key=lambda item: (-len(item[1]), -item[1][-1]))[:MAX_PROBLEMS]
    return table_of(
        "What is missing or doubtful",
        shown,
        Column("*What", lambda row: row[0]),
        Column("Windows", lambda row: len(row[1]), "whole"),
        Column("Which", lambda row: Cell(ranges(row[1]), min(row[1]))),
        caption=f"The {MAX_PROBLEMS} most frequent of {len(windows_with):,}." if len(windows_with) > len(shown) else "",
    )


def _window_table(record: Record) -> Table:
    shown = _listed(record)
    caption = ""
    if len(shown) < len(record.windows):
        caption = (
            f"{len(shown):,} of {len(record.windows):,}: the first and the last ones, those with the highest and the "
            f"lowest of each figure, and the last {MAX_DOUBTFUL:,} that do not count. The record holds all."
        )

    def compared(window: OverlapReport, name: str) -> Estimate | None:
        """Only for windows that count: the others lack sequential steps to compare with."""
        counts = record.summary.state_of(window) == COUNTS and not record.control
        return getattr(window, name) if counts else None

    return table_of(
        "Every window",
        shown,
        Column("Window", lambda window: window.window, "whole"),
        Column("First step", lambda window: window.first_step, "whole"),
        Column("*State", record.summary.state_of),
        Column("Overlapped, ms", lambda window: window.e2e_overlapped_ms),
        Column("Sequential, ms", lambda window: compared(window, "e2e_sequential_ms")),
        Column("Compute slowdown", lambda window: compared(window, "compute_slowdown"), "change"),
        Column("Residual overlap", lambda window: None if window.control else window.residual_overlap, "percent"),
        Column("Ranks", lambda window: Cell(f"{window.num_reporting} of {window.world_size}", window.num_reporting)),
        caption=caption,
        folded=True,
    )


def _listed(record: Record) -> list[OverlapReport]:
    """The windows worth listing of very many: the first, the extremes, the doubtful, the last."""
    windows = record.windows
    if len(windows) <= MAX_WINDOWS:
        return windows
    kept = {0}
    states = list(map(record.summary.state_of, windows))
    for name in _COLUMNS:
        values = {i: found.value for i, w in enumerate(windows) if (found := getattr(w, name)) is not None}
        of_counting = {i: value for i, value in values.items() if states[i] == COUNTS}
        for among in (values, of_counting):
            if among:
                kept |= {min(among, key=among.__getitem__), max(among, key=among.__getitem__)}
    kept.update([i for i, state in enumerate(states) if state != COUNTS][-MAX_DOUBTFUL:])
    for i in range(len(windows) - 1, -1, -1):
        if len(kept) >= MAX_WINDOWS:
            break
        kept.add(i)
    return [windows[i] for i in sorted(kept)]


# -- the configuration


STARTED, SCHEMA, SETTING, HOST = "Started", "Schema of the record", "Setting", "Host of rank 0"
_LABELS = {
    "schema_version": SCHEMA,
    "library_version": "overlap-callbacks",
    "torch_version": "PyTorch",
    "python_version": "Python",
    "started_at": STARTED,
    "hostname": HOST,
    "framework": "Framework",
    "world_size": "Ranks",
    "backend": "Backend",
    "device": "Device",
    "settings": SETTING,
}
# Shown next to the figures that they describe, or in their own section.
_SHOWN_ELSEWHERE = frozenset({"units", "meanings", "schedule", "environment"})


def configuration(record: Record) -> Section:
    """All facts of the run in the record."""
    blocks: list[Block] = [
        Facts("The run", _own_facts(record)),
        Facts("The schedule", _flat(record.info.schedule)),
    ]
    starts = len(record.runs)
    if starts > 1:
        blocks.append(Note(f"The job was started {starts} times; this is its last start."))
    blocks.append(Facts("The record", (("File", page_text(record.path)),)))
    return Section("Configuration", "", blocks)


def _own_facts(record: Record) -> tuple[tuple[str, str], ...]:
    """The facts of the run, without those in the environment section."""
    told = {_LABELS["torch_version"], _LABELS["device"]} if record.environment is not None else set()
    return tuple((label, shown) for label, shown in run_facts(record.info) if label not in told)


def run_facts(run: RunInfo) -> tuple[tuple[str, str], ...]:
    """The facts of the run, including fields that a later version may add."""
    facts: list[tuple[str, str]] = []
    known = msgspec.structs.asdict(run)
    known["framework"] = run.framework.removesuffix(f" {run.torch_version}")  # PyTorch has its own row
    told = known.pop("workload")
    if told is not None:
        known |= {name: value for name, value in msgspec.structs.asdict(told).items() if value is not None}
    for name, value in known.items():
        if name in _SHOWN_ELSEWHERE:
            continue
        label = _LABELS.get(name, name.replace("_", " ").capitalize())
        if isinstance(value, dict):
            facts += [(f"{label}: {key}", shown) for key, shown in _flat(value)]
        else:
            facts.append((label, _shown(value)))
    return tuple(facts)


def _flat(values: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((page_text(key, 80), _shown(_in_words(key, value))) for key, value in values.items())


def _in_words(key: str, value: Any) -> Any:
    return bytes_in_words(value) if key.endswith("_bytes") and type(value) is int else value


def _shown(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return DASH
    if isinstance(value, list | tuple):
        return page_text(", ".join(map(str, value)))
    return page_text({True: "yes", False: "no"}[value] if isinstance(value, bool) else value)


# -- which windows count


_KINDS = (
    ("not valid", frozenset({NOT_VALID})),
    ("cut short", frozenset({CUT_SHORT})),
    ("of another kind (control, or not)", frozenset({CONTROL, NO_CONTROL})),
)


def windows_that_count(summary: RunSummary) -> str:
    """E.g. ``1 of 2 windows counts; cut short: 1 (window 1)``, ``3 of 3 windows count``."""
    counting, measured = summary.states()[COUNTS], len(summary.windows)
    why = "".join([f"; {kind}: {numbers}" for kind, numbers in left_out(summary)])
    return f"{counting:,} of {count(measured, 'window')} {'counts' if 1 in (counting, measured) else 'count'}{why}"


def left_out(summary: RunSummary) -> list[tuple[str, str]]:
    """Why windows do not count, and which: e.g. ``("cut short", "2 (windows 1, 4)")``."""
    found = []
    for kind, states in _KINDS:
        numbers = [window.window for window in summary.windows if summary.state_of(window) in states]
        if numbers:
            found.append((kind, f"{len(numbers):,} ({which(numbers)})"))
    return found


def unreadable(record: Record) -> str:
    """How many lines of a record could not be read; call it only if there are any."""
    told = f"{count(record.broken_lines, 'line')} of the record could not be read"
    if record.long_lines:
        told += f"; {record.long_lines:,} of them longer than {MAX_LINE_BYTES // 2**20} MiB, so no line of ours"
    return told


def which(numbers: list[int]) -> str:
    """E.g. ``window 3``, ``windows 1, 4``."""
    return f"{'window' if len(set(numbers)) == 1 else 'windows'} {ranges(numbers)}"


def cost_of(record: Record) -> Estimate | None:
    """By how much measuring within the budget lengthened training; None if no window has it."""
    every_n_steps = record.runs[-1].schedule.get("every_n_steps", 0) if record.runs else 0
    return cost_of_run([window for window in (*record.windows, *record.arms) if not window.quick], every_n_steps)


def quick_cost_of(record: Record) -> Estimate | None:
    """By how much quick windows lengthened training while they came back to back; None if there are none."""
    return cost_of_run([window for window in (*record.windows, *record.arms) if window.quick], 0)


def cost_in_words(record: Record, style: Style) -> str:
    """What measuring costs within the budget, and what quick windows cost; empty if neither is known."""
    cost, quick = cost_of(record), quick_cost_of(record)
    said = [] if cost is None else [style.measuring_cost(cost)]
    if quick is not None:
        said.append(f"{style.measuring_cost(quick)} while quick windows ran, outside the budget")
    return "; ".join(said)


def race_of(record: Record) -> RaceCheck | None:
    """The race check to show: one that found a race, otherwise the last; None if no step was repeated."""
    checks = [window.race for window in record.windows if window.race is not None]
    races = [check for check in checks if check.verdict is RaceVerdict.RACE]
    return races[-1] if races else checks[-1] if checks else None
