"""The first three of the design's questions: is overlap worth it, what does it cost, how far is it from ideal?"""

from __future__ import annotations

from overlap_callbacks.analysis import formatting
from overlap_callbacks.analysis.results.report import Estimate, OverlapReport
from overlap_callbacks.report import terminal
from overlap_callbacks.report.html import tables
from overlap_callbacks.report.html.elements import Block, Chart, Note, Section, Tile, Tiles
from overlap_callbacks.report.html.power import power_answer, power_blocks
from overlap_callbacks.report.html.run import Subject
from overlap_callbacks.report.html.step_charts import mode_bars, step_parts, timeline

Figures = dict[str, Estimate]


def headline(figures: Figures) -> Tiles:
    """One figure for each of the questions."""
    exposed = figures.get("exposed_comm_ms")
    step = figures.get("e2e_overlapped_ms")
    share = f"{formatting.percent(exposed.value / step.value)} of a step" if exposed and step and step.value > 0 else ""
    return Tiles(
        (
            _tile(figures, "speedup_vs_sequential", "Speed-up of overlap", "over sequential steps"),
            _tile(figures, "compute_slowdown", "Compute slowdown", "of the same kernels under overlap"),
            _tile(figures, "gap_to_ideal", "Gap to ideal", "step time over that without contention"),
            _tile(figures, "exposed_comm_ms", "Exposed communication", share),
        )
    )


def _tile(figures: Figures, name: str, label: str, remark: str) -> Tile:
    figure = figures.get(name)
    if figure is None:
        return Tile(label, "not measured")
    unit, signed = tables.UNITS[name], name in terminal.CHANGES
    bounds = formatting.interval(figure, unit, signed=signed)
    return Tile(
        label,
        formatting.quantity(figure.value, unit, signed=signed),
        bounds or "too few blocks for an interval",
        remark,
    )


# -- is it worth it?


def worth(subject: Subject) -> Section:
    """Step time in each mode."""
    figures = subject.figures
    overlapped, sequential = figures.get("e2e_overlapped_ms"), figures.get("e2e_sequential_ms")
    title = "Is overlap worth it here?"
    if overlapped is None or sequential is None:
        blocks: list[Block] = [Note(_why_no_steps(subject))]
        if overlapped is not None or sequential is not None:
            blocks.append(mode_bars([("", figures)]))
        return Section(title, "", blocks)
    saved = sequential.value - overlapped.value
    if subject.control:
        answer = (
            f"Both sides ran overlapped: {formatting.milliseconds(overlapped.value)} and "
            f"{formatting.milliseconds(sequential.value)} a step. The difference is the error of the measurement."
        )
    else:
        answer = (
            f"A step takes {formatting.milliseconds(overlapped.value)} overlapped and "
            f"{formatting.milliseconds(sequential.value)} with the same work run sequentially: overlap "
            f"{'saves' if saved >= 0 else 'costs'} {formatting.milliseconds(abs(saved))} a step."
        )
        ideal = figures.get("e2e_ideal_ms")
        if ideal is not None:
            answer += f" Overlap without contention would take {formatting.milliseconds(ideal.value)}."
    return Section(title, answer, [mode_bars([("", figures)])])


def _why_no_steps(subject: Subject) -> str:
    if not subject.measured:
        return "No step was measured."
    if subject.record.windows and not subject.record.valid_windows:
        return "Step times are not compared: no window is valid. The part on the measurement, below, says why."
    return "Step times were not measured in both modes."


# -- what does it cost?


def cost(subject: Subject) -> Section:
    """Slowdown, by kernel and by what ran beside it; power."""
    blocks: list[Block] = []
    window = subject.latest_valid("kernels")
    if window is not None:
        blocks.append(tables.kernel_table(window))
    paired = subject.latest_valid("pairs")
    if paired is not None:
        blocks.append(tables.pair_table(paired))
    if window is None:
        blocks.append(Note(_why_no_kernels(subject)))
    elif paired is None:
        blocks.append(Note("What ran beside what was not measured."))
    blocks += power_blocks(subject.record.valid_windows or subject.windows)
    answer = f"{_cost_answer(subject.figures)} {power_answer(subject.record.valid_windows)}".strip()
    if subject.control:
        answer = "Both sides ran overlapped, so what differs between them below is the error of measurement."
    return Section("What does it cost?", answer, blocks)


