"""Where reports and messages go: full, gone, out of reach, or failing."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import sys
import time
from typing import Any

from tests.campaign.case import case
from tests.campaign.job import RUN_FOLDER, Rank, Training

GROUP = "Disks, descriptors, sinks and logs"
STEPS = 60
BLOCKED_S = 3600.0


def _train(rank: Rank, **options: Any) -> None:
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training, **options)
    rank.train(training, STEPS)
    monitor.close()


@case(
    "disk-full", GROUP, "no file may grow beyond 24 kB: the record ends in mid-line",
    says=r"JsonlSink failed and is not used again",
)  # fmt: skip
def fill_disk(rank: Rank) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, resource.RLIM_INFINITY))
    _train(rank)


@case(
    "disk-full-at-once",
    GROUP,
    "the record leads to `/dev/full`",
    says=r"JsonlSink failed and is not used again",
    record="none",
)
def write_to_full(rank: Rank) -> None:
    folder = rank.folder / "full"
    if rank.number == 0:
        folder.mkdir()
        (folder / "overlap.jsonl").symlink_to("/dev/full")
    _train(rank, run_dir=str(folder))


@case(
    "folder-deleted", GROUP, "the run folder is deleted during the run", says=r"the record was deleted during the run"
)
def delete_folder(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    monitor = rank.attach(training)
    rank.train(training, rank.some_step(14, 34))
    if rank.number == 0:  # one rank: the library tells each deletion
        shutil.rmtree(rank.folder / RUN_FOLDER, ignore_errors=True)
    rank.train(training, STEPS)
    monitor.close()


@case(
    "few-descriptors", GROUP, "at most eight file descriptors are left when measuring begins",
    runs=9, says=r"Too many open files|rank \d (did not report|did not decide)", may_be_silent=True, record="maybe",
)  # fmt: skip
def run_out_of_descriptors(rank: Rank) -> None:
    rank.start()
    training = Training(rank.number)
    rank.train(training, 3)
    left = rank.random.randint(0, 8)
    if rank.library:
        rank.keep_log()
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Beyond the highest in use; those below it that are free stay usable.
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, hard))
    monitor = rank.attach(training, start_step=3, first_step=6)
    rank.train(training, STEPS)
    monitor.close()


def _sinks(rank: Rank, fail: Any) -> list[Any]:
    """The record, and a sink of the user's that fails."""
    if not rank.library:
        return []
    from overlap_callbacks.sinks import FunctionSink, JsonlSink

    return [JsonlSink(rank.folder / RUN_FOLDER), FunctionSink(lambda *_: fail())]


def _raise_key_error() -> None:
    raise KeyError("of the sink")


@case("sink-raises", GROUP, "a sink raises in every window", says=r"FunctionSink failed and is not used again")
def raise_in_sink(rank: Rank) -> None:
    _train(rank, sinks=_sinks(rank, _raise_key_error))


@case("sink-exits", GROUP, "a sink calls `sys.exit()`", says=r"FunctionSink failed and is not used again")
def exit_in_sink(rank: Rank) -> None:
    _train(rank, sinks=_sinks(rank, lambda: sys.exit(4)))


@case("sink-blocks", GROUP, "a sink blocks for an hour", says=r"FunctionSink hangs", bound_s=20.0)
def block_in_sink(rank: Rank) -> None:
    _train(rank, sinks=_sinks(rank, lambda: time.sleep(BLOCKED_S)))


class _Failing(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        raise KeyError("of the log handler")


class _Slow(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        time.sleep(0.2)


def _log_with(rank: Rank, handler: logging.Handler) -> None:
    if rank.library:
        rank.keep_log()
        logging.getLogger("overlap_callbacks").addHandler(handler)


@case(
    "handler-raises", GROUP, "a log handler and a sink raise",
    says=r"FunctionSink failed and is not used again",
)  # fmt: skip
def raise_in_handler(rank: Rank) -> None:
    _log_with(rank, _Failing())
    _train(rank, sinks=_sinks(rank, _raise_key_error))


@case(
    "handler-blocks", GROUP, "a log handler takes 0.2 s a message, and a sink raises",
    says=r"FunctionSink failed and is not used again",
)  # fmt: skip
def block_in_handler(rank: Rank) -> None:
    _log_with(rank, _Slow())
    _train(rank, sinks=_sinks(rank, _raise_key_error))


@case("stderr-closed", GROUP, "stdout and stderr are closed, no log is set up", says="", may_be_silent=True)
def close_stderr(rank: Rank) -> None:
    null = os.open(os.devnull, os.O_RDONLY)  # writing to it fails
    os.dup2(null, 1)
    os.dup2(null, 2)
    _train(rank, same_log=False)
