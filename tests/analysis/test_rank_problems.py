"""What ranks say is wrong becomes sentences of the job, however many ranks there are."""

from __future__ import annotations

from overlap_callbacks.analysis.rank_problems import MAX_PROBLEMS
from tests.analysis.test_aggregate import rank_window, report_of


def problems_of(*of_ranks: tuple[str, ...]) -> tuple[str, ...]:
    return report_of(*(rank_window(rank, problems=problems) for rank, problems in enumerate(of_ranks))).problems


def beside(time_ms: float, stream: int = 7) -> str:
    return f"in sequential steps {time_ms:.3g} ms of compute ran during communication on stream {stream}"


def test_sentences_that_differ_in_their_numbers_alone_are_one_that_of_the_largest() -> None:
    (problem,) = problems_of(*((beside(1.0 + 0.01 * rank),) for rank in range(256)))
    assert problem == f"rank 255: {beside(3.55)} (and like ones on 255 more ranks)"


def test_of_equal_ones_the_ranks_are_named() -> None:
    assert problems_of((beside(2.0),), (beside(1.0),), (beside(2.0),)) == (
        f"ranks 0, 2: {beside(2.0)} (and like ones on 1 more rank)",
    )
    assert problems_of((beside(2.0),), (beside(2.0),)) == (beside(2.0),)
    assert problems_of((beside(2.0),), ()) == (f"rank 0: {beside(2.0)}",)


def test_like_sentences_of_one_rank_are_kept_apart() -> None:
    two = (beside(1.0, stream=7), beside(2.0, stream=9))
    assert problems_of(two) == two
    assert set(problems_of(two, two[::-1])) == set(two)


def test_the_number_of_problems_is_bounded_and_why_a_window_is_not_valid_comes_first() -> None:
    many = tuple("kernel " + "a" * number for number in range(100))
    found = report_of(rank_window(problems=many, doubts=("the profile is doubtful",)))
    assert not found.valid
    assert found.problems[0] == "the profile is doubtful"
    assert len(found.problems) == MAX_PROBLEMS + 1
    assert found.problems[-1] == "and 71 more problems: the record has those of each rank"
