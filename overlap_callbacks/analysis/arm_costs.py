"""What arms cost, and whether there is room for another window, or for an arm to be turned on.

An arm that is kept and turns slower costs before anybody can know. So it is turned on only while the budget, the
dearest window, and what it has won bear twice the time in which all ranks go back: in that time it loses no more than
that. All go back before it has lost more, and it is checked before it is turned on again. A step that has begun cannot
be cut short, so that time is at least three steps as configured: an arm may turn three times slower at once.

What it has won is known in two ways: by what its windows say, and by the pace of the job with it and without. Windows
cannot see an arm that loses where it is always on; the pace may change for reasons of the job's. The worse of both
counts. Neither shows an arm that turns slower just when the job turns faster by as much, until it is checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

from overlap_callbacks.analysis.statistics import t_quantile

# Maximum time that all ranks are given to go back from a kept arm, and the fewest steps as configured.
_NOTICE_S, _NOTICE_STEPS = 10.0, 3
# The pace is known by so many times from window to window, and how much they vary; by fewer at first. By chance, eight
# may be much alike: so what they show falls by this factor at most.
_PACES, _FIRST_PACES, _FADES = 8, 4, 0.9
# After so many windows with a kept arm, it stays off from a check to the next window, so that the pace without it is
# known anew.
_OLD = 16
# The job has another pace from so many deviations and this share on. One of the first eight is no pace of the job's
# (it compiled, or read a file anew) from so many deviations of the others on.
_SHIFTED, _LEAST_SHIFT, _OUTLYING = 4.0, 0.03, 6.0
# So many deviations of a window's distance may be lost for no reason, and won in a stretch.
_VARIES, _BY_CHANCE = 4, 2
# To refute what windows show: so many comparisons of paces, each over this part of a window's distance.
_LEAST_RATIOS, _LEAST_ON = 4, 0.1
# How certain that is, and what is known of the pace.
_CERTAIN = 0.99
# A window that was begun, and of which nothing was heard at so many later ones, is charged what was expected of it.
_UNHEARD = 4


@dataclass(eq=False)
class Stretch:
    """Steps with the kept arm turned on, between two windows: how long they take, and may take.

    Attributes:
        own_s: what the job as configured takes from one window to the next.
        allowed_s: by how much longer than that these steps may take in all.
        notice_s: time that all ranks are given to go back.
        must_end: whether they are to go back although it may lose more.
        windows: how many windows' distances have passed with the arm.
        on_s: how long they took.
        spread_s: by how much ``own_s`` varies from window to window.
        step_lost_s: by how much longer each of the last two steps took than as configured. One may be long by itself,
            for a checkpoint.
    """

    own_s: float
    allowed_s: float
    notice_s: float
    spread_s: float = 0.0
    must_end: bool = False
    windows: float = 0.0
    on_s: float = 0.0
    step_lost_s: float = 0.0
    _last_lost_s: float = 0.0

    def has_trained(self, windows: float, on_s: float) -> None:
        """On the training thread of rank 0, after each step: ``windows`` and ``on_s`` are so now."""
        before_s, last_s = self.lost_s, self._last_lost_s
        self.windows, self.on_s = windows, on_s
        self._last_lost_s = max(0.0, self.lost_s - before_s)
        self.step_lost_s = min(last_s, self._last_lost_s)

    @property
    def lost_s(self) -> float:
        """By how much longer it took than the job as configured would have; negative for a gain."""
        return self.on_s - self.windows * self.own_s

    def is_used_up(self) -> bool:
        """Whether it has lost what it may, or could while the ranks go back."""
        return self.must_end or self._lost_soon_s + self.notice_s > self.allowed_s

    def must_end_now(self) -> bool:
        """Whether it may not even lose what a step loses twice more: before the next look, and until all know."""
        return self._lost_soon_s > self.allowed_s

    @property
    def cost_s(self) -> float:
        """What it lost in all: the other ranks have the arm for another step if they are told no sooner."""
        return self.lost_s + (self.step_lost_s if self.must_end_now() else 0.0)

    @property
    def _lost_soon_s(self) -> float:
        # What makes a window's distance shorter by chance is common to its steps.
        chance_s = _BY_CHANCE * self.spread_s * min(self.windows, math.sqrt(self.windows))
        return self.lost_s + chance_s + 2 * self.step_lost_s


@dataclass(eq=False)
class KeptAccount:
    """What an arm has won since it was chosen.

    Attributes:
        stretch: the one under way.
        was_used_up: whether a stretch was, since the arm was last checked; it stays off until then.
    """

    stretch: Stretch | None = None
    was_used_up: bool = False
    _shown_s: float = 0.0
    _paced_s: float = 0.0
    # Since the job last ran as configured: windows' distances with the arm, and how long they took.
    _windows: float = 0.0
    _on_s: float = 0.0
    # Each time: the logarithm of the pace with the arm, over that before and after.
    _ratios: list[float] = field(default_factory=list)

    @property
    def won_s(self) -> float:
        """Training time that it has won at least."""
        return max(0.0, min(self._shown_s, self._paced_s))

    @property
    def lost_s(self) -> float:
        """Training time that it has lost."""
        return max(0.0, -min(self._shown_s, self._paced_s))

    def end_stretch(self, speedup: float) -> None:
        """Add a stretch. ``speedup``: what windows say."""
        stretch, self.stretch = self.stretch, None
        if stretch is not None:
            self._shown_s += speedup * stretch.on_s
            self._paced_s -= stretch.cost_s
            self._windows += stretch.windows
            self._on_s += stretch.on_s
            self.was_used_up = self.was_used_up or stretch.is_used_up()

    def compare(self, before_s: float | None, after_s: float) -> None:
        """Note the paces as configured before the last stretches with the arm and after them."""
        if before_s and self._windows >= _LEAST_ON and after_s > 0 < self._on_s:
            usual = (math.log(before_s) + math.log(after_s)) / 2
            self._ratios.append(math.log(self._on_s / self._windows) - usual)
        self._windows = self._on_s = 0.0

    def is_refuted(self, log_speedup: float) -> bool:
        """Whether the job is known to win less than half of what windows show, and has lost so far.

        A job's pace changes for other reasons too, so only paces that follow each other are compared.
        """
        number = len(self._ratios)
        if number < _LEAST_RATIOS or self._paced_s >= 0:
            return False
        error = stdev(self._ratios) / math.sqrt(number)
        return bool(fmean(self._ratios) - t_quantile(number - 1, _CERTAIN) * error > -log_speedup / 2)


class _Pace:
    """Time from window to window in which the job as configured trains."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self.noise_s = math.inf  # standard deviation
        self.place = 0.0  # until which it ran so last

    @property
    def is_new(self) -> bool:
        """Whether too few times are known."""
        return len(self._times_s) < (2 if math.isfinite(self.noise_s) else _FIRST_PACES)

    @property
    def last_s(self) -> float | None:
        return self._times_s[-1] if self._times_s else None

    @property
    def usual_s(self) -> float | None:
        return median(self._times_s) if self._times_s else None

    @property
    def unsure_s(self) -> float:
        """By how much faster the job as configured may be, if the pace is not new."""
        number = len(self._times_s)
        degrees = (_PACES if math.isfinite(self.noise_s) else number) - 1
        return float(t_quantile(degrees, _CERTAIN)) * self.spread_s / math.sqrt(number)

    @property
    def spread_s(self) -> float:
        """By how much it varies, known or not."""
        latest_s = stdev(self._times_s) if len(self._times_s) > 1 else 0.0
        return max(latest_s, self.noise_s) if math.isfinite(self.noise_s) else latest_s

    def add(self, place: float, time_s: float) -> None:
        usual_s = self.usual_s
        if usual_s is not None and abs(time_s - usual_s) > max(_SHIFTED * self.noise_s, _LEAST_SHIFT * usual_s):
            self._times_s = []  # the job has another pace now
        self._times_s, self.place = [*self._times_s[1 - _PACES :], time_s], place
        if len(self._times_s) == _PACES and not math.isfinite(self.noise_s):
            *others_s, last_s = sorted(self._times_s, key=lambda one: abs(one - median(self._times_s)))
            if abs(last_s - median(others_s)) > _OUTLYING * stdev(others_s):
                self._times_s.remove(last_s)
        if len(self._times_s) == _PACES:
            faded_s = _FADES * self.noise_s if math.isfinite(self.noise_s) else 0.0
            self.noise_s = max(stdev(self._times_s), faded_s)


