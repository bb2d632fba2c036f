"""The order check: may the recorded collectives be serialised? Rank 0 decides for all ranks.

The submissions of all ranks (``submissions.py``) go up the ranks' tree. Rank 0 compares what the ranks are about to
measure and searches their sequences for a cycle (``gate/deadlock.py``); its ruling goes down the tree. This has its own
thread, so that a stalled sink cannot delay a check.
"""

from __future__ import annotations

import enum
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from overlap_callbacks._threads import Worker
from overlap_callbacks.analysis.formatting import name_ranks
from overlap_callbacks.analysis.rank_set import in_runs
from overlap_callbacks.analysis.results.causal import DelayedSet
from overlap_callbacks.analysis.results.window import Rhythm
from overlap_callbacks.gate.deadlock import CollectiveSequence, Conflict, find_conflict
from overlap_callbacks.gate.step_log import ExpectedSequence
from overlap_callbacks.monitor.background.budget import Skip, WindowBudget
from overlap_callbacks.monitor.background.deciding import ChosenArm, Deciding
from overlap_callbacks.monitor.background.plans import Plans
from overlap_callbacks.monitor.background.quick import QuickLook
from overlap_callbacks.monitor.background.store import StoreChannel, StoreFailedError
from overlap_callbacks.monitor.background.submissions import (
    OrderMessage,
    RecordedKinds,
    Submission,
    Submissions,
    WindowConfig,
    config_mismatch,
    in_step,
    kind_of_step,
    step_mismatch,
)
from overlap_callbacks.monitor.background.tree import Exchange, Tree
from overlap_callbacks.monitor.schedule import Placement

# Maximum wait of the training thread after a check that was late: the ranks may have recovered, but must not stall
# training twice.
_SHORT_PATIENCE_S = 0.5
# Until every rank has answered once, the timeout is this many usual step times, and at least this many seconds for each
# level of the tree: a rank without the library would cost the full timeout. Few ranks are later by more.
_FIRST_STEPS = 20
_FIRST_TIMEOUT_S = 2.0
_DEFAULT_TIMEOUT_S = 10.0
# How often the waiting training thread checks whether the store still answers.
_LOOK_S = 0.25


class Decision(enum.Enum):
    """What rank 0 decided."""

    GRANTED = "granted"  # the recorded sequences may be serialised
    CONFLICT = "conflict"  # serialising them would deadlock; every later check would find the same
    CONFIG_MISMATCH = "config mismatch"  # the ranks are set up differently; every later check would find the same
    STEP_MISMATCH = "step mismatch"  # the ranks recorded different steps of the job
    SKIPPED = "skipped"  # this window is skipped, because of its cost or because its first step compiled
    LATE = "late"  # a rank did not answer in time
    FAILED = "failed"  # the check failed for another reason


class Ruling(msgspec.Struct, frozen=True):
    """Rank 0's ruling on whether the sequences of the recorded steps may be serialised.

    ``only``: the one recorded step whose kind may be serialised, because the order of another kind contradicts it; -1
    if all kinds may be. ``keep``: the arm that the ranks vote to turn on after the window, or where a window that is
    skipped would be measured.
    """

    decision: Decision
    reason: str = ""  # why the sequences may not be serialised; empty if they may
    placement: Placement | None = None  # of the window's parts; None in a pinned mode or if not granted
    rhythms: tuple[Rhythm, ...] = ()  # the job's rhythms known to rank 0
    name: str = ""  # unique, even among rulings of a killed job in the same store
    only: int = -1
    next_window: int = 0  # if skipped: the first window that may open again, 0 for the next one
    quick: bool = False  # windows go on back to back
    arm: str = ""  # the window's arm, if rank 0 decides; empty for the one whose turn it is
    trial: bool = False  # only one step is turned
    keep: str = ""
    delayed: DelayedSet | None = None  # what a causal window delays; None for other windows
    session: str = ""  # rank 0's, whose plans count; see ``Plans``


