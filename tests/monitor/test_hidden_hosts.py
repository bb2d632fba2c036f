"""``hosts=False`` in a job of two ranks: the host's name is in nothing that is written."""

from __future__ import annotations

import logging
import platform
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from overlap_callbacks import JsonlSink, OverlapMonitor, Sink, WandbSink
from overlap_callbacks.report import write_page
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import FunctionSink, TensorBoardSink
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import Training, tiny_schedule

NAME = "quail-secret-7"
DOMAIN = "cluster.example.org"


def refuse(*_: Any) -> None:
    raise RuntimeError(f"nobody answers at {NAME}.{DOMAIN}:443")


def train(rank: int, folder: str, hosts: bool, wandb: bool) -> list[str]:
    import os

    os.environ["HOSTNAME"] = f"{NAME}.{DOMAIN}"
    os.environ["NCCL_DEBUG_FILE"] = f"/logs/{NAME}/nccl"
    sinks: list[Sink] = [JsonlSink(folder), TensorBoardSink(f"{folder}/events"), FunctionSink(refuse)]
    if wandb:
        settings = {"mode": "offline", "console": "off", "x_disable_stats": True, "disable_git": True, "silent": True}
        sinks.append(WandbSink(dir=folder, settings=settings))
    full = f"{NAME}.{DOMAIN}"
    with (
        mock.patch.object(platform, "node", return_value=full),
        mock.patch.object(socket, "gethostname", return_value=full),
        captured_log(logging.INFO) as lines,
    ):
        monitor = OverlapMonitor(tiny_schedule(), sinks, run_dir=folder, max_overhead=None, hosts=hosts, power=False)
        training = Training(rank)
        for step in range(8):
            with monitor.step(step):
                training.step()
        monitor.close()
    return list(lines)


def everything_in(folder: Path) -> bytes:
    """Names and contents of all files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return b"".join(str(path.relative_to(folder)).encode() + path.read_bytes() for path in files)


def test_no_file_and_no_message_has_the_hosts_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    wandb = pytest.importorskip("wandb") is not None
    messages = run_ranks(train, 2, str(tmp_path), False, wandb)
    record = read(tmp_path)
    write_page([record], tmp_path / "report.html")
    written = everything_in(tmp_path)
    assert NAME.encode() not in written
    assert NAME not in "".join(line for lines in messages for line in lines)
    assert any("nobody answers at this host:443" in line for line in messages[0])
    info, window = record.runs[-1], record.windows[0]
    assert (info.hostname, info.hosts_named) == ("host 0", False)
    assert info.environment is not None
    assert (info.environment.hostname, info.environment.host_id) == ("host 0", "")
    assert info.environment.variables["NCCL_DEBUG_FILE"] == "/logs/host 0/nccl"
    assert window.environment is not None
    assert [place.hostname for place in window.environment.places] == ["host 0", "host 0"]
    assert b"host 0" in (tmp_path / "report.html").read_bytes()


def test_by_default_the_record_has_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_ranks(train, 2, str(tmp_path), True, False)
    assert NAME.encode() in everything_in(tmp_path)
