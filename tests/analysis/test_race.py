"""The race checks of several ranks, merged and in words."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from overlap_callbacks.analysis.race import add_checks, race_sentence
from overlap_callbacks.analysis.results.race import GradientDifference, RaceCheck, RaceVerdict
from tests.report.runs import full_report


def _difference(rank: int) -> GradientDifference:
    return GradientDifference(rank, "first.weight", "DDP bucket 3", "collective 3 of the step", 5, 64)


_EQUAL = RaceCheck(RaceVerdict.EQUAL, num_gradients=8, took_ms=10.0, held_bytes=100)
_RACE = RaceCheck(RaceVerdict.RACE, 1, 1, 8, 1, (_difference(1),), took_ms=20.0)
_OTHER = RaceCheck(RaceVerdict.RACE, 1, 1, 8, 2, (_difference(2),), took_ms=5.0)
_NOT = RaceCheck(RaceVerdict.NOT_REPEATABLE, 1, 1, 8, 3, (_difference(3),))


def test_the_checks_of_ranks_merge_the_same_in_any_order() -> None:
    for parts in itertools.permutations([_EQUAL, _RACE, _OTHER, None]):
        found = add_checks(parts)
        assert found == RaceCheck(RaceVerdict.RACE, 3, 2, 8, 2, (_difference(1),), took_ms=20.0, held_bytes=100)
        pairs = add_checks([add_checks(parts[:2]), add_checks(parts[2:])])
        assert pairs == found
    assert add_checks([None, None]) is None


def test_a_race_counts_only_where_every_rank_can_repeat_a_sequential_step() -> None:
    found = add_checks([_RACE, _NOT, _EQUAL])
    assert found is not None
    assert found.verdict is RaceVerdict.NOT_REPEATABLE
    assert [row.rank for row in found.differences] == [3]


def test_a_race_names_parameter_bucket_and_collective() -> None:
    words = race_sentence(_RACE)
    for part in ("'first.weight'", "DDP bucket 3", "collective 3 of the step", "5 of 64 elements on rank 1"):
        assert part in words


@pytest.mark.parametrize("check", [_EQUAL, _RACE, _NOT, RaceCheck(RaceVerdict.NOT_CHECKED, reason="no step")])
def test_a_check_goes_through_a_record(check: RaceCheck) -> None:
    assert msgspec.json.decode(msgspec.json.encode(check), type=RaceCheck) == check
    assert race_sentence(check).startswith("Race check: ")


def test_a_check_that_was_not_made_has_no_metrics() -> None:
    def metrics(race: RaceCheck | None) -> dict[str, float]:
        return {key: value for key, value in full_report(race=race).metrics().items() if key.startswith("race/")}

    assert metrics(None) == metrics(RaceCheck(RaceVerdict.NOT_CHECKED)) == {}
    assert metrics(_RACE)["race/found"] == 1.0
    assert metrics(_EQUAL)["race/found"] == 0.0
