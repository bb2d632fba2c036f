"""Communication in other ranks' memory, of which a profile may show a part only: symmetric memory, user buffers."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.analysis.kernels.copies import within_device
from overlap_callbacks.analysis.kernels.table import KernelTable

_MAX_NAMED, _MAX_NAME_LENGTH = 3, 60


def lower_bound_note(
    kernels: KernelTable, unseen: Collection[str], steps: Collection[int], symmetric_groups: Collection[str]
) -> str:
    """Why communication, and overlap in sequential steps, may be more than the profile shows; empty where it may not.

    Data that a rank reads from or writes to another one's mapped memory may show as a copy within the device. Such a
    copy is known for communication only if a collective explains it.

    Args:
        kernels: the whole profile, with copies that are a collective's work as communication.
        unseen: names of kernels and copies that communicate and are no collective's.
        steps: indices of the profiled steps.
        symmetric_groups: names of the groups for which torch's symmetric memory is enabled.
    """
    direct = [name for name in unseen if any(re.search(pattern, name) for pattern in name_rules.direct_communication)]
    used = ", ".join([name[:_MAX_NAME_LENGTH] for name in sorted(direct)[:_MAX_NAMED]])
    if not direct and symmetric_groups and (within_device(kernels) & np.isin(kernels.step, list(steps))).any():
        used = f"symmetric memory of {len(symmetric_groups)} groups, and copies within the device"
    if not used:
        return ""
    return (
        f"communication that no collective explains ({used}) may be copies that no figure has: communication and "
        f"residual overlap are lower bounds"
    )
