"""The tables of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from overlap_callbacks.analysis.formatting import PAGE, PLAIN, column_decimals, count, page_text, short_kernel_name
from overlap_callbacks.analysis.results.catalogue import FIGURES, SUMMARY
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.kernel_times import ALONE, RAN_ALONE, KernelTime, PairTime, beside_in_words
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.report_parts import compute_slowdowns
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.report.views.elements import Cell, Head, Table, heads

EMPTY = Cell("")


def name_cell(name: str, shown: str | None = None) -> Cell:
    """A cell with a name of the record. A long one is cut, and shown whole on hovering."""
    whole = page_text(name, 2000)
    short = page_text(name if shown is None else shown)
    return Cell(short, short.lower(), whole if whole != short else "")


def number_cell(value: float | None, decimals: int | None = None) -> Cell:
    """A number with so many decimals, by its size unless told; empty where there is none."""
    if value is None:
        return EMPTY
    return Cell(PAGE.by_size(value) if decimals is None else PAGE.number(value, decimals), value)


def change_cell(value: float | None) -> Cell:
    """A relative change in percent."""
    return EMPTY if value is None else Cell(PAGE.percent(value, signed=True), value)


def without_empty_columns(title: str, columns: Sequence[Head], rows: Sequence[tuple[Cell, ...]], caption: str) -> Table:
    """A table without the columns in which no cell has a value to sort by."""
    kept = [place for place in range(len(columns)) if any(row[place].sort is not None for row in rows)]
    return Table(title, tuple(columns), tuple(rows), caption).with_columns(kept)


def kernel_tables(window: OverlapReport) -> list[Table]:
    """Compute kernels, and folded those that communicate; what loses the most time comes first."""
    decimals = column_decimals([kernel.overlapped_ms for kernel in window.kernels])
    made = []
    for communication, title in (
        (False, "Compute kernels that lose most time under overlap"),
        (True, "Communication kernels, overlapped and sequential"),
    ):
        rows = []
        of_kind = [kernel for kernel in window.kernels if kernel.communication is communication]
        shown, num_left_out = with_losses(of_kind, decimals)
        for kernel in shown:
            rows.append(
                (
                    name_cell(kernel.name, short_kernel_name(kernel.name)),
                    change_cell(kernel.slowdown),
                    number_cell(kernel.lost_ms, decimals),
                    number_cell(kernel.overlapped_ms, decimals),
                    number_cell(kernel.sequential_ms, decimals),
                    number_cell(kernel.overlapped_calls, 0 if kernel.overlapped_calls % 1 == 0 else 1),
                )
            )
        if rows:
            note = WITH_WAITING if communication else together(of_kind, window.window, decimals)
            caption = (
                f"Per step, means over the ranks, window {window.window}. Slowdown is of the time per call. {note}"
                f"{left_out_in_words(num_left_out, 'kernel', decimals)}"
            )
            columns = heads("~Kernel", "Slowdown", "Lost, ms", "Overlapped, ms", "Sequential, ms", "Calls")
            made.append(Table(title, columns, tuple(rows), caption, folded=communication))
    return made


def pair_tables(pairs: Sequence[PairTime], basis: str) -> list[Table]:
    """Families of compute kernels beside collectives, and folded the other way round.

    Args:
        pairs: of a window, or of two traces.
        basis: what their times are of, as a sentence.
    """
    made = []
    for communication, title, note in (
        (False, PAIRS_TITLE, f"{OF_SHARES} {ran_alone(pairs)}".rstrip()),
        (True, f"{PAIRS_TITLE}, of communication", f"{OF_SHARES} {WITH_WAITING}"),
    ):
        of_kind = [pair for pair in pairs if pair.communication is communication]
        decimals = column_decimals([pair.time_ms for pair in of_kind])
        shown, num_left_out = with_losses(of_kind, decimals)
        if shown:
            caption = f"{basis} {note}{left_out_in_words(num_left_out, 'row', decimals)}"
            made.append(Table(title, _PAIR_HEADS, _pair_rows(shown, decimals), caption, folded=communication))
    return made


def dimension_pair_table(window: OverlapReport) -> Table:
    """Families of compute kernels beside the communication of each dimension of parallelism."""
    decimals = column_decimals([pair.time_ms for pair in window.dimension_pairs])
    shown, num_left_out = with_losses(window.dimension_pairs, decimals)
    return Table(
        "Slowdown by dimension of parallelism in flight",
        _PAIR_HEADS,
        _pair_rows(shown, decimals),
        f"Per step, means over the ranks, window {window.window}. Kernels that ran beside no communication are left "
        f"out.{left_out_in_words(num_left_out, 'row', decimals)}",
        folded=True,
    )


_PAIR_HEADS = heads("~Kernels", "~Beside", "Slowdown", "During", "Lost, ms", "Time, ms", "Alone, ms")


def _pair_rows(pairs: Sequence[PairTime], decimals: int) -> tuple[tuple[Cell, ...], ...]:
    rows = []
    for pair in pairs:
        rows.append(
            (
                name_cell(pair.kernel_family),
                name_cell(beside_in_words(pair.concurrent_with)),
                change_cell(pair.slowdown),
                change_cell(pair.slowdown_during),
                number_cell(pair.lost_ms, decimals),
                number_cell(pair.time_ms, decimals),
                number_cell(pair.alone_ms, decimals),
            )
        )
    return tuple(rows)


def dimension_table(window: OverlapReport) -> Table:
    """Communication by dimension of parallelism."""
    rows = []
    of_compute = compute_slowdowns(window.dimension_pairs) if window.valid else {}
    for row in window.dimensions:
        rows.append(
            (
                name_cell(row.dimension),
                number_cell(row.messages, 0),
                number_cell(row.bytes_in / 1e6),
                number_cell(row.comm_ms),
                number_cell(row.exposed_ms),
                change_cell(row.slowdown if window.valid else None),
                change_cell(of_compute.get(row.dimension)),
            )
        )
    return Table(
        "Communication by dimension of parallelism, figures",
        heads(
            "~Dimension",
            "Messages",
            "MB",
            "In flight, ms",
            "Exposed, ms",
            "Its own slowdown",
            "Slowdown of compute",
        ),
        tuple(rows),
        "Per overlapped step, means over the ranks that have the dimension. Its own slowdown is that of its "
        "communication kernels. The slowdown of compute is that of the compute kernels that ran beside them.",
        folded=True,
    )


def collective_table(window: OverlapReport) -> Table:
    """The collectives of the recorded step."""
    rows = []
    for row in window.collectives:
        rows.append(
            (
                name_cell(row.operator.strip("_")),
                name_cell(_group(row)),
                name_cell(row.backend),
                number_cell(row.group_size, 0),
                number_cell(row.messages, 0),
                number_cell(row.bytes_in / 1e6),
                number_cell(row.isolated_ms),
                number_cell(row.transfer_ms),
                number_cell(_gb_s(row)),
            )
        )
    return Table(
        "Collectives of a step",
        heads("~Collective", "~Group", "~Backend", "Ranks", "Messages", "MB", "Alone, ms", "Transfer, ms", "GB/s"),
        tuple(rows),
        f"On rank {window.first_rank}, window {window.window}. MB counts the bytes of the tensors that a collective "
        "reads. Alone is its time in sequential steps, from issue to end. Transfer is the shortest time of any rank: "
        "ranks that come early also wait for the last one. GB/s divides the bytes read or written, whichever are more, "
        "by the transfer.",
        folded=True,
    )


def _group(row: CollectiveTime) -> str:
    """The dimension of parallelism, and the group where that has another name."""
    if not row.dimension or row.dimension == row.group:
        return row.group
    return f"{row.dimension} ({row.group})"


def _gb_s(row: CollectiveTime) -> float | None:
    # NCCL's tests count bandwidth by the whole: for all-gathers and reduce-scatters, that is the larger side.
    if row.transfer is None or not row.transfer[1]:
        return None
    return row.transfer[0] / row.transfer[1] / 1e6


def row_label(figure: Figure) -> str:
    """What to call a figure in a table of ``SUMMARY``: a part is indented below its whole."""
    return f"  {figure.part_label}" if figure.part_label else figure.label


def summary_table(figures: dict[str, Estimate], basis: str) -> Table:
    """The figures of ``SUMMARY``, parts below their whole.

    Args:
        figures: of a run.
        basis: what they are means over.
    """
    rows = []
    for figure in (figure for section in SUMMARY for figure in section):
        label, estimate = row_label(figure), figures.get(figure.name)
        if estimate is None:
            rows += [] if figure.optional else [(Cell(label), Cell("not measured"), EMPTY, EMPTY)]
        elif not figure.optional or PAGE.shows(estimate.value, figure.unit):
            value, bounds = PAGE.figure(figure, estimate.value), PAGE.figure_interval(figure, estimate)
            rows.append((Cell(label), Cell(value), Cell(bounds), number_cell(estimate.num_steps, 0)))
    return Table(f"Means over {basis}", heads("*", "Value", "95% interval", "Steps"), tuple(rows), sorts=False)


def figure_table(figures: dict[str, Estimate], meanings: dict[str, str]) -> Table:
    """Every figure, with its definition."""
    rows = []
    for figure in FIGURES:
        estimate = figures.get(figure.name)
        label, meaning = Cell(figure.label), Cell(page_text(meanings.get(figure.name, figure.meaning)))
        if estimate is None:
            if not figure.optional:
                rows.append((label, Cell("not measured"), EMPTY, EMPTY, meaning))
            continue
        value, bounds = PAGE.figure(figure, estimate.value), PAGE.figure_interval(figure, estimate)
        rows.append((label, Cell(value), Cell(bounds), number_cell(estimate.num_steps, 0), meaning))
    return Table(
        "All figures",
        heads("*Figure", "Value", "95% interval", "Steps", "*Definition"),
        tuple(rows),
        folded=True,
        sorts=False,
    )


# -- what is shown of slowdowns


_Row = TypeVar("_Row", KernelTime, PairTime)

PAIRS_TITLE = "Slowdown by concurrent kernel"
OF_SHARES = "A kernel that ran beside several counts towards each by the share of time that it had of each."
WITH_WAITING = "A collective's time includes waiting for other ranks."


def together(kernels: Sequence[KernelTime], window: int, decimals: int) -> str:
    """What the compute kernels of a window add up to, and why that is not the run's figure.

    Args:
        kernels: all that compute.
        window: their window's number.
        decimals: with which times are shown.
    """
    lost, overlapped, sequential = (
        PLAIN.quantity(sum([getattr(kernel, name) for kernel in kernels]), "ms", decimals=decimals)
        for name in ("lost_ms", "overlapped_ms", "sequential_ms")
    )
    return (
        f"All of them lose {lost}: T_comp of window {window} is {overlapped} overlapped and {sequential} alone. The "
        "run's T_comp is the mean of all its windows."
    )


def ran_alone(pairs: Sequence[PairTime]) -> str:
    """A sentence where kernels are slower that ran beside nothing; else empty."""
    if not any(pair.concurrent_with == ALONE and pair.lost_ms > 0 for pair in pairs):
        return ""
    return (
        f'"{RAN_ALONE[0].upper()}{RAN_ALONE[1:]}" are kernels that ran beside nothing in overlapped steps either. If '
        "they are slower all the same, what ran beside them does not explain it."
    )


def with_losses(rows: Sequence[_Row], decimals: int) -> tuple[list[_Row], int]:
    """The rows whose lost time is not shown as zero, and how many are left out.

    Args:
        rows: of a table.
        decimals: with which times are shown.
    """
    shown = [row for row in rows if abs(row.lost_ms) >= 0.5 * 10**-decimals]
    return shown, len(rows) - len(shown)


def left_out_in_words(number: int, noun: str, decimals: int) -> str:
    """How many rows are left out, as a sentence; empty for none."""
    if not number:
        return ""
    verb, is_or_are = ("loses", "is") if number == 1 else ("lose", "are")
    return f" {count(number, noun)} that {verb} less than {0.5 * 10**-decimals:g} ms {is_or_are} left out."
