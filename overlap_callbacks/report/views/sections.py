"""The headline figures, and the sections on cost, power, what limits a step, and throughput."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.bottleneck import Bottleneck
from overlap_callbacks.analysis.causal import responses_of, slopes_by_name
from overlap_callbacks.analysis.exposure import MAX_WINDOWS, exposure_sentence, over_windows, with_blocking
from overlap_callbacks.analysis.figures import value_by
from overlap_callbacks.analysis.formatting import (
    CLEAR,
    NOT_RESOLVED,
    PAGE,
    certainty,
    count,
    page_sentence,
    page_text,
    says_nothing,
)
from overlap_callbacks.analysis.headline import (
    Times,
    most_in_words,
    share_decimals,
    slowdown_in_words,
    step_change,
)
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.report import OverlapReport, Throughput
from overlap_callbacks.analysis.results.report_parts import compute_slowdowns
from overlap_callbacks.analysis.results.step_parts import exposed_share
from overlap_callbacks.analysis.run_summary import run_means, run_times
from overlap_callbacks.analysis.throughput import GIVEN, run_throughput
from overlap_callbacks.report.record import Record
from overlap_callbacks.report.views import tables
from overlap_callbacks.report.views.elements import (
    Block,
    Chart,
    Column,
    Note,
    Section,
    Table,
    Tile,
    Tiles,
    estimate_tile,
    table_of,
)
from overlap_callbacks.report.views.power import energy_change, energy_of_a_step, power_answer, power_blocks
from overlap_callbacks.report.views.step_charts import mode_bars, stack, step_parts, timeline

Figures = dict[str, Estimate]


_SLOWDOWN = ("Compute slowdown", "of the same kernels with overlap")


def tiles(record: Record) -> list[Block]:
    """The headline figures; none for what was not measured."""
    figures = record.figures
    slowdown, energy = (record.summary.sides() or figures).get("compute_slowdown"), _energy_tile(record)
    label, kernels = ("Compute, one side against the other", "of the same kernels") if record.control else _SLOWDOWN
    found = [
        _step_tile(record),
        None if slowdown is None else estimate_tile(label, slowdown, "fraction", kernels),
        _share_tile("Exposed communication", exposed_share(figures), "of a profiled step"),
        energy or _share_tile("Hidden communication", figures.get("hidden_comm_fraction"), "of all communication"),
    ]
    shown = tuple([tile for tile in found if tile is not None])
    return [Tiles(shown)] if shown else []


def _step_tile(record: Record) -> Tile | None:
    change, step = step_change(record.summary.sides() or record.figures), record.figures.get("e2e_overlapped_ms")
    if change is None or step is None:
        return None
    times = Times.of(change, step.value)
    of = page_sentence(f"{times.less} against {times.more}")
    label = "Step time, one side against the other" if record.control else "Step time with overlap"
    return estimate_tile(label, change, "fraction", f"{of} {'' if record.control else 'sequential'}".strip())


def _energy_tile(record: Record) -> Tile | None:
    """With power measured, energy matters more to a reader than what overlap hides."""
    if record.control:
        return None
    change = energy_change(record.valid_windows)
    both = [energy_of_a_step(record.valid_windows, mode) for mode in Mode]
    if change is None:
        return None
    of = " against ".join([PAGE.quantity(energy.value, "J") for energy in both if energy is not None])
    return estimate_tile("Energy of a step with overlap", change, "fraction", f"{of} sequential, all devices")


def _share_tile(label: str, share: Estimate | None, remark: str) -> Tile | None:
    """A share if the headline has it, else how certain it is."""
    if share is None:
        return None
    if says_nothing(share, "fraction"):
        return Tile(label, NOT_RESOLVED, "", remark)
    if certainty(share) not in ("", CLEAR):
        return Tile(label, certainty(share), most_in_words(share, PAGE), remark)
    decimals = share_decimals(share)
    bounds = PAGE.interval(share, "fraction", decimals=decimals) or "too few blocks for an interval"
    return Tile(label, PAGE.percent(share.value, decimals=decimals), bounds, remark)


def overview(record: Record, *, compared: bool) -> list[Block]:
    """Step time in each mode, unless several runs are already side by side; and where the time of a step goes."""
    blocks: list[Block] = []
    drawn = any(name in record.figures for name in ("e2e_overlapped_ms", "e2e_sequential_ms"))
    if drawn and not compared and not record.control:
        blocks.append(mode_bars([("", record.figures)]))
    parts = record.summary.step_parts()
    if parts is not None:
        blocks.append(step_parts(parts, record.figures, narrow=bool(blocks)))
    return blocks


# -- what does it cost?


def cost(record: Record) -> Section:
    """Slowdown by kernel and by what ran at the same time; of a control run, why there is none."""
    if record.control:
        answer = "Both sides ran overlapped, so what differs between them is the error of measurement."
        return Section("What does it cost?", answer)
    blocks: list[Block] = []
    window, paired = record.latest_shown("kernels"), record.latest_shown("pairs")
    if window is not None:
        blocks += tables.kernel_tables(window)
    if paired is not None:
        basis = f"Per step, means over the ranks, window {paired.window}."
        blocks += tables.pair_tables(paired.pairs, basis)
    divided = record.latest_shown("dimension_pairs")
    # With only one dimension, the table of pairs says the same.
    if divided is not None and len(compute_slowdowns(divided.dimension_pairs)) > 1:
        blocks.append(tables.dimension_pair_table(divided))
    causes = cause_table(record.shown_windows)
    if causes is not None:
        blocks.append(causes)
    blocks.sort(key=lambda block: isinstance(block, Table) and block.folded)
    if window is None and record.valid_windows:
        blocks.append(Note(_why_no_kernels(record)))
    by_dimension = "" if divided is None else _dimension_answer(divided)
    return Section("What does it cost?", f"{_cost_answer(record.figures)}{by_dimension}".strip(), blocks)


def power(record: Record) -> list[Section]:
    """The effect of overlap on power, energy and clocks; nothing if no window has any, or of a control run."""
    if record.control:
        return []
    traced = record.latest_valid("power_trace") if record.valid_windows else record.latest("power_trace")
    blocks = power_blocks(record.shown_windows, record.windows, traced)
    if not blocks:
        return []
    return [Section("What does it do to power?", power_answer(record.shown_windows), blocks, folded=True)]


def _cost_answer(figures: Figures) -> str:
    sentences = []
    compute = figures.get("compute_slowdown")
    if compute is not None:
        sentences.append(slowdown_in_words(compute))
    communication = figures.get("comm_slowdown")
    if communication is not None:
        waiting = "Waiting for the last rank is left out." if "waiting_ms" in figures else "It includes waiting."
        sentences.append(f"{slowdown_in_words(communication, 'Communication')} {waiting}")
    return page_sentence(" ".join(sentences))


def _dimension_answer(window: OverlapReport) -> str:
    """How much slower compute is during each dimension's communication; empty if there is only one."""
    slowdowns = sorted(compute_slowdowns(window.dimension_pairs).items(), key=lambda item: -item[1])
    if len(slowdowns) < 2:
        return ""
    shown = ", ".join(f"{page_text(name, 40)} {PAGE.percent(value, signed=True)}" for name, value in slowdowns)
    return f" Compute slowdown by the dimension of parallelism in flight: {shown}."


