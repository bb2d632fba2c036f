"""A training loop of one's own, with DDP or anything else that communicates through torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from overlap_callbacks import OverlapMonitor, checks
from overlap_callbacks.build import build_monitor, switched_off


def attach(optimizer: torch.optim.Optimizer, *, start_step: int = 0, **options: Any) -> OverlapMonitor:
    """Measure the loop that steps ``optimizer``: a step reaches from one ``optimizer.step()`` to the next.

    Gradient accumulation needs nothing: its micro-batches lie between two optimizer steps. Put ``with
    monitor.pause():`` around an evaluation within the loop, and ``monitor.close()`` (or ``with attach(...):``) around
    the loop's end.

    Args:
        optimizer: the one that steps last, where there are several.
        start_step: optimizer steps done before, when a job resumes.
        **options: keyword arguments of ``Schedule`` and ``OverlapMonitor``, e.g. ``every_n_steps=200``.

    Returns:
        The monitor; its ``close()`` takes the hook off the optimizer.

    Raises:
        TypeError: not an optimizer, or an option that does not exist.
        ValueError: (``strict=True`` only) an option's value, or ``start_step``, is not allowed.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r} (a {type(optimizer).__name__})")
    framework = f"pytorch {torch.__version__}"
    monitor = build_monitor(framework, options)
    try:
        step = checks.count("start_step", start_step, minimum=0)
    except (TypeError, ValueError) as error:
        if options.get("strict"):
            raise
        return switched_off(framework, error)
    if not monitor.active:
        return monitor

    # The step that is under way when we attach began before us, so the first one with a known start is the next.
    def after_step(*_: Any) -> None:
        nonlocal step
        if monitor.in_step:
            monitor.step_end()
        step += 1
        monitor.step_begin(step)

    monitor.call_on_close(optimizer.register_step_post_hook(after_step).remove)
    return monitor
