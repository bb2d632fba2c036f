"""The number of SMs and the compute capability of the device that is measured."""

from __future__ import annotations

import torch

from overlap_callbacks.analysis.contention.occupancy import Chip


def chip_of(stream: torch.cuda.Stream | None) -> Chip | None:
    """The chip of a stream's device; None on CPU, and on AMD, whose compute units have other limits.

    Asks torch, which knows the properties since it made the context: no call reaches the device.
    """
    if stream is None or torch.version.hip is not None:
        return None
    properties = torch.cuda.get_device_properties(stream.device)
    return Chip(properties.multi_processor_count, (properties.major, properties.minor))
