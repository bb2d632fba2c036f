"""Power: the figures of each mode, the cause of the slowdown, and the trace of a window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from overlap_callbacks.analysis.formatting import (
    CLEAR,
    PAGE,
    certainty,
    certainty_in_words,
    change_decimals,
    count,
    page_text,
    ranges,
)
from overlap_callbacks.analysis.headline import signless_bounds
from overlap_callbacks.analysis.power import cause
from overlap_callbacks.analysis.results.catalogue import POWER_METRICS, every_figure
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.analysis.results.kernel_times import SlowdownCause
from overlap_callbacks.analysis.results.mode import Mode
from overlap_callbacks.analysis.results.power import JobPower, PowerTrace
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.report_parts import energy_saving, peak_rise
from overlap_callbacks.analysis.statistics import pool, pool_changes, relative_change
from overlap_callbacks.report.views.elements import EMPTY, Block, Cell, Chart, Column, Note, Table, table_of

# A figure in overlapped and in sequential steps.
_Row = tuple[Figure, Estimate | None, Estimate | None]
# The figures by which several runs are compared.
_HEADLINES = ("avg_w", "energy_per_step_j", "sm_clock_mhz")

MEAN_POWER, ENERGY = (every_figure()[key] for key in ("power/{mode}_avg_w", "power/{mode}_energy_per_step_j"))

# ``SourceInfo.power_kind`` of instantaneous power.
_INSTANTANEOUS = "instantaneous"


def power_blocks(
    counting: Sequence[OverlapReport], every: Sequence[OverlapReport], traced: OverlapReport | None
) -> list[Block]:
    """All of power: a table of the modes, the cause of the slowdown, the trace; nothing without power.

    If no window counts, all are used. ``traced``: the window whose trace is shown.
    """
    windows = counting or every
    if not any(window.power is not None for window in windows):
        return []
    table = _table(counting) or _table([_overlapped_alone(window) for window in every])
    blocks: list[Block] = [table or Note("Power was read, but no window has figures of it.")]
    evidence = _evidence(counting)
    if evidence is not None:
        blocks.append(evidence)
    if traced is not None and traced.power_trace is not None:
        blocks.append(trace_chart(traced, traced.power_trace))
    without = sorted({rank for window in windows if window.power for rank in window.power.without})
    if without:
        noun = "rank" if len(without) == 1 else "ranks"
        more = max(_num_unlisted(window.power) for window in windows if window.power)
        others = f" and {more:,} more" if more else ""
        blocks.append(Note(f"Without a source of power: {noun} {ranges(without)}{others}.", warning=True))
    return blocks


def _overlapped_alone(window: OverlapReport) -> OverlapReport:
    """An invalid window without its sequential figures: its sequential steps were not sequential."""
    power = window.power
    if power is None:
        return window
    modes = tuple([mode for mode in power.modes if mode.mode is Mode.OVERLAPPED])
    return msgspec.structs.replace(window, power=msgspec.structs.replace(power, modes=modes))


def _num_unlisted(power: JobPower) -> int:
    """Number of ranks without a power source that are not listed."""
    return 0 if power.num_without is UNSET else power.num_without - len(power.without)


def power_figures(windows: Sequence[OverlapReport]) -> dict[str, str]:
    """Power and energy over windows that count, as text by label; empty if not measured."""
    figures = {}
    for metric in POWER_METRICS:
        if metric.name in _HEADLINES:
            for mode in Mode:
                value = _mean(windows, mode, metric)
                if value is not None:
                    figures[f"{metric.meaning}, {mode.value}"] = PAGE.in_brackets(value, metric.unit)
    return figures


def power_answer(windows: Sequence[OverlapReport]) -> str:
    """The cause of the slowdown, then power and energy of both modes, over windows that count; empty without any.

    Also for a control run, whose two sides both ran overlapped.
    """
    windows = [window for window in windows if not window.control]
    sentences = [_cause(windows)]
    overlapped, sequential = (_mean(windows, mode, MEAN_POWER) for mode in Mode)
    draws = _change_of(windows, MEAN_POWER)
    if overlapped is not None and sequential is not None and draws is not None:
        watts = [PAGE.quantity(side.value, "W") for side in (overlapped, sequential)]
        both = f"A device draws {watts[0]} in overlapped steps, {watts[1]} in sequential ones"
        sentences.append(f"{both} ({_sure_change(draws, 'more', 'less') or certainty_in_words(draws, PAGE)}).")
    energy = energy_change(windows)
    if energy is not None:
        words = "With overlap a step takes {}."
        sentences.append(_change_sentence(words, "Energy of a step", energy, "more energy", "less energy"))
    tokens = windows[-1].tokens_per_step if windows else None
    of_step = energy_of_a_step(windows, Mode.OVERLAPPED)
    if energy is not None and tokens and of_step is not None:
        sentences.append(f"A token costs {of_step.value / tokens:.3g} J.")
    rise = _mean_change([peak_rise(window.power) for window in windows if window.power is not None])
    if rise is not None:
        words = "The highest power of a device is {} with overlap."
        sentences.append(_change_sentence(words, "Highest power of a device", rise, "higher", "lower"))
    return " ".join([sentence for sentence in sentences if sentence])


def _change_sentence(words: str, what: str, change: Estimate, more: str, less: str) -> str:
    """The sentence with a clear change in its place; else how certain it is."""
    sure = _sure_change(change, more, less)
    return words.format(sure) if sure else f"{what} with overlap: {certainty_in_words(change, PAGE)}."


def _sure_change(change: Estimate, more: str, less: str) -> str:
    """A clear change in percent, with its interval, e.g. ``17.9% more (16.1 to 19.7)``; empty if it is not clear."""
    if certainty(change) != CLEAR:
        return ""
    value = PAGE.percent(abs(change.value), decimals=change_decimals(change))
    return f"{value} {more if change.value > 0 else less} ({signless_bounds(change)})"


def energy_change(windows: Sequence[OverlapReport]) -> Estimate | None:
    """How much more energy an overlapped step takes than a sequential one; None if either is unknown."""
    # Comparable only if both modes use the same method.
    return _change_of([w for w in windows if w.power is not None and energy_saving(w.power) is not None], ENERGY)


def _change_of(windows: Sequence[OverlapReport], figure: Figure) -> Estimate | None:
    """How much more of a figure overlapped steps have than sequential ones; None if either is unknown.

    The two modes have different blocks, so their errors are independent.
    """
    changes = []
    for window in windows:
        overlapped, sequential = (mode_value(figure, mode)(window) for mode in Mode)
        if overlapped is not None and sequential is not None:
            changes.append(relative_change(sequential, overlapped))
    return pool_changes([change for change in changes if change is not None])


def energy_of_a_step(windows: Sequence[OverlapReport], mode: Mode) -> Estimate | None:
    """Joules of all devices together, over these windows; None if not measured."""
    return _mean(windows, mode, ENERGY)


def mode_value(figure: Figure, mode: Mode) -> Callable[[OverlapReport], Estimate | None]:
    """A function that reads a power figure with its interval from a window, for charts along the run."""

    def read(window: OverlapReport) -> Estimate | None:
        power = None if window.control and mode is Mode.SEQUENTIAL else window.power
        of_mode = None if power is None else power.of(mode)
        found = figure.value(of_mode) if of_mode is not None else None
        return found if found is None or isinstance(found, Estimate) else Estimate(found, None, None, 0, 1)

    return read


def _mean(windows: Sequence[OverlapReport], mode: Mode, figure: Figure) -> Estimate | None:
    read = mode_value(figure, mode)
    return pool([value for window in windows if (value := read(window)) is not None], bounds=figure.bounds)


def _mean_change(values: Sequence[float | None]) -> Estimate | None:
    return pool_changes([Estimate(value, None, None, 0, 1) for value in values if value is not None])


def _table(windows: Sequence[OverlapReport]) -> Table | None:
    """Every figure of power and of the device, in both modes; None if there is none."""

    def change(row: _Row) -> Cell:
        metric, overlapped, sequential = row
        if overlapped is None or sequential is None or not sequential.value or metric.unit == "fraction":
            return EMPTY
        return Cell(PAGE.percent(overlapped.value / sequential.value - 1, signed=True))

    def is_shown(row: _Row) -> bool:  # not, for example, a limit that never reduced the clock
        return any(side is not None and PAGE.shows(side.value, row[0].unit) for side in row[1:])

    every = [
        (metric, _mean(windows, Mode.OVERLAPPED, metric), _mean(windows, Mode.SEQUENTIAL, metric))
        for metric in POWER_METRICS
    ]
    rows = [row for row in every if is_shown(row)]
    if not rows:
        return None
    columns = [
        Column[_Row]("*Figure", lambda row: Cell(row[0].meaning)),
        Column[_Row]("Overlapped", lambda row: _value(row[1], row[0].unit)),
        Column[_Row]("Sequential", lambda row: _value(row[2], row[0].unit)),
        Column[_Row]("Change", change),
    ]
    powers = [window.power for window in windows if window.power is not None]
    if not any(mode.mode is Mode.SEQUENTIAL for power in powers for mode in power.modes):
        columns = columns[:2]
    return table_of("Power", rows, *columns, caption=_source(powers), sorts=False)


def _value(figure: Estimate | None, unit: str) -> Cell:
    return Cell("not measured" if figure is None else PAGE.in_brackets(figure, unit))


def _source(powers: Sequence[JobPower]) -> str:
    devices = max(power.num_devices for power in powers)
    caption = f"Means over {count(len(powers), 'window')}, {count(devices, 'device')}."
    source = powers[-1].source
    if source is not None:
        caption += f" Read by {page_text(source.name)}, {page_text(source.power_kind)}."
    methods = dict.fromkeys(mode.energy_method for power in powers for mode in power.modes if mode.energy_method)
    if methods:
        caption += f" Energy by {' or '.join(methods)}."
    return caption


def _cause(windows: Sequence[OverlapReport]) -> str:
    """The cause of the slowdown in the last window that has one, and in how many windows it is the same.

    None of a slowdown that is not clear.
    """
    slowdown = pool_changes([window.compute_slowdown for window in windows if window.compute_slowdown is not None])
    if slowdown is not None and certainty(slowdown) not in ("", CLEAR):
        return ""
    verdicts = [window.power_verdict for window in windows if window.power_verdict is not None]
    if not verdicts:
        return ""
    sentence = page_text(cause_sentence(verdicts[-1]))
    if len(verdicts) == 1:
        return sentence
    alike = Counter(verdict.verdict for verdict in verdicts)[verdicts[-1].verdict]
    return f"{sentence} The verdict is the same in {alike:,} of {len(verdicts):,} windows."


def _evidence(windows: Sequence[OverlapReport]) -> Note | None:
    judged = [(window.window, window.power_verdict) for window in windows if window.power_verdict is not None]
    if not judged:
        return None
    number, verdict = judged[-1]
    return Note(page_text(evidence_sentence(verdict, of_window=number), 2000))


def _of_points(window: OverlapReport, trace: PowerTrace) -> str:
    """The meaning of a point of the trace."""
    source = None if window.power is None else window.power.source
    # Records of earlier versions have a time in the trace even for instantaneous power.
    momentary = source is not None and source.power_kind == _INSTANTANEOUS
    averaging_s = source.averaging_s if source is not None and momentary else trace.averaging_s
    if not averaging_s:
        return ""
    words = "A point is of some time in" if momentary else "Each point is an average over"
    return f" {words} the {1000 * averaging_s:.0f} ms before it."


def trace_chart(window: OverlapReport, trace: PowerTrace) -> Chart:
    """Power, and the clock below it, with the modes shaded."""
    limits = [("default limit", trace.tdp_w), ("limit in force", trace.limit_w)]
    if trace.tdp_w == trace.limit_w:
        limits = [("power limit", trace.tdp_w)]
    data = {
        "time": list(trace.time_ms),
        "power": list(trace.power_w),
        "clock": list(trace.sm_clock_mhz),
        "segments": [[s.mode.value, s.start_ms, s.end_ms, s.counted, s.profiled] for s in trace.segments],
        "communication": [list(interval) for interval in trace.communication],
        "both": [list(interval) for interval in trace.both],
        "limits": [[name, value] for name, value in limits if value is not None],
    }
    warm_up = any(not segment.counted for segment in trace.segments)
    profiled = any(segment.profiled for segment in trace.segments)
    caption = f"Device of rank {window.first_rank}, window {window.window}; blocks of each mode are shaded."
    if warm_up:
        caption += " Grey stretches are warm-up steps and others that do not count."
    if profiled:
        caption += " A line at the top marks profiled blocks, which do not count for power either."
    in_flight = "communication alone" if trace.both else "communication in flight"
    if trace.communication:
        caption += (
            " The band at the foot shows when communication was in flight, during compute or alone; that is known for "
            "profiled steps only."
        )
    caption += _of_points(window, trace)
    if len(trace.time_ms) < trace.num_readings:
        caption += (
            f" {len(trace.time_ms):,} of {trace.num_readings:,} readings are drawn: the highest and lowest of each "
            "stretch of time stay."
        )
    return Chart(
        "power",
        "Power along a window",
        data,
        caption,
        (
            ("overlapped steps", "overlapped"),
            ("sequential steps", "sequential"),
            *((("warm-up", "idle"),) if warm_up else ()),
            *((("profiled", "ink"),) if profiled else ()),
            *((("communication during compute", "both"),) if trace.both else ()),
            *(((in_flight, "communication"),) if trace.communication else ()),
        ),
    )


# -- text


# From this share of the slowdown on, most of it follows the clock. No interval of the share is known.
_MOST = 0.75
_IN_WORDS = {
    cause.NO_SLOWDOWN: "No compute slowdown to explain",
    cause.POWER_CAP: "Compute is slower because a power cap lowers the clock",
    cause.TEMPERATURE: "Compute is slower because heat lowers the clock",
    cause.HARDWARE: "Compute is slower because the hardware's own protection lowers the clock",
    cause.MEMORY_BANDWIDTH: "Compute is slower because it contends with communication for memory bandwidth",
    cause.SM_CONTENTION: "Compute is slower because communication takes SMs from it",
    cause.UNDECIDED: "Cause unclear",
}


def cause_sentence(found: SlowdownCause) -> str:
    """The cause, and how much of the slowdown follows the clock, e.g. ``Cause unclear; part of it goes with ...``."""
    words = _IN_WORDS.get(found.verdict, found.verdict[:1].upper() + found.verdict[1:])
    if found.verdict == cause.NO_SLOWDOWN:
        return f"{words}."
    if found.clock_share is None:
        return f"{words}; how much goes with the clock is not known."
    part = "most" if found.clock_share >= _MOST else "part" if found.clock_share >= 1 - _MOST else "little"
    return f"{words}; {part} of it goes with the clock."


def evidence_sentence(found: SlowdownCause, *, of_window: int) -> str:
    return f"Verdict of window {of_window}: {found.verdict}. Evidence: {'; '.join(found.evidence) or 'none'}."
