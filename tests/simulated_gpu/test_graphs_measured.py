"""Jobs with CUDA graphs that are measured: captures succeed, no bit changes, windows say what is not serialised."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import Mode
from overlap_callbacks.gate.serialiser import StreamSerialiser
from overlap_callbacks.instruments import device as devices
from overlap_callbacks.instruments.profiler import Profile
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.simulated_gpu.figures import Case, compare
from tests.simulated_gpu.jobs import on_device, pinning, train
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.test_device import on_device as alone_on_device
from tests.simulated_gpu.test_graphs import on_side_stream
from tests.toggling import at_night

WIDTH, ROWS = 16, 4
# DDP asks for its times in its first steps, which no capture may hold: torch wants eleven before it.
WARM, STEPS = 11, 52
# Steps that are captured, and then replayed for some. All are in the window, in both modes.
CAPTURED, REPLAYED = (6, 13, 20, 27, 34), 2
RECAPTURED = (3, 9, 15, 21, 27)
WINDOW: dict[str, Any] = {
    "first_step": 3,
    "every_n_steps": 1000,
    "repeats": 1,
    "steps_per_block": 4,
    "advanced": {"spread": False},
    "max_overhead": None,
}
# In the window's profiled part.
STEPS_TO_PROFILE = 34
TIMES: dict[str, Any] = {"kernel_us": 300, "collective_us": 400, "link_gbs": 0.05}


class Trained(NamedTuple):
    """Losses and weights of a rank, and the modes of its steps."""

    losses: list[float]
    weights: list[list[float]]
    modes: list[Mode]

    @property
    def numbers(self) -> tuple[list[float], list[list[float]]]:
        return self.losses, self.weights


class Job:
    """A small model with DDP, whose steps can be captured.

    Args:
        rank, device: of this process.
        parts: whether each layer is a graph of its own.
    """

    def __init__(self, rank: int, device: torch.device, parts: bool) -> None:
        torch.manual_seed(0)
        widths = (WIDTH, 32, 32, 8)
        layers: Any = [nn.Sequential(nn.Linear(*two), nn.GELU()).to(device) for two in itertools.pairwise(widths)]
        if parts:
            samples = tuple(
                (torch.zeros(ROWS, width, device=device, requires_grad=at > 0),) for at, width in enumerate(widths[:-1])
            )
            layers = torch.cuda.make_graphed_callables(tuple(layers), samples)  # type: ignore[no-untyped-call]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # DDP keeps the stream that it is made on
            self.model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.002)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._draw = torch.Generator().manual_seed(rank)
        self.batch, self.target = torch.zeros(ROWS, WIDTH, device=device), torch.zeros(ROWS, 8, device=device)
        self.graph = torch.cuda.CUDAGraph()
        self.loss = torch.zeros((), device=device)

    def load(self) -> None:
        self.batch.copy_(torch.randn(ROWS, WIDTH, generator=self._draw))
        self.target.copy_(torch.randn(ROWS, 8, generator=self._draw))

    def forward_backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(self.model(self.batch), self.target)
        loss.backward()
        self.loss = loss.detach()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()

    def capture(self, function: Callable[[], None]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            function()


def _whole(job: Job, number: int) -> None:
    """Whole steps are captured within the window, the optimizer's part too, and replayed for a while."""
    if number in CAPTURED:
        job.capture(job.step)
    if any(first <= number <= first + REPLAYED for first in CAPTURED):
        job.graph.replay()
    else:
        job.step()


def _gradients(job: Job, number: int) -> None:
    """Forward, backward and DDP's collectives come from a graph; another collective and the update do not."""
    if number == 0:
        job.capture(job.forward_backward)
    job.graph.replay()
    dist.all_reduce(job.loss)
    job.optimizer.step()


def _again(job: Job, number: int) -> None:
    """The same, captured anew in steps that are measured: in the recorded one, and in those of both modes."""
    if number in RECAPTURED:
        job.capture(job.forward_backward)
        job.graph.replay()
    else:
        job.forward_backward()
    job.optimizer.step()


KINDS: dict[str, Callable[[Job, int], None]] = {
    "whole": _whole,
    "gradients": _gradients,
    "again": _again,
    "parts": lambda job, _: job.step(),
}

Look = Callable[[Job, str], contextlib.AbstractContextManager[Callable[[int], Mode]]]


