"""What bounds the steps of a run and what to try, for the terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from overlap_callbacks.report.record import Record


def advice_parts(record: Record) -> list[RenderableType]:
    """The verdict in a sentence, and a line for each advice; nothing where no profile shows what bounds steps."""
    found = record.bottleneck()
    if found is None:
        return []
    tries = [Text(f"- {advice.what} {advice.why} ({advice.link})") for advice in found.advice]
    return [Text(), Text(found.sentence(), style="bold"), *tries]


def bottleneck_as_json(record: Record) -> dict[str, Any] | None:
    """The same for programs; None where no profile shows what bounds steps."""
    found = record.bottleneck()
    if found is None:
        return None
    return {
        "bound": found.bound.value,
        "runner_up": None if found.runner_up is None else found.runner_up.value,
        "sentence": found.sentence(),
        "parts": found.parts._asdict(),
        "late_rank": None if found.late is None else found.late.rank,
        "advice": [{**advice._asdict(), "link": advice.link} for advice in found.advice],
    }
