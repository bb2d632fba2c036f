"""The matrix: jobs of every framework whose kernels compute, trained in every way in which the library can be there.

``test_matrix.py`` holds each cell to the same losses and weights, to sequential steps without overlap and to figures
that equal the devices' log; ``matrix.md`` is what came of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from overlap_callbacks import Mode, arms
from overlap_callbacks.gate.arms import BaseArm
from overlap_callbacks.report import record
from tests.distributed import run_ranks
from tests.gpu import jobs
from tests.gpu.jobs import ONE_WINDOW
from tests.simulated_gpu.figures import Case, compare
from tests.simulated_gpu.jobs import on_device
from tests.simulated_gpu.parameters import Parameters
from tests.simulated_gpu.trainers import Notes, Pins, hugging_face, lightning
from tests.simulated_gpu.truth import DeviceLog, StepTruth, of_one_transfer

RANKS = (2, 4)
STEPS = 22
# Kernels take long enough that streams run beside each other.
TIMES: dict[str, Any] = {"kernel_us": 200, "collective_us": 300, "link_gbs": 0.05, "compute_slowdown": 1.3}


@dataclass(frozen=True)
class Framework:
    """A framework's job.

    Attributes:
        kind: as ``tests.gpu.jobs`` has it, or the name of a trainer.
        overlaps: whether it communicates while it computes.
        has_shares: whether ranks have shares of different sizes in its all-to-alls.
        parameters: of the device, besides ``TIMES``.
    """

    kind: str
    overlaps: bool = True
    has_shares: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)


_MANY_KERNELS = {"kernel_us": 60, "collective_us": 200}
FRAMEWORKS = {
    "DDP": Framework("ddp"),
    "FSDP1": Framework("fsdp1"),
    "FSDP2": Framework("fsdp2"),
    "FSDP2, bf16": Framework("fsdp2 bf16"),
    "HSDP": Framework("hsdp"),
    "tensor parallel": Framework("tensor", overlaps=False),
    "pipeline": Framework("pipeline", overlaps=False),
    "ZeRO-1": Framework("zero1"),
    "ZeRO-2": Framework("zero2"),
    "ZeRO-2, bf16": Framework("zero2 bf16"),
    "ZeRO-3": Framework("zero3"),
    "ZeRO-3, bf16": Framework("zero3 bf16"),
    "Megatron-core, data": Framework("megatron", parameters=_MANY_KERNELS),
    "Megatron-core, bf16": Framework("megatron bf16", parameters=_MANY_KERNELS),
    "Megatron-core, tensor": Framework("megatron tensor", parameters=_MANY_KERNELS),
    "Megatron-core, pipeline": Framework("megatron pipeline", overlaps=False, parameters=_MANY_KERNELS),
    # What a share takes is in proportion to its bytes.
    "Megatron-core, experts": Framework(
        "megatron experts", has_shares=True, parameters={**_MANY_KERNELS, "collective_us": 0}
    ),
    "Lightning": Framework("lightning"),
    "Transformers": Framework("transformers", parameters=_MANY_KERNELS),
}


def _own_arm() -> BaseArm:
    return arms.Arm("own", lambda: None, lambda: None, equal_results=True)


@dataclass(frozen=True)
class Way:
    """In which the library is there.

    Attributes:
        options: of ``attach``, besides ``ONE_WINDOW``; None: it is absent.
        pins: the mode from each step on.
        arm: makes the one arm.
    """

    options: Mapping[str, Any] | None = field(default_factory=dict)
    pins: Pins | None = None
    arm: Callable[[], BaseArm] | None = None

    def all_options(self, run_dir: str) -> dict[str, Any]:
        of_arm = {} if self.arm is None else {"arms": [self.arm()], "profiled_steps": 0}
        return {**ONE_WINDOW, "run_dir": run_dir, **(self.options or {}), **of_arm}


WAYS = {
    "absent": Way(None),
    "attached": Way(),
    # One recorded step, then the mode changes at each step.
    "toggling": Way({"blocks": "OS", "repeats": 8, "first_step": 2, "profiled_steps": 0}),
    "forced": Way(pins=lambda number: Mode.SEQUENTIAL),
    "Native": Way(arm=arms.Native),
    "Prefetch": Way(arm=lambda: arms.Prefetch(2, 2)),
    "Reshard": Way(arm=lambda: arms.Reshard(False)),
    "ZeroPrefetchBucket": Way(arm=lambda: arms.ZeroPrefetchBucket(2 * 32 * 32)),
    "SmCarveout": Way(arm=lambda: arms.SmCarveout(8)),
    "AllowTF32": Way(arm=arms.AllowTF32),
    "Arm": Way(arm=_own_arm),
}
# Arms that one kind of job alone can have: in a test of its own, without a column in the table.
OF_ONE = {
    "SharedReduceScatter": Way(arm=arms.SharedReduceScatter),
    "ZeroLiveParameters": Way(arm=lambda: arms.ZeroLiveParameters(4 * 32 * 32)),
}
ALL_WAYS = {**WAYS, **OF_ONE}


def _two_groups(rank: int, device: torch.device) -> jobs.Job:
    job = jobs.MAKERS["fsdp2"](rank, device)
    job.model.set_separate_reduce_scatter_group()  # type: ignore[operator]
    return job


jobs.MAKERS["fsdp2 two groups"] = _two_groups
ALL_FRAMEWORKS = {**FRAMEWORKS, "FSDP2 with two groups": Framework("fsdp2 two groups")}

# Arms that a job cannot have, with words of the sentence in which the library says so.
_NOT_SHARDED = "the model has no module that fully_shard has sharded"
_NEEDS_MODEL = "attach(optimizer, model=model) with a model that fully_shard has sharded"
_NEEDS_ENGINE = "attach to a DeepSpeed engine of ZeRO stage 3"
_NEITHER = "sequential='native' needs a model with DDP or FSDP in it, and this one has neither"
_SHARDED = ("FSDP2", "FSDP2, bf16", "HSDP")
_ZERO = {name: framework.kind[4] for name, framework in FRAMEWORKS.items() if name.startswith("ZeRO")}
_MEGATRON = tuple([name for name in FRAMEWORKS if name.startswith("Megatron")])


def refusal(name: str, ranks: int, way: str) -> str | None:
    """Why the library refuses an arm in a job; None if it does not."""
    if way in ("Prefetch", "Reshard") and name not in _SHARDED:
        return _NEEDS_MODEL if name in (*_ZERO, *_MEGATRON) else _NOT_SHARDED
    if way == "ZeroPrefetchBucket" and _ZERO.get(name) != "3":
        return f"the engine has ZeRO stage {_ZERO[name]}, and 3 is needed" if name in _ZERO else _NEEDS_ENGINE
    if way == "Native":
        return {
            "Transformers": _NEITHER,  # the Trainer's callbacks get the model without its DDP
            "tensor parallel": _NEITHER,
            "pipeline": _NEITHER,
            "Megatron-core, tensor": "to reach all communication, with tensor_model_parallel_size=2",
            "Megatron-core, experts": "to reach all communication, with expert_model_parallel_size=2",
            "Megatron-core, pipeline": "the job was built without overlap" if ranks == 2 else None,
        }.get(name)
    return None


# -- in the ranks


@dataclass(frozen=True)
class Run:
    """How a rank has trained.

    Attributes:
        digest: equal for bit-identical losses and weights.
        losses: of each step, where the rank has them.
        process: its number, by which its log is found.
        moments: when each step began and ended.
        modes: of each step.
        arms: that steps had.
        refused: why the job cannot have the arm.
        seconds: that it took.
    """

    digest: str = ""
    losses: tuple[float, ...] = ()
    process: int = 0
    moments: tuple[int, ...] = ()
    modes: tuple[Mode, ...] = ()
    arms: frozenset[str] = frozenset()
    refused: str = ""
    seconds: float = 0.0

    def steps(self, log: DeviceLog) -> list[StepTruth]:
        return log.steps(self.moments)[::2]


def train(rank: int, name: str, ways: list[str], parameters: Parameters, folder: str) -> list[Run]:
    """Train the framework's job in these ways, one after the other."""
    torch.set_num_threads(1)
    jobs.make_tiny()
    runs = []
    with on_device(rank, parameters) as device:
        for way in ways:
            began = time.monotonic()
            place = Path(folder, way)
            try:
                notes = _trained(ALL_FRAMEWORKS[name].kind, rank, device, ALL_WAYS[way], place)
            except (ValueError, RuntimeError) as error:
                if ALL_WAYS[way].arm is None or "cannot compute" in str(error):
                    raise
                runs.append(Run(refused=str(error)))
                continue
            found = hashlib.sha256()
            for tensor in (*notes.losses, *notes.weights):
                found.update(tensor.detach().float().contiguous().cpu().numpy().tobytes())
            runs.append(
                Run(
                    found.hexdigest(),
                    tuple([float(loss) for loss in notes.losses]),
                    os.getpid(),
                    tuple(notes.moments),
                    tuple(notes.modes),
                    frozenset(notes.arms),
                    seconds=time.monotonic() - began,
                )
            )
    return runs


