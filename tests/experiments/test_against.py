"""``overlap check --against``: what is a regression, what is none, and where the data are not enough."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.run import RunInfo, Workload
from overlap_callbacks.experiments.against import Answer, Side, judged
from tests.commands import invoke
from tests.report.runs import KERNELS, run_info, window, write

SHAPE = window(0)


def run(
    folder: Path, seed: int, *, longer: float = 1.0, windows: int = 12, noise: float = 0.005, slow_kernel: float = 1.0,
    info: RunInfo | None = None,
) -> str:  # fmt: skip
    """A run with steps of 400 ms, times ``longer``; its first kernel takes ``slow_kernel`` times as long as usual."""
    chance = np.random.default_rng(seed)
    found = []
    for number in range(windows):
        factors = np.exp(chance.normal(0, noise, 1 + len(KERNELS))).tolist()
        kernels = [
            msgspec.structs.replace(kernel, overlapped_ms=kernel.overlapped_ms * factor)
            for kernel, factor in zip(KERNELS, factors[1:], strict=True)
        ]
        kernels[0] = msgspec.structs.replace(kernels[0], overlapped_ms=kernels[0].overlapped_ms * slow_kernel)
        step_ms = Estimate(400.0 * longer * factors[0], None, None, 16, 8)
        found.append(
            msgspec.structs.replace(
                SHAPE, window=number, first_step=500 * number, e2e_overlapped_ms=step_ms, kernels=tuple(kernels)
            )
        )
    return str(write(folder, *found, run=run_info(tells_end=False) if info is None else info))


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("baselines")
    return [run(folder / f"b{seed}", seed) for seed in range(5)]


def said(*words: str) -> tuple[int, list[str]]:
    result = invoke("check", *words)
    return result.exit_code, (result.stdout or result.stderr).splitlines()


def as_json(*words: str) -> Any:
    return json.loads(invoke("check", *words, "--json").stdout)["against"]


@pytest.mark.parametrize("number", [1, 5])
def test_a_slower_run_is_a_regression_and_the_slower_kernel_is_named(
    tmp_path: Path, baselines: list[str], number: int
) -> None:
    code, lines = said(run(tmp_path, 11, longer=1.05, slow_kernel=1.1), "--against", *baselines[:number])
    assert (code, lines[0][:46]) == (1, "Regression: a step takes 419.9 ms, 4.8% longer")
    at = lines.index("  What became slower, in a step (intervals hold together):")
    (row,) = lines[at + 1 :]
    assert row.startswith("    +17.")
    assert f": {KERNELS[0].name}, 171." in row


@pytest.mark.parametrize("number", [1, 5])
def test_a_run_like_its_baselines_is_no_regression_and_one_beside_is_within_the_limit(
    tmp_path: Path, baselines: list[str], number: int
) -> None:
    code, lines = said(run(tmp_path / "same", 12), "--against", *baselines[:number])
    assert (code, lines[0][:45]) == (0, "No regression larger than 3%: a step takes 39")
    assert len(lines) == 3
    longer = run(tmp_path / "longer", 12, longer=1.02)
    assert said(longer, "--against", *baselines, "--within", "3.5%")[0] == 0
    assert said(longer, "--against", *baselines, "--within", "0.01")[0] == 1


def test_noise_is_not_enough_data_and_says_what_would_do(tmp_path: Path, baselines: list[str]) -> None:
    code, lines = said(run(tmp_path / "noisy", 13, noise=0.03), "--against", baselines[0])
    assert (code, lines[0][:60]) == (3, "Not enough data to tell whether a step is 3% slower: a step ")
    proposed = next(line for line in lines if "windows of each run would do" in line)
    assert 12 < int(proposed.split()[1]) <= 200
    # With three times as many, 3 % is resolved.
    one, another = (run(tmp_path / str(s), s, noise=0.03, windows=3 * int(proposed.split()[1])) for s in (14, 15))
    change = as_json(one, "--against", another)["change"]
    assert (change["ci_high"] - change["ci_low"]) / 2 < 0.03
    code, lines = said(run(tmp_path / "again", 13, noise=0.1), "--against", *baselines)
    assert (code, lines[2].strip()[:32]) == (3, "More baselines would not help: t")


@pytest.mark.parametrize(
    ("longer", "noise", "answer"),
    [
        (1.05, 0.1, Answer.UNKNOWN),  # more than the limit, but it may be nothing
        (1.025, 0.006, Answer.UNKNOWN),  # clearly slower, but perhaps by less than the limit
        (1.025, 0.002, Answer.NOT_SLOWER),
        (1.04, 0.002, Answer.SLOWER),
        (0.9, 0.006, Answer.NOT_SLOWER),
    ],
)
def test_the_interval_and_the_limit_decide(longer: float, noise: float, answer: Answer) -> None:
    def side(longer: float) -> Side:
        """Windows that scatter by ``noise``, each unlike the one before."""
        steps = [400 * longer * math.exp(noise * sign) for sign in (1, -1) * 6]
        return Side([Estimate(step_ms, None, None, 16, 8) for step_ms in steps], {})

    found = judged(side(longer), [side(1.0)])
    assert found.answer is answer
    assert found.change is not None
    assert found.change.value == pytest.approx(longer - 1)


def test_two_baselines_are_few_and_more_of_them_would_do(tmp_path: Path) -> None:
    of_hosts = [run(tmp_path / f"b{seed}", seed, longer=1 + 0.005 * (seed % 3)) for seed in range(2)]
    code, lines = said(run(tmp_path / "run", 7), "--against", *of_hosts)
    assert code == 3
    assert "The unit is the run: 2 baselines" in lines[1]
    assert int(lines[2].split()[1]) in range(3, 12)
    assert lines[2].endswith(" baselines would do, if the next ones are like these.")


@pytest.mark.parametrize(("windows", "number"), [(3, 1), (1, 1), (1, 5)])
def test_fewer_than_four_windows_are_not_enough(
    tmp_path: Path, baselines: list[str], windows: int, number: int
) -> None:
    code, lines = said(run(tmp_path, 11, longer=1.5, windows=windows), "--against", *baselines[:number])
    assert (code, lines[2].strip()[:35]) == (3, "About 4 windows of each run would d")


def test_what_differs_is_named_and_other_models_ranks_and_work_are_refused(
    tmp_path: Path, baselines: list[str]
) -> None:
    def other(name: str, **changes: Any) -> str:
        return run(tmp_path / name, 12, info=run_info(tells_end=False, **changes))

    newer = other("newer", torch_version="2.14.0", hostname="node-2", workload=Workload(precision="bf16"))
    code, lines = said(newer, "--against", *baselines)
    assert code == 0
    assert lines[2].strip() == (
        "What differs: PyTorch (2.14.0; before 2.13.0+cu130), Precision (bf16; before unknown) and Host of rank 0 "
        "(node-2; before node-1)."
    )
    for refused, why in (
        (other("ranks", world_size=4), "ranks: 2, not 4"),
        (other("device", device="NVIDIA A100"), "device: NVIDIA H200, not NVIDIA A100"),
    ):
        code, lines = said(refused, "--against", baselines[0])
        assert (code, lines[-1].endswith(f"{why}. --force compares them all the same")) == (2, True), lines
        assert said(refused, "--against", baselines[0], "--force")[0] == 0
    told = run(tmp_path / "told", 3, info=run_info(tells_end=False, workload=Workload(tokens_per_step=4096)))
    more = other("more", workload=Workload(tokens_per_step=8192))
    assert "tokens of a step: 4096, not 8192" in said(more, "--against", told)[1][-1]
    one, another = (other(name, configuration={"shapes": name}) for name in ("aa", "bb"))
    assert "shapes or types of the models' parameters differ" in said(one, "--against", another)[1][-1]


def test_of_a_folder_of_runs_those_that_fit_are_the_baselines(tmp_path: Path) -> None:
    for seed in range(4):
        run(tmp_path / f"{seed}", seed)
    run(tmp_path / "other-ranks", 4, info=run_info(tells_end=False, world_size=8))
    newest = run(tmp_path / "newest", 5)
    result = invoke("check", newest, "--against", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "of the mean of 4 baselines" in result.stdout
    assert result.stderr.strip() == "Baselines left out: other-ranks (ranks: 8, not 2)"
    assert invoke("check", newest, "--against", newest).exit_code == 2
    alone = run(tmp_path / "alone" / "run", 5)
    assert invoke("check", alone, "--against", str(tmp_path / "alone")).exit_code == 3


def test_limits_and_baselines_are_judged_together(tmp_path: Path, baselines: list[str]) -> None:
    same = run(tmp_path, 12)
    code, lines = said(same, "--against", *baselines, "--max-exposed", "0.01")
    assert (code, lines[0][:13], any(line.startswith("A limit is broken") for line in lines)) == (1, "No regression", 1)
    assert said(same, "--against", *baselines, "--max-exposed", "0.5")[0] == 0


def test_json_has_the_answer_and_all_parts(tmp_path: Path, baselines: list[str]) -> None:
    slow = run(tmp_path, 11, longer=1.05, slow_kernel=1.1)
    found = json.loads(invoke("check", slow, "--json", "--against", *baselines).stdout)
    assert (found["exit_code"], found["limits"], found["against"]["answer"]) == (1, [], "regression")
    assert [part["name"] for part in found["against"]["parts"] if part["is_slower"]] == [KERNELS[0].name]
    assert [Path(one["path"]).parent.name for one in found["against"]["baselines"]] == ["b0", "b1", "b2", "b3", "b4"]
    assert {part["kind"] for part in found["against"]["parts"]} == {"figure", "kernel", "collective"}
    assert json.loads(invoke("check", slow, "--json", "--max-exposed", "0.5").stdout)["against"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["RUN", "--within", "3%"], "--within: only with --against"),
        (["RUN", "--against", "BASE", "--within", "3"], "a percentage above 0, e.g. 3%, got 3; did you mean 3%?"),
        (["RUN", "--against", "BASE", "--within", "0%"], "--within must be a percentage above 0, e.g. 3%, got 0%"),
        (["RUN", "--against", "BASE", "--within", "many"], "--within must be a percentage above 0, e.g. 3%, got many"),
        (["--against", "BASE", "RUN"], "give a run before --against, or -- and a command that is run first"),
        (["RUN"], "or runs to compare with: --against BASELINE"),
        (["RUN", "--against", "nowhere"], "Path 'nowhere' does not exist"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(tmp_path: Path, baselines: list[str], words: list[str], says: str) -> None:
    result = invoke("check", *[{"RUN": baselines[1], "BASE": baselines[0]}.get(word, word) for word in words])
    assert (result.exit_code, says in " ".join(result.stderr.split())) == (2, True), result.output


def test_show_tells_two_runs_apart_as_check_does(tmp_path: Path, baselines: list[str]) -> None:
    """Windows that follow each other are alike: a slow wave in one run is no difference between two."""
    slow = run(tmp_path / "slow", 11, longer=1.05)
    assert invoke("show", slow, baselines[0]).stdout.startswith("b0 saves 19.1 ms a step against slow: ")
    wave = [400.0 * (1.03 if place % 12 < 6 else 0.99) for place in range(12)]
    found = [
        msgspec.structs.replace(SHAPE, window=number, e2e_overlapped_ms=Estimate(step_ms, None, None, 16, 8))
        for number, step_ms in enumerate(wave)
    ]
    waving = str(write(tmp_path / "wave", *found, run=run_info(tells_end=False)))
    assert invoke("show", waving, baselines[0]).stdout.startswith("Which is faster, b0 or wave: inconclusive")
    assert said(waving, "--against", baselines[0])[0] == 3


def test_a_part_is_new_only_where_the_baseline_has_others_of_its_kind() -> None:
    def side(*parts: tuple[str, str]) -> Side:
        steps = [Estimate(400 * math.exp(0.002 * sign), None, None, 16, 8) for sign in (1, -1) * 6]
        return Side(
            steps, {part: [Estimate(50.0 + place % 2, None, None, 0, 1) for place in range(12)] for part in parts}
        )

    run = side(("kernel", "a"), ("kernel", "b"), ("figure", "c"), ("collective", "d"))
    found = judged(run, [side(("kernel", "a"), ("figure", "e"))])
    assert [(part.name, part.is_slower) for part in found.parts] == [("b", True), ("a", False)]
    assert judged(run, [side()]).parts == ()


def test_a_running_job_is_judged_at_all_looks(tmp_path: Path, baselines: list[str]) -> None:
    ended, running = (run(tmp_path / name, 12, info=run_info(tells_end=True)) for name in ("ended", "running"))
    file = Path(running) / "overlap.jsonl"
    file.write_text(
        "".join([line for line in file.read_text().splitlines(keepends=True) if '"record":"end"' not in line])
    )
    widths = [
        change["ci_high"] - change["ci_low"]
        for one in (ended, running)
        for change in [as_json(one, "--against", baselines[0])["change"]]
    ]
    assert widths[1] > 1.2 * widths[0]
