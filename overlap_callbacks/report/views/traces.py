"""What traces show: what the devices do with their time, what holds them up, and the tables of an analysis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.formatting import (
    DASH,
    PAGE,
    change_in_words,
    count,
    page_sentence,
    page_text,
    rounded,
    short_kernel_name,
    shortened,
)
from overlap_callbacks.analysis.results.kernel_times import StepTimeline
from overlap_callbacks.report.trace_verdict import names_of, verdict
from overlap_callbacks.report.views.elements import (
    Block,
    Cell,
    Chart,
    Document,
    Head,
    Note,
    RunPage,
    Section,
    Table,
    Tile,
    Tiles,
    heads,
)
from overlap_callbacks.report.views.step_charts import both
from overlap_callbacks.report.views.tables import EMPTY, change_cell, name_cell, number_cell, without_empty_columns
from overlap_callbacks.traces.device_time import DeviceTime
from overlap_callbacks.traces.figures import Analysis, CollectiveSize, StepFigures, TraceFigures

_FOOT = (
    "Equation 2 is that of arXiv 2507.03114, section IV-D. A trace is one observation: there are no intervals. The "
    "slowdown estimated from a trace is an association; a run with the monitor measures the cause."
)
# Devices with a part of their own, and steps in a chart.
_MAX_DEVICES, _MAX_STEPS = 16, 24
# Points of a curve against time, and characters of a kernel's name.
_POINTS, _MAX_NAME = 60, 90
_PARTS = (
    ("compute", "compute"), ("exposed communication", "communication"), ("copies", "both"),
    ("waiting for the host", "sequential"), ("other idle time", "idle"),
)  # fmt: skip


def trace_document(analysis: Analysis) -> Document:
    """What an analysis of traces found."""
    shown = analysis.traces[:_MAX_DEVICES]
    runs = tuple([_device(f"run-{i}", trace, analysis) for i, trace in enumerate(shown, 1)])
    together = tuple(_together(analysis)) if len(analysis.traces) > 1 else ()
    names = ", ".join(dict.fromkeys(_name(trace) for trace in shown[:4]))
    heading = f"{len(analysis.traces)} devices compared"
    return Document(f"Traces: {names}", runs, _FOOT, heading, compared=together)


def _name(trace: TraceFigures) -> str:
    return page_text(Path(trace.file).name, 80)


def _device(identity: str, trace: TraceFigures, analysis: Analysis) -> RunPage:
    """The part of one device of one file."""
    alone = len(analysis.traces) == 1
    sentences = verdict(Analysis(library_version="", traces=(trace,), skew=(), problems=()), PAGE)
    first, *rest = sentences or ("The file holds no kernels.",)
    rank = "" if trace.rank is None else f"rank {trace.rank} of {trace.world_size}"
    where = "CPU" if trace.on_host else f"device {trace.device} {trace.device_name}".strip()
    sections = [
        _time(trace),
        *_paths(trace, rest),
        _cost(trace),
        *_kernels(trace),
        *_communication(trace, analysis.sizes if alone else ()),
        *_when(trace),
        _quality(trace, analysis.problems if alone else ()),
    ]
    name = _name(trace) if trace.rank is None or alone else f"rank {trace.rank}: {_name(trace)}"
    head = " · ".join(part for part in (rank, page_text(where)) if part)
    return RunPage(identity, name, head, page_sentence(first), _first(trace), tuple(sections))


def _first(trace: TraceFigures) -> tuple[Block, ...]:
    """What must be read before any figure, and the shares of the time; none of a file that lacks kernels."""
    warnings = [_warning(warning) for warning in trace.warnings]
    return (*warnings, *(() if trace.total.cut else _tiles(trace)))


def _warning(text: str) -> Note:
    return Note(page_text(text, 2000), warning=True)


def _tiles(trace: TraceFigures) -> tuple[Block, ...]:
    if not trace.time or not trace.time[0].span_ms:
        return ()
    whole, total = trace.time[0], trace.total
    tiles = [Tile("Compute", _share(whole.compute_ms, whole), remark="of the time")]
    tiles.append(Tile("Exposed communication", _share(whole.exposed_comm_ms, whole), remark="of the time"))
    if whole.idle_host_ms is None:
        tiles.append(Tile("Idle", _share(whole.idle_ms, whole), remark="of the time"))
    else:
        host_ms = whole.idle_host_ms + (whole.idle_launch_ms or 0.0)
        tiles.append(Tile("Waiting for the host", _share(host_ms, whole), remark="of the time"))
    if total.overlap_ratio is not None:
        ratio = PAGE.percent(total.overlap_ratio)
        tiles.append(Tile("Overlap ratio", ratio, remark="of compute ran beside communication"))
    return (Tiles(tuple(tiles)),)


def _share(part_ms: float, whole: DeviceTime) -> str:
    return PAGE.percent(part_ms / whole.span_ms)


# -- one device


def _time(trace: TraceFigures) -> Section:
    title = "What does the device do with its time?"
    if not trace.time:
        return Section(title, "", [Note("The file holds no kernels.")])
    whole, *steps = trace.time
    shown = steps[:_MAX_STEPS] or [whole]
    rows = [(f"step {time.step}" if time.step is not None else "the file", time) for time in shown]
    caption = "From the last kernel of the step before to the last of its own."
    if len(shown) < len(steps):
        caption += f" The first {len(shown)} of {len(steps)} steps."
    blocks: list[Block] = [_stack("Where the time of a step goes", rows, caption), _time_table(trace)]
    return Section(title, "", blocks)


def _stack(title: str, rows: Sequence[tuple[str, DeviceTime]], caption: str) -> Chart:
    data = []
    for label, time in rows:
        host_ms = (time.idle_host_ms or 0.0) + (time.idle_launch_ms or 0.0)
        values = (time.compute_ms, time.exposed_comm_ms, time.copy_ms, host_ms, time.idle_ms - host_ms)
        parts = [
            {"name": name, "color": color, "value": rounded(max(value, 0.0))}
            for (name, color), value in zip(_PARTS, values, strict=True)
        ]
        data.append({"label": label, "parts": parts})
    return Chart("stack", title, {"unit": "ms", "rows": data}, caption, _PARTS)


def _time_table(trace: TraceFigures) -> Table:
    of_step: dict[int | None, StepFigures] = {step.step: step for step in (trace.total, *trace.steps)}
    rows = []
    for time in trace.time:
        step = of_step.get(time.step)
        times = (time.span_ms, time.compute_ms, time.exposed_comm_ms, time.copy_ms)
        idle = (time.idle_host_ms, time.idle_launch_ms, time.idle_other_ms)
        if time.idle_host_ms is None:
            idle = (None, None, time.idle_ms)
        rows.append(
            (
                _step_cell(time.step),
                *(number_cell(value, 3) for value in (*times, *idle)),
                _percent_cell(step.overlap_ratio if step else None),
                _percent_cell(step.hidden_comm_fraction if step else None),
            )
        )
    columns = heads(
        "*Step", "Length, ms", "Compute", "Exposed comm.", "Copies", "Host", "Launch", "Other idle", "Overlap ratio",
        "Comm. hidden",
    )  # fmt: skip
    caption = (
        "Host: what runs next had not been launched. Launch: it had been since the device fell idle. Other: it "
        "had been launched before."
    )
    return without_empty_columns("Time by step", columns, rows, caption)


def _paths(trace: TraceFigures, sentences: Sequence[str]) -> list[Section]:
    if not trace.paths:
        return []
    rows = []
    for path in trace.paths:
        times = (path.length_ms, path.compute_ms, path.comm_ms, path.copy_ms, path.launch_ms, path.host_ms)
        most = (path.at_most_comm_ms, path.at_most_host_ms, path.at_most_compute_ms)
        cells = [number_cell(value, 3) for value in (*times, path.other_ms, *most)]
        rows.append((_step_cell(path.step), *cells))
    columns = heads(
        "*Step", "Length, ms", "Compute", "Comm.", "Copies", "Launch", "Host", "Other", "Won: comm.", "Won: host",
        "Won: compute",
    )  # fmt: skip
    caption = (
        "The chain of work that a step's length is the sum of. Won: by how much the step would be shorter at most if "
        "communication, the host or compute took no time; empty where the file does not tell."
    )
    blocks: list[Block] = [without_empty_columns("Critical path", columns, rows, caption)]
    if trace.queues:
        queues = tuple(
            (
                name_cell(queue.stream),
                number_cell(queue.launches, 0),
                number_cell(queue.mean),
                number_cell(queue.longest, 0),
                number_cell(queue.delay_ms, 3),
            )
            for queue in trace.queues
        )
        heading = heads("*Stream", "Launches", "Mean in queue", "Longest queue", "Mean delay, ms")
        caption = "What was launched and had not started yet: how far the host runs ahead."
        blocks.append(Table("Launches in flight", heading, queues, caption))
    return [Section("What holds the steps up?", page_sentence(" ".join(sentences)), blocks)]


def _cost(trace: TraceFigures) -> Section:
    title, estimate = "What does overlap cost?", trace.estimate
    answer = "No estimate: no kernel is found both beside communication and alone."
    if estimate is not None:
        answer = (
            f"An estimate from this file alone: compute kernels take "
            f"{change_in_words(estimate.slowdown, 'longer', 'less time', PAGE)} beside communication. It rests on "
            f"{estimate.method}: "
            f"{estimate.calls_beside} calls beside communication against {estimate.calls_alone} alone."
        )
    kinds = list(dict.fromkeys(kind for family in trace.families for kind in family.beside))[:4]
    rows = []
    for family in trace.families:
        found = estimate.families.get(family.family) if estimate is not None else None
        rows.append(
            (
                name_cell(family.family),
                number_cell(family.calls, 0),
                number_cell(family.time_ms, 3),
                *(number_cell(family.beside.get(kind), 3) for kind in kinds),
                change_cell(None if found is None else found.slowdown),
                number_cell(None if found is None else found.calls_beside, 0),
            )
        )
    columns = (
        *heads("*Family", "Calls", "Time, ms"),
        *[Head(f"Beside {page_text(kind)}") for kind in kinds],
        *heads("Estimated slowdown", "Calls that it rests on"),
    )
    caption = "Compute kernels by family, in the whole file."
    blocks = [without_empty_columns("Compute by family", columns, rows, caption)] if rows else []
    return Section(title, page_sentence(answer), blocks)


def _kernels(trace: TraceFigures) -> list[Section]:
    if not trace.kernels:
        return []
    rows = tuple(
        (
            name_cell(kernel.name, shortened(short_kernel_name(kernel.name), _MAX_NAME)),
            name_cell(kernel.family),
            number_cell(kernel.calls, 0),
            number_cell(kernel.time_ms, 3),
            _percent_cell(kernel.share),
            number_cell(kernel.longest_ms, 3),
            number_cell(kernel.beside_ms, 3),
        )
        for kernel in trace.kernels
    )
    columns = heads("*Kernel", "*Family", "Calls", "Time, ms", "Share", "Longest, ms", "Overlapped, ms")
    caption = "In the whole file. Overlapped: beside communication; of a collective, beside compute."
    return [Section("Which kernels take the time?", "", [Table("Top kernels", columns, rows, caption)])]


def _communication(trace: TraceFigures, sizes: Sequence[CollectiveSize]) -> list[Section]:
    if not trace.collectives:
        return []
    rows = []
    for row in trace.collectives:
        rows.append(
            (
                name_cell(row.collective),
                name_cell(row.description or row.group),
                number_cell(row.group_size, 0),
                number_cell(row.count, 0),
                number_cell(None if row.bytes is None else row.bytes / 1e6),
                number_cell(row.time_ms, 3),
                number_cell(row.hidden_ms, 3),
                number_cell(row.algorithm_bandwidth_gb_s),
                number_cell(row.bus_bandwidth_gb_s),
            )
        )
    columns = heads("*Collective", "*Group", "Ranks", "Kernels", "MB", "Time, ms", "Hidden, ms", "GB/s", "Bus GB/s")
    blocks: list[Block] = [without_empty_columns("Collectives", columns, rows, "In the whole file, waiting included.")]
    return [Section("What is communicated?", "", [*blocks, *_sizes(sizes)])]


def _sizes(sizes: Sequence[CollectiveSize]) -> list[Block]:
    if not sizes:
        return []
    rows = []
    for row in sizes:
        rows.append(
            (
                name_cell(row.collective),
                number_cell(row.group_size, 0),
                number_cell(row.bytes / 1e6, 3),
                number_cell(row.kernels, 0),
                number_cell(row.time_ms, 3),
                number_cell(row.bus_bandwidth_gb_s),
                number_cell(row.transfer_ms, 3),
                number_cell(row.transfer_bus_bandwidth_gb_s),
            )
        )
    columns = heads(
        "*Collective", "Ranks", "MB", "Kernels", "ms each", "Bus GB/s", "Transfer, ms", "Bus GB/s of the transfer"
    )
    caption = "Over all files, waiting included."
    if any(row.matched for row in sizes):
        caption += " The transfer is the shortest kernel over the ranks: that of the last to come."
    return [without_empty_columns("Collectives by size", columns, rows, caption)]


def _when(trace: TraceFigures) -> list[Section]:
    blocks: list[Block] = []
    if trace.utilisation is not None:
        blocks.append(_utilisation(trace))
    if trace.picture is not None:
        blocks.append(_picture(trace.picture, trace.steps[0].step if trace.steps else None))
    return [Section("When does the device work?", "", blocks)] if blocks else []


def _utilisation(trace: TraceFigures) -> Chart:
    use = trace.utilisation
    assert use is not None
    every = max(1, len(use.compute) // _POINTS)
    decimals = 0 if use.part_ms * every >= 1 else 3
    series = []
    for name, color, shares in (
        ("compute", "compute", use.compute), ("exposed communication", "communication", use.exposed_comm)
    ):  # fmt: skip
        points = []
        for i in range(0, len(shares), every):
            part = shares[i : i + every]
            points.append([rounded(round(i * use.part_ms, decimals)), "", rounded(sum(part) / len(part)), None, None])
        series.append({"name": name, "color": color, "points": points})
    data = {"series": series, "unit": "fraction", "x_label": "ms", "numeric": True, "ideal": None}
    caption = "Shares of equal parts of the file, each from the time below it on."
    return Chart("against", "Utilisation over time", data, caption, (("compute", "compute"), _PARTS[1]))


def _picture(picture: StepTimeline, step: int | None) -> Chart:
    def short(pairs: Sequence[tuple[float, float]]) -> list[list[float]]:
        return [[round(start, 4), round(end, 4)] for start, end in pairs]

    lanes = {
        "mode": "The file" if step is None else f"Step {step}",
        "step_ms": rounded(picture.step_ms),
        "compute": short(picture.compute),
        "communication": short(picture.communication),
        "both": short(both(picture.compute, picture.communication)),
    }
    title = "Timeline of the file" if step is None else "Timeline of one step"
    caption = "From its first kernel to its last."
    if picture.closed_compute_ms or picture.closed_communication_ms:
        caption += " The shortest gaps are closed, to keep the page small."
    legend = (("compute", "compute"), ("communication", "communication"), ("both at once", "both"))
    return Chart("timeline", title, {"unit": "ms", "modes": [lanes]}, caption, legend)


def _quality(trace: TraceFigures, problems: Sequence[str]) -> Section:
    said = [*trace.problems, *problems]
    answer = "Nothing is doubtful about the file." if not said else f"{count(len(said), 'note')}."
    return Section("Can the file be trusted?", answer, [Note(page_text(problem, 2000)) for problem in said])


def _step_cell(step: int | None) -> Cell:
    return Cell("all", None) if step is None else Cell(str(step), step)


def _percent_cell(value: float | None) -> Cell:
    return EMPTY if value is None else Cell(PAGE.percent(value), value)


# -- several devices


def _together(analysis: Analysis) -> list[Section]:
    """Skew first, then the devices side by side."""
    sentences = verdict(analysis, PAGE)
    sections = []
    first = 0
    if analysis.skew:
        first = 1
        rows = []
        for skew in analysis.skew:
            for rank in skew.ranks:
                rows.append(
                    (
                        name_cell(skew.collective),
                        name_cell(skew.group),
                        Cell(f"{rank.rank}", rank.rank),
                        number_cell(skew.count, 0),
                        number_cell(skew.transfer_ms, 3),
                        number_cell(rank.time_ms, 3),
                        number_cell(rank.waiting_ms, 3),
                        number_cell(rank.last, 0),
                    )
                )
        columns = heads(
            "*Collective", "*Group", "Rank", "Collectives", "Transfer, ms", "Time, ms", "Waiting, ms", "Last to come"
        )
        caption = "The transfer is the shortest kernel of each collective; the rest is waiting for the last rank."
        table = without_empty_columns("Collectives over the ranks", columns, rows, caption)
        sections.append(Section("Do the ranks wait for one another?", page_sentence(sentences[0]), [table]))
    named = list(zip(names_of(analysis.traces), analysis.traces, strict=True))[:_MAX_STEPS]
    shown = [(page_text(name), _mean_step(trace.time)) for name, trace in named if trace.time and not trace.total.cut]
    blocks: list[Block] = []
    if shown:
        caption = "Means over the steps of each file; a file without steps counts as one."
        blocks.append(_stack("Where the time goes, by rank", shown, caption))
    if len(analysis.traces) > _MAX_DEVICES:
        parts = f"The first {_MAX_DEVICES} of {len(analysis.traces)} devices have a part of their own below."
        blocks.append(Note(parts))
    problems = [problem for problem in analysis.problems if problem not in analysis.warnings]
    blocks += [*_sizes(analysis.sizes), *[Note(page_text(problem, 2000)) for problem in problems]]
    answer = page_sentence(" ".join(sentences[first:]))
    sections.append(Section("How do the ranks differ?", answer or DASH, blocks))
    head, *rest = sections
    warnings = [_warning(warning) for warning in analysis.warnings]
    return [dataclasses.replace(head, blocks=[*warnings, *head.blocks]), *rest]


def _mean_step(time: Sequence[DeviceTime]) -> DeviceTime:
    """The mean over the steps; the whole file where it has none."""
    steps = time[1:] or time
    names = [name for name in DeviceTime.__struct_fields__ if name != "step"]
    means: dict[str, Any] = {}
    for name in names:
        values = [value for step in steps if (value := getattr(step, name)) is not None]
        means[name] = sum(values) / len(values) if values else None
    return DeviceTime(step=None, **means)
