"""The traffic of a window as a picture for W&B."""

from __future__ import annotations

from overlap_callbacks.analysis.communication.heat_map import svg
from overlap_callbacks.analysis.communication.placement import host_numbers
from overlap_callbacks.analysis.communication.view import PHYSICAL, Placement, view_of
from overlap_callbacks.analysis.results.messages import JobMessages
from overlap_callbacks.sinks.wandb import cards


def traffic_card(messages: JobMessages, world_size: int) -> str:
    """Who sends how much to whom in a step; hosts by number.

    Args:
        messages: of the window.
        world_size: ranks of the job.
    """
    view = view_of(messages, Placement(host_numbers(messages, world_size)), order=PHYSICAL)
    notes = ["Lines part the hosts."] if view.bounds else []
    return cards.traffic_card("Traffic", svg(view), notes)
