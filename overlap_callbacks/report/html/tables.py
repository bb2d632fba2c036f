"""The tables of the page."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis import formatting
from overlap_callbacks.analysis.results.catalogue import FIGURES
from overlap_callbacks.analysis.results.report import Estimate, OverlapReport
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.report import terminal
from overlap_callbacks.report.html.elements import Cell, Table, heads

UNITS = {figure.name: figure.unit for figure in FIGURES}

# Where the terminal's labels lean on the rows above them, or has none.
_LABELS = {
    "hidden_comm_ms": "communication hidden behind compute",
    "exposed_comm_ms": "exposed communication",
    "sequential_model_error": "model of equation 5 against the measured step",
    "compute_ms": "compute kernel time, overlapped",
    "compute_isolated_ms": "compute kernel time, sequential",
    "compute_busy_ms": "compute busy, overlapped",
    "compute_busy_isolated_ms": "compute busy, sequential",
    "comm_isolated_ms": "communication in flight, sequential",
    "hidden_comm_fraction": "share of communication that is hidden",
    "comm_ratio": "communication in flight, share of a step",
}

EMPTY = Cell("")


def label(name: str) -> str:
    """What to call a figure."""
    return _LABELS.get(name) or terminal.LABELS.get(name, name)


def name_cell(name: str, shown: str | None = None) -> Cell:
    """A cell with a name of the record, shortened for the eye; the whole of it on hovering."""
    whole = formatting.clean(name, 2000)
    short = formatting.clean(name if shown is None else shown)
    return Cell(short, short.lower(), whole if whole != short else "")


def number_cell(value: float | None, digits: int = 2) -> Cell:
    """A number of so many decimals; empty where there is none."""
    return EMPTY if value is None else Cell(formatting.number(value, digits), value)


def change_cell(value: float | None) -> Cell:
    """A relative change in percent."""
    return EMPTY if value is None else Cell(formatting.percent(value, signed=True), value)


def kernel_table(window: OverlapReport) -> Table:
    """Compute and communication kernels, those that lose most first."""
    digits = _digits([kernel.overlapped_ms for kernel in window.kernels])
    rows = []
    for kernel in window.kernels:
        rows.append(
            (
                name_cell(kernel.name, str(terminal.kernel_name(kernel.name))),
                _kind(kernel.communication),
                change_cell(kernel.slowdown),
                number_cell(kernel.lost_ms, digits),
                number_cell(kernel.overlapped_ms, digits),
                number_cell(kernel.sequential_ms, digits),
                number_cell(kernel.overlapped_calls, 0 if kernel.overlapped_calls % 1 == 0 else 1),
            )
        )
    return Table(
        "Kernels that lose most time under overlap",
        heads("*Kernel", "*Kind", "Slowdown", "Lost, ms", "Overlapped, ms", "Sequential, ms", "Calls"),
        tuple(rows),
        f"Per step, means over the ranks, window {window.window}. Slowdown is of the time per call.",
    )


def pair_table(window: OverlapReport) -> Table:
    """Kernel families beside collectives and the other way round."""
    digits = _digits([pair.time_ms for pair in window.pairs])
    rows = []
    for pair in window.pairs:
        rows.append(
            (
                name_cell(pair.victim),
                _kind(pair.communication),
                name_cell(pair.beside),
                change_cell(pair.slowdown),
                number_cell(pair.lost_ms, digits),
                number_cell(pair.time_ms, digits),
                number_cell(pair.alone_ms, digits),
            )
        )
    return Table(
        "What runs beside what, and what it costs",
        heads("*Kernels", "*Kind", "*Beside", "Slowdown", "Lost, ms", "Time, ms", "Alone, ms"),
        tuple(rows),
        f"Per step, means over the ranks, window {window.window}. A kernel that ran beside several counts towards each "
        "by the share of time that it had of each.",
    )


def _kind(communication: bool) -> Cell:
    word = "communication" if communication else "compute"
    return Cell(word, word)


def dimension_table(window: OverlapReport) -> Table:
    """Communication by dimension of parallelism."""
    rows = []
    for row in window.dimensions:
        rows.append(
            (
                name_cell(row.dimension),
                number_cell(row.messages, 0),
                number_cell(row.bytes_in / 1e6),
                number_cell(row.comm_ms),
                number_cell(row.exposed_ms),
                change_cell(row.slowdown if window.valid else None),
            )
        )
    return Table(
        "Communication by dimension of parallelism, figures",
        heads("*Dimension", "Messages", "MB", "In flight, ms", "Exposed, ms", "Slowdown"),
        tuple(rows),
        "Per overlapped step, means over the ranks that have the dimension.",
    )


def collective_table(window: OverlapReport) -> Table:
    """The collectives of the recorded step."""
    rows = []
    for row in window.collectives:
        rows.append(
            (
                name_cell(row.operator.strip("_")),
                name_cell(row.dimension or row.group, row.dimension or row.group),
                name_cell(row.backend),
                number_cell(row.group_size, 0),
                number_cell(row.messages, 0),
                number_cell(row.bytes_in / 1e6),
                number_cell(row.isolated_ms),
                number_cell(_gb_s(row)),
            )
        )
    return Table(
        "Collectives of a step",
        heads("*Collective", "*Group", "*Backend", "Ranks", "Messages", "MB", "Alone, ms", "GB/s alone"),
        tuple(rows),
        f"On rank {window.ranks[0]}, window {window.window}. MB of the tensors read; alone is the time from issue to "
        "end in sequential steps; GB/s is the larger of the tensors read and written over that time.",
    )


def _gb_s(row: CollectiveTime) -> float | None:
    # Of all-gathers and reduce-scatters the larger side is the whole: the size by which NCCL's tests count bandwidth.
    return max(row.bytes_in, row.bytes_out) / row.isolated_ms / 1e6 if row.isolated_ms else None


def figure_table(figures: dict[str, Estimate], meanings: dict[str, str]) -> Table:
    """Every figure, with its definition."""
    rows = []
    for figure in FIGURES:
        found = figures.get(figure.name)
        meaning = formatting.clean(meanings.get(figure.name, figure.meaning))
        signed = figure.name in terminal.CHANGES
        if found is None:
            rows.append((Cell(label(figure.name)), Cell("not measured"), EMPTY, EMPTY, Cell(meaning)))
            continue
        shown = formatting.quantity(found.value, figure.unit, signed=signed)
        bounds = formatting.interval(found, figure.unit, signed=signed)
        steps = number_cell(found.num_steps, 0)
        rows.append((Cell(label(figure.name)), Cell(shown), Cell(bounds), steps, Cell(meaning)))
    return Table(
        "All figures",
        heads("*Figure", "Value", "95 % interval", "Steps", "*Definition"),
        tuple(rows),
        folded=True,
        sorts=False,
    )


def _digits(times_ms: Sequence[float]) -> int:
    """Decimals for a column: more where all of it is short."""
    return 2 if max(times_ms, default=0.0) >= 1 else 4
