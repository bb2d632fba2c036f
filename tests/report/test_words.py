"""The words of the page and of the terminal: the same in both, and true of the figures beside them."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from overlap_callbacks.analysis.results.kernel_times import ALONE, KernelTime, PairTime
from overlap_callbacks.analysis.results.report import OverlapReport
from overlap_callbacks.analysis.run_summary import RunSummary
from overlap_callbacks.report import page, terminal
from overlap_callbacks.report.record import read
from overlap_callbacks.report.run_json import run_as_json
from overlap_callbacks.report.terminal import ShortScreen
from overlap_callbacks.report.views.quality import left_out, windows_that_count
from overlap_callbacks.report.views.runs import runs_document
from overlap_callbacks.report.views.short import short_of
from tests.environments import gpu_rank
from tests.report.runs import DIMENSION_PAIRS, KERNELS, PAIRS, rank_window, run_info, window, write
from tests.samples import aggregate_windows


def text_of(content: str) -> str:
    """What a reader sees, on one line."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", content, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def made(folder: Path, *windows: OverlapReport, **options: Any) -> str:
    return page([read(write(folder / "run-1", *windows, **options))])


def printed(folder: Path, *windows: OverlapReport, **options: Any) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    document = runs_document([read(write(folder, *windows, **options))], charts=False)
    console.print(terminal.drawn(document, everything=True))
    return console.export_text()


def test_percentages_have_one_style_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    windows = [window(i, power=True) for i in range(2)]
    for text in (text_of(made(tmp_path / "page", *windows)), printed(tmp_path / "terminal", *windows)):
        assert "95% interval" in text
        assert not re.search(r"\d\s%", text)


def test_the_answer_on_what_holds_steps_back_says_which_collectives_are_exposed(tmp_path: Path) -> None:
    windows = [window(i) for i in range(3)]
    for text in (text_of(made(tmp_path / "page", *windows)), printed(tmp_path / "terminal", *windows)):
        said = " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())
        answer = (
            "Of 192 ms exposed on 2 ranks 144 ms are the 64 MiB reduce-scatter that ends the step, in 6 of 12 steps; "
            "48.0 ms are the 24 MiB all-reduces in the middle of the step, in 12 of 12 steps. "
        )
        order = ("How far from ideal", answer, "What to try", "Collectives by size and place", "windows 0 to 2. Time")
        places = [said.index(words) for words in order]
        assert places == sorted(places)
    told = run_as_json(read(tmp_path / "terminal"))["communication"]["exposure"]
    assert [(row.place, row.exposed_ms, row.worst_rank) for row in told.rows] == [("last", 144, 1), ("middle", 48, 0)]
    # Records of earlier versions have none; nor has a job that hides all.
    older = msgspec.structs.replace(window(), exposure=None)
    assert " exposed on " not in printed(tmp_path / "older", older)
    assert run_as_json(read(tmp_path / "older"))["communication"]["exposure"] is None
    # No more is told of windows that do not count, nor how long collectives take alone.
    unknown = printed(tmp_path / "invalid", invalid(0))
    assert [
        bool(re.search(r"Collectives of a step.*\n.*Alone", text))
        for text in (printed(tmp_path / "counts", window()), unknown)
    ] == [True, False]
    assert "Collectives of a step" in unknown
    assert "That is not known, as no window counts." in " ".join(unknown.split())
    assert " exposed on " not in unknown


def test_parts_are_shares_of_a_profiled_step_and_how_much_longer_it_is_appears_once(tmp_path: Path) -> None:
    blocks = tuple(msgspec.structs.replace(block, idle_ms=109.0) for block in rank_window().profiled)
    found = window(profiled=blocks)
    assert found.e2e_overlapped_ms is not None
    longer = (0.14 * 325 + 325 + 36 + 109) / found.e2e_overlapped_ms.value - 1
    short = Console(width=200, file=io.StringIO(), record=True)
    short.print(ShortScreen(short_of(read(write(tmp_path / "short", found))), ""))
    for text in (text_of(made(tmp_path / "page", found)), printed(tmp_path / "all", found), short.export_text()):
        said = " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())
        (shown,) = re.findall(r" of a profiled step \(([\d.]+)% longer than others\)|Profiled step \(([\d.]+)", said)
        assert float("".join(shown)) == pytest.approx(100 * longer, abs=0.5)
        # No time of a profiled step stands among times of others.
        first = said.partition("What does it cost?")[0]
        assert not re.search(r"\b5\d\d\.?\d* ms", first)
    near = text_of(made(tmp_path / "near", window()))
    assert "Shares of a profiled step, means over the ranks." in near


