"""The command as users run it: real ranks over Gloo, Ctrl-C, a file that was cut off, and how it goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_callbacks.analysis.results.bench import FILE_NAME, GemmRound
from overlap_callbacks.cli import bench
from overlap_callbacks.experiments.bench import session
from overlap_callbacks.experiments.bench.results import Bench
from overlap_callbacks.experiments.bench.site import Ranks
from overlap_callbacks.experiments.sweep import ResultsError
from tests.analysis.bench_results import gemm_plan, gemm_results
from tests.commands import invoke
from tests.distributed import run_script
from tests.margins import PATIENCE_S

RANKS_LOAD = ("overlap_callbacks.cli.bench", "overlap_callbacks.experiments.bench.session")
SCRIPT = "import sys\nfrom overlap_callbacks.cli import main\nmain(sys.argv[1:], standalone_mode=False)\n"


def _as_torchrun(folder: Path, ranks: int, *arguments: str) -> Any:
    """The command on ranks that a launcher started; what rank 0 printed as JSON."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    output = folder / "results"
    outcomes = run_script(script, ["bench", *arguments, "-o", str(output), "--json", "--no-page"], ranks, {})
    text = outcomes[0].output
    return json.loads(text[text.index("{") : text.rindex("}") + 1]), Bench.read(output)


def test_products_during_all_reduces_on_two_ranks_of_a_launcher(tmp_path: Path) -> None:
    found, results = _as_torchrun(
        tmp_path, 2, "gemm-allreduce", "--n", "64,96", "--message", "64KiB", "--rounds", "4", "--block-s", "0.02"
    )
    assert found["left"] == 0
    assert found["start"]["plan"]["ranks"] == 2
    assert found["start"]["plan"]["link"] == "gloo"
    assert [point["point"]["n"] for point in found["points"]] == [64, 96]
    for point in found["points"]:
        assert point["flop"] == 2 * point["point"]["n"] ** 3
        rate = point["alone_tflop_s"]["value"] * point["gemm_alone_ms"]["value"]
        assert rate == pytest.approx(point["flop"] / 1e9)
        # Of two ranks, what passes a link in an all-reduce is its message.
        carried = point["alone_busbw_gb_s"]["value"] * point["all_reduce_alone_ms"]["value"]
        assert carried == pytest.approx(65536 / 1e6)
        assert point["slowdown"]["ci_low"] < point["slowdown"]["value"] < point["slowdown"]["ci_high"]
        assert point["both_w"] is None or point["both_w"]["value"] > 0
    assert [results.point_of(line) for line in results.lines] == Bench(tmp_path, results.start).left


def test_every_collective_by_size_on_four_ranks_in_groups(tmp_path: Path) -> None:
    found, _ = _as_torchrun(
        tmp_path, 4, "collectives", "--size", "8,4KiB", "--rounds", "1", "--block-s", "0.002", "--groups", "world,2:2"
    )
    assert found["failed"] == []
    keys = Counter((point["point"]["kind"], point["group_size"]) for point in found["points"])
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
    assert keys == {(kind, size): 2 for kind in kinds for size in (4, 2)}
    for point in found["points"]:
        assert point["time_ms"]["value"] > 0
        size = point["point"]["message_bytes"]
        assert size % (4 * point["group_size"]) == 0
        assert point["algbw_gb_s"]["value"] * point["time_ms"]["value"] == pytest.approx(size / 1e6)


def test_the_loopback_link_in_its_cpu_form_says_what_it_is(tmp_path: Path) -> None:
    found, results = _as_torchrun(
        tmp_path, 1, "gemm-allreduce", "--link", "loopback", "--link-gb-s", "0.005", "--n", "64", "--message", "64KiB",
        "--rounds", "1", "--block-s", "0.02",
    )  # fmt: skip
    (point,) = found["points"]
    # The phantom joins an all-reduce when the time of its link is over.
    assert point["all_reduce_alone_ms"]["value"] >= 65536 / 0.005 / 1e6
    assert point["alone_busbw_gb_s"]["value"] <= 0.005
    assert any("loopback" in note for note in found["notes"])
    assert results.start.plan.link == "loopback"


