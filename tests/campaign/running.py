"""Runs one job of a case, with or without the library, and gathers the results."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.campaign import job as ranks
from tests.campaign.case import Case
from tests.campaign.processes import HOST, VARIABLES, Ending, Rank, Zygote, free_port, wait_for
from tests.simulated_gpu.meeting_place import new_place
from tests.simulated_gpu.parameters import ON_SIMULATED_GPU, Parameters

# The last line of a traceback. (Others begin alike: "Exception raised from" in torch's C++, "Exception ignored in".)
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit))(?::|$)", re.MULTILINE)
# What the library says in every job, whatever happens.
_ROUTINE = re.compile(
    r"the record is in|there will be no confidence intervals|will have no confidence intervals|the rest is measured"
)
_TORCHRUN_SCRIPT = """
import faulthandler, signal, sys
faulthandler.enable(all_threads=False)
faulthandler.register(signal.SIGUSR1, all_threads=True)
import json
from tests.campaign.job import run_rank
run_rank(*json.loads({arguments!r}))
"""


@dataclass(frozen=True)
class Said:
    """A line of the library's log."""

    rank: int
    level: str
    text: str


@dataclass(frozen=True)
class Run:
    """What is known of a job that has ended.

    Attributes:
        endings: of its ranks, in order; with ``torchrun``, of its agent alone.
        steps: weights after each step, by rank and step.
        said: what the library said, routine left out.
        folder: of the job.
    """

    endings: list[Ending]
    steps: dict[str, str]
    said: list[Said]
    folder: Path

    @property
    def seconds(self) -> float:
        return max(ending.seconds for ending in self.endings)

    @property
    def record(self) -> Path:
        return self.folder / ranks.RUN_FOLDER

    def kinds(self) -> list[str]:
        """How each rank ended: its code, and the kind of its last error."""
        return [kind_of(ending) for ending in self.endings]


def kind_of(ending: Ending) -> str:
    """The code of a process, and the kind of its last error."""
    if ending.code is None:
        return "hung"
    code = f"-{signal.Signals(-ending.code).name}" if ending.code < 0 else str(ending.code)
    errors = _ERROR.findall(ending.output) if ending.code != 0 else []
    return " ".join([code, *errors[-1:]])


def was_aborted(ending: Ending) -> bool:
    """Whether a process aborted, or with ``torchrun`` one that its agent had started."""
    return ending.code == -signal.SIGABRT or (ending.code not in (0, None) and "(SIGABRT)" in ending.output)


class RunningJob:
    """The processes of a job."""

    def __init__(self, processes: list[Rank], server: Rank | None, folder: Path) -> None:
        self.processes = processes
        self._server = server
        self._folder = folder

    def signal(self, rank: int, number: int) -> None:
        for process in self.processes if rank < 0 else [self.processes[rank]]:
            process.signal(number)

    def signal_store(self, number: int) -> None:
        assert self._server is not None
        self._server.signal(number)

    def await_step(self, rank: int, step: int) -> bool:
        path = self._folder / f"steps-{rank}"

        def done() -> bool:
            return path.exists() and path.read_bytes().count(b"\n") >= step

        return wait_for(lambda: done() or not self.processes[rank].runs, 60.0) and done()

    def await_stop(self, rank: int) -> bool:
        process = self.processes[rank]
        status = Path(f"/proc/{process.pid}/stat")

        def stopped() -> bool:
            with contextlib.suppress(FileNotFoundError):
                return status.read_text().rpartition(") ")[2].startswith("T")
            return False

        return wait_for(lambda: not process.runs or stopped(), 60.0) and process.runs

    def await_end(self, rank: int) -> None:
        wait_for(lambda: not self.processes[rank].runs, 60.0)


def run_job(case: Case, zygote: Zygote, plain: Zygote, folder: Path, *, library: bool, seed: int, quick: bool) -> Run:
    """Run a job of this case.

    Args:
        case: what is done.
        zygote: forks the ranks.
        plain: forks what does not belong to the job.
        folder: of the job; made here.
        library: whether the job is measured.
        seed: of what is left to chance.
        quick: the quick form.
    """
    folder.mkdir(parents=True)
    options = (case.quick_options if quick and case.quick_options else case.options) or {}
    arguments = [case.run.__module__, case.run.__name__, str(folder), library, seed, options]
    with _device(case, seed) as variables:
        if case.torchrun is not None:
            endings = [_torchrun(case, arguments, folder, variables)]
        else:
            endings = _processes(case, arguments, zygote, plain, folder, seed, variables)
    return Run(endings, _steps(folder, case.world_size), _said(case, folder, endings), folder)


