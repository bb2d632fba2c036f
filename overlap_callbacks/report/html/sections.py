"""The first three questions of the page: is overlap worth it, what does it cost, how far is it from ideal?"""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PAGE, change_in_words, may_be_chance, page_text, rounded
from overlap_callbacks.analysis.results.catalogue import figure_named
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.metrics import compute_slowdowns
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.report.html import tables
from overlap_callbacks.report.html.causes import cause_table
from overlap_callbacks.report.html.elements import Block, Chart, Note, Section, Tile, Tiles
from overlap_callbacks.report.html.power import power_answer, power_blocks
from overlap_callbacks.report.html.run import RunView
from overlap_callbacks.report.html.step_charts import mode_bars, step_parts, timeline
from overlap_callbacks.report.html.timeline import kernel_blocks

Figures = dict[str, Estimate]


def headline(figures: Figures) -> Tiles:
    """One figure for each of the questions."""
    exposed = figures.get("exposed_comm_ms")
    step = figures.get("e2e_overlapped_ms")
    share = f"{PAGE.percent(exposed.value / step.value)} of a step" if exposed and step and step.value > 0 else ""
    return Tiles(
        (
            _tile(figures, "speedup_vs_sequential", "over sequential steps"),
            _tile(figures, "compute_slowdown", "of the same kernels with overlap"),
            _tile(figures, "gap_to_ideal", "step time over that without contention"),
            _tile(figures, "exposed_comm_ms", share),
        )
    )


def _tile(figures: Figures, name: str, remark: str) -> Tile:
    figure, estimate = figure_named(name), figures.get(name)
    if estimate is None:
        return Tile(figure.title, "not measured")
    bounds = PAGE.figure_interval(figure, estimate) or "too few blocks for an interval"
    return Tile(figure.title, PAGE.figure(figure, estimate.value), bounds, remark)


def _ms(value: float, *, signed: bool = False) -> str:
    return PAGE.quantity(value, "ms", signed=signed)


# -- is it worth it?


def worth(view: RunView) -> Section:
    """Step time in each mode."""
    figures = view.figures
    overlapped, sequential = figures.get("e2e_overlapped_ms"), figures.get("e2e_sequential_ms")
    title = "Is overlap worth it here?"
    if overlapped is None or sequential is None:
        blocks: list[Block] = [Note(_why_no_steps(view))]
        if overlapped is not None or sequential is not None:
            blocks.append(mode_bars([("", figures)]))
        return Section(title, "", blocks)
    saved = sequential.value - overlapped.value
    if view.control:
        answer = (
            f"Both sides ran overlapped: {_ms(overlapped.value)} and "
            f"{_ms(sequential.value)} a step. The difference is the error of the measurement."
        )
    else:
        answer = (
            f"A step takes {_ms(overlapped.value)} overlapped and "
            f"{_ms(sequential.value)} with the same work run sequentially: overlap "
            f"{'saves' if saved >= 0 else 'costs'} {_ms(abs(saved))} a step."
        )
        ideal = figures.get("e2e_ideal_ms")
        if ideal is not None:
            answer += f" Overlap without contention would take {_ms(ideal.value)}."
    return Section(title, answer, [mode_bars([("", figures)])])


def _why_no_steps(view: RunView) -> str:
    if not view.measured:
        return "No step was measured."
    if view.windows and not view.valid_windows:
        return "Step times are not compared: no window is valid. The part on the measurement, below, says why."
    return "Step times were not measured in both modes."


# -- what does it cost?


def cost(view: RunView) -> Section:
    """Slowdown by kernel and by what ran beside it; power."""
    causes = cause_table(view.valid_windows)
    blocks: list[Block] = [] if causes is None else [causes]
    window = view.record.latest_valid("kernels")
    if window is not None:
        blocks.append(tables.kernel_table(window))
    paired = view.record.latest_valid("pairs")
    if paired is not None:
        blocks.append(tables.pair_table(paired))
    divided = view.record.latest_valid("dimension_pairs")
    # With one dimension alone, the table of pairs says the same.
    if divided is not None and len(compute_slowdowns(divided.dimension_pairs)) > 1:
        blocks.append(tables.dimension_pair_table(divided))
    if window is None:
        blocks.append(Note(_why_no_kernels(view)))
    elif paired is None:
        blocks.append(Note("What ran beside what was not measured."))
    traced = view.record.latest_valid("power_trace") if view.valid_windows else view.record.latest("power_trace")
    blocks += power_blocks(view.valid_windows, view.windows, traced)
    by_dimension = "" if divided is None else _dimension_answer(divided)
    answer = f"{_cost_answer(view.figures)}{by_dimension} {power_answer(view.valid_windows)}".strip()
    if view.control:
        answer = "Both sides ran overlapped, so what differs between them below is the error of measurement."
    return Section("What does it cost?", answer, blocks)


def _cost_answer(figures: Figures) -> str:
    sentences = []
    compute = figures.get("compute_slowdown")
    if compute is not None:
        sentences.append(
            f"In overlapped steps the same compute kernels take {_longer(compute)}{_lost(figures)}{_chance(compute)}."
        )
    communication = figures.get("comm_slowdown")
    if communication is not None:
        sentences.append(f"Communication kernels take {_longer(communication)}{_chance(communication)}.")
    return " ".join(sentences)


