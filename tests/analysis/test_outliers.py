"""Steps that are left out because they took far longer than others of their mode."""

from __future__ import annotations

import numpy as np
import pytest

from overlap_callbacks.analysis.outliers import are_of_one_mode, far_longer, stalls_in_words, stalls_of_a_run

SEQUENTIAL = np.arange(32) % 2 == 1


def left_out(step_ms: np.ndarray, like: list[object] | None = None) -> tuple[list[int], bool]:
    found = far_longer(step_ms.tolist(), like or SEQUENTIAL.tolist(), SEQUENTIAL.tolist())
    return np.flatnonzero(found.far).tolist(), found.kept


def test_a_step_must_be_a_tenth_and_five_deviations_longer_than_its_own_mode() -> None:
    times = np.where(SEQUENTIAL, 130.0, 100.0) + np.tile([-0.5, -0.5, 0.5, 0.5], 8)
    times[4], times[7], times[10], times[13] = 112, 150, 109, 138
    assert left_out(times) == ([4, 7], False)


def test_where_steps_vary_widely_a_tenth_is_not_enough() -> None:
    rng = np.random.default_rng(0)
    assert left_out(100 * rng.lognormal(0, 0.1, 32)) == ([], False)


def test_steps_are_compared_with_their_like_alone_and_few_are_not_judged() -> None:
    times = np.full(32, 100.0)
    times[[0, 1, 8, 9, 16, 17, 24, 25]] = 150  # every eighth step and the one after it: the same in both modes
    like = [(bool(SEQUENTIAL[i]), i % 8 < 2) for i in range(32)]
    assert left_out(times) == ([0, 1, 8, 9, 16, 17, 24, 25], False)
    assert left_out(times, like) == ([], False)
    times[9] = 300
    assert left_out(times, like) == ([9], False)
    assert left_out(times, [i if i == 9 else like[i] for i in range(32)]) == ([], False)


def test_the_rule_favours_neither_mode() -> None:
    rng = np.random.default_rng(1)
    errors = []
    for _ in range(400):
        times = 100 * rng.lognormal(0, 0.02, 32) * np.where(rng.random(32) < 0.05, 1.5, 1.0)
        found = far_longer(times.tolist(), SEQUENTIAL.tolist(), SEQUENTIAL.tolist())
        kept = ~found.far
        errors.append(times[kept & SEQUENTIAL].mean() / times[kept & ~SEQUENTIAL].mean() - 1)
    assert abs(np.mean(errors)) < 3 * np.std(errors) / 20
    assert np.std(errors) < 0.01


def test_stalls_of_one_mode_are_not_left_out() -> None:
    times = np.full(32, 100.0)
    times[np.flatnonzero(SEQUENTIAL)[:7]] = 200
    assert left_out(times)[1] is False
    times = np.where(np.arange(32) % 2 == 1, 100.0, 100.0)
    assert are_of_one_mode(8, 0)
    assert are_of_one_mode(0, 8)
    assert are_of_one_mode(1, 11)
    assert not are_of_one_mode(7, 0)
    assert not are_of_one_mode(0, 0)
    assert not are_of_one_mode(6, 12)


@pytest.mark.parametrize(
    ("overlapped", "sequential", "kept", "said"),
    [
        (
            [118], [], False,
            "1 step took far longer than others of its mode and is left out (overlapped 1, sequential 0; step 118): "
            "wrap a save or an evaluation inside the loop in `with monitor.pause():` [OC343]",
        ),
        (
            [126], [118, 131, 140], False,
            "4 steps took far longer than others of their mode and are left out (overlapped 1, sequential 3; steps "
            "118, 126, 131, ...): wrap a save or an evaluation inside the loop in `with monitor.pause():` [OC343]",
        ),
        (
            [], list(range(8)), True,
            "8 steps took far longer than others of their mode, nearly all in one mode (overlapped 0, sequential 8): "
            "all of them count [OC344]",
        ),
    ],
)  # fmt: skip
def test_the_sentence_names_steps_and_numbers_by_mode(
    overlapped: list[int], sequential: list[int], kept: bool, said: str
) -> None:
    assert stalls_in_words(overlapped, sequential, kept=kept) == said


def test_over_a_run_stalls_of_one_mode_are_distinguished_from_those_that_hit_both() -> None:
    assert stalls_of_a_run([]) == ""
    assert stalls_of_a_run([(0, 1)] * 7) == ""
    assert stalls_of_a_run([(1, 2), (2, 1), (0, 0)] * 20) == ""
    assert stalls_of_a_run([(0, 1)] * 8 + [(0, 0)] * 4) == (
        "Stalls belong to sequential steps: of those that took far longer than others of their mode, 0 were "
        "overlapped and 8 sequential in 12 windows, and the difference of the modes is without them."
    )
    assert stalls_of_a_run([(2, 1)] * 100_000).startswith("Stalls belong to overlapped steps")


def test_over_many_runs_stalls_that_hit_both_modes_are_rarely_reported() -> None:
    rng = np.random.default_rng(2)
    told = [stalls_of_a_run([tuple(rng.binomial(16, 0.02, 2).tolist()) for _ in range(24)]) for _ in range(400)]
    assert sum(map(bool, told)) <= 8  # 1 % of 400, and chance
    of_one = [stalls_of_a_run([(0, int(rng.binomial(16, 0.05))) for _ in range(24)]) for _ in range(100)]
    assert sum(map(bool, of_one)) >= 95
