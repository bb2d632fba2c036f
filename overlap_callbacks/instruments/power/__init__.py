"""Reads power, energy and clocks of the device that trains. Never changes a limit, a clock or a mode of a device.

``discovery.find_source`` returns the source of a device, or the reason why there is none. ``sampler.Sampler`` reads
sources at regular intervals, on its own thread. ``meter.PowerMeter`` is what the monitor uses: it samples while a
window is open, and ``overlap_callbacks.analysis.power`` computes its figures.

To read the device of this process for ten seconds::

    from overlap_callbacks.instruments.power.discovery import NoPower, find_source, identify
    from overlap_callbacks.instruments.power.sampler import Sampler

    source = find_source(identify())
    if isinstance(source, NoPower):
        raise SystemExit(source.reason)
    sampler = Sampler(source)
    sampler.start()
    time.sleep(10)
    sampler.stop()
    print(sampler.readings().power_w)  # watts, shape (n,)
    sampler.close()

This package exports what a custom source needs: subclass ``PowerSource``, describe it in a ``SourceInfo``, and return a
``Reading`` from ``sample``. Importing the package loads neither torch nor a vendor's library.

A source's constructor raises ``PowerUnavailableError`` if the device has no readable power; the message says what would
help. ``sample`` raises ``PowerError`` for a single failed read (the sampler retries for twenty seconds), or
``DeviceLostError`` for a device that is gone (the sampler gives up at once).
"""

from overlap_callbacks.analysis.power.readings import Reading, Utilisation
from overlap_callbacks.analysis.results.power import REASONS, SourceInfo
from overlap_callbacks.instruments.power.source import (
    AVERAGE_1_S,
    INSTANTANEOUS,
    MEAN_BETWEEN_READS,
    DeviceLostError,
    PowerError,
    PowerSource,
    PowerUnavailableError,
)

__all__ = [
    "AVERAGE_1_S",
    "INSTANTANEOUS",
    "MEAN_BETWEEN_READS",
    "REASONS",
    "DeviceLostError",
    "PowerError",
    "PowerSource",
    "PowerUnavailableError",
    "Reading",
    "SourceInfo",
    "Utilisation",
]
