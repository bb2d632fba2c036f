"""What a record's environment looks like on the page and in the terminal."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.window import MemoryPeak
from overlap_callbacks.report import page, terminal
from overlap_callbacks.report.record import Record, read
from overlap_callbacks.report.terminal import SanitizedRenderable
from overlap_callbacks.report.views.runs import runs_document
from tests.environments import gpu_rank
from tests.report.runs import OV, SEQ, rank_window, run_info, window, write
from tests.samples import aggregate_windows

HOSTILE = "</script><script>alert(1)</script>\x1b[2J"


def report(ranks: int = 2, variables: dict[str, str] | None = None, **changes: Any) -> OverlapReport:
    samples = [
        rank_window(0, rank, environment=gpu_rank(rank, variables=variables or {}), **changes) for rank in range(ranks)
    ]
    return aggregate_windows(samples, world_size=ranks, every_n_steps=500)


def record(folder: Path, *windows: OverlapReport, **run: Any) -> Record:
    return read(write(folder / "run-1", *windows, run=run_info(**run)))


def page_text(found: Record) -> str:
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page([found]), flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body))).replace("\xa0", " ")


def shown(found: Record, everything: bool = True) -> str:
    file = io.StringIO()
    document = runs_document([found], charts=False)
    Console(file=file, width=140).print(SanitizedRenderable(terminal.drawn(document, everything)))
    return re.sub(r"\s+", " ", file.getvalue())


def test_software_devices_and_variables_are_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    found = record(tmp_path, report(16, {"NCCL_SOCKET_IFNAME": "eth0"}))
    for text in (page_text(found), shown(found)):
        for part in ("16 ranks on 2 hosts, with 16 devices", "2.28.3", "580.65.06", "NCCL_SOCKET_IFNAME", "eth0"):
            assert part in text
        assert "NVLink connects all GPUs of a host" in text
    assert "0000:17:00.0" in page_text(found)
    assert "No known trap was found in its settings." in page_text(found)


def test_a_serious_finding_comes_before_the_figures(tmp_path: Path) -> None:
    found = record(tmp_path, report(2, {"CUDA_LAUNCH_BLOCKING": "1"}))
    text = page_text(found)
    said = "CUDA_LAUNCH_BLOCKING=1: the host waits for each kernel, so nothing overlaps."
    assert text.index(said) < text.index("What does it cost?")
    assert text.count(said) == 3  # and with the other findings, and as what to try
    for everything in (True, False):
        assert said in shown(found, everything=everything)


def test_without_a_window_the_start_of_the_job_says_what_rank_0_runs_on(tmp_path: Path) -> None:
    found = record(tmp_path, environment=gpu_rank(0))
    assert "580.65.06" in page_text(found)
    assert "580.65.06" in shown(record(tmp_path, window(), environment=gpu_rank(0)))


def test_a_record_without_an_environment_says_nothing_of_it(tmp_path: Path) -> None:
    found = record(tmp_path, window())
    assert "What did it run on?" not in page_text(found)
    assert "What it ran on" not in shown(found)


def test_windows_after_the_first_need_not_repeat_it(tmp_path: Path) -> None:
    later = msgspec.structs.replace(report(), window=1, environment=None)
    assert "2 ranks on 1 host" in page_text(record(tmp_path, report(), later))


@pytest.mark.parametrize(
    ("peak", "words"),
    [
        (MemoryPeak(SEQ, 7_000_000_000, 7_000_000_000), "6.52 GiB"),
        (MemoryPeak(SEQ, 1, 9_000_000_000), "at most 8.38 GiB"),
        (MemoryPeak(SEQ, 3_000_000_000, None), "at least 2.79 GiB"),
    ],
)
def test_a_memory_peak_that_is_not_known_is_shown_as_a_bound(tmp_path: Path, peak: MemoryPeak, words: str) -> None:
    found = record(tmp_path, report(memory=(MemoryPeak(OV, 8_000_000_000, 8_000_000_000), peak)))
    for text in (page_text(found), shown(found)):
        assert "7.45 GiB" in text
        assert words in text


def test_values_are_text_whatever_they_hold(tmp_path: Path) -> None:
    found = record(tmp_path, report(2, {"NCCL_NET": HOSTILE}))
    assert "<script>alert(1)" not in page([found])
    assert "\x1b[2J" not in shown(found)


def test_runs_are_compared_by_their_variables_and_software(tmp_path: Path) -> None:
    records = []
    for name, nccl in (("a", "2.27.3"), ("b", "2.28.3")):
        own = gpu_rank(0, nccl=nccl, variables={"NCCL_MAX_CTAS": name})
        samples = [rank_window(0, rank, environment=own) for rank in (0, 1)]
        found = aggregate_windows(samples, world_size=2, every_n_steps=500)
        records.append(read(write(tmp_path / name, found, run=run_info(environment=own))))
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page(records))))
    compared = text[text.index("Where their configurations differ") :]
    assert "NCCL_MAX_CTAS a b" in compared
    assert "NCCL 2.27.3 2.28.3" in compared
