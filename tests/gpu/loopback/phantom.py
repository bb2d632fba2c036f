"""The phantom rank's part in what the library's ranks say to each other.

Whatever rank 0 hands in, rank 1 hands in too. Both would meet in two functions of the library, one of the order check
and one of the reports, which gather what the ranks below say. Here rank 0's own stands for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import msgspec

from overlap_callbacks.analysis.job.part import JobPart, merge, part_of
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.monitor.background import order_check, reporter
from overlap_callbacks.monitor.background.submissions import Submissions


@contextlib.contextmanager
def phantom_rank() -> Iterator[None]:
    """Let rank 1 take part."""
    with (
        mock.patch.object(order_check, "submit", _submit),
        mock.patch.object(reporter, "part_of", _part_of_both),
        mock.patch.object(reporter, "gather_from_children", _with_members),
        mock.patch.object(reporter, "SETTLE_S", 0.0),  # it reads no message: at the end rank 0 would wait for that
    ):
        yield


def _submit(_exchange: object, _key: str, own: Submissions, *_: object) -> Submissions:
    theirs = msgspec.structs.replace(own, messages=[(message, [(1, 1)]) for message, _ in own.messages])
    return Submissions.merge([own, theirs])


def _part_of_both(window: RankWindow) -> JobPart:
    return merge([part_of(window), part_of(msgspec.structs.replace(window, rank=1))])


def _with_members(_exchange: object, own: JobPart, *_: object) -> JobPart:
    return own
