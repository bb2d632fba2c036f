"""How good the measurement is, and of what it is: windows, steps, residual overlap, ranks, cost; configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from overlap_callbacks.analysis import formatting
from overlap_callbacks.analysis.results.catalogue import RESIDUAL_LIMIT, RESIDUAL_LIMIT_GLOO
from overlap_callbacks.analysis.results.report import Estimate, OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.report.html import tables
from overlap_callbacks.report.html.elements import Block, Cell, Facts, Note, Section, Table, heads
from overlap_callbacks.report.html.run import Subject

# Rows of the tables of windows and of problems; the record holds all.
MAX_WINDOWS = 1000
MAX_PROBLEMS = 50


def quality(subject: Subject) -> Section:
    """What the figures rest on, and what makes them doubtful."""
    record = subject.record
    blocks: list[Block] = []
    if subject.measured:
        blocks.append(Facts("The measurement", tuple(_facts(subject))))
    problems = _problem_table(record.windows)
    if problems is not None:
        blocks.append(problems)
    if record.unfinished is not None:
        cut = formatting.clean("; ".join(record.unfinished.problems))
        blocks.append(Note(f"Window {record.unfinished.window} is unfinished: {cut}.", warning=True))
    if record.broken_lines:
        blocks.append(
            Note(f"{formatting.count(record.broken_lines, 'line')} of the record could not be read.", warning=True)
        )
    if subject.measured:
        blocks.append(tables.figure_table(subject.figures, subject.run.meanings))
    if record.windows:
        blocks.append(_window_table(subject))
    return Section("How good is the measurement?", _answer(subject), blocks)


def _answer(subject: Subject) -> str:
    windows, valid = subject.windows, subject.record.valid_windows
    if not windows:
        return "No window was completed."
    answer = f"{len(valid):,} of {formatting.count(len(windows), 'window')} {'counts' if len(valid) == 1 else 'count'}."
    cost = _cost(subject)
    if cost is not None:
        answer += f" Measuring took {_share(cost)} of training time."
    return answer


def _cost(subject: Subject) -> float | None:
    """Share of training time; each window's own is of the steps from one window's turn to the next's."""
    windows = [window for window in subject.windows if window.measurement_overhead is not None]
    if not windows:
        return None
    mean = sum(window.measurement_overhead or 0.0 for window in windows) / len(windows)
    every = subject.run.schedule.get("every_n_steps", 0)
    first = [window.first_step for window in windows]
    # Turns that were left out, e.g. for max_overhead, cost nothing.
    return mean * min(1.0, len(windows) * every / (max(first) - min(first) + every)) if every else mean


def _share(fraction: float) -> str:
    return f"{formatting.number(100 * fraction, 2)}%"


def _facts(subject: Subject) -> list[tuple[str, str]]:
    windows, valid = subject.windows, subject.record.valid_windows
    kept = set(map(id, valid))
    incomplete = [window for window in windows if not window.complete]
    invalid = [window for window in windows if window.complete and not window.valid]
    other = [window for window in windows if window.complete and window.valid and id(window) not in kept]
    facts = [("Windows that count", f"{len(valid):,} of {len(windows):,}")]
    if invalid:
        facts.append(("Not valid", _numbers(invalid)))
    if incomplete:
        facts.append(("Cut short", _numbers(incomplete)))
    if other:
        facts.append(("Of another kind (control, or not)", _numbers(other)))
    steps = subject.figures.get("speedup_vs_sequential") or subject.figures.get("e2e_overlapped_ms")
    if steps is not None:
        facts.append(("Counted steps", f"{steps.num_steps:,}"))
    facts.append(("Residual overlap in sequential steps", _residual(subject)))
    error = subject.figures.get("sequential_model_error")
    if error is not None:
        facts.append(
            (
                "Equation 5 against the measured sequential step",
                formatting.with_interval(error, "fraction", signed=True),
            )
        )
    facts.append(("Ranks heard", _ranks(windows)))
    cost = _cost(subject)
    facts.append(("Cost of measuring", "not known" if cost is None else f"{_share(cost)} of training time"))
    return facts


def _numbers(windows: Sequence[OverlapReport]) -> str:
    return f"{len(windows):,}: {formatting.ranges(window.window for window in windows)}"


def _residual(subject: Subject) -> str:
    values = [window.residual_overlap.value for window in subject.windows if window.residual_overlap is not None]
    if not values or subject.control:
        return "not measured" if not subject.control else "none to measure: both sides ran overlapped"
    limit = max(map(residual_limit, subject.windows))
    return f"{formatting.percent(max(values))} at most; limit {formatting.percent(limit)}"


def residual_limit(window: OverlapReport) -> float:
    """Residual overlap above which a window is not valid."""
    return RESIDUAL_LIMIT_GLOO if window.device == "cpu" or window.backend == "gloo" else RESIDUAL_LIMIT


