"""Where a running job is, in words."""

from __future__ import annotations

from overlap_callbacks.analysis.formatting import PLAIN
from overlap_callbacks.analysis.results.request import Status

# A step that takes this many usual ones, and seconds, is said to hang.
_MANY, _LONG_S = 20.0, 10.0


def time_in_words(seconds: float) -> str:
    """A time to wait, e.g. ``12 s``, ``5 min`` or ``3.2 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def status_in_words(status: Status) -> str:
    """One sentence for each of: the step, what is measured, when the next window comes."""
    step_s = (status.step_ms or 0.0) / 1e3
    said = ["no step yet" if status.step < 0 else f"step {status.step:,}"]
    if status.step_ms is not None:
        said[0] += f", {PLAIN.quantity(status.step_ms, 'ms')} each"
    total_ms = sum(status.parts_ms.values())
    if total_ms > 0:
        parts = [f"{name.replace('_', ' + ')} {PLAIN.percent(ms / total_ms)}" for name, ms in status.parts_ms.items()]
        said[0] += f" ({', '.join(parts)})"
    if status.running_s is not None and status.running_s > max(_LONG_S, _MANY * step_s):
        said[0] += f", which has been running for {time_in_words(status.running_s)}"
    if status.window is not None:
        left = f", {status.steps_left:,} steps left" if status.steps_left else ""
        said.append(f"window {status.window} is open{left}")
    states = {
        "off": "measuring is switched off",
        "stopped": "measuring is stopped by request",
        "pinned": "the script has pinned a mode",
        "alone": "one rank, with nothing to overlap",
        "quick": "windows follow one another",
        "windows": f"a window every {status.every_n_steps:,} steps, {status.num_windows:,} opened so far",
    }
    said.append(states.get(status.state, status.state))
    if status.state == "windows" and status.next_window is not None:
        steps = status.next_window - status.step
        said.append(f"the next one at step {status.next_window:,}, in {time_in_words(steps * step_s)}")
        if status.unpaid_s:
            said[-1] += f", if the budget allows it: in {time_in_words(status.unpaid_s)}"
    return "; ".join(said)
