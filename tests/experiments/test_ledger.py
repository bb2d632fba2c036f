"""The ledger of predictions: what tries one, whether it held, and what advice says where too few did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from overlap_callbacks import arms
from overlap_callbacks.analysis.results.arm import ArmReport
from overlap_callbacks.analysis.results.causal import DelayedCall
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.exposure import Exposure
from overlap_callbacks.analysis.results.prediction import SETTINGS, Prediction, topic_of
from overlap_callbacks.analysis.results.run import FILE_NAME, RunInfo, Workload
from overlap_callbacks.analysis.results.step_parts import Bound, bound_of
from overlap_callbacks.experiments.ledger import Entry, Tally, ledger, seldom_held
from overlap_callbacks.experiments.tune.combinations import Axis, Kind
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report import record
from overlap_callbacks.report.record import Record
from overlap_callbacks.sinks import JsonlSink
from tests.analysis.test_causal_findings import GATHER, delayed, exposed, finding
from tests.commands import invoke
from tests.distributed import run_ranks
from tests.experiments import tune_results
from tests.report.arm_runs import arm_window
from tests.report.runs import run_info, window, write

BUCKETS = Prediction(topic="buckets", settings=("bucket_mb",), rises=True, step_ms=400.0, low_ms=0.0, high_ms=40.0)
PREFETCH = Prediction(topic="prefetch", settings=("prefetch",), rises=True, step_ms=412.0, low_ms=0.0, high_ms=40.0)
DEFER = Prediction(topic="defer-reductions", step_ms=400.0, low_ms=30.0, high_ms=60.0)


TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial"


def job(day: int = 1, configuration: dict[str, Any] | None = None, **settings: Any) -> RunInfo:
    """A job with settings, started on a day."""
    return run_info(
        started_at=f"2026-11-{day:02d}T08:00:00+00:00",
        configuration={"shapes": "a", **(configuration or {})},
        workload=Workload(settings=settings),
        tells_end=False,
    )


def run(
    folder: Path, info: RunInfo, *said: Prediction, step_ms: float = 400.0, tokens: int | None = None, **changes: Any
) -> Record:
    """A record with predictions; its steps scatter by 0.2 %."""
    windows = [
        msgspec.structs.replace(
            window(number),
            e2e_overlapped_ms=Estimate(step_ms * (1 + 0.002 * (-1) ** number), None, None, 16, 8),
            tokens_per_step=tokens,
        )
        for number in range(8)
    ]
    write(folder, *windows, run=info, **changes)
    file = folder / FILE_NAME
    lines = [msgspec.json.encode({"record": "prediction", **msgspec.to_builtins(one)}) for one in said]
    file.write_bytes(b"\n".join([*file.read_bytes().splitlines(), *lines, b""]))
    return record.read(folder)


def tried(entries: list[Entry]) -> list[tuple[str, bool | None]]:
    return [(Path(entry.tried_by).name, entry.held) for entry in entries if entry.tried_by]


# -- later runs


@pytest.mark.parametrize(("step_ms", "held"), [(380.0, True), (399.0, True), (340.0, False), (420.0, False)])
def test_a_later_run_with_that_change_alone_tries_a_prediction(tmp_path: Path, step_ms: float, held: bool) -> None:
    before = run(tmp_path / "before", job(1, bucket_mb=1), BUCKETS)
    after = run(tmp_path / "after", job(2, bucket_mb=4), step_ms=step_ms)
    (entry,) = [one for one in ledger([after, before]) if one.tried_by]
    assert (entry.run, entry.tried_by) == (str(tmp_path / "before"), str(tmp_path / "after"))
    assert entry.saved_ms is not None
    assert entry.saved_ms.value == pytest.approx(400.0 - step_ms, abs=0.5)
    assert entry.saved_ms.ci_low is not None
    assert entry.saved_ms.ci_high is not None
    assert entry.saved_ms.ci_low < entry.saved_ms.value < entry.saved_ms.ci_high
    assert entry.held is held


def test_an_outcome_known_less_well_than_the_prediction_is_not_enough_data(tmp_path: Path) -> None:
    narrow = msgspec.structs.replace(BUCKETS, low_ms=19.9, high_ms=20.1)
    for name, step_ms, held in (("like", 380.0, None), ("unlike", 340.0, None)):
        before = run(tmp_path / name / "before", job(1, bucket_mb=1), narrow)
        after = run(tmp_path / name / "after", job(2, bucket_mb=4), step_ms=step_ms)
        (entry,) = [one for one in ledger([after, before]) if one.tried_by]
        assert entry.saved_ms is not None
        assert entry.saved_ms.ci_low is not None
        assert entry.saved_ms.ci_high is not None
        assert entry.saved_ms.ci_high - entry.saved_ms.ci_low > 0.2
        assert entry.held is held
    said = invoke("predict", "--ledger", str(tmp_path / "like"))
    assert said.exit_code == 3
    assert "not enough data" in said.stdout


def test_a_step_is_what_it_was_when_it_was_predicted(tmp_path: Path) -> None:
    """Both runs have a busier hour: what a tenth of the step is stays what was predicted."""
    said = msgspec.structs.replace(BUCKETS, step_ms=200.0, high_ms=25.0)
    before, after = (
        run(tmp_path / "a", job(1, bucket_mb=1), said),
        run(tmp_path / "b", job(2, bucket_mb=4), step_ms=360),
    )
    (entry,) = [one for one in ledger([before, after]) if one.tried_by]
    assert entry.saved_ms is not None
    assert entry.saved_ms.value == pytest.approx(20.0, abs=0.3)


@pytest.mark.parametrize(
    "other",
    [
        job(2, bucket_mb=1),  # nothing differs
        job(2, bucket_mb=0.5),  # the other way
        job(2, bucket_mb="large"),
        job(2, bucket_mb=4, layers=3),  # something else does too
        job(2, bucket_mb=4, prefetch=2),
        job(2, bucket_mb=1, prefetch=2),
        job(1, bucket_mb=4),  # not later
        msgspec.structs.replace(job(2, bucket_mb=4), world_size=4),
        msgspec.structs.replace(job(2, bucket_mb=4), configuration={"shapes": "b"}),
        msgspec.structs.replace(job(2, bucket_mb=4), torch_version="2.14.0"),
        msgspec.structs.replace(job(2, bucket_mb=4), schedule={**run_info().schedule, "control": True}),
    ],
)
def test_other_runs_do_not(tmp_path: Path, other: RunInfo) -> None:
    before = run(tmp_path / "before", job(1, bucket_mb=1), BUCKETS)
    assert tried(ledger([before, run(tmp_path / "other", other, step_ms=300.0)])) == []


@pytest.mark.parametrize(("tokens", "times"), [(4096, 1), (8192, 0)])
def test_steps_that_do_more_work_are_not_compared(tmp_path: Path, tokens: int, times: int) -> None:
    said = msgspec.structs.replace(BUCKETS, topic="micro-batches")
    before = run(tmp_path / "before", job(1, micro_batches=2), said, tokens=4096)
    after = run(tmp_path / "after", job(2, micro_batches=4), step_ms=380.0, tokens=tokens)
    assert tried(ledger([before, after])) == times * [("after", True)]


def test_settings_that_were_not_told_before_say_nothing(tmp_path: Path) -> None:
    before = run(tmp_path / "before", job(1), BUCKETS)
    assert tried(ledger([before, run(tmp_path / "other", job(2, bucket_mb=4), step_ms=380.0)])) == []


def test_measuring_otherwise_makes_no_other_job(tmp_path: Path) -> None:
    before = run(tmp_path / "before", job(1, bucket_mb=1), BUCKETS)
    info = msgspec.structs.replace(job(2, bucket_mb=4), schedule={**run_info().schedule, "every_n_steps": 9})
    assert tried(ledger([before, run(tmp_path / "after", info, step_ms=380.0)])) == [("after", True)]


def test_each_prediction_counts_once_and_the_last_one(tmp_path: Path) -> None:
    """Windows give the same advice again, each knowing more; nothing is said anew once an arm has tried it."""
    later = msgspec.structs.replace(BUCKETS, high_ms=999.0)
    before = run(tmp_path / "before", job(1, bucket_mb=1), BUCKETS, PREFETCH, later)
    after = run(tmp_path / "after", job(2, bucket_mb=4), step_ms=340.0)
    assert tried(ledger([before, after])) == [("after", True)]


@pytest.mark.parametrize("tries", ["prefetch_2_2", "no_reshard"])
def test_a_prediction_is_made_anew_until_an_arm_tries_it_and_best_by_delays(tmp_path: Path, tries: str) -> None:
    sink = JsonlSink(tmp_path)
    sink.open(job(configuration={"fsdp_units": 12, "fsdp_prefetch": 0}))
    _, exposure = finding(GATHER, 1.0, exposed("all_gather", "layers.3", 3.0, 2.0))
    report = msgspec.structs.replace(window(0), exposure=exposure)
    with mock.patch("overlap_callbacks.sinks.jsonl.predictions_of", return_value=[PREFETCH, BUCKETS]):
        sink.log(report)
        sink.log(report)  # says the same
        for slope in (0.95, 0.85):
            sink.log_causal(delayed(GATHER, slope))
        sink.log(report)  # a profile knows less than delays
        sink.log_arm(arm_window(3, tries))
        sink.log_causal(delayed(GATHER, 0.75))
    sink.close()
    said = [line["assumes"] for line in lines(tmp_path) if line["topic"] == "prefetch" and "assumes" in line]
    slopes = [float(assumes.rpartition(" ")[2]) for assumes in said]
    assert slopes == pytest.approx([0.95, 0.9] + [0.85] * (tries != "prefetch_2_2"), abs=0.02)
    assert [line["topic"] for line in lines(tmp_path)][:2] == ["prefetch", "buckets"]
    assert len(lines(tmp_path)) == 2 + len(slopes)


@pytest.mark.parametrize(("slope", "rises"), [(0.0, []), (1.0, [True])])
def test_buckets_that_would_merge_with_slack_are_not_predicted(tmp_path: Path, slope: float, rises: list[bool]) -> None:
    calls = [DelayedCall("allreduce_", "data", 0, f"bucket {number}: a … b") for number in range(2, 6)]
    rows = [exposed("all_reduce", call.name, 1.0, 1.0) for call in calls]
    sink = JsonlSink(tmp_path)
    sink.open(job(configuration={"ddp_bucket_cap_bytes": 2**20, "parameters": 2**20, "parameter_types": "float32"}))
    sink.log(msgspec.structs.replace(window(0), exposure=Exposure(5, 2, (), (), tuple(rows))))
    sink.log_causal(delayed(calls[2], slope))
    sink.log_causal(delayed(calls[3], 1.0))
    sink.close()
    by_delays = [line for line in lines(tmp_path) if line["topic"] == "buckets" and "slope" in line.get("assumes", "")]
    assert [line["rises"] for line in by_delays] == rises


def test_a_restarted_job_predicts_anew(tmp_path: Path) -> None:
    """It may be configured otherwise."""
    found = run(tmp_path, job(1, bucket_mb=1), BUCKETS)
    assert BUCKETS in found.predictions
    write(tmp_path, run=job(2, bucket_mb=4))
    assert record.read(tmp_path).predictions == []


@pytest.mark.parametrize("changes", [{"valid": False}, {"complete": False}, {"control": True}])
def test_windows_that_do_not_count_predict_nothing(tmp_path: Path, changes: dict[str, bool]) -> None:
    write(tmp_path, msgspec.structs.replace(window(0), **changes))
    assert lines(tmp_path) == []
    write(tmp_path, window(1), window(2))
    assert [line["topic"] for line in lines(tmp_path)] == ["ctas", "ctas"]


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        ("ddp_bucket_cap_bytes", "buckets"), ("bucket-mb", "buckets"), ("zero_reduce_bucket_size", "buckets"),
        ("ddp_gradient_as_bucket_view", ""), ("zero_prefetch_bucket_size", "prefetch"), ("prefetch_2_2", "prefetch"),
        ("zero_prefetch_bucket_1000", "prefetch"), ("NCCL_MAX_CTAS", "ctas"), ("OMP_NUM_THREADS", "ctas"),
        ("defer", "defer-reductions"), ("micro-batches", "micro-batches"), ("micro_batch", "micro-batch"),
        ("no_reshard", ""), ("lr", ""),
    ],
)  # fmt: skip
def test_the_name_of_a_setting_or_an_arm_says_which_advice_it_tries(name: str, topic: str) -> None:
    assert topic_of(name) == topic


# -- arms, overlap tune


def arms_of(*names: str) -> list[ArmReport]:
    return [arm_window(number, name) for name in names for number in range(4)]


@pytest.mark.parametrize(
    ("name", "prefetched", "times"),
    [
        ("prefetch_2_2", 0, 1),
        ("prefetch_0_0", 0, 0),
        ("prefetch_1_1", 2, 0),
        ("prefetch_2_2", None, 0),
        ("no_reshard", 0, 0),
    ],
)
def test_an_arm_of_the_same_run_tries_a_prediction(
    tmp_path: Path, name: str, prefetched: int | None, times: int
) -> None:
    told = {} if prefetched is None else {"fsdp_prefetch": prefetched}
    found = run(tmp_path, job(configuration=told), PREFETCH, arms=arms_of(name))
    assert tried(ledger([found])) == times * [(f"arm {name}", False)]  # its steps are 14 % longer
    for entry in [one for one in ledger([found]) if one.tried_by]:
        assert entry.saved_ms is not None
        assert -60 < entry.saved_ms.value < -50


@pytest.mark.parametrize(("name", "times"), [("power_cap_300", 0), ("power_cap_800", 1)])
def test_a_lower_cap_is_no_trial_of_a_higher_one(tmp_path: Path, name: str, times: int) -> None:
    said = msgspec.structs.replace(PREFETCH, topic="power-cap")
    write(tmp_path, window(0, power=True), run=job(), arms=arms_of(name))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(msgspec.json.encode({"record": "prediction", **msgspec.to_builtins(said)}) + b"\n")
    assert tried(ledger([record.read(tmp_path)])) == times * [(f"arm {name}", False)]


@pytest.mark.parametrize(
    ("names", "tries", "found"),
    [
        (["bucket_mb_4"], "", "bucket_mb_4"),
        (["bucket_mb_1"], "", ""),  # a smaller one
        (["bucket_4"], "", ""),  # of what?
        (["bucket_mb_64", "bucket_mb_25"], "bucket-mb=2,25", "bucket_mb_25"),
        (["bucket_mb_64", "bucket_mb_8"], "bucket-mb=2,25", ""),  # less or more than advised
        (["bucket_mb_64", "bucket_mb_25"], "bucket-mb=1,2", "bucket_mb_25"),  # nothing larger is named
        (["bucket_mb_64", "bucket_mb_8", "bucket_mb_25"], "", "bucket_mb_8"),
        (["bucket_mb_30", "bucket_mb_20", "bucket_mb_50"], "bucket-mb=2,25,50", "bucket_mb_50"),
    ],
)
def test_of_several_arms_the_one_nearest_to_the_advice_tries_it(
    tmp_path: Path, names: list[str], tries: str, found: str
) -> None:
    """The job's buckets have 2 MiB."""
    said = msgspec.structs.replace(BUCKETS, tries=tries)
    info = job(configuration={"ddp_bucket_cap_bytes": 2 * 2**20})
    assert tried(ledger([run(tmp_path, info, said, arms=arms_of(*names))])) == [(f"arm {found}", False)] * bool(found)


