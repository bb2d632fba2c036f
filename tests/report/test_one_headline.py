"""Whatever screen shows a run's number, it is the headline's: bars, tiles, W&B, the log line, check, quick, JSON."""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from overlap_callbacks.analysis import headline
from overlap_callbacks.analysis.bottleneck import run_bottleneck
from overlap_callbacks.analysis.headline import run_headline, run_verdict
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.results.settled import Settled, Verdict
from overlap_callbacks.analysis.run_summary import NOT_SETTLED, NOT_VERIFIED, RunSummary
from overlap_callbacks.cli import main
from overlap_callbacks.monitor.background import quick
from overlap_callbacks.monitor.background.quick import QuickLook
from overlap_callbacks.report.record import Record, read
from overlap_callbacks.report.terminal import ShortScreen
from overlap_callbacks.report.views.elements import Chart, Tiles
from overlap_callbacks.report.views.runs import runs_document
from overlap_callbacks.report.views.short import short_of
from overlap_callbacks.sinks.wandb import cards
from overlap_callbacks.sinks.wandb.sink import run_metrics
from tests.report.runs import write
from tests.report.screens import fsdp_window

SAVES = re.compile(
    r"Overlap (saves|costs) [\d.]+ ms a step: ([\d.]+) ms with it, ([\d.]+) ms without "
    r"\(([\d.]+)%, ([\d.]+) to ([\d.]+)\)"
)
SLOWDOWN = re.compile(r"kernels take ([\d.]+)% (?:longer|less) than without overlap \(([\d.]+) to ([\d.]+)\)")
EXPOSED = re.compile(r"exposed communication takes ([\d.]+)% of a step \((?:([\d.]+) to ([\d.]+)|too few blocks);")
HIDDEN = re.compile(r"(?<!At most )(?<![\d.])([\d.]+)%(?: \([^)]*\))? of communication is hidden")


made = functools.cache(fsdp_window)


def windows(number: int = 3, **changes: Any) -> list[OverlapReport]:
    return [msgspec.structs.replace(made(each), **changes) for each in range(number)]


def share(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half, 8, 16)


def settled(verdict: Verdict, **changes: Any) -> Settled:
    known = Settled(0.25, 0.2, 0.3, 0.136, 3, 8.0, verdict, None, 27, 194, 3, 0.18, 0.33)
    return msgspec.structs.replace(known, **changes)


def lengths(speedup: Estimate) -> dict[str, Estimate]:
    """Step times between which there is this difference."""
    step, longer = Estimate(400.0, 396.0, 404.0, 8, 16), 400.0 * (1 + speedup.value)
    return {
        "speedup_vs_sequential": speedup,
        "e2e_overlapped_ms": step,
        "e2e_sequential_ms": Estimate(longer, longer - 4.0, longer + 4.0, 8, 16),
    }