def test_the_table_of_kernels_says_what_its_rows_add_up_to_and_that_this_is_not_the_run_s(tmp_path: Path) -> None:
    window_ = window()
    computing = [kernel for kernel in window_.kernels if not kernel.communication]
    names = ("lost_ms", "overlapped_ms", "sequential_ms")
    sums = [sum(getattr(kernel, name) for kernel in computing) for name in names]
    for text in (text_of(made(tmp_path / "page", window_)), printed(tmp_path / "terminal", window_)):
        found = re.search(
            r"All of them lose (\S+) ms: T_comp of window 0 is (\S+) ms overlapped and (\S+) ms alone\. The run's "
            r"T_comp is the mean of all its windows\.",
            " ".join(text.split()).replace("\u202f", " "),
        )
        assert found is not None
        assert [float(value) for value in found.groups()] == pytest.approx(sums, abs=0.06)


def test_the_rows_by_which_eq_5_adds_up_are_shown(tmp_path: Path) -> None:
    known = window()
    rows = ("waiting in communication", "waiting in communication, sequential")
    assert not any(row in printed(tmp_path / "unknown", known) for row in rows)
    waits = msgspec.structs.replace(known, waiting_ms=known.hidden_comm_ms, waiting_isolated_ms=known.hidden_comm_ms)
    assert all(row in printed(tmp_path / "known", waits) for row in rows)


def test_kernels_that_are_slower_when_alone_are_explained(tmp_path: Path) -> None:
    alone = window()
    beside = window(pairs=tuple(pair for pair in PAIRS if pair.concurrent_with != ALONE))
    words = "nothing that runs at the same time explains it"
    for number, show in enumerate((printed, lambda folder, found: text_of(made(folder, found)))):
        assert words in " ".join(show(tmp_path / f"{number}-alone", alone).split())
        assert words not in " ".join(show(tmp_path / f"{number}-beside", beside).split())


def test_one_dimension_alone_repeats_no_table(tmp_path: Path) -> None:
    one = window(dimensions=rank_window().dimensions[:1], dimension_pairs=DIMENSION_PAIRS[:1])
    titles = "Communication by dimension", "Dimensions of parallelism", "Slowdown by dimension of parallelism"
    content, of_three = text_of(made(tmp_path, one)), text_of(made(tmp_path / "three", window()))
    assert not re.search("dimensions? of parallelism|by dimension", content, re.I)
    assert all(title in of_three for title in (*titles, "Slowdown of compute"))


def test_the_version_of_torch_appears_once_in_the_configuration(tmp_path: Path) -> None:
    content = made(tmp_path, window(), run=run_info(framework="pytorch 2.13.0+cu130"))
    facts = content[content.index("<h4>The run</h4>") :]
    assert facts.count("2.13.0+cu130") == 1
    assert "<dt>Framework</dt><dd>pytorch</dd>" in facts


def test_the_configuration_does_not_repeat_the_environment(tmp_path: Path) -> None:
    samples = [rank_window(0, rank, environment=gpu_rank(rank)) for rank in (0, 1)]
    whole = made(tmp_path, aggregate_windows(samples, world_size=2, every_n_steps=500))
    facts = whole[whole.index("<h4>The run</h4>") :]
    assert "<dt>PyTorch</dt>" not in facts
    assert "<dt>Device</dt>" not in facts
    assert "<dt>PyTorch</dt>" in whole


def test_the_ideal_step_is_explained_where_it_is_drawn(tmp_path: Path) -> None:
    words = "Ideal is worked out: an overlapped step, less what its compute kernels lose to contention (equation 4)"
    assert words in text_of(made(tmp_path / "whole", window()))
    assert words not in text_of(made(tmp_path / "bare", window(profiled=())))


def invalid(number: int) -> OverlapReport:
    return msgspec.structs.replace(window(number), valid=False, problems=("residual overlap 0.3",))