def _ranks(windows: Sequence[OverlapReport]) -> str:
    if not windows:
        return "none yet: the window is unfinished"
    fewest = min(windows, key=lambda window: len(window.ranks) / max(1, window.world_size))
    if len(fewest.ranks) == fewest.world_size:
        return f"all {fewest.world_size:,}, in every window"
    lacking = sum(len(window.ranks) < window.world_size for window in windows)
    return (
        f"at least {len(fewest.ranks):,} of {fewest.world_size:,}; "
        f"{formatting.count(lacking, 'window')} of {len(windows):,} lack some"
    )


def _problem_table(windows: Sequence[OverlapReport]) -> Table | None:
    found: dict[str, list[int]] = {}
    for window in windows:
        for problem in window.problems:
            found.setdefault(problem, []).append(window.window)
    if not found:
        return None
    shown = sorted(found.items(), key=lambda item: -len(item[1]))[:MAX_PROBLEMS]
    rows = tuple(
        (tables.name_cell(problem), tables.number_cell(len(numbers), 0), Cell(formatting.ranges(numbers), min(numbers)))
        for problem, numbers in shown
    )
    caption = f"The {MAX_PROBLEMS} most frequent of {len(found):,}." if len(found) > len(shown) else ""
    return Table("What is missing or doubtful", heads("*What", "Windows", "Which"), rows, caption)


def _state(window: OverlapReport, control: bool) -> str:
    if not window.valid:
        return "not valid"
    if not window.complete:
        return "cut short"
    return "counts" if window.control is control else "control" if window.control else "no control"


def _window_table(subject: Subject) -> Table:
    windows = subject.windows
    shown = windows[-MAX_WINDOWS:]
    rows = []
    for window in shown:
        state = _state(window, subject.control)
        compares = state == "counts"
        rows.append(
            (
                tables.number_cell(window.window, 0),
                tables.number_cell(window.first_step, 0),
                Cell(state, state),
                tables.number_cell(_value(window.e2e_overlapped_ms)),
                tables.number_cell(_value(window.e2e_sequential_ms) if compares else None),
                tables.change_cell(_value(window.compute_slowdown) if compares else None),
                _percent_cell(_value(window.residual_overlap)),
                Cell(f"{len(window.ranks)} of {window.world_size}", len(window.ranks)),
            )
        )
    caption = (
        f"The last {MAX_WINDOWS:,} of {len(windows):,}; the record holds all." if len(shown) < len(windows) else ""
    )
    columns = heads(
        "Window", "First step", "*State", "Overlapped, ms", "Sequential, ms", "Slowdown", "Residual", "Ranks",
    )  # fmt: skip
    return Table("Every window", columns, tuple(rows), caption, folded=True)


def _value(figure: Estimate | None) -> float | None:
    return None if figure is None else figure.value


def _percent_cell(value: float | None) -> Cell:
    return tables.EMPTY if value is None else Cell(formatting.percent(value), value)


# -- of what


_LABELS = {
    "schema_version": "Schema of the record",
    "library_version": "overlap-callbacks",
    "torch_version": "PyTorch",
    "python_version": "Python",
    "started_at": "Started",
    "hostname": "Host of rank 0",
    "framework": "Framework",
    "world_size": "Ranks",
    "backend": "Backend",
    "device": "Device",
}
# These stand beside the figures that they are of.
_ELSEWHERE = frozenset({"units", "meanings", "schedule"})


def configuration(subject: Subject) -> Section:
    """Everything that the record says of the run."""
    blocks: list[Block] = [
        Facts("The run", run_facts(subject.run)),
        Facts("The schedule", _flat(subject.run.schedule)),
    ]
    starts = len(subject.record.runs)
    if starts > 1:
        blocks.append(Note(f"The job was started {starts} times; this is its last start."))
    blocks.append(Facts("The record", (("File", formatting.clean(subject.record.path)),)))
    return Section("Configuration", "", blocks)


def run_facts(run: RunInfo) -> tuple[tuple[str, str], ...]:
    """What is known of the run, all of it: fields that a later version adds too."""
    facts: list[tuple[str, str]] = []
    for name, value in msgspec.structs.asdict(run).items():
        if name in _ELSEWHERE:
            continue
        label = _LABELS.get(name, name.replace("_", " ").capitalize())
        if isinstance(value, dict):
            facts += [(f"{label}: {key}", shown) for key, shown in _flat(value)]
        else:
            facts.append((label, _shown(value)))
    return tuple(facts)


def _flat(values: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((formatting.clean(key, 80), _shown(value)) for key, value in values.items())


def _shown(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return formatting.DASH
    if isinstance(value, list | tuple):
        return formatting.clean(", ".join(map(str, value)))
    return formatting.clean({True: "yes", False: "no"}[value] if isinstance(value, bool) else value)