def test_an_arm_comes_before_a_run_that_tries_the_same(tmp_path: Path) -> None:
    before = run(tmp_path / "before", job(1, {"fsdp_prefetch": 0}), PREFETCH, arms=arms_of("prefetch_2_2"))
    after = run(tmp_path / "after", job(2, {"fsdp_prefetch": 2}), step_ms=300.0)
    assert tried(ledger([before, after])) == [("arm prefetch_2_2", False)]


@pytest.mark.parametrize(("tries", "found"), [("", "b"), ("bucket-mb=1,4,8", "c")])
def test_of_several_later_runs_one_tries_a_prediction(tmp_path: Path, tries: str, found: str) -> None:
    """The nearest to the advice, or to the job as it was, and of these the first."""
    records = [run(tmp_path / "a", job(1, bucket_mb=1), msgspec.structs.replace(BUCKETS, tries=tries))]
    for day, bucket_mb in enumerate((2.5, 8, 2.5, 8), start=2):
        records.append(run(tmp_path / "abcde"[day - 1], job(day, bucket_mb=bucket_mb), step_ms=380.0))
    assert tried(ledger(records)) == [(found, True)]


def test_a_run_tries_a_prediction_of_one_run_only(tmp_path: Path) -> None:
    """A job that is started three times with the same settings says the same three times."""
    told = [run(tmp_path / f"a{day}", job(day, bucket_mb=1), BUCKETS) for day in (1, 2, 3)]
    changed = [run(tmp_path / f"b{day}", job(day, bucket_mb=4), step_ms=380.0) for day in (4, 5)]
    found = [(Path(entry.run).name, Path(entry.tried_by).name) for entry in ledger([*changed, *told]) if entry.tried_by]
    assert found == [("a2", "b5"), ("a3", "b4")]


