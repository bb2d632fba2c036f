"""How well ranks communicate: stragglers, transfer rates, and the pipeline bubble."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.communication.link_peaks import Link, Peaks, SizeBandwidth, bandwidths, peaks_of
from overlap_callbacks.analysis.formatting import NBSP, PAGE, count, page_text
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.analysis.results.arrivals import ONE_HOST, SEVERAL_HOSTS, waiting_fraction
from overlap_callbacks.analysis.results.report import OverlapReport, PipelineBubble
from overlap_callbacks.analysis.results.step_parts import StepShare
from overlap_callbacks.analysis.stragglers import Straggler, stragglers
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views.elements import Block, Cell, Column, Section, Table, table_of
from overlap_callbacks.report.views.traffic import host_names


def communication(record: Record) -> list[Section]:
    """The section; nothing if none of it was measured."""
    sentences: list[str] = []
    blocks: list[Block] = []
    waiting = waiting_of(record)
    if waiting is not None:
        sentences.append(page_text(waiting_sentence(waiting), 1000))
        for title, rows in (("Ranks that come last", waiting.ranks), ("Hosts whose ranks come last", waiting.hosts)):
            if rows:
                blocks.append(late_table(title, waiting, rows))
    shares = shares_window(record)
    if shares is not None:
        said = page_text(shares_sentence(shares.dimension_shares()), 1000)
        sentences.append(f"{said} That is of window{NBSP}{shares.window}.")
    pipeline = latest_pipeline(record)
    if pipeline is not None:
        sentences.append(bubble_sentence(pipeline[1]))
        blocks.append(bubble_table(*pipeline))
    by_size = bandwidths_of(record)
    if by_size is not None:
        blocks.append(bandwidth_table(by_size))
    if not sentences and not blocks:
        return []
    return [Section("How well do ranks communicate?", " ".join(sentences), blocks)]


def late_table(title: str, found: Waiting, rows: Sequence[Straggler]) -> Table:
    """Which ranks come last, and how certain that is."""
    return table_of(
        title,
        rows,
        Column("~Who", found.who),
        Column("~Dimension", lambda row: row.dimension),
        Column("Steps", lambda row: row.share, "whole percent"),
        Column("95% interval", lambda row: Cell(row.interval(PAGE), row.low)),
        Column("By chance", lambda row: row.chance, "whole percent"),
        Column("Last", lambda row: row.last_share, "whole percent"),
        Column("Others wait, ms", lambda row: row.waiting_ms),
        Column("Lost", lambda row: row.lost_fraction, "percent"),
        Column("Windows", lambda row: Cell(f"{row.windows} of {row.all_windows}", row.windows)),
        Column("*Sure", lambda row: "clear" if row.sure else "inconclusive"),
        caption="Of collectives of sequential steps. The rank that comes last has the least time. Steps are those in "
        "which the others wait for it longest, with a 95% interval. Lost is the others' waiting, of the time of these "
        "collectives.",
    )


def bandwidth_table(found: Bandwidths) -> Table:
    """Effective bandwidth by message size."""
    return table_of(
        "Effective bandwidth by size",
        found.rows,
        Column("~Dimension", lambda row: row.transfer.dimension),
        Column("~Collective", lambda row: collective_in_words(row.transfer.operator)),
        Column("Ranks", lambda row: row.transfer.group_size, "whole"),
        Column("*On", lambda row: reach if (reach := row.transfer.reach) in (ONE_HOST, SEVERAL_HOSTS) else "not known"),
        Column("Size", lambda row: row.mean_bytes, "bytes"),
        Column("Calls", lambda row: row.transfer.calls, "whole"),
        Column("Time, ms", lambda row: row.transfer_ms),
        Column("GB/s", lambda row: Cell(f"{row.gb_s:.3g}", row.gb_s)),
        Column("Of peak", lambda row: row.peak_fraction, "percent"),
        caption=f"Window {found.window}. Of each collective the least time over its ranks counts, from issue to end: "
        "the others waited. Bandwidth is that of the wire, as nccl-tests' bus bandwidth. "
        f"{peaks_in_words(found.peaks)}",
        folded=len(found.rows) > 12,
    )


def bubble_table(window: int, pipeline: PipelineBubble) -> Table:
    """The bubble of each stage, measured and expected."""
    return table_of(
        "Bubble by stage",
        pipeline.stages,
        Column("Stage", lambda stage: stage.stage, "whole"),
        Column("Ranks", lambda stage: stage.num_ranks, "whole"),
        Column("Step, ms", lambda stage: stage.step_ms),
        Column("Bubble, ms", lambda stage: stage.bubble_ms),
        Column("Measured", lambda stage: stage.fraction, "percent"),
        Column("Expected", lambda _: pipeline.expected_fraction, "percent"),
        caption=f"Overlapped steps under the profiler, window {window}, means over the ranks of a stage. A stage is "
        "idle, or waits for the peer of a message. Expected is (p-1)/(p-1+vm), of a step without its gradients' "
        "communication.",
    )


# -- data from the record


NO_STRAGGLER = (
    "No rank stands out: none with 1% or more of that time lost to it is waited for longest in more steps than by "
    "chance."
)


class Waiting(NamedTuple):
    """Which ranks come last.

    Attributes:
        fraction: share of collective time that ranks spend waiting.
        ranks, hosts: those that the others wait for longest.
        names: of hosts, by number, where known.
    """

    fraction: float
    ranks: tuple[Straggler, ...]
    hosts: tuple[Straggler, ...]
    names: Mapping[int, str]
    several_hosts: bool

    def who(self, row: Straggler) -> str:
        """Display name of a rank or a host."""
        host = "" if row.host < 0 or not self.several_hosts else self.names.get(row.host, f"host {row.host}")
        if row.rank < 0:
            return host
        return f"rank {row.rank} ({host})" if host else f"rank {row.rank}"


def waiting_of(record: Record) -> Waiting | None:
    """Which ranks come last in the windows that count; None if that was not timed."""
    windows = [window.arrivals for window in record.valid_windows]
    fraction = waiting_fraction(windows)
    if fraction is None:
        return None
    environment = record.job_environment
    several = environment is not None and environment.num_hosts > 1
    return Waiting(
        fraction,
        tuple(stragglers(windows)),
        tuple(stragglers(windows, hosts=True)),
        host_names(record) if several else {},
        several,
    )


def waiting_sentence(found: Waiting) -> str:
    """Which ranks come last, in one or two sentences."""
    words = f"In {PAGE.percent(found.fraction)} of the time of collectives, ranks wait for the one that comes last."
    if not found.ranks:
        return f"{words} {NO_STRAGGLER}"
    first = found.ranks[0]
    last, waited = PAGE.percent(first.last_share, decimals=0), PAGE.quantity(first.waiting_ms, "ms")
    return (
        f"{words} Most for {found.who(first)}: {first.how_sure(PAGE)}. It comes last to {last} of {first.calls:,} "
        f"timed collectives ({first.dimension}), and the others wait for {waited} each time."
    )


class Bandwidths(NamedTuple):
    """Effective bandwidth of a window by dimension, operator and size, and the peaks of the links."""

    window: int
    rows: Sequence[SizeBandwidth]
    peaks: Peaks


def bandwidths_of(record: Record, own: Peaks = Peaks()) -> Bandwidths | None:  # noqa: B008 - it is immutable
    """The bandwidths of the last window that has them; None without one. ``own``: the user's values for peaks."""
    window = record.latest_valid("transfers")
    if window is None:
        return None
    peaks = peaks_of(record.job_environment, own)
    rows = bandwidths(window.transfers, peaks)
    return Bandwidths(window.window, rows, peaks) if rows else None


