"""The traffic of a job as flat keys."""

from __future__ import annotations

from overlap_callbacks.analysis.results.messages import Traffic

BETWEEN_HOSTS = "traffic/between_hosts_fraction"
REGULARITY = "traffic/steps_alike_fraction"


def traffic_metrics(traffic: Traffic | None) -> dict[str, float]:
    """Messages and bytes of each dimension, over all ranks; the share that crosses hosts; how regular steps are."""
    if traffic is None:
        return {}
    flat: dict[str, float] = {}
    for row in traffic.dimensions:
        key = f"traffic/{row.dimension.replace('+', '_')}"
        flat[f"{key}_messages"] = row.messages
        flat[f"{key}_bytes"] = row.bytes
        flat[f"{key}_sent_bytes"] = row.sent_bytes
    between = [row.between_hosts_bytes for row in traffic.dimensions]
    known = [value for value in between if value is not None]
    sent = sum([row.sent_bytes for row in traffic.dimensions])
    if sent > 0 and len(known) == len(between):
        flat[BETWEEN_HOSTS] = sum(known) / sent
    if traffic.num_steps and 0 <= traffic.num_alike <= traffic.num_steps:
        flat[REGULARITY] = traffic.num_alike / traffic.num_steps
    return flat
