"""What is shown of a matrix stays readable, and no byte of it is lost."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from overlap_callbacks.analysis.communication.placement import equal_hosts
from overlap_callbacks.analysis.communication.sums import job_messages
from overlap_callbacks.analysis.communication.view import (
    MAX_CELLS,
    Placement,
    TrafficView,
    ViewError,
    strength,
    svg,
    view_of,
)
from overlap_callbacks.analysis.formatting import bytes_in_words
from overlap_callbacks.analysis.results.messages import JobMessages
from tests.analysis.communication.layouts import Layout, by_hand


def messages_of(layout: Layout) -> JobMessages:
    found = job_messages(layout.sums())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("layout", "by", "shown", "cells"),
    [
        (Layout(2, 2, 2, ranks_per_host=4), None, "rank", 8),
        (Layout(4, 4, 16, ranks_per_host=8), None, "host", 32),
        (Layout(2, 2, 64, ranks_per_host=2), None, "host", 64),
        (Layout(4, 4, 16, ranks_per_host=8), "rank", "rank", 64),
        (Layout(4, 4, 16, ranks_per_host=8), "stage", "stage", 4),
        (Layout(4, 4, 16, ranks_per_host=1000), None, "stage", 4),
        (Layout(1, 1, 100, ranks_per_host=1000), None, "rank", 50),
    ],
)
def test_large_jobs_are_shown_by_host_or_stage(layout: Layout, by: str | None, shown: str, cells: int) -> None:
    view = view_of(messages_of(layout), Placement(layout.hosts()), by=by)
    assert (view.by, len(view.labels), view.sent.shape) == (shown, cells, (cells, cells))
    assert cells <= MAX_CELLS
    assert view.sent.sum() == pytest.approx(by_hand(layout).sum())


def test_ranks_in_physical_order_lie_host_by_host() -> None:
    layout = Layout(2, 2, 2)
    hosts = np.array([0, 1, 0, 1, 0, 1, 0, 1])
    view = view_of(messages_of(layout), Placement(hosts), order="physical")
    assert view.labels == ("0", "2", "4", "6", "1", "3", "5", "7")
    assert view.bounds == (4,)
    # A ring of two carries the same wherever its ranks are.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    np.testing.assert_allclose(view.sent, by_hand(layout)[np.ix_(order, order)])


def test_hosts_have_their_names_or_numbers() -> None:
    layout = Layout(2, 2, 2, ranks_per_host=4)
    view = view_of(messages_of(layout), Placement(layout.hosts(), {0: "gpu-a"}), by="host")
    assert view.labels == ("gpu-a", "host 1")
    assert view_of(messages_of(layout), Placement(equal_hosts(8, 3)), by="host").labels == (
        "host 0",
        "host 1",
        "host 2",
    )


def test_what_cannot_be_shown_is_named() -> None:
    messages = messages_of(Layout(1, 1, 4))
    with pytest.raises(ViewError, match="by host: on which host each rank runs is not known"):
        view_of(messages, Placement(np.array([0, 0, -1, 1])), by="host")
    with pytest.raises(ViewError, match="by stage: no rank told a pipeline stage"):
        view_of(messages, Placement(np.zeros(4, dtype=np.int64)), by="stage")


def test_the_picture_has_a_cell_for_each_pair_with_traffic_and_no_name_of_a_host_ends_it() -> None:
    layout = Layout(2, 2, 2, ranks_per_host=4)
    names = {0: "<script>alert(1)</script>", 1: 'a"b'}
    view = view_of(messages_of(layout), Placement(layout.hosts(), names), by="host")
    root = ElementTree.fromstring(svg(view, standalone=True))
    cells = [node for node in root.iter() if node.get("class") == "cell"]
    assert len(cells) == np.count_nonzero(view.sent) == 4
    assert "script" not in {node.tag.rpartition("}")[2] for node in root.iter()}
    empty = TrafficView("rank", ("0",), np.zeros((1, 1)), "nothing")
    assert "cell" not in {node.get("class") for node in ElementTree.fromstring(svg(empty)).iter()}


def test_small_traffic_is_visibly_different_from_none() -> None:
    assert strength(0, 1e12) == 0
    assert strength(1, 1e12) == 0.18
    assert strength(1e12, 1e12) == 1
    assert strength(0, 0) == 0


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1 MiB"), (123_456_789, "118 MiB"),
     (99.6 * 2**20, "100 MiB"), (2.5e9, "2.33 GiB"), (1e13, "9.09 TiB")],
)  # fmt: skip
def test_bytes_in_words(number: float, words: str) -> None:
    assert bytes_in_words(number) == words
