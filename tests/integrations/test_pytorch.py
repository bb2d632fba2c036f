from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from overlap_callbacks import Mode
from overlap_callbacks.instruments import clocks, device
from overlap_callbacks.integrations.pytorch import attach
from overlap_callbacks.report import record
from tests.distributed import captured_log, run_ranks
from tests.interpreters import run_interpreters
from tests.monitor.jobs import KeptReports, Training, digest_without_library, tiny_schedule

TINY = {"repeats": 1, "steps_per_block": 1, "warmup_steps": 0, "profiled_steps": 0}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _force_around_steps(rank: int, folder: str) -> list[list[Mode]]:
    model, optimizer = model_and_optimizer()
    monitor = attach(optimizer, run_dir=folder, strict=True)

    def train(steps: int) -> list[Mode]:
        modes = []
        for _ in range(steps):
            model(torch.ones(2, 16)).sum().backward()
            modes.append(monitor.mode)  # of the step that the optimizer is about to end
            optimizer.step()
        return modes

    before = train(3)
    with monitor.forced(Mode.SEQUENTIAL):
        inside = train(6)
    after = train(3)
    monitor.close()
    return [before, inside, after]


def test_a_forced_mode_begins_after_the_step_under_way_and_the_recorded_one_and_ends_at_once(tmp_path: Path) -> None:
    ov, seq = Mode.OVERLAPPED, Mode.SEQUENTIAL
    for before, inside, after in run_ranks(_force_around_steps, 2, str(tmp_path)):
        assert before == [ov] * 3
        assert inside == [ov, ov, seq, seq, seq, seq]
        assert after == [ov] * 3


def _force_at_each_step(rank: int, folder: str, modes: list[Mode | None]) -> tuple[list[Mode], int]:
    model, optimizer = model_and_optimizer()
    seen = []
    with attach(optimizer, first_step=3, every_n_steps=100, run_dir=folder, strict=True) as monitor:
        for mode in modes:
            monitor.force(mode)
            model(torch.ones(2, 16)).sum().backward()
            seen.append(monitor.mode)
            optimizer.step()
    return seen, len(record.read(folder).windows) if rank == 0 else 0


def test_modes_that_are_forced_at_each_step_are_those_of_the_next_step(tmp_path: Path) -> None:
    ov, seq = Mode.OVERLAPPED, Mode.SEQUENTIAL
    # Of the first step nothing is known yet: the next one is recorded.
    toggled = run_ranks(_force_at_each_step, 2, str(tmp_path / "toggled"), [seq, seq, seq, ov, seq, ov, seq, ov, ov])
    kept = run_ranks(_force_at_each_step, 2, str(tmp_path / "kept"), [seq] * 6)
    for rank in range(2):
        assert toggled[rank][0] == [ov, ov, seq, seq, ov, seq, ov, seq, ov]
        assert kept[rank][0] == [ov, ov, seq, seq, seq, seq]
    # None where nothing is pinned cuts no window short.
    plain = run_ranks(_force_at_each_step, 2, str(tmp_path / "plain"), [None] * 100)
    assert plain[0][0].count(seq) > 8
    assert plain[0][1] == 1


def _evaluate_between_steps(rank: int, folder: str) -> None:
    model, optimizer = model_and_optimizer()
    options: dict[str, Any] = {
        "spread": False,
        "every_n_steps": 30,
        "first_step": 3,
        "repeats": 2,
        "steps_per_block": 1,
    }
    with attach(optimizer, **options, profiled_steps=2, run_dir=folder, strict=True) as monitor:
        for step in range(30):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 8:
                with monitor.pause():
                    dist.all_reduce(torch.ones(3))  # an evaluation's


def test_an_evaluation_within_a_pause_costs_its_step_and_leaves_the_window_whole(tmp_path: Path) -> None:
    run_ranks(_evaluate_between_steps, 2, str(tmp_path))
    (window,) = record.read(tmp_path).windows
    assert window.complete
    assert window.valid
    for picture in window.pictures:
        assert picture.detail is not None
        drawn = set(zip(picture.detail.names, picture.detail.communication, strict=True))
        assert {communicates for _, communicates in drawn} == {False, True}
        assert picture.detail.left_out == 0
        assert all(0 <= start_ms <= picture.step_ms for _, _, start_ms, *_ in picture.detail.slices)
        assert all(row.min_ms <= row.median_ms <= row.max_ms for row in picture.call_times)
        kernels = {name.partition(": ")[2] for name, communicates in drawn if communicates}  # after the collective's
        assert {row.name for row in picture.call_times} >= kernels
    # The pause lay in step 9, the seventh of the window: its third block's counted step.
    assert [block.block for block in window.samples[0].timed] == [0, 1, 3, 4, 5, 6, 7]
    assert not any("left out" in problem for problem in window.problems)


