"""What delays, profiles and the job's configuration say together: what to change about a collective, and its gain."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from overlap_callbacks.analysis.buckets import SHORT_MESSAGE_BYTES, bucket_sizes, gradient_bytes_of
from overlap_callbacks.analysis.causal import Response, Verdict, ranked, responses_of, row_of
from overlap_callbacks.analysis.exposure import add_names
from overlap_callbacks.analysis.formatting import PLAIN, Style
from overlap_callbacks.analysis.name_rules import collective_of
from overlap_callbacks.analysis.results.causal import CausalWindow
from overlap_callbacks.analysis.results.exposure import ExposedCollective, Exposure
from overlap_callbacks.analysis.results.prediction import SETTINGS, Prediction
from overlap_callbacks.analysis.results.run import Setting
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.analysis.sums import grouped

# Shares of a collective's time from which on it is exposed, below which it is hidden, and from which on it is waiting.
_EXPOSED, _HIDDEN, _WAITING = 0.5, 0.1, 0.5
_BUCKET = re.compile(r"bucket (\d+)\b")
_MIB = 2**20


class Finding(NamedTuple):
    """What is known of a set of collectives. Times are of one of them on one rank; None if they are not known.

    Attributes:
        exposed_ms, hidden_ms: in a step as configured, by its profile.
        waiting_ms: of these, waiting for the last rank, by its share in windows of the usual kind.
        path_ms: of these, on the critical path.
        same_windows: whether these times are of the windows that delayed it, in steps that delay nothing.
        idle_ms: of a step, in which nothing computes or communicates.
        late_rank: that others wait for, if any.
    """

    response: Response
    exposed_ms: float | None = None
    hidden_ms: float | None = None
    waiting_ms: float | None = None
    path_ms: float | None = None
    same_windows: bool = False
    transfer_ms: float | None = None
    idle_ms: float | None = None
    late_rank: int | None = None

    @property
    def length_ms(self) -> float | None:
        """Of its transfer: measured alone, else in flight without waiting."""
        if self.transfer_ms is not None or self.exposed_ms is None or self.hidden_ms is None:
            return self.transfer_ms
        return max(0.0, self.exposed_ms + self.hidden_ms - (self.waiting_ms or 0.0))

    @property
    def won_ms(self) -> float | None:
        """What removing it wins at most: its length, if the step waits for it; see ``analysis/causal.py``."""
        blocks = self.response.alone and self.response.verdict is Verdict.BLOCKING
        return self.length_ms if blocks else None

    @property
    def slack_ms(self) -> float | None:
        """At least; None for none."""
        slack = self.response.slack_ms
        return None if slack is None or not slack.ci_low else slack.ci_low

    def contradiction(self, style: Style = PLAIN) -> str:
        """How the profile's verdict differs from that of delays, and why; empty if it does not.

        The profile's is the critical path if it is known, else what is exposed.
        """
        exposed_ms, hidden_ms = self.exposed_ms or 0.0, self.hidden_ms or 0.0
        in_flight_ms = exposed_ms + hidden_ms
        if not self.response.alone or not in_flight_ms > 0:
            return ""
        share = (exposed_ms if self.path_ms is None else self.path_ms) / in_flight_ms
        if self.response.verdict is Verdict.SLACK and share >= _EXPOSED and self.slack_ms is not None:
            slack, longer = style.quantity(self.slack_ms, "ms"), self._longer_path(style)
            return f"{self._in_the_profile(style)}, but with slack of at least {slack}: {longer}"
        if self.response.verdict is Verdict.BLOCKING and share < _HIDDEN:
            return (
                f"{self._in_the_profile(style)}, and yet the step waits for it: its slack is at most "
                f"{style.quantity(self._most_slack_ms, 'ms')}, or what needs it is in the next step or on another rank"
            )
        return ""

    @property
    def _most_slack_ms(self) -> float:
        """A slack that is shorter than the delay, by the slope's interval."""
        return max(0.0, 1 - (self.response.slope.ci_low or 0.0)) * self.response.delayed.delay_ms

    def _longer_path(self, style: Style) -> str:
        """What the step waits for in its place, as far as the profile tells."""
        if self.late_rank is not None:
            return f"the step waits for rank {self.late_rank}, which comes later"
        if self.idle_ms is not None and self.slack_ms is not None and self.idle_ms >= self.slack_ms:
            idle = style.quantity(self.idle_ms, "ms")
            return f"the step waits for the host or its input, as nothing runs on the device for {idle} of it"
        return "another path is longer, such as a collective before it or a copy"

    def _in_the_profile(self, style: Style) -> str:
        if self.path_ms is None:
            is_exposed = (self.exposed_ms or 0.0) >= (self.hidden_ms or 0.0)
            what, ms = ("exposed", self.exposed_ms) if is_exposed else ("hidden", self.hidden_ms)
            return f"{what} for {style.quantity(ms or 0.0, 'ms')} {self._where}"
        if self.path_ms > 0:
            only = "only " if self.response.verdict is Verdict.BLOCKING else ""
            return f"on the critical path for {only}{style.quantity(self.path_ms, 'ms')} {self._where}"
        return f"not on the critical path {self._where}"

    @property
    def _where(self) -> str:
        return "in undelayed steps of the same windows" if self.same_windows else "in steps of other windows"