@contextlib.contextmanager
def _leave(*_: Any) -> Iterator[Callable[[int], Mode]]:
    yield lambda number: Mode.OVERLAPPED


def _attach(modes: Callable[[int], Mode | None]) -> Look:
    """Attach, and pin modes by the number of the step."""

    @contextlib.contextmanager
    def look(job: Job, run_dir: str) -> Iterator[Callable[[int], Mode]]:
        from overlap_callbacks.integrations.pytorch import attach

        with attach(job.optimizer, model=job.model, run_dir=run_dir, strict=True, **WINDOW) as monitor:
            yield pinning(monitor, modes)

    return look


LOOKS: dict[str, Look] = {
    "absent": _leave,
    "attached": _attach(lambda number: None),
    "toggling": _attach(lambda number: Mode.SEQUENTIAL if number % 2 else Mode.OVERLAPPED),
    "forced": _attach(lambda number: Mode.SEQUENTIAL),
}


def _trained(rank: int, device: torch.device, kind: str, look: str, run_dir: str) -> Trained:
    job = Job(rank, device, kind == "parts")
    job.load()
    on_side_stream(job.step, WARM)
    losses, modes = [], []
    with LOOKS[look](job, run_dir) as change:
        for number in range(STEPS):
            modes.append(change(number))
            job.load()
            KINDS[kind](job, number)
            losses.append(job.loss.clone())
    weights = [one.detach().cpu().flatten().tolist() for one in job.model.parameters()]
    return Trained([float(loss) for loss in losses], weights, modes)


def _on_device(rank: int, parameters: Parameters, kind: str, looks: list[str], run_dir: str) -> list[Trained]:
    torch.set_num_threads(1)
    with on_device(rank, parameters) as device:
        return [_trained(rank, device, kind, look, f"{run_dir}/{look}") for look in looks]


def _run(function: Any, kind: str, given: Any, folder: Path) -> list[Any]:
    told = Parameters(computes=True, stall_s=30, **TIMES)
    return run_ranks(function, 2, told, kind, given, str(folder), backend="", timeout_s=150)


@pytest.mark.parametrize("kind", at_night(KINDS, ["parts"]))
def test_measuring_changes_no_bit_of_steps_with_graphs(kind: str, tmp_path: Path) -> None:
    ranks = _run(_on_device, kind, list(LOOKS), tmp_path)
    for of_rank in ranks:
        for look, trained in zip(LOOKS, of_rank, strict=True):
            assert trained.numbers == of_rank[0].numbers, look
    absent, attached, toggling, forced = ranks[0]
    assert len(set(absent.losses)) == STEPS
    assert toggling.modes.count(Mode.SEQUENTIAL) > STEPS / 8
    assert forced.modes.count(Mode.SEQUENTIAL) > STEPS / 2
    assert absent.weights == ranks[1][0].weights
    (window,) = record.read(tmp_path / "attached").windows
    of_graphs = [problem for problem in window.problems if "from CUDA graphs" in problem]
    if kind in ("whole", "again"):
        captured = CAPTURED if kind == "whole" else RECAPTURED
        assert {attached.modes[number] for number in captured} == set(Mode)
        assert "a step in which a CUDA graph was captured was left out [OC348]" in window.problems
    elif kind == "gradients":
        assert not window.valid
        assert of_graphs == [
            "70 % of communication kernels come from CUDA graphs, which the gate cannot serialise [OC369]"
        ]
        assert not any("of no collective that the gate saw" in problem for problem in window.problems)
    else:
        assert window.valid
        assert of_graphs == []


def _replayed_alone(
    rank: int, parameters: Parameters, profiled: str, look: str, run_dir: str
) -> tuple[list[float], tuple[bool, bool] | None]:
    """From a step of the window on a job only replays.

    Returns its losses, and whether the window and a profile are open once as many steps were replayed as it has.
    """
    from overlap_callbacks.integrations.pytorch import attach

    torch.set_num_threads(1)
    with on_device(rank, parameters) as device:
        job, losses, still_open = Job(rank, device, parts=False), [], None
        job.load()
        on_side_stream(job.step, WARM)
        given: dict[str, Any] = {"run_dir": run_dir, "strict": True, **WINDOW}
        with attach(job.optimizer, **given) if look == "attached" else contextlib.nullcontext() as monitor:
            replays = False
            for number in range(STEPS):
                job.load()
                if not replays and number == (STEPS_TO_PROFILE if profiled else 8):
                    if monitor is not None:
                        assert (monitor.in_window, not Profile.available()) == (True, bool(profiled))
                    job.capture(job.step)
                    replays = True
                job.graph.replay() if replays else job.step()
                losses.append(job.loss.clone())
            if monitor is not None:
                still_open = monitor.in_window, not Profile.available()
        return [float(loss) for loss in losses], still_open