def _capture_the_step(rank: int, folder: str, captured_at: int) -> tuple[list[str], int, list[str]]:
    """What touches the device while ``optimizer.step()`` is captured twice in the loop, the last step, and the log."""
    capturing = False
    touched: list[str] = []
    usual_mark, usual_poll = clocks.StepClock.mark, clocks.HostTimes.poll

    def noted(name: str, usual: Any) -> Any:
        def call(*args: Any) -> Any:
            if capturing:
                touched.append(name)
            return usual(*args)

        return call

    accelerator = SimpleNamespace(is_initialized=lambda: True, is_capturing=lambda: capturing)
    with (
        mock.patch.object(clocks.StepClock, "mark", noted("mark", usual_mark)),
        mock.patch.object(clocks.HostTimes, "poll", noted("poll", usual_poll)),
        mock.patch.object(device, "accelerator", return_value=accelerator),
        captured_log(level=logging.INFO) as lines,
    ):
        model, optimizer = model_and_optimizer()
        with attach(
            optimizer, **TINY, spread=False, every_n_steps=20, first_step=2, run_dir=folder, strict=True
        ) as monitor:
            for place in range(20):
                capturing = place in (captured_at, captured_at + 1)
                model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                capturing = False
        return touched, monitor.last_step, [line for line in lines if "OC127" in line]


@pytest.mark.parametrize("captured_at", [3, 6])
def test_a_graph_that_captures_the_optimizer_s_step_within_a_window_is_left_alone(
    tmp_path: Path, captured_at: int
) -> None:
    ranks = run_ranks(_capture_the_step, 2, str(tmp_path), captured_at)
    for touched, last_step, _ in ranks:
        assert touched == []
        assert last_step == 18  # a capture trains nothing, and is no step
    said = "overlap-callbacks: optimizer.step() was captured in a CUDA graph: replayed steps are not measured [OC127]"
    assert [lines for *_, lines in ranks] == [[said], []]
    assert record.read(tmp_path).windows


def _replay_alone(rank: int, folder: str, later: bool) -> tuple[int, list[bool], bool]:
    """From a capture on the job replays: steps that the window had left, whether it was open after each, and the end.

    ``later``: a step that calls the hook comes in between.
    """
    capturing = False
    accelerator = SimpleNamespace(is_initialized=lambda: True, is_capturing=lambda: capturing)
    replay = mock.MagicMock(__name__="replay", return_value=None)
    with (
        mock.patch.object(device, "accelerator", return_value=accelerator),
        mock.patch.object(torch.cuda.CUDAGraph, "replay", replay),
    ):
        model, optimizer = model_and_optimizer()

        def train() -> None:
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()

        options = {
            **TINY,
            "repeats": 2,
            "spread": False,
            "every_n_steps": 99,
            "first_step": 2,
            "run_dir": folder,
            "strict": True,
        }
        with attach(optimizer, **options) as monitor:
            for _ in range(5):
                train()
            capturing = True
            train()
            capturing = False
            left, is_open = monitor.steps_left, []
            for number in range(left + 1):
                if later and number == left - 1:
                    train()
                torch.cuda.CUDAGraph.replay(None)  # type: ignore[arg-type]
                is_open.append(monitor.in_window)
        return left, is_open, torch.cuda.CUDAGraph.replay is replay


@pytest.mark.parametrize("later", [False, True])
def test_a_window_ends_where_its_plan_does_if_the_job_only_replays_a_graph(tmp_path: Path, later: bool) -> None:
    for left, is_open, undone in run_ranks(_replay_alone, 2, str(tmp_path), later):
        assert left > 2
        assert undone
        assert is_open == [True] * (left - 1 + 2 * later) + [False] * (2 - 2 * later)
    (window,) = record.read(tmp_path).windows
    cut_short = any(problem.startswith("cut short: optimizer.step() was captured") for problem in window.problems)
    assert cut_short is not later


def _compile_the_step(rank: int, attached: bool) -> tuple[list[str], list[float], int]:
    import torch._dynamo

    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    monitor = attach(optimizer, sinks=[], power=False, strict=True, start_step=3) if attached else None
    step = torch.compile(optimizer.step, backend="eager")
    for value in range(4):
        weight.grad = torch.full((4,), float(value))
        step()
    steps = 0
    if monitor is not None:
        steps = monitor.last_step
        monitor.close()
    return sorted(torch._dynamo.utils.counters["graph_break"]), weight.tolist(), steps


def test_a_compiled_optimizer_step_is_traced_as_without_the_library_and_its_steps_are_counted() -> None:
    for (breaks, weights, _), (ours, same, steps) in zip(
        run_ranks(_compile_the_step, 2, False), run_ranks(_compile_the_step, 2, True), strict=True
    ):
        assert ours == breaks
        assert same == weights
        assert steps == 3 + 4


