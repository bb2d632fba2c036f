"""Predicted messages and step time of a training job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from overlap_callbacks.analysis.communication.predicted import CheckedRow
from overlap_callbacks.analysis.communication.step_time import Choice, StepTime
from overlap_callbacks.analysis.communication.volumes import MessageRow
from overlap_callbacks.analysis.formatting import PLAIN, count
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.report.views.elements import Block, Cell, Column, Document, Note, RunPage, Section, table_of

# Longer tables are cut in a terminal; JSON has everything.
_MAX_ROWS = 200
_MIB, _GIB = 2**20, 2**30


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``overlap predict``.

    Attributes:
        parameters: of the model, without padding.
        micro_batches: of a step on each data-parallel rank.
        dtype: of activations and parameters in messages.
        memory_bytes: of the rank that needs most, by a stated rule.
        device_bytes: memory of a device; None if not known.
        expected_bubble_ratio: (p-1)/(p-1+m), of a step without its gradients' communication.
        messages: of a rank of each kind, or of all ranks.
        step: equation 1 with exact counts; None without bandwidths.
        paper_step: in the paper's own forms.
        what_if: the job in other layouts; empty if not requested.
    """

    parameters: int
    world_size: int
    micro_batches: int
    dtype: str
    gradient_dtype: str
    memory_bytes: float
    expected_bubble_ratio: float
    messages: tuple[MessageRow, ...]
    device_bytes: float | None = None
    step: StepTime | None = None
    paper_step: StepTime | None = None
    what_if: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()


def prediction_document(found: Prediction, traffic: Sequence[Block] | None) -> Document:
    """Predicted step time and memory; ``traffic`` is the matrix with its tables, None to leave messages out."""
    batches = "micro-batch" if found.micro_batches == 1 else "micro-batches"
    verdict = (
        f"{_headline(found)}. {found.parameters:,} parameters on {count(found.world_size, 'rank')}, "
        f"{found.micro_batches:,} {batches} a step, messages in {found.dtype}, gradients in {found.gradient_dtype}"
    )
    sections = []
    if found.step is not None:
        paper = None if traffic is None else found.paper_step
        sections.append(Section("How long does a step take?", "", [_step_table(found.step, paper)]))
    if found.what_if:
        sections.append(Section("What would other layouts take?", "", [_choice_table(found.what_if)]))
    if not found.messages:
        sections.append(Section("What does it send?", "Nothing is sent: every group has one rank."))
    elif traffic is not None:
        sections.append(Section("What does it send?", "", [_message_table(found.messages), *traffic]))
    notes = [*found.notes, *(["--messages shows what is sent"] if found.messages and traffic is None else [])]
    if notes:
        sections.append(Section("What is it based on?", "", [Note(note) for note in notes]))
    return _document(verdict, *sections)


def _headline(found: Prediction) -> str:
    """The step with and without overlap, and whether the job fits."""
    memory = f"{gib_in_words(found.memory_bytes, found.device_bytes)} GiB a device"
    if found.device_bytes is not None:
        fits = "which fits" if found.memory_bytes <= found.device_bytes else "which does not fit"
        memory += f", {fits} into {found.device_bytes / _GIB:.1f}".removesuffix(".0")
    if found.step is None:
        return memory
    hidden, not_hidden = [f"{ms:,.{0 if ms >= 100 else 1}f}" for ms in (found.step.hidden_ms, found.step.iteration_ms)]
    if hidden == not_hidden:
        return f"A step takes {hidden} ms; {memory}"
    return f"A step takes {hidden} ms if communication is hidden, {not_hidden} if not; {memory}"


def gib_in_words(needed_bytes: float, device_bytes: float | None) -> str:
    """Memory in GiB: whole, unless that shows none, or what does not fit as if it did."""
    least = 0.0 if device_bytes is None or needed_bytes <= device_bytes else round(device_bytes / _GIB, 1)
    shown = [f"{needed_bytes / _GIB:.{decimals}f}" for decimals in range(3)]
    return next((text for text in shown if float(text) > least), shown[-1])


