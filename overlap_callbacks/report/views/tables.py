"""Tables of figures, of kernels' losses, and of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from overlap_callbacks.analysis.exposure import size_in_words
from overlap_callbacks.analysis.formatting import PAGE, PLAIN, column_decimals, count, short_kernel_name
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.analysis.results.catalogue import FIGURES, SUMMARY
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.kernel_times import ALONE, RAN_ALONE, KernelTime, PairTime, beside_in_words
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.report_parts import compute_slowdowns
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.report.views.elements import Cell, Column, Table, name_cell, table_of


def kernel_tables(window: OverlapReport) -> list[Table]:
    """Compute kernels, and folded those that communicate; largest loss first."""
    decimals = column_decimals([kernel.overlapped_ms for kernel in window.kernels])
    made = []
    for communication, title in (
        (False, "Compute kernels that lose most time under overlap"),
        (True, "Communication kernels, overlapped and sequential"),
    ):
        of_kind = [kernel for kernel in window.kernels if kernel.communication is communication]
        shown, num_left_out = with_losses(of_kind, decimals)
        note = WITH_WAITING if communication else together(of_kind, window.window, decimals)
        caption = (
            f"Per step, means over the ranks, window {window.window}. Slowdown is of the time per call. {note}"
            f"{left_out_in_words(num_left_out, 'kernel', decimals)}"
        )
        made += [loss_table(title, "~Kernel", shown, decimals, caption, folded=communication)] if shown else []
    return made


def loss_table(
    title: str,
    head: str,
    rows: Sequence[KernelTime],
    decimals: int,
    caption: str = "",
    *,
    folded: bool = False,
    first: bool = False,
) -> Table:
    """What overlap costs kernels, or the ranges that launched them."""
    return table_of(
        title,
        rows,
        kernel_column(head),
        Column("Slowdown", lambda row: row.slowdown, "change"),
        Column("Lost, ms", lambda row: row.lost_ms, decimals),
        Column("Overlapped, ms", lambda row: row.overlapped_ms, decimals),
        Column("Sequential, ms", lambda row: row.sequential_ms, decimals),
        Column("Calls", lambda row: row.overlapped_calls, int(any([row.overlapped_calls % 1 > 0 for row in rows]))),
        caption=caption,
        folded=folded,
        first=first,
    )


def kernel_column(head: str = "~Kernel") -> Column[Any]:
    """The names of kernels without the parts that all of them share."""
    return Column(head, lambda row: name_cell(row.name, short_kernel_name(row.name)))


def pair_tables(pairs: Sequence[PairTime], basis: str, first: bool = False) -> list[Table]:
    """Families of compute kernels during collectives, and folded the reverse.

    ``basis``: a sentence on what their times refer to.
    """
    made = []
    for communication, title, note in (
        (False, PAIRS_TITLE, f"{OF_SHARES} {ran_alone(pairs)}".rstrip()),
        (True, f"{PAIRS_TITLE}, of communication", f"{OF_SHARES} {WITH_WAITING}"),
    ):
        of_kind = [pair for pair in pairs if pair.communication is communication]
        table = pair_table(title, of_kind, f"{basis} {note}", folded=communication, first=first)
        made += [table] if table.rows else []
    return made


def dimension_pair_table(window: OverlapReport) -> Table:
    """Families of compute kernels during the communication of each dimension of parallelism."""
    caption = (
        f"Per step, means over the ranks, window {window.window}. Kernels that ran during no communication are left "
        "out."
    )
    return pair_table("Slowdown by dimension of parallelism in flight", window.dimension_pairs, caption, folded=True)


def pair_table(title: str, pairs: Sequence[PairTime], caption: str, *, folded: bool, first: bool = False) -> Table:
    """Pairs, without those that lose too little to be shown."""
    decimals = column_decimals([pair.time_ms for pair in pairs])
    shown, num_left_out = with_losses(pairs, decimals)
    return table_of(
        title,
        shown,
        Column("~Kernels", lambda pair: pair.kernel_family),
        Column("~During", lambda pair: beside_in_words(pair.concurrent_with)),
        Column("Slowdown", lambda pair: pair.slowdown, "change"),
        Column("While both run", lambda pair: pair.slowdown_during, "change"),
        Column("Lost, ms", lambda pair: pair.lost_ms, decimals),
        Column("Time, ms", lambda pair: pair.time_ms, decimals),
        Column("Alone, ms", lambda pair: pair.alone_ms, decimals),
        caption=f"{caption}{left_out_in_words(num_left_out, 'row', decimals)}",
        folded=folded,
        first=first,
    )


def dimension_table(window: OverlapReport) -> Table:
    of_compute = compute_slowdowns(window.dimension_pairs) if window.valid else {}
    return table_of(
        "Dimensions of parallelism",
        window.dimensions,
        Column("~Dimension", lambda row: row.dimension),
        Column("Messages", lambda row: row.messages, "whole"),
        Column("MiB", lambda row: row.bytes_in / 2**20),
        Column("In flight, ms", lambda row: row.comm_ms),
        Column("Exposed, ms", lambda row: row.exposed_ms),
        Column("Its own slowdown", lambda row: row.slowdown if window.valid else None, "change"),
        Column("Slowdown of compute", lambda row: of_compute.get(row.dimension), "change"),
        caption="Per overlapped step, means over the ranks that have the dimension. Its own slowdown is that of its "
        "communication kernels. The slowdown of compute is that of the compute kernels that ran during it.",
        folded=True,
    )


def exposure_tables(
    found: Exposure | None, basis: str = "", *, folded: bool = False, first: bool = False, few: int = Table.few
) -> list[Table]:
    """Which collectives are exposed, by size and by place in the step; ``basis`` says what the times are of."""
    if found is None:
        return []
    several, steps = found.num_ranks > 1, found.num_steps
    over = f"Over {count(steps, 'step')}" if steps else "In the whole file"
    named = table_of(
        "Collectives by name",
        found.names,
        Column("~Name", lambda row: row.name or "of no known name"),
        Column("~Collective", lambda row: row.collective),
        Column("Size", lambda row: Cell(size_in_words(row), row.most_bytes or 0)),
        Column("Exposed, ms", lambda row: row.exposed_ms, "ms"),
        Column("Hidden, ms", lambda row: row.hidden_ms, "ms"),
        Column("Waiting, ms", lambda row: row.waiting_ms, "ms"),
        Column("With queue, ms", lambda row: row.queued_ms, "ms"),
        Column("Blocking", lambda row: row.blocking, 2),
        Column("Most on rank", lambda row: row.worst_rank if several and row.exposed_ms else None, "whole"),
        caption=f"{over}{f' on {found.num_ranks:,} ranks' if several else ''}{basis}, by what the framework calls "
        "them: a unit, a bucket, a module, a micro-batch; else by their place among those of their kind in a step. "
        "Waiting is for the last rank, exposed or not, also where several are in flight. With queue: exposed time "
        "that it answers for, its own or of those behind it. Blocking: how far the step follows a delay of it. What "
        "holds steps up most comes first.",
        folded=folded,
        first=first,
        few=few,
        drop_empty=True,
    )
    table = table_of(
        "Collectives by size and place",
        found.rows,
        Column("*Collective", lambda row: row.collective),
        Column("*Of", lambda row: row.dimension),
        Column("Ranks", lambda row: row.group_size, "whole"),
        Column("Size", lambda row: Cell(size_in_words(row), row.most_bytes or 0)),
        Column("*Place", lambda row: row.place),
        Column("Calls", lambda row: row.calls, "whole"),
        Column("Exposed, ms", lambda row: row.exposed_ms, "ms"),
        Column("Hidden, ms", lambda row: row.hidden_ms, "ms"),
        Column("Exposed in", lambda row: Cell(f"{row.exposed_steps} of {steps}", row.exposed_steps) if steps else None),
        Column("Most on rank", lambda row: row.worst_rank if several and row.exposed_ms else None, "whole"),
        caption=f"{over}{f' on {found.num_ranks:,} ranks' if several else ''}{basis}. Time counts once where several "
        "are in flight. First and last are places among the collectives of a step.",
        folded=folded,
        first=first,
        few=few,
        drop_empty=True,
    )
    return [*([named] if found.names else []), table]


def collective_table(window: OverlapReport) -> Table:
    """What a rank sent in a step of a window; how long it took alone only if sequential steps were sequential."""
    caption = f"On rank {window.first_rank}, window {window.window}. MiB counts the tensors that a collective reads."
    if window.compared:
        caption += (
            " Alone is its time in sequential steps, from issue to end. Transfer is the shortest time of any rank: "
            "ranks that come early also wait for the last one. GB/s divides the bytes read or written, whichever are "
            "more, by the transfer."
        )
    return table_of(
        "Collectives of a step",
        window.collectives,
        Column("~Collective", lambda row: collective_in_words(row.operator)),
        Column("~Group", _group),
        Column("~Backend", lambda row: row.backend),
        Column("Ranks", lambda row: row.group_size, "whole"),
        Column("Messages", lambda row: row.messages, "whole"),
        Column("MiB", lambda row: row.bytes_in / 2**20),
        Column("Alone, ms", lambda row: row.isolated_ms if window.compared else None),
        Column("Transfer, ms", lambda row: row.transfer_ms if window.compared else None),
        Column("GB/s", lambda row: _gb_s(row) if window.compared else None),
        caption=caption,
        drop_empty=True,
        folded=True,
    )


def _group(row: CollectiveTime) -> str:
    """The dimension of parallelism, and the group if its name differs."""
    if not row.dimension or row.dimension == row.group:
        return row.group
    return f"{row.dimension} ({row.group})"


def _gb_s(row: CollectiveTime) -> float | None:
    # NCCL's tests compute bandwidth from the total size: for all-gathers and reduce-scatters, the larger side.
    if row.transfer is None or not row.transfer[1]:
        return None
    return row.transfer[0] / row.transfer[1] / 1e6


def row_label(figure: Figure) -> str:
    """A figure's label in a table of ``SUMMARY``: a part is indented below its total."""
    return f"  {figure.part_label}" if figure.part_label else figure.label