def test_an_argument_that_is_not_an_optimizer_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got None"):
        attach(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("start_step", [-1, 2.0, True])
def test_a_start_step_that_cannot_be_is_an_error(start_step: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for strict in (False, True):
        with pytest.raises((TypeError, ValueError), match=r"start_step must be .*at least 0, got"):
            attach(optimizer, start_step=start_step, strict=strict)


def end_without_close(folder: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every_n_steps": 30, "first_step": 2, "repeats": 2, "profiled_steps": 0, "run_dir": f"{folder}/run"}
    kept.extend([model, optimizer, attach(optimizer, **options, advanced={"spread": False, "steps_per_block": 1})])
    for _ in range(25):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    print("done")


kept: list[Any] = []  # as the variables of a script's top level are: alive until the interpreter ends


def test_a_script_that_ends_without_close_ends_quietly_and_its_windows_are_in_the_record(tmp_path: Path) -> None:
    for rank in run_interpreters(end_without_close, 2, str(tmp_path)):
        assert rank.code == 0, rank
        assert rank.output.endswith("done\n")  # the last word of both streams
        assert "Traceback" not in rank.output
    assert [window.window for window in record.read(tmp_path / "run").windows] == [0]


# -- a loss scaler


def _train_with_a_scaler(rank: int) -> tuple[list[int], list[int], list[str], str]:
    """In steps 9 and 14 of the loop the gradients overflow, and the scaler leaves the optimizer's step out."""
    sink = KeptReports()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    schedule = tiny_schedule(spread=False, every_n_steps=100, first_step=2, blocks="OS", repeats=8)
    monitor = attach(optimizer, schedule=schedule, sinks=[sink], max_overhead=None, strict=True)
    stepped = []
    for number in range(24):
        optimizer.zero_grad()
        batch = torch.randn(4, 8) * (float("inf") if number in (9, 14) else 1.0)
        before = model.module[0].weight.detach().clone()
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        stepped.append(not torch.equal(before, model.module[0].weight))
    monitor.close()
    blocks = [block.block for report in sink.reports for block in report.samples[0].timed]
    problems = [problem for report in sink.reports for problem in report.problems]
    return [number for number, did in enumerate(stepped) if not did], blocks, problems, str(monitor.active)


def test_a_step_that_a_loss_scaler_left_out_does_not_count_twice_over() -> None:
    found = run_ranks(_train_with_a_scaler, 2)
    assert all(skipped == [9, 14] for skipped, *_ in found)
    _, blocks, problems, _ = found[0]
    # A step reaches from one optimizer step to the next, so two of them hold two batches each.
    assert len(blocks) == 14
    (problem,) = problems
    assert problem.startswith("the job has 2 kinds of steps: 14 with 1 collective, 2 with 2 collectives; left out,")


def train_attached(rank: int, folder: str) -> dict[str, Any]:
    training = Training(rank, micro_batches=3)
    before = len(training.optimizer._optimizer_step_post_hooks)
    monitor = attach(
        training.optimizer, run_dir=folder, max_overhead=None, spread=False, every_n_steps=10, first_step=5, **TINY
    )
    numbers, in_window = [], []
    with captured_log() as lines:
        for _ in range(30):
            numbers.append(monitor.last_step)
            in_window.append(monitor.in_window)
            training.step()
        hooks = len(training.optimizer._optimizer_step_post_hooks) - before
        monitor.close()
        hooks_left = len(training.optimizer._optimizer_step_post_hooks) - before
        training.step()
    return {
        "lines": lines,
        "numbers": numbers,
        "in_window": [step for step, inside in enumerate(in_window) if inside],
        "hooks": (hooks, hooks_left),
        "last": monitor.last_step,
        "same": training.digest() == digest_without_library(rank, 31, micro_batches=3),
    }


def test_attach_counts_optimizer_steps_whatever_their_micro_batches_and_takes_its_hook_off(tmp_path):
    for found in run_ranks(train_attached, 2, str(tmp_path)):
        assert found["lines"] == []
        # The step that was under way when it was attached began unseen.
        assert found["numbers"] == [-1, *range(1, 30)]
        assert found["in_window"] == [*range(5, 10), *range(15, 20), *range(25, 30)]
        assert found["hooks"] == (1, 0)
        assert found["last"] == 30
        assert found["same"]
    run = record.read(tmp_path)
    assert [(window.first_step, window.num_steps) for window in run.windows] == [(5, 5), (15, 5), (25, 5)]
    assert run.runs[0].framework == f"pytorch {torch.__version__}"
    assert run.runs[0].configuration.keys() >= {"optimizer", "parameters", "parameter_types", "shapes"}


def resume_attached(rank: int) -> list[int]:
    training = Training(rank)
    monitor = attach(training.optimizer, sinks=[], start_step=40, every_n_steps=10, first_step=5, **TINY)
    steps_in_windows = []
    for _ in range(10):
        steps_in_windows += [monitor.last_step] if monitor.in_window else []
        training.step()
    monitor.close()
    return steps_in_windows


def test_attach_goes_on_with_the_schedule_where_a_resumed_job_was():
    assert run_ranks(resume_attached, 2) == [[*range(45, 50)]] * 2