def _trained(kind: str, rank: int, device: torch.device, way: Way, folder: Path) -> Notes:
    if kind not in ("lightning", "transformers"):
        return _train_job(kind, rank, device, way, folder)
    options = None if way.options is None else way.all_options(str(folder / "run"))
    notes = Notes(pins=way.pins)
    if kind == "lightning":
        from overlap_callbacks.integrations import lightning as adapter
    else:
        from overlap_callbacks.integrations import transformers as adapter  # type: ignore[no-redef]
    if options is not None:
        notes.measuring = adapter.OverlapCallback(**options)
    if kind == "lightning":
        sizes = (jobs.WIDTH, jobs.LAYERS, jobs.BATCH, jobs.BUCKET_MIB)
        lightning(notes, folder, torch.distributed.get_world_size(), STEPS, *sizes)
    else:
        hugging_face(notes, folder, rank, STEPS)
    return notes


def _train_job(kind: str, rank: int, device: torch.device, way: Way, folder: Path) -> Notes:
    torch.manual_seed(0)
    job = jobs.MAKERS[kind](rank, device)
    notes = Notes(pins=way.pins)
    with contextlib.closing(job), _attached(job, way, folder) as monitor:
        for number in range(STEPS):
            if monitor is not None and way.pins is not None:
                monitor.force(way.pins(number))
            notes.moments.append(time.monotonic_ns())
            job.forward_backward()
            notes.modes.append(Mode.OVERLAPPED if monitor is None else monitor.mode)
            if monitor is not None and monitor.arm is not None:
                notes.arms.add(monitor.arm)
            job.update()
            notes.moments.append(time.monotonic_ns())
        torch.cuda.synchronize()
        if monitor is not None:
            monitor.close()
        notes.losses, notes.weights = job.losses, job.weights()
    return notes


