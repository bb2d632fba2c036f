"""How much overlap may be left in sequential steps."""

from __future__ import annotations

# Overlap that is left in sequential steps. Above the limit, steps that are called sequential were not. Gloo's host
# threads hand over within scheduler latency, so a little always remains there.
RESIDUAL_LIMIT = 0.02
RESIDUAL_LIMIT_GLOO = 0.05
# The same overlap as a share of communication: where communication is short, all of it may run beside compute and still
# be little of the compute. Jobs of this library's tests on Gloo had 0.00, and 0.55 where another thread communicated.
RESIDUAL_COMM_LIMIT = 0.2
RESIDUAL_COMM_LIMIT_GLOO = 0.3


def residual_limit(device: str, backend: str = "") -> float:
    """Residual overlap, as a fraction, above which a window is not valid.

    Args:
        device: name of the device; ``cpu`` for a job on the host.
        backend: of the default process group; empty without one.
    """
    return RESIDUAL_LIMIT_GLOO if _hands_over_late(device, backend) else RESIDUAL_LIMIT


def residual_comm_limit(device: str, backend: str = "") -> float:
    """Residual overlap as a share of communication above which a window is not valid; see ``residual_limit``."""
    return RESIDUAL_COMM_LIMIT_GLOO if _hands_over_late(device, backend) else RESIDUAL_COMM_LIMIT


def _hands_over_late(device: str, backend: str) -> bool:
    return device == "cpu" or backend == "gloo"