NOTHING = {"overlap_ratio": share(0.0, 0.0), "hidden_comm_fraction": share(0.0, 0.0), "hidden_comm_ms": share(0.0, 0.0)}
# Made when a test asks for them.
RUNS: dict[str, Callable[[], list[OverlapReport]]] = {
    "clear": windows,
    "settled": partial(windows, settled=settled(Verdict.SETTLED)),
    "settled for one look": partial(windows, settled=settled(Verdict.SETTLED, all_looks_low=None, all_looks_high=None)),
    "settled at nothing": partial(
        windows, settled=settled(Verdict.SETTLED, value=0.01, all_looks_low=-0.2, all_looks_high=0.2)
    ),
    "settled anywhere": partial(
        windows,
        settled=settled(
            Verdict.SETTLED, value=4.01, ci_low=-0.17, ci_high=13.7, all_looks_low=-0.76, all_looks_high=26
        ),
    ),
    "settled below": partial(
        windows, settled=settled(Verdict.SETTLED, value=-0.1, all_looks_low=-0.2, all_looks_high=-0.01)
    ),
    "settled alone": partial(windows, 1, settled=settled(Verdict.SETTLED)),
    "not settled": partial(windows, settled=settled(Verdict.NOT_SETTLED, at_least=0.16)),
    "no memory": partial(windows, settled=settled(Verdict.SHORT)),
    "one window": partial(windows, 1),
    "many": partial(windows, 40),
    "small": partial(windows, speedup_vs_sequential=share(0.0004, 0.0003), compute_slowdown=share(0.0008, 0.0005)),
    "inconclusive": partial(
        windows, 1, **lengths(share(0.02, 0.3)), compute_slowdown=share(0.1, 0.2), exposed_comm_ms=share(40.0, 24.0)
    ),
    "exposed but inconclusive": partial(windows, **lengths(share(0.02, 0.3)), exposed_comm_ms=share(40.0, 12.0)),
    "exposed within noise": partial(windows, 1, exposed_comm_ms=share(0.4, 0.4)),
    "exposed unclear": partial(windows, 1, exposed_comm_ms=share(40.0, 45.0), hidden_comm_fraction=share(0.4, 0.45)),
    "nothing overlaps": partial(windows, 1, **NOTHING),
    "no interval": partial(windows, 1, **lengths(Estimate(0.1, None, None, 2, 1))),
    "no profile": partial(windows, residual_overlap=None),
    "lower bound": partial(windows, lower_bound=True),
    "some invalid": lambda: [*windows(2), *windows(1, valid=False, problems=("residual overlap 0.3 is above 0.02",))],
    "invalid": partial(windows, valid=False, problems=("residual overlap 0.3 is above 0.02",)),
    "cut short": partial(windows, 1, complete=False, problems=("an exception",)),
}


@functools.cache
def reports(name: str) -> list[OverlapReport]:
    return RUNS[name]()


@pytest.fixture(params=[False, True], ids=["ended", "running"])
def running(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def recorded(folder: Path, name: str, running: bool) -> Record:
    path = write(folder, *reports(name)) / "overlap.jsonl"
    if running:
        lines = path.read_text().splitlines(keepends=True)
        assert lines[-1].startswith('{"record":"end"')
        path.write_text("".join(lines[:-1]))
    record = read(folder)
    assert record.running is running
    return record


def agrees(shown: str, said: str) -> bool:
    """Whether two numbers are the same, with the decimals of the one that has fewer."""
    decimals = min(len(text.partition(".")[2]) for text in (shown, said))
    return abs(float(shown) - float(said)) <= 0.501 * 10**-decimals


def digits(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))


def told(text: str) -> dict[str, tuple[str, ...]]:
    found = {name: pattern.search(text) for name, pattern in
             (("saves", SAVES), ("slowdown", SLOWDOWN), ("exposed", EXPOSED), ("hidden", HIDDEN))}  # fmt: skip
    return {name: tuple(filter(None, each.groups())) for name, each in found.items() if each is not None}