@contextlib.contextmanager
def _attached(job: jobs.Job, way: Way, folder: Path) -> Iterator[Any]:
    if way.options is None:
        yield None
        return
    with job.attach(**way.all_options(str(folder / "run"))) as monitor:
        yield monitor


# -- what came of it


def run(name: str, ranks: int, ways: list[str], folder: Path) -> list[list[Run]]:
    """What each rank has of each way.

    Args:
        name: of the framework.
        ranks: of the job.
        ways: the first is ``absent``.
        folder: for records and logs.
    """
    parameters = {**TIMES, **ALL_FRAMEWORKS[name].parameters}
    told = Parameters(computes=True, log=folder / "log", stall_s=30, devices=ranks, **parameters)
    return run_ranks(train, ranks, name, ways, told, str(folder), backend="", timeout_s=400)


@dataclass
class Checked:
    """A cell of the matrix.

    Attributes:
        problems: what is not as it should be.
        cell: of the table.
    """

    problems: list[str]
    cell: str


def check(name: str, ranks: int, ways: list[str], found: list[list[Run]], folder: Path) -> dict[str, Checked]:
    """What came of each way.

    Args:
        name: of the framework.
        ranks: of the job.
        ways: as for ``run``.
        found: by ``run``.
        folder: as for ``run``.
    """
    logs = [DeviceLog.read(folder / "log", of_rank[0].process) for of_rank in found]
    absent = [of_rank[0] for of_rank in found]
    checked: dict[str, Checked] = {}
    for number, way in enumerate(ways):
        of_way = [of_rank[number] for of_rank in found]
        why_not = refusal(name, ranks, way)
        if why_not is not None or any(one.refused for one in of_way):
            wrong = [one.refused for one in of_way if why_not is None or why_not not in one.refused]
            checked[way] = Checked([f"said {words!r}, not {why_not!r}" for words in wrong], Table.REFUSED)
            continue
        lines = [*_differences(way, of_way, absent), *_overlaps(name, of_way, logs)]
        compared = list(_figures(name, ranks, of_way, logs, folder)) if way == "attached" else []
        lines += [line for line in compared if line]
        same = [one.digest for one in of_way] == [one.digest for one in absent]
        sequential = of_way[0].modes.count(Mode.SEQUENTIAL)
        cell = Table.SAME if same else Table.OTHER
        cell += f" {sequential}" if sequential else ""
        cell += f", {len(compared)}" if compared else ""
        checked[way] = Checked(lines, cell)
    return checked


