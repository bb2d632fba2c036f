from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import Result

from overlap_callbacks.analysis import name_rules
from overlap_callbacks.cli.traces import ANALYSIS_TABLES as TABLES
from overlap_callbacks.report.trace_tables import ANALYSIS_TABLES, analysis_rows
from overlap_callbacks.traces import analyze, compare, read_trace
from overlap_callbacks.traces.figures import (
    Analysis,
    CollectiveFigures,
    CollectiveSkew,
    Comparison,
    FamilyFigures,
    RankTime,
    StepFigures,
    UnmatchedKernel,
)
from tests import commands, kineto
from tests.margins import PATIENCE_S
from tests.traces.events import short_trace


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """What ``--rule`` and ``--communication`` add is gone when the command has ended, however it ends."""
    before = [*name_rules.communication_patterns], [*name_rules.families]
    yield
    assert (name_rules.communication_patterns, name_rules.families) == before


@pytest.fixture
def overlapped(tmp_path: Path) -> str:
    events = kineto.training(slowdown=0.3, operators=1)
    return str(kineto.write(tmp_path / "overlapped.json.gz", events, **kineto.job(0, 2)))


@pytest.fixture
def sequential(tmp_path: Path) -> str:
    events = [*kineto.training(overlapped=False, operators=1), kineto.kernel('old, "one"', 10, 20, 0)]
    return str(kineto.write(tmp_path / "sequential.json", events, **kineto.job(0, 2)))


@pytest.fixture
def other_rank(tmp_path: Path) -> str:
    events = kineto.training(slowdown=0.5, operators=1)
    return str(kineto.write(tmp_path / "rank1.json", events, **kineto.job(1, 2)))


