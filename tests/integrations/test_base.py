from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_callbacks import JsonlSink, OverlapMonitor, OverlapReport, Sink, WandbSink
from overlap_callbacks.integrations import base
from overlap_callbacks.integrations.base import (
    KNOWN_TO_WORK,
    Attachments,
    build_monitor,
    check_version,
    flush_sinks,
    is_native,
    missing_of,
    patch,
    switched_off,
    wrap,
)
from overlap_callbacks.monitor.background.store import Job
from overlap_callbacks.monitor.config import default_run_folder
from overlap_callbacks.sinks import FunctionSink
from tests.distributed import captured_log
from tests.integrations.test_lines_gone_wrong import needs
from tests.report.runs import window


class Keep(Sink):
    def log(self, report: OverlapReport) -> None:
        pass


def fail(given: list[Sink] | None, folder: Path) -> list[Sink]:
    raise OSError("no network")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_dir": 5}, "run_dir must be the path of a folder, got 5 (a int)"),
        ({"sinks": 5}, "sinks must be a list of Sink objects, got 5 (a int)"),
        ({"sinks": [5]}, "sinks must be a list of Sink objects, got 5 (a int) in it"),
    ],
)
def test_a_wrong_value_raises(options: dict[str, Any], said: str) -> None:
    for strict in (False, True):
        with pytest.raises(TypeError) as raised:
            build_monitor("pytorch", {**options, "strict": strict}, sinks=lambda given, folder: [*(given or [])])
        assert str(raised.value) == said


def test_sinks_that_fail_cost_the_measuring_and_one_line_and_raise_if_strict() -> None:
    with captured_log() as lines:
        assert not build_monitor("pytorch", {}, sinks=fail).active
    (line,) = lines
    assert line.endswith("training goes on: no network [OC105]")
    with pytest.raises(OSError, match="no network"):
        build_monitor("pytorch", {"strict": True}, sinks=fail)


@pytest.mark.parametrize(("given", "seen"), [(None, None), ([], 0), ((Keep(),), 1), (Keep(), 1)])
def test_an_adapter_adds_its_sinks_to_those_given_in_whatever_form(
    tmp_path: Path, given: Any, seen: int | None
) -> None:
    found: list[Any] = []

    def add(sinks: list[Sink] | None, folder: Path) -> list[Sink]:
        found.append((None if sinks is None else len(sinks), folder))
        return [*(sinks or []), JsonlSink(folder)]

    monitor = build_monitor("pytorch", {"sinks": given, "run_dir": str(tmp_path), "strict": True}, sinks=add)
    assert monitor.active
    assert found == [(seen, tmp_path)]
    assert monitor.run_dir == tmp_path
    monitor.close()


def test_the_default_folder_lies_below_the_adapters_root_and_is_not_made_yet(tmp_path: Path) -> None:
    monitor = build_monitor("pytorch", {"strict": True}, root=tmp_path)
    assert monitor.run_dir.parent == tmp_path / "overlap_runs"
    monitor.close()
    assert list(tmp_path.iterdir()) == []


def test_runs_that_begin_in_one_second_have_a_folder_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.localtime()
    monkeypatch.setattr(time, "strftime", lambda form, now=now, strftime=time.strftime: strftime(form, now))
    random.seed(0)
    state = random.getstate()
    folders = [default_run_folder() for _ in range(50)]
    assert len(set(folders)) == 50
    assert random.getstate() == state
    stamp = time.strftime("%Y%m%d-%H%M%S")
    assert all(folder.name.startswith(f"{stamp}-") for folder in folders)
    assert default_run_folder("demo-").name.startswith(f"demo-{stamp}-")


def test_an_error_of_an_adapter_is_one_warning_and_raised_if_strict() -> None:
    error = RuntimeError("no process group")
    with captured_log() as lines:
        assert not switched_off("pytorch", error).active
    assert lines == ["overlap-callbacks: measuring is switched off, training goes on: no process group [OC105]"]
    with captured_log() as lines, pytest.raises(RuntimeError) as raised:
        switched_off("pytorch", error, strict=True)
    assert raised.value is error
    assert lines == []


def test_sequential_is_gate_or_native_and_nothing_else() -> None:
    assert not is_native("gate")
    assert is_native("native")
    with pytest.raises(ValueError, match=r"sequential must be 'gate' or 'native', got None \(a NoneType\)"):
        is_native(None)  # type: ignore[arg-type]


def test_a_version_that_lacks_something_is_refused_with_those_that_work() -> None:
    missing = missing_of(Keep(), "log", "flush", "drop")
    assert missing == ["Keep.flush", "Keep.drop"]
    check_version("deepspeed", "0.1", [])
    with pytest.raises(RuntimeError) as raised:
        check_version("deepspeed", "0.1", missing)
    known = KNOWN_TO_WORK["deepspeed"]
    assert str(raised.value) == (
        f"deepspeed 0.1 has no Keep.flush and no Keep.drop, which is needed here; known to work: {known}"
    )