# Rank 0 plans a window once its sequences are granted: where its parts lie (None in a trial and a causal window), the
# rhythms known by then, and what a causal window delays. The arm is None if nobody has chosen it. The list has what
# the ranks can delay, of ``Submissions``.
WindowPlanner = Callable[
    ["ChosenArm | None", list[bytes]], tuple[Placement | None, tuple[Rhythm, ...], DelayedSet | None]
]

_NO_ANSWER = Ruling(Decision.LATE, "the job's store does not answer [OC208]")


@dataclass(eq=False)
class _Check:
    """One order check, from its start on the training thread to its ruling."""

    key: str
    recorded: RecordedKinds
    window: int | None
    config: WindowConfig | None
    timeout_s: float
    quick: QuickLook | None = None  # on rank 0, in a window of a quick look
    arm_steps: int = 0
    done: threading.Event = field(default_factory=threading.Event)  # set once there is a ruling
    ruling: Ruling | None = None
    given_up: bool = False  # the training thread went on without it

    def await_ruling(self, patience_s: float, is_stuck: Callable[[], bool]) -> Ruling:
        """The ruling as the training thread sees it, or why there is none. Waits for a bounded time."""
        deadline = time.monotonic() + patience_s
        while not self.done.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            if is_stuck():
                self.given_up = True
                return _NO_ANSWER
            if time.monotonic() >= deadline:
                self.given_up = True
                return Ruling(Decision.LATE, f"the order check was not done within {patience_s:g} s [OC210]")
        assert self.ruling is not None
        return self.ruling