def summary_table(figures: dict[str, Estimate], basis: str) -> Table:
    """The figures of ``SUMMARY``, parts below their total; ``basis``: what they are means over."""

    def has_row(figure: Figure) -> bool:
        found = figures.get(figure.name)
        return not figure.optional or (found is not None and PAGE.shows(found.value, figure.unit))

    label: Column[Figure] = Column("*", lambda figure: Cell(row_label(figure)))
    return table_of(f"Means over {basis}", filter(has_row, SUMMARY), label, *_value_columns(figures), sorts=False)


def figure_table(figures: dict[str, Estimate], meanings: dict[str, str]) -> Table:
    """Every figure, with its definition."""
    return table_of(
        "All figures",
        [figure for figure in FIGURES if figure.name in figures or not figure.optional],
        Column("*Figure", lambda figure: figure.label),
        *_value_columns(figures),
        Column("*Definition", lambda figure: meanings.get(figure.name, figure.meaning)),
        folded=True,
        sorts=False,
    )


def _value_columns(figures: dict[str, Estimate]) -> tuple[Column[Figure], ...]:
    """Value, interval, and number of steps."""

    def value(figure: Figure) -> Cell:
        found = figures.get(figure.name)
        return Cell("not measured" if found is None else PAGE.figure(figure, found.value))

    def bounds(figure: Figure) -> Cell:
        found = figures.get(figure.name)
        return Cell("" if found is None else PAGE.figure_interval(figure, found, figures.get("e2e_overlapped_ms")))

    def steps(figure: Figure) -> int | None:
        return figures[figure.name].num_steps if figure.name in figures else None

    return Column("Value", value), Column("95% interval", bounds), Column("Steps", steps, "whole")


