"""Tables for the terminal of what a job should send and how long its step should take."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overlap_callbacks.analysis.communication.predicted import CheckedRow
from overlap_callbacks.analysis.communication.step_time import Choice, StepTime
from overlap_callbacks.analysis.communication.volumes import MessageRow
from overlap_callbacks.report.terminal import drawn_blocks
from overlap_callbacks.report.views.elements import Block

# Longer tables are cut; JSON holds everything.
_MAX_ROWS = 200
_MIB, _GIB = 2**20, 2**30


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What ``overlap predict`` found.

    Attributes:
        parameters: of the model, without padding.
        world_size: ranks of the job.
        micro_batches: of a step on each data-parallel rank.
        dtype: of activations and parameters in messages.
        gradient_dtype: of gradients in messages.
        memory_bytes: need of the rank with the highest, by a stated rule.
        expected_bubble_ratio: (p-1)/(p-1+m), of a step without its gradients' communication.
        messages: of a rank of each kind, or of all ranks.
        step: equation 1 with exact counts; None without bandwidths.
        paper_step: in the paper's own forms.
        what_if: the job in other layouts; empty if it was not asked for.
        notes: what a reader must know, in words.
    """

    parameters: int
    world_size: int
    micro_batches: int
    dtype: str
    gradient_dtype: str
    memory_bytes: float
    expected_bubble_ratio: float
    messages: tuple[MessageRow, ...]
    step: StepTime | None = None
    paper_step: StepTime | None = None
    what_if: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()


def prediction_tables(found: Prediction, traffic: Sequence[Block] = ()) -> RenderableType:
    """The tables of a prediction, for people.

    Args:
        found: the prediction.
        traffic: the matrix of who sends what to whom, with its tables.
    """
    parts: list[RenderableType] = [
        Text(
            f"{found.parameters:,} parameters on {_counted(found.world_size, 'rank')}, "
            f"{_counted(found.micro_batches, 'micro-batch')} a step, messages in {found.dtype}, "
            f"gradients in {found.gradient_dtype}, {found.memory_bytes / _GIB:.1f} GiB a device, "
            f"bubble {found.expected_bubble_ratio:.1%} expected"
        ),
        _message_table(found.messages) if found.messages else Text("Nothing is sent: every group has one rank."),
    ]
    if traffic:
        parts += [*drawn_blocks(traffic), Text()]
    if found.step is not None and found.paper_step is not None:
        parts.append(_step_table(found.step, found.paper_step))
    if found.what_if:
        parts.append(_choice_table(found.what_if))
    return Group(*parts, *[Text(f"Note: {note}") for note in found.notes])


def check_tables(rows: Sequence[CheckedRow]) -> RenderableType:
    """Predicted beside measured, for people."""
    table = _narrow("Per step, predicted and measured")
    for name in ("messages", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        predicted, measured = (row.messages, row.bytes), (row.measured_messages, row.measured_bytes)
        what = "equal" if row.equal else "predicted"
        table.add_row(str(row.rank), row.dimension, row.operator, *[f"{number:,}" for number in predicted], what)
        if not row.equal:
            table.add_row("", "", "", *[f"{number:,}" for number in measured], "measured")
    equal = sum([row.equal for row in rows])
    text = f"{equal} of {_counted(len(rows), 'row')} {'is' if equal == 1 else 'are'} equal, to the byte."
    return Group(table, Text(text if equal == len(rows) else f"{text} A row that differs has two lines."))


def _message_table(rows: Sequence[MessageRow]) -> Table:
    table = _narrow("Messages of a step")
    for name in ("ranks", "messages", "bytes each", "wire MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:_MAX_ROWS]:
        table.add_row(
            str(row.rank), row.dimension, row.operator, _others(row), f"{row.messages:,}", f"{row.bytes_each:,}",
            f"{row.wire_bytes / _MIB:,.2f}",
        )  # fmt: skip
    if len(rows) > _MAX_ROWS:
        table.caption = f"and {len(rows) - _MAX_ROWS:,} more rows: --json has all"
    return table


def _narrow(title: str) -> Table:
    """A table of messages whose operators stay whole in 80 columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("rank", no_wrap=True)
    table.add_column("dimension", no_wrap=True)
    table.add_column("operator", overflow="fold")
    return table


def _others(row: MessageRow) -> str:
    """How many ranks a collective has, or the other side of a send or receive."""
    if row.peer < 0:
        return str(row.group_size)
    return f"to {row.peer}" if row.operator.startswith("send") else f"from {row.peer}"


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{'' if number == 1 else plural}"


def _step_table(exact: StepTime, paper: StepTime) -> Table:
    table = Table(title="Step time, nothing overlapped (equation 1)", title_justify="left")
    table.add_column("")
    for name in ("counted", "as in the paper"):
        table.add_column(name, justify="right")
    for label, name in (
        ("compute", "compute_ms"),
        ("tensor", "tensor_ms"),
        ("pipeline", "pipeline_ms"),
        ("data", "data_ms"),
        ("bubble", "bubble_ms"),
        ("step", "iteration_ms"),
    ):
        table.add_row(label, *[f"{getattr(step, name):,.2f} ms" for step in (exact, paper)])
    table.add_row("bubble / step", *[f"{step.bubble_ratio:.1%}" for step in (exact, paper)])
    return table


def _choice_table(choices: Sequence[Choice]) -> Table:
    table = Table(title="Other layouts on as many ranks", title_justify="left")
    for name in ("pp", "tp", "dp", "GiB", "step"):
        table.add_column(name, justify="right")
    table.add_column("")
    for choice in choices[:_MAX_ROWS]:
        table.add_row(
            str(choice.p), str(choice.t), str(choice.d),
            "" if choice.memory_bytes is None else f"{choice.memory_bytes / _GIB:.1f}",
            "" if choice.step is None else f"{choice.step.iteration_ms:,.1f} ms",
            f"infeasible: {choice.infeasible}" if choice.infeasible else "",
        )  # fmt: skip
    return table