@pytest.mark.parametrize(
    ("axis", "day", "layers", "found"),
    [
        (Axis(Kind.ARG, "bucket-mb", ("1", "4", "0.5")), 1, 2, [("overlap tune, bucket-mb=4", True)]),
        (Axis(Kind.ARG, "bucket-mb", ("1", "4", "0.5")), 3, 2, []),  # the prediction is later
        (Axis(Kind.ARG, "bucket-mb", ("1", "4", "0.5")), 1, 3, []),  # of another job
        (Axis(Kind.ARG, "layers", ("1", "4", "0.5")), 1, 2, []),
    ],
)
def test_a_tuning_of_the_same_job_tries_a_prediction(
    tmp_path: Path, axis: Axis, day: int, layers: int, found: list[tuple[str, bool]]
) -> None:
    before = run(tmp_path / "before", job(day, layers=layers), BUCKETS)
    tune = tune_results.results(tmp_path, [(400, 401, 399, 400), (380, 381, 379, 380), (500, 501, 499, 500)], axis)
    run(tmp_path / "000-0", job(2, layers=2))
    tune.lines[:] = [
        msgspec.structs.replace(line, folder=f"{line.combination:03d}-{line.repeat}") for line in tune.lines
    ]
    assert tried(ledger([before], [tune])) == found


