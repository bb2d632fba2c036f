"""One device's trace: where its time goes, what limits it, and what overlap costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overlap_callbacks.analysis.formatting import (
    PAGE,
    change_in_words,
    count,
    page_sentence,
    page_text,
    rounded,
    short_kernel_name,
    shortened,
)
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.report.views.elements import (
    Block,
    Cell,
    Chart,
    Column,
    Note,
    RunPage,
    Section,
    Table,
    Tile,
    Tiles,
    line,
    name_cell,
    table_of,
)
from overlap_callbacks.report.views.step_charts import lanes, stack
from overlap_callbacks.report.views.tables import WITH_WAITING, exposure_tables, pair_table
from overlap_callbacks.report.views.trace_verdict import verdict
from overlap_callbacks.traces.device_time import DeviceTime
from overlap_callbacks.traces.figures import Analysis, CollectiveSize, FamilyFigures, StepFigures, TraceFigures

_ON_HOST = 3  # index in ``_PARTS`` of a part that few jobs have
# Maximum steps in a chart, and characters of a kernel's name.
MAX_STEPS, _MAX_NAME = 24, 90
# Rows of a table, and notes, on the first screen of a terminal.
FEW_ROWS, _FEW_NOTES = 4, 2
_PARTS = (
    ("compute", "compute"), ("exposed communication", "communication"), ("copies", "both"),
    ("communication on the host", "ideal"), ("waiting for the host", "sequential"), ("other idle time", "idle"),
)  # fmt: skip


def file_name(trace: TraceFigures) -> str:
    return page_text(Path(trace.file).name, 80)


def device_page(identity: str, trace: TraceFigures, analysis: Analysis) -> RunPage:
    """The part of one device of one file."""
    alone = len(analysis.traces) == 1
    splits, exposure = analysis.splits if alone else None, trace.exposure
    own = Analysis(library_version="", traces=(trace,), skew=(), problems=(), splits=splits, exposure=exposure)
    sentences = verdict(own, PAGE)
    first, *rest = map(page_sentence, sentences or ("The file holds no kernels.",))
    world = "" if trace.world_size is None else f" of {trace.world_size}"
    rank = "" if trace.rank is None else f"rank {trace.rank}{world}"
    where = "CPU" if trace.on_host else f"device {trace.device} {trace.device_name}".strip()
    sections = [
        _time(trace, alone),
        *_paths(trace),
        _cost(trace),
        *kernel_sections(trace, alone),
        *_communication(trace, analysis.sizes if alone else (), alone),
        *_when(trace),
        _quality(trace, analysis, alone),
    ]
    warnings = [warning_note(warning) for warning in (*(analysis.warnings if alone else ()), *trace.warnings)]
    # Shares are unknown if the file lacks kernels.
    blocks = (*warnings, *(() if trace.total.cut else _tiles(trace)))
    name = file_name(trace) if trace.rank is None else f"rank {trace.rank}: {file_name(trace)}"
    head = " · ".join(part for part in (file_name(trace) if alone else "", rank, page_text(where)) if part)
    return RunPage(identity, "" if alone else name, head, first, blocks, tuple(sections), tuple(rest))


def warning_note(text: str) -> Note:
    """A warning to be read before any figure."""
    return Note(page_text(text, 2000), warning=True, first=True)


def _tiles(trace: TraceFigures) -> tuple[Block, ...]:
    if not trace.time or not trace.time[0].span_ms:
        return ()
    whole, total = trace.time[0], trace.total
    host_ms, other_ms = idle(whole)
    shares = (
        ("Compute", whole.compute_ms),
        ("Exposed communication", whole.exposed_comm_ms),
        *([("Communication on the host", whole.exposed_on_host_ms)] if whole.exposed_on_host_ms else []),
        ("Idle", other_ms) if host_ms is None else ("Waiting for the host", host_ms),
    )
    tiles = [Tile(label, PAGE.percent((ms or 0.0) / whole.span_ms), remark="of the time") for label, ms in shares]
    if total.overlap_ratio is not None:
        ratio = PAGE.percent(total.overlap_ratio)
        tiles.append(Tile("Overlap ratio", ratio, remark="of compute ran during communication"))
    return (Tiles(tuple(tiles)),)


def idle(time: DeviceTime) -> tuple[float | None, float | None]:
    """Idle time caused by the host (launch delay included), and the rest; all of it is rest if causes are unknown.

    Neither includes waiting for communication on the host.
    """
    if time.idle_host_ms is None:
        return None, time.idle_ms - (time.exposed_on_host_ms or 0.0)
    return time.idle_host_ms + (time.idle_launch_ms or 0.0), time.idle_other_ms


def _time(trace: TraceFigures, first: bool) -> Section:
    title = "What does the device do with its time?"
    if not trace.time:
        return Section(title, "", [Note("The file holds no kernels."), _step_table(trace)])
    whole, *steps = trace.time
    shown = steps[:MAX_STEPS] or [whole]
    rows = [(f"step {time.step}" if time.step is not None else "the file", time) for time in shown]
    caption = "From the last kernel of the step before to the last of its own."
    if len(shown) < len(steps):
        caption += f" The first {len(shown)} of {len(steps)} steps."
    time_table = table_of(
        f"Where the time goes on the {'CPU' if trace.on_host else 'device'}, ms",
        trace.time,
        Column("*Step", _step_cell),
        Column("Length", lambda time: time.span_ms, "ms"),
        Column("Compute", lambda time: time.compute_ms, "ms"),
        Column("Exposed comm.", lambda time: time.exposed_comm_ms, "ms"),
        Column("Copies", lambda time: time.copy_ms, "ms"),
        Column("Comm. on host", lambda time: time.exposed_on_host_ms, "ms"),
        Column("Host", lambda time: time.idle_host_ms, "ms"),
        Column("Launch", lambda time: time.idle_launch_ms, "ms"),
        Column("Other idle", lambda time: idle(time)[1], "ms"),
        caption="Host: what runs next had not been launched. Launch: it had been since the device fell idle. Other: it "
        "had been launched before."
        + (" Comm. on host: meanwhile the host waited for its own." if whole.exposed_on_host_ms is not None else ""),
        first=first,
        few=FEW_ROWS,
        drop_empty=True,
    )
    stacks = time_stack("Where the time of a step goes", rows, caption)
    return Section(title, "", [stacks, time_table, _step_table(trace)])


def time_stack(title: str, rows: Sequence[tuple[str, DeviceTime]], caption: str) -> Chart:
    data = []
    for label, time in rows:
        on_host_ms, host_ms = time.exposed_on_host_ms or 0.0, idle(time)[0] or 0.0
        ran = (time.compute_ms, time.exposed_comm_ms, time.copy_ms)
        data.append((label, (*ran, on_host_ms, host_ms, time.idle_ms - on_host_ms - host_ms)))
    shown = [place for place in range(len(_PARTS)) if place != _ON_HOST or any([row[place] for _, row in data])]
    of_shown = [(label, [row[place] for place in shown]) for label, row in data]
    return stack(title, "ms", [_PARTS[place] for place in shown], of_shown, caption, in_table=True)


def _step_table(trace: TraceFigures) -> Table:
    return table_of(
        "Kernel times by step of the host, ms",
        (trace.total, *trace.steps),
        Column("*Step", _step_cell),
        Column("Length", lambda step: step.wall_ms, "ms"),
        Column("Compute", lambda step: step.compute_ms, "ms"),
        Column("Comm.", lambda step: step.comm_ms, "ms"),
        Column("Hidden", lambda step: step.hidden_comm_ms, "ms"),
        Column("Exposed", lambda step: step.exposed_comm_ms, "ms"),
        Column("Overlap ratio", lambda step: step.overlap_ratio, "percent"),
        Column("Comm. hidden", lambda step: step.hidden_comm_fraction, "percent"),
        caption="Kernels that a step of the host has launched.",
    )


def _paths(trace: TraceFigures) -> list[Section]:
    path_table = table_of(
        "Critical path, ms",
        trace.paths,
        Column("*Step", _step_cell),
        Column("Length", lambda path: path.length_ms, "ms"),
        Column("Compute", lambda path: path.compute_ms, "ms"),
        Column("Comm.", lambda path: path.comm_ms, "ms"),
        Column("Copies", lambda path: path.copy_ms, "ms"),
        Column("Launch", lambda path: path.launch_ms, "ms"),
        Column("Host", lambda path: path.host_ms, "ms"),
        Column("Comm. on host", lambda path: path.on_host_ms, "ms"),
        Column("Other", lambda path: path.other_ms, "ms"),
        Column("Won: comm.", lambda path: path.at_most_comm_ms, "ms"),
        Column("Won: host", lambda path: path.at_most_host_ms, "ms"),
        Column("Won: compute", lambda path: path.at_most_compute_ms, "ms"),
        caption="The chain of work that a step's length is the sum of. Won: up to how much shorter the step would "
        "be if communication, the host or compute took no time; empty where the file does not tell.",
        drop_empty=True,
    )
    queue_table = table_of(
        "Launches in flight",
        trace.queues,
        Column("*Stream", lambda queue: queue.stream),
        Column("Launches", lambda queue: queue.launches, "whole"),
        Column("Mean in queue", lambda queue: queue.mean),
        Column("Longest queue", lambda queue: queue.longest, "whole"),
        Column("Mean delay, ms", lambda queue: queue.delay_ms, "ms"),
        caption="What was launched and had not started yet: how far the host runs ahead.",
    )
    blocks = [table for table in (path_table, queue_table) if table.rows]
    return [Section("What holds the steps up?", "", blocks)] if blocks else []


def _cost(trace: TraceFigures) -> Section:
    title, estimate = "What does overlap cost?", trace.estimate
    answer = "No estimate: no kernel is found both during communication and alone."
    if estimate is not None:
        beside = estimate.calls_beside
        answer = (
            f"An estimate from this file alone: compute kernels take "
            f"{change_in_words(estimate.slowdown, 'longer', 'less time', PAGE)} during communication. It rests on "
            f"{estimate.method}: {beside} of {beside + estimate.calls_left_out} calls during communication "
            f"({PAGE.ms(estimate.time_beside_ms)}) against {estimate.calls_alone} alone. That is an association: "
            "`overlap compare` with a sequential trace, or the live monitor, measures the cause."
        )
    kinds = list(dict.fromkeys(kind for family in trace.families for kind in family.beside))[:4]
    estimates = {} if estimate is None else estimate.families
    families = table_of(
        "Compute by family",
        trace.families,
        Column("*Family", lambda family: family.family),
        Column("Calls", lambda family: family.calls, "whole"),
        Column("Time, ms", lambda family: family.time_ms, "ms"),
        *map(_beside, kinds),
        Column("Estimated slowdown", lambda family: _estimated(estimates, family.family, "slowdown"), "change"),
        Column("Calls that it rests on", lambda family: _estimated(estimates, family.family, "calls_beside"), "whole"),
        caption="Compute kernels by family, in the whole file.",
        drop_empty=True,
    )
    blocks = [families, pair_table(
        "During copies, and copies during communication", trace.beside_copies,
        "In the whole file, calls that have the same call alone to compare with. An association too, without what is "
        f"within noise. {WITH_WAITING}", folded=False,
    )]  # fmt: skip
    return Section(title, page_sentence(answer), [table for table in blocks if table.rows])


def _beside(kind: str) -> Column[FamilyFigures]:
    return Column(f"During {page_text(kind)}", lambda family: family.beside.get(kind), "ms")


def _estimated(estimates: dict[str, Any], family: str, figure: str) -> float | None:
    return None if family not in estimates else getattr(estimates[family], figure)


def kernel_sections(trace: TraceFigures, first: bool, of: str = "", few: int = FEW_ROWS) -> list[Section]:
    kernels = table_of(
        f"Top kernels{of}",
        trace.kernels,
        Column("~Kernel", lambda kernel: name_cell(kernel.name, shortened(short_kernel_name(kernel.name), _MAX_NAME))),
        Column("*Family", lambda kernel: kernel.family),
        Column("Calls", lambda kernel: kernel.calls, "whole"),
        Column("Time, ms", lambda kernel: kernel.time_ms, "ms"),
        Column("Share", lambda kernel: kernel.share, "percent"),
        Column("Longest, ms", lambda kernel: kernel.longest_ms, "ms"),
        Column("Overlapped, ms", lambda kernel: kernel.beside_ms, "ms"),
        caption="In the whole file. Overlapped: during communication; of a collective, during compute.",
        first=first,
        few=few,
    )
    return [Section("Which kernels take the time?", "", [kernels])] if trace.kernels else []


def _communication(trace: TraceFigures, sizes: Sequence[CollectiveSize], first: bool) -> list[Section]:
    on_host = table_of(
        "Collectives on the host",
        trace.on_host_collectives,
        Column("*Collective", lambda row: collective_in_words(row.name)),
        Column("Calls", lambda row: row.calls, "whole"),
        Column("Time, ms", lambda row: row.time_ms, "ms"),
        Column("Exposed, ms", lambda row: row.exposed_ms, "ms"),
        caption="Sums over the calls, which may run at once. Exposed: the device ran nothing, and the host waited for "
        "the collective.",
    )
    host_tables = [on_host] if on_host.rows else []
    blocks = [*exposure_tables(trace.exposure, first=first, few=FEW_ROWS), *host_tables, *size_tables(sizes)]
    return [Section("What is communicated?", "", blocks)] if blocks else []


def size_tables(sizes: Sequence[CollectiveSize]) -> list[Block]:
    caption = "Over all files, waiting included."
    if any(row.matched for row in sizes):
        caption += " The transfer is the shortest kernel over the ranks: that of the last to come."
    table = table_of(
        "Collectives by size",
        sizes,
        Column("*Collective", lambda row: row.collective),
        Column("Ranks", lambda row: row.group_size, "whole"),
        Column("MiB", lambda row: row.bytes / 2**20, 3),
        Column("Kernels", lambda row: row.kernels, "whole"),
        Column("ms each", lambda row: row.time_ms, "ms"),
        Column("Bus GB/s", lambda row: row.bus_bandwidth_gb_s),
        Column("Transfer, ms", lambda row: row.transfer_ms, "ms"),
        Column("Bus GB/s of the transfer", lambda row: row.transfer_bus_bandwidth_gb_s),
        caption=caption,
        drop_empty=True,
    )
    return [table] if sizes else []


def _when(trace: TraceFigures) -> list[Section]:
    blocks: list[Block] = []
    if trace.utilisation is not None:
        use = trace.utilisation
        decimals = 0 if use.part_ms >= 1 else 3
        series = [
            line(
                name, color, [(rounded(round(i * use.part_ms, decimals)), "", share) for i, share in enumerate(shares)]
            )
            for (name, color), shares in zip(_PARTS, (use.compute, use.exposed_comm), strict=False)
        ]
        data = {"series": series, "unit": "fraction", "x_label": "ms", "numeric": True, "ideal": None}
        caption = "Shares of equal parts of the file, each from the time below it on."
        blocks.append(Chart("against", "Utilisation over time", data, caption, _PARTS[:2]))
    if trace.picture is not None:
        name, of = (f"Step {trace.steps[0].step}", "one step") if trace.steps else ("The file", "the file")
        blocks.append(lanes(f"Timeline of {of}", [(name, trace.picture)], "From its first kernel to its last."))
    return [Section("When does the device work?", "", blocks)] if blocks else []


def _quality(trace: TraceFigures, analysis: Analysis, alone: bool) -> Section:
    problems, warnings = list(trace.problems), list(trace.warnings)
    if alone:
        problems, warnings = [*problems, *analysis.problems], [*warnings, *analysis.warnings]
    further = [problem for problem in problems if problem not in warnings]
    answer = f"{count(len(further), 'note')}." if further else "See the warning above."
    if not problems:
        answer = "Nothing is doubtful about the file."
    notes = [Note(page_text(note, 2000), first=alone and place < _FEW_NOTES) for place, note in enumerate(further)]
    return Section("Can the file be trusted?", answer, notes)


def _step_cell(of_step: Any) -> Cell:
    if of_step.step is None:
        return Cell("all")
    cut = isinstance(of_step, StepFigures) and of_step.cut
    return Cell(f"{of_step.step}, cut" if cut else str(of_step.step), of_step.step)
