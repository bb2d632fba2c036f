"""What bounds the steps of a run, in words: the evidence, and what to try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.advice import Advice, advice_for
from overlap_callbacks.analysis.formatting import PLAIN, Style
from overlap_callbacks.analysis.gains import JobFacts
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.prediction import Prediction
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.run import RunInfo
from overlap_callbacks.analysis.results.step_parts import Bound, LateRank, StepParts, bound_of, mean_parts, times_ms
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.analysis.stragglers import Straggler, stragglers


class Bottleneck(NamedTuple):
    """What bounds the steps of a run, and a close second, if any.

    Attributes:
        late: the rank that others wait for, if any.
        stragglers: ranks, and then hosts, that come last to collectives of sequential steps, the worst of each first.
        advice: what to try, the most promising first.
    """

    bound: Bound
    runner_up: Bound | None
    parts: StepParts
    late: LateRank | None
    stragglers: tuple[Straggler, ...]
    advice: tuple[Advice, ...] = ()

    def late_rank(self, exposure: Exposure) -> int | None:
        """The rank that the others wait for longer than any collective by name holds a step up; None without one."""
        ranks, steps = exposure.num_ranks, max(1, exposure.num_steps)
        if self.late is None or ranks < 2:
            return None
        wait_ms = self.parts.waiting_ms * ranks / (ranks - 1)  # of the others alone
        first_ms = max([row.held_ms for row in exposure.names], default=0.0) / (ranks * steps)
        return self.late.rank if wait_ms > first_ms else None

    @property
    def predictions(self) -> list[Prediction]:
        """What the advice predicts of settings."""
        found = [one.prediction for one in self.advice if one.prediction is not None]
        return [one for one in found if one.settings]

    def sentence(self, style: Style = PLAIN) -> str:
        """The verdict with its evidence, in one sentence or two."""
        # A twelfth of a step may bound it: compute is needed to hide communication, and no loss by itself.
        times = times_ms(self.parts)
        most = ", the most after compute" if times[self.bound] < times[Bound.COMPUTE] else ""
        name = self.bound.value.replace("_", "-")
        words = f"Steps are {name}-bound: {_evidence(self.bound, self.parts, self.late, style)}{most}."
        if self.runner_up is not None:
            words += f" Nearly as much: {_evidence(self.runner_up, self.parts, self.late, style)}."
        if Bound.STRAGGLER in (self.bound, self.runner_up):
            words += _who_is_late(self.stragglers, style)
        return words


def bottleneck_of(
    windows: Sequence[OverlapReport],
    speedup: Estimate | None = None,
    detailed: OverlapReport | None = None,
    run: RunInfo | None = None,
    step_ms: Estimate | None = None,
    exposed: Estimate | None = None,
    among: Sequence[Bound] = (),
) -> Bottleneck | None:
    """What bounds the steps of these windows; None if no profile shows it.

    Args:
        windows: those that count.
        speedup: of overlapped over sequential steps, over all windows.
        detailed: one of them with its collectives, on which advice rests; None to take the last that has any.
        run: what is known of the job, for advice.
        step_ms: an overlapped step over all windows.
        exposed: its exposed communication.
        among: ask which of these takes longest; empty to ask what bounds the step.
    """
    measured = [(window, found) for window in windows if (found := window.step_parts()) is not None]
    if not measured:
        return None
    parts = mean_parts([parts for _, (parts, _) in measured])
    late = _late([late for _, (_, late) in measured])
    times = times_ms(parts)
    bound, runner_up = (max(among, key=lambda one: times[one]), None) if among else bound_of(parts)
    arrivals = [window.arrivals for window, _ in measured if window.valid]
    late_ones = (*stragglers(arrivals), *stragglers(arrivals, hosts=True))
    if detailed is None:
        detailed = next((window for window, _ in reversed(measured) if window.collectives), measured[-1][0])
    divided = [window.slowdown_shares for window, _ in measured if window.slowdown_shares is not None]
    environments = [window.environment for window in windows if window.environment is not None]
    job = JobFacts(
        parts,
        detailed,
        divided[-1] if divided else None,
        {} if run is None else run.configuration,
        environments[-1] if environments else None,
        environments[-1].lowest_rank if environments else None if run is None else run.environment,
        "" if run is None or run.workload is None else run.workload.precision or "",
        None if step_ms is None else step_ms.value,
        _ends(exposed),
    )
    advice = list(advice_for(bound, job, late, late_ones))
    if speedup is not None and speedup.ci_high is not None and speedup.ci_high < 0:
        won = f"{PLAIN.percent(-speedup.value)} of a step with overlap"
        least = PLAIN.percent(-speedup.ci_high)
        because = f"Sequential steps are shorter here: that could win {won} (95% interval {least} or more)."
        advice.insert(0, Advice("overlap-off", "Switch overlap off.", because, won))
    return Bottleneck(bound, runner_up, parts, late, late_ones, tuple(advice))


def run_bottleneck(
    summary: RunSummary, detailed: OverlapReport | None = None, among: Sequence[Bound] = ()
) -> Bottleneck | None:
    """What bounds the steps of a run; None for a control run or without a profile. See ``bottleneck_of``."""
    if summary.control:
        return None
    names = ("speedup_vs_sequential", "e2e_overlapped_ms", "exposed_comm_ms")
    speedup, step_ms, exposed = map(summary.pooled().get, names)
    sure = None if summary.not_settled else speedup
    return bottleneck_of(summary.valid_windows, sure, detailed, summary.run, step_ms, exposed, among)


def predictions_of(report: OverlapReport, run: RunInfo | None) -> list[Prediction]:
    """What the advice on a window predicts of settings; nothing if the window does not count."""
    if report.control or not (report.valid and report.complete):
        return []
    found = bottleneck_of([report], None, None, run, report.e2e_overlapped_ms, report.exposed_comm_ms)
    return [] if found is None else found.predictions


def _ends(exposed: Estimate | None) -> tuple[float, float]:
    """The ends of an interval over its value; 1 where there is none."""
    if exposed is None or exposed.ci_low is None or exposed.ci_high is None or not exposed.value > 0:
        return 1.0, 1.0
    return max(0.0, exposed.ci_low) / exposed.value, exposed.ci_high / exposed.value


def _late(of_windows: Sequence[LateRank | None]) -> LateRank | None:
    """The rank that was late in more than half of the windows, with its mean over those; None if no rank was."""
    ranks = Counter(late.rank for late in of_windows if late is not None)
    rank, times = max(ranks.items(), key=lambda item: item[1], default=(0, 0))
    if 2 * times <= len(of_windows):
        return None
    alike = [late for late in of_windows if late is not None and late.rank == rank]
    waiting_ms = sum(late.waiting_ms for late in alike) / times
    return LateRank(rank, waiting_ms, busy=2 * sum(late.busy for late in alike) > times)


def _who_is_late(of_run: Sequence[Straggler], style: Style) -> str:
    """The worst rank and the worst host of sequential steps, and how certain that is, in sentences."""
    worst = [next((row for row in of_run if (row.rank < 0) is host), None) for host in (False, True)]
    return "".join([f" {row.name.capitalize()}: {row.how_sure(style)}." for row in worst if row is not None])


_EVIDENCE = {
    Bound.COMPUTE: "compute takes {share}",
    Bound.COMMUNICATION: "communication that no compute hides takes {share}",
    Bound.BUBBLE: "the bubble of the pipeline takes {share}",
    Bound.LAUNCH: "neither compute nor communication runs for {share}",
    Bound.STRAGGLER: "ranks wait for {last}, for {share}",
    Bound.HOST_COMMUNICATION: "the device waits for communication on the host for {share}",
}


def _evidence(bound: Bound, parts: StepParts, late: LateRank | None, style: Style) -> str:
    share = f"{style.percent(times_ms(parts)[bound] / parts.total_ms)} of a profiled step"
    last = "the last rank" if late is None else f"rank {late.rank}, the last one"
    words = _EVIDENCE[bound].format(share=share, last=last)
    if bound is Bound.COMPUTE and parts.contention_ms > 0:
        words += f", {style.percent(parts.contention_ms / parts.total_ms)} lost to contention"
    return words