# -- how many held


@pytest.mark.parametrize(
    ("held", "of", "is_bad"),
    [(0, 0, False), (0, 1, False), (1, 1, False), (0, 2, True), (1, 2, False), (1, 3, True), (2, 7, True),
     (6, 7, False), (5, 7, True), (19, 20, False), (18, 20, False), (17, 20, False), (16, 20, True)],
)  # fmt: skip
def test_few_that_held_are_bad_if_chance_makes_so_few_in_less_than_5_percent(held: int, of: int, is_bad: bool) -> None:
    """Binomial, with 95 %: (0 of 1) has 5 %, (1 of 2) 9.8 %, (1 of 3) 0.7 %, (5 of 7) 4.4 %, (17 of 20) 7.5 %."""
    assert Tally(held, of).is_bad is is_bad


def bad_runs(folder: Path) -> None:
    """Advice on fewer threads was to save something, as two records say; two later runs lose 20 ms."""
    for day in (1, 2):
        run(folder / f"a{day}", job(day, num_threads=8))
        run(folder / f"b{day}", job(day + 2, num_threads=4), step_ms=420.0)


def test_advice_says_that_such_predictions_seldom_held_in_the_user_s_runs(tmp_path: Path) -> None:
    run(tmp_path / "new", job(9, num_threads=8, of="another job"))
    words = "in your runs 0 of 2 such predictions held"
    assert seldom_held(record.read(tmp_path / "new")) == {}
    assert words not in " ".join(invoke("show", str(tmp_path / "new"), "--all").stdout.split())
    bad_runs(tmp_path)
    assert seldom_held(record.read(tmp_path / "new")) == {"ctas": words}
    found = json.loads(invoke("show", str(tmp_path / "new"), "--json").stdout)["bottleneck"]["advice"]
    assert [(one["topic"], one["held"]) for one in found] == [("ctas", words)]
    for everything in ([], ["--all"]):
        assert words in " ".join(invoke("show", str(tmp_path / "new"), *everything).stdout.split())
    page = tmp_path / "page.html"
    assert invoke("report", str(tmp_path / "new"), "-o", str(page)).exit_code == 0
    assert words in page.read_text().replace("&#160;", " ")