# -- replacing a framework's functions


class Framework:
    def step(self, number: int, *, scale: int = 1) -> int:
        """Train."""
        return number * scale


def plus_one(step: Any, *args: Any, **kwargs: Any) -> int:
    return int(step(*args, **kwargs)) + 1


def test_a_wrapped_method_passes_arguments_on_and_is_put_back_on_an_object() -> None:
    framework, other = Framework(), Framework()
    undo = wrap(framework, "step", plus_one)
    assert framework.step(3, scale=2) == 7
    assert other.step(3) == 3
    assert framework.step.__doc__ == "Train."
    undo()
    assert vars(framework) == {}  # it is the class's method again, not a copy of it


def test_a_wrapped_method_of_a_class_gets_its_object_and_is_put_back() -> None:
    before = dict(vars(Framework))
    undo = wrap(Framework, "step", plus_one)
    assert Framework().step(3, scale=2) == 7
    undo()
    assert dict(vars(Framework)) == before


def test_an_attribute_of_the_objects_own_is_put_back_even_if_it_was_none() -> None:
    framework: Any = Framework()
    framework.hook = None
    undo = patch(framework, "hook", plus_one)
    assert framework.hook is plus_one
    undo()
    assert vars(framework) == {"hook": None}


def test_what_somebody_else_has_replaced_since_is_left_alone() -> None:
    framework: Any = Framework()
    undo = wrap(framework, "step", plus_one)
    undo_outer = wrap(framework, "step", plus_one)
    outer = framework.step
    undo()
    assert framework.step is outer
    assert framework.step(3) == 5
    undo_outer()
    undo()
    assert vars(framework) == {}


def test_an_object_takes_one_monitor_at_a_time() -> None:
    attachments = Attachments("optimizer")
    target, other = Framework(), Framework()
    monitor = OverlapMonitor(sinks=[])
    attachments.check_free(target)
    attachments.add(target, monitor)
    attachments.check_free(other)
    with pytest.raises(ValueError, match="optimizer is attached to already: use that"):
        attachments.check_free(target)
    monitor.close()
    attachments.check_free(target)


# -- loggers


def test_a_deferred_sink_that_fails_is_written_no_more_and_the_others_go_on() -> None:
    written: list[int] = []

    def refuse(metrics: dict[str, float], step: int) -> None:
        raise OSError("no space left")

    broken = FunctionSink(refuse, deferred=True)
    kept = FunctionSink(lambda metrics, step: written.append(step), deferred=True)
    sinks = [broken, kept]
    monitor = OverlapMonitor(sinks=[])
    with captured_log() as lines:
        for number in (0, 1):
            for sink in (broken, kept):
                sink.log(window(number))
            flush_sinks(sinks, monitor)
    assert sinks == [kept]
    assert written == [20, 520]
    (line,) = lines
    assert "failed and is not used again, the rest goes on: no space left" in line
    broken.close()  # nothing is left that it would write
    monitor.close()


@pytest.mark.parametrize("is_over", [False, True])
def test_a_process_does_not_end_within_its_part_of_the_roll_call(monkeypatch: Any, is_over: bool) -> None:
    left: list[str] = []
    call = SimpleNamespace(wait=lambda _: None, is_over=is_over, agreed=False, leave=lambda: left.append("left"))
    at_exit: list[Any] = []
    monkeypatch.setattr(base, "RollCall", lambda *_: call)
    monkeypatch.setattr(base, "atexit", SimpleNamespace(register=at_exit.append))
    monkeypatch.setattr(Job, "current", lambda: Job(0, 2, "gloo"))
    monkeypatch.setenv("OVERLAP_CALLBACKS", "off")
    assert not build_monitor("a framework", {"sinks": []}).active
    for each in at_exit:
        each()
    assert left == ([] if is_over else ["left"])


@needs("lightning")
def test_lightning_keeps_to_the_sinks_that_are_given_and_adds_one_for_wandb_at_most(tmp_path: Path) -> None:
    from overlap_callbacks.integrations.lightning import OverlapCallback

    class WandbLogger:
        experiment = None

    class OwnLogger(WandbLogger):
        pass

    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[OwnLogger()])
    own = WandbSink()
    for given, kinds in (([], [WandbSink]), (None, [JsonlSink, WandbSink]), ([own], [WandbSink])):
        found = OverlapCallback()._sinks(trainer, given, tmp_path)
        assert [type(sink) for sink in found] == kinds
    assert found == [own]
