"""Where the kernels are registered: out of the way between steps, and elsewhere if this torch lacks the means."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from overlap_callbacks.gate import dispatcher as module
from overlap_callbacks.gate.dispatcher import OWN_KEY, Dispatcher, dispatcher
from overlap_callbacks.gate.gate import Gate
from overlap_callbacks.gate.step_log import ExpectedSequence
from tests.distributed import captured_log, run_ranks
from tests.gate.test_threads import in_a_thread, step_of
from tests.monitor.jobs import (
    KeptReports,
    Training,
    c10d_operators,
    digest_without_library,
    dispatch_table,
    is_pass_through,
    kept_logs,
    new_monitor,
    run_steps,
    tiny_schedule,
)


class Entries:
    """Counts how often the kernels of each form are entered, from the moment of construction; before they register."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        for placement in (module._AtOwnKey, module._AtBackendSelect):
            placement.kernel = self._counting(placement.key, placement.kernel)  # type: ignore[method-assign]

    def _counting(self, key: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def kernel_of(*args: Any) -> Any:
            kernel = make(*args)

            def counting(keyset: Any, *arguments: Any) -> Any:
                self.counts[key] += 1
                return kernel(keyset, *arguments)

            return counting

        return kernel_of


def has_backend_select_kernels() -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, "BackendSelect") for name in c10d_operators())


# -- between steps


def count_entries(rank: int) -> dict[str, Any]:
    entries, gate = Entries(), Gate()
    untouched = dispatch_table()
    gate.register()
    for _ in range(5):
        dist.barrier()
    registered = entries.counts[OWN_KEY]
    step_of(gate, lambda: [dist.barrier() for _ in range(3)])
    measured = entries.counts[OWN_KEY]
    for _ in range(5):
        dist.barrier()
    gate.close()
    for _ in range(5):
        dist.barrier()
    return {
        "entries": (registered, measured, entries.counts[OWN_KEY]),
        "as_before": dispatch_table() == untouched,
        "backend_select": has_backend_select_kernels(),
    }


def test_outside_measured_steps_the_kernels_are_not_entered_at_all():
    for found in run_ranks(count_entries, 2):
        assert found["entries"] == (0, 3, 3)
        assert found["as_before"]
        assert not found["backend_select"]


def train_and_count_entries(rank: int) -> dict[str, Any]:
    entries, training = Entries(), Training(rank)
    monitor = new_monitor(KeptReports(), schedule=tiny_schedule(every_n_steps=20, spread=False))
    outside = []
    with kept_logs() as logs:
        for step in range(42):
            before = entries.counts[OWN_KEY]
            with monitor.step():
                in_window = monitor.in_window
                training.step()
            outside += [entries.counts[OWN_KEY] - before] if not in_window else []
            assert is_pass_through(), step
        monitor.close()
    recorded = sum(len(log.collectives) for log in logs)
    return {"outside": outside, "entries": sum(entries.counts.values()), "recorded": recorded}


def test_a_job_enters_the_kernels_once_for_each_collective_of_a_window_and_never_between_windows():
    for found in run_ranks(train_and_count_entries, 2):
        assert found["outside"] == [0] * (42 - 2 * 5)
        assert found["entries"] == found["recorded"] > 0


def fail_in_a_step(rank: int) -> tuple[bool, bool]:
    untouched = dispatch_table()
    monitor = new_monitor()
    run_steps(Training(rank), monitor, 2)
    within = []

    def fail() -> None:
        with monitor.step():
            within.append(not is_pass_through())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    as_before = (within == [True] and is_pass_through(), dispatch_table() == untouched)
    monitor.close()
    return as_before


def test_after_an_exception_in_a_measured_step_the_kernels_pass_everything_through():
    assert run_ranks(fail_in_a_step, 2) == [(True, True)] * 2


def fork_in_a_step(rank: int) -> int:
    """The exit code of a child that was forked in a measured step: 0 if nothing of the step is left in it."""
    untouched = dispatch_table()
    gate = Gate()
    gate.register()
    gate.begin_step(sequential=False)
    child = os.fork()
    if child == 0:
        os._exit(0 if is_pass_through() and dispatch_table() == untouched and not Gate().taken else 1)
    _, status = os.waitpid(child, 0)
    assert not is_pass_through()
    gate.close()
    return os.waitstatus_to_exitcode(status)


def test_a_process_that_is_forked_in_a_measured_step_measures_nothing():
    assert run_ranks(fork_in_a_step, 1) == [0]