@pytest.mark.nightly
def test_ctrl_c_keeps_what_was_measured_and_resume_measures_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    command = [
        sys.executable, "-m", "overlap_callbacks", "bench", "gemm-allreduce", "--n", "32,48", "--message", "4KiB,8KiB",
        "--rounds", "3", "--block-s", "0.01", "-o", str(folder), "--no-page",
    ]  # fmt: skip
    file = folder / FILE_NAME
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path
    )
    _wait_for_lines(file, 3, process)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, stderr
    assert "Stopping after the point under way; Ctrl-C again stops at once." in stderr
    assert f" bench gemm-allreduce --resume {folder}" in stderr
    assert "Not finished: " in " ".join(stdout.split())
    assert "Traceback" not in stderr
    before = Bench.read(folder)
    assert 2 <= len(before.rounds) < 12
    # A crash cuts the last line off.
    content = file.read_bytes()
    file.write_bytes(content[:-30])
    result = invoke("bench", "gemm-allreduce", "--resume", str(folder), "--json", "--no-page")
    assert result.exit_code == 0, result.output
    after = Bench.read(folder)
    assert Counter(map(after.point_of, after.rounds)) == Counter(Bench(folder, after.start).left)
    assert after.rounds[: len(before.rounds) - 1] == before.rounds[:-1]
    assert (after.broken_lines, len(after.resumed)) == (1, 1)
    assert json.loads(result.stdout)["left"] == 0


def _wait_for_lines(file: Path, lines: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists() or file.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_resume_refuses_other_options_and_other_folders(tmp_path: Path) -> None:
    dataclasses.replace(gemm_results(), folder=tmp_path).open().close()
    folder = str(tmp_path)
    assert "leave out --n" in invoke("bench", "gemm-allreduce", "--resume", folder, "--n", "64").output
    for begun in (folder, f"{folder}/{FILE_NAME}"):
        assert "resume it with that command" in invoke("bench", "collectives", "--resume", begun).output
    assert "has results already" in invoke("bench", "gemm-allreduce", "-o", folder).output
    (tmp_path / "empty").mkdir()
    assert "cannot be read" in invoke("bench", "collectives", "--resume", str(tmp_path / "empty")).output


def test_results_whose_page_cannot_be_written_are_printed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = dataclasses.replace(gemm_results(), folder=tmp_path)
    file = results.open()
    for line in results.lines:
        file.write(line)
    file.close()
    monkeypatch.setattr(bench, "_launch", lambda *_: True)
    page = tmp_path / "bench.html"
    for is_in_the_way in (False, True):
        if is_in_the_way:
            page.unlink()
            page.mkdir()
        result = invoke("bench", "gemm-allreduce", "--resume", str(tmp_path / FILE_NAME), "--json")
        assert result.exit_code == 2 * is_in_the_way, result.output
        assert json.loads(result.stdout)["points"]
        assert ("The page cannot be written: " in result.stderr) == is_in_the_way
        assert f"The results are in {tmp_path / FILE_NAME}." in result.stderr


def test_a_file_is_read_up_to_what_is_broken_and_appended_to_on_a_line_of_its_own(tmp_path: Path) -> None:
    results = dataclasses.replace(gemm_results(), folder=tmp_path)
    file = results.open()
    for line in results.rounds:
        file.write(line)
    file.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-9])
    again = results.open()
    again.write(results.rounds[-1])
    again.close()
    found = Bench.read(tmp_path)
    assert found.broken_lines == 1
    assert found.rounds == results.rounds
    assert all(isinstance(line, GemmRound) for line in found.rounds)


@pytest.mark.parametrize("content", ["", "{}", "not JSON\n", '{"line":"gemm"}\n'])
def test_other_files_are_no_results(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    with pytest.raises(ResultsError, match="its first line is missing"):
        Bench.read(tmp_path)


def test_a_point_that_one_rank_cannot_measure_is_left_out_with_a_reason() -> None:
    site: Any = SimpleNamespace(ranks=Ranks(), synchronise=lambda: None)

    def fail() -> None:
        raise RuntimeError("out of memory\nand a long trace")

    assert session._on_every_rank(site, fail) == "out of memory"
    assert session._on_every_rank(site, lambda: 5) == 5


def test_a_plan_that_was_written_is_the_plan_that_is_read(tmp_path: Path) -> None:
    plan = gemm_plan(link_gb_s=2.5, ctas=(8, 24))
    dataclasses.replace(gemm_results(link_gb_s=2.5, ctas=(8, 24)), folder=tmp_path).open().close()
    assert Bench.read(tmp_path).start.plan == plan
