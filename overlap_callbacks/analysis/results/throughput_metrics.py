"""Throughput as flat keys."""

from __future__ import annotations

from overlap_callbacks.analysis.results.workload import Throughput

MFU = "throughput/mfu"

# Of each key its unit and meaning.
_KEYS = {
    "throughput/tokens_per_s": ("tokens/s", "tokens that the whole job trains on in a second"),
    "throughput/samples_per_s": ("samples/s", "samples that the whole job trains on in a second"),
    "throughput/flop_per_step": ("FLOP", "model FLOP of a step of the whole job, without what is recomputed"),
    "throughput/flop_per_s_per_device": ("FLOP/s", "model FLOP a second, mean over the devices"),
    MFU: ("fraction", "model FLOP utilisation: the same over the device's peak"),
}


def throughput_metrics(throughput: Throughput | None) -> dict[str, float]:
    """What is known of the throughput."""
    if throughput is None:
        return {}
    values = {key: getattr(throughput, key.partition("/")[2]) for key in _KEYS}
    return {key: value for key, value in values.items() if value is not None}


def throughput_units() -> dict[str, str]:
    """Unit of each metric of throughput, by key."""
    return {key: unit for key, (unit, _) in _KEYS.items()}


def throughput_meanings() -> dict[str, str]:
    """Meaning of each metric of throughput, by key."""
    return {key: meaning for key, (_, meaning) in _KEYS.items()}