class OrderChecker:
    """Runs order checks on its own thread. The training thread starts one and asks for its ruling some steps later.

    The ranks' sequences must arrive within ``timeout_s``. Rank 0 asks the budget whether a window is too expensive.
    ``on_error`` receives errors on the checker's thread, which alone uses ``exchange`` until ``close()``. ``deciding``
    chooses the arms of windows, on rank 0 of a job that decides; the thread looks for ``plans`` while it is idle.

    ``patience_s``: maximum time that the training thread waits for a ruling.
    """

    def __init__(
        self,
        channel: StoreChannel,
        *,
        timeout_s: float,
        budget: WindowBudget,
        deciding: Deciding | None = None,
        plans: Plans | None = None,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._channel = channel
        self._plans = plans
        self.exchange = Exchange(channel, Tree.of(channel.job), "order", answered=True)
        self._verdicts = Verdicts()
        self._timeout_s = timeout_s
        self._budget = budget
        self._deciding = deciding
        self._worker = Worker("overlap-callbacks-order", on_error, idle=None if plans is None else plans.look)
        self._stop = threading.Event()
        self._check: _Check | None = None  # the latest one
        self._all_heard = False
        self.patience_s = 3 * timeout_s

    def timeout_s(self, usual_step_s: float | None) -> float:
        """Time within which the ranks' sequences must arrive: shorter until all ranks have answered once."""
        # A timeout above the default was chosen by the user: such ranks are far apart.
        if self._all_heard or usual_step_s is None or self._timeout_s > _DEFAULT_TIMEOUT_S:
            return self._timeout_s
        first_s = _FIRST_TIMEOUT_S * max(1, self.exchange.tree.num_levels)
        return min(self._timeout_s, max(first_s, _FIRST_STEPS * usual_step_s))

    def open(self) -> None:
        """Connect to the store while its server is alive; see ``Reporter.open``."""
        self._worker.submit(self._channel.open)
        self._worker.submit(self.exchange.open)
        if self._plans is not None:
            self._worker.submit(self._plans.open)

    def submit(self, task: Callable[[], object]) -> bool:
        """Run a task on the checker's thread; False if too many wait."""
        return self._worker.submit(task)

    def start(
        self,
        key: str,
        recorded: RecordedKinds,
        window: int | None,
        *,
        plan_window: WindowPlanner | None = None,
        config: WindowConfig | None = None,
        usual_step_s: float | None = None,
        quick: QuickLook | None = None,
        arm_steps: int = 0,
    ) -> None:
        """Start a check with the sequences of this rank's recorded steps.

        ``key`` names it: the same on every rank, and never reused. A pinned mode has no ``window`` (its number) and no
        ``config`` (what this rank is about to measure). On rank 0 the checker's thread calls ``plan_window``.
        ``usual_step_s``: step time outside windows, if known. ``arm_steps``: steps of a whole window with its arm.
        """
        timeout_s = self.timeout_s(usual_step_s)
        self.patience_s = min(self.patience_s, 3 * timeout_s)
        # A new object, so that a late check cannot answer for the next one.
        self._check = check = _Check(key, recorded, window, config, timeout_s, quick, arm_steps)
        if self._channel.call.is_stuck:  # the thread still waits for the store, with an earlier check
            check.ruling = _NO_ANSWER
            check.done.set()
            return
        self._worker.submit(lambda: self._run(check, plan_window))

    def await_ruling(self) -> Ruling:
        """The ruling of the latest check. Waits for a bounded time; only briefly after a wait in vain."""
        assert self._check is not None
        ruling = self._check.await_ruling(self.patience_s, lambda: self._channel.call.is_stuck)
        late = ruling.decision is Decision.LATE
        self.patience_s = min(_SHORT_PATIENCE_S, self._timeout_s) if late else 3 * self._timeout_s
        self._all_heard = self._all_heard or ruling.decision not in (Decision.LATE, Decision.FAILED)
        return ruling

    def granted(self, ruling: Ruling) -> ExpectedSequence:
        """What a ruling on the latest check allows to be serialised."""
        assert self._check is not None
        return ExpectedSequence.of(self._check.recorded.granted(ruling.only))

    def close(self, timeout_s: float) -> None:
        """End the thread and abandon a running check. The caller must delete its messages."""
        self._stop.set()
        if self._plans is not None and self._worker.started:
            self._worker.submit(self._plans.leave)
        self._worker.close(timeout_s)

    def _run(self, check: _Check, plan_window: WindowPlanner | None) -> None:
        if check.given_up:
            return
        quick, skip, chosen, keep = False, None, None, ""
        deciding = self._deciding if check.quick is None and check.window is not None else None
        try:
            if check.quick is not None:
                quick, skip = check.quick.goes_on(), check.quick.skip()
            elif self._channel.job.rank == 0:
                skip = self._budget.skip(check.window)
            if deciding is not None and check.window is not None:
                slowed = skip is not None and deciding.has_slowed(check.window)
                if skip is None:
                    asked = self._budget.is_exempt(check.window)
                    chosen, skip = deciding.choose(check.window, check.arm_steps, asked=asked)
                kept = deciding.kept(check.window)  # what the arm has lost until now counts in any case
                keep = "" if slowed else kept
            check.ruling = check_order(
                self.exchange,
                check.key,
                check.recorded,
                OrderMessage.of(check.recorded, check.config),
                timeout_s=check.timeout_s,
                quick=quick,
                skip=skip,
                # A check that the training thread has abandoned must not block the next one.
                stop=lambda: check.given_up or self._stop.is_set(),
                plan_window=plan_window,
                chosen=chosen,
                keep=keep,
                verdicts=self._verdicts,
                session="" if self._plans is None else self._plans.session,
            )
            if self._plans is not None and check.ruling.session:
                self._plans.session = check.ruling.session
        except Exception as error:
            if check.given_up:
                self._channel.connection.renew()  # if the store was suspended, all waiting calls fail: reconnect
                return
            store_failed = isinstance(error, StoreFailedError)
            check.ruling = Ruling(
                Decision.FAILED, str(error) if store_failed else f"the order check failed: {error!r} [OC216]"
            )
            raise
        finally:
            check.done.set()
            granted = check.ruling is not None and check.ruling.decision is Decision.GRANTED
            if deciding is not None and chosen is not None and not granted:
                deciding.lost(chosen.name)


class Verdicts:
    """Caches rank 0's last search for a cycle, whose result usually holds for the next check."""

    def __init__(self) -> None:
        self.searched: frozenset[tuple[tuple[str, ...], tuple[int, ...]]] = frozenset()
        self.conflict: Conflict | None = None
        self.only = -1


def check_order(
    exchange: Exchange,
    key: str,
    recorded: RecordedKinds,
    message: OrderMessage,
    *,
    timeout_s: float,
    skip: Skip | None,
    stop: Callable[[], bool],
    plan_window: WindowPlanner | None = None,
    chosen: ChosenArm | None = None,
    keep: str = "",
    verdicts: Verdicts | None = None,
    quick: bool = False,
    session: str = "",
) -> Ruling:
    """One rank's part of the order check; see ``OrderChecker.start``. Waiting ends early when ``stop`` returns True.

    The ranks' sequences must arrive within ``timeout_s``, rank 0's ruling within twice that. Only rank 0 has
    ``verdicts`` of earlier checks, a reason to ``skip`` the window, may have ``chosen`` its arm and which to ``keep``
    after it, and knows whether windows go on back to back (``quick``).
    """
    own = Submissions.of(exchange.tree.rank, recorded.kinds, message, recorded.delayable)
    part = submit(exchange, key, own, timeout_s, stop)
    if part is None:
        ruling = Ruling(Decision.LATE, _not_taken_by(exchange.tree.parent))
    elif exchange.tree.parent is not None:
        return forward_ruling(exchange, key, timeout_s, stop)
    else:
        serialises = None if chosen is None else chosen.sequential
        ruling = decide(part, exchange.tree.world_size, timeout_s, verdicts or Verdicts(), serialises)
        control = message.config is not None and message.config.control
        if ruling.decision is Decision.GRANTED and skip is not None and not control:
            ruling = Ruling(Decision.SKIPPED, skip.reason, next_window=skip.next_window)
        if ruling.decision is Decision.GRANTED and stop():
            ruling = Ruling(
                Decision.LATE, "rank 0 had gone on when the last rank reported its order of collectives [OC209]"
            )
        if ruling.decision is Decision.GRANTED and plan_window is not None:
            placement, rhythms, delayed = plan_window(chosen, part.delayable)
            ruling = msgspec.structs.replace(ruling, placement=placement, rhythms=rhythms, delayed=delayed)
        if ruling.decision is Decision.GRANTED and chosen is not None:
            ruling = msgspec.structs.replace(ruling, arm=chosen.name, trial=chosen.trial)
        if ruling.decision in (Decision.GRANTED, Decision.SKIPPED):
            ruling = msgspec.structs.replace(ruling, keep=keep)
        # If rank 0 has gone on without its ruling, it has ended the quick look.
        quick = quick and not stop()
        ruling = msgspec.structs.replace(ruling, name=secrets.token_hex(8), quick=quick, session=session)
    exchange.send_down(key, msgspec.json.encode(ruling))
    return ruling


def submit(
    exchange: Exchange, key: str, own: Submissions, timeout_s: float, stop: Callable[[], bool]
) -> Submissions | None:
    """Merge the submissions of this rank and those below it, and send them up. None if the parent takes none."""
    tree = exchange.tree
    heard = exchange.gather(key, tree.patience_s(timeout_s), lambda _: stop())
    part = Submissions.merge([own, *[Submissions.decode(data) for data in heard.values()]])
    exchange.unheard = tree.members_without(part.runs)
    return part if tree.parent is None or exchange.send_up(key, part.encode(), 0.0, stop) else None


def forward_ruling(exchange: Exchange, key: str, timeout_s: float, stop: Callable[[], bool]) -> Ruling:
    """Wait for rank 0's ruling and forward it to the children. If none comes, they get that instead."""
    parent = exchange.tree.parent
    # A leader takes messages within its own, shorter patience unless it starts late. Rank 0 itself may be late, so all
    # wait for it.
    taken_within_s = timeout_s if parent else None
    answer = exchange.await_answer(key, 2 * timeout_s, stop, taken_within_s=taken_within_s)
    if answer is None:
        reason = f"rank 0 did not decide within {2 * timeout_s:g} s [OC206]"
        if parent and not exchange.parent_has_taken():
            reason = _not_taken_by(parent)
        # Otherwise a late parent would find it, and rank 0 would grant what this rank has abandoned.
        exchange.withdraw()
        answer = msgspec.json.encode(Ruling(Decision.LATE, reason))
    exchange.send_down(key, answer)
    return msgspec.json.decode(answer, type=Ruling)


def _not_taken_by(parent: int | None) -> str:
    return f"rank {parent} does not take what this rank hands in [OC207]"


def decide(
    part: Submissions, world_size: int, timeout_s: float, verdicts: Verdicts, serialises: bool | None = None
) -> Ruling:
    """Rank 0: compare the submissions of all ranks, and search their sequences for a cycle.

    ``serialises``: whether the window has sequential steps, if rank 0 has chosen its arm.
    """
    if part.runs != [(0, world_size - 1)]:
        missing = sorted(set(range(world_size)).difference(in_runs(part.runs)))
        why = f"{name_ranks(missing)} did not report the order of collectives within {timeout_s:g} s [OC205]"
        return Ruling(Decision.LATE, why)
    submitted = part.each()
    different = [message for message, _ in submitted]
    if mismatch := config_mismatch(submitted):
        return Ruling(Decision.CONFIG_MISMATCH, f"the ranks are set up differently: {mismatch} [OC202]")
    if mismatch := step_mismatch(submitted):
        return Ruling(Decision.STEP_MISMATCH, mismatch)
    if any(message.compiled for message in different):
        return Ruling(Decision.SKIPPED, "torch.compile compiled in a recorded step [OC214]")
    config = different[0].config
    if config is not None and (config.control or not (config.serialises if serialises is None else serialises)):
        return Ruling(Decision.GRANTED)  # nothing will be serialised
    incomplete = next((of.first_rank for of in submitted if of.message.incomplete), None)
    if incomplete is not None:
        why = f"rank {incomplete} issued more collectives in one step than the gate has storage for [OC212]"
        return Ruling(Decision.FAILED, why)
    if not any(message.communicates for message in different):
        return Ruling(
            Decision.FAILED,
            "the recorded steps issued no collectives that could be serialised, so that sequential steps would be "
            "overlapped ones: replays of CUDA graphs and libraries of one's own pass the gate unseen [OC213]",
        )
    if in_step(different):
        return Ruling(Decision.GRANTED)
    return _search(part, submitted, verdicts)


def _search(part: Submissions, submitted: Sequence[Submission], verdicts: Verdicts) -> Ruling:
    ranks: dict[tuple[tuple[str, ...], tuple[int, ...]], Submission] = {}
    for alike in submitted:
        ranks.setdefault((alike.message.kinds, alike.message.of_steps), alike)
    if verdicts.searched != ranks.keys():
        digests = {digest for kinds, _ in ranks for digest in kinds}
        sequences = part.decoded(digests)
        if sequences is None:
            why = f"the ranks issue {len(digests)} different sequences of collectives, too many to compare [OC211]"
            return Ruling(Decision.FAILED, why)
        verdicts.conflict, verdicts.only = _conflict_of(list(ranks.values()), sequences)
        verdicts.searched = frozenset(ranks)
    if verdicts.conflict is not None:
        return Ruling(
            Decision.CONFLICT,
            f"the ranks issue the collectives of different groups in different orders, so that serialising them would "
            f"deadlock: {verdicts.conflict} [OC201]",
        )
    return Ruling(Decision.GRANTED, only=verdicts.only)


def _conflict_of(
    submitted: Sequence[Submission], sequences: Mapping[str, CollectiveSequence]
) -> tuple[Conflict | None, int]:
    """Why the sequences cannot be serialised, and the one step whose kind still can; see ``Ruling.only``.

    Ranks do not know each other's kind of step. So all kinds may be serialised only if the union of all their orders
    has no cycle, as if each kind were a rank of its own.
    """
    several = any(len(of.message.kinds) > 1 for of in submitted)
    if several and find_conflict(dict(enumerate(sequences.values()))) is None:
        return None, -1
    steps = range(max(len(of.message.of_steps) for of in submitted))

    def in_one(step: int) -> dict[int, CollectiveSequence]:
        places = {of.first_rank: kind_of_step(of.message.of_steps, step) for of in submitted}
        return {of.first_rank: sequences[of.message.kinds[places[of.first_rank]]] for of in submitted}

    step = next(step for step in steps if any(of.communicates for of in in_one(step).values()))
    return find_conflict(in_one(step)), step if several else -1
