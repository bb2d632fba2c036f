"""Repeats one step, overlapped twice and sequential twice, and compares the gradients bit by bit.

A difference between an overlapped and a sequential repetition is a race only if sequential ones do not differ from each
other: else the job is not deterministic, whatever overlaps. So there are always four repetitions, on every rank: what
one rank sees must not change how many steps it runs. A race may make two overlapped repetitions differ too; where they
do and the sequential ones do not, that is a race as well.

All ranks repeat the step or none does (``ballot.py``). From there on nothing of ours may stop a rank, or the others
would wait for it: errors of ours are kept until all repetitions have run. What the user's own function raises ends the
check where all ranks have it alike, before the same collective. Where one rank alone has it, nobody can issue that
rank's collectives for it: it is raised in the job, as it would be in a step of training.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from overlap_callbacks.analysis.results.race import MAX_DIFFERENCES, GradientDifference, RaceCheck, RaceVerdict
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence, StepLog
from overlap_callbacks.gate.switch import SwitchState
from overlap_callbacks.instruments import device
from overlap_callbacks.instruments.clocks import StepClock
from overlap_callbacks.monitor.race.ballot import FAILED, REPEAT, Ballot
from overlap_callbacks.monitor.race.held_state import HeldState, bits, no_optimizer_steps
from overlap_callbacks.monitor.race.repeatable import RepeatableStep, local

# Overlapped twice, sequential twice.
_SEQUENTIAL = (False, False, True, True)
# Of a device's memory, the part that repetitions must leave free.
_FREE_MEMORY = 0.02


@dataclass
class _Seen:
    """What the repetitions have shown on this rank.

    Attributes:
        between_overlapped, against_sequential, between_sequential: differing elements by parameter.
        log: of the last sequential repetition.
        num_gradients: gradients of a repetition.
        problem: why the repetitions do not count, in words.
    """

    between_overlapped: dict[str, int] = field(default_factory=dict)
    against_sequential: dict[str, int] = field(default_factory=dict)
    between_sequential: dict[str, int] = field(default_factory=dict)
    log: StepLog | None = None
    num_gradients: int = 0
    problem: str = ""

    @property
    def with_overlap(self) -> dict[str, int]:
        """Differing elements by parameter, of repetitions of which one was overlapped."""
        both = {**self.between_overlapped}
        for name, amount in self.against_sequential.items():
            both[name] = max(amount, both.get(name, 0))
        return both


class _StepFailedError(Exception):
    """The user's function raised; ``__cause__`` is what."""