# -- text on slowdowns


_Row = TypeVar("_Row", KernelTime, PairTime)

PAIRS_TITLE = "Slowdown by concurrent kernel"
OF_SHARES = "A kernel that ran during several counts towards each by the share of time that it had of each."
WITH_WAITING = "A collective's time includes waiting for other ranks."


def together(kernels: Sequence[KernelTime], window: int, decimals: int) -> str:
    """The total of all compute kernels of a window, and why it differs from the run's figure."""
    lost, overlapped, sequential = (
        PLAIN.quantity(sum([getattr(kernel, name) for kernel in kernels]), "ms", decimals=decimals)
        for name in ("lost_ms", "overlapped_ms", "sequential_ms")
    )
    return (
        f"All of them lose {lost}: T_comp of window {window} is {overlapped} overlapped and {sequential} alone. The "
        "run's T_comp is the mean of all its windows."
    )


def ran_alone(pairs: Sequence[PairTime]) -> str:
    """A sentence if kernels that ran alone are slower too; otherwise empty."""
    if not any(pair.concurrent_with == ALONE and pair.lost_ms > 0 for pair in pairs):
        return ""
    return (
        f'"{RAN_ALONE[0].upper()}{RAN_ALONE[1:]}" are kernels that ran alone in overlapped steps too. If '
        "they are slower all the same, nothing that runs at the same time explains it."
    )


def with_losses(rows: Sequence[_Row], decimals: int) -> tuple[list[_Row], int]:
    """The rows whose lost time is not shown as zero with these decimals, and the number omitted."""
    shown = [row for row in rows if abs(row.lost_ms) >= 0.5 * 10**-decimals]
    return shown, len(rows) - len(shown)


def left_out_in_words(number: int, noun: str, decimals: int) -> str:
    """How many rows are omitted, as a sentence; empty for none."""
    if not number:
        return ""
    verb, is_or_are = ("loses", "is") if number == 1 else ("lose", "are")
    return f" {count(number, noun)} that {verb} less than {0.5 * 10**-decimals:g} ms {is_or_are} left out."