def invoke(*arguments: str, columns: int = 120) -> Result:
    result = commands.invoke(*arguments, env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def overlap(*arguments: str, columns: int = 120) -> str:
    result = invoke(*arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(output: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(output)))


def strict_json(text: str) -> Any:
    """JSON as its standard has it: NaN and Infinity are none."""
    return json.loads(text, parse_constant=pytest.fail)


# -- what is printed and written


def test_json_of_analyze_holds_the_whole_analysis(overlapped: str, other_rank: str) -> None:
    output = overlap("analyze", overlapped, other_rank, "--json")
    found = msgspec.json.decode(output, type=Analysis)
    assert found == analyze([read_trace(overlapped), read_trace(other_rank)])
    assert [trace.rank for trace in found.traces] == [0, 1]
    assert len(found.skew) == 1
    assert strict_json(output)["record"] == "trace_analysis"


def test_json_of_compare_holds_the_whole_comparison(overlapped: str, sequential: str) -> None:
    output = overlap("compare", overlapped, sequential, "--json")
    found = msgspec.json.decode(output, type=Comparison)
    assert found == compare(read_trace(overlapped), read_trace(sequential))
    assert found.valid
    assert strict_json(output)["record"] == "trace_comparison"


def test_output_writes_the_same_beside_the_tables(tmp_path: Path, overlapped: str, sequential: str) -> None:
    for command, type in ((["analyze", overlapped], Analysis), (["compare", overlapped, sequential], Comparison)):
        path = tmp_path / f"{command[0]}.json"
        assert overlap(*command, "--output", str(path)) == overlap(*command)
        written = path.read_bytes()
        assert msgspec.json.decode(written, type=type) == msgspec.json.decode(overlap(*command, "--json"), type=type)
        assert written.endswith(b"\n")
        assert overlap(*command, "--output", str(path), "--csv", {"analyze": "steps", "compare": "pairs"}[command[0]])
        assert path.read_bytes() == written


@pytest.mark.parametrize("place", ["missing/found.json", "file/found.json"])
def test_output_that_cannot_be_written_gives_one_line(tmp_path: Path, overlapped: str, place: str) -> None:
    (tmp_path / "file").write_text("")
    result = invoke("analyze", overlapped, "--output", str(tmp_path / place))
    assert result.exit_code == 2
    assert result.output.startswith("Error: --output ")
    assert result.output.count("\n") == 1


def test_output_into_a_folder_is_refused(tmp_path: Path, overlapped: str) -> None:
    result = invoke("analyze", overlapped, "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "is a directory" in result.output


def test_the_table_of_analyze_shows_each_step_and_the_whole_file(overlapped: str, other_rank: str) -> None:
    output = overlap("analyze", overlapped, other_rank, "--all")
    (trace, _) = analyze([read_trace(overlapped), read_trace(other_rank)]).traces
    assert "overlapped.json.gz, rank 0 of 2, device 0" in output
    assert "rank1.json, rank 1 of 2" in output
    for step in (trace.total, *trace.steps):
        assert f"{step.compute_ms:.3f}" in output
        assert f"{step.exposed_comm_ms:.3f}" in output
        assert f"{step.overlap_ratio:.1%}" in output
    for words in ("all_reduce", "gemm", "normalisation", "elementwise", "Ranks side by side"):
        assert words in output


def test_the_table_of_compare_shows_the_five_equations_and_what_does_not_match(
    overlapped: str, sequential: str
) -> None:
    output = overlap("compare", overlapped, sequential)
    for number in range(1, 6):
        assert f"(eq. {number})" in output
    found = compare(read_trace(overlapped), read_trace(sequential))
    assert f"{found.figures['compute_slowdown']:+.1%}" in output
    assert "do not fit" not in output


def test_a_file_prints_one_screen_and_the_rest_is_under_all(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "many.json", kineto.training(steps=12, layers=8, operators=4), **kineto.job(0, 2))
    lines = overlap("analyze", str(path), columns=100).splitlines()
    titles = ("Where the time goes on the device", "Top kernels", "Collectives by size and place")
    assert any(line.startswith(titles[0]) for line in lines)
    assert lines[-1] == "--all shows all tables."
    everything = overlap("analyze", str(path), "--all", columns=100)
    for title in (
        *titles,
        "Critical path",
        "Launches in flight",
        "Compute by family",
        "Kernel times",
    ):
        assert f"\n{title}" in everything
        assert title in titles or f"\n{title}" not in "\n".join(lines)
    # The numbers of a column have equal decimals.
    table = "\n".join(lines).partition("Where the time goes")[2].split("\n\n")[0]
    cells = [re.split(r" {2,}", line.strip()) for line in table.splitlines() if re.match(r"(all|\d+) ", line)]
    assert len(cells) >= 3
    for column in list(zip(*cells, strict=True))[1:]:
        assert len({len(cell.partition(".")[2]) for cell in column}) == 1


@pytest.mark.parametrize("files", [["ddp_*"], ["mi250_*"], ["job128_rank0*"], ["job128_*"], ["*.xz"]], ids=str)
def test_real_traces_print_one_screen_and_no_verdict_is_cut(files: list[str]) -> None:
    paths = [str(path) for pattern in files for path in sorted((Path(__file__).parent / "real").glob(pattern))]
    for columns in (80, 100, 120):
        lines = overlap("analyze", *paths, columns=columns).splitlines()
        assert len(lines) <= 24, "\n".join(lines)
        assert lines[-1].startswith("--all shows ")
        assert any(line.startswith(("Where the time goes on the device", "Ranks side by side")) for line in lines)
        said = " ".join(" ".join(lines).split())
        verdict = " ".join(overlap("analyze", *paths, "--all", columns=2000).splitlines()[0].split())
        assert said.startswith(verdict)


def test_a_trace_of_many_notes_and_steps_prints_one_screen(tmp_path: Path) -> None:
    events = kineto.training(steps=40, layers=8, operators=4)
    path = kineto.write(tmp_path / f"{'long-name-' * 20}.json", events, **kineto.job(0, 8))
    for columns in (80, 100, 120):
        assert len(overlap("analyze", str(path), columns=columns).splitlines()) <= 24


def test_eight_ranks_print_one_screen_skew_first(tmp_path: Path) -> None:
    files = []
    for rank in range(8):
        events = kineto.training(slowdown=rank / 10, operators=0)
        files.append(str(kineto.write(tmp_path / f"rank{rank}.json", events, **kineto.job(rank, 8))))
    for columns in (80, 100, 120):
        lines = overlap("analyze", *files, columns=columns).splitlines()
        assert len(lines) <= 24
        assert lines[0].startswith("Ranks wait ")
        assert any(line.startswith("Ranks side by side") for line in lines)
    everything = overlap("analyze", *files, "--all", columns=80)
    titles = ("Ranks side by side", "Collectives over the ranks", "Top kernels")
    found = [everything.index(f"\n{title}") for title in titles]
    assert found == sorted(found)
    assert all(f"rank{rank}.json, rank {rank} of 8" in everything for rank in range(8))
    assert "--all shows" in lines[-1]
    assert "--all shows" not in everything


def test_the_verdict_of_one_file_comes_first_and_says_what_the_tables_say(overlapped: str) -> None:
    output = " ".join(overlap("analyze", overlapped).split())
    (trace,) = analyze([read_trace(overlapped)]).traces
    whole = trace.time[0]
    assert output.startswith(f"The device computes {whole.compute_ms / whole.span_ms:.1%} of the time; ")
    assert f"{whole.exposed_comm_ms / whole.span_ms:.1%} is exposed communication" in output


@pytest.mark.parametrize("table", ANALYSIS_TABLES)
def test_each_table_of_analyze_has_its_rows_as_csv(overlapped: str, other_rank: str, table: str) -> None:
    found = rows(overlap("analyze", overlapped, other_rank, "--csv", table))
    wanted = analysis_rows(analyze([read_trace(overlapped), read_trace(other_rank)]), table)
    assert len(found) == len(wanted.rows)
    # Of this job no kernel runs both beside communication or copies and alone, and nothing communicates on the host.
    assert found or table in ("estimates", "copies", "on_host_collectives")
    assert not found or list(found[0]) == list(wanted.header)
    assert TABLES == ANALYSIS_TABLES


@pytest.mark.parametrize("columns", [20, 40, 80, 300])
def test_tables_fit_any_terminal(overlapped: str, sequential: str, columns: int) -> None:
    for command in (["analyze", overlapped], ["compare", overlapped, sequential]):
        assert all(len(line) <= columns for line in overlap(*command, columns=columns).splitlines())


def test_long_tables_say_how_much_is_left_out(tmp_path: Path) -> None:
    path = kineto.write(tmp_path / "many.json", kineto.training(steps=40, layers=1, operators=0))
    shown = overlap("analyze", str(path))
    rows = re.findall(r"^(?:all|\d+) ", shown.partition("Where the time goes")[2].partition("\n\n")[0], re.MULTILINE)
    assert f"... {41 - len(rows)} more rows: --all has all" in shown
    events = [kineto.kernel(f"kernel_{i}", i, i + 1, 0) for i in range(30)]
    events += [kineto.kernel(kineto.ALL_REDUCE, 90, 91, 0)]
    one, other = (kineto.write(tmp_path / f"{i}.json", events[i:]) for i in (0, 25))
    assert "... 13 more rows: --json has all" in overlap("compare", str(one), str(other), "--force")


# -- CSV


def test_csv_of_steps_has_a_row_for_the_file_and_one_for_each_step(overlapped: str, other_rank: str) -> None:
    found = rows(overlap("analyze", overlapped, other_rank, "--csv", "steps"))
    assert list(found[0]) == ["file", "rank", "device", *StepFigures.__struct_fields__]
    assert [(row["rank"], row["step"]) for row in found] == [
        (rank, step) for rank in "01" for step in ("all", "4", "5", "6")
    ]
    total = analyze([read_trace(overlapped)]).traces[0].total
    assert float(found[0]["compute_ms"]) == total.compute_ms
    assert found[0]["file"] == overlapped


def test_csv_of_collectives_and_families_has_their_fields(overlapped: str) -> None:
    found = rows(overlap("analyze", overlapped, "--csv", "collectives"))
    assert list(found[0]) == ["file", "rank", "device", *CollectiveFigures.__struct_fields__]
    assert [(row["collective"], row["group_size"], row["count"]) for row in found] == [("all_reduce", "2", "24")]
    found = rows(overlap("analyze", overlapped, "--csv", "families"))
    fields = [name for name in FamilyFigures.__struct_fields__ if name != "beside"]
    assert list(found[0]) == ["file", "rank", "device", *fields, "beside_ms"]
    assert {row["family"] for row in found} == {"gemm", "normalisation", "elementwise"}
    assert found[0]["beside_ms"].startswith("all_reduce=")


def test_csv_of_skew_has_a_row_for_each_rank(overlapped: str, other_rank: str) -> None:
    found = rows(overlap("analyze", overlapped, other_rank, "--csv", "skew"))
    wanted = [name for name in CollectiveSkew.__struct_fields__ if name not in ("skew_ms", "ranks")]
    assert list(found[0]) == [*wanted, *RankTime.__struct_fields__]
    assert [row["rank"] for row in found] == ["0", "1"]


def test_csv_of_compare_has_its_figures_kernels_pairs_and_unmatched(overlapped: str, sequential: str) -> None:
    found = compare(read_trace(overlapped), read_trace(sequential))
    figures = rows(overlap("compare", overlapped, sequential, "--csv", "figures"))
    assert {row["figure"]: float(row["value"]) for row in figures} == found.figures
    kernels = rows(overlap("compare", overlapped, sequential, "--csv", "kernels"))
    assert [row["name"] for row in kernels] == [kernel.name for kernel in found.kernels]
    assert [float(row["lost_ms"]) for row in kernels] == [kernel.lost_ms for kernel in found.kernels]
    pairs = rows(overlap("compare", overlapped, sequential, "--csv", "pairs"))
    assert [(row["victim"], row["beside"]) for row in pairs] == [
        (pair.kernel_family, pair.concurrent_with) for pair in found.pairs
    ]
    assert [row["slowdown"] != "" for row in pairs] == [pair.slowdown is not None for pair in found.pairs]


def test_names_with_commas_quotes_and_lines_survive_csv(tmp_path: Path, sequential: str) -> None:
    odd = 'void f<"a", b>(int,\tchar)'
    path = kineto.write(tmp_path / "odd.json", [kineto.kernel(odd, 0, 1_000, 0)])
    found = rows(overlap("compare", str(path), sequential, "--csv", "unmatched", "--force"))
    assert list(found[0]) == list(UnmatchedKernel.__struct_fields__)
    assert odd.replace("\t", "\ufffd") in {row["name"] for row in found}


def test_a_figure_that_is_undefined_is_an_empty_cell_and_null(tmp_path: Path) -> None:
    path = str(kineto.write(tmp_path / "a.json", [kineto.kernel(kineto.GEMM, 0, 1_000, 0)]))
    (row,) = rows(overlap("analyze", path, "--csv", "steps"))
    assert (row["overlap_ratio"], row["hidden_comm_fraction"]) == ("", "")
    assert strict_json(overlap("analyze", path, "--json"))["traces"][0]["total"]["overlap_ratio"] is None
    assert "nan" not in overlap("analyze", path).lower().replace("analyze", "")


@pytest.mark.parametrize("table", ["steps", "collectives", "families", "skew"])
def test_csv_of_a_table_without_rows_is_empty_and_no_error(tmp_path: Path, table: str) -> None:
    copy = {**kineto.kernel("Memcpy HtoD (Pageable -> Device)", 0, 1_000, 0), "cat": "gpu_memcpy"}
    path = kineto.write(tmp_path / "a.json", [copy])
    found = rows(overlap("analyze", str(path), "--csv", table))
    assert len(found) == (1 if table == "steps" else 0)


# -- refusals


@pytest.mark.parametrize("command", ["analyze", "compare"])
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("gemm", "must be of the form FAMILY=REGEX"), ("=x", "must be of the form"), ("gemm=", "must be of the form"),
        ("gemm=(", "is no regular expression"), ("gemm=[a-", "is no regular expression"), ("", "must be of the form"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_is_refused(overlapped: str, command: str, rule: str, said: str) -> None:
    files = [overlapped] * (2 if command == "compare" else 1)
    result = invoke(command, *files, "--rule", rule)
    assert result.exit_code == 2
    assert "--rule" in result.output
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("family", ["[red]mine", "[/red]", "[/]", ":smile:", "a,b"])
def test_a_family_of_any_name_is_shown_as_it_is(overlapped: str, sequential: str, family: str) -> None:
    rule = f"{family}=gemm"
    assert family in overlap("analyze", overlapped, "--rule", rule)
    assert family in overlap("compare", overlapped, sequential, "--rule", rule)
    (first, *_) = rows(overlap("analyze", overlapped, "--rule", rule, "--csv", "families"))
    assert first["family"] == family


def test_a_rule_counts_for_pairs_of_a_comparison_too(overlapped: str, sequential: str) -> None:
    found = rows(overlap("compare", overlapped, sequential, "--csv", "pairs", "--rule", "dense=gemm"))
    assert {"dense", "normalisation"} <= {row["victim"] for row in found}
    assert "gemm" not in {row["victim"] for row in found}


def test_communication_names_copies_too(tmp_path: Path) -> None:
    gemm = kineto.kernel(kineto.GEMM, 0, 6_000_000, 1)
    copy = {**kineto.kernel("Memcpy DtoD (Device -> Device)", 4_000_000, 9_000_000, 2, stream=20), "cat": "gpu_memcpy"}
    path = str(kineto.write(tmp_path / "copies.json", [gemm, copy]))
    assert [row["comm_ms"] for row in rows(overlap("analyze", path, "--csv", "steps"))] == ["0.0"]
    found = rows(overlap("analyze", path, "--csv", "steps", "--communication", "Memcpy DtoD"))
    assert [(row["comm_ms"], row["copy_ms"]) for row in found] == [("5.0", "0.0")]


def test_what_cannot_be_read_gives_one_line_and_no_traceback(tmp_path: Path, overlapped: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("no JSON")
    for arguments in (
        ["analyze", str(bad)], ["analyze", str(bad), str(bad)], ["compare", overlapped, str(bad)],
        ["compare", str(bad), overlapped], ["analyze", str(tmp_path / "none")], ["compare", str(tmp_path), overlapped],
    ):  # fmt: skip
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert result.output.startswith("Error: ")
        assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["analyze"], ["compare", "one.json"], ["analyze", "a.json", "--csv", "pairs"], ["compare"]]
)
def test_missing_files_and_unknown_tables_are_errors_of_usage(arguments: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.output


def test_a_bad_file_leaves_no_output_behind(tmp_path: Path) -> None:
    result = invoke("analyze", str(tmp_path / "none.json"), "--output", str(tmp_path / "found.json"))
    assert result.exit_code == 2
    assert not (tmp_path / "found.json").exists()


# -- what it takes


@pytest.mark.parametrize("command", ["analyze", "compare"])
def test_traces_are_read_without_torch_or_any_framework(overlapped: str, sequential: str, command: str) -> None:
    files = [overlapped] if command == "analyze" else [overlapped, sequential]
    code = (
        "import sys\n"
        "from overlap_callbacks.cli import main\n"
        f"main({[command, *files]!r}, standalone_mode=False)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print('loaded:', *sorted(loaded & {'torch', 'scipy', 'lightning', 'wandb', 'pandas'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert "Kernel" in done.stdout


@pytest.mark.parametrize("command", ["analyze", "compare"])
def test_a_small_trace_is_shown_without_looking_for_garbage_among_all_objects(
    overlapped: str, sequential: str, command: str
) -> None:
    files = [overlapped] if command == "analyze" else [overlapped, sequential]
    code = (
        "import gc\n"
        "gc.collect()\n"
        "looks = []\n"
        "gc.callbacks.append(lambda phase, info: phase == 'start' and looks.append(info['generation']))\n"
        "from overlap_callbacks.cli import main\n"
        f"main({[command, *files]!r}, standalone_mode=False)\n"
        "print('full:', looks.count(2), 'few:', len(looks) < 30, 'enabled:', gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.splitlines()[-1] == "full: 0 few: True enabled: True"


def test_the_command_ends_without_a_traceback_where_a_trace_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "bad.json.gz"
    path.write_bytes(b"\x1f\x8b\x08")
    command = [sys.executable, "-m", "overlap_callbacks", "analyze", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


def test_csv_has_no_cell_that_a_spreadsheet_would_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("=HYPERLINK(1).json").write_bytes(kineto.text(short_trace()))
    found = rows(overlap("analyze", "=HYPERLINK(1).json", "--csv", "steps"))
    assert {row["file"] for row in found} == {"'=HYPERLINK(1).json"}
