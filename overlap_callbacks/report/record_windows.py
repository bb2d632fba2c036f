"""Windows of a record without their details: what a run of thousands of windows is judged by, small enough to keep."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import without_details

# What decoding a line may raise.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# The parts of a report that ``without_details`` leaves out.
_DETAILS = (
    "kernels", "pairs", "dimensions", "dimension_pairs", "pictures", "collectives", "samples", "power_trace",
    "messages", "expert_details", "transfers",
)  # fmt: skip
# The parts that are often alike from window to window. They are kept once.
_SHARED = ("ranks", "problems", "findings", "backend", "device")
_NOTHING = (msgspec.Raw(), msgspec.Raw(b"[]"), msgspec.Raw(b"null"))


class Details(NamedTuple):
    """What was left in the file of a window.

    Attributes:
        start: where its line begins, in bytes.
        parts: names of those of its details that are not empty.
    """

    start: int
    parts: frozenset[str]


def _outline() -> Any:
    """A struct like ``OverlapReport``, in which details stay undecoded: to pass over them takes a third of the time."""
    fields: list[Any] = []
    for known in msgspec.structs.fields(OverlapReport):
        if known.name in _DETAILS:
            fields.append((known.name, msgspec.Raw, msgspec.Raw()))
        elif known.required:
            fields.append((known.name, known.type))
        elif known.default is not msgspec.NODEFAULT:
            fields.append((known.name, known.type, known.default))
        else:
            fields.append((known.name, known.type, msgspec.field(default_factory=known.default_factory)))
    return msgspec.defstruct("Outline", fields, kw_only=True)


decode_window = msgspec.json.Decoder(OverlapReport).decode
_decode_outline = msgspec.json.Decoder(_outline()).decode
_details_of = attrgetter(*_DETAILS)
_FIGURES = tuple([known.name for known in msgspec.structs.fields(OverlapReport) if known.name not in _DETAILS])
_figures_of = attrgetter(*_FIGURES)


class Outlines:
    """Decodes lines of windows as ``without_details`` would leave them."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __call__(self, start: int, line: bytes) -> tuple[OverlapReport, Details]:
        """A window without its details, and what was left out.

        Args:
            start: where the line begins in its file, in bytes.
            line: of kind ``window``.

        Raises:
            msgspec.MsgspecError, UnicodeDecodeError, RecursionError: what is no detail cannot be decoded.
        """
        outline = _decode_outline(line)
        # Not the fields themselves: they would keep the whole line in memory.
        details = zip(_DETAILS, _details_of(outline), strict=True)
        parts = frozenset([name for name, raw in details if raw not in _NOTHING])
        left = Details(start, self._shared(parts))
        if not outline.complete:  # its blocks are needed too
            return without_details(decode_window(line)), left
        fields = dict(zip(_FIGURES, _figures_of(outline), strict=True))
        for name in _SHARED:
            fields[name] = self._shared(fields[name])
        return OverlapReport(**fields), left

    def _shared(self, value: Any) -> Any:
        return self._known.setdefault(value, value)
