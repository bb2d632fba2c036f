"""Are runs told apart where they differ, and only there? Replays of the windows of real runs.

    python benchmarks/against.py [--times 1000] [--measure 1] [--json benchmarks/results/against.json]

``--measure`` trains the network of ``truth.py`` on two Gloo ranks so many times, and adds the windows to the file's
``sources``: step time with its error and degrees of freedom, and the parts with most time.

A replay draws a run and its baselines from these, in stretches of consecutive windows, so that what follows each other
in a run does so in its replay. With one baseline, both sides are of one source. With several, each run is of a source
of its own; or all are of one, times a factor that scatters from run to run as given. Nothing differs: what is called
slower is wrong. Then the same with the run's steps 5 % longer: found, told not enough data, or missed.

A row has data enough if the median interval of its pairs is no wider than the limit: all its pairs count, since that of
a single pair may be narrow by chance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from truth import TruthJob, run_ranks
from truth import _train as train

from overlap_callbacks.analysis.apart import half_of_runs, mean_error, together
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.statistics import CONFIDENCE as CONFIDENCE_OF_LEVEL
from overlap_callbacks.analysis.statistics import Floats, Pooling, half_width_factor
from overlap_callbacks.experiments.against import (
    CONFIDENCE,
    CONFIDENCE_OF_PARTS,
    WITHIN,
    Answer,
    Side,
    answer_of,
    side_of,
)

# Operators that leave the core to others, as a device's kernels do.
JOB = TruthJob(work="device", windows=48, operator_ms=4.0)
MOST_PARTS = 6
LONGER = 0.05
STRETCH = 8  # consecutive windows
AT_ONCE = 50  # replays in memory
AT_MOST_WRONG, AT_LEAST_FOUND = 0.01, 0.95


class Row(NamedTuple):
    """What is replayed: baselines, windows of each run, and the scatter from run to run; None for that of the sources.

    With one baseline, which is of the run's own source, there is no scatter.
    """

    baselines: int
    windows: int
    scatter: float | None


ROWS = [
    *[Row(1, windows, 0.0) for windows in (4, 8, 16, 64, 256, 2048)],
    Row(2, 64, None),
    *[Row(number, 1024, 0.002) for number in (2, 3, 5)],
    *[Row(number, 1024, 0.009) for number in (2, 3, 5, 8, 12)],  # as the means of the sources do
]


def measured() -> dict[str, Any]:
    """The windows of one run of the job, without what no replay uses.

    Raises:
        RuntimeError: a rank failed.
    """
    began = time.strftime("%Y-%m-%d %H:%M")
    return source_of(side_of(run_ranks(train, JOB)[0]), began, os.getloadavg()[0])


def source_of(side: Side, began: str, load: float) -> dict[str, Any]:
    """What the file keeps of a run: the step of its windows, and the parts with most time."""
    largest = sorted(side.parts.items(), key=lambda part: -sum([one.value for one in part[1]]))[:MOST_PARTS]
    return {
        "began": began,
        "load": round(load, 1),
        "steps": list(map(_stored, side.steps)),
        "parts": [[*key, list(map(_stored, times))] for key, times in largest],
    }


def _stored(one: Estimate) -> list[float]:
    known = (one.standard_error, one.degrees_of_freedom)
    return [float(f"{value:.5g}") for value in (one.value, *known) if value is not None]


class Drawn(NamedTuple):
    """A run of each replay: for each part, with the step first, times of windows, their errors and degrees of freedom.

    Shape (3, parts, replays, windows); NaN where there is no error.
    """

    times: Floats

    @classmethod
    def of(cls, rng: np.random.Generator, sources: list[Floats], of: npt.NDArray[np.int64], number: int) -> Drawn:
        """``number`` windows of the source of each replay: stretches of consecutive ones that begin anywhere."""
        return cls(np.stack([sources[place][..., _places(rng, sources[place], number)] for place in of], axis=2))

    def level(self, part: int) -> tuple[Floats, Floats, Floats]:
        """Mean, error and degrees of freedom of a part, as ``apart.level`` has them: of the step on logarithms."""
        values, errors, degrees = self.times[:, part]
        means = values.mean(axis=-1, keepdims=True)
        spread = values - means if part else values / means - 1
        return means[:, 0], *mean_error(spread, errors**2, degrees, CONFIDENCE_OF_LEVEL if part else CONFIDENCE)


def _places(rng: np.random.Generator, source: Floats, number: int) -> npt.NDArray[np.int64]:
    known = source.shape[-1]
    begins = rng.integers(0, known, math.ceil(number / STRETCH))
    return ((begins[:, None] + np.arange(STRETCH)) % known).reshape(-1)[:number]


def arrays(sources: list[dict[str, Any]]) -> list[Floats]:
    """The step and the parts that all sources have, each of shape (3, parts, windows)."""
    common = set.intersection(*[{(kind, name) for kind, name, _ in source["parts"]} for source in sources])
    found = []
    for source in sources:
        times = {(kind, name): of for kind, name, of in source["parts"]}
        rows = [source["steps"], *[times[key] for key in sorted(common)]]
        known = min(map(len, rows))
        found.append(np.array([[[*each, math.nan, math.nan][:3] for each in row[-known:]] for row in rows]))
    return [np.moveaxis(each, -1, 0) for each in found]


def changes(run: Drawn, baselines: list[Drawn], part: int, confidence: float) -> tuple[Floats, Floats]:
    """How much the run differs from its baselines in each replay, and half the interval, as ``apart.change`` has it."""
    number, pooling = run.times.shape[-1], Pooling(confidence=confidence)
    (own, *of_own), others = run.level(part), [each.level(part) for each in baselines]
    means = np.array([mean for mean, *_ in others])
    own_variance, own_degrees = of_own[0] ** 2, of_own[1]
    center = own - means.mean(axis=0) if part else np.log(own / means.mean(axis=0))
    if len(others) == 1:
        error, degrees = together((others[0][1] ** 2, others[0][2]), (own_variance, own_degrees))
        return center, error * half_width_factor(degrees, number, pooling, alone=True)
    more = np.maximum(own_variance - np.mean([error**2 for _, error, _ in others], axis=0), 0.0)
    between = np.var(means if part else np.log(means), axis=0, ddof=1)
    return center, half_of_runs(len(others), between, (more, own_degrees), pooling)


def replays(rng: np.random.Generator, sources: list[Floats], row: Row, times: int) -> tuple[Drawn, list[Drawn]]:
    """The run of each replay, and its baselines."""
    runs = row.baselines + 1
    if row.scatter is None:
        of = np.array([rng.permutation(len(sources))[:runs] for _ in range(times)]).T
    else:
        of = np.tile(rng.integers(len(sources), size=times), (runs, 1))
    factors = np.exp(rng.normal(0, row.scatter or 0.0, (runs, times)))
    drawn = [Drawn.of(rng, sources, each, row.windows) for each in of]
    for one, factor in zip(drawn, factors, strict=True):
        one.times[0] *= factor[:, None]
    return drawn[0], drawn[1:]


def replayed(sources: list[dict[str, Any]], row: Row, times: int) -> dict[str, Any]:
    """The row of the table."""
    rng = np.random.default_rng([17, row.baselines, row.windows, round(1e4 * (row.scatter or 0))])
    known = arrays(sources)
    equal, longer, halves, num_slower = list[Answer](), list[Answer](), list[float](), 0
    for first in range(0, times, AT_ONCE):
        run, baselines = replays(rng, known, row, min(AT_ONCE, times - first))
        center, half = changes(run, baselines, 0, CONFIDENCE)
        equal += map(_answer, center, half)
        longer += map(_answer, center + math.log(1 + LONGER), half)
        halves += half.tolist()
        num_parts = run.times.shape[1] - 1
        slower = np.array([answer is Answer.SLOWER for answer in equal[first:]])
        for part in range(1, 1 + num_parts):
            more, width = changes(run, baselines, part, 1 - (1 - CONFIDENCE_OF_PARTS) / num_parts)
            slower |= more - width > 0
        num_slower += int(slower.sum())
    half = float(np.median(halves))
    return {
        **row._asdict(), "times": times, "equal": _counts(equal), "equal_and_anything_slower": num_slower,
        "longer": _counts(longer), "median_half_width": round(half, 5), "data_enough": half <= WITHIN,
    }  # fmt: skip


def _answer(center: float, half: float) -> Answer:
    low, high = (math.expm1(end) if math.isfinite(end) else None for end in (center - half, center + half))
    return answer_of(Estimate(math.expm1(center), low, high, 0, 0))


def _counts(answers: list[Answer]) -> dict[str, int]:
    return {answer.value: answers.count(answer) for answer in Answer}


def failures(row: dict[str, Any]) -> list[str]:
    """Which goals a row of the table misses."""
    times, longer = row["times"], row["longer"]
    found, missed = (longer.get(answer.value, 0) for answer in (Answer.SLOWER, Answer.NOT_SLOWER))
    return [
        *(["false regressions"] if row["equal"].get(Answer.SLOWER.value, 0) > AT_MOST_WRONG * times else []),
        *(["anything slower"] if row["equal_and_anything_slower"] > AT_MOST_WRONG * times else []),
        *(["missed"] if missed > AT_MOST_WRONG * times or found < AT_LEAST_FOUND * (found + missed) else []),
        *(["not found"] if row["data_enough"] and found < AT_LEAST_FOUND * times else []),
    ]


def main() -> None:
    """Measure runs, if asked to, else replay all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=1000, help="replays of each row")
    parser.add_argument("--measure", type=int, default=0, metavar="RUNS", help="run the job so many times instead")
    parser.add_argument("--json", type=Path, required=True, help="the file with the sources, and for the table")
    arguments = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"sources": []}
    for _ in range(arguments.measure):
        known["sources"].append(measured())
        known["environment"] = {
            "date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__), "python": platform.python_version(),
            "cores": os.cpu_count(), "device": "cpu",
        }  # fmt: skip
        arguments.json.write_text(json.dumps(known) + "\n")
    if arguments.measure:
        return
    known["rows"] = []
    for row in ROWS:
        if row.scatter is not None or row.baselines < len(known["sources"]):
            found = replayed(known["sources"], row, arguments.times)
            known["rows"].append(found)
            print(json.dumps({**found, "misses": failures(found)}), flush=True)
    arguments.json.write_text(json.dumps(known) + "\n")


if __name__ == "__main__":
    main()
