"""The environment variables by which a job is told from outside what to measure."""

from __future__ import annotations

# Switches everything off.
SWITCH = "OVERLAP_CALLBACKS"
# The folder of the record, whatever the script says.
RUN_DIR = "OVERLAP_CALLBACKS_RUN_DIR"
# Times steps as they are, and measures nothing else: a ``TimingPlan``.
TIME_ONLY = "OVERLAP_CALLBACKS_TIME_ONLY"
