"""Runs a function on several real processes that are joined by a process group; for tests.

A hang becomes a failure within ``timeout_s``, with every rank's stack; a rank that raises ends the others and shows its
traceback. Nothing is shared with the pytest process, and environment variables set there do not reach the ranks.

A rank ends as an interpreter does: it joins its threads, runs its ``atexit`` functions, leaves its daemon threads
behind, and torch is taken down. What its function returned is handed over before. A rank that then dies or hangs is a
failure all the same. Taking torch down costs half a second of work for each rank. So only the first job of each test
module does that, and at night (``OVERLAP_WHOLE_ENDS``) every job; the later ones end once their threads are joined and
their ``atexit`` functions have run. Tests of the end itself use ``tests/interpreters.py``.

Ranks are forked, because loading torch and the library takes seconds. One server has these loaded; a fork of it what a
test module names in ``RANKS_LOAD = ("megatron.core",)``: what its ranks import themselves. Each test module's ranks
come from a fork of that one which has the module loaded too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import itertools
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.margins import PATIENCE_S, near

_HOST = "127.0.0.1"
# Longest that the other ranks may go on once one has failed: time to raise an error of their own, worth showing.
_GRACE_S = 2.0
# Ranks wait for cores, of several tests at a time, and on a slow or busy machine: small jobs took four times as long.
_PATIENCE = 4.0
# Longest that a rank that is done waits for the others, so that its sockets stay open as long as they are in use.
_FAREWELL_S = 60.0
# How often it is looked whether the time is over; a rank that ends is noticed at once.
_LOOK_S = 0.1
# torch._dynamo: optimizers and DDP load it when they are first used. scipy.special: intervals need it.
_LOADED = (
    "tests.without_garbage", "pytest",
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.profiler", "scipy.special",
    "overlap_callbacks.monitor.monitor", "overlap_callbacks.sinks", "overlap_callbacks.report.record", __name__,
)  # fmt: skip
# So many test modules' servers stay, since a test may take its ranks' functions from several. So many of those that
# they are forks of stay too: the next module may ask for the same.
_MOST_SERVERS, _MOST_BASES = 3, 2


class RanksFailedError(AssertionError):
    """A rank raised, died or hung; the message holds what every rank had to say."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: its number.
        returned: whether the function returned.
        value: what it returned.
        error: traceback of what it raised; empty if nothing.
        exit_code: of the process; negative for a signal.
        hung: whether it had to be killed, within the function or while its interpreter ended.
        output: stdout and stderr.
    """

    rank: int
    returned: bool
    value: Any
    error: str
    exit_code: int | None
    hung: bool
    output: str

    @property
    def faulty_end(self) -> bool:
        """Whether the function returned, but the interpreter did not end well."""
        return self.returned and self.exit_code != 0

    def __str__(self) -> str:
        if self.hung:
            ending = "returned, but did not end" if self.returned else "was killed: it hung, or another rank had failed"
        elif self.faulty_end:
            ending = f"returned, but its interpreter ended with exit code {self.exit_code}"
        elif self.returned:
            ending = "returned"
        else:
            ending = f"ended with exit code {self.exit_code}"
        return f"--- rank {self.rank} {ending}\n{self.error}{self.output}"


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 45.0, backend: str = "gloo"
) -> list[Any]:
    """What ``function(rank, *args)`` returned on each rank.

    Args:
        function: of a module's top level; runs with a process group of ``world_size`` ranks.
        world_size: processes.
        *args: further arguments; pickled.
        timeout_s: longest time for all, on a machine that has time for them; on a busy one four times that.
        backend: of the process group.

    Raises:
        RanksFailedError: a rank raised, died or hung, within the function or at its end.
    """
    outcomes = _run(function, world_size, args, timeout_s, backend, mortal=False)
    _require_returned(function.__qualname__, outcomes)
    return [outcome.value for outcome in outcomes]


def run_mortal_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 45.0, backend: str = "gloo"
) -> list[Outcome]:
    """Like ``run_ranks`` where ranks may die or raise: the others go on.

    Raises:
        RanksFailedError: a rank hung, or returned and then did not end well.
    """
    outcomes = _run(function, world_size, args, timeout_s, backend, mortal=True)
    if any(outcome.hung or outcome.faulty_end for outcome in outcomes):
        raise RanksFailedError(f"{function.__qualname__} on {world_size} ranks:\n" + "\n".join(map(str, outcomes)))
    return outcomes


def run_script(
    script: Path, arguments: list[str], world_size: int, environment: dict[str, str], timeout_s: float = 150.0
) -> list[Outcome]:
    """Run a script on several ranks, as ``torchrun`` does, in the current directory: it makes its own process group.

    Args:
        script: to run, as ``__main__``.
        arguments: of its command line.
        world_size: processes.
        environment: variables that it gets beside those of ``torchrun``.
        timeout_s: longest time for all.
    """
    outcomes = _run(_run_as_main, world_size, (str(script), arguments, environment), timeout_s, "", mortal=False)
    _require_returned(script.name, outcomes)
    return outcomes


def run_alone(function: Callable[..., Any], *args: Any, timeout_s: float = 45.0) -> Any:
    """What ``function(*args)`` returned in a process of its own, in which no process group is initialised.

    Raises:
        RanksFailedError: it raised, died or hung.
    """
    outcomes = _run(_call, 1, (function, *args), timeout_s, "", mortal=False)
    _require_returned(function.__qualname__, outcomes)
    return outcomes[0].value


def die() -> None:
    """End this rank the hard way: nothing is flushed, closed or said."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def captured_log(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The lines that the library logs meanwhile, of ``level`` and above."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("overlap_callbacks")
    handler, before = Keep(level), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