@pytest.mark.parametrize(("high_ms", "is_bad"), [(90.0, False), (30.0, True)])
def test_a_real_run_s_advice_says_so_too(tmp_path: Path, high_ms: float, is_bad: bool) -> None:
    """The tutorial's runs, two of each: what they predicted held, or would not have, had they predicted less."""
    said = msgspec.structs.replace(DEFER, step_ms=115.6, low_ms=0.0, high_ms=high_ms)
    line = msgspec.json.encode({"record": "prediction", **msgspec.to_builtins(said)})
    for day, name in enumerate(("before", "before", "after", "after", "before"), start=1):
        first, rest = (TUTORIAL / name / FILE_NAME).read_bytes().split(b"\n", 1)
        info = {**json.loads(first), "started_at": f"2026-11-{day:02d}T08:00:00+00:00"}
        (tmp_path / f"{name}-{day}").mkdir()
        file = tmp_path / f"{name}-{day}" / FILE_NAME
        file.write_bytes(msgspec.json.encode(info) + b"\n" + rest.rstrip() + b"\n" + line * (name == "before") + b"\n")
    table = invoke("predict", "--ledger", str(tmp_path), env={"COLUMNS": "200"}).stdout
    assert table.startswith(f"{0 if is_bad else 2} of 2 tried predictions held.")
    words = "(in your runs 0 of 2 such predictions held)"
    for everything in ([], ["--all"]):
        shown = " ".join(invoke("show", str(tmp_path / "before-5"), *everything).stdout.split())
        assert "Each gradient is reduced 4 times a step" in shown
        assert (words in shown) is is_bad


