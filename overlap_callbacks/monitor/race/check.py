"""The race check: repeats one step, overlapped twice and sequential twice, and compares the gradients bit by bit.

Overlapped repetitions that differ from sequential ones, or from each other, prove a race only if the sequential ones
are equal; otherwise the job is not deterministic. So every rank always runs four repetitions: what one rank sees must
not change how many steps it runs.

It runs after each complete window whose order check allowed sequential steps. All ranks repeat the step or none does
(``ballot.py``). From then on the library must not stop a rank, or the others would wait for it: internal errors are
kept until all repetitions have run. An error of the user's function ends the check if all ranks raise it before the
same collective. If only one rank does, it is raised in the job, as in a training step.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec

import torch

from overlap_callbacks.analysis.results.race import MAX_DIFFERENCES, GradientDifference, RaceCheck, RaceVerdict
from overlap_callbacks.gate.dispatcher import dispatcher
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.interruptions import is_own
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from overlap_callbacks.gate.switches import SwitchState
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.monitor.faults import Notices
from overlap_callbacks.monitor.race.ballot import FAILED, REPEAT, Ballot, UndecidedError
from overlap_callbacks.monitor.race.repeatable import HeldState, RepeatableStep, bits, local, no_optimizer_steps

# Overlapped twice, sequential twice.
_SEQUENTIAL = (False, False, True, True)
# Fraction of device memory that repetitions must leave free.
_FREE_MEMORY = 0.02
_NOTHING_TO_REPEAT = (
    "check_gradients=True has no step to repeat: give attach(..., repeat_step=...) of the PyTorch or the DeepSpeed "
    "adapter a function that runs forward and backward; no other adapter offers the race check [OC254]"
)


P = ParamSpec("P")


class RaceChecks:
    def __init__(self, enabled: bool, gate: Gate, switch: SwitchState, notices: Notices) -> None:
        self.step: RepeatableStep | None = None  # offered by an adapter
        self._enabled = enabled
        self._gate = gate
        self._switch = switch
        self._notices = notices
        self._last: _Repetitions | None = None

    @property
    def running(self) -> bool:
        """Whether a step is being repeated right now: adapters must not count it as a training step."""
        return self._last is not None and self._last.running

    def granted(self, window: str, ballot: Ballot) -> None:
        """Announce that a window may have sequential steps, so that a check may follow it."""
        if self._enabled and self.step is not None:
            ballot.expect(window)

    def after_window(
        self, window: str, step: int, granted: ExpectedSequence | None, ballot: Ballot, rank: int
    ) -> RaceCheck | None:
        """Run a check after a window, if requested and possible. Called on the training thread, between two steps.

        ``window`` names it in the store: the same on every rank, and never reused. ``step`` is its last step, and
        ``granted`` what its order check allowed, if anything.
        """
        if not self._enabled or granted is None:
            return None
        if self.step is None:
            self._notices.warn_once("race", _NOTHING_TO_REPEAT)
            self._enabled = False
            return None
        self._last = repetitions = _Repetitions(self.step, self._gate, self._switch, ballot, rank)
        error: BaseException | None
        try:
            outcome, error = repetitions.check(window, step, granted)
        except UndecidedError as undecided:
            outcome, error = None, undecided
        finally:
            self._last = None  # its log has thousands of collectives
        if error is not None:
            # ``step_end`` raises it: it must reach the job, even where internal errors do not.
            dispatcher.interrupts.append(RuntimeError(f"repeat_step: {error!r}") if is_own(error) else error)
        if repetitions.finished or error is not None:
            self._enabled = False
        return outcome


class _StepFailedError(Exception):
    """The user's function raised; ``__cause__`` is its exception."""