@pytest.mark.parametrize("name", RUNS)
def test_bars_and_tiles_have_the_numbers_of_the_headline(tmp_path: Path, name: str, running: bool) -> None:
    record = recorded(tmp_path, name, running)
    found = run_headline(record.summary)
    said = told(found.text)
    (page,) = runs_document([record]).runs
    tiles = {tile.label: tile for block in page.blocks if isinstance(block, Tiles) for tile in block.tiles}
    charts = {block.title: block for block in page.blocks if isinstance(block, Chart)}
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(ShortScreen(short_of(record), ""))
    terminal = console.export_text()
    if not record.figures:
        assert not tiles
        assert not charts
        assert "█" not in terminal
        return
    both = re.findall(r"With it|([\d.]+) ms with it, ([\d.]+) ms without", found.text)[0]
    drawn = {row["label"]: row["value"] for row in charts["Step time"].data["rows"]}
    for label, ms in zip(("Overlapped", "Sequential"), both, strict=True):
        (line,) = [line for line in terminal.splitlines() if line.startswith(label)]
        assert agrees(digits(line)[0], ms), (line, ms)
        assert agrees(str(drawn[label]), ms)
    step = tiles["Step time with overlap"]
    assert digits(step.remark) == list(both)
    if "saves" in said:
        _, _, _, value, low, high = said["saves"]
        assert digits(step.value) == [value]
        assert sorted(digits(step.interval), key=float) == [low, high]
        assert (step.value[0] == "+") == (said["saves"][0] == "costs")
    else:
        assert not digits(step.value)
    slowdown = tiles["Compute slowdown"]
    if "slowdown" in said:
        assert (*digits(slowdown.value), *sorted(digits(slowdown.interval), key=float)) == said["slowdown"]
    else:
        assert not digits(slowdown.value)
    exposed = tiles["Exposed communication"]
    if "exposed" in said:
        assert [*digits(exposed.value), *digits(exposed.interval)] == list(said["exposed"])
    elif found.state != headline.NOTHING_OVERLAPS:
        assert not digits(exposed.value)
        assert f"({exposed.interval} of a profiled step)".replace("\N{NO-BREAK SPACE}", " ") in found.text
    hidden = tiles["Hidden communication"]
    assert digits(hidden.value) == list(said.get("hidden", ())) or found.state == headline.NOTHING_OVERLAPS


@pytest.mark.parametrize("name", RUNS)
def test_wandb_and_json_and_check_have_the_figures_of_the_headline(tmp_path: Path, name: str, running: bool) -> None:
    record = recorded(tmp_path, name, running)
    found = run_headline(record.summary)
    figures = record.pooled()
    metrics = run_metrics(record.summary, "short")
    assert {key for key in metrics if not key.endswith(("low", "high"))} <= {f"overlap/{name}" for name in figures}
    for each, figure in figures.items():
        for key, value in (
            (each, figure.value),
            (f"{each}_ci_low", figure.ci_low),
            (f"{each}_ci_high", figure.ci_high),
        ):
            assert metrics.get(f"overlap/{key}", value) == value
    limits = [f"{side}={name}=0.01" for name in figures for side in ("--max", "--min")] or ["--max=comm_ms=1"]
    answer = CliRunner().invoke(main, ["check", "--json", *limits, str(tmp_path)])
    shown = json.loads(CliRunner().invoke(main, ["show", "--json", str(tmp_path)]).stdout)
    assert (shown["verdict"], shown["state"], set(shown["figures"])) == (found.text, found.state, set(figures))
    if not figures:
        assert answer.exit_code == 3
        (row,) = json.loads(answer.stdout)["limits"]
        assert (row["measured"], row["doubt"], json.loads(answer.stdout)["state"]) == (None, found.text, found.state)
        plain = CliRunner().invoke(main, ["check", *limits, str(tmp_path)])
        assert f"nothing can be judged: {found.text}" in plain.stderr
        assert metrics == {}
        return
    judged = json.loads(answer.stdout)
    assert judged["state"] == found.state
    for row in judged["limits"]:
        figure = figures[row["figure"]]
        for numbers in (row["measured"], shown["figures"][row["figure"]]):
            ends = [numbers[end] for end in ("value", "ci_low", "ci_high")]
            assert ends == [figure.value, figure.ci_low, figure.ci_high]
    card = cards.step_card(record.windows[-1], cards.SoFar.of(record.summary))
    bars = dict(re.findall(r"<text[^>]*>(Overlapped|Sequential)</text><text[^>]*>([\d.]+) ms", card))
    both = re.findall(r"([\d.]+) ms with it, ([\d.]+) ms without", found.text)[0]
    for label, ms in zip(("Overlapped", "Sequential"), both, strict=True):
        assert agrees(bars[label], ms)


