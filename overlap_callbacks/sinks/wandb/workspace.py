"""The W&B workspace "Overlap cost": a saved view of a project that answers the questions in order.

Its content is plain data (``SECTIONS``), which can be printed. ``build`` makes a workspace of it with
``wandb-workspaces``, and ``save`` sends it. Charts have the library's own axis, ``overlap/step``.
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
from overlap_callbacks.sinks.wandb.starting import logged_in

DEFAULT_NAME = "Overlap cost"
_STEP = "overlap/step"


class Lines(NamedTuple):
    """Metrics along the run, one line each."""

    title: str
    keys: tuple[str, ...]
    unit: str


class Bars(NamedTuple):
    """The run's means of headline figures, one bar each, run beside run."""

    title: str
    figures: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the means."""
        return tuple([f"overlap_run/{name}" for name in self.figures])

    @property
    def unit(self) -> str:
        """Of its first figure."""
        return figure_named(self.figures[0]).unit


class Pictures(NamedTuple):
    """What was logged as HTML; a slider goes through the windows."""

    title: str
    key: str


class Rows(NamedTuple):
    """A table, of the last window that has it."""

    title: str
    key: str


class Curve(NamedTuple):
    """Two columns of a table as a line."""

    title: str
    key: str
    x: str
    y: str


Panel = Lines | Bars | Pictures | Rows | Curve


class Section(NamedTuple):
    """A row of panels, or several.

    Attributes:
        name: its heading.
        panels: in order.
        columns: panels side by side.
        open: whether it is unfolded when the workspace is opened.
    """

    name: str
    panels: tuple[Panel, ...]
    columns: int = 3
    open: bool = True


def keys(sections: Sequence[Section]) -> list[str]:
    """Every key that these sections show, once."""
    shown: dict[str, None] = {}
    for section in sections:
        for panel in section.panels:
            shown.update(dict.fromkeys(panel.keys if isinstance(panel, (Lines, Bars)) else (panel.key,)))
    return list(shown)


# Figures that one panel shows together, by its title.
_TOGETHER = {
    "Step time": tuple([figure.key for figure in STEP_TIMES]),
    "Compute kernels of a step": ("overlap/compute_ms", "overlap/compute_isolated_ms"),
    "Compute busy time": ("overlap/compute_busy_ms", "overlap/compute_busy_isolated_ms"),
    "Communication of a step": ("overlap/comm_ms", "overlap/hidden_comm_ms", "overlap/exposed_comm_ms"),
    "Neither compute nor communication": ("overlap/idle_ms", "overlap/idle_isolated_ms", "overlap/bubble_ms"),
    "Slowdown by the profiler": ("overlap/profiler_slowdown", "overlap/profiler_slowdown_isolated"),
    "Valid, verified and complete windows": ("overlap/valid", "overlap/verified", "overlap/complete"),
    "SMs and tensor cores busy": ("device/{mode}_sm_busy_fraction", "device/{mode}_tensor_busy_fraction"),
    "Causes of the compute slowdown": tuple(
        [key for key in every_figure() if key.startswith("device/slowdown_")],
    ),
}


def _along(figure: Figure, title: str = "") -> Lines:
    """A figure along the run: a headline figure with its interval, one of both modes in both."""
    shown = keys_of(figure)
    if figure.formula is not None:
        shown += [f"{figure.key}_ci_low", f"{figure.key}_ci_high"]
    own = figure.title if figure.label else f"{figure.section}: {figure.short}"
    return Lines(title or own, tuple(shown), figure.unit)


def _panels(figures: Iterable[Figure]) -> Iterator[Lines]:
    """A panel for each figure, or for those that one shows together; none of a dimension, a collective or a stage."""
    titles = {key: title for title, together in _TOGETHER.items() for key in together}
    panels: dict[str, list[Figure]] = {}
    for figure in figures:
        if set(figure.labels) <= {"mode"}:
            panels.setdefault(titles.get(figure.key, figure.key), []).append(figure)
    for title, together in panels.items():
        if title in _TOGETHER:
            yield Lines(title, tuple([key for figure in together for key in keys_of(figure)]), together[0].unit)
        else:
            yield _along(together[0])


def _of_section(name: str) -> list[Figure]:
    return [figure for figure in every_figure().values() if figure.section == name and figure not in FIGURES]


SECTIONS = (
    Section(
        "Overlap cost",
        (
            Bars("1. Is overlap worth it? Step time", ("e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms")),
            Bars("2. What does it cost? Slowdown", ("compute_slowdown", "comm_slowdown")),
            Bars("3. How far from ideal? Gap", ("gap_to_ideal",)),
            Bars("3. What holds it back? Communication", ("hidden_comm_ms", "exposed_comm_ms")),
            _along(figure_named("compute_slowdown"), "4. Has it changed? Slowdown, 95% interval"),
        ),
        columns=5,
    ),
    Section(
        "Along the run, with 95% intervals",
        (Pictures("The window in words and bars", "overlap/step_time"), *_panels(HEADLINE["steps"])),
    ),
    Section(
        "Compute",
        (
            *_panels(HEADLINE["compute"]),
            Lines(
                "Slowdown of the best and the worst rank",
                ("overlap/compute_slowdown_rank_low", "overlap/compute_slowdown_rank_high"),
                "fraction",
            ),
            Rows("Kernels that lose most", "overlap/kernels"),
            Rows("Slowdown by concurrent kernel", "overlap/pairs"),
            Rows("What compute loses beside each dimension", "dimension/pairs"),
        ),
    ),
    Section(
        "Communication",
        (
            *_panels(HEADLINE["communication"]),
            Rows("By dimension of parallelism", "dimension/dimensions"),
            Rows("Collectives", "comm/collectives"),
        ),
    ),
    Section(
        "Power",
        (
            *_panels(_of_section("power")),
            Pictures("Power in the window, by mode", "power/trace_card"),
            Curve("Power against time, last window", "power/trace", "time_ms", "power_w"),
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
    """A workspace that cannot be made or saved, and why."""


def outline(name: str, sections: Sequence[Section] = SECTIONS) -> str:
    """The workspace as text."""
    lines = [name]
    for section in sections:
        folded = "" if section.open else ", folded"
        lines += ["", f"{section.name} ({section.columns} columns{folded})"]
        for panel in section.panels:
            lines.append(f"  {_described(panel)}")
    return "\n".join(lines)


def _described(panel: Panel) -> str:
    unit = f" [{panel.unit}]" if isinstance(panel, (Lines, Bars)) and panel.unit else ""
    kind = type(panel).__name__.lower()
    shown = ", ".join(panel.keys) if isinstance(panel, (Lines, Bars)) else panel.key
    if isinstance(panel, Curve):
        shown += f": {panel.y} against {panel.x}"
    return f"{panel.title}{unit}\n      {kind}: {shown}"


def check_names(entity: str, project: str, name: str) -> None:
    """Refuse empty names.

    Raises:
        WorkspaceError: one is empty.
    """
    for parameter, value in (("entity", entity), ("project", project), ("name", name)):
        if not value.strip():
            raise WorkspaceError(f"{parameter} must not be empty, got {value!r}")


def build(entity: str, project: str, name: str = DEFAULT_NAME) -> Any:
    """The workspace, not yet saved; needs no network.

    Args:
        entity: a W&B user or team.
        project: of the entity.
        name: of the saved view.

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
            # As many rows as it needs: W&B would put the rest on further pages of the section.
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
    """The content that is sent to W&B."""
    model = workspace._to_model()  # wandb-workspaces has no public way
    content: dict[str, Any] = json.loads(model.spec.model_dump_json(by_alias=True, exclude_none=True))
    return content


