"""What to call a configuration: by what tells it from the others of its study, and by nothing more."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.results.study import Configuration
from overlap_callbacks.analysis.safe_text import clean
from overlap_callbacks.analysis.study import BATCH, CLOCK_CAP, POWER_CAP, PRECISION

_STRATEGIES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero3": "ZeRO-3", "tp": "TP", "pp": "PP"}
_PRECISIONS = {"fp32": "FP32", "tf32": "TF32", "fp16": "FP16", "bf16": "BF16"}
_MAX_NAME = 40


class Names:
    """Names of the configurations of one study.

    Args:
        configurations: all of them.
    """

    def __init__(self, configurations: Sequence[Configuration]) -> None:
        self._tells_precision = len({one.precision for one in configurations}) > 1

    def job(self, one: Configuration) -> str:
        """Model and strategy, e.g. ``gpt3-xl FSDP2``."""
        return f"{_clean(one.model)} {strategy_in_words(one.strategy)}"

    def setting(self, one: Configuration, *, without: str = "") -> str:
        """The rest, e.g. ``batch 4, FP16, 400 W``.

        Args:
            one: the configuration.
            without: the field of a factor that is left out.
        """
        parts = []
        if without != BATCH:
            parts.append(f"batch {one.batch}")
        if self._tells_precision and without != PRECISION:
            parts.append(factor_in_words(one, PRECISION))
        parts += [
            factor_in_words(one, cap)
            for cap, value in ((POWER_CAP, one.power_cap_w), (CLOCK_CAP, one.clock_cap_mhz))
            if value is not None and without != cap
        ]
        return ", ".join(parts)

    def whole(self, one: Configuration, *, without: str = "") -> str:
        """Both, e.g. ``gpt3-xl FSDP2 batch 4, FP16``."""
        return f"{self.job(one)} {self.setting(one, without=without)}".strip()


def strategy_in_words(strategy: str) -> str:
    """E.g. ``ZeRO-3``."""
    return _STRATEGIES.get(strategy, _clean(strategy))


def factor_in_words(one: Configuration, factor: str) -> str:
    """The value of a factor, e.g. ``batch 4``, ``BF16``, ``400 W`` or ``no cap``."""
    if factor == BATCH:
        return f"batch {one.batch}"
    if factor == PRECISION:
        return _PRECISIONS.get(one.precision, _clean(one.precision))
    value, unit = (one.power_cap_w, "W") if factor == POWER_CAP else (one.clock_cap_mhz, "MHz")
    return "no cap" if value is None else f"{value:,.0f} {unit}"


def _clean(name: str) -> str:
    return clean(name, _MAX_NAME)