def _cost_answer(figures: Figures) -> str:
    sentences = []
    compute = figures.get("compute_slowdown")
    if compute is not None:
        sentences.append(
            f"Beside communication, the same compute kernels take {_longer(compute)}{_lost(figures)}{_chance(compute)}."
        )
    communication = figures.get("comm_slowdown")
    if communication is not None:
        sentences.append(f"Communication kernels take {_longer(communication)}{_chance(communication)}.")
    return " ".join(sentences)


def _longer(figure: Estimate) -> str:
    bounds = formatting.interval(figure, "fraction", signed=True)
    change = f"{formatting.percent(abs(figure.value))} {'longer' if figure.value >= 0 else 'less'}"
    return change + (f" (95 % interval {bounds})" if bounds else "")


def _lost(figures: Figures) -> str:
    overlapped, isolated = figures.get("compute_ms"), figures.get("compute_isolated_ms")
    if overlapped is None or isolated is None:
        return ""
    lost = overlapped.value - isolated.value
    return f": {formatting.milliseconds(lost, signed=True)} of kernel time a step"


def _chance(figure: Estimate) -> str:
    return ", which may be chance" if formatting.may_be_chance(figure) else ""


def _why_no_kernels(subject: Subject) -> str:
    if subject.windows and not subject.record.valid_windows:
        return "Kernels are not compared: no window is valid. The part on the measurement, below, says why."
    if subject.run.schedule.get("profiled_steps") == 0:
        return "Kernels were not profiled: the schedule has profiled_steps=0, so what overlap costs them is not known."
    return "Kernels were not measured: no window has a profile."


# -- how far from ideal?


def ideal(subject: Subject) -> Section:
    """What stands between a step and the ideal one, and how the time passes."""
    blocks: list[Block] = []
    parts = step_parts(subject.figures)
    if parts is not None:
        blocks.append(parts)
    drawn = subject.latest("pictures")
    if drawn is not None:
        blocks.append(timeline(drawn))
    else:
        blocks.append(Note("No step was drawn: that needs a profile of rank 0."))
    divided = subject.latest("dimensions")
    if divided is not None:
        if len(divided.dimensions) > 1:
            blocks.append(dimension_chart(divided))
        blocks.append(tables.dimension_table(divided))
    collectives = subject.latest("collectives")
    if collectives is not None:
        blocks.append(tables.collective_table(collectives))
    else:
        blocks.append(Note("No collective was recorded."))
    return Section(
        "How far from ideal, and what holds it back?", "" if subject.control else _ideal_answer(subject.figures), blocks
    )


def _ideal_answer(figures: Figures) -> str:
    gap, exposed, hidden = (figures.get(name) for name in ("gap_to_ideal", "exposed_comm_ms", "hidden_comm_fraction"))
    sentences = []
    if gap is not None:
        side = "above" if gap.value >= 0 else "below"
        bounds = formatting.interval(gap, "fraction", signed=True)
        shown = f" (95 % interval {bounds})" if bounds else ""
        sentences.append(f"Steps are {formatting.percent(abs(gap.value))} {side} the ideal of equation 4{shown}"
                         f"{_chance(gap)}.")  # fmt: skip
    costs = {
        "exposed communication": exposed.value if exposed else 0.0,
        "contention (kernels that run longer)": _difference(figures, "e2e_overlapped_ms", "e2e_ideal_ms"),
        "time in which the device did neither": figures["idle_ms"].value if "idle_ms" in figures else 0.0,
    }
    if exposed is not None and max(costs.values()) > 0:
        largest, *others = sorted((item for item in costs.items() if item[1] > 0), key=lambda item: -item[1])
        sentence = f"What holds a step back most is {largest[0]}, {formatting.milliseconds(largest[1])} a step"
        if others:
            sentence += "; then " + ", ".join(f"{name}, {formatting.milliseconds(value)}" for name, value in others)
        sentences.append(sentence + ".")
    if hidden is not None:
        sentences.append(f"Of all communication time, {formatting.percent(hidden.value)} is hidden behind compute.")
    return " ".join(sentences)


def _difference(figures: Figures, name: str, other: str) -> float:
    found, taken = figures.get(name), figures.get(other)
    return found.value - taken.value if found is not None and taken is not None else 0.0


def dimension_chart(window: OverlapReport) -> Chart:
    """Hidden and exposed communication of each dimension."""
    rows = [
        {
            "label": " ".join(formatting.clean(row.dimension).split()),  # on one line, as the bar is
            "parts": [
                {
                    "name": "hidden",
                    "color": "both",
                    "value": formatting.rounded(max(0.0, row.comm_ms - row.exposed_ms)),
                },
                {"name": "exposed", "color": "communication", "value": formatting.rounded(row.exposed_ms)},
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
