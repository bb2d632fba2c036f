"""The W&B workspace "Overlap cost": a saved view of a project that answers the questions in order.

Its content is plain data (``SECTIONS``), which can be printed. ``build`` turns it into a workspace with
``wandb-workspaces``, and ``save`` sends it. Charts use the library's own axis, ``overlap/step``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from overlap_callbacks.analysis.results.catalogue import (
    FIGURES,
    HEADLINE,
    STEP_TIMES,
    every_figure,
    figure_named,
    keys_of,
)
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.sinks.wandb.sink import logged_in

DEFAULT_NAME = "Overlap cost"
_STEP = "overlap/step"


class Panel(NamedTuple):
    """A panel's content.

    Attributes:
        kind: ``lines``: metrics along the run. ``bars``: means of each run, run beside run. ``pictures``: HTML, with a
            slider through the windows. ``rows``: a table of the last window that has it. ``curve``: two columns of one.
        title: of the panel.
        keys: of the metrics; a single one for pictures and tables.
        unit: of the metrics.
        columns: of a curve, x and y.
    """

    kind: str
    title: str
    keys: tuple[str, ...]
    unit: str = ""
    columns: tuple[str, ...] = ()


class Section(NamedTuple):
    """Panels under a heading, several per row; unfolded if ``open``."""

    name: str
    panels: tuple[Panel, ...]
    columns: int = 3
    open: bool = True


def keys(sections: Sequence[Section]) -> list[str]:
    """Every key that these sections show, without repetition."""
    return list(dict.fromkeys(key for section in sections for panel in section.panels for key in panel.keys))


# Figures shown together in one panel, by its title.
_TOGETHER = {
    "Step time": tuple([figure.key for figure in STEP_TIMES]),
    "Compute kernels of a step": ("overlap/compute_ms", "overlap/compute_isolated_ms"),
    "Compute busy time": ("overlap/compute_busy_ms", "overlap/compute_busy_isolated_ms"),
    "Communication of a step": ("overlap/comm_ms", "overlap/hidden_comm_ms", "overlap/exposed_comm_ms"),
    "Neither compute nor communication": (
        "overlap/idle_ms",
        "overlap/idle_isolated_ms",
        "overlap/exposed_on_host_ms",
        "overlap/bubble_ms",
    ),
    "Slowdown by the profiler": ("overlap/profiler_slowdown", "overlap/profiler_slowdown_isolated"),
    "Valid, verified and complete windows": ("overlap/valid", "overlap/verified", "overlap/complete"),
    "SMs and tensor cores busy": ("device/{mode}_sm_busy_fraction", "device/{mode}_tensor_busy_fraction"),
    "Causes of the compute slowdown": tuple(
        [key for key in every_figure() if key.startswith("device/slowdown_")],
    ),
}


def _along(figure: Figure, title: str = "") -> Panel:
    """A figure along the run: a headline figure with its interval; a figure of both modes in both."""
    shown = keys_of(figure)
    if figure.formula is not None:
        shown += [f"{figure.key}_ci_low", f"{figure.key}_ci_high"]
    own = figure.title if figure.label else f"{figure.section}: {figure.short}"
    return Panel("lines", title or own, tuple(shown), figure.unit)


def _panels(figures: Iterable[Figure]) -> Iterator[Panel]:
    """A panel for each figure, or for those shown together; none for dimensions, collectives or stages."""
    titles = {key: title for title, together in _TOGETHER.items() for key in together}
    panels: dict[str, list[Figure]] = {}
    for figure in figures:
        if set(figure.labels) <= {"mode"}:
            panels.setdefault(titles.get(figure.key, figure.key), []).append(figure)
    for title, together in panels.items():
        if title in _TOGETHER:
            shown = [key for figure in together for key in keys_of(figure)]
            yield Panel("lines", title, tuple(shown), together[0].unit)
        else:
            yield _along(together[0])


def _of_section(name: str) -> list[Figure]:
    return [figure for figure in every_figure().values() if figure.section == name and figure not in FIGURES]


def _bars(title: str, *names: str) -> Panel:
    """The run's means of headline figures."""
    return Panel("bars", title, tuple([f"overlap_run/{name}" for name in names]), figure_named(names[0]).unit)