def peaks_in_words(peaks: Peaks) -> str:
    known = [
        f"{where} {_link_in_words(link)}"
        for where, link in (("within a host", peaks.within), ("between hosts", peaks.between))
        if link is not None
    ]
    if not known:
        return "The record does not name the links: overlap traffic takes their peaks (--link-peak, --network-peak)."
    return f"Peaks, each way: {'; '.join(known)}."


def _link_in_words(link: Link) -> str:
    return link.name if link.what == "given" else f"{link.name}, {link.gb_s:g} GB/s ({link.what})"


def shares_sentence(shares: Sequence[StepShare]) -> str:
    """The parts of a step in one sentence."""
    parts = ", ".join(f"{share.name} {PAGE.percent(share.fraction)}" for share in shares if share.fraction >= 0.0005)
    return f"Of a profiled overlapped step: {parts}. Communication counts where no compute hides it."


def shares_window(record: Record) -> OverlapReport | None:
    """The last window with the shares of a step."""
    window = record.latest("dimensions")
    return window if window is not None and window.dimension_shares() else None


def bubble_sentence(pipeline: PipelineBubble) -> str:
    expected, measured = pipeline.expected_fraction, pipeline.fraction
    shape = count(pipeline.num_stages, "stage")
    if pipeline.micro_batches:
        batches = "micro-batch" if pipeline.micro_batches == 1 else "micro-batches"
        shape += f", {pipeline.micro_batches:,} {batches} a step"
    if pipeline.chunks > 1:
        shape += f", {count(pipeline.chunks, 'chunk')} on each rank"
    words = f"The bubble of the pipeline ({shape})"
    known = "not known, since messages do not show the micro-batches" if expected is None else PAGE.percent(expected)
    words += f": expected {known}"
    return f"{words}; measured {PAGE.percent(measured)}." if measured is not None else f"{words}."


def latest_pipeline(record: Record) -> tuple[int, PipelineBubble] | None:
    """The bubble of the last window that has one, and that window's number."""
    for window in reversed(record.valid_windows or record.windows):
        if window.pipeline is not None and window.pipeline.is_valid:
            return window.window, window.pipeline
    return None