class Fix(NamedTuple):
    """What to change about a collective.

    Attributes:
        what: to do, in words.
        topic: as in ``Prediction``; empty if no setting does it.
        arm: what tries it: an arm of ``overlap_callbacks.arms``, or a command; empty if nothing does.
        rises: as in ``Prediction``.
    """

    what: str
    topic: str = ""
    arm: str = ""
    rises: bool | None = True

    def prediction(self, found: Finding) -> Prediction | None:
        """What it saves at least and at most; None if that is not known, or no setting does it."""
        if not self.topic or found.won_ms is None:
            return None
        return Prediction(
            topic=self.topic,
            settings=SETTINGS[self.topic],
            rises=self.rises,
            step_ms=found.response.step_ms,
            low_ms=0.0,
            high_ms=min(found.won_ms, found.response.step_ms),
            assumes=f"the step waits for the {found.response.label}, at a slope of {found.response.slope.value:.2f}",
        )


def findings_of(
    windows: Sequence[CausalWindow],
    exposure: Exposure | None = None,
    collectives: Sequence[CollectiveTime] = (),
    *,
    busy_ms: float | None = None,
    late_rank: int | None = None,
) -> list[Finding]:
    """Single collectives before sets, those that hold the step up most first.

    ``exposure``, ``collectives``, ``late_rank``: of windows of the usual kind; ``busy_ms``: compute and exposed
    communication of a step there. Times of the windows that delayed a collective go before those of ``exposure``.
    """
    usual = _by_name(() if exposure is None else exposure.names)
    by_set = grouped(windows, lambda window: window.delayed.members)
    found = []
    for response in ranked(responses_of(windows)):
        call = response.delayed.members[0]
        rows = [
            of
            for of in collectives
            if of.operator == call.operator and call.group in (of.dimension, of.group) and of.transfer_ms
        ]
        messages = sum([of.messages for of in rows])
        transfer_ms = sum([of.transfer_ms or 0.0 for of in rows]) / messages if messages else None
        of_set = _by_name(add_names([window.names for window in by_set[response.delayed.members]]))
        own, other = of_set.get(row_of(call)), usual.get((collective_of(call.operator), call.name))
        named = own or other
        if named is None or not response.alone:
            found.append(Finding(response, transfer_ms=transfer_ms if response.alone else None))
            continue
        # Only windows of the usual kind tell what is waiting, of collectives that may have been longer than here.
        waited = None if other is None else _waited(other)
        # By the name alone, if the profile has it: other collectives of the operator may be of another size.
        found.append(
            Finding(
                response,
                exposed_ms=named.exposed_ms / named.calls,
                hidden_ms=named.hidden_ms / named.calls,
                waiting_ms=None if waited is None else waited * _in_flight_ms(named),
                path_ms=None if named.path_ms is None else named.path_ms / named.calls,
                same_windows=own is not None,
                transfer_ms=None if other is None or waited is None else (1 - waited) * _in_flight_ms(other),
                idle_ms=None if busy_ms is None else max(0.0, response.step_ms - busy_ms),
                late_rank=late_rank,
            )
        )
    return found


def _by_name(rows: Sequence[ExposedCollective]) -> dict[tuple[str, str], ExposedCollective]:
    """The first row with calls of each kind and name."""
    return {(row.collective, row.name): row for row in reversed(rows) if row.calls}


def _in_flight_ms(row: ExposedCollective) -> float:
    """Of one of a row's collectives."""
    return (row.exposed_ms + row.hidden_ms) / row.calls


def _waited(row: ExposedCollective) -> float | None:
    """The share of their time in flight in which a row's collectives wait; None if it is not known."""
    in_flight_ms = row.exposed_ms + row.hidden_ms
    return None if row.waiting_ms is None or not in_flight_ms > 0 else min(1.0, row.waiting_ms / in_flight_ms)