def _dimension_answer(window: OverlapReport) -> str:
    """How much slower compute is beside each dimension of parallelism; empty if there is one alone."""
    slowdowns = sorted(compute_slowdowns(window.dimension_pairs).items(), key=lambda item: -item[1])
    if len(slowdowns) < 2:
        return ""
    shown = ", ".join(f"{page_text(name, 40)} {PAGE.percent(value, signed=True)}" for name, value in slowdowns)
    return f" Compute slowdown by the dimension of parallelism in flight: {shown}."


def _longer(figure: Estimate) -> str:
    bounds = PAGE.interval(figure, "fraction", signed=True)
    return change_in_words(figure.value, "longer", "less time", PAGE) + (f" (95% interval {bounds})" if bounds else "")


def _lost(figures: Figures) -> str:
    overlapped, isolated = figures.get("compute_ms"), figures.get("compute_isolated_ms")
    if overlapped is None or isolated is None:
        return ""
    lost = overlapped.value - isolated.value
    return f": {_ms(lost, signed=True)} of kernel time a step"


def _chance(figure: Estimate) -> str:
    return ", which may be chance" if may_be_chance(figure) else ""


def _why_no_kernels(view: RunView) -> str:
    if view.windows and not view.valid_windows:
        return "Kernels are not compared: no window is valid. The part on the measurement, below, says why."
    if view.info.schedule.get("profiled_steps") == 0:
        return "Kernels were not profiled: the schedule has profiled_steps=0, so what overlap costs them is not known."
    return "Kernels were not measured: no window has a profile."


# -- how far from ideal?


def ideal(view: RunView) -> Section:
    """What stands between a step and the ideal one, and how the time passes."""
    blocks: list[Block] = []
    parts = step_parts(view.figures)
    if parts is not None:
        blocks.append(parts)
    drawn = view.record.latest("pictures")
    if drawn is not None:
        blocks.append(timeline(drawn))
        blocks += kernel_blocks(drawn)
    else:
        blocks.append(Note("No step was drawn: that needs a profile of rank 0."))
    divided = view.record.latest("dimensions")
    if divided is not None and len(divided.dimensions) > 1:
        blocks += [dimension_chart(divided), tables.dimension_table(divided)]
    collectives = view.record.latest("collectives")
    if collectives is not None:
        blocks.append(tables.collective_table(collectives))
    else:
        blocks.append(Note("No collective was recorded."))
    return Section(
        "How far from ideal, and what holds it back?", "" if view.control else _ideal_answer(view.figures), blocks
    )


def _ideal_answer(figures: Figures) -> str:
    gap, exposed, hidden = (figures.get(name) for name in ("gap_to_ideal", "exposed_comm_ms", "hidden_comm_fraction"))
    sentences = []
    if gap is not None:
        side = "above" if gap.value >= 0 else "below"
        bounds = PAGE.interval(gap, "fraction", signed=True)
        shown = f" (95% interval {bounds})" if bounds else ""
        sentences.append(f"Steps are {PAGE.percent(abs(gap.value))} {side} the ideal of equation 4{shown}"
                         f"{_chance(gap)}.")  # fmt: skip
    idle, bubble = figures.get("idle_ms"), figures.get("bubble_ms")
    # Receives that wait for their sender are in flight: they count as the bubble's, and not as communication's.
    waiting = max(0.0, bubble.value - idle.value) if bubble and idle else 0.0
    costs = {
        "exposed communication outside the bubble" if waiting else "exposed communication": max(
            0.0, exposed.value - waiting
        )
        if exposed
        else 0.0,
        "contention (kernels that run longer)": _difference(figures, "e2e_overlapped_ms", "e2e_ideal_ms"),
        "the bubble of the pipeline" if bubble else "time in which the device did neither": (
            bubble.value if bubble else idle.value if idle else 0.0
        ),
    }
    if exposed is not None and max(costs.values()) > 0:
        largest, *others = sorted((item for item in costs.items() if item[1] > 0), key=lambda item: -item[1])
        sentence = f"What holds a step back most is {largest[0]}, {_ms(largest[1])} a step"
        if others:
            sentence += "".join(f"; then {name}, {_ms(value)}" for name, value in others)
        sentences.append(sentence + ".")
    if hidden is not None:
        sentences.append(f"Of all communication time, {PAGE.percent(hidden.value)} is hidden behind compute.")
    attained = figures.get("attained_fraction")
    if attained is not None:
        bounds = PAGE.interval(attained, "fraction")
        shown = f" (95% interval {bounds})" if bounds else ""
        sentences.append(
            f"Overlap has attained {PAGE.percent(attained.value)}{shown} of the time that perfect overlap would save."
        )
    return " ".join(sentences)


def _difference(figures: Figures, name: str, other: str) -> float:
    minuend, subtrahend = figures.get(name), figures.get(other)
    return minuend.value - subtrahend.value if minuend is not None and subtrahend is not None else 0.0


def dimension_chart(window: OverlapReport) -> Chart:
    """Hidden and exposed communication of each dimension."""
    rows = [
        {
            "label": " ".join(page_text(row.dimension).split()),  # on one line, as the bar is
            "parts": [
                {
                    "name": "hidden",
                    "color": "both",
                    "value": rounded(max(0.0, row.comm_ms - row.exposed_ms)),
                },
                {"name": "exposed", "color": "communication", "value": rounded(row.exposed_ms)},
            ],
        }
        for row in window.dimensions
    ]
    return Chart(
        "stack",
        "Communication by dimension of parallelism",
        {"unit": "ms", "rows": rows},
        f"Time in flight per overlapped step, window {window.window}. Dimensions may be in flight at once, so bars do "
        "not add up to a step.",
        (("hidden behind compute", "both"), ("exposed", "communication")),
    )
