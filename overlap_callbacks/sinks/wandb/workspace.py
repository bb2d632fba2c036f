"""The W&B workspace "Overlap cost": a saved view of a project that answers the questions in order.

Its content is plain data (``SECTIONS``), which can be printed. ``build`` makes a workspace of it with
``wandb-workspaces``, and ``save`` sends it. Charts have the library's own axis, ``overlap/step``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from overlap_callbacks.analysis.results.catalogue import STEP_TIMES, every_figure, figure_named, keys_of
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


_FIGURES = every_figure()


def _along(*keys: str, title: str = "") -> Lines:
    """Figures along the run: a single headline figure with its interval, one of both modes in both.

    Args:
        keys: of the catalogue.
        title: of the panel; that of the figure by default.
    """
    figures = [_FIGURES[key] for key in keys]
    shown = [key for figure in figures for key in keys_of(figure)]
    first = figures[0]
    if len(figures) == 1 and first.formula is not None:
        shown += [f"{shown[0]}_ci_low", f"{shown[0]}_ci_high"]
    return Lines(title or (first.title if first.label else f"{first.section}: {first.short}"), tuple(shown), first.unit)


def _further(sections: Sequence[Section]) -> Section:
    """The figures that no section shows yet, a panel each; not those of a dimension, a collective or a stage."""
    shown = set(keys(sections))
    return Section(
        "Further figures",
        tuple(
            [
                _along(key)
                for key, figure in _FIGURES.items()
                if figure.labels in ((), ("mode",)) and shown.isdisjoint(keys_of(figure))
            ]
        ),
        open=False,
    )


_SECTIONS = (
    Section(
        "Overlap cost",
        (
            Bars("1. Is overlap worth it? Step time", ("e2e_ideal_ms", "e2e_overlapped_ms", "e2e_sequential_ms")),
            Bars("2. What does it cost? Slowdown", ("compute_slowdown", "comm_slowdown")),
            Bars("3. How far from ideal? Gap", ("gap_to_ideal",)),
            Bars("3. What holds it back? Communication", ("hidden_comm_ms", "exposed_comm_ms")),
            _along("overlap/compute_slowdown", title="4. Has it changed? Slowdown, 95% interval"),
        ),
        columns=5,
    ),
    Section(
        "Along the run, with 95% intervals",
        (
            Pictures("The window in words and bars", "overlap/step_time"),
            _along(*[figure.key for figure in STEP_TIMES], title="Step time"),
            _along("overlap/speedup_vs_sequential"),
            _along("overlap/gap_to_ideal"),
            _along("overlap/exposed_comm_ms"),
            _along("overlap/attained_fraction"),
            _along("overlap/overlap_ratio"),
        ),
    ),
    Section(
        "Compute",
        (
            _along("overlap/compute_ms", "overlap/compute_isolated_ms", title="Compute kernels of a step"),
            _along("overlap/compute_busy_ms", "overlap/compute_busy_isolated_ms", title="Compute busy time"),
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
            _along(
                "overlap/comm_ms", "overlap/hidden_comm_ms", "overlap/exposed_comm_ms", title="Communication of a step"
            ),
            _along("overlap/hidden_comm_fraction"),
            _along("overlap/comm_slowdown"),
            _along("overlap/comm_ratio"),
            _along("overlap/idle_ms", "overlap/idle_isolated_ms", "overlap/bubble_ms"),
            Rows("By dimension of parallelism", "dimension/dimensions"),
            Rows("Collectives", "comm/collectives"),
        ),
    ),
    Section(
        "Power",
        (
            _along("power/{mode}_avg_w"),
            _along("power/{mode}_peak_w"),
            _along("power/peak_w_vs_sequential", title="Peak power that overlap adds"),
            _along("power/{mode}_energy_per_step_j"),
            _along("power/energy_saving_vs_sequential", title="Energy that overlap saves"),
            Pictures("Power in the window, by mode", "power/trace_card"),
            Curve("Power against time, last window", "power/trace", "time_ms", "power_w"),
        ),
    ),
    Section(
        "Device",
        (
            _along("device/{mode}_sm_clock_mhz"),
            _along("device/{mode}_throttle_fraction"),
            _along("device/{mode}_power_cap_fraction"),
            _along(
                "device/slowdown_from_clock",
                "device/slowdown_beyond_clock",
                title="Slowdown from the clock, and beyond it",
            ),
            _along(
                "device/slowdown_from_clock",
                "device/slowdown_from_sms",
                "device/slowdown_from_waves",
                "device/slowdown_from_memory",
                "device/slowdown_unexplained",
                title="Causes of the compute slowdown",
            ),
            _along(
                "device/{mode}_sm_busy_fraction",
                "device/{mode}_tensor_busy_fraction",
                title="SMs and tensor cores busy",
            ),
            _along("device/{mode}_dram_busy_fraction"),
        ),
        open=False,
    ),
    Section(
        "Measurement quality",
        (
            _along("overlap/residual_overlap"),
            _along("overlap/residual_comm_overlap"),
            _along("overlap/profiler_slowdown", "overlap/profiler_slowdown_isolated"),
            _along(
                "overlap/valid", "overlap/verified", "overlap/complete", title="Valid, verified and complete windows"
            ),
            _along("overlap/measurement_overhead"),
            _along("overlap/ranks_heard", title="Ranks heard"),
            _along("overlap/sequential_model_error"),
        ),
        open=False,
    ),
)
SECTIONS = (*_SECTIONS, _further(_SECTIONS))


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
