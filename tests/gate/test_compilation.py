"""torch.compile: the gate has nothing compiled that would not be compiled without it, and says where it was."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from overlap_callbacks.gate.dispatcher import CompileWatch, dispatcher
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.monitor.placement import PhaseBalance
from overlap_callbacks.monitor.schedule import Part
from tests.distributed import captured_log, run_ranks
from tests.gate.test_threads import step_of
from tests.monitor.jobs import KeptReports, kept_logs, new_monitor, tiny_schedule


class Model(torch.nn.Module):
    """Communicates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = functional.all_reduce(self.layer(batch), "sum", dist.group.WORLD)
        return functional.wait_tensor(found)


class CompiledJob:
    """A compiled model, how often it was compiled, and what comes of its steps."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.compilations = 0
        self.losses: list[float] = []
        self._model = torch.compile(Model(), backend=self._count, dynamic=False)

    def step(self, size: int = 2) -> None:
        with torch.no_grad():
            self.losses.append(self._model(torch.ones(size, 4)).sum().item())

    def _count(self, graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        self.compilations += 1
        return graph.forward


# -- a gate with compiled code


def compile_before_the_gate(rank: int) -> dict[str, Any]:
    job, gate = CompiledJob(), Gate()
    job.step()
    compiled = job.compilations
    with captured_log(level=20) as lines:
        gate.register()
        logs = [step_of(gate, job.step) for _ in range(3)]
    job.step()
    gate.close()
    job.step()
    return {
        "compiled": (compiled, job.compilations),
        "seen": [[c.operator for c in log.collectives] for log in logs],
        "flagged": [log.compiled for log in logs],
        "lines": lines,
        "losses": len(set(job.losses)),
    }


def test_code_that_was_compiled_before_is_not_compiled_again_and_its_collectives_are_seen():
    for found in run_ranks(compile_before_the_gate, 2):
        assert found["compiled"] == (1, 1)
        assert found["seen"] == [["allreduce_"]] * 3
        assert found["flagged"] == [False] * 3
        (line,) = found["lines"]
        assert "torch.compile is in use" in line
        assert found["losses"] == 1


def compile_for_the_first_time_in_a_step(rank: int) -> dict[str, Any]:
    job, gate = CompiledJob(), Gate()
    gate.register()
    logs = [step_of(gate, job.step) for _ in range(3)]
    within = job.compilations
    job.step()
    gate.close()
    job.step()
    return {
        "compiled": (within, job.compilations),
        "flagged": [log.compiled for log in logs],
        "foreign": [log.foreign for log in logs],
        "seen_later": [[c.operator for c in log.collectives] for log in logs[1:]],
    }


def test_code_that_is_first_compiled_in_a_measured_step_is_compiled_once_and_the_step_is_flagged():
    for found in run_ranks(compile_for_the_first_time_in_a_step, 2):
        assert found["compiled"] == (1, 1)
        assert found["flagged"] == [True, False, False]
        assert found["foreign"] == [(), (), ()]  # what passed unseen was the step's own
        assert found["seen_later"] == [["allreduce_"]] * 2


def compile_by_an_operator(rank: int, at_first: bool) -> tuple[bool, bool, bool]:
    """flex_attention compiles by itself, without torch.compile in the job, as one whole graph."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend() -> None:
        flex_attention(*(torch.randn(1, 1, 16, 16) for _ in range(3)))

    torch._dynamo.utils.counters.clear()
    if at_first:
        attend()
    gate = Gate()
    gate.register()
    at_own_key = dispatcher.placement is dispatcher.own_key
    flags = [step_of(gate, attend).compiled for _ in range(2)]
    gate.close()
    return at_own_key, *flags


@pytest.mark.parametrize(("at_first", "expected"), [(True, (False, False, False)), (False, (True, True, False))])
def test_a_compilation_that_the_job_did_not_ask_for_is_noticed_too(at_first, expected):
    assert run_ranks(compile_by_an_operator, 1, at_first) == [expected]


def train_without_compiling(rank: int) -> tuple[bool, bool]:
    gate = Gate()
    gate.register()
    log = step_of(gate, dist.barrier)
    gate.close()
    return log.compiled, dispatcher.placement is dispatcher.own_key


def test_a_job_that_does_not_compile_is_not_flagged_though_torch_compile_is_loaded():
    assert run_ranks(train_without_compiling, 2) == [(False, True)] * 2


