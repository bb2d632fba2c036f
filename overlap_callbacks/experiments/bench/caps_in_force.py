"""The caps of a benchmark's points: the first rank of each host sets them, and all ranks know what became of that."""

from __future__ import annotations

import contextlib

from overlap_callbacks.experiments.bench.ranks import Ranks
from overlap_callbacks.experiments.capping import CannotGoOnError, Cap, NotPossibleError, capped_part
from overlap_callbacks.experiments.caps.capped import capped
from overlap_callbacks.experiments.caps.settings import Caps


class CapsInForce:
    """Caps that change from point to point, and are put back at the end.

    Args:
        ranks: of the benchmark.
        sets: whether this rank sets the caps of its host.
        cap: what sets caps and puts them back.
    """

    def __init__(self, ranks: Ranks, *, sets: bool, cap: Cap = capped) -> None:
        self._ranks = ranks
        self._sets = sets
        self._cap = cap
        self._now = Caps()
        self._reason = ""
        self._stack = contextlib.ExitStack()

    def change(self, wanted: Caps) -> str:
        """Have other caps in force. All ranks call it alike.

        Args:
            wanted: for the next point.

        Returns:
            Why they cannot be, on the first host where that is so; empty if they are in force on all.

        Raises:
            CannotGoOnError: on all ranks: on some host, what was before cannot be put back.
        """
        if wanted == self._now:
            return self._reason
        left, reason = "", ""
        if self._sets:
            try:
                self._stack.close()
                self._stack.enter_context(capped_part(wanted, self._cap))
            except CannotGoOnError as error:
                left = str(error)
            except NotPossibleError as error:
                reason = str(error)
        said = self._ranks.gather((left, reason))
        lost = next((text for text, _ in said if text), "")
        if lost:
            raise CannotGoOnError(lost)
        self._now = wanted
        self._reason = next((text for _, text in said if text), "")
        return self._reason

    def close(self) -> None:
        """Put back what was before.

        Raises:
            CannotGoOnError: that fails on this host; with what to type.
        """
        self._stack.close()
