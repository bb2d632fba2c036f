"""How wide the intervals of a run's earlier windows are.

A window has few blocks, four of each mode where kernels are profiled. So their spread is known badly. Of some windows
it comes out far too small, above all where something rare and large hits no block, such as a core that another program
takes away. Such a window has an interval that is too narrow. The run's other windows know better: no interval is
narrower than those of most of them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

import numpy as np

# More windows would change little, and the spread of a job's steps may change along the run.
MAX_WINDOWS = 50
# An interval is at least as wide as those of this share of the windows before it. The mean width would not do: one
# disturbed window would make all after it wide.
SHARE = 2 / 3


class EarlierWindows:
    """The half-widths of the intervals of a run's last windows, figure by figure.

    Half-widths are on the scale on which a figure's interval is symmetric.
    """

    def __init__(self) -> None:
        self._half_widths: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_WINDOWS))

    def add(self, half_widths: Mapping[str, float | None]) -> None:
        """Add a window.

        Args:
            half_widths: of each figure, by the window's own blocks; None where they give no interval.
        """
        for name, half_width in half_widths.items():
            if half_width is not None:
                self._half_widths[name].append(half_width)

    def half_width(self, name: str) -> float:
        """The least half-width of a figure's interval; 0 before the first window that has one."""
        known = self._half_widths.get(name)
        return float(np.quantile(known, SHARE)) if known else 0.0
