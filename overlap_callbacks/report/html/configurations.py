"""Where the configurations of several runs differ, and what their records do not tell of them."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import DASH, count, page_text
from overlap_callbacks.report.configuration import collectives_of_a_step, not_told
from overlap_callbacks.report.html import tables
from overlap_callbacks.report.html.elements import Block, Head, Note, Table
from overlap_callbacks.report.html.environment import environment_facts
from overlap_callbacks.report.html.quality import run_facts
from overlap_callbacks.report.html.run import RunView

# These differ between any two runs.
_NO_SETTINGS = ("Started",)


def differences(names: Sequence[str], views: Sequence[RunView]) -> Block:
    """A table of what differs; a note where nothing does that the records know."""
    facts = [_facts(view) for view in views]
    rows = []
    for label in dict.fromkeys(label for of_run in facts for label in of_run):
        values = [of_run.get(label, DASH) for of_run in facts]
        if label not in _NO_SETTINGS and len(set(values)) > 1:
            rows.append((tables.name_cell(label), *(tables.name_cell(value) for value in values)))
    untold = not_told([view.record for view in views])
    if not rows:
        return Note(f"The records know of no difference between the configurations. {untold}")
    columns = tuple(Head(text, words=True) for text in ("Setting", *names))
    return Table("Where their configurations differ", columns, tuple(rows), untold, sorts=False)


def _facts(view: RunView) -> dict[str, str]:
    sent = {
        f"Collectives of a step: {page_text(name, 80)}": f"{count(messages, 'message')}, {size / 1e6:,.2f} MB"
        for name, (messages, size) in collectives_of_a_step(view.record).items()
    }
    return {
        **dict(run_facts(view.info)),
        **dict(environment_facts(view)),
        **{f"Schedule: {name}": str(value) for name, value in view.info.schedule.items()},
        **sent,
    }
