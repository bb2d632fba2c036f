"""What any set of ranks measured in one window, in a form that can be added: plain data.

Its size does not grow with the ranks. ``overlap_callbacks.analysis.job.merging`` makes it and adds it up, and
``overlap_callbacks.analysis.job.report`` makes the report of it.
"""

from __future__ import annotations

import msgspec

from overlap_callbacks.analysis.communication.sums import MessageSums
from overlap_callbacks.analysis.environment.lint import Traits
from overlap_callbacks.analysis.environment.sums import EnvironmentSums
from overlap_callbacks.analysis.experts import ExpertSums
from overlap_callbacks.analysis.figures import FigureSums
from overlap_callbacks.analysis.job.arrivals import ArrivalSums
from overlap_callbacks.analysis.job.sentences import Sentences
from overlap_callbacks.analysis.job.spread import Moments
from overlap_callbacks.analysis.job.stages import StageSum
from overlap_callbacks.analysis.job.tables import ProfileTables
from overlap_callbacks.analysis.job.transfers import Transfers
from overlap_callbacks.analysis.measuring_cost import LostTime
from overlap_callbacks.analysis.memory import MemorySums
from overlap_callbacks.analysis.power.sums import PowerSums
from overlap_callbacks.analysis.rank_set import RankSet
from overlap_callbacks.analysis.results.race import RaceCheck
from overlap_callbacks.analysis.validity import Measured


class JobPart(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """What a set of ranks measured in one window.

    Attributes:
        ranks: the ranks.
        measured: what all ranks must have alike, that of the lowest rank first.
        num_steps: steps of the window, the most of any rank.
        any_complete, all_complete: whether any rank, and each rank, ran the whole window.
        wall_ms: host time of the window, the longest.
        extra_ms: by number of steps, the longest host time of the window and CPU time after it together, of the ranks
            that ran so many and do not know what they lost; those alone that may be the longest beyond what their steps
            would take.
        report_cpu_ms: CPU time after the window, the longest of the same ranks.
        lost: time that training lost to the window, of the rank that knows it and lost most; None if none does.
        checked: whether any rank has a profile of sequential steps.
        figures: sums over their blocks, and their tables.
        spread: the figures that ranks are compared by.
        doubts, let_pass, problems: as in ``RankWindow``.
        transfers: times of collectives.
        power: of their devices.
        memory: their peaks.
        environment: what they run on; None where no rank tells.
        traits: what the rules of the environment ask of their windows.
        samples: what single ranks measured, compressed, by rank: the lowest, and those with the extremes of the spread;
            of few ranks, all.
        messages: what they send.
        experts: how evenly they spread tokens.
        arrivals: who of them came last to collectives.
        stages: what bubbles the stages of a pipeline had.
        race: what their repeated steps showed; None without any.
        lower_bound: whether any rank may have more communication than its profile shows.
    """

    ranks: RankSet
    measured: tuple[Measured, ...]
    num_steps: int
    any_complete: bool
    all_complete: bool
    wall_ms: float
    extra_ms: tuple[tuple[int, float], ...]
    report_cpu_ms: float
    lost: LostTime | None
    checked: bool
    figures: FigureSums[ProfileTables]
    spread: dict[str, Moments]
    doubts: Sentences
    let_pass: Sentences
    problems: Sentences
    transfers: tuple[Transfers, ...]
    power: PowerSums
    memory: MemorySums
    environment: EnvironmentSums | None
    traits: Traits
    samples: dict[int, bytes]
    messages: MessageSums
    arrivals: ArrivalSums
    stages: tuple[StageSum, ...]
    experts: ExpertSums = ExpertSums()
    race: RaceCheck | None = None
    lower_bound: bool = False


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(JobPart)


def encode(part: JobPart) -> bytes:
    """A part as it is sent between ranks."""
    return _ENCODER.encode(part)


def decode(message: bytes) -> JobPart:
    """The part that a rank sent.

    Raises:
        msgspec.DecodeError: the message is no part.
    """
    return _DECODER.decode(message)