@contextlib.contextmanager
def _device(case: Case, seed: int) -> Iterator[dict[str, str]]:
    """The variables of a job's device, if there is one."""
    if not ON_SIMULATED_GPU:
        yield {}
        return
    faults = case.faults(random.Random(seed)) if case.faults else None
    with new_place() as place:
        # Before it ends a job, NCCL's watchdog waits four times as long for its own dump: a minute by default. The dump
        # itself may crash where the interpreter has ended meanwhile.
        told = Parameters(folder=Path(place), computes=True, faults=faults).environment()
        yield {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", **told}


def _processes(
    case: Case, arguments: list[object], zygote: Zygote, plain: Zygote, folder: Path, seed: int, device: dict[str, str]
) -> list[Ending]:
    port = free_port()
    server = plain.start(ranks.serve_store, [port], folder, folder / "store-output") if case.server else None
    variables = {
        "MASTER_ADDR": HOST, "MASTER_PORT": str(port), "WORLD_SIZE": str(case.world_size),
        "LOCAL_WORLD_SIZE": str(case.world_size), "TORCHELASTIC_USE_AGENT_STORE": str(case.server), **device,
    }  # fmt: skip
    processes = [
        zygote.start(
            ranks.run_rank,
            arguments,
            folder,
            folder / f"output-{rank}",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            **variables,
        )
        for rank in range(case.world_size)
    ]
    deadline = time.monotonic() + case.limit_s
    if case.disturb is not None:
        running = RunningJob(processes, server, folder)
        threading.Thread(target=case.disturb, args=(running, random.Random(seed)), daemon=True).start()
    wait_for(lambda: not any(process.runs for process in processes), deadline - time.monotonic())
    endings = [process.ending() for process in processes]
    if server is not None:
        server.signal(signal.SIGKILL)
    return endings


def _torchrun(case: Case, arguments: list[object], folder: Path, device: dict[str, str]) -> Ending:
    script = folder / "script.py"
    script.write_text(_TORCHRUN_SCRIPT.format(arguments=json.dumps(arguments)))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.world_size}",
        f"--max-restarts={case.torchrun}", "--monitor-interval=0.2", str(script),
    ]  # fmt: skip
    # By default torchrun's agent keeps one store over restarts, with the addresses in it that the killed ranks left for
    # Gloo under the same names. Ranks that read these before they are replaced fail to connect.
    variables = {**os.environ, **VARIABLES, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **device}
    began_s = time.monotonic()
    with (folder / "output-0").open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(case.limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output_text = (folder / "output-0").read_text(errors="replace")
    return Ending(code, output_text, time.monotonic() - began_s)


def _steps(folder: Path, world_size: int) -> dict[str, str]:
    """Weights by rank, attempt and step."""
    steps = {}
    for rank in range(world_size):
        path = folder / f"steps-{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            key, _, weights = line.partition(" ")
            steps[f"{rank}.{key}"] = weights
    return steps


def _said(case: Case, folder: Path, endings: list[Ending]) -> list[Said]:
    """What the library said: through its log, or past it where that failed."""
    said = []
    for path in sorted(folder.glob("log-*")):
        for line in path.read_text().splitlines():
            level, text = json.loads(line)
            said.append(Said(int(path.name.removeprefix("log-")), level, text))
    known = {line.text for line in said}
    for rank, ending in enumerate(endings):
        for text in re.findall(r"^overlap-callbacks.*$", ending.output, re.MULTILINE):
            if text not in known:
                said.append(Said(rank, "STDERR", text))
    # Lines without the prefix are summaries of windows.
    said = [line for line in said if line.text.startswith("overlap-callbacks")]
    return [line for line in said if _is_of_the_fault(case, line) or not _ROUTINE.search(line.text)]


def _is_of_the_fault(case: Case, line: Said) -> bool:
    return line.level != "INFO" and bool(case.says and re.search(case.says, line.text))