@pytest.mark.parametrize("profiled", ["", "profiled"])
def test_a_window_ends_where_its_plan_does_if_the_job_only_replays(profiled: str, tmp_path: Path) -> None:
    alone = _run(_replayed_alone, profiled, "absent", tmp_path)
    attached = _run(_replayed_alone, profiled, "attached", tmp_path)
    assert [losses for losses, _ in attached] == [losses for losses, _ in alone]
    assert [still_open for _, still_open in attached] == [(False, False)] * 2
    (window,) = record.read(tmp_path).windows
    assert not window.complete
    assert any(problem.startswith("cut short: optimizer.step() was captured") for problem in window.problems)


def _spoilt(rank: int, parameters: Parameters, kind: str, protected_by: str, run_dir: str) -> str:
    """How the job ends without one of the product's protections."""
    torch.set_num_threads(1)
    with on_device(rank, parameters) as device:
        unaware = devices.accelerator()._replace(is_capturing=lambda: False)
        without = {
            "hook": mock.patch.object(devices, "accelerator", return_value=unaware),
            "gate": mock.patch.object(StreamSerialiser, "obstacle", return_value=None),
        }
        try:
            with without[protected_by]:
                _trained(rank, device, kind, {"hook": "attached", "gate": "forced"}[protected_by], run_dir)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("protected_by", ["hook", "gate"])
def test_a_capture_is_spoilt_where_the_library_does_not_ask_for_it(protected_by: str, tmp_path: Path) -> None:
    for error in _run(_spoilt, "whole", protected_by, tmp_path):
        assert "operation failed due to a previous error during capture" in error


def _asked_by_a_thread(aware: bool) -> tuple[str, str]:
    """What the library's thread hears of an event while this one captures, and how the capture ends."""
    event, numbers, heard = torch.cuda.Event(), torch.ones(4, device="cuda"), ["", ""]
    event.record()
    torch.cuda.synchronize()

    def ask() -> None:
        devices.prepare_thread(torch.device("cuda", 0))
        try:
            event.query()
        except RuntimeError as error:
            heard[0] = str(error)

    thread = threading.Thread(target=ask)
    unaware = mock.patch.object(devices, "_leave_captures_alone")
    try:
        with contextlib.nullcontext() if aware else unaware, torch.cuda.graph(torch.cuda.CUDAGraph()):
            numbers.mul_(2)
            thread.start()
            thread.join()
    except RuntimeError as error:
        heard[1] = str(error)
    return heard[0], heard[1]


def test_the_librarys_threads_spoil_no_capture() -> None:
    assert alone_on_device(_asked_by_a_thread, True) == ("", "")
    heard, ended = alone_on_device(_asked_by_a_thread, False)
    assert "operation not permitted when stream is capturing" in heard
    assert "operation failed due to a previous error during capture" in ended


def test_figures_of_a_step_whose_collectives_are_in_a_graph_are_no_wrong_numbers(tmp_path: Path) -> None:
    kind = "ddp in a graph"
    run_dir, truths, _ = train(kind, tmp_path, rules="gemm=1000", compute_slowdown=1.3)
    (window,) = record.read(run_dir).windows
    assert not window.valid
    assert any("some communication escaped the gate (CUDA graphs" in problem for problem in window.problems)
    compared = list(compare(window, truths, Case(kind)))
    assert {"compute_ms", "comm_ms", "hidden_comm_ms", "exposed_comm_ms", "idle_ms"} <= {one.name for one in compared}
    assert [one for one in compared if not one.holds] == []
    # What sequential steps were to say is not published.
    of_both = ("compute_slowdown", "comm_slowdown", "e2e_sequential_ms", "e2e_ideal_ms", "speedup_vs_sequential")
    assert not {f"overlap/{name}" for name in of_both} & {*window.metrics()}