class _Repetitions:
    """One race check: the repetitions of a step, and their results on this rank."""

    def __init__(self, step: RepeatableStep, gate: Gate, switch: SwitchState, ballot: Ballot, rank: int) -> None:
        self._step = step
        self._gate = gate
        self._switch = switch
        self._ballot = ballot
        self._rank = rank
        self.running = False  # a repetition is running
        self.finished = False  # no further check will follow
        # By repetition and parameter: elements that differ from the first overlapped repetition, and from the third one
        # on from the first sequential one.
        self._differing: list[dict[str, int]] = [{} for _ in _SEQUENTIAL]
        self._log: StepLog | None = None  # of the last sequential repetition
        self._num_gradients = 0  # in one repetition
        self._problem = ""  # why the repetitions do not count

    def check(self, window: str, number: int, granted: ExpectedSequence) -> tuple[RaceCheck, BaseException | None]:
        """Repeat the step if all ranks agree. Also returns an error of this rank alone, to be raised in the job."""
        started_s = time.monotonic()
        reason, held, reference = self._prepare()
        if held is None or reference is None:
            self.finished = True
            decision = self._ballot.decline(window, REPEAT, reason)
            return _not_checked(decision.reason or reason), None
        decision = self._ballot.vote(window, REPEAT, _digest(number, len(_SEQUENTIAL)))
        if not decision.agreed:
            self.finished = True
            return _not_checked(decision.reason), None
        failure: BaseException | None = None
        self.running = True
        try:
            with torch.enable_grad(), no_optimizer_steps():
                self._repeat(held, reference, granted)
        except BaseException as error:
            failure = error
        finally:
            self.running = False
            self._stop_modes()
            changed = held.restore()
        held_bytes = held.held_bytes + reference.held_bytes
        took_ms = (time.monotonic() - started_s) * 1e3
        if failure is not None:
            self.finished = True
            return self._failed(window, failure, took_ms, held_bytes)
        if changed:
            self._note("repeat_step changed parameters of the model, which were put back")
        self.finished = bool(self._problem)
        return self._outcome(took_ms, held_bytes), None

    def _prepare(self) -> tuple[str, HeldState | None, Reference | None]:
        """Save what a repetition may change, and allocate room for its gradients. If that fails, returns why."""
        if torch._C._current_graph_task_id() != -1 or torch.is_inference_mode_enabled():
            return "the step ended within a backward pass or in inference mode", None, None
        try:
            reason = self._step.refusal() or _lacks_memory(self._step)
            if reason:
                return reason, None, None
            held, reference = HeldState(self._step), Reference(self._step.parameters())
            # Those of a repetition: torch keeps the memory, so that no other process takes it before.
            Reference(self._step.parameters())
            return "", held, reference
        except Exception as error:  # usually no memory for the copies
            return f"what a repeated step may change could not be held: {error}", None, None

    # -- the repetitions

    def _repeat(self, held: HeldState, reference: Reference, granted: ExpectedSequence) -> None:
        """Run all repetitions. Raises _StepFailedError from an error of the user's function."""
        compute_stream = StepClock().compute_stream
        for number, sequential in enumerate(_SEQUENTIAL):
            self._guarded(held.rewind)
            self._guarded(self._begin, sequential, granted, compute_stream)
            try:
                self._step.run()
            except BaseException as error:
                raise _StepFailedError from error
            self._guarded(self._compare, number, reference)
            self._guarded(self._end, sequential)
            self._guarded(self._step.put_back)

    def _guarded(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do the library's own work between the user's: no error in it may keep this rank from the next repetition."""
        try:
            action(*args, **kwargs)
        except Exception as error:
            self._note(f"an internal error: {error!r}")

    def _note(self, problem: str) -> None:
        self._problem = self._problem or problem

    def _begin(self, sequential: bool, expected: ExpectedSequence, compute_stream: device.Stream | None) -> None:
        self._switch.turn(on=sequential)
        self._gate.begin_step(
            sequential=sequential and self._switch.form is None, expected=expected, compute_stream=compute_stream
        )

    def _compare(self, number: int, reference: Reference) -> None:
        gradients = self._step.gradients()
        counted = reference.count_differing(gradients) if number else {}
        if number in (0, 2):
            reference.keep(gradients)
        if not number:
            self._num_gradients = sum([gradient is not None for gradient in gradients.values()])
        self._differing[number] = amounts(counted)

    def _end(self, sequential: bool) -> None:
        log = self._gate.end_step()
        self._switch.turn(on=False)
        if self._gate.stuck is not None:
            self._note(f"{self._gate.stuck} did not finish in time in a sequential repetition")
        if self._gate.last_error is not None:
            self._note(f"an internal error: {self._gate.last_error!r}")
        if not sequential:
            return
        self._log = log
        if log.divergence is not None:
            self._note(f"a repetition was not sequential: {log.divergence}")

    def _stop_modes(self) -> None:
        self._gate.stop()
        try:
            self._switch.turn(on=False)
        except Exception:  # already raised when it was turned
            self.finished = True

    # -- after

    def _failed(
        self, window: str, failure: BaseException, took_ms: float, held_bytes: int
    ) -> tuple[RaceCheck, BaseException | None]:
        """Handle an exception from the user's function or from a signal handler."""
        error = failure.__cause__ if isinstance(failure, _StepFailedError) else failure
        assert error is not None
        outcome = _not_checked(f"repeat_step raised {type(error).__name__}: {error}", took_ms, held_bytes)
        if not isinstance(error, Exception):
            return outcome, error
        log = self._gate.end_step()
        place = _digest(type(error).__name__, [(call.operator, call.group.name) for call in log.collectives])
        return outcome, None if self._ballot.vote(window, FAILED, place).agreed else error

    def _outcome(self, took_ms: float, held_bytes: int) -> RaceCheck:
        if self._problem:
            return _not_checked(self._problem, took_ms, held_bytes)
        _, overlapped, against_sequential, between_sequential = self._differing
        with_overlap = {**overlapped}  # by parameter, in comparisons that involve an overlapped repetition
        for name, amount in against_sequential.items():
            with_overlap[name] = max(amount, with_overlap.get(name, 0))
        verdict, differing = RaceVerdict.EQUAL, {}
        if between_sequential:
            verdict, differing = RaceVerdict.NOT_REPEATABLE, between_sequential
        elif with_overlap:
            verdict, differing = RaceVerdict.RACE, with_overlap
        return RaceCheck(
            verdict=verdict,
            num_differing=int(bool(differing)),
            num_gradients=self._num_gradients,
            num_differences=len(differing),
            differences=tuple([self._difference(name, differing[name]) for name in [*differing][:MAX_DIFFERENCES]]),
            took_ms=took_ms,
            held_bytes=held_bytes,
        )

    def _difference(self, name: str, num_different: int) -> GradientDifference:
        bucket = collective = ""
        try:
            bucket = self._step.bucket_of(name)
            collective = "" if self._log is None else self._step.collective_of(name, self._log)
        except Exception:  # a framework version with other names: the parameter alone is known
            pass
        return GradientDifference(
            rank=self._rank,
            parameter=name,
            bucket=bucket,
            collective=collective,
            num_different=num_different,
            num_elements=local(self._step.parameters()[name]).numel(),
        )


def _not_checked(reason: str, took_ms: float = 0.0, held_bytes: int = 0) -> RaceCheck:
    return RaceCheck(verdict=RaceVerdict.NOT_CHECKED, reason=reason, took_ms=took_ms, held_bytes=held_bytes)


def _digest(*terms: object) -> str:
    return hashlib.sha256(repr(terms).encode()).hexdigest()[:16]


def _lacks_memory(step: RepeatableStep) -> str:
    """Why a device may run out of memory, which within a repetition would end the job; empty if it has enough.

    There are two more sets of gradients than in a training step: those of the step that has ended, and a copy.
    """
    needed: dict[torch.device, int] = {}
    for parameter in step.parameters().values():
        if parameter.device.type not in ("cpu", "meta"):
            part = local(parameter)
            more = part.nbytes if parameter.requires_grad else 0
            more += 0 if parameter.grad is None else local(parameter.grad).nbytes
            needed[parameter.device] = needed.get(parameter.device, 0) + more
    for used, more in needed.items():
        room = device.free_bytes(used, 1 - _FREE_MEMORY)
        if room is None:
            return f"how much memory {used} has left is not known"
        if more > room:
            return (
                f"{used} has not the memory: two sets of gradients take {more / 2**30:.2f} GiB, and "
                f"{max(0.0, room) / 2**30:.2f} GiB are left during a step of training"
            )
    return ""


# -- comparing gradients. They are read on the current stream right after the repetition has returned, as an optimizer
# would read them. A longer wait would hide a race.


# A gradient that exists in only one of two repetitions counts as different in all elements.
_Gradients = Mapping[str, "torch.Tensor | None"]


class Reference:
    """A copy of one repetition's gradients, by parameter. Allocates its memory up front."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        trained = {name: local(parameter) for name, parameter in parameters.items() if parameter.requires_grad}
        self._room: dict[str, torch.Tensor | None] = {n: torch.empty_like(part) for n, part in trained.items()}
        self._copies: dict[str, torch.Tensor | None] = {}
        self.held_bytes = sum([room.nbytes for room in self._room.values() if room is not None])

    def keep(self, gradients: _Gradients) -> None:
        for name, gradient in gradients.items():
            if gradient is None:
                self._copies[name] = None
                continue
            part = local(gradient)
            room = self._room.get(name)
            if room is not None and part.layout is torch.strided and _same_shape_and_type(part, room):
                self._copies[name] = room.copy_(part)
            else:
                self._copies[name] = part.clone()

    def count_differing(self, gradients: _Gradients) -> dict[str, torch.Tensor | int]:
        """Elements of each gradient that differ from the copy's, by name; a tensor where only the device knows."""
        found: dict[str, torch.Tensor | int] = {}
        for name in dict.fromkeys([*self._copies, *gradients]):
            parts = [local(of) for of in (gradients.get(name), self._copies.get(name)) if of is not None]
            if not parts:
                continue
            if len(parts) == 1 or not _same_shape_and_type(*parts):
                found[name] = max([part.numel() for part in parts])
            else:
                one, other = map(bits, parts)
                # On the host, comparing is faster than counting.
                same = one.device.type == "cpu" and torch.equal(one, other)
                found[name] = 0 if same else torch.ne(one, other).sum()
        return found


def _same_shape_and_type(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def amounts(counted: Mapping[str, torch.Tensor | int]) -> dict[str, int]:
    """The counts that are not zero, by name; waits for the device."""
    known = {name: int(amount) for name, amount in counted.items()}
    return {name: amount for name, amount in known.items() if amount}
