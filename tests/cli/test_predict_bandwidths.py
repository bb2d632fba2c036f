"""``overlap predict --bandwidths``: step times by what ``overlap bench collectives`` measured."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from overlap_callbacks.analysis.bench import powers_of_two
from overlap_callbacks.experiments.bench.results import Bench
from tests.analysis.bench_results import gemm_results, transfer_results
from tests.commands import invoke

JOB = ("--model", "gpt2", "--pp", "2", "--dp", "2", "--global-batch", "8", "--peak", "100")


def written(folder: Path, results: Bench) -> str:
    file = dataclasses.replace(results, folder=folder).open()
    for line in results.lines:
        file.write(line)
    file.close()
    return str(folder)


def predict(*arguments: str) -> Any:
    result = invoke("predict", *JOB, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_link_that_was_measured_gives_the_times_of_its_bandwidth(tmp_path: Path) -> None:
    kinds = ("all_reduce", "send_recv")
    folder = written(tmp_path, transfer_results(0.0, 2.0, message_bytes=powers_of_two(8, 2**32), kinds=kinds))
    measured, given = predict("--bandwidths", folder), predict("--bandwidth", "2")
    for name in ("data_ms", "pipeline_ms"):
        assert measured["step"][name] == pytest.approx(given["step"][name], rel=0.02)
    assert any(note.startswith("bandwidths of this job's messages, measured over Gloo") for note in measured["notes"])
    # What is given goes before.
    faster = predict("--bandwidths", folder, "--data-bandwidth", "20")
    assert faster["step"]["data_ms"] == pytest.approx(measured["step"]["data_ms"] / 10, rel=0.02)
    assert faster["step"]["pipeline_ms"] == measured["step"]["pipeline_ms"]


def test_missing_bandwidths_are_named(tmp_path: Path) -> None:
    folder = written(tmp_path / "some", transfer_results(kinds=("all_reduce",)))
    found = predict("--bandwidths", folder)
    assert found["step"] is None
    assert "no bandwidth of pipeline messages: send_recv was not measured" in found["notes"]
    other = invoke("predict", *JOB, "--bandwidths", written(tmp_path / "other", gemm_results()))
    assert "has no times of collectives: overlap bench collectives makes them" in other.output
