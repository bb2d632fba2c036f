"""What a study says in sentences: the verdict, what casts doubt on it, and the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from overlap_callbacks.analysis.study import StudyRow
from overlap_callbacks.experiments.study.sweep import Study
from overlap_callbacks.experiments.study.verdict import NOTHING, caveats, verdict
from overlap_callbacks.experiments.study.view import study_data, study_document
from overlap_callbacks.report.html import as_html
from overlap_callbacks.report.terminal import SanitizedRenderable, drawn
from tests.experiments.study_page.studies import configuration, factors, figures, large, of_rows, on_cpu, row, single
from tests.report.html.test_page import text_of

HERE = Path("study")


def said(*longer: float, half: float | None = 0.01, slowdown: float | None = 0.1) -> str:
    """The verdict on configurations whose sequential steps take this much longer."""
    rows = [row(configuration(batch=n + 1), figures(slowdown, value, half=half)) for n, value in enumerate(longer)]
    return verdict(*of_rows(rows))


def test_the_verdict_has_mean_interval_and_largest_and_what_the_study_found() -> None:
    text = said(0.1, 0.3)
    # Without it, steps take 20 % longer on average (19.3 to 20.7), and 30 % at most.
    assert text.startswith(
        "Overlap saves 16.7% of a step without it on average over 2 configurations (16.2 to 17.2). "
        "Most: 23.1%, gpt3-xl FSDP2 batch 2."
    )
    assert "Compute slowdown on average over 2 configurations: kernels take 10.0% longer than without overlap" in text
    assert text.endswith("The study found 9.3% saved, and compute 18.9% slower.")


def test_one_configuration_is_named() -> None:
    assert "Overlap saves 9.1% of a step without it in gpt3-xl FSDP2 batch 4 (" in verdict(*single())


@pytest.mark.parametrize(
    ("longer", "half", "begin"),
    [
        ((-0.2, -0.1), 0.01, "Overlap costs 17.6% of a step without it on average over 2 configurations ("),
        ((0.01, -0.005), 0.02, "What overlap saves on average over 2 configurations: inconclusive (a difference of "),
        ((0.1, 0.2), None, "What overlap saves on average over 2 configurations: too few blocks for an interval."),
    ],
)
def test_no_claim_without_an_interval_that_leaves_zero_out(
    longer: tuple[float, ...], half: float | None, begin: str
) -> None:
    text = said(*longer, half=half, slowdown=None)
    assert text.startswith(begin)
    assert "saves 1" not in text
    assert "Most:" not in text


@pytest.mark.parametrize(
    ("slowdowns", "says"),
    [
        ((-0.2, 0.0), "With overlap, compute is clearly faster in 1 of 2 configurations. 1 inconclusive."),
        ((0.2, 0.1), "With overlap, compute is clearly slower in 2 of 2 configurations."),
        ((0.2, -0.1), "With overlap, compute is clearly slower in 1 and faster in 1 of 2 configurations."),
        ((0.0, 0.0), "Inconclusive in all of 2 configurations."),
    ],
)
def test_significant_effects_of_either_sign_are_a_sentence(slowdowns: tuple[float, ...], says: str) -> None:
    rows = [row(configuration(batch=n + 1), figures(slowdown)) for n, slowdown in enumerate(slowdowns)]
    page = text_of(as_html(study_document(Study(HERE, *of_rows(rows)))))
    assert f"What does overlap cost compute? {says}" in page


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (2, "One pair differs in the batch only: a change of its compute slowdown is inconclusive."),
        (3, "2 pairs differ in the batch only: every change of the compute slowdown is inconclusive."),
    ],
)
def test_pairs_of_batches_that_show_nothing_are_counted(number: int, says: str) -> None:
    rows = [row(configuration(batch=n + 1), figures(0.1)) for n in range(number)]
    assert says in text_of(as_html(study_document(Study(HERE, *of_rows(rows)))))


def test_configurations_that_overlap_slows_are_not_lost_in_the_mean() -> None:
    assert " In 1 of 3 it costs more than it saves." in said(0.3, 0.2, -0.05)


def test_a_slowdown_that_is_not_clear_is_called_so() -> None:
    assert "kernels take 10.0% longer than without overlap (" in said(0.1, 0.2, slowdown=0.1)
    unclear = said(0.1, 0.2, slowdown=0.001)
    assert "Compute slowdown on average over 2 configurations: " in unclear
    assert "kernels take" not in unclear
    assert "Compute slowdown" not in said(0.1, 0.2, slowdown=None)


def test_a_study_without_any_figure_says_so() -> None:
    assert verdict(*of_rows([row(configuration(), failure="out of memory")])) == NOTHING
    assert "in both modes" in verdict(*of_rows([row(configuration(), figures(None, None))]))


def test_figures_of_a_cpu_are_not_compared_with_the_study() -> None:
    start, rows = on_cpu()
    assert "The study found" not in verdict(start, rows)
    notes = caveats(start, rows)
    assert notes[0].startswith("These figures are of CPUs. They are not comparable with the study's")
    assert any("scaled by 0.1" in note for note in notes)
    assert caveats(*large()) == []
    assert "up to" not in printed(rows, link="gloo")


def test_what_did_not_run_yet_is_counted() -> None:
    start, rows = large()
    assert "3 configurations of 24 did not run yet." in caveats(start, rows[:-3])


def printed(rows: list[StudyRow], **more: object) -> str:
    file = io.StringIO()
    Console(width=80, file=file).print(SanitizedRenderable(drawn(study_document(Study(HERE, *of_rows(rows, **more))))))
    return file.getvalue()


def test_the_terminal_has_the_verdict_first_every_configuration_and_the_reason_of_a_failure() -> None:
    _, rows = large()
    text = printed(rows)
    assert text.startswith("Overlap saves ")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text  # nothing is cut in 80 columns
    assert len(re.findall(r"^(?:gpt3|llama2)-.* [+-]\d+\.\d% .* [+-]\d+\.\d% .*\d\.\d% ", text, re.MULTILINE)) == 23
    assert len(re.findall(r"[+-]\d+\.\d% to [+-]\d+\.\d% +[+-]\d+\.\d% to [+-]\d+\.\d% *$", text, re.MULTILINE)) == 23
    assert " 702\n" in text  # the last one's peak
    assert "Failed: llama2-7b FSDP2 batch 8: exit code 1: torch.OutOfMemoryError" in text
    assert "+40.0%" in text


def test_names_cannot_steer_the_terminal() -> None:
    hostile = configuration("\x1b[31mred\n[bold]x")
    text = printed([row(hostile, figures()), row(configuration("b"), failure="\x1b[2J\nx")])
    assert "\x1b" not in text
    assert "[bold]x" in text


def test_the_data_for_programs_has_everything_the_tables_have() -> None:
    start, rows = factors()
    data = msgspec.json.decode(msgspec.json.encode(study_data(Study(HERE, start, rows))))
    assert data["verdict"].startswith("Overlap saves ")
    slowdown = data["over_configurations"]["overlap/compute_slowdown"]
    assert slowdown["study"] == {"mean": 0.189, "most": 0.4}
    assert slowdown["largest"]["configuration"]["power_cap_w"] == 300.0
    assert len(data["configurations"]) == 11
    assert data["pairs"]["power_cap_w"][0]["changes"]["overlap/compute_slowdown"]["value"] == pytest.approx(0.03)
    assert data["start"]["device"] == start.device
