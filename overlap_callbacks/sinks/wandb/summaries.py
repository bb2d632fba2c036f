"""What a W&B run says between windows: in words in its summary, and the parts of steps."""

from __future__ import annotations

from typing import Any

from overlap_callbacks.analysis.decision_words import decision_in_words
from overlap_callbacks.analysis.goodput import goodput_in_words
from overlap_callbacks.analysis.job.frontier import sentence_of
from overlap_callbacks.analysis.results.change import Change
from overlap_callbacks.analysis.results.decision import Decision
from overlap_callbacks.analysis.results.frontier import StepFrontier
from overlap_callbacks.analysis.results.goodput import Goodput
from overlap_callbacks.analysis.watch import change_in_words

DECISION, CHANGE, GOODPUT = "overlap/decision", "overlap/change", "overlap/goodput"
PARTS = "overlap/parts"
# The library's own x-axis. W&B's step may only increase, and belongs to the user's own logging: it is never passed.
STEP_KEY = "overlap/step"


class Summaries:
    """Part of the sink: what was decided on arms, the last change, where the time of steps and of this start went."""

    def _find_run(self) -> Any:
        raise NotImplementedError

    def _add(self, numbers: dict[str, float]) -> None:
        raise NotImplementedError

    def frontier(self, stretch: StepFrontier) -> None:
        """Ten keys at most, means over the ranks; a run has some hundreds of such rows, however long it is."""
        if stretch.num_steps and stretch.mean_ns:
            parts = {f"parts/{part}_ms": ns / 1e6 / stretch.num_steps for part, ns in stretch.mean_ns.items()}
            self._add({**parts, STEP_KEY: stretch.last_step})
            self._say(PARTS, sentence_of(stretch))

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