def _differences(way: str, of_way: list[Run], absent: list[Run]) -> Iterator[str]:
    """Where numbers are not those without the library, or modes and arms not those asked for."""
    arm = None if ALL_WAYS[way].arm is None else ALL_WAYS[way].arm()  # type: ignore[misc]
    for rank, (one, without) in enumerate(zip(of_way, absent, strict=True)):
        if one.digest != without.digest and (arm is None or arm.equal_results):
            pairs = zip(one.losses, without.losses, strict=True)
            first = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
            yield f"rank {rank}: numbers differ, losses from {first} on"
        if not all(map(math.isfinite, one.losses)):
            yield f"rank {rank}: losses {one.losses}"
        if one.losses and len(set(one.losses)) < STEPS // 2:
            yield f"rank {rank}: it does not train: {one.losses}"
        sequential = one.modes.count(Mode.SEQUENTIAL)
        least = {"attached": 6, "toggling": 8, "forced": STEPS - 3, "Native": 4}.get(way, 0)
        if sequential < least:
            yield f"rank {rank}: {sequential} sequential steps, not {least}"
        if arm is not None and len(one.arms) != 1:
            yield f"rank {rank}: steps had the arms {set(one.arms)}"


def _overlaps(name: str, of_way: list[Run], logs: list[DeviceLog]) -> Iterator[str]:
    hidden: dict[Mode, list[float]] = {mode: [] for mode in Mode}
    for one, log in zip(of_way, logs, strict=True):
        for mode, step in zip(one.modes, one.steps(log), strict=True):
            hidden[mode].append(step.hidden_ms)
    most = max(hidden[Mode.SEQUENTIAL], default=0.0)
    if most > 0:
        yield f"compute beside communication in sequential steps, for {most:.3f} ms"
    overlapped = hidden[Mode.OVERLAPPED]
    if ALL_FRAMEWORKS[name].overlaps and len(overlapped) > STEPS // 2 and not any(overlapped):
        yield "no overlap in overlapped steps"


def _figures(name: str, ranks: int, of_way: list[Run], logs: list[DeviceLog], folder: Path) -> Iterator[str]:
    """For each figure an empty line, or how it differs from the log."""
    (file,) = (folder / "attached").rglob("overlap.jsonl")
    (window,) = record.read(file).windows
    if not window.valid:
        yield f"the window is not valid: {window.problems}"
        return
    framework = ALL_FRAMEWORKS[name]
    if framework.has_shares:
        logs = of_one_transfer(logs)
    case = Case(framework.kind, ranks, host_ahead=False, parameters={**TIMES, **framework.parameters})
    truths = [one.steps(log) for one, log in zip(of_way, logs, strict=True)]
    compared = list(compare(window, truths, case))
    if missing := case.must_have - {one.name for one in compared}:
        yield f"no figure {', '.join(sorted(missing))}"
    for one in compared:
        yield "" if one.holds else f"{one.name} is {one.reported:.6g} for {one.true:.6g} (most {one.most})"


