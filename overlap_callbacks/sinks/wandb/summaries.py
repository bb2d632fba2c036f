"""What a W&B run's summary says in words."""

from __future__ import annotations

from typing import Any

from overlap_callbacks.analysis.decision_words import decision_in_words
from overlap_callbacks.analysis.goodput import goodput_in_words
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.decision import Decision
from overlap_callbacks.analysis.results.goodput import Goodput
from overlap_callbacks.analysis.watch import change_in_words

DECISION, CHANGE, GOODPUT = "overlap/decision", "overlap/change", "overlap/goodput"


class Summaries:
    """Part of the sink: what was decided on arms, the last lasting change, where the time of this start went."""

    def _find_run(self) -> Any:
        raise NotImplementedError

    def decision(self, decision: Decision) -> None:
        self._say(DECISION, decision_in_words(decision))

    def change(self, change: Change) -> None:
        self._say(CHANGE, change_in_words(change))

    def goodput(self, goodput: Goodput) -> None:
        self._say(GOODPUT, goodput_in_words([goodput]))

    def _say(self, key: str, words: str) -> None:
        run = self._find_run()
        if run is not None:
            run.summary.update({key: words})