def test_the_command_prints_the_table_and_its_exit_code(tmp_path: Path) -> None:
    assert invoke("predict", "--ledger", str(tmp_path)).exit_code == 2
    bad_runs(tmp_path)
    result = invoke("predict", "--ledger", str(tmp_path), env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "0 of 2 tried predictions held. Fewer than could be by chance: ctas 0 of 2." in result.stdout
    rows = sorted([line.split() for line in result.stdout.splitlines() if line.startswith("ctas")])
    assert [row[-3:] for row in rows] == [["no", "b1", "a2"], ["no", "b2", "a1"]]
    for row in rows:
        assert " ".join(row).startswith("ctas 0.00 to 43.70 ms -19.96 ms (-20.92 to -19.00 ms) no")
    found = json.loads(invoke("predict", "--ledger", str(tmp_path / "a1"), str(tmp_path / "b2"), "--json").stdout)
    assert (found["held"], found["tried"]) == (0, 1)
    assert found["topics"] == [{"topic": "ctas", "held": 0, "tried": 1, "is_bad": False}]
    alone = invoke("predict", "--ledger", str(tmp_path / "a1"))
    assert alone.exit_code == 3
    said = "1 prediction, and none was tried: no arm, overlap tune or later run does that."
    assert " ".join(alone.stdout.split()) == said
    data = invoke("predict", "--ledger", str(tmp_path / "a1"), "--json")
    assert data.exit_code == 3
    assert json.loads(data.stdout)["predictions"][0]["saved_ms"] is None


# -- real jobs

WIDTH, LAYERS = 470, 4  # 3.4 MiB of gradients


def _train(rank: int, folder: str, bucket_mb: float, sharded: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    if sharded:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compared = [arms.Sequential(), *([arms.Prefetch(2, 2)] if sharded else [])]
    monitor = attach(
        optimizer, model=model, run_dir=folder, strict=True, max_overhead=None, arms=compared, spread=False,
        first_step=3, every_n_steps=50, repeats=2, steps_per_block=2, warmup_steps=1, profiled_steps=2,
    )  # fmt: skip
    for _ in range(203):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines() if line]
    return [line for line in found if line["record"] == "prediction"]


def advise(folder: Path, topic: str, tries: str) -> None:
    """A line of advice as a job gives it, unless it has: a busy machine's times advise something else."""
    if topic not in [line["topic"] for line in lines(folder)]:
        like = {"settings": [SETTINGS[topic][0]], "rises": True, "tries": tries, "low_ms": 0.0, "high_ms": 1.0}
        line = {"record": "prediction", "topic": topic, "step_ms": 10.0, **like}
        with (folder / FILE_NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_larger_buckets_are_predicted_once_and_tried_by_the_next_run(tmp_path: Path) -> None:
    for name, bucket_mb in (("small", 0.5), ("large", 2.0)):
        run_ranks(_train, 2, str(tmp_path / name), bucket_mb, False, timeout_s=120)
    windows = [window for window in record.read(tmp_path / "small").windows if window.valid and window.complete]
    bounds = [bound_of(found[0])[0] for window in windows if (found := window.step_parts()) is not None]
    advised = [line["topic"] for line in lines(tmp_path / "small")]
    assert "buckets" in advised or Bound.COMMUNICATION not in bounds
    advise(tmp_path / "small", "buckets", "bucket_cap_mb=1,2")
    said = [(line["topic"], line.get("rises")) for line in lines(tmp_path / "small")]
    assert ("buckets", True) in said
    result = invoke("predict", "--ledger", str(tmp_path), "--json")
    predictions = json.loads(result.stdout)["predictions"]
    assert result.exit_code == (0 if any([one["held"] is not None for one in predictions]) else 3), result.output
    found = [one for one in predictions if one["run"] == str(tmp_path / "small")]
    assert len(found) == len(set(said))  # of four windows the last one
    (entry,) = [one for one in found if one["tried_by"]]
    assert entry["prediction"]["topic"] == "buckets"
    assert entry["tried_by"] == str(tmp_path / "large")
    assert 0 == entry["prediction"]["low_ms"] < entry["prediction"]["high_ms"] <= entry["prediction"]["step_ms"]
    assert entry["saved_ms"]["ci_low"] < entry["saved_ms"]["value"] < entry["saved_ms"]["ci_high"]
    saved, said = entry["saved_ms"], entry["prediction"]
    overlaps = saved["ci_low"] <= said["high_ms"] and saved["ci_high"] >= 0
    is_wider = saved["ci_high"] - saved["ci_low"] > said["high_ms"]
    assert entry["held"] is (None if overlaps and is_wider else overlaps)


def test_prefetching_is_predicted_and_tried_by_an_arm_of_the_same_job(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path / "sharded"), 0.0, True, timeout_s=120)
    advise(tmp_path / "sharded", "prefetch", "prefetch=1,2,3")
    (entry,) = [entry for entry in ledger([record.read(tmp_path / "sharded")]) if entry.tried_by]
    assert (entry.prediction.topic, entry.tried_by) == ("prefetch", "arm prefetch_2_2")
    saved = entry.saved_ms
    assert saved is not None
    assert saved.ci_low is not None
    assert saved.ci_high is not None
    is_wide = saved.ci_high - saved.ci_low > entry.prediction.high_ms - entry.prediction.low_ms
    assert is_wide or entry.held is not None