def trace_in_a_step(rank: int) -> list[str]:
    gate = Gate()
    gate.register()

    def trace() -> None:
        with FakeTensorMode():
            dist.all_reduce(torch.ones(1))
        dist.barrier()

    log = step_of(gate, trace)
    gate.close()
    assert gate.last_error is None, repr(gate.last_error)
    return [c.operator for c in log.collectives]


def test_a_collective_of_fake_tensors_is_not_recorded():
    assert run_ranks(trace_in_a_step, 2) == [["barrier"]] * 2


class Square(torch.autograd.Function):
    """Goes through an operator that is dispatched in Python, where ``torch.func`` differentiates it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * tensor

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        context.save_for_backward(*inputs)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * context.saved_tensors[0] * gradient


def differentiate_by_function() -> torch.Tensor:
    return torch.func.vmap(torch.func.grad(lambda tensor: Square.apply(tensor).sum()))(torch.ones(2, 3))


def attend() -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    return flex_attention(*(torch.randn(1, 1, 16, 16) for _ in range(3)))


def branch() -> torch.Tensor:
    return torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(3),))


def script() -> torch.Tensor:
    scripted = torch.jit.script(torch.nn.Softmax(0))
    return torch.stack([scripted(torch.arange(3.0)) for _ in range(4)])


def checkpoint() -> torch.Tensor:
    leaf = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.sin, leaf, use_reentrant=True).sum().backward()
    return leaf.grad


def autocast() -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.ones(2, 2) @ torch.ones(2, 2)


def use_a_new_operator() -> torch.Tensor:
    """An operator that is defined while the key is on, and one that is dispatched in Python."""

    @torch.library.custom_op("overlap_callbacks_test::double", mutates_args=())
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor

    class Twice(torch._ops.HigherOrderOperator):
        def __init__(self) -> None:
            super().__init__("overlap_callbacks_test_twice")

        def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
            return super().__call__(tensor)

    twice = Twice()
    twice.py_impl(torch._C.DispatchKey.CPU)(lambda tensor: 2 * tensor)
    twice.py_impl(torch._C.DispatchKey.AutogradCPU)(lambda tensor: 2 * tensor)
    return twice(double(torch.ones(3)))


OTHERS: tuple[Callable[[], torch.Tensor], ...] = (
    differentiate_by_function,
    attend,
    branch,
    script,
    checkpoint,
    autocast,
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged).sum(),
    lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).dequantize(),
    lambda: torch.eye(3).to_sparse() @ torch.ones(3, 1),
)


def use_torch_in_a_step(rank: int) -> list[bool]:
    """Whether what is no collective gives with the key on what it gives without the gate."""
    gate = Gate()
    gate.register()
    within: list[torch.Tensor] = []
    for other in OTHERS:
        gate.begin_step(sequential=False)
        dispatcher.own_key.enter()  # also after the first compilation
        within.append(other())
        gate.end_step()
    gate.begin_step(sequential=False)
    dispatcher.own_key.enter()
    new = use_a_new_operator()
    gate.end_step()
    gate.close()
    assert gate.last_error is None, repr(gate.last_error)
    alike = [torch.equal(tensor, other()) for tensor, other in zip(within, OTHERS, strict=True)]
    return [*alike, torch.equal(new, torch.full((3,), 4.0))]


def test_all_else_that_torch_does_is_as_it_is_without_the_gate():
    assert run_ranks(use_torch_in_a_step, 1) == [[True] * (len(OTHERS) + 1)]


# -- who owns the kernels


def test_only_one_owner_at_a_time_has_the_kernels_and_releasing_is_for_the_owner():
    kernels, first, second = Dispatcher(), object(), object()
    kernels.acquire(first)
    kernels.acquire(first)
    assert not kernels.is_free_for(second)
    with pytest.raises(RuntimeError, match="another OverlapMonitor of this process"):
        kernels.acquire(second)
    kernels.release(second)
    assert not kernels.is_free_for(second)
    kernels.release(first)
    kernels.acquire(second)


def close_an_old_gate_in_a_step_of_the_next(rank: int) -> list[str]:
    old, gate = Gate(), Gate()
    old.register()
    old.close()
    gate.register()

    def communicate() -> None:
        old.close()
        dist.barrier()

    log = step_of(gate, communicate)
    gate.close()
    return [c.operator for c in log.collectives]


def test_closing_an_old_gate_again_does_not_disturb_the_one_that_measures():
    assert run_ranks(close_an_old_gate_in_a_step_of_the_next, 2) == [["barrier"]] * 2


# -- where the key, or a function, is missing


def without_key() -> None:
    parse = torch._C._parse_dispatch_key

    def parse_other(name: str) -> Any:
        if name == OWN_KEY:
            raise RuntimeError(f"could not parse dispatch key: {name}")
        return parse(name)

    torch._C._parse_dispatch_key = parse_other


def without_switch() -> None:
    del torch._C._dispatch_tls_set_dispatch_key_included


def with_a_fallback_of_somebody_else() -> Any:
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, OWN_KEY)
    return library


def without_fallthrough() -> None:
    fallback = torch.library.Library.fallback

    def kernel_that_torch_calls(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    def take_it_for_a_kernel(library: Any, _: Any, key: str) -> None:
        fallback(library, kernel_that_torch_calls, key)

    torch.library.Library.fallback = take_it_for_a_kernel  # type: ignore[method-assign]


LACKS = {
    "key": without_key,
    "fallthrough": without_fallthrough,
    "switch": without_switch,
    "free_key": with_a_fallback_of_somebody_else,
}


def train_without(rank: int, what: str) -> dict[str, Any]:
    kept_alive = LACKS[what]()
    entries, training = Entries(), Training(rank)
    chatter = dist.new_group(group_desc="theirs")
    with captured_log(level=20) as lines, kept_logs() as logs:
        for _ in range(2):
            monitor = new_monitor(sink := KeptReports())
            run_steps(training, monitor, 12)
            monitor.close()
    gate = Gate()
    gate.register()
    own = step_of(gate, dist.barrier, sequential=True, expected=ExpectedSequence([("barrier", "0")]))
    foreign = step_of(gate, lambda: in_a_thread(lambda: dist.barrier(group=chatter)))
    gate.close()
    del kept_alive
    return {
        "lines": [line for line in lines if "gate" in line],
        "same": training.digest() == digest_without_library(rank, 24),
        "serialised": sum(c.start is not None for log in logs for c in log.collectives),
        "reports": [report["complete"] for report in sink.facts()],
        "own": [(c.operator, c.start is not None) for c in own.collectives],
        "foreign": (len(foreign.collectives), [name.split(" ")[0] for name in foreign.foreign]),
        "entries": (entries.counts[OWN_KEY], entries.counts["BackendSelect"] > 0),
    }


@pytest.mark.parametrize("what", LACKS)
def test_where_the_key_cannot_be_used_the_kernels_stand_at_backend_select_which_is_said_once(what):
    found = run_ranks(train_without, 2, what)
    for rank in found:
        (line,) = rank["lines"]
        assert "this torch has no dispatch key for the gate alone" in line
        assert rank["same"]
        assert rank["serialised"] > 0
        assert rank["own"] == [("barrier", True)]
        assert rank["foreign"] == (0, ["theirs"])
        assert rank["entries"] == (0, True)
    assert found[0]["reports"] == [True, True]


def toggle_at_backend_select(rank: int) -> dict[str, Any]:
    from tests.gate.test_threads import Chatter

    chatter, gate = Chatter(rank), Gate()
    gate.register()
    dispatcher.use_backend_select("a test")
    toggles = 0
    while toggles < 10_000 or chatter.rounds <= 100:  # on a busy machine the thread gets few turns
        gate.begin_step(sequential=True, expected=ExpectedSequence())
        gate.end_step()
        toggles += 1
    gate.close()
    chatter.end()
    return {"errors": (gate.last_error, chatter.error, chatter.wrong), "rounds": chatter.rounds}


def test_ten_thousand_toggles_at_backend_select_do_no_harm_to_a_thread_that_communicates():
    for found in run_ranks(toggle_at_backend_select, 2):
        assert found["errors"] == (None, "", [])
        assert found["rounds"] > 100


# -- where a step may begin


def begin_where_it_cannot_be_measured(rank: int) -> list[str]:
    gate, messages = Gate(), []
    gate.register()

    def begin(_: torch.Tensor) -> None:
        try:
            gate.begin_step(sequential=False)
        except RuntimeError as error:
            messages.append(str(error))

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(begin)
    weight.sum().backward()
    with torch.inference_mode():
        begin(weight)
    gate.close()
    return messages


def test_a_step_that_begins_where_thread_local_state_is_restored_is_refused():
    ((in_backward, in_inference),) = run_ranks(begin_where_it_cannot_be_measured, 1)
    assert (
        in_backward == "a step began within a backward pass, where it cannot be measured: begin steps outside [OC126]"
    )
    assert in_inference == "a step began in inference mode, where it cannot be measured: begin steps outside [OC126]"
