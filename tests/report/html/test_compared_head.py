"""The first lines of a page of several runs: which is faster, is overlap worth it, what does it cost, what to try."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.analysis.results.window import TimedBlock
from overlap_callbacks.monitor.schedule import Schedule
from overlap_callbacks.report import page, write_page
from overlap_callbacks.report.record import Record, read
from overlap_callbacks.report.views.comparison import head_lines
from tests.report.html.test_page import charts_of, text_of
from tests.report.runs import OSSO, OV, run_info, window, write
from tests.report.scaling_runs import write_sized
from tests.toggling import at_night

MODEL = {"model": "GPT", "shapes": "abc", "ddp_bucket_cap_bytes": 26214400}
BUCKETS = {**MODEL, "ddp_bucket_cap_bytes": 104857600}


def of_speed(number: int, overlapped_ms: float, noise: float = 0.004, **changes: Any) -> Any:
    """A window whose overlapped steps take so long, and whose sequential ones take 468 ms."""
    chance = random.Random(1000 * number + round(overlapped_ms))
    timed = tuple(
        TimedBlock(arm, i, tuple((overlapped_ms if arm is OV else 468.0) * chance.gauss(1, noise) for _ in range(2)))
        for i, arm in enumerate(OSSO * 4)
    )
    return window(number, timed=timed, **changes)


def run(
    folder: Path, name: str, overlapped_ms: float, *, noise: float = 0.004, windows: int = 4, **info: Any
) -> Record:
    found = [of_speed(number, overlapped_ms, noise) for number in range(windows)]
    return read(write(folder / name, *found, run=run_info(**info)))


def invalid(folder: Path, name: str) -> Record:
    problem = "residual overlap 0.3 in sequential steps"
    windows = [msgspec.structs.replace(window(i), valid=False, problems=(problem,)) for i in range(3)]
    return read(write(folder / name, *windows))


def head_of(content: str) -> str:
    """All that stands above the first chart."""
    text = text_of(content)
    return text[: text.index("Side by side")]


def cards_of(content: str) -> list[str]:
    """What is said of each run above the first chart."""
    found = re.search(r'<ul class="verdicts">(.*?)</ul>', content, re.S)
    assert found is not None
    return [text_of(card).strip() for card in re.findall(r"<li>(.*?)</li>", found[1], re.S)]


def test_the_head_says_which_run_is_faster_and_then_of_each_whether_overlap_is_worth_it(tmp_path: Path) -> None:
    records = [
        run(tmp_path, "small", 412.0, configuration=MODEL),
        run(tmp_path, "large", 381.0, configuration=BUCKETS),
    ]
    content = page(records)
    (verdict,) = re.findall(r"<h1[^>]*>(.*?)</h1>", content)
    times = r"large saves 3\d\.\d.ms a step against small: 38\d\.\d.ms against 41\d\.\d.ms"
    found = re.fullmatch(times + r" \(7\.\d%, ([\d.]+) to ([\d.]+)\)\.", verdict)
    assert found is not None
    low, high = found.groups()
    head = head_of(content)
    assert 6 < float(low) < 7.5 < float(high) < 9
    assert "It holds for these runs: repeat them to see what differs from run to run." in head
    (then,) = re.findall(r"To try first: go on with large\. Then: (.+?\.) What differs", head)
    assert "What differs: ddp_bucket_cap_bytes (25 MiB in small, 100 MiB in large)." in head
    assert "same configuration" not in text_of(content)
    small, large = cards_of(content)
    assert f"To try first: {then[:-1]}: up to " in large  # the same advice, in a card with what it could win
    for card, name, percent in ((small, "small", "1[12]"), (large, "large", "18")):
        assert re.match(rf"{name} \d\d\.\d% of communication is hidden; exposed communication takes ", card)
        assert re.search(rf" Overlap saves .* without \({percent}\.\d%, [\d.]+ to [\d.]+\)\. Compute slowdown: ", card)
        assert "To try first: Give NCCL fewer SMs: lower NCCL_MAX_CTAS: up to " in card


def test_what_differs_between_the_runs_is_not_advised_again(tmp_path: Path) -> None:
    records = [run(tmp_path, "small", 412.0, configuration=MODEL), run(tmp_path, "large", 381.0, configuration=BUCKETS)]
    found = records[1].bottleneck()
    assert found is not None
    first, *others = found.advice
    tried = found._replace(advice=(first._replace(topic="buckets", what="Raise the bucket size."), *others))
    records[1].bottleneck = lambda: tried  # type: ignore[method-assign]
    (line,) = [line for line in head_lines(["small", "large"], records) if line.startswith("To try first")]
    assert line == f"To try first: go on with large.{f' Then: {others[0].what}' if others else ''}"


def test_each_run_has_its_own_advice_where_they_differ(tmp_path: Path) -> None:
    exposed = window().samples[0].profiled
    profiled = tuple(
        msgspec.structs.replace(block, hidden_comm_ms=0.0, step_ms=(block.step_ms or 0.0) + 200.0) for block in exposed
    )
    one = read(write(tmp_path / "one", window(), window(1)))
    other = read(write(tmp_path / "other", *[window(i, profiled=profiled) for i in range(2)]))
    cards = cards_of(page([one, other]))
    alone = [re.findall(r"To try first: .*?\.(?= )", text_of(page([record])))[0] for record in (one, other)]
    assert alone[0] != alone[1]
    for card, advice in zip(cards, alone, strict=True):
        assert advice in card


def test_a_lead_that_is_not_clear_is_not_claimed_and_nothing_is_advised_of_it(tmp_path: Path) -> None:
    records = [
        run(tmp_path, "small", 412.0, noise=0.2, configuration=MODEL),
        run(tmp_path, "large", 400.0, noise=0.2, configuration=BUCKETS),
    ]
    head = head_of(page(records))
    assert re.search(r"Which is faster, \w+ or \w+: inconclusive \(a difference of \d+% would show\); ", head)
    assert "go on with" not in head


def test_without_a_known_difference_the_faster_run_is_not_advised(tmp_path: Path) -> None:
    head = head_of(page([run(tmp_path, "a", 412.0), run(tmp_path, "b", 381.0)]))
    assert "b saves 31.0 ms a step against a: " in head
    assert "What differs: nothing that the records know. What the records lack may differ too" in head
    assert "go on with" not in head


def test_settings_that_differ_are_named_and_what_follows_from_them_is_counted(tmp_path: Path) -> None:
    more = tuple(msgspec.structs.replace(row, messages=4 * row.messages) for row in window().collectives)
    one = read(write(tmp_path / "one", window(), run=run_info(configuration=MODEL)))
    other = read(write(tmp_path / "other", window(collectives=more), run=run_info(configuration=BUCKETS)))
    head = head_of(page([one, other]))
    assert "What differs: ddp_bucket_cap_bytes (25 MiB in one, 100 MiB in other) and 3 more. " in head
    third = read(write(tmp_path / "third", window(collectives=more), run=run_info(configuration=MODEL)))
    head = head_of(page([one, third]))
    assert re.search(
        r"What differs: .*all_reduce, tensor, 4 ranks \(192 messages, .* in one, 768 messages, .* in third\)", head
    )
    schedule = Schedule(every_n_steps=700).as_dict()
    measured_otherwise = read(write(tmp_path / "x", window(), run=run_info(configuration=MODEL, schedule=schedule)))
    assert "What differs: nothing that the records know." in head_of(page([one, measured_otherwise]))


def test_no_advice_comes_from_runs_that_are_invalid_or_unfinished(tmp_path: Path) -> None:
    blocks = tuple(TimedBlock(arm, i, (410.0 if arm is OV else 470.0, 411.0)) for i, arm in enumerate(OSSO * 2))
    unfinished = read(write(tmp_path / "unfinished", blocks=blocks))
    content = page([run(tmp_path, "good", 412.0), invalid(tmp_path, "broken"), unfinished])
    assert "Which run is faster is not known: only good has a window that counts." in head_of(content)
    good, broken, begun = cards_of(content)
    assert "To try first: Give NCCL fewer SMs" in good
    for card in (broken, begun):
        assert "To try first" not in card
        assert card.count("What to do: ") == 1
    assert "Why: 3 windows are not valid: residual overlap 0.3 in sequential steps." in broken
    assert "What to do: Switch off for a measurement" in broken
    assert begun.startswith("unfinished Unfinished: overlap saves ")
    assert "What to do: Let the job run on until a window ends." in begun
    for text in map(text_of, (page([unfinished]), page([invalid(tmp_path / "alone", "broken")]))):
        assert text.count("What to do: ") == 1
        assert "To try first" not in text


def test_runs_without_a_window_that_counts_are_left_out_of_the_comparison_and_named(tmp_path: Path) -> None:
    content = page([run(tmp_path, "a", 412.0), invalid(tmp_path, "broken"), run(tmp_path, "b", 381.0)])
    head = head_of(content)
    assert "b saves 31.0 ms a step against a: " in head
    assert "Not compared, as no window counts: broken." in head
    none = head_of(page([invalid(tmp_path / "x", "one"), invalid(tmp_path / "x", "two")]))
    assert "Which run is faster is not known: none of the 2 runs has a window that counts." in none


def test_a_run_without_a_profile_and_a_control_say_why_they_give_no_advice(tmp_path: Path) -> None:
    without = window(profiled=(), kernels=(), pairs=(), pictures=(), dimensions=())
    unprofiled = run_info(schedule=Schedule(profiled_steps=0).as_dict())
    bare, failed = read(write(tmp_path / "bare", without, run=unprofiled)), read(write(tmp_path / "failed", without))
    schedule = Schedule(control=True).as_dict()
    control = [msgspec.structs.replace(window(i), control=True) for i in range(2)]
    same = read(write(tmp_path / "same", *control, run=run_info(schedule=schedule)))
    one, other, third = cards_of(page([bare, same, failed]))
    assert (
        "Why: no profile has verified that the sequential steps were sequential. What to do: Set profiled_steps" in one
    )
    assert "No advice: a control run has no sequential steps." in other
    assert "Steps were to be profiled, but their profile is missing." in third


def test_work_a_second_is_compared_where_the_batch_is_known_to_differ(tmp_path: Path) -> None:
    records = [read(write_sized(tmp_path / f"r{ranks}", ranks, ms)) for ranks, ms in ((2, 400.0), (4, 440.0))]
    head = head_of(page(records))
    # Twice the tokens in 440 ms for 400.
    (more,) = re.findall(r"r4 trains ([\d.]+)% more tokens a second than r2: ", head)
    assert float(more) == pytest.approx(100 * (2 * 400 / 440 - 1), rel=0.02)
    assert "Ranks (2 in r2, 4 in r4)" in head
    sizes = [read(write_sized(tmp_path / f"many-{ranks}", ranks)) for ranks in (2, 4, 8, 16)]
    assert "Ranks (2, 4, 8, 16, in the order below)" in head_of(page(sizes))
    alike = [read(write_sized(tmp_path / f"s{ms:.0f}", 2, ms, tokens_per_step=4096)) for ms in (400.0, 440.0)]
    assert re.search(r"s400 saves (39|40)\.\d.ms a step against s440: ", head_of(page(alike)))


def test_of_different_models_no_run_is_called_faster(tmp_path: Path) -> None:
    records = [
        run(tmp_path, "small", 381.0, configuration=MODEL),
        run(tmp_path, "large", 412.0, configuration={**MODEL, "shapes": "def"}),
    ]
    head = head_of(page(records))
    assert "These runs train different models, so their step times do not say which is faster." in head
    assert re.search(r"A step takes 38\d\.\d ms in small and 41\d\.\d ms in large\.", head)
    assert not re.search("saves .* against", head)


def test_the_chart_of_the_only_run_with_step_times_names_it(tmp_path: Path) -> None:
    content = page([run(tmp_path, "good", 412.0), invalid(tmp_path, "broken")])
    assert charts_of(content)[0]["title"] == "Step time of good"


def test_the_users_facts_about_the_work_have_their_own_rows(tmp_path: Path) -> None:
    work = Workload(tokens_per_step=4096, settings={"bucket_mb": 25})
    text = text_of(page([read(write(tmp_path, window(), run=run_info(workload=work)))]))
    assert "Tokens per step 4096 Setting: bucket_mb 25" in text
    assert "Workload(" not in text
    assert "Samples per step" not in text


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    at_night(
        [(1200, 900, "light"), (360, 780, "dark"), (1200, 900, "dark"), (360, 780, "light")],
        [(1200, 900, "dark"), (360, 780, "light")],
    ),
)
def test_the_first_screen_holds_the_answers(
    tmp_path: Path, opened: Callable[..., Any], width: int, height: int, scheme: str
) -> None:
    records = [
        run(tmp_path, "small", 412.0, configuration=MODEL),
        run(tmp_path, "large", 381.0, configuration=BUCKETS),
    ]
    write_page(records, tmp_path / "page.html")
    shown = opened(
        tmp_path / "page.html", unfolded=False, viewport={"width": width, "height": height}, color_scheme=scheme
    )
    ends = shown.locator(".verdicts li").evaluate_all("all => all.map((one) => one.getBoundingClientRect().bottom)")
    # On a phone the second run begins on the first screen.
    assert ends[0] < height
    assert width < 400 or ends[1] < height
    starts = shown.locator(".verdicts li").evaluate_all("all => all.map((one) => one.getBoundingClientRect().top)")
    assert starts[1] < height
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