def test_an_inconclusive_run_says_how_it_becomes_conclusive(tmp_path: Path, running: bool) -> None:
    """First more windows, unless exposed communication is known to half of itself."""
    for name in ("inconclusive", "exposed but inconclusive", "clear"):
        record = recorded(tmp_path / name, name, running)
        found = run_headline(record.summary)
        assert found.what_to_do.startswith("More windows narrow the intervals: ") is (name == "inconclusive")
        assert ("More windows narrow them" in found.interval) is (name == "exposed but inconclusive")
        console = Console(width=100, file=io.StringIO(), record=True)
        console.print(ShortScreen(short_of(record), ""))
        text = console.export_text()
        assert ("OVERLAP_CALLBACKS=quick" in text) is (name != "clear")
        for said in (text, headline.summary(record.windows[-1])):
            assert ("To try first: " in said) is (name != "inconclusive")


def test_without_a_window_every_answer_is_the_headline(tmp_path: Path) -> None:
    path = write(tmp_path)
    found = run_headline(read(path).summary)
    shown = json.loads(CliRunner().invoke(main, ["show", "--json", str(path)]).stdout)
    assert (shown["verdict"], shown["state"], shown["figures"]) == (found.text, found.state, {})
    terminal = CliRunner().invoke(main, ["show", str(path)]).stdout
    assert " ".join(terminal.split()).startswith(found.sentence)
    for options in ([], ["--json"]):
        answer = CliRunner().invoke(main, ["check", *options, "--max-slowdown=0.9", str(path)])
        assert answer.exit_code == 3
        assert found.text in (json.loads(answer.stdout)["limits"][0]["doubt"] if options else answer.stderr)


@pytest.mark.parametrize("name", RUNS)
def test_quick_ends_by_the_interval_of_the_headline_and_answers_with_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    summary = RunSummary(None, reports(name), running=True)
    change = headline.step_change(summary.pooled())
    state = run_headline(summary).state
    look = QuickLook(lambda: 0.0)
    for report in reports(name):
        look.record(report)
    assert look.goes_on()  # it begins
    assert look.answer() == run_verdict(summary)
    if change is None or change.ci_low is None or change.ci_high is None:
        monkeypatch.setattr(quick, "NARROW", 1e9)
        assert look.goes_on()
        return
    width = change.ci_high - change.ci_low
    monkeypatch.setattr(quick, "NARROW", width)
    assert look.goes_on()
    monkeypatch.setattr(quick, "NARROW", 1.0001 * width)
    assert look.goes_on() is (state == NOT_SETTLED)


def test_a_windows_log_line_has_the_settled_saving() -> None:
    for name in ("settled", "settled for one look", "settled below", "settled at nothing"):
        (line,) = [headline.summary(reports(name)[0])]
        alone = RunSummary(None, reports(name)[:1]).pooled()
        assert headline.saving_in_words(headline.step_change(alone), alone["e2e_overlapped_ms"]) in line  # type: ignore[arg-type]
    short = headline.summary(reports("clear")[0])
    assert told(short)["saves"] == told(headline.summary(reports("not settled")[0]))["saves"]


@pytest.mark.parametrize("name", ["settled at nothing", "settled anywhere"])
def test_a_settled_difference_that_is_inconclusive_hides_no_clear_one(name: str, running: bool) -> None:
    plain, found = (run_headline(RunSummary(None, reports(each), running=running)) for each in ("clear", name))
    assert (found.sentence, found.also, found.interval) == (plain.sentence, plain.also, plain.interval)
    assert "Overlap saves" in found.text
    assert found.settled.startswith("Settled: inconclusive (")
    assert found.state == NOT_SETTLED
    assert told(headline.summary(reports(name)[0]))["saves"] == told(headline.summary(reports("clear")[0]))["saves"]
    both = windows(1, **lengths(share(0.02, 0.3)), settled=reports(name)[0].settled)
    pooled = RunSummary(None, both, running=running).pooled()
    assert both[0].settled is not None
    assert pooled["speedup_vs_sequential"] == both[0].settled.estimate  # neither is clear