@pytest.mark.parametrize(
    ("windows", "counting", "others"),
    [
        ([], "0 of 0 windows count", []),
        ([window(0)], "1 of 1 window counts", []),
        ([invalid(0)], "0 of 1 window counts", [("not valid", "1 (window 0)")]),
        ([window(0), invalid(1)], "1 of 2 windows counts", [("not valid", "1 (window 1)")]),
        ([window(i) for i in range(2)], "2 of 2 windows count", []),
        (
            [
                window(0),
                invalid(1),
                invalid(2),
                msgspec.structs.replace(window(3), complete=False),
                msgspec.structs.replace(window(4), control=True),
            ],
            "1 of 5 windows counts",
            [
                ("not valid", "2 (windows 1\N{EN DASH}2)"),
                ("cut short", "1 (window 3)"),
                ("of another kind (control, or not)", "1 (window 4)"),
            ],
        ),
    ],
)
def test_windows_that_count_and_the_others(
    windows: list[OverlapReport], counting: str, others: list[tuple[str, str]]
) -> None:
    summary = RunSummary(run_info(), windows)
    assert windows_that_count(summary) == "; ".join([counting, *[f"{kind}: {numbers}" for kind, numbers in others]])
    assert left_out(summary) == others


def test_page_and_terminal_agree_on_which_windows_count(tmp_path: Path) -> None:
    windows = [window(0), invalid(1)]
    content = text_of(made(tmp_path / "page", *windows))
    assert "1 of 2 windows counts; not valid: 1 (window 1)." in content
    assert "Not valid 1 (window 1)" in content
    text = printed(tmp_path / "terminal", *windows)
    assert "1 of 2 windows counts; not valid: 1 (window 1)." in text
    assert re.search(r"residual overlap 0.3 +1 +1\b", text)


def test_a_single_rank_is_not_plural(tmp_path: Path) -> None:
    for text in (
        text_of(made(tmp_path / "page", window(), run=run_info(world_size=1))),
        printed(tmp_path / "terminal", window(), run=run_info(world_size=1)),
    ):
        assert "1 rank" in text
        assert "1 ranks" not in text


def test_the_parts_of_a_step_and_its_total_are_the_same_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    blocks = tuple(msgspec.structs.replace(block, p2p_ms=0.0, bubble_ms=None) for block in rank_window().profiled)
    found = window(profiled=blocks)
    said = [
        " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())
        for text in (text_of(made(tmp_path / "page", found)), printed(tmp_path / "terminal", found))
    ]
    title, caption = "Where the time of a profiled step goes", "Shares of a profiled step, means over the ranks."
    shares = [
        re.findall(
            r"(compute alone|lost to contention|exposed communication|idle) ([\d.]+)%",
            text.partition(title)[2].partition(caption)[0],
        )
        for text in said
    ]
    assert shares[0] == shares[1]
    assert [name for name, _ in shares[0]] == ["compute alone", "lost to contention", "exposed communication", "idle"]
    assert sum(float(share) for _, share in shares[0]) == pytest.approx(100, abs=0.15)
    # The figure beside them has the same base.
    (exposed,) = [share for name, share in shares[0] if name == "exposed communication"]
    assert re.search(rf"Exposed communication {exposed}%", said[0])
    assert "ideal" not in said[0][: said[0].index("How far from ideal")]


def test_kernels_that_ran_alone_are_called_so_whatever_the_record_says(tmp_path: Path) -> None:
    for text in (text_of(made(tmp_path / "page", window())), printed(tmp_path / "terminal", window())):
        assert ALONE not in text
        assert "ran alone, unexplained" in text
        assert "Slowdown by concurrent kernel" in text


def test_compute_and_communication_have_tables_of_their_own_and_rows_of_zero_go(tmp_path: Path) -> None:
    pairs = (*PAIRS, PairTime("softmax", False, "all_reduce", 1.0, 1.0, 5.001, 5.0))
    kernels = (*KERNELS, KernelTime("tiny_kernel", False, 1, 1, 0.004, 0.001))
    found = window(pairs=pairs, kernels=kernels)
    for text in (text_of(made(tmp_path / "page", found)), printed(tmp_path / "terminal", found)):
        said = " ".join(text.split())
        compute, _, communication = said.partition("Communication kernels, overlapped and sequential")
        assert "ncclDevKernel" not in compute
        assert "ncclDevKernel" in communication
        assert "A collective's time includes waiting for other ranks." in communication
        assert "1 kernel that loses less than 0.005 ms is left out." in said
        assert "1 row that loses less than 0.005 ms is left out." in said
        assert "softmax" not in said
        assert "tiny_kernel" not in said
