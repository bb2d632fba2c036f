"""The race check of a window: merging the ranks' results, and text."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_callbacks.analysis.formatting import count
from overlap_callbacks.analysis.results.race import MAX_DIFFERENCES, GradientDifference, RaceCheck, RaceVerdict


def add_checks(parts: Sequence[RaceCheck | None]) -> RaceCheck | None:
    """The combined result of disjoint sets of ranks, in any order.

    A race is certain only if every rank's sequential steps gave the same gradients twice, because ranks add up each
    other's gradients. So a single rank whose did not makes the job not repeatable.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    order = list(RaceVerdict)
    verdict = min([part.verdict for part in known], key=order.index)
    of_kind = [part for part in known if part.verdict is verdict]
    seen = [part.differences for part in of_kind if part.differences]
    return RaceCheck(
        verdict=verdict,
        num_ranks=sum([part.num_ranks for part in known]),
        num_differing=sum([part.num_differing for part in of_kind]),
        num_gradients=max([part.num_gradients for part in known]),
        num_differences=max([part.num_differences for part in of_kind]),
        differences=min(seen, key=lambda rows: rows[0].rank)[:MAX_DIFFERENCES] if seen else (),
        reason=min([part.reason for part in of_kind]),
        took_ms=max([part.took_ms for part in known]),
        held_bytes=max([part.held_bytes for part in known]),
    )


def race_sentence(check: RaceCheck) -> str:
    match check.verdict:
        case RaceVerdict.EQUAL:
            ranks = "rank" if check.num_ranks == 1 else "ranks"
            return (
                f"Race check: the gradients of a repeated step are the same overlapped and sequential, bit by bit "
                f"({count(check.num_gradients, 'gradient')} on each of {check.num_ranks:,} {ranks}; it took "
                f"{check.took_ms:,.0f} ms)."
            )
        case RaceVerdict.RACE:
            rest = check.num_differences - len(check.differences)
            more = f"; and {rest:,} more" if rest > 0 else ""
            return (
                f"Race check: overlapped, the gradients of a step are not what they are sequential: "
                f"{'; '.join([difference_in_words(row) for row in check.differences])}{more}. A wait is missing where "
                f"they are reduced, in a communication hook or in the framework, or a kernel's result depends on its "
                f"timing. [OC251]"
            )
        case RaceVerdict.NOT_REPEATABLE:
            first = f", e.g. that of {check.differences[0].parameter!r}" if check.differences else ""
            return (
                f"Race check: no verdict. {count(check.num_differences, 'gradient')} of the same sequential step "
                f"differed from one repetition to the next{first}: the job is not deterministic. "
                f"torch.use_deterministic_algorithms(True) may make it so. [OC252]"
            )
        case RaceVerdict.NOT_CHECKED:
            return f"Race check: no step was checked: {check.reason} [OC253]"


def difference_in_words(row: GradientDifference) -> str:
    places = ", ".join([place for place in (row.bucket, row.collective) if place])
    where = f" ({places})" if places else ""
    return (
        f"{row.parameter!r}{where} in {row.num_different:,} of {count(row.num_elements, 'element')} on rank {row.rank}"
    )