# -- the table


class Table:
    """What came of the matrix, as ``matrix.md`` has it.

    Attributes:
        rows: by framework and ranks: a cell for each way, the seconds that all took, and the commit.
    """

    FILE = Path(__file__).with_name("matrix.md")
    SAME, OTHER, REFUSED = "=", "≠", "no"

    def __init__(self, rows: dict[tuple[str, int], list[str]]) -> None:
        self.rows = rows

    @classmethod
    def read(cls) -> Table:
        rows = {}
        lines = cls.FILE.read_text().splitlines() if cls.FILE.exists() else []
        for line in lines:
            name, _, rest = line.removeprefix("| ").partition(" | ")
            if name in FRAMEWORKS:
                ranks, *cells = [cell.strip() for cell in rest.removesuffix("|").split("|")]
                rows[name, int(ranks)] = cells
        return cls(rows)

    def add(self, name: str, ranks: int, checked: Mapping[str, Checked], seconds: float) -> None:
        cells = [checked[way].cell if not checked[way].problems else "fails" for way in WAYS]
        self.rows[name, ranks] = [*cells, f"{seconds:.0f}", _commit()]

    def write(self) -> None:
        self.FILE.write_text(self.text())

    def text(self) -> str:
        head = ["framework", "ranks", *(way if WAYS[way].arm is None else f"`{way}`" for way in WAYS), "s", "commit"]
        order = [(name, ranks) for name in FRAMEWORKS for ranks in RANKS if (name, ranks) in self.rows]
        seconds = sum(int(self.rows[job][-2]) for job in order)
        lines = [_HEAD, "", _row(head), _row(["---", *["---:"] * (len(head) - 1)])]
        lines += [_row([name, str(ranks), *self.rows[name, ranks]]) for name, ranks in order]
        commits = {self.rows[job][-1] for job in order}
        of_one = f", all on commit {commits.pop()}" if len(commits) == 1 else ""
        lines += ["", f"Each row is of one run{of_one}: {seconds} s in all, on two cores that did much else."]
        if "unknown" in [self.rows[job][-1] for job in order]:
            lines[-1] += " Where the commit is unknown, it is of an earlier one."
        lines += ["", "What is not there:", ""]
        words: dict[str, list[str]] = {}
        for name in FRAMEWORKS:
            missing = [f"{name} ({ranks})" for ranks in RANKS if (name, ranks) not in self.rows]
            words.setdefault("not run yet", []).extend(missing)
        for name in FRAMEWORKS:
            for way in WAYS:
                reasons = [refusal(name, ranks, way) for ranks in RANKS]
                for ranks, why in zip(RANKS, reasons, strict=True):
                    if why is not None and reasons.index(why) == RANKS.index(ranks):
                        where = "" if reasons.count(why) == len(RANKS) else f" on {ranks} ranks"
                        words.setdefault(f"`{way}`: {why}", []).append(name + where)
        lines += [f"- {why}: {'; '.join(those)}." for why, those in words.items() if those]
        return "\n".join(lines) + "\n"


def _commit() -> str:
    """That of the working tree; with a plus if files other than the table differ from it."""
    git = ("git", "-C", str(Table.FILE.parent))
    head = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False)
    others = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":/", f":!{Table.FILE.name}"], check=False)
    return (head.stdout.strip() or "unknown") + ("+" if others.returncode else "")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


_HEAD = f"""# The night's matrix

Small jobs of each framework train {STEPS} steps on simulated devices whose kernels compute. Written by
`OVERLAP_MATRIX=1 python3 dev.py test --simulated-gpu tests/simulated_gpu/test_matrix.py -m "nightly or not nightly"`.

- `=`: losses and weights have the same bits as without the library. `≠`: they differ, as the arm says that they may.
- The next number counts rank 0's sequential steps: no device computed and communicated at once in them, by its log.
- The last, of a window, counts figures: each equals the log's.
- `no`: the library refuses this arm in this job, with the words below."""