SECTIONS = (
    Section(
        "Overlap cost",
        (
            _bars("1. Is overlap worth it? Step time", "e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms"),
            _bars("2. What does it cost? Slowdown", "compute_slowdown", "comm_slowdown"),
            _bars("3. How far from ideal? Gap", "gap_to_ideal"),
            _bars("3. What holds it back? Communication", "hidden_comm_ms", "exposed_comm_ms"),
            _along(figure_named("compute_slowdown"), "4. Has it changed? Slowdown, 95% interval"),
        ),
        columns=5,
    ),
    Section(
        "Along the run, with 95% intervals",
        (Panel("pictures", "The window in words and bars", ("overlap/step_time",)), *_panels(HEADLINE["steps"])),
    ),
    Section(
        "Compute",
        (
            *_panels(HEADLINE["compute"]),
            Panel(
                "lines",
                "Slowdown of the best and the worst rank",
                ("overlap/compute_slowdown_rank_low", "overlap/compute_slowdown_rank_high"),
                "fraction",
            ),
            Panel("rows", "Kernels that lose most", ("overlap/kernels",)),
            Panel("rows", "Slowdown by concurrent kernel", ("overlap/pairs",)),
            Panel("rows", "What compute loses beside each dimension", ("dimension/pairs",)),
        ),
    ),
    Section(
        "Communication",
        (
            *_panels(HEADLINE["communication"]),
            Panel("rows", "By dimension of parallelism", ("dimension/dimensions",)),
            Panel("rows", "Collectives", ("comm/collectives",)),
        ),
    ),
    Section(
        "Power",
        (
            *_panels(_of_section("power")),
            Panel("pictures", "Power in the window, by mode", ("power/trace_card",)),
            Panel("curve", "Power against time, last window", ("power/trace",), columns=("time_ms", "power_w")),
        ),
    ),
    Section("Measurement quality", (*_panels(HEADLINE["quality"]), *_panels(_of_section("overlap"))), open=False),
    *[
        Section(title, tuple(_panels(_of_section(name))), open=False)
        for name, title in (
            ("device", "Device"),
            ("memory", "Memory"),
            ("verdict", "What bounds a step"),
            ("comm", "Waiting in collectives"),
            ("straggler", "Stragglers"),
            ("traffic", "Traffic"),
            ("throughput", "Throughput"),
            ("expert", "Experts"),
            ("pipeline", "Pipeline"),
            ("race", "Race check"),
        )
    ],
)


class WorkspaceError(RuntimeError):
    """The workspace cannot be made or saved; the message says why."""


def outline(name: str, sections: Sequence[Section] = SECTIONS) -> str:
    lines = [name]
    for section in sections:
        folded = "" if section.open else ", folded"
        lines += ["", f"{section.name} ({section.columns} columns{folded})"]
        for panel in section.panels:
            unit = f" [{panel.unit}]" if panel.unit else ""
            columns = f": {panel.columns[1]} against {panel.columns[0]}" if panel.columns else ""
            lines += [f"  {panel.title}{unit}", f"      {panel.kind}: {', '.join(panel.keys)}{columns}"]
    return "\n".join(lines)


def check_names(entity: str, project: str, name: str) -> None:
    """Reject empty names.

    Raises:
        WorkspaceError: one is empty.
    """
    for parameter, value in (("entity", entity), ("project", project), ("name", name)):
        if not value.strip():
            raise WorkspaceError(f"{parameter} must not be empty, got {value!r}")


def build(entity: str, project: str, name: str = DEFAULT_NAME) -> Any:
    """The workspace, not yet saved; needs no network.

    Raises:
        WorkspaceError: ``wandb-workspaces`` is not installed, or does not take the name.
    """
    check_names(entity, project, name)
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise WorkspaceError("wandb-workspaces is not installed: pip install 'overlap-callbacks[workspace]'") from None
    sections = [
        ws.Section(
            name=section.name,
            panels=[_panel(wr, panel) for panel in section.panels],
            is_open=section.open,
            # As many rows as needed: W&B would put the rest on further pages of the section.
            layout_settings=ws.SectionLayoutSettings(
                columns=section.columns, rows=-(-len(section.panels) // section.columns)
            ),
            panel_settings=ws.SectionPanelSettings(x_axis=_STEP),
        )
        for section in SECTIONS
    ]
    try:
        return ws.Workspace(entity=entity, project=project, name=name, sections=sections)
    except ValueError as error:
        raise WorkspaceError(f"W&B does not take the workspace: {error}") from None


def spec(workspace: Any) -> dict[str, Any]:
    """The content sent to W&B."""
    model = workspace._to_model()  # wandb-workspaces has no public way
    content: dict[str, Any] = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    return content


def save(workspace: Any) -> str:
    """Save the workspace as a view of its project. Returns its address.

    Raises:
        WorkspaceError: nobody is logged in to W&B, it cannot be reached, or it refuses.
    """
    import wandb

    if not logged_in(wandb):  # it would prompt for a key on the terminal, and block
        raise WorkspaceError("nobody is logged in to W&B: run `wandb login`, or set WANDB_API_KEY")
    try:
        workspace.save()
    except Exception as error:  # from requests, the GraphQL client or wandb, depending on the version
        raise WorkspaceError(
            f"W&B did not save the workspace of {workspace.entity}/{workspace.project}: {str(error).rstrip('.')}. Is "
            f"W&B to be reached, do both exist, and may you write there?"
        ) from error
    return str(workspace.url)


def _panel(wr: Any, panel: Panel) -> Any:
    if panel.kind == "lines":
        return wr.LinePlot(title=panel.title, x=_STEP, y=list(panel.keys), title_x="training step", title_y=panel.unit)
    if panel.kind == "bars":
        return wr.BarPlot(title=panel.title, metrics=list(panel.keys), title_x=panel.unit)
    if panel.kind == "pictures":
        return wr.MediaBrowser(title=panel.title, media_keys=list(panel.keys), num_columns=1)
    if panel.kind == "rows":
        return wr.WeavePanelSummaryTable(table_name=panel.keys[0])
    return wr.CustomChart(
        query={"summaryTable": {"tableKey": panel.keys[0]}},
        chart_name="wandb/line/v0",
        chart_fields=dict(zip("xy", panel.columns, strict=True)),
        chart_strings={"title": panel.title},
    )