def compile_within_a_backward(rank: int, measured: bool) -> tuple[int, int]:
    """Twelve nodes of one backward call what is wrapped and compiled there for the first time."""
    compilations = 0
    compiled: Any = None

    def backend(graph: Any, _: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            nonlocal compiled
            compiled = compiled or torch.compile(lambda x: x * 2 + 1, backend=backend, fullgraph=True)
            return compiled(gradient)

    def step() -> None:
        y = torch.ones(4, requires_grad=True)
        for _ in range(12):
            y = Node.apply(y)
        y.sum().backward()

    if not measured:
        step()
        return compilations, compilations
    gate = Gate()
    gate.register()
    assert dispatcher.placement is dispatcher.own_key
    step_of(gate, step)
    within = compilations
    for _ in range(3):
        step_of(gate, step)
        step()
    gate.close()
    return within, compilations


def test_what_a_backward_compiles_is_compiled_as_often_as_without_the_gate_and_once_more_at_most_later():
    ((without, _),) = run_ranks(compile_within_a_backward, 1, False)
    ((within, in_all),) = run_ranks(compile_within_a_backward, 1, True)
    assert within == without
    assert in_all <= 2 * without


def wrap_without_calling(rank: int) -> bool:
    compiled = torch.compile(lambda x: x + 1)
    gate = Gate()
    gate.register()
    at_own_key = dispatcher.placement is dispatcher.own_key
    gate.close()
    del compiled
    return at_own_key


def test_what_is_wrapped_and_never_called_costs_a_job_nothing():
    assert run_ranks(wrap_without_calling, 1) == [True]


# -- in windows


SCHEDULE = {
    "spread": False,
    "every_n_steps": 12,
    "first_step": 3,
    "repeats": 1,
    "steps_per_block": 2,
    "warmup_steps": 0,
}
WINDOW_STEPS = 1 + 4 * 2


def train_with_another_shape(rank: int, odd_step: int) -> dict[str, Any]:
    """Train two windows and a bit; step ``odd_step`` has a batch of a size that is new to the compiled model."""
    job, sink = CompiledJob(), KeptReports()
    monitor = new_monitor(sink, schedule=tiny_schedule(**SCHEDULE))
    with captured_log(level=20) as lines, kept_logs() as logs:
        for step in range(26):
            with monitor.step():
                job.step(3 if step == odd_step else 2)
        monitor.close()
    return {
        "lines": lines,
        "compilations": job.compilations,
        "flagged": [log.compiled for log in logs],
        "windows": [(report.complete, report.first_step) for report in sink.reports],
        "problems": [list(report.problems) for report in sink.reports],
        "counted": [{block.block: len(block.step_ms) for block in report.samples[0].timed} for report in sink.reports],
    }


def test_a_step_of_a_window_in_which_a_shape_is_compiled_does_not_count_and_the_report_says_so():
    odd_step = 3 + 1 + 2  # the first step of the second block
    schedule = tiny_schedule(**SCHEDULE)
    plan = schedule.placed(PhaseBalance().place(schedule, 3, "", 2)).plan(odd_step)
    assert (plan.part, plan.block, plan.counted) == (Part.TIMED, 1, True)
    first, second = run_ranks(train_with_another_shape, 2, odd_step)
    for found in (first, second):
        assert found["compilations"] == 2
        assert found["flagged"] == [step == odd_step - 3 for step in range(2 * WINDOW_STEPS)]
    assert first["windows"] == [(True, 3), (True, 15)]
    assert first["counted"] == [{0: 2, 1: 1, 2: 2, 3: 2}, {0: 2, 1: 2, 2: 2, 3: 2}]
    note = "a step in which torch.compile compiled was left out [OC347]"
    assert [note in problems for problems in first["problems"]] == [True, False]


def test_a_window_whose_recorded_step_compiled_is_left_out_and_the_log_says_so():
    first, second = run_ranks(train_with_another_shape, 2, 3)
    assert first["windows"] == [(True, 15)]
    assert first["compilations"] == second["compilations"] == 2
    assert any("window left out: torch.compile compiled in a recorded step" in line for line in first["lines"])


# -- records of compilations


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("callback", "utils", "convert_frame", "eval_frame"):
        monkeypatch.delitem(sys.modules, f"torch._dynamo.{name}", raising=False)
    return monkeypatch


def module(**contents: Any) -> Any:
    return SimpleNamespace(**contents)


def test_where_torch_compile_is_not_loaded_nothing_has_compiled_and_nothing_is_loaded(no_compiler) -> None:
    watch = CompileWatch(lambda: None)
    watch.start()
    assert (watch.count, watch.has_compiled) == (0, False)
    assert "torch._dynamo.callback" not in sys.modules


def test_compilations_are_counted_as_they_start_and_an_error_does_not_escape_into_the_compiler(no_compiler) -> None:
    callbacks: list[Callable[[Any], None]] = []

    def fail() -> None:
        raise RuntimeError

    no_compiler.setitem(sys.modules, "torch._dynamo.callback", module(on_compile_start=callbacks.append))
    watch = CompileWatch(fail)
    watch.start()
    watch.start()
    (callback,) = callbacks
    callback(None)
    assert (watch.count, watch.has_compiled) == (1, True)


def test_a_torch_that_does_not_report_starts_is_asked_for_its_count(no_compiler) -> None:
    counters: dict[str, Counter[str]] = defaultdict(Counter)
    no_compiler.setitem(sys.modules, "torch._dynamo.callback", ModuleType("callback"))
    no_compiler.setitem(sys.modules, "torch._dynamo.utils", module(counters=counters))
    watch = CompileWatch(lambda: None)
    watch.start()
    assert (watch.count, watch.has_compiled) == (0, False)
    counters["frames"]["total"] = 3
    assert (watch.count, watch.has_compiled) == (3, True)
    counters.clear()
    counters["stats"]["unique_graphs"] = 1
    assert (watch.count, watch.has_compiled) == (1, True)
    counters.clear()
    no_compiler.setitem(sys.modules, "torch._dynamo.convert_frame", module(FRAME_COUNTER=2))
    assert (watch.count, watch.has_compiled) == (2, True)


def test_where_compilation_cannot_be_detected_it_is_assumed(no_compiler) -> None:
    no_compiler.setitem(sys.modules, "torch._dynamo.utils", ModuleType("utils"))
    assert CompileWatch(lambda: None).has_compiled