def _why_no_kernels(record: Record) -> str:
    if record.info.schedule.get("profiled_steps") == 0:
        return "Kernels were not profiled: the schedule has profiled_steps=0, so what overlap costs them is not known."
    return "Kernels were not measured: no window has a profile."


# -- how far from ideal?


class WindowsExposure(NamedTuple):
    """Which collectives are exposed in some windows, by their numbers in words."""

    found: Exposure
    windows: str


def exposure_of(record: Record) -> WindowsExposure | None:
    """Which collectives are exposed in the profiled steps of the last windows that count; None if that is not known."""
    windows = record.last_valid("exposure", MAX_WINDOWS)
    found = over_windows([window.exposure for window in windows if window.exposure is not None])
    if found is None:
        return None
    first, last = windows[0].window, windows[-1].window
    found = with_blocking(found, slopes_by_name(record.causal))
    return WindowsExposure(found, f"window {first}" if len(windows) == 1 else f"windows {first} to {last}")


def ideal(record: Record) -> list[Section]:
    """What limits a step, what to try, and where the time goes; nothing if none of it is known."""
    found = record.bottleneck()
    blocks: list[Block] = [] if found is None else [advice_table(found, delays=bool(responses_of(record.causal)))]
    drawn = record.latest("pictures")
    if drawn is not None:
        blocks.append(timeline(drawn))
    divided = record.latest("dimensions")
    if divided is not None and len(divided.dimensions) > 1:
        blocks += [dimension_chart(divided), *([] if record.control else [tables.dimension_table(divided)])]
    answer = "" if record.valid_windows else "That is not known, as no window counts."
    if found is not None:
        answer = f"{page_text(found.sentence(PAGE), 1000)}{_attained(record.figures)}"
    exposed = exposure_of(record)
    if exposed is not None:
        late_rank = None if found is None else found.late_rank(exposed.found)
        answer = f"{answer} {page_text(exposure_sentence(exposed.found, PAGE, late_rank), 1000)}".strip()
        blocks += tables.exposure_tables(exposed.found, f", {exposed.windows}", folded=True)
    collectives = record.latest("collectives")
    if collectives is not None and not record.control:
        blocks.append(tables.collective_table(collectives))
    return [Section("How far from ideal, and what holds it back?", answer, blocks)] if blocks else []