class ArmCosts:
    """What windows, trials and the kept arm have cost.

    At every moment they cost at most ``budget`` of the time since the first of them, plus the dearest one begun.
    """

    def __init__(self, budget: float, least_notice_s: float, steps_apart: float) -> None:
        self._budget, self._told_after_s, self._steps_apart = budget, least_notice_s, steps_apart
        self.training_s = 0.0
        self.owed_s = 0.0  # of an earlier start: what its training had not paid for
        self.base_s = 0.0  # what any window costs, whatever its arm; 0 before the first
        self._spent_s = self._windows_s = 0.0  # in all, and by windows and trials
        self._kept: KeptAccount | None = None
        self._dropped: Stretch | None = None  # of an arm that is kept no longer
        self._pace = _Pace()
        self._began_s: float | None = None
        self._last_look: tuple[float, float, float] | None = None  # place, time, and ``_windows_s``
        self._dearest_s = 0.0
        self._begun: dict[str, float] = {}  # expected costs of those without a result
        self._unheard = 0

    @property
    def spent_s(self) -> float:
        """By windows, trials, and arms that were kept beyond what they had won."""
        return self._spent_s + (0.0 if self._kept is None else self._kept.lost_s)

    @property
    def cost_s(self) -> float:
        """That, what the arm that is on has lost until now, and what an earlier start had not paid for."""
        won_s = 0.0 if self._kept is None else self._kept.won_s
        return self.owed_s + self.spent_s + max(0.0, sum([stretch.cost_s for stretch in self._under_way]) - won_s)

    @property
    def _under_way(self) -> list[Stretch]:
        kept = None if self._kept is None else self._kept.stretch
        return [stretch for stretch in (self._dropped, kept) if stretch is not None]

    def look(self, place: float, now_s: float) -> float | None:
        """Note the time at a window. Returns that since the last look, by window, if the kept arm was on meanwhile.

        ``place``: how many windows' distances the job has trained.
        """
        self._began_s = now_s if self._began_s is None else self._began_s
        self.training_s = now_s - self._began_s
        is_on = any([stretch.on_s > 0 for stretch in self._under_way])
        before, self._last_look = self._last_look, (place, now_s, self._windows_s)
        if before is None or place <= before[0]:
            return None
        # A window costs time itself.
        pace_s = max(0.0, now_s - before[1] - (0.0 if is_on else self._windows_s - before[2])) / (place - before[0])
        if not is_on:
            if self._kept is not None:
                self._kept.compare(self._pace.last_s, pace_s)
            self._pace.add(place, pace_s)
            return None
        return pace_s

    def window_opens(self, speedup: float) -> None:
        """Count what arms have cost that were on until now. ``speedup``: what windows say of the one that is kept."""
        if self._dropped is not None:
            self._spent_s += max(0.0, self._dropped.cost_s)
            self._dropped = None
        if self._kept is not None:
            self._kept.end_stretch(speedup)

    # -- windows and trials

    def begin(self, name: str, expected_s: float) -> None:
        self._begun[name] = expected_s
        self._unheard = 0

    def end(self, name: str, cost_s: float) -> None:
        self._begun.pop(name, None)
        self._spent_s += max(0.0, cost_s)
        self.window_took(cost_s)
        self._dearest_s = max(self._dearest_s, cost_s)
        if self._kept is not None and self._kept.stretch is not None:
            self._kept.stretch.allowed_s = self.may_lose_s

    def window_took(self, cost_s: float) -> None:
        """Take a window's time off the pace."""
        self._windows_s += max(0.0, cost_s)

    def window_costs(self, cost_s: float) -> None:
        """Note what a whole window costs."""
        self.base_s = min(self.base_s or math.inf, max(0.0, cost_s))

    def awaited(self) -> bool:
        """Whether a begun one has no result yet; for a few windows."""
        if not self._begun:
            return False
        self._unheard += 1
        if self._unheard < _UNHEARD:
            return True
        for name, expected_s in list(self._begun.items()):
            self.end(name, max(expected_s, self._dearest_s))
        return False

    def unpaid_s(self, cost_s: float) -> float:
        """Time until one that costs this may begin; 0 if it may now."""
        planned_s = self.owed_s + self.spent_s + (cost_s if cost_s > self._dearest_s else 0.0)
        return max(0.0, planned_s / self._budget - self.training_s)

    # -- the arm that is kept

    def keep(self, account: KeptAccount | None) -> None:
        """Keep this arm and no other, which goes back as soon as the ranks know; what it loses until then counts."""
        if account is self._kept:
            return
        self._spent_s = self.spent_s
        if self._kept is not None and self._kept.stretch is not None:
            self._dropped, self._kept.stretch = self._kept.stretch, None
            self._dropped.must_end = True
        self._kept = account

    def is_refuted(self, log_speedup: float) -> bool:
        """As ``KeptAccount``, of the arm that is kept."""
        return self._kept is not None and self._kept.is_refuted(log_speedup)

    def turn_on(self, rate: float, *, in_doubt: bool) -> Stretch | None:
        """Begin a stretch with the kept arm after a window; None if it may not be turned on now.

        ``rate``, ``in_doubt``: as ``short_s``.
        """
        usual_s = self._pace.usual_s
        if self._kept is None or self._kept.was_used_up or usual_s is None or self._last_look is None:
            return None
        if self.short_s(rate, in_doubt=in_doubt) > 0:
            return None
        if (self._begun and abs(self._last_look[0] - self._pace.place) >= _OLD) or self._pace.is_new:
            return None
        allowed_s = self.may_lose_s
        notice_s = min(max(_NOTICE_S, self._least_notice_s), max(self._least_notice_s, allowed_s / 2))
        own_s = max(0.0, usual_s - self._pace.unsure_s)
        self._kept.stretch = Stretch(own_s, allowed_s, notice_s, self._pace.spread_s)
        return self._kept.stretch

    @property
    def may_lose_s(self) -> float:
        """What a stretch may lose. That is not all that the arm has won: it is checked again before."""
        noise_s, notice_s = self._pace.noise_s, self._least_notice_s
        return min(self.allowed_s - min(noise_s, notice_s / 2), 2 * max(_NOTICE_S, notice_s) + _VARIES * noise_s)

    @property
    def _least_notice_s(self) -> float:
        return max(self._told_after_s, _NOTICE_STEPS * (self._pace.usual_s or 0.0) / self._steps_apart)

    def short_s(self, rate: float, *, in_doubt: bool, cost_s: float = 0.0) -> float:
        """What is missing for the kept arm to be turned on; 0 if nothing is.

        Args:
            rate: share of time that it loses should it turn as much slower as it was faster.
            in_doubt: whether it may have. If so, there must be room for what it loses until the next window too.
            cost_s: of a window that begins first.
        """
        if self._kept is None:
            return 0.0
        slower_s = rate * (self._pace.usual_s or 0.0)
        varies_s = slower_s if in_doubt else min(slower_s, 2 * self._pace.noise_s)
        return max(0.0, 2 * self._least_notice_s + varies_s + cost_s - self.allowed_s)

    @property
    def allowed_s(self) -> float:
        """What the kept arm may lose now: budget, dearest window and its gains, less what is spent and being spent."""
        won_s = 0.0 if self._kept is None else self._kept.won_s
        spent_s = self.owed_s + self.spent_s + sum(self._begun.values())
        dearest_s = max([self._dearest_s, *self._begun.values()])
        return self._budget * self.training_s + dearest_s + won_s - spent_s