def test_the_sequential_step_of_a_settled_saving_is_longer_by_it_and_less_certain_than_either() -> None:
    figures = RunSummary(None, reports("settled")).pooled()
    step, longer, change = (
        figures[name] for name in ("e2e_overlapped_ms", "e2e_sequential_ms", "speedup_vs_sequential")
    )
    assert change == reports("settled")[0].settled.estimate  # type: ignore[union-attr]
    assert longer.value == pytest.approx(step.value * 1.25)
    assert longer.ci_low < step.value * 1.18 < step.value * 1.33 < longer.ci_high
    # What rests on the sequential steps of short blocks is no figure of this headline.
    assert not {"attained_fraction", "sequential_model_error"} & set(figures)
    assert {"attained_fraction", "sequential_model_error"} & set(RunSummary(None, reports("not settled")).pooled())


@pytest.mark.parametrize(
    ("name", "limit", "doubt"),
    [
        ("not settled", "--min=speedup_vs_sequential=0.01", NOT_SETTLED),
        ("not settled", "--max=e2e_sequential_ms=9000", NOT_SETTLED),
        ("not settled", "--max-slowdown=0.9", ""),
        ("settled anywhere", "--min=speedup_vs_sequential=0.01", NOT_SETTLED),
        ("no profile", "--min=speedup_vs_sequential=0.01", NOT_VERIFIED),
        ("no profile", "--max-slowdown=0.9", NOT_VERIFIED),
        ("no profile", "--max=e2e_overlapped_ms=9000", ""),
        ("lower bound", "--max-exposed=0.9", NOT_VERIFIED),
        ("lower bound", "--max-slowdown=0.9", NOT_VERIFIED),
        ("lower bound", "--max=e2e_overlapped_ms=9000", ""),
        ("settled", "--min=speedup_vs_sequential=0.01", ""),
    ],
)
def test_check_judges_nothing_that_the_headline_doubts(tmp_path: Path, name: str, limit: str, doubt: str) -> None:
    record = recorded(tmp_path, name, running=False)
    found = run_headline(record.summary)
    answer = CliRunner().invoke(main, ["check", limit, str(tmp_path)])
    assert answer.exit_code == (3 if doubt else 0), answer.output
    said = " ".join(answer.stdout.split())
    assert (f"; but it is {doubt}" in said) == bool(doubt)
    assert "More windows" not in said
    if doubt == NOT_SETTLED:
        assert found.settled in said
    if found.why:
        assert f"Why: {found.why} What to do: {found.what_to_do}" in said
    (row,) = json.loads(CliRunner().invoke(main, ["check", "--json", limit, str(tmp_path)]).stdout)["limits"]
    assert row["doubt"] == doubt


def test_check_says_which_windows_do_not_count_and_why_none_does(tmp_path: Path) -> None:
    recorded(tmp_path / "some", "some invalid", running=False)
    answer = CliRunner().invoke(main, ["check", "--max-slowdown=0.9", str(tmp_path / "some")])
    assert answer.exit_code == 0
    assert answer.stdout.splitlines()[1] == "  2 of 3 windows count; not valid: 1 (window 0)."
    recorded(tmp_path / "none", "invalid", running=False)
    answer = CliRunner().invoke(main, ["check", "--max-slowdown=0.9", str(tmp_path / "none")])
    assert answer.exit_code == 3
    assert "3 windows are not valid: residual overlap 0.3 is above 0.02." in " ".join(answer.stderr.split())


def test_no_advice_rests_on_a_saving_that_is_not_settled() -> None:
    def first(verdict: Verdict) -> str:
        worse = windows(1, **lengths(share(-0.1, 0.02)), settled=settled(verdict))
        found = run_bottleneck(RunSummary(None, worse))
        assert found is not None
        return found.advice[0].what

    assert first(Verdict.SHORT) == "Switch overlap off."
    assert first(Verdict.NOT_SETTLED) != "Switch overlap off."