def _attained(figures: Figures) -> str:
    attained = figures.get("attained_fraction")
    if attained is None:
        return ""
    return (
        f" Overlap has attained {PAGE.with_interval(attained, 'fraction')} of the time that perfect overlap would save."
    )


def not_measured(record: Record) -> list[str]:
    """What was not measured in this run, as sentences."""
    lacking = []
    if record.valid_windows and record.latest_valid("kernels") is not None and record.latest_valid("pairs") is None:
        lacking.append("Which kernels ran at the same time was not measured.")
    if record.latest("pictures") is None:
        lacking.append("No step was drawn: that needs a profile of rank 0.")
    if record.latest("collectives") is None:
        lacking.append("No collective was recorded.")
    if not any(window.power is not None for window in record.windows):
        lacking.append("Power was not measured.")
    if len(record.valid_windows) == 1:
        lacking.append("One valid window was measured, so there is nothing to compare it with.")
    return lacking


def dimension_chart(window: OverlapReport) -> Chart:
    """Hidden and exposed communication of each dimension."""
    rows = [
        # The label must fit on one line, next to its bar.
        (" ".join(page_text(row.dimension).split()), (row.comm_ms - row.exposed_ms, row.exposed_ms))
        for row in window.dimensions
    ]
    return stack(
        "Communication by dimension",
        "ms",
        (("hidden behind compute", "both"), ("exposed", "communication")),
        rows,
        f"Time in flight per overlapped step, window {window.window}. Dimensions may be in flight at once.",
    )


# -- what to try


def advice_table(found: Bottleneck, *, delays: bool) -> Table:
    """What to try, with the reason, most promising first. ``delays``: whether collectives were delayed too."""
    return table_of(
        "What to try",
        found.advice,
        Column("*Try", lambda advice: advice.what),
        Column("*Since", lambda advice: f"{advice.why} Note: {advice.held}." if advice.held else advice.why),
        Column("*The docs say more", lambda advice: advice.link),
        caption="overlap --help says where docs/ is." + (" By delays: Which collective holds the step up?" * delays),
        sorts=False,
    )


# -- causes