class RaceChecker:
    """The race check of one monitor. Runs on the training thread, between two steps.

    Args:
        step: what is repeated.
        gate: of the monitor, registered.
        switch: of the monitor.
        ballot: with the other ranks.
        rank: of this process.

    Attributes:
        running: whether a repetition is under way: adapters must not take it for a step.
        finished: whether there will be no further check.
    """

    def __init__(self, step: RepeatableStep, gate: Gate, switch: SwitchState, ballot: Ballot, rank: int) -> None:
        self._step = step
        self._gate = gate
        self._switch = switch
        self._ballot = ballot
        self._rank = rank
        self.running = False
        self.finished = False

    def check(self, window: str, number: int, granted: ExpectedSequence) -> tuple[RaceCheck, BaseException | None]:
        """Repeat the step, if all ranks do.

        Args:
            window: names the window in the store; the same on every rank, and never used twice.
            number: of the step that has ended.
            granted: what passed the order check.

        Returns:
            What came of it, and what must be raised in the job: the user's own error that other ranks do not have.
        """
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
        seen = _Seen()
        self.running = True
        try:
            with torch.enable_grad(), no_optimizer_steps():
                self._repeat(held, reference, granted, seen)
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
        if changed and not seen.problem:
            seen.problem = "repeat_step changed parameters of the model, which were put back"
        self.finished = bool(seen.problem)
        return self._outcome(seen, took_ms, held_bytes), None

    def close(self) -> None:
        """Leave nothing in the job's store."""
        self._ballot.close()

    # -- before

    def _prepare(self) -> tuple[str, HeldState | None, Reference | None]:
        """Hold what a repetition may change, and take room for its gradients; or say why not."""
        if torch._C._current_graph_task_id() != -1 or torch.is_inference_mode_enabled():
            return "the step ended within a backward pass or in inference mode", None, None
        try:
            reason = self._step.refusal() or _lacks_memory(self._step)
            if reason:
                return reason, None, None
            return "", HeldState(self._step), Reference(self._step.parameters())
        except Exception as error:  # no memory for the copies, mostly
            return f"what a repeated step may change could not be held: {error}", None, None

    # -- the repetitions

    def _repeat(self, held: HeldState, reference: Reference, granted: ExpectedSequence, seen: _Seen) -> None:
        """Run all repetitions.

        Raises:
            _StepFailedError: the user's function raised.
        """
        compute_stream = StepClock().compute_stream
        for number, sequential in enumerate(_SEQUENTIAL):
            self._ours(seen, held.rewind)
            self._ours(seen, functools.partial(self._begin, sequential, granted, compute_stream))
            try:
                self._step.run()
            except BaseException as error:
                raise _StepFailedError from error
            self._ours(seen, functools.partial(self._look, number, reference, seen))
            self._ours(seen, functools.partial(self._end, sequential, seen))
            self._ours(seen, self._step.put_back)

    def _ours(self, seen: _Seen, action: Callable[[], None]) -> None:
        """Do a piece of our own work between the user's: no error of it may keep this rank from the next repetition."""
        try:
            action()
        except Exception as error:
            seen.problem = seen.problem or f"an internal error: {error!r}"

    def _begin(self, sequential: bool, expected: ExpectedSequence, compute_stream: device.Stream | None) -> None:
        self._switch.turn(on=sequential)
        self._gate.begin_step(
            sequential=sequential and self._switch.form is None, expected=expected, compute_stream=compute_stream
        )

    def _look(self, number: int, reference: Reference, seen: _Seen) -> None:
        gradients = self._step.gradients()
        match number:
            case 0:
                reference.keep(gradients)
                seen.num_gradients = sum([gradient is not None for gradient in gradients.values()])
            case 1:
                seen.between_overlapped = amounts(reference.count_differing(gradients))
            case 2:
                counted = reference.count_differing(gradients)
                reference.keep(gradients)
                seen.against_sequential = amounts(counted)
            case _:
                seen.between_sequential = amounts(reference.count_differing(gradients))

    def _end(self, sequential: bool, seen: _Seen) -> None:
        log = self._gate.end_step()
        self._switch.turn(on=False)
        if self._gate.stuck is not None:
            seen.problem = seen.problem or f"{self._gate.stuck} did not finish in time in a sequential repetition"
        if self._gate.last_error is not None:
            seen.problem = seen.problem or f"an internal error: {self._gate.last_error!r}"
        if not sequential:
            return
        seen.log = log
        if log.divergence is not None:
            seen.problem = seen.problem or f"a repetition was not sequential: {log.divergence}"

    def _stop_modes(self) -> None:
        self._gate.stop()
        try:
            self._switch.turn(on=False)
        except Exception:  # it has raised where it was turned
            self.finished = True

    # -- after

    def _failed(
        self, window: str, failure: BaseException, took_ms: float, held_bytes: int
    ) -> tuple[RaceCheck, BaseException | None]:
        """The user's function raised, or a signal handler of the user's."""
        error = failure.__cause__ if isinstance(failure, _StepFailedError) else failure
        assert error is not None
        outcome = _not_checked(f"repeat_step raised {type(error).__name__}: {error}", took_ms, held_bytes)
        if not isinstance(error, Exception):
            return outcome, error
        log = self._gate.end_step()
        place = _digest(type(error).__name__, [(call.operator, call.group.name) for call in log.collectives])
        return outcome, None if self._ballot.vote(window, FAILED, place).agreed else error

    def _outcome(self, seen: _Seen, took_ms: float, held_bytes: int) -> RaceCheck:
        if seen.problem:
            return _not_checked(seen.problem, took_ms, held_bytes)
        verdict, differing = RaceVerdict.EQUAL, {}
        if seen.between_sequential:
            verdict, differing = RaceVerdict.NOT_REPEATABLE, seen.between_sequential
        elif seen.with_overlap:
            verdict, differing = RaceVerdict.RACE, seen.with_overlap
        return RaceCheck(
            verdict=verdict,
            num_differing=int(bool(differing)),
            num_gradients=seen.num_gradients,
            num_differences=len(differing),
            differences=tuple(
                [self._difference(name, differing[name], seen) for name in [*differing][:MAX_DIFFERENCES]]
            ),
            took_ms=took_ms,
            held_bytes=held_bytes,
        )

    def _difference(self, name: str, num_different: int, seen: _Seen) -> GradientDifference:
        bucket = collective = ""
        try:
            bucket = self._step.bucket_of(name)
            collective = "" if seen.log is None else self._step.collective_of(name, seen.log)
        except Exception:  # a version of the framework that names them otherwise: the parameter is known all the same
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
    """Whether a device may not have the memory, in words: running out of it within a repetition would end the job.

    Beside what a step of training takes, there are two more sets of gradients: those of the step that has ended, and a
    copy to compare with.
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
                f"{used} has not the memory: two sets of gradients take {more / 1e9:.2f} GB, and "
                f"{max(0.0, room) / 1e9:.2f} GB are left beside a step of training"
            )
    return ""


# -- comparing gradients
# Gradients of one repetition against those of another, where they lie: nothing is waited for that training would not.
#
# They are read on the current stream right after the repetition has returned, as an optimizer would read them. A wait
# longer than that would hide a race.


# Of a gradient that was there in one repetition and not in the other, all elements differ.
_Gradients = Mapping[str, "torch.Tensor | None"]


class Reference:
    """A copy of the gradients of one repetition, for each of the parameters.

    Args:
        parameters: by name; room for their gradients is taken at once.

    Attributes:
        held_bytes: of the copy.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        trained = {name: local(parameter) for name, parameter in parameters.items() if parameter.requires_grad}
        self._room: dict[str, torch.Tensor | None] = {n: torch.empty_like(part) for n, part in trained.items()}
        self._copies: dict[str, torch.Tensor | None] = {}
        self.held_bytes = sum([room.nbytes for room in self._room.values() if room is not None])

    def keep(self, gradients: _Gradients) -> None:
        """Copy these gradients."""
        for name, gradient in gradients.items():
            if gradient is None:
                self._copies[name] = None
                continue
            part = local(gradient)
            room = self._room.get(name)
            if room is not None and part.layout is torch.strided and _alike(part, room):
                self._copies[name] = room.copy_(part)
            else:
                self._copies[name] = part.clone()

    def count_differing(self, gradients: _Gradients) -> dict[str, torch.Tensor | int]:
        """How many elements of each gradient differ from the copy's, by name; a tensor where only the device knows."""
        found: dict[str, torch.Tensor | int] = {}
        for name in dict.fromkeys([*self._copies, *gradients]):
            copy, gradient = self._copies.get(name), gradients.get(name)
            if copy is None and gradient is None:
                continue
            if copy is None or gradient is None:
                there = gradient if copy is None else copy
                assert there is not None
                found[name] = local(there).numel()
                continue
            part = local(gradient)
            if not _alike(part, copy):
                found[name] = max(part.numel(), copy.numel())
            else:
                one, other = bits(part), bits(copy)
                # On a host, to compare is faster than to count.
                same = one.device.type == "cpu" and torch.equal(one, other)
                found[name] = 0 if same else torch.ne(one, other).sum()
        return found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def amounts(counted: Mapping[str, torch.Tensor | int]) -> dict[str, int]:
    """Counts that are not zero, by name; waits for the device."""
    known = {name: int(amount) for name, amount in counted.items()}
    return {name: amount for name, amount in known.items() if amount}