# -- in the pytest process


def _require_returned(name: str, outcomes: list[Outcome]) -> None:
    if not all(outcome.returned and outcome.exit_code == 0 for outcome in outcomes):
        raise RanksFailedError(f"{name} on {len(outcomes)} ranks:\n" + "\n".join(map(str, outcomes)))


def _run(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float, backend: str, mortal: bool
) -> list[Outcome]:
    # The store is served from here: its port is free for sure, and it outlives any rank.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    start = starter(function, *args)
    modules = tuple(found.__module__ for found in _functions_of(function, args))
    whole_end = modules not in _ended or bool(os.environ.get("OVERLAP_WHOLE_ENDS"))
    _ended.add(modules)
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _RankJob(function, args, world_size, store.port, backend, folder, mortal, os.getcwd(), whole_end)
        processes = [context.Process(target=_rank_main, args=([job], rank), daemon=True) for rank in range(world_size)]
        try:
            for process in processes:
                start(process)
            hung = _await_ranks(processes, job, timeout_s)
        finally:
            _kill(processes)
        return [_outcome(job, rank, process, rank in hung) for rank, process in enumerate(processes)]


# Test modules of which a job has ended as an interpreter does.
_ended: set[tuple[str, ...]] = set()
_bases: dict[tuple[str, ...], _ModuleServer] = {}
_servers: dict[tuple[str, ...], _ModuleServer] = {}


class _ModuleServer(multiprocessing.forkserver.ForkServer):
    """Forks processes that have modules loaded.

    Args:
        modules: to load.
        base: the server that this one is a fork of; None for the one that has torch loaded.
    """

    def __init__(self, modules: tuple[str, ...], base: _ModuleServer | None = None) -> None:
        super().__init__()
        address = connection.arbitrary_address("AF_UNIX")
        alive, self._forkserver_alive_fd = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, connection.Connection(alive, writable=False) as reader:
            listener.bind(address)
            listener.listen()
            context = multiprocessing.get_context("forkserver")
            self._process = context.Process(target=_serve, args=(listener, reader, modules), daemon=True)
            with contextlib.nullcontext() if base is None else base.forks():
                self._process.start()
        self._forkserver_address = address

    def forks(self) -> Any:
        """What starts meanwhile is a fork of this server. multiprocessing knows one."""
        return mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", self.connect_to_new_process)

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()

    def end(self) -> None:
        os.close(self._forkserver_alive_fd)
        self._process.join(_GRACE_S)
        self._process.kill()


def _serve(listener: socket.socket, alive: connection.Connection, modules: tuple[str, ...]) -> None:
    gc.disable()
    for module in modules:
        with contextlib.suppress(ImportError):  # the rank says so
            importlib.import_module(module)
    gc.freeze()
    multiprocessing.forkserver.main(listener.detach(), os.dup(alive.fileno()), [])