def cause_table(windows: Sequence[OverlapReport]) -> Table | None:
    """Each cause with its share and evidence, over windows that count; None if none has a cause."""
    known = [(window, window.slowdown_shares) for window in windows if window.slowdown_shares is not None]
    if not known:
        return None
    _, last = known[-1]
    # Shares add up within a window; means add up only over windows with the same causes.
    of_alike = [
        (w, shares) for w, shares in known if [s.cause for s in shares.shares] == [s.cause for s in last.shares]
    ]
    alike = [shares for _, shares in of_alike]
    # The slowdown as in the headline, a ratio of mean times, is divided by the shares.
    means = run_means(run_times([window.figures() for window, _ in of_alike]))
    total = value_by(figure_named("compute_slowdown"), means)
    mean = sum([shares.slowdown for shares in alike]) / len(alike)
    scale = 1.0 if total is None or not mean else total / mean
    rows: list[tuple[str, float | None, str]] = []
    for share in last.shares:
        fractions = [fraction for shares in alike if (fraction := shares.of(share.cause)) is not None]
        rows.append((share.cause, scale * sum(fractions) / len(fractions) if fractions else None, share.basis))
    slowdown = mean if total is None else total
    rows.append(("compute slowdown", slowdown, "measured (equation 1); the sum of the shares"))
    caption = (
        f"Means over {count(len(alike), 'window')}, as fractions of the compute kernels' time in sequential steps."
    )
    if last.notes:
        caption += f" In the last of them, {page_text('; '.join(last.notes))}."
    return table_of(
        "What the compute slowdown is due to",
        rows,
        Column("*Cause", lambda row: row[0]),
        Column("Share", lambda row: row[1], "change"),
        Column("*Rests on", lambda row: row[2]),
        caption=caption,
        sorts=False,
    )


# -- how fast does it train?


# Longer remarks are placed below the figures.
_MAX_REMARK = 80


def throughput(record: Record) -> list[Section]:
    """Throughput over the windows that count; nothing if not known."""
    found = run_throughput(record.valid_windows)
    if found is None:
        return []
    tiles = [
        Tile(label, value, "", page_text(basis) if len(basis) <= _MAX_REMARK else "")
        for label, value, basis in throughput_facts(found)
    ]
    blocks: list[Block] = [Tiles(tuple(tiles))]
    sources = []
    if len(found.flop_basis) > _MAX_REMARK:
        sources.append(f"Model FLOP: {found.flop_basis}.")
    if found.peak_basis and found.peak_basis != GIVEN and found.mfu is not None:
        sources.append(f"The peak is from {found.peak_basis}.")
    if sources:
        blocks.append(Note(page_text(" ".join(sources))))
    known = "; ".join(f"{t.label} {t.value}" + (f" ({t.remark})" if t.remark else "") for t in tiles)
    answer = (
        f"{page_text(known)}. By the time of overlapped steps, mean over the windows that count. What is recomputed is "
        "no model FLOP."
    )
    return [Section("How fast does it train?", answer, blocks)]


# -- text


_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def in_prefixes(value: float, unit: str = "") -> str:
    """A large number with the prefix of its unit, e.g. ``312.4 TFLOP/s``; without a unit ``312.4 T``."""
    size, prefix = next(((size, prefix) for size, prefix in _PREFIXES if abs(value) >= size), (1.0, ""))
    return PAGE.quantity(value / size, f"{prefix}{unit}").rstrip()


def throughput_facts(throughput: Throughput) -> list[tuple[str, str, str]]:
    """The known figures: label, value, and what they are based on."""
    known = (
        ("Tokens a second", throughput.tokens_per_s, functools.partial(PAGE.number, decimals=0), "the whole job"),
        ("Samples a second", throughput.samples_per_s, functools.partial(PAGE.number, decimals=1), "the whole job"),
        ("Model FLOP per step", throughput.flop_per_step, in_prefixes, throughput.flop_basis),
        ("Model FLOP/s per device", throughput.flop_per_s_per_device, in_prefixes,
         f"mean over {count(throughput.num_devices, 'device')}"),
        ("Model FLOP utilisation (MFU)", throughput.mfu if throughput.peak_flop_per_s is not None else None,
         PAGE.percent, _of_peak(throughput)),
    )  # fmt: skip
    return [(label, shown(value), basis) for label, value, shown, basis in known if value is not None]


def _of_peak(throughput: Throughput) -> str:
    peak = in_prefixes(throughput.peak_flop_per_s or 0.0, "FLOP/s")
    if throughput.peak_basis == GIVEN:
        return f"of {peak}, as given"
    return f"of {peak}, dense {throughput.precision}"