def fix_of(
    found: Finding, exposure: Exposure | None, configuration: Mapping[str, Setting], late_rank: int | None = None
) -> Fix | None:
    """What to change about a collective that holds the step up; None if it is not known to.

    ``exposure``: with the slopes of delays (``with_blocking``).
    """
    if not found.response.alone or found.response.verdict is not Verdict.BLOCKING:
        return None
    call, in_flight_ms = found.response.delayed.members[0], (found.exposed_ms or 0.0) + (found.hidden_ms or 0.0)
    if in_flight_ms > 0 and (found.waiting_ms or 0.0) >= _WAITING * in_flight_ms:
        rank = "the rank that comes last" if late_rank is None else f"rank {late_rank}"
        return Fix(f"this is {rank}, not communication: the others wait for it most of the collective's time")
    kind = collective_of(call.operator)
    if kind == "all_gather" and "fsdp_prefetch" in configuration:  # FSDP2, which by default gathers one ahead
        ahead = max(1, _number(configuration["fsdp_prefetch"])) + 1
        if ahead < _number(configuration.get("fsdp_units"), ahead + 1):
            return Fix("prefetch one unit earlier", "prefetch", f"Prefetch({ahead}, {ahead})")
    if kind == "all_gather" and configuration.get("zero_stage") == 3:
        twice = 2 * _number(configuration.get("zero_prefetch_bucket_size")) or 100_000_000
        return Fix("prefetch more parameters", "prefetch", f"ZeroPrefetchBucket({twice})")
    general = Fix("no setting is known for it alone: see what to try for the whole step")
    if kind in ("all_reduce", "reduce_scatter") and "ddp_bucket_cap_bytes" in configuration:
        return next(_bucket_fixes(call.name, exposure, configuration), general)
    return general


def _number(setting: Setting | None, unknown: int = 0) -> int:
    return int(setting) if isinstance(setting, (int, float)) and math.isfinite(setting) else unknown


def _bucket_fixes(name: str, exposure: Exposure | None, configuration: Mapping[str, Setting]) -> Iterator[Fix]:
    """A larger one of a short message, if it merges with others and none of them is known to have slack.

    Those with slack would make it longer for nothing. Else a smaller one that splits it.
    """
    cap, number = configuration["ddp_bucket_cap_bytes"], _BUCKET.match(name)
    if not isinstance(cap, (int, float)) or number is None:
        return
    own, now = int(number[1]), f"{cap / _MIB:.3g}"
    rows = _rows_of_buckets(exposure)
    buckets = {bucket: row.most_bytes or 0 for bucket, row in rows.items()}
    all_bytes = gradient_bytes_of(configuration) or float(sum(buckets.values()))

    def resized(size: str, why: str, *, rises: bool) -> Fix:
        what = f"{'raise' if rises else 'lower'} the bucket from {now} to {size} MB: {why}"
        return Fix(what, "buckets", f"overlap tune --arg bucket-mb={now},{size} -- COMMAND", rises)

    beside_slack = False
    for size in bucket_sizes(all_bytes, cap, larger=True) if buckets.get(own, 0) < SHORT_MESSAGE_BYTES else ():
        merged = merged_buckets(buckets, own, float(size) * _MIB)
        if any(rows[bucket].blocking == 0 for bucket in merged):
            beside_slack = True
        elif len(merged) > 1:
            yield resized(size, f"buckets {merged[0]} to {merged[-1]} merge", rises=True)
    is_last = beside_slack and own == max(buckets)
    why = "the last message gets shorter" if is_last else f"bucket {own} begins earlier"
    for size in bucket_sizes(all_bytes, cap, larger=False):
        if float(size) * _MIB < buckets.get(own, math.inf):
            yield resized(size, why, rises=False)
    if beside_slack:
        why = "nothing is left to hide it, and " if is_last else ""
        yield Fix(f"no bucket size is known to help bucket {own}: {why}what would merge with it has slack")


def _rows_of_buckets(exposure: Exposure | None) -> dict[int, ExposedCollective]:
    """Of each bucket that has a number and a size, by that."""
    found = {}
    for row in () if exposure is None else exposure.names:
        number = _BUCKET.match(row.name)
        if number is not None and row.most_bytes:
            found[int(number[1])] = row
    return dict(sorted(found.items()))


def merged_buckets(buckets: Mapping[int, int], own: int, cap_bytes: float) -> list[int]:
    """The buckets, by number, that share one with ``own`` under another cap, as DDP fills them in their order."""
    merged: list[int] = []
    filled = 0.0
    for number, num_bytes in buckets.items():
        if merged and filled + num_bytes > cap_bytes:
            if own in merged:
                return merged
            merged, filled = [], 0.0
        merged.append(number)
        filled += num_bytes
    return merged if own in merged else []