def save(workspace: Any) -> str:
    """Save the workspace as a view of its project.

    Returns:
        Its address.

    Raises:
        WorkspaceError: nobody is logged in to W&B, or it cannot be reached, or refuses.
    """
    import wandb

    if not logged_in(wandb):  # it would ask for a key on the terminal, and block
        raise WorkspaceError("nobody is logged in to W&B: run `wandb login`, or set WANDB_API_KEY")
    try:
        workspace.save()
    except Exception as error:  # of requests, of the GraphQL client, or of wandb, by version
        raise WorkspaceError(
            f"W&B did not save the workspace of {workspace.entity}/{workspace.project}: {str(error).rstrip('.')}. Is "
            f"W&B to be reached, do both exist, and may you write there?"
        ) from error
    return str(workspace.url)


def _panel(wr: Any, panel: Panel) -> Any:
    if isinstance(panel, Lines):
        return wr.LinePlot(title=panel.title, x=_STEP, y=list(panel.keys), title_x="training step", title_y=panel.unit)
    if isinstance(panel, Bars):
        return wr.BarPlot(title=panel.title, metrics=list(panel.keys), title_x=panel.unit)
    if isinstance(panel, Pictures):
        return wr.MediaBrowser(title=panel.title, media_keys=[panel.key], num_columns=1)
    if isinstance(panel, Rows):
        return wr.WeavePanelSummaryTable(table_name=panel.key)
    return wr.CustomChart(
        query={"summaryTable": {"tableKey": panel.key}},
        chart_name="wandb/line/v0",
        chart_fields={"x": panel.x, "y": panel.y},
        chart_strings={"title": panel.title},
    )
