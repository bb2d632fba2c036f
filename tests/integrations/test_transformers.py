from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overlap_callbacks import Mode
from overlap_callbacks.report import record
from overlap_callbacks.sinks.base import chosen
from tests.distributed import captured_log, run_ranks
from tests.integrations.huggingface_jobs import (
    GPT2_BYTES,
    NET_BYTES,
    NUM_STEPS,
    NUM_TOGGLING_STEPS,
    ONE_WINDOW,
    TOGGLING,
    Sentences,
    accelerate_job,
    anatomy,
    digest,
    expect_good,
    overlap_callback,
    sentences,
    the_record,
    trainer,
    watch,
)
from tests.monitor.jobs import dispatch_table, is_pass_through, kept_logs
from tests.toggling import at_night

# Loading it takes seconds, and only the ranks need it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is missing")

RANKS_LOAD = ("transformers.trainer", "accelerate")


# -- weights


def _train_in_four_ways(rank: int, folder: str, accumulate: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    untouched = dispatch_table()
    ways = {"absent": None, "attached": ONE_WINDOW, "toggling": TOGGLING, "forced": ONE_WINDOW}
    for way, options in ways.items():
        callbacks: list[Any] = []
        if options is not None:
            callback = overlap_callback(**options)
            callbacks = [callback, watch(callback, Mode.SEQUENTIAL if way == "forced" else None)]
        steps = NUM_TOGGLING_STEPS if way == "toggling" else NUM_STEPS
        fit = trainer(rank, Path(folder, way), *callbacks, gradient_accumulation_steps=accumulate, max_steps=steps)
        with kept_logs() as logs:
            fit.train()
        found[f"{way} micro-batches"] = {log.micro_batches for log in logs}
        found[way] = callbacks[1].weights if callbacks else digest(fit.model)
        found[f"{way} leaves"] = anatomy(fit.model, fit.model_wrapped, fit.optimizer, fit.optimizer.optimizer)
        if callbacks:
            assert callbacks[0].monitor is None
            found[f"{way} sequential steps"] = callbacks[1].modes[:NUM_STEPS].count(Mode.SEQUENTIAL)
            found[f"{way} calls"] = callbacks[1].calls
        assert dispatch_table() == untouched
    return found


@pytest.mark.parametrize("accumulate", at_night([1, 2], [1]))
def test_the_trainers_weights_are_bit_identical_absent_attached_toggling_and_forced(
    tmp_path: Path, accumulate: int
) -> None:
    ranks = run_ranks(_train_in_four_ways, 2, str(tmp_path), accumulate, timeout_s=120)
    for found in ranks:
        assert found["absent"] == found["attached"] == found["toggling"] == found["forced"]
        assert found["attached micro-batches"] == {accumulate}
        assert found["attached sequential steps"] == 4 + 2
        assert found["toggling sequential steps"] == 8
        assert found["forced sequential steps"] == NUM_STEPS - 1  # all but the recorded one
        for way in ("attached", "toggling", "forced"):
            assert found[f"{way} leaves"] == found["absent leaves"]
            micro_batches = ["micro-batch"] * (accumulate - 1)
            steps = NUM_TOGGLING_STEPS if way == "toggling" else NUM_STEPS
            assert found[f"{way} calls"] == [
                call for step in range(steps) for call in (step, *micro_batches, "optimizer", "end")
            ]
    assert ranks[0]["absent"] == ranks[1]["absent"]
    for way, num_timed, num_windows in (("attached", 8, 1), ("toggling", 16, NUM_TOGGLING_STEPS // 19)):
        run = the_record(tmp_path / way / "overlap_runs")
        assert run.runs[0].framework.startswith("transformers ")
        assert str(run.runs[0].configuration["model"]).startswith("GPT2")
        assert run.runs[0].configuration["gradient_accumulation_steps"] == accumulate
        windows = [window for window in run.windows if window.complete]
        assert len(windows) == num_windows
        for window in windows:
            assert len(window.samples[0].timed) == num_timed
            # Accumulated gradients are reduced in the last micro-batch only.
            expect_good(window, [("allreduce_", 2, GPT2_BYTES, GPT2_BYTES)])


# -- bounds of steps


def _short_last_step(rank: int, folder: str) -> list[Any]:
    callback = overlap_callback()
    seen = watch(callback)
    # 2 ranks with batches of 2: five batches each in an epoch.
    trainer(rank, folder, callback, seen, data=sentences(20), gradient_accumulation_steps=2, max_steps=6).train()
    return seen.calls


def test_a_step_holds_all_its_micro_batches_and_the_last_of_an_epoch_may_be_short(tmp_path: Path) -> None:
    for calls in run_ranks(_short_last_step, 2, str(tmp_path)):
        assert calls == [
            0, "micro-batch", "optimizer", "end", 1, "micro-batch", "optimizer", "end", 2, "optimizer", "end",
            3, "micro-batch", "optimizer", "end", 4, "micro-batch", "optimizer", "end", 5, "optimizer", "end",
        ]  # fmt: skip


def _end_amid_a_step(rank: int, folder: str) -> list[Any]:
    callback = overlap_callback()
    seen = watch(callback)
    fit = trainer(
        rank, folder, callback, seen, data=Sentences(52), gradient_accumulation_steps=2, eval_strategy="epoch"
    )
    fit.train()
    return [call for call in seen.calls if isinstance(call, int)]


def test_a_step_in_which_an_iterable_data_set_ends_goes_on_in_the_next_epoch_and_does_not_count(tmp_path: Path) -> None:
    # 13 batches of 2 for each rank: the 13th is the first half of step 6, which then has two more.
    for begun in run_ranks(_end_amid_a_step, 2, str(tmp_path)):
        assert begun == sorted([*range(NUM_STEPS), 6, 12, 18])
    (window,) = the_record(tmp_path).windows
    assert window.complete
    # Steps 4 to 11 are the timed blocks; the third of them is step 6.
    assert [block.block for block in window.samples[0].timed] == [0, 1, 3, 4, 5, 6, 7]
    # In the recorded step, and none of the evaluation's.
    assert [(c.operator, c.messages) for c in window.collectives] == [("allreduce_", 2)]
    assert not any("left out" in problem for problem in window.problems)


def _evaluate_and_save_meanwhile(rank: int, folder: str) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1}
    trainer(rank, folder, overlap_callback(), **options, save_strategy="steps", save_steps=4).train()


def test_evaluation_logging_and_checkpoints_between_steps_leave_a_window_whole(tmp_path: Path) -> None:
    run_ranks(_evaluate_and_save_meanwhile, 2, str(tmp_path))
    (window,) = the_record(tmp_path).windows
    assert len(window.samples[0].timed) == 8
    expect_good(window, [("allreduce_", 2, GPT2_BYTES, GPT2_BYTES)])


# -- trainings


def _resume(rank: int, folder: str) -> list[list[Any]]:
    found = []
    for part, steps in enumerate((5, 12)):
        callback = overlap_callback(run_dir=Path(folder, f"run{part}"))
        seen = watch(callback)
        fit = trainer(rank, folder, callback, seen, max_steps=steps, save_strategy="steps", save_steps=5)
        fit.train(resume_from_checkpoint=bool(part))
        found.append([call for call in seen.calls if isinstance(call, int)])
    return found


def test_a_resumed_training_goes_on_counting_where_it_was(tmp_path: Path) -> None:
    for first, second in run_ranks(_resume, 2, str(tmp_path)):
        assert first == list(range(5))
        assert second == list(range(5, 12))


def _train_twice(rank: int, folder: str) -> None:
    callback = overlap_callback()
    fit = trainer(rank, folder, callback, include_num_input_tokens_seen=True)
    for _ in range(2):
        fit.train()
        assert callback.monitor is None


def test_several_trainings_in_a_row_are_measured_each(tmp_path: Path) -> None:
    run_ranks(_train_twice, 2, str(tmp_path))
    # In one file where both began within the same second.
    records = [record.read(file) for file in Path(tmp_path, "overlap_runs").rglob("overlap.jsonl")]
    windows = [window for found in records for window in found.windows]
    assert sum(len(found.runs) for found in records) == 2
    assert [(window.complete, window.first_step) for window in windows] == [(True, 3)] * 2
    # Of both ranks, whose batches and sentences have all the same length.
    (tokens,) = {window.tokens_per_step for window in windows}
    assert tokens is not None
    assert tokens > 0
    assert tokens % 2 == 0


class Boom(Exception):
    pass


def _fail_in_a_window(rank: int, folder: str) -> None:
    from transformers import TrainerCallback

    class Explode(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:  # the window's third: sequential
                raise Boom("the user's own")

    callback = overlap_callback(run_dir=Path(folder, "closed"))
    with pytest.raises(Boom, match="the user's own"):
        trainer(rank, folder, callback, Explode()).train()
    callback.close()
    callback.close()
    assert callback.monitor is None
    assert is_pass_through()

    # Whoever does not know of close() may still train again.
    callback = overlap_callback(run_dir=Path(folder, "again"))
    with pytest.raises(Boom, match="the user's own"):
        trainer(rank, folder, callback, Explode()).train()
    trainer(rank, folder, callback).train()


def test_an_exception_passes_through_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    run_ranks(_fail_in_a_window, 2, str(tmp_path))
    failed = record.read(tmp_path / "closed").windows
    again = record.read(tmp_path / "again").windows
    assert [window.complete for window in failed + again] == [False, False, True]
    for window in (failed[0], again[0]):
        assert any("exception in the user's step" in problem for problem in window.problems)
        assert [block.mode for block in window.samples[0].timed] == [Mode.OVERLAPPED]


def _two_callbacks(rank: int, folder: str) -> list[str]:
    with captured_log() as lines:
        fit = trainer(rank, folder, overlap_callback(), overlap_callback(strict=False, run_dir=Path(folder, "second")))
        fit.train()
    return lines


def test_a_second_callback_on_one_trainer_is_switched_off_with_one_warning(tmp_path: Path) -> None:
    for lines in run_ranks(_two_callbacks, 2, str(tmp_path)):
        (line,) = lines
        assert "another OverlapMonitor of this process" in line
    expect_good(the_record(tmp_path / "overlap_runs").windows[0], [("allreduce_", 2, GPT2_BYTES, GPT2_BYTES)])


def _log_to_wandb(rank: int, folder: str) -> None:
    import wandb

    from tests.wandb_reader import SETTINGS

    os.environ.update(WANDB_DIR=folder, HOME=folder, WANDB_ERROR_REPORTING="false")
    if rank == 0:
        wandb.init(project="test", dir=folder, settings=wandb.Settings(**SETTINGS))
    trainer(rank, folder, overlap_callback(), report_to=["wandb"], logging_steps=2).train()
    if rank == 0:
        wandb.finish()


def test_the_trainers_wandb_run_gets_metrics_on_an_axis_of_their_own_and_loses_none_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from tests.wandb_reader import read_run

    run_ranks(_log_to_wandb, 2, str(tmp_path), timeout_s=90)
    run = read_run(tmp_path)
    # Again in a row of the tables' own, if the Trainer logged in between. Parts of steps have a row at their last step.
    (parts_at,) = {row["overlap/step"] for row in run.history if any(key.startswith("parts/") for key in row)}
    assert set(run.values("overlap/step")) == {3, parts_at}
    assert 3 < parts_at < NUM_STEPS
    assert len(run.values("overlap/e2e_sequential_ms")) == 1
    assert run.metrics["overlap/e2e_sequential_ms"]["step_metric"] == "overlap/step"
    assert len(run.values("train/loss")) == NUM_STEPS // 2


def _log_to_tensorboard(rank: int, folder: str) -> int:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(Path(folder, "events"))
    callback = overlap_callback(every_n_steps=20)
    # The last report comes after the last step.
    fit = trainer(rank, folder, callback, report_to=["tensorboard"], logging_steps=2, max_steps=36)
    fit.train()
    assert callback.monitor is None
    return sum("overlap" in key for row in fit.state.log_history for key in row)


def test_other_loggers_of_report_to_get_the_short_set_and_keep_their_own(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert run_ranks(_log_to_tensorboard, 2, str(tmp_path), timeout_s=120) == [0, 0]
    (file,) = Path(tmp_path, "events").rglob("events.out.*")  # of the Trainer's own writer: none was opened again
    events = accumulator.EventAccumulator(str(file.parent))
    events.Reload()
    keys = {key.removeprefix("train/") for key in events.Tags()["scalars"]}
    windows = the_record(tmp_path / "overlap_runs").windows
    own = {key for key in keys if "/" in key}
    assert own == {value.key for value in chosen(windows[0].values(), "short")}
    assert len(own) == 11  # no power on a CPU, and no verdict
    speedups = events.Scalars("train/overlap/speedup_vs_sequential")
    assert [event.step for event in speedups] == [window.first_step for window in windows] == [3, 23]
    assert len(events.Scalars("train/loss")) == 36 // 2


# -- Accelerate


def _accelerate_in_four_ways(rank: int, folder: str, accumulate: int) -> dict[str, Any]:
    from overlap_callbacks.integrations.transformers import attach_accelerate

    found: dict[str, Any] = {}
    ways = {"absent": None, "attached": ONE_WINDOW, "toggling": TOGGLING, "forced": ONE_WINDOW}
    for way, options in ways.items():
        accelerator, model, optimizer, loader = accelerate_job(rank, accumulate)
        before = anatomy(model, optimizer, optimizer.optimizer)
        monitor = None
        if options is not None:
            monitor = attach_accelerate(optimizer, run_dir=Path(folder, way), **options)
            if way == "forced":
                monitor.force(Mode.SEQUENTIAL)
        steps, modes = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                if monitor is not None:
                    steps.append(monitor.last_step)
                    modes.append(monitor.mode)
                optimizer.step()
                optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
            found[f"{way} steps"] = steps
            found[f"{way} sequential"] = modes.count(Mode.SEQUENTIAL)
        found[way] = digest(model)
        after = anatomy(model, optimizer, optimizer.optimizer)
        assert after == before
    return found


@pytest.mark.parametrize("accumulate", at_night([1, 2], [1]))
def test_an_accelerate_loops_weights_are_bit_identical_absent_attached_toggling_and_forced(
    tmp_path: Path, accumulate: int
) -> None:
    for found in run_ranks(_accelerate_in_four_ways, 2, str(tmp_path), accumulate, timeout_s=90):
        assert found["absent"] == found["attached"] == found["toggling"] == found["forced"]
        assert found["attached sequential"] == accumulate * (4 + 2)
        assert found["toggling sequential"] == accumulate * 8
        # All but the one under way when we attached, and the recorded one.
        assert found["forced sequential"] == accumulate * (NUM_STEPS - 2)
        for way in ("attached", "toggling"):
            # No step is known until the first has ended.
            assert found[f"{way} steps"] == [-1] * accumulate + [
                step for step in range(1, NUM_STEPS) for _ in range(accumulate)
            ]
    for way in ("attached", "toggling"):
        (window,) = the_record(tmp_path / way).windows
        expect_good(window, [("allreduce_", 1, NET_BYTES, NET_BYTES)])


def _accelerate_resumed(rank: int, folder: str) -> None:
    from overlap_callbacks.integrations.transformers import attach_accelerate

    accelerator, model, optimizer, loader = accelerate_job(rank)
    with attach_accelerate(optimizer, start_step=100, run_dir=folder, **ONE_WINDOW) as monitor:
        for index, batch in enumerate(loader):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if index == 8:
                with monitor.pause():
                    accelerator.gather(torch.ones(3))  # an evaluation's


def test_an_accelerate_loop_resumes_and_an_evaluation_in_a_pause_costs_its_step_only(tmp_path: Path) -> None:
    run_ranks(_accelerate_resumed, 2, str(tmp_path))
    (window,) = the_record(tmp_path).windows
    assert window.first_step == 103
    assert window.complete
    # The pause lay in step 109, which is the window's seventh.
    assert [block.block for block in window.samples[0].timed] == [0, 1, 2, 3, 4, 6, 7]
    assert [(c.operator, c.messages) for c in window.collectives] == [("allreduce_", 1)]


def test_what_accelerate_did_not_prepare_is_refused_by_name() -> None:
    from overlap_callbacks.integrations.transformers import attach_accelerate

    plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"what accelerator.prepare gave, got SGD"):
        attach_accelerate(plain)


# -- options


def test_an_unknown_option_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(TypeError, match=r"unknown options \['every'\].*every_n_steps"):
        overlap_callback(every=3)


@pytest.mark.parametrize("name", ["transformers", "accelerate"])
def test_without_the_packages_the_import_names_the_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "overlap_callbacks.integrations.transformers", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'overlap-callbacks\[transformers\]'"):
        importlib.import_module("overlap_callbacks.integrations.transformers")
