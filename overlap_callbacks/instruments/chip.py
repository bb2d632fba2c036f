"""The number of SMs and the compute capability of the device that is measured."""

from __future__ import annotations

import torch

from overlap_callbacks.analysis.contention.occupancy import Chip
from overlap_callbacks.instruments import device


def chip_of(stream: device.Stream | None) -> Chip | None:
    """The chip of a stream's device; None on CPU, and of other vendors, whose compute units have other limits.

    Asks torch, which knows the properties since it made the context: no call reaches the device.
    """
    if stream is None or stream.device.type != "cuda" or torch.version.hip is not None:
        return None
    properties = device.properties(stream.device)
    return Chip(properties.multi_processor_count, (properties.major, properties.minor))