def check_document(rows: Sequence[CheckedRow]) -> Document:
    """Predicted and measured messages, side by side."""
    lines: list[tuple[Any, ...]] = []
    for row in rows:
        which = "equal" if row.equal else "predicted"
        lines.append((str(row.rank), row.dimension, collective_in_words(row.operator), row.messages, row.bytes, which))
        if not row.equal:
            lines.append(("", "", "", row.measured_messages, row.measured_bytes, "measured"))
    equal = sum([row.equal for row in rows])
    verdict = f"{equal} of {count(len(rows), 'row')} {'is' if equal == 1 else 'are'} equal, to the byte."
    if equal < len(rows):
        verdict += " A row that differs has two lines."
    table = table_of(
        "Per step, predicted and measured",
        lines,
        Column("*Rank", lambda line: line[0]),
        Column("*Dimension", lambda line: line[1]),
        Column("*Collective", lambda line: line[2]),
        Column("Messages", lambda line: line[3], "whole"),
        Column("Bytes", lambda line: line[4], "whole"),
        Column("*", lambda line: line[5]),
    )
    return _document(verdict, Section("Which messages differ?", "", [table]))


def _document(verdict: str, *sections: Section) -> Document:
    run = RunPage("prediction", "", "", verdict, (), sections)
    return Document("Prediction", (run,), "", max_rows=_MAX_ROWS)


def _message_table(rows: Sequence[MessageRow]) -> Block:
    return table_of(
        "Messages of a step",
        rows,
        Column("*Rank", lambda row: Cell(str(row.rank), row.rank)),
        Column("*Dimension", lambda row: row.dimension),
        Column("*Collective", lambda row: collective_in_words(row.operator)),
        Column("Ranks", lambda row: Cell(_others(row), row.group_size)),
        Column("Messages", lambda row: row.messages, "whole"),
        Column("Bytes each", lambda row: row.bytes_each, "whole"),
        Column("Wire, MiB", lambda row: row.wire_bytes / _MIB, 2),
    )


def _others(row: MessageRow) -> str:
    """How many ranks a collective has, or the peer of a send or receive."""
    if row.peer < 0:
        return str(row.group_size)
    return f"to {row.peer}" if row.operator.startswith("send") else f"from {row.peer}"


def _step_table(step: StepTime, paper: StepTime | None) -> Block:
    parts = (
        ("compute", "compute_ms"), ("tensor", "tensor_ms"), ("pipeline", "pipeline_ms"), ("data", "data_ms"),
        ("bubble", "bubble_ms"), ("step, nothing hidden", "iteration_ms"), ("step, communication hidden", "hidden_ms"),
    )  # fmt: skip
    return table_of(
        "Step time",
        [(label, getattr(step, name), getattr(paper, name, None)) for label, name in parts],
        Column("*", lambda row: row[0]),
        Column("ms", lambda row: row[1], 1),
        Column("Share", lambda row: Cell(f"{row[1] / step.iteration_ms:.1%}" if step.iteration_ms else "")),
        *([] if paper is None else [Column("Paper's form", lambda row: row[2], 1)]),
        sorts=False,
    )


def _saves(choice: Choice) -> str:
    if choice.saves_ms is None:
        return ""
    decimals = 0 if max(map(abs, choice.saves_ms)) >= 100 else 1
    return " to ".join([PLAIN.number(ms, decimals) for ms in choice.saves_ms])


def _choice_table(choices: Sequence[Choice]) -> Block:
    return table_of(
        "Other layouts on as many ranks",
        choices,
        Column("pp", lambda choice: choice.p, "whole"),
        Column("tp", lambda choice: choice.t, "whole"),
        Column("dp", lambda choice: choice.d, "whole"),
        Column("GiB", lambda choice: choice.memory_bytes and choice.memory_bytes / _GIB, 1),
        Column("Hidden, ms", lambda choice: choice.step and choice.step.hidden_ms, 1),
        Column("Not, ms", lambda choice: choice.step and choice.step.iteration_ms, 1),
        Column("*Saves, ms", _saves),
        Column("*", lambda choice: f"infeasible: {choice.infeasible}" if choice.infeasible else ""),
        Column("*", lambda choice: "as asked" if choice.is_asked else ""),
    )
