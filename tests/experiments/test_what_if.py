"""What ``overlap predict --what-if`` says of a run is kept beside its record, and a later run or tuning tries it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.communication.step_time import in_layout
from overlap_callbacks.analysis.results.prediction import Prediction
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.experiments.ledger import ledger
from overlap_callbacks.experiments.tune.combinations import Axis, Kind
from overlap_callbacks.integrations.megatron import attach
from overlap_callbacks.report import record
from tests.commands import invoke
from tests.distributed import run_ranks
from tests.experiments import tune_results
from tests.integrations import megatron_shims
from tests.integrations.megatron_jobs import LOADS, TOGGLING, Setup, job
from tests.integrations.megatron_recorded import shape_of
from tests.report.runs import run_info, window, write

RANKS_LOAD = LOADS
DATA, TENSOR = Setup(micro_batches=2), Setup(tp=2, micro_batches=4)
RATES = ["--peak", "0.01", "--bandwidth", "1"]

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-core is not installed"
)


def options_of(setup: Setup) -> list[str]:
    """A setup as ``overlap predict`` takes it."""
    shape = shape_of(setup, 2)
    model = {name: getattr(shape.model, name) for name in ("layers", "hidden", "heads", "sequence", "vocabulary")}
    told = model | {
        "pp": shape.p, "tp": shape.t, "dp": shape.d, "micro-batch": shape.micro_batch, "dtype": "fp32",
        "global-batch": shape.global_batch, "bucket": shape.bucket, "vocabulary-multiple": 1,
    }  # fmt: skip
    return [
        "--tied",
        "--overlap-grad-reduce",
        *[part for name, value in told.items() for part in (f"--{name}", str(value))],
    ]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def predict(*arguments: str) -> str:
    result = invoke("predict", *arguments, env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def _train(rank: int, folder: str, setup: Setup) -> None:
    megatron_shims.install()
    with job(setup) as training:
        options = {**TOGGLING, "every_n_steps": 12, "repeats": 2}
        monitor = attach(training.model, training.optimizer, run_dir=folder, **options)
        for _ in range(60):
            training.step()
        monitor.close()


def _began(folder: Path, day: str) -> None:
    """Move the start of a run."""
    first, rest = (folder / FILE_NAME).read_bytes().split(b"\n", 1)
    info = {**json.loads(first), "started_at": f"{day}T08:00:00+00:00"}
    (folder / FILE_NAME).write_bytes(msgspec.json.encode(info) + b"\n" + rest)


@needs_megatron
def test_a_real_job_in_another_layout_tries_what_was_said_of_it(tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path / "data"), DATA, timeout_s=120)
    before = (tmp_path / "data" / FILE_NAME).read_bytes()
    command = [*options_of(DATA), *RATES, "--what-if", "--from", str(tmp_path / "data")]
    assert f"kept for --ledger in {tmp_path / 'data' / 'ledger.jsonl'}" in predict(*command)
    said = lines(tmp_path / "data")
    assert [line["tries"] for line in said] in (["tp=2,dp=1", "pp=2,dp=1"], ["pp=2,dp=1", "tp=2,dp=1"])
    choices = json.loads(invoke("predict", *command, "--json").stdout)["what_if"]
    for line in said:
        sizes = {"p": 1, "t": 1, "d": 2} | {part[0]: int(part.split("=")[1]) for part in line["tries"].split(",")}
        (choice,) = [one for one in choices if {name: one[name] for name in sizes} == sizes]
        assert [line["low_ms"], line["high_ms"]] == choice["saves_ms"]
        assert line["low_ms"] < line["high_ms"]
        assert line["step_ms"] > 0
        assert line["at"]
    assert lines(tmp_path / "data") == said  # said again, it is not written again
    assert (tmp_path / "data" / FILE_NAME).read_bytes() == before

    run_ranks(_train, 2, str(tmp_path / "tensor"), TENSOR, timeout_s=120)
    for day, times in (("2000-01-01", 0), ("2100-01-01", 1)):  # what ran before it was said does not try it
        _began(tmp_path / "tensor", day)
        found = json.loads(invoke("predict", "--ledger", str(tmp_path), "--json").stdout)["predictions"]
        tried = [one for one in found if one["tried_by"] and one["prediction"]["topic"] == "layout"]
        assert [one["prediction"]["tries"] for one in tried] == ["tp=2,dp=1"] * times
    (entry,) = tried
    assert (entry["run"], entry["tried_by"]) == (str(tmp_path / "data"), str(tmp_path / "tensor"))
    assert entry["saved_ms"]["ci_low"] < entry["saved_ms"]["value"] < entry["saved_ms"]["ci_high"]
    kept = [line for line in lines(tmp_path / "tensor") if line["prediction"]["topic"] == "layout"]
    assert kept == [{"record": "outcome", **entry}]
    invoke("predict", "--ledger", str(tmp_path))
    assert kept == [line for line in lines(tmp_path / "tensor") if line["prediction"]["topic"] == "layout"]
    assert "not kept for --ledger" in predict(*command, "--layers", "3")
    assert lines(tmp_path / "data") == said


def predicted(folder: Path, at: str = "2026-11-22T08:00:00+00:00", **changes: Any) -> Path:
    """A run of which another layout was said to save 10 to 30 ms."""
    write(folder, window(0), run=run_info(started_at="2026-11-21T08:00:00+00:00", tells_end=False))
    told = msgspec.to_builtins(in_layout(shape_of(DATA, 2), (1, 2, 1)))
    said = Prediction(
        topic="layout", settings=("tp", "dp"), tries="tp=2,dp=1", step_ms=400.0, low_ms=10.0, high_ms=30.0, at=at,
        job=told,
    )  # fmt: skip
    line = {"record": "prediction", **msgspec.to_builtins(said), **changes}
    (folder / "ledger.jsonl").write_bytes(b"{half\n[1]\n" + msgspec.json.encode(line) + b"\n")
    return folder


@pytest.mark.parametrize(
    ("axis", "at", "times"),
    [
        (Axis(Kind.ARG, "tp", ("1", "2")), "2026-11-22T08:00:00+00:00", 1),
        (Axis(Kind.ARG, "tensor-model-parallel-size", ("1", "2")), "2026-11-22T08:00:00+00:00", 1),
        (Axis(Kind.ARG, "tp", ("1", "2")), "2026-11-24T08:00:00+00:00", 0),  # said when it was known
        (Axis(Kind.ARG, "tp", ("1", "4")), "2026-11-22T08:00:00+00:00", 0),
        (Axis(Kind.ARG, "pp", ("1", "2")), "2026-11-22T08:00:00+00:00", 0),
        (Axis(Kind.ARG, "layers", ("1", "2")), "2026-11-22T08:00:00+00:00", 0),
    ],
)
def test_a_tuning_of_the_same_job_tries_it_and_holds_both(tmp_path: Path, axis: Axis, at: str, times: int) -> None:
    run = predicted(tmp_path / "run", at)
    tune = tune_results.results(tmp_path / "tune", [(400, 401, 399, 400), (380, 381, 379, 380)], axis)
    write(tmp_path / "tune" / "000-0", window(0), run=run_info(started_at="2026-11-23T08:00:00+00:00"))
    tune.lines[:] = [msgspec.structs.replace(one, folder=f"{one.combination:03d}-{one.repeat}") for one in tune.lines]
    with (tmp_path / "tune" / "tune.jsonl").open("wb") as file:
        for line in (tune.start, *tune.lines):
            file.write(msgspec.json.encode(line) + b"\n")
    found = [entry for entry in ledger([record.read(run)], [tune]) if entry.prediction.job and entry.tried_by]
    assert [entry.held for entry in found] == [True] * times
    shown = invoke("predict", "--ledger", str(run), str(tmp_path / "tune"), env={"COLUMNS": "300"}).stdout
    assert ("layout tp=2,dp=1" in shown) is bool(times)
    assert (tmp_path / "tune" / "ledger.jsonl").exists() is bool(times)
    if times:
        (line,) = lines(tmp_path / "tune")
        assert (line["prediction"]["tries"], line["held"]) == ("tp=2,dp=1", True)
        assert 10 < line["saved_ms"]["ci_low"] < line["saved_ms"]["value"] < line["saved_ms"]["ci_high"] < 30


@pytest.mark.parametrize(
    "changes",
    [{"at": ""}, {"at": "2026-11-20T08:00:00+00:00"}, {"at": "now"}, {"tries": "tp"}, {"job": {"p": 0}}, {"job": 5},
     {"low_ms": "x"}, {"record": "outcome"}],
)  # fmt: skip
def test_lines_that_predict_nothing_since_the_run_s_start_are_skipped(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len([one for one in ledger([record.read(predicted(tmp_path / "good"))]) if one.prediction.job]) == 1
    found = ledger([record.read(predicted(tmp_path / "bad", **{"at": "2026-11-22T08:00:00+00:00", **changes}))])
    assert [entry for entry in found if entry.prediction.job] == []


@pytest.mark.parametrize("busy", [False, True])
def test_what_cannot_be_written_is_said_and_the_prediction_is_shown(tmp_path: Path, busy: bool) -> None:
    from overlap_callbacks.experiments import what_if
    from overlap_callbacks.experiments.sweep import LinesFile

    file = tmp_path / "ledger.jsonl"
    if busy:
        other = LinesFile(file, "predict")
    else:
        os.mkdir(file)
    assert what_if.keep(file, [{"record": "prediction"}]).startswith(f"{file} cannot be written: ")
    if busy:
        other.close()
        assert what_if.keep(file, [{"record": "prediction"}]) == ""
