"""The W&B workspace "Overlap cost": a saved view of a project that answers the questions in order.

Its content is plain data (``SECTIONS``), which can be printed. ``build`` turns it into a workspace with
``wandb-workspaces``, and ``save`` sends it. Charts use the library's own axis, ``overlap/step``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from overlap_callbacks.analysis.results.catalogue import FIGURES, SHORT, SHORT_KEYS, every_figure, keys_of
from overlap_callbacks.analysis.results.figure import Figure
from overlap_callbacks.sinks.wandb.runs import logged_in
from overlap_callbacks.sinks.wandb.sink import POWER_CARD, STEP_CARD, TRAFFIC_CARD
from overlap_callbacks.sinks.wandb.summaries import STEP_KEY

DEFAULT_NAME = "Overlap cost"
_COLUMNS = 3


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
    """Panels under a heading, three per row; unfolded if ``open``."""

    name: str
    panels: tuple[Panel, ...]
    open: bool = True


def keys(sections: Sequence[Section]) -> list[str]:
    """Every key that these sections show, without repetition."""
    return list(dict.fromkeys(key for section in sections for panel in section.panels for key in panel.keys))


def _along(figure: Figure) -> Panel:
    """A figure along the run: a headline figure with its interval; a figure of both modes in both."""
    shown = keys_of(figure)
    if figure in FIGURES:
        shown += [f"{figure.key}_ci_low", f"{figure.key}_ci_high"]
    return Panel("lines", figure.title, tuple(shown), figure.unit)


def _rest(section: str) -> Section:
    """What ``detail="all"`` adds to a section: its tables, and figures without a dimension, collective or stage."""
    figures = [figure for figure in every_figure().values() if figure.section == section]
    panels = [_along(figure) for figure in figures if set(figure.labels) <= {"mode"} and figure.key not in SHORT_KEYS]
    return Section(section, (*panels, *_TABLES.get(section, ())), open=False)


# Of sections whose tables are not logged by default.
_TABLES = {
    "comm": (Panel("rows", "Collectives", ("comm/collectives",)),),
    "dimension": (
        Panel("rows", "By dimension of parallelism", ("dimension/dimensions",)),
        Panel("rows", "What compute loses during each dimension", ("dimension/pairs",)),
    ),
    "straggler": (Panel("rows", "For whom ranks wait", ("straggler/ranks",)),),
    "traffic": (Panel("pictures", "Who sends how much to whom", (TRAFFIC_CARD,)),),
}
_GROUPS = tuple([(title, keys, every_figure()[keys[0]]) for title, keys in SHORT])
# The answer and what is logged by default, then, folded, the rest of the table of figures.
SECTIONS = (
    Section(
        "Overlap cost",
        (
            Panel("pictures", "The answer", (STEP_CARD,)),
            # The run's own figures, run beside run.
            *[
                Panel("bars", title, tuple([key for key in keys if "_ci_" not in key]), figure.unit)
                for title, keys, figure in _GROUPS
                if figure in FIGURES
            ],
        ),
    ),
    Section(
        "Has it changed? Windows along the run",
        tuple(
            [
                Panel("lines", title, tuple(keys if len(keys) > 1 else keys_of(figure)), figure.unit)
                for title, keys, figure in _GROUPS
            ]
        ),
    ),
    Section(
        "Tables",
        (
            Panel("rows", "Figures, with 95% intervals", ("overlap/figures",)),
            Panel("rows", "Kernels that lose most", ("overlap/kernels",)),
            Panel("rows", "Slowdown by concurrent kernel", ("overlap/pairs",)),
            Panel("pictures", "Power in the window, by mode", (POWER_CARD,)),
            Panel("curve", "Power against time, last window", ("power/trace",), columns=("time_ms", "power_w")),
        ),
    ),
    *[_rest(name) for name in dict.fromkeys(figure.section for figure in every_figure().values())],
)


class WorkspaceError(RuntimeError):
    """The workspace cannot be made or saved; the message says why."""


def outline(name: str) -> str:
    """The content of the workspace, as text."""
    lines = [name]
    for section in SECTIONS:
        folded = "" if section.open else ", folded"
        lines += ["", f"{section.name} ({_COLUMNS} columns{folded})"]
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
            layout_settings=ws.SectionLayoutSettings(columns=_COLUMNS, rows=-(-len(section.panels) // _COLUMNS)),
            panel_settings=ws.SectionPanelSettings(x_axis=STEP_KEY),
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
        return wr.LinePlot(
            title=panel.title, x=STEP_KEY, y=list(panel.keys), title_x="training step", title_y=panel.unit
        )
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
