"""What ``overlap show`` prints first: the answer of a run in twenty lines of a hundred columns."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from overlap_callbacks.analysis.headline import run_headline, summary
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.race import RaceCheck, RaceVerdict
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.settled import Verdict
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.report import page, record
from overlap_callbacks.report.terminal import ShortScreen, drawn
from overlap_callbacks.report.views.runs import runs_document
from overlap_callbacks.report.views.short import short_of
from overlap_callbacks.sinks.wandb.cards import SoFar, step_card
from tests.commands import invoke
from tests.report.arm_runs import arm_window
from tests.report.expert_runs import write_experts
from tests.report.runs import full_report, many, rank_window, run_info, window, write
from tests.report.scaling_runs import write_sized
from tests.report.screens import SCREENS
from tests.report.test_causal import job
from tests.report.test_control import RUN as CONTROL_RUN
from tests.report.test_control import WINDOWS as CONTROL
from tests.report.test_one_headline import NOTHING, RUNS, recorded, settled

TUTORIAL = Path(__file__).resolve().parent.parent / "docs" / "tutorial"


def lines_of(folder: Path, *windows: OverlapReport, width: int = 100) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(ShortScreen(short_of(record.read(write(folder, *windows))), "overlap show RUN --all"))
    lines = console.export_text().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    return [line.rstrip() for line in lines]


def saving(number: int, speedup: float) -> OverlapReport:
    """A window in which a sequential step takes longer by ``speedup``."""
    longer = Estimate(speedup, speedup - 0.01, speedup + 0.01, 8, 16, 0.004, 11.0)
    like = msgspec.structs.replace(window(number % 12), window=number, first_step=20 + 500 * number)
    return msgspec.structs.replace(like, speedup_vs_sequential=longer)


def begun(number: int) -> OverlapReport:
    """A window that was cut short before a step of it counted."""
    names = [name for name in window(number).figures()]
    why = ("cut short: the monitor was closed",)
    empty = {"samples": (), "kernels": (), "pairs": (), "collectives": (), "num_steps": 0}
    return msgspec.structs.replace(window(number), complete=False, problems=why, **dict.fromkeys(names), **empty)


def test_a_window_without_a_counted_step_takes_no_line(tmp_path: Path) -> None:
    windows = [window(number) for number in range(3)]
    whole, cut = lines_of(tmp_path / "whole", *windows), lines_of(tmp_path / "cut", *windows, begun(3))
    assert cut == whole
    many = [saving(number, 0.1) for number in range(8)]
    assert any("8 of 8 windows count; " in line for line in lines_of(tmp_path / "many", *many, begun(8)))
    text = " ".join(" ".join(lines_of(tmp_path / "alone", begun(0))).split())
    assert "Nothing has been measured: the only window was left out." in text
    assert "Why: cut short: the monitor was closed." in text
    # One that an error cut short, and one that measured steps, have their lines.
    error = "cut short: an exception in the user's step [OC311]"
    failed = msgspec.structs.replace(begun(3), problems=(error,))
    shown = lines_of(tmp_path / "failed", *windows, failed)
    assert [line for line in shown if line.startswith("window 3")] == [f"window 3  step 1,520  {error}"]
    assert "All tables, and 1 note: overlap show RUN --all" in shown
    text = " ".join(
        " ".join(lines_of(tmp_path / "many failed", *many, msgspec.structs.replace(failed, window=8))).split()
    )
    assert "8 of 9 windows count; cut short: 1 (window 8); " in text
    assert f" Window 8, {error}. " in text
    half = msgspec.structs.replace(window(3), complete=False, problems=("cut short: the monitor was closed",))
    assert any(line.startswith("window 3") for line in lines_of(tmp_path / "half", *windows, half))


def broken(folder: Path) -> Path:
    path = write(folder, *FOUR) / "overlap.jsonl"
    path.write_text(path.read_text() + "{broken\n")
    return folder


def doubtful(number: int, *problems: str) -> OverlapReport:
    return msgspec.structs.replace(window(number), valid=False, problems=problems)


FOUR = [window(number) for number in range(4)]
RACE = RaceCheck(RaceVerdict.RACE, took_ms=12.0)
LONG = "residual overlap 0.9 in sequential steps is above 0.05: " + "some communication escaped " * 40 + "[OC321]"
# Every kind of record that the tests have, and some that are worse.
KINDS: dict[str, Callable[[Path], Path]] = {
    **{name: lambda folder, name=name: recorded(folder, name, False).path for name in RUNS},
    **{f"{name}, running": lambda folder, name=name: recorded(folder, name, True).path for name in RUNS},
    **{f"screen {name}": lambda folder, make=make: make(folder)[-1].path for name, make in SCREENS.items()},
    "four": lambda folder: write(folder, *FOUR),
    "everything": lambda folder: write(folder, full_report()),
    "power": lambda folder: write(folder, *[window(number, power=True) for number in range(4)]),
    "quick, and then by the schedule": lambda folder: write(
        folder, *[msgspec.structs.replace(one, quick=True) for one in FOUR], window(4)
    ),
    "many windows": lambda folder: write(folder, *many(300)),
    "odd windows": lambda folder: write(
        folder, *[saving(n, 0.3 if n in (7, 9, 11, 13) else 0.1 + 0.001 * (n % 3)) for n in range(16)],
        doubtful(16, LONG),
    ),
    "nothing counted": lambda folder: write(folder, begun(0)),
    "cut windows": lambda folder: write(
        folder, *FOUR[:3], msgspec.structs.replace(begun(3), problems=("cut short: an exception [OC311]",))
    ),
    "control": lambda folder: write(folder, *CONTROL, run=CONTROL_RUN),
    "short control": lambda folder: write(folder, *CONTROL[:2], run=CONTROL_RUN),
    "arms": lambda folder: write(
        folder, *FOUR, arms=[arm_window(n, name) for n, name in enumerate(["prefetch_2_2", "a-long-name-" * 20])]
    ),
    "arms alone": lambda folder: write(folder, arms=[arm_window(0)]),
    "empty": write,
    "unfinished": lambda folder: write(folder, blocks=rank_window(0).timed),
    "many notes": lambda folder: write(
        folder, *FOUR[:3], doubtful(3, *[f"problem {n} {'of many words ' * 30}[OC3{n:02}]" for n in range(40)])
    ),
    "long names": lambda folder: write(
        folder, *FOUR, run=run_info(framework="f" * 300, device="NVIDIA " * 60, backend="nccl," * 40)
    ),
    "experts": write_experts,
    "delays": lambda folder: job(folder).path,
    "sizes": lambda folder: write_sized(folder, 8),
    "broken": broken,
    "race": lambda folder: write(folder, *[msgspec.structs.replace(one, race=RACE) for one in FOUR]),
    "all at once": lambda folder: write(
        folder,
        *[msgspec.structs.replace(one, race=RACE, settled=settled(Verdict.SETTLED), lower_bound=True) for one in FOUR],
        arms=[arm_window(0)],
    ),
    **{path.name: lambda folder, path=path: path for path in Path(__file__).parent.glob("records/*.jsonl")},
    **{f"tutorial {path.name}": lambda folder, path=path: path for path in TUTORIAL.iterdir()},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_run_fits_in_twenty_lines_and_nothing_that_a_reader_needs_is_cut(tmp_path: Path, kind: str) -> None:
    known = record.read(KINDS[kind](tmp_path))
    found, short = run_headline(known.summary, len(known.arms)), short_of(known)
    for width in (80, 100, 120):
        console = Console(width=width, file=io.StringIO(), record=True)
        console.print(ShortScreen(short, "overlap show overlap_runs/2026-11-29T05-00-00 --all"))
        lines = console.export_text().splitlines()
        text = " ".join(" ".join(lines).split())
        assert len(lines) <= 20, f"{len(lines)} lines at {width}:\n" + "\n".join(lines)
        assert all(len(line) <= width for line in lines)
        assert " ".join((found.sentence, *found.also)) in text
        assert [line.split()[0] for line in lines if "█" in line and not line.startswith("saved")] == [
            bar.label for bar in short.bars
        ]
        assert all(bar.words in text for bar in short.bars)
        assert short.parts in text or kind == "all at once"
        assert len([line for line in lines if re.match(r" *window \d", line)]) == len(short.windows) <= 4
        assert len([line for line in lines if line.startswith("saved ")]) == bool(short.saved)
        assert short.step in text  # with its number, and its command whole
        assert short.cost in text or kind == "all at once"
        assert ("Why: " in text) is bool(found.why)
        assert text.endswith(": overlap show overlap_runs/2026-11-29T05-00-00 --all")
        assert ("--causal" in text) is bool(short.causal) is (kind == "delays")
        assert not re.search("What to do: .*To try first: ", text)  # one next step
        blank = [place for place, line in enumerate(lines) if not line]
        assert blank or kind == "all at once"
        assert all(later > place + 1 for place, later in pairwise(blank))


@pytest.mark.parametrize("number", [2, 3, 5])
def test_several_runs_fit_in_some_twenty_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    names = [f"run-{place}" for place in range(number)]
    for place, name in enumerate(names):
        recorded(tmp_path / name, list(RUNS)[place], running=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke("show", *names).stdout
    assert shown.count("\n") <= 20
    assert all([f"{name}: " in shown for name in names])
    many = invoke("show", *names, *names).stdout if number == 5 else ""
    assert ("5 more runs, and all tables: overlap show" in many) is (number == 5)


def test_where_nothing_overlaps_the_one_step_to_take_has_a_number_and_a_command(tmp_path: Path) -> None:
    profiled = tuple(
        [
            msgspec.structs.replace(block, hidden_comm_ms=0.0, covered_compute_ms=0.0, step_ms=block.step_ms + 200.0)
            for block in rank_window().profiled
            if block.step_ms is not None
        ]
    )
    sent = (CollectiveTime("allreduce_", "default", 2, "nccl", 1, 25_000_000, 25_000_000, 100.0, "data", 25e6),)
    made = window(0, profiled=profiled, collectives=sent, dimensions=())
    known = {"ddp_bucket_cap_bytes": 25 * 2**20, "parameters": 6_250_000, "parameter_types": "float32"}
    path = write(tmp_path, msgspec.structs.replace(made, exposure=None, **NOTHING), run=run_info(configuration=known))
    assert re.fullmatch(
        r"What to do: Lower DDP's bucket_cap_mb, so that reductions begin during the backward pass\. Try 5 or 12 MiB: "
        r"up to [\d.]+ ms of exposed time a step\. Try: overlap tune --arg bucket-mb=25,5,12 -- COMMAND",
        short_of(record.read(path)).step,
    )


def test_a_run_of_four_windows_fits_in_twenty_lines_from_the_headline_to_the_cost(tmp_path: Path) -> None:
    windows = [window(number) for number in range(4)]
    lines = lines_of(tmp_path, *windows)
    assert len(lines) <= 20
    text = " ".join(" ".join(lines).split())
    found = run_headline(record.read(tmp_path).summary)
    assert text.startswith(" ".join((found.sentence, *found.also)))
    bars = [line for line in lines if "█" in line]
    assert [line.split()[0] for line in bars] == ["Ideal", "Overlapped", "Sequential"]
    lengths = [line.count("█") for line in bars]
    assert lengths == sorted(lengths)
    assert len({len(re.findall(r"\.(\d+) ms", line)[0]) for line in bars}) == 1  # the same decimals
    assert "Profiled step: compute alone " in text
    assert "exposed non-bubble 7.5%, bubble 3.4%." in text  # the headline's share has both
    assert len([line for line in lines if line.startswith("window ")]) == 4
    assert re.search(
        r"To try first: .*: up to [\d.]+ ms of lost time a step\. Try: overlap tune --env .* -- COMMAND Cost",
        text,
    )
    assert "Cost of measuring: " in text
    assert lines[-1] == "All tables: overlap show RUN --all"
    assert not re.search(r"eq\. \d|residual|chance", text)
    # Every time is of steps without the profiler: shares are of profiled ones, and no time is.
    assert "371" not in text


def test_a_window_that_does_not_count_says_why_in_its_line(tmp_path: Path) -> None:
    bad = msgspec.structs.replace(window(1), valid=False, problems=("residual overlap 0.3 " * 20,))
    unclear = msgspec.structs.replace(window(2), speedup_vs_sequential=Estimate(0.01, -0.1, 0.12, 8, 16))
    rows = [line for line in lines_of(tmp_path, window(0), bad, unclear) if line.startswith("window ")]
    assert re.search(r"window 0 +step 20 +412\.0 ms with +468\.0 ms without +saves 12\.0% \(11\.8 to 12\.1\)", rows[0])
    assert re.search(r"window 1 +step 520 +not valid: residual overlap", rows[1])
    assert rows[2].endswith("inconclusive (a difference of 11% would show)")


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_reason_that_is_shortened_keeps_its_code(tmp_path: Path, width: int) -> None:
    why = f"residual overlap 0.911 in sequential steps is above 0.05: {'some communication escaped ' * 6}[OC321]"
    bad = msgspec.structs.replace(window(1), valid=False, problems=(why, "another [OC322]"))
    (row,) = [line for line in lines_of(tmp_path, window(0), bad, width=width) if line.startswith("window 1")]
    assert re.search(r"not valid: residual.*… \[OC321\]$", row)


def test_an_interval_that_says_nothing_is_not_printed(tmp_path: Path) -> None:
    """Where two windows differ, an interval for all looks may reach from 1.7 ms to 86 s."""
    wide = {name: Estimate(380.2, 1.7, 86274.0, 8, 16) for name in ("e2e_overlapped_ms", "e2e_ideal_ms")}
    change = Estimate(0.2, -0.97, 900.0, 8, 16)
    found = msgspec.structs.replace(
        window(0), **wide, speedup_vs_sequential=change, compute_slowdown=change, gap_to_ideal=change,
        exposed_comm_ms=Estimate(30.0, 0.0, 5000.0, 8, 16), hidden_comm_ms=Estimate(2.0, 0.0, 12.0, 8, 16),
        hidden_comm_fraction=Estimate(0.5, 0.02, 0.98, 8, 16),
        measurement_overhead=0.02, measurement_overhead_ci_low=-3.0, measurement_overhead_ci_high=3.5,
    )  # fmt: skip
    record_ = record.read(write(tmp_path, found))
    bars = [line for line in lines_of(tmp_path / "short", found) if "█" in line]
    assert [line.split("  ")[-1].strip() for line in bars[:2]] == ["380.2 ms (not resolved)"] * 2
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(drawn(runs_document([record_], charts=False), everything=True))
    card = step_card(found, SoFar.of(record_.summary))
    several = runs_document([record_, record_])
    texts = {
        "short": "\n".join(lines_of(tmp_path / "again", found)),
        "all": console.export_text(),
        "page": page([record_]),
        "several": page([record_, record_]),
        "card": card,
        "headline": run_headline(record_.summary).text,
        "log": summary(found),
    }
    assert several.compared
    for medium, text in texts.items():
        assert not re.search(r"86,?274|5,?000\.|90,?000%|350\.00%", text), medium
        assert "not resolved" in text, medium
    # A part of the step may be nothing: its interval says something up to the whole step.
    assert re.search(r"hidden behind compute +2\.00 ms +0\.00 to 12\.00 ms", texts["all"])
    assert re.search(r"exposed +30\.00 ms +not resolved", texts["all"])


def test_many_windows_are_one_line_of_bars_and_the_odd_ones_are_named(tmp_path: Path) -> None:
    windows = [saving(number, 0.3 if number == 7 else 0.1 + 0.001 * (number % 3)) for number in range(12)]
    windows[9] = msgspec.structs.replace(windows[9], valid=False)
    lines = lines_of(tmp_path, *windows)
    assert len(lines) <= 20
    (bars,) = [line for line in lines if line.startswith("saved ")]
    assert len(bars) == len("saved ") + 11
    assert bars.count("█") == 1
    text = " ".join(" ".join(lines).split())
    assert "11 of 12 windows count; not valid: 1 (window 9); overlap saves 9.2% in the median one; odd: " in text
    assert "; odd: window 7 (step 3,520, saves 23.1%)." in text
    alike = lines_of(tmp_path / "alike", *[saving(number, 0.1) for number in range(300)])
    assert "none is odd." in " ".join(alike)
    assert len(alike) <= 20


def test_where_overlap_costs_time_every_window_has_a_bar_and_no_cost_is_called_a_saving(tmp_path: Path) -> None:
    worse = [saving(number, -0.3 if number == 4 else -0.1) for number in range(9)]
    lines = lines_of(tmp_path, *worse)
    (bars,) = [line for line in lines if line.startswith("saved ")]
    assert re.fullmatch("saved [▁-█]{9}", bars)
    text = " ".join(" ".join(lines).split())
    assert "; overlap costs 11.1% in the median one; odd: window 4 (step 2,020, costs 42.9%)." in text
    alike = lines_of(tmp_path / "alike", *[saving(number, -0.1) for number in range(9)])
    assert "saved ▁▁▁▁▁▁▁▁▁" in alike


def test_the_times_of_windows_have_the_decimals_of_the_shortest_and_none_is_of_the_other_mode(tmp_path: Path) -> None:
    short = msgspec.structs.replace(
        saving(0, 0.1), e2e_overlapped_ms=Estimate(0.4, 0.4, 0.4, 8, 16), e2e_sequential_ms=Estimate(0.44, 0, 1, 8, 16)
    )
    half = msgspec.structs.replace(saving(1, 0.1), e2e_overlapped_ms=None)
    rows = [line for line in lines_of(tmp_path, short, half, window(2)) if line.startswith("window ")]
    assert "0.400 ms with" in rows[0]
    assert "0.440 ms without" in rows[0]
    assert " with " not in rows[1]
    assert "467.650 ms without" in rows[2]


def test_a_slowdown_that_is_not_clear_is_no_part_of_the_step(tmp_path: Path) -> None:
    unclear = msgspec.structs.replace(window(0), compute_slowdown=Estimate(0.1, -0.1, 0.3, 8, 16))
    text = " ".join(lines_of(tmp_path, unclear))
    assert "Compute slowdown: inconclusive (a difference of 20% would show)." in text
    assert "Profiled step: compute 8" in text
    assert "contention" not in text


def test_what_must_be_read_first_comes_first_and_no_name_steers_the_terminal(tmp_path: Path) -> None:
    control = msgspec.structs.replace(window(0), control=True, problems=("a\nOverlap saves 90%", "\x1b[2J"))
    path = write(tmp_path, control) / "overlap.jsonl"
    path.write_text(path.read_text().replace('"control":false', '"control":true', 1) + "{broken\n")
    text = "\n".join(
        lines_of(
            tmp_path / "other",
            window(0),
            msgspec.structs.replace(window(1), valid=False, problems=("a\nOverlap saves 90%",)),
        )
    )
    assert "\nOverlap saves 90%" not in text
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(ShortScreen(short_of(record.read(tmp_path)), ""))
    said = console.export_text()
    assert said.startswith("Attention: A control run")
    assert "1 line of the record could not be read." in said
    assert "\x1b" not in said


@pytest.mark.parametrize(("width", "first", "last"), [(100, "  ", "a difference of"), (80, " ", "(")])
def test_no_figure_of_a_window_is_cut_in_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, first: str, last: str
) -> None:
    unsure = msgspec.structs.replace(window(2), speedup_vs_sequential=Estimate(0.02, -0.1, 0.14, 16, 8))
    folder = str(write(tmp_path, window(0), window(1), unsure))
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [line for line in invoke("show", folder).stdout.splitlines() if line.startswith("window ")]
    assert len(lines) == 3
    assert all(len(line) <= width and line.endswith(")") and f"{first}saves 12.0% (11." in line for line in lines[:2])
    assert lines[2].endswith("% would show)")
    assert f"inconclusive {last if last == '(' else f'({last}'}" in lines[2]