def _functions_of(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[FunctionType, ...]:
    return tuple(found for found in (function, *args) if isinstance(found, FunctionType))


def starter(function: Callable[..., Any], *args: Any) -> Callable[[Any], None]:
    """Starts a rank from the server that has loaded the module of the function and those of functions among ``args``.

    What these modules ask for is loaded too.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    multiprocessing.set_forkserver_preload(list(_LOADED))
    own = dict.fromkeys(found.__module__ for found in _functions_of(function, args))
    wanted = tuple(dict.fromkeys(itertools.chain(*[getattr(sys.modules[name], "RANKS_LOAD", ()) for name in own])))
    server = _server_with((*wanted, *own), _servers, _MOST_SERVERS, wanted)

    def start(process: Any) -> None:
        with server.forks():
            process.start()

    return start


def _server_with(
    modules: tuple[str, ...], running: dict[tuple[str, ...], _ModuleServer], most: int, of_base: tuple[str, ...] = ()
) -> _ModuleServer:
    """The server that has these modules loaded; made, if need be, as a fork of one that has those of its base.

    Ends those that were not used for longest.
    """
    server = running.pop(modules, None)
    if server is None:
        while len(running) >= most:
            running.pop(next(iter(running))).end()
        server = _ModuleServer(modules, _server_with(of_base, _bases, _MOST_BASES) if of_base else None)
    running[modules] = server  # the last used is last
    return server


def _await_ranks(processes: list[Any], job: _RankJob, timeout_s: float) -> set[int]:
    """Wait for the ranks to end; those that had to be given up."""
    began_s, bound_s = time.monotonic(), min(timeout_s * _PATIENCE, PATIENCE_S)
    deadline = began_s + bound_s
    failed = False
    while alive := [rank for rank, process in enumerate(processes) if process.is_alive()]:
        if not job.mortal and not failed and any(process.exitcode not in (0, None) for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            for rank in alive:
                os.kill(processes[rank].pid, signal.SIGUSR1)  # has it write its threads' stacks
            time.sleep(0.5)
            return set(alive)
        connection.wait([processes[rank].sentinel for rank in alive], _LOOK_S)
    near(time.monotonic() - began_s, bound_s, "seconds for the ranks")
    return set()


def _kill(processes: list[Any]) -> None:
    for process in processes:
        if process.pid is not None:
            if process.is_alive():
                process.kill()
            process.join()


def _outcome(job: _RankJob, rank: int, process: Any, hung: bool) -> Outcome:
    output = job.output(rank).read_text(errors="replace") if job.output(rank).exists() else ""
    returned, value, error = False, None, ""
    if job.result(rank).exists():
        returned, value, error = pickle.loads(job.result(rank).read_bytes())
    return Outcome(rank, returned, value, error, process.exitcode, hung, output)


# -- in the ranks


@dataclass(frozen=True)
class _RankJob:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    port: int
    backend: str  # empty: the function makes its own process group
    folder: str
    mortal: bool
    directory: str
    whole_end: bool

    def output(self, rank: int) -> Path:
        return Path(self.folder, f"output-{rank}")

    def result(self, rank: int) -> Path:
        return Path(self.folder, f"result-{rank}")


def _rank_main(jobs: list[_RankJob], rank: int) -> None:
    collect_own_garbage()
    _own_media_folder()
    job = jobs.pop()
    whole_end = job.whole_end
    code = _run_rank(job, rank)
    del job
    (end_interpreter if whole_end else _end_process)(code)


def collect_own_garbage() -> None:
    """In a fork: have garbage collected, but leave alone what the server has loaded.

    Else each rank would copy that when it collects its garbage, which takes a second.
    """
    gc.freeze()
    gc.enable()


def _own_media_folder() -> None:
    """In a fork: W&B removes at the end the folder that it made as it was loaded, and that is the server's."""
    media = getattr(sys.modules.get("wandb.sdk.data_types._private"), "MEDIA_TMP", None)
    if media is not None:
        media._finalizer.detach()
        media.__init__("wandb-media")


def _end_process(code: int) -> None:
    """End this fork without taking down torch and its modules. What may hang or fail before that runs."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_interpreter(code: int) -> None:
    """End this fork as Python ends a script. multiprocessing would leave with ``os._exit``, where no fault shows."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(code)


def _run_rank(job: _RankJob, rank: int) -> int:
    """Run the function, and hand over what came of it; the exit code."""
    redirect_output(job.output(rank))
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    try:
        # Else which steps count would depend on what else the machine does.
        _every_step_counts()
        os.chdir(job.directory)
        store = dist.TCPStore(_HOST, job.port, is_master=False)
        if job.backend:
            # Should a test hang in a collective, the harness finds it first, and shows where.
            dist.init_process_group(
                job.backend,
                store=store,
                rank=rank,
                world_size=job.world_size,
                timeout=datetime.timedelta(seconds=600),
            )
        else:
            # The script finds the store as it would under torchrun, whose agent serves it.
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size), MASTER_ADDR=_HOST,
                LOCAL_WORLD_SIZE=str(job.world_size), MASTER_PORT=str(job.port), TORCHELASTIC_USE_AGENT_STORE="True",
            )  # fmt: skip
        _write_result(job.result(rank), (True, job.function(rank, *job.args), ""))
        if job.backend and not job.mortal:
            _say_farewell(store, rank, job.world_size)
        return 0
    except BaseException:
        _write_result(job.result(rank), (False, None, traceback.format_exc()))
        return 1


def _every_step_counts() -> None:
    """Let steps count even if they took far longer than others of their mode."""
    from overlap_callbacks.analysis import outliers

    outliers._MIN_SHARE = math.inf


def _call(_: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _run_as_main(rank: int, script: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # pytest's capture may have put something else there.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _write_result(path: Path, result: tuple[bool, Any, str]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(result))
    partial.rename(path)  # whole or not at all


def _say_farewell(store: dist.Store, rank: int, world_size: int) -> None:
    store.set(f"farewell/{rank}", b"")
    with contextlib.suppress(RuntimeError):  # another rank failed: the harness reports it
        store.wait([f"farewell/{other}" for other in range(world_size)], datetime.timedelta(seconds=_FAREWELL_S))
