"""What a study trains, what it refuses in advance, and how long it expects a job to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.study import FILE_NAME, Configuration, StudyFigures, StudyRow
from overlap_callbacks.experiments import sweep
from overlap_callbacks.experiments.machine import Machine
from overlap_callbacks.experiments.study.models import scaled
from overlap_callbacks.experiments.study.plan import check, difference, make_start, why_not
from overlap_callbacks.experiments.study.sweep import Study
from overlap_callbacks.experiments.sweep import BusyError, ResultsError
from tests.experiments.study.machines import CPU, H100S, MI250S, V100S


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"models": ["gpt5"]}, "--model must be one of gpt3-xl, .*, got 'gpt5'"),
        ({"strategies": ["fsdp"]}, "--strategy must be one of ddp, fsdp2, zero3, tp, pp, got 'fsdp'"),
        ({"precisions": ["fp8"]}, "--precision must be one of fp32, tf32, fp16, bf16, got 'fp8'"),
        ({"batches": [4, 0]}, "--batch must be at least 1, got 0"),
        ({"ranks": 1}, "--ranks must be at least 2, got 1"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"scale": 2.0}, "--scale must be from 0.01 to 1, got 2"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(asked)


def test_the_defaults_suit_the_machine() -> None:
    quick = make_start({}, CPU)
    assert (quick.ranks, quick.link, quick.scale, quick.steps) == (2, "gloo", 0.0625, 10)
    assert {one.precision for one in quick.configurations} == {"fp32"}
    assert len(quick.configurations) == 6
    full = make_start({}, H100S, quick=False)
    assert (full.ranks, full.link, full.scale, full.steps) == (8, "nccl", 1.0, 25)
    assert {one.model for one in full.configurations} == {
        "gpt3-xl", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b", "llama2-13b",
    }  # fmt: skip
    with pytest.raises(ValueError, match="--ranks must be at most the 8 GPUs of this host, one a rank, got 9"):
        make_start({"ranks": 9}, H100S)


def test_ranks_of_a_host_with_one_gpu_train_on_its_cpu() -> None:
    start = make_start({}, msgspec.structs.replace(H100S, num_gpus=1, cpu="Xeon, 96 cores"))
    assert (start.link, start.device, start.ranks, start.scale) == ("gloo", "Xeon, 96 cores", 2, 0.0625)


def test_each_combination_occurs_once_and_steps_are_whole_windows() -> None:
    asked = {
        "models": ["bert", "bert"],
        "strategies": ["tp"],
        "batches": [2, 8],
        "power_caps_w": [None, 300.0],
        "steps": 11,
    }
    start = make_start(asked, H100S)
    assert start.steps == 15
    found = [(one.model, one.strategy, one.batch, one.power_cap_w) for one in start.configurations]
    assert found == [("bert", "tp", batch, cap) for batch in (2, 8) for cap in (None, 300.0)]
    with pytest.raises(ValueError, match="that makes 600 configurations, and at most 500 are allowed"):
        make_start({"batches": range(1, 201)}, CPU)


@pytest.mark.parametrize(
    ("changes", "machine", "ranks", "says"),
    [
        ({"precision": "tf32"}, CPU, 2, "tf32 needs a GPU: a CPU multiplies in fp32, fp16 and bf16"),
        ({"precision": "tf32"}, MI250S, 2, "tf32 is for NVIDIA GPUs, and this is AMD Instinct MI250X"),
        ({"precision": "bf16"}, V100S, 2, "bf16 needs compute capability 8.0, Tesla V100-SXM2-16GB has 7.0"),
        ({"precision": "bf16"}, H100S, 2, ""),
        ({"strategy": "zero3"}, V100S, 2, "DeepSpeed is not installed"),
        ({"strategy": "zero3"}, CPU, 2, ""),
        ({"strategy": "tp", "model": "resnet50"}, CPU, 2, "a ResNet has neither"),
        ({"strategy": "tp"}, CPU, 4, "whole heads, and 2 do not divide by 4"),
        ({"strategy": "pp"}, CPU, 4, "2 blocks do not make 4 stages of a pipeline"),
        ({"batch": 1000}, CPU, 2, "GiB of memory, and 8.0 GiB are free: lower --scale or --batch"),
    ],
)
def test_what_the_machine_cannot_do_is_said_before_it_is_tried(
    changes: dict[str, Any], machine: Machine, ranks: int, says: str
) -> None:
    one = msgspec.structs.replace(Configuration(model="gpt3-xl", strategy="ddp", batch=1, precision="fp32"), **changes)
    link = "nccl" if machine.num_gpus else "gloo"
    found = why_not(one, scaled(one.model, 0.0625), ranks, link, machine)
    assert says in found
    assert bool(says) == bool(found)


def test_a_model_as_published_does_not_fit_into_a_small_host() -> None:
    one = Configuration(model="gpt3-xl", strategy="ddp", batch=1, precision="fp32")
    assert "lower --scale" in why_not(one, scaled("gpt3-xl", 1), 2, "gloo", CPU)


# -- the results


def measured(start: Any, number: int, seconds: float) -> StudyRow:
    figures = StudyFigures(values={}, num_windows=1, num_steps=5)
    return StudyRow(configuration=start.configurations[number], seconds=seconds, figures=figures)


def test_results_are_read_back_without_the_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    start = make_start({}, CPU)
    study = Study(tmp_path, start)
    file = study.open()
    file.write(measured(start, 1, 9.0))
    with pytest.raises(BusyError, match="another overlap study is at work"):
        study.open()
    file.close()
    with (tmp_path / FILE_NAME).open("ab") as cut:
        cut.write(b'{"line":"row","confi')
    again = study.open()
    again.write(measured(start, 0, 8.0))
    again.close()
    found = Study.read(tmp_path)
    assert (found.start, found.broken_lines) == (start, 1)
    assert [row.seconds for row in found.lines] == [9.0, 8.0]
    assert [point.setting for point in found.left] == list(start.configurations[2:])


def test_a_file_that_is_not_a_study_of_this_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"cannot be read: .*; give the folder of an earlier overlap study"):
        Study.read(tmp_path)
    (tmp_path / FILE_NAME).write_text("{}\n")
    with pytest.raises(ResultsError, match="holds no results of overlap study: its first line is missing"):
        Study.read(tmp_path)
    (tmp_path / FILE_NAME).write_text('{"line":"start","schema":99}\n')
    with pytest.raises(ResultsError, match="has schema version 99, this version reads up to 1: upgrade"):
        Study.read(tmp_path)


def test_a_study_goes_on_where_it_was_begun() -> None:
    start = make_start({}, H100S)
    assert difference(start, H100S) == ""
    assert "it was begun on NVIDIA H100" in difference(start, CPU)
    other = msgspec.structs.replace(H100S, versions={**H100S.versions, "torch": "2.14.0"})
    assert "it was begun with torch 2.13.0, and 2.14.0 is installed now" in difference(start, other)
    fewer = msgspec.structs.replace(H100S, num_gpus=2)
    assert "it was begun with 8 GPUs, and 2 are here" in difference(start, fewer)


def test_a_job_that_would_end_too_late_is_not_begun(tmp_path: Path) -> None:
    start = make_start({"strategies": ["ddp"], "batches": [1, 4]}, CPU)
    study = Study(tmp_path, start, [measured(start, 0, 60.0)])
    # The second has four times the work, and is expected to take longer than the time that is left.
    assert not sweep.run(study, study.trainer(CPU), None, timeout_s=600.0, total_s=100.0)
    assert not (tmp_path / "runs").exists()


def test_what_failed_is_tried_again_if_that_is_asked_for(tmp_path: Path) -> None:
    start = make_start({"strategies": ["ddp", "pp"], "batches": [1], "precisions": ["tf32"]}, CPU)
    study = Study(tmp_path, start)
    for retry, rows in ((False, 2), (False, 2), (True, 4)):
        study.retried = len(study.lines) if retry else 0
        assert sweep.run(study, study.trainer(CPU), None, timeout_s=600.0)
        assert len(study.lines) == rows
        assert study.left == []
    study.lines.append(measured(start, 1, 9.0))
    study.retried = len(study.lines)
    assert [point.setting for point in study.left] == [start.configurations[0]]
