"""Jobs that are asked from outside while they train: what is asked holds on all ranks from the same step on."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from overlap_callbacks.analysis.results.request import ANSWERS_FILE, REQUEST_FILE
from overlap_callbacks.analysis.results.run import FILE_NAME
from overlap_callbacks.cli import main
from overlap_callbacks.gate.arms import Keep
from overlap_callbacks.monitor.background import plans
from overlap_callbacks.monitor.background.mailbox import Mailbox
from overlap_callbacks.monitor.background.store import StoreChannel
from overlap_callbacks.report.record import read
from overlap_callbacks.sinks import JsonlSink
from tests.distributed import captured_log, run_ranks
from tests.monitor.jobs import Training, digest_without_library, new_monitor, tiny_schedule, wait_until
from tests.monitor.test_deciding import EVERY, Sleeping

RANKS_LOAD = ["overlap_callbacks.monitor.window_runner", "overlap_callbacks.cli.ask", "click.testing"]
STEP_S, TIMEOUT_S = 0.004, 180.0
# Steps and seconds that all ranks have to hear of a plan; the product's would make the tests last minutes.
LEAD_STEPS, LEAD_S, LOOK_S = 20, 1.0, 0.1


def ask(folder: str, *words: str) -> dict[str, Any]:
    """``overlap ask``, from another thread of rank 0."""
    for _ in range(5):
        shown = CliRunner().invoke(main, ["ask", folder, *words, "--json"])
        found = {"code": int(shown.exit_code), "said": shown.output}
        found |= json.loads(shown.stdout) if shown.stdout else {}
        if "not all ranks agreed in time" not in shown.output:  # a busy machine
            break
    return found


def steps_during(questioner: Callable[[], None], rank: int, after: int) -> Iterator[int]:
    """Steps while rank 0's questioner runs, and ``after`` more: the same on all ranks."""
    thread = threading.Thread(target=questioner, daemon=True)
    if rank == 0:
        thread.start()
    last, step = -1, -1
    while last < 0 or step < last:
        step += 1
        yield step
        if last < 0 and step % 10 == 0:
            over = torch.tensor(float(rank == 0 and not thread.is_alive()))
            dist.all_reduce(over)
            last = step + after if over else -1


def train(
    rank: int,
    folder: str,
    questions: list[list[str]],
    every: int = 100,
    after: int = 250,
    then: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Trains while rank 0 is asked one question after the other, and some steps more.

    ``then``: steps from where an answer holds to the next question.
    """
    training, answers = Training(rank, options.pop("wrap", None)), list[dict[str, Any]]()
    sink = JsonlSink(folder) if rank == 0 else None
    schedule = options.pop("schedule", tiny_schedule(every_n_steps=every))
    monitor = new_monitor(sink, schedule=schedule, **options)

    def questioner() -> None:
        wait_until((Path(folder) / FILE_NAME).exists)
        time.sleep(1.5)  # until rank 0 listens
        for words in questions:
            answers.append(ask(folder, *words))
            wait_until(lambda: not then or len(within) > (answers[-1].get("from_step") or 0) + then)

    within: list[bool] = []
    with (
        mock.patch.multiple(plans, _LEAD_S=LEAD_S, _LEAD_STEPS=LEAD_STEPS, LOOK_S=LOOK_S),
        captured_log(logging.INFO) as lines,
    ):
        for step in steps_during(questioner, rank, after):
            with monitor.step(step):
                training.step()
                time.sleep(STEP_S)
                within.append(monitor.in_window)
        active = monitor.active
        monitor.close()
    return {
        "within": within, "answers": answers, "digest": training.digest(), "steps": len(within), "lines": lines,
        "active": active,
    }  # fmt: skip


def digests_without_library(steps: int) -> list[str]:
    return run_ranks(digest_without_library, 2, steps, timeout_s=TIMEOUT_S)


def opened_at(within: list[bool]) -> list[int]:
    return [step for step, inside in enumerate(within) if inside and not (step and within[step - 1])]


def test_status_is_answered(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, str(tmp_path), [["status"]], timeout_s=TIMEOUT_S)
    (answer,) = ranks[0]["answers"]
    assert answer["code"] == 0, answer
    assert answer["status"]["step"] > 0
    assert answer["status"]["state"] == "windows"
    assert "a window every 100 steps" in answer["text"]
    assert not (tmp_path / REQUEST_FILE).exists()
    assert not (tmp_path / ANSWERS_FILE).exists()


def test_all_ranks_follow_from_the_same_step_on_and_train_the_same(tmp_path: Path) -> None:
    questions = [["every=40"], ["stop"], ["window"], ["resume"]]
    ranks = run_ranks(train, 2, str(tmp_path), questions, 400, 250, 100, timeout_s=TIMEOUT_S)
    every, stop, _, resume = ranks[0]["answers"]
    assert [answer["code"] for answer in ranks[0]["answers"]] == [0, 0, 2, 0]
    opened = opened_at(ranks[0]["within"])
    assert opened == opened_at(ranks[1]["within"])
    first = every["from_step"]
    frequent = [step for step in opened if first <= step < stop["from_step"]]
    assert frequent[:3] == [first, first + 40, first + 80]
    assert {(step - first) % 40 for step in frequent} == {0}  # while ranks vote on the stop, none opens a window
    assert not [step for step in opened if stop["from_step"] <= step < resume["from_step"]]
    assert resume["from_step"] in opened
    assert [rank["digest"] for rank in ranks] == digests_without_library(ranks[0]["steps"])
    windows = [report.window for report in read(tmp_path).windows]
    assert len(windows) >= len(opened) - 1
    assert windows == sorted(set(windows))


def train_within_a_budget(rank: int, folder: str) -> dict[str, Any]:
    schedule = tiny_schedule(every_n_steps=300, spread=False)
    return train(rank, folder, [["window"], ["window", "--now"]], after=300, max_overhead=1e-5, schedule=schedule)


@pytest.mark.nightly
def test_a_window_that_the_budget_forbids_opens_later_and_now_outside_the_budget(tmp_path: Path) -> None:
    ranks = run_ranks(train_within_a_budget, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    later, now = ranks[0]["answers"]
    assert [later["code"], now["code"]] == [0, 0], [later, now]
    assert "the budget forbids a window now: a window opens at step" in later["text"]
    assert later["from_step"] > now["from_step"]
    opened = opened_at(ranks[0]["within"])
    assert opened == opened_at(ranks[1]["within"])
    assert now["from_step"] in opened
    report = next(one for one in read(tmp_path).windows if one.first_step == now["from_step"])
    assert report.complete


@pytest.mark.nightly
def test_quick_is_asked_for_and_windows_follow_one_another(tmp_path: Path) -> None:
    ranks = run_ranks(train, 2, str(tmp_path), [["quick"], ["window"]], 500, timeout_s=TIMEOUT_S)
    quick, window = ranks[0]["answers"]
    assert [quick["code"], window["code"]] == [0, 0], [quick, window]
    opened = opened_at(ranks[0]["within"])
    assert opened == opened_at(ranks[1]["within"])
    assert quick["from_step"] in opened
    reports = [report for report in read(tmp_path).windows if report.quick]
    assert reports
    (said,) = [line for line in ranks[0]["lines"] if "the quick answer" in line]
    assert "Nothing has been measured" not in said
    assert len({report.window for report in read(tmp_path).windows}) == len(read(tmp_path).windows)


def train_with_a_hanging_rank(rank: int, folder: str) -> dict[str, Any]:
    """As ``train``, where rank 1's vote hangs in the store until rank 0 has decided without it."""
    add = StoreChannel.add

    def hang(channel: StoreChannel, key: str, amount: int = 1) -> int:
        if rank == 1 and key.startswith("plan/"):
            wait_until(lambda: b'"decided":false' in (channel.peek("plan") or b""))
        return add(channel, key, amount)

    with mock.patch.object(StoreChannel, "add", hang):
        return train(rank, folder, [["stop"]], every=1000, after=100)


@pytest.mark.nightly
def test_no_rank_follows_where_the_store_hangs_for_one(tmp_path: Path) -> None:
    ranks = run_ranks(train_with_a_hanging_rank, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    (answer,) = ranks[0]["answers"]
    assert answer["code"] == 2, answer
    assert "not all ranks agreed in time, and none follows" in answer["text"]
    opened, of_the_other = opened_at(ranks[0]["within"]), opened_at(ranks[1]["within"])
    assert opened == list(range(2, ranks[0]["steps"], 1000))
    # It opens none while it does not know what was decided: how many steps that takes depends on the machine.
    assert of_the_other[0] == 2
    assert set(of_the_other) <= set(opened)
    assert [rank["digest"] for rank in ranks] == digests_without_library(ranks[0]["steps"])
    assert ranks[0]["active"]


def train_on_a_hanging_file_system(rank: int, folder: str) -> dict[str, Any]:
    hangs = mock.patch.object(Mailbox, "take", side_effect=lambda: time.sleep(1000.0))
    with hangs:
        began_s = time.monotonic()
        found = train(rank, folder, [["status", "--timeout", "3"]])
        return {**found, "took_s": time.monotonic() - began_s}


def test_a_file_system_that_hangs_holds_up_nothing_but_the_answer(tmp_path: Path) -> None:
    ranks = run_ranks(train_on_a_hanging_file_system, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    (answer,) = ranks[0]["answers"]
    assert answer["code"] == 3
    assert "no answer within 3 s" in answer["said"]
    assert ranks[0]["active"]
    assert len(read(tmp_path).windows) >= 2


def post(port: int, query: str) -> tuple[int, str]:
    address = f"http://127.0.0.1:{port}/handler/overlap_callbacks?{query}"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data=b"", method="POST"), timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def train_with_a_debug_server(rank: int, folder: str) -> dict[str, Any]:
    from torch._C._distributed_c10d import _WorkerServer
    from torch.distributed import debug

    debug._WORKER_SERVER = server = _WorkerServer("127.0.0.1", 0)
    answered: list[tuple[int, str]] = []

    def ask_both(folder: str, *words: str) -> dict[str, Any]:
        answered.append(post(server.port, words[0]))
        return {}

    with mock.patch(f"{__name__}.ask", ask_both):
        found = train(rank, folder, [["ask=status"], ["ask=nothing"], ["ask=stop"]], after=200)
    answered.append(post(server.port, "ask=status"))
    server.shutdown()
    return {**found, "answered": answered}


def test_torchs_debug_server_takes_requests_where_the_job_has_one(tmp_path: Path) -> None:
    ranks = run_ranks(train_with_a_debug_server, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    status, wrong, stop, at_the_end = ranks[0]["answered"]
    assert status[0] == 200
    assert "a window every 100 steps" in json.loads(status[1])["text"]
    assert wrong[0] == 400
    assert "REQUEST must be window" in wrong[1]
    assert json.loads(stop[1])["outcome"] in ("done", "refused")
    assert at_the_end == (503, "nobody listens here: ask rank 0\n")


def train_with_a_signal(rank: int, folder: str) -> dict[str, Any]:
    caught: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))

    def strike(folder: str, *words: str) -> dict[str, Any]:
        """As ``ask``, on a busy machine again."""
        with captured_log(logging.INFO) as lines:
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(4.0)
                if any("a window opens at step" in line for line in lines):
                    break
        return {}

    with mock.patch(f"{__name__}.ask", strike):
        found = train(rank, folder, [["signal"]], every=5000, after=100, ask_signal="SIGUSR1")
    os.kill(os.getpid(), signal.SIGUSR1)
    return {**found, "caught": len(caught)}


@pytest.mark.nightly
def test_a_signal_asks_for_a_window_and_reaches_the_users_handler(tmp_path: Path) -> None:
    ranks = run_ranks(train_with_a_signal, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    assert ranks[0]["caught"] >= 2
    assert ranks[1]["caught"] == 1
    first, *asked = opened_at(ranks[0]["within"])
    assert first == 2
    assert len(asked) == 1, ranks[0]["lines"]
    assert opened_at(ranks[1]["within"]) == [first, *asked]
    assert any("asked from outside: window; a window opens at step" in line for line in ranks[0]["lines"])


def train_and_ask_in_a_window(rank: int, folder: str) -> dict[str, Any]:
    """As ``train``, with windows that are mostly open."""
    schedule = tiny_schedule(every_n_steps=420, repeats=50, warmup_steps=1, spread=False)
    return train(rank, folder, [["window"], ["stop"], ["resume"]], after=500, schedule=schedule)


def test_a_stop_ends_an_open_window_on_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    ranks = run_ranks(train_and_ask_in_a_window, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    window, stop, resume = ranks[0]["answers"]
    assert [window["code"], stop["code"], resume["code"]] == [0, 0, 0], ranks[0]["answers"]
    within = ranks[0]["within"]
    assert within == ranks[1]["within"]
    assert any(within[stop["from_step"] - 21 : stop["from_step"]])  # nineteen steps lie between windows
    assert not any(within[stop["from_step"] : resume["from_step"]])
    assert any(within[resume["from_step"] :])
    assert [rank["digest"] for rank in ranks] == digests_without_library(ranks[0]["steps"])


def train_without_communication(rank: int, folder: str) -> dict[str, Any]:
    return train(rank, folder, [["status"], ["stop"], ["resume"], ["window"]], wrap=lambda model: model, after=150)


@pytest.mark.nightly
def test_ranks_that_do_not_communicate_are_asked_too(tmp_path: Path) -> None:
    ranks = run_ranks(train_without_communication, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    assert [answer["code"] for answer in ranks[0]["answers"]] == [0, 0, 0, 0], ranks[0]["answers"]
    _, stop, resume, _ = ranks[0]["answers"]
    for rank in ranks:
        opened = opened_at(rank["within"])
        assert not [step for step in opened if stop["from_step"] <= step < resume["from_step"]]
        assert resume["from_step"] in opened


def train_with_a_late_decision(rank: int, folder: str) -> dict[str, Any]:
    """As ``train``, where rank 0's decision comes to the store long after the step from which it holds."""
    publish = StoreChannel.publish

    def late(channel: StoreChannel, key: str, message: bytes) -> None:
        if key == "plan" and b'"decided":true' in message:
            time.sleep(4 * LEAD_S)
        publish(channel, key, message)

    with mock.patch.object(StoreChannel, "publish", late):
        return train(rank, folder, [["every=40"]])


def test_no_rank_opens_a_window_until_it_knows_what_was_decided(tmp_path: Path) -> None:
    ranks = run_ranks(train_with_a_late_decision, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    (answer,) = ranks[0]["answers"]
    assert answer["code"] == 0, answer
    asked = [[step for step in opened_at(rank["within"]) if step >= answer["from_step"]] for rank in ranks]
    assert asked[0]
    assert asked[0][-1] == asked[1][-1]
    assert {(step - answer["from_step"]) % 40 for rank in asked for step in rank} == {0}


def train_alone(rank: int, folder: str) -> dict[str, Any]:
    return train(rank, folder, [["status"], ["window"]], wrap=lambda model: model)


def test_a_job_of_one_rank_says_where_it_is_and_that_it_measures_nothing(tmp_path: Path) -> None:
    ((status, window),) = [rank["answers"] for rank in run_ranks(train_alone, 1, str(tmp_path), timeout_s=TIMEOUT_S)]
    assert status["code"] == 0, status
    assert status["status"]["state"] == "alone"
    assert sum(status["status"]["parts_ms"].values()) > 0
    assert window["code"] == 2
    assert "only status is answered" in window["text"]


def train_and_decide(rank: int, folder: str) -> dict[str, Any]:
    """A job that keeps an arm, and is asked while it does, three times."""
    training, sleeping = Training(rank), Sleeping()
    schedule = tiny_schedule(repeats=2, every_n_steps=EVERY)
    arms = sleeping.arms(["faster"])
    monitor = new_monitor(JsonlSink(folder), arms=arms, decide=Keep(budget=1.0), schedule=schedule)
    found: dict[str, Any] = {"arms": [], "within": [], "answers": []}

    def is_kept() -> bool:
        return sleeping.arm == "faster" and not monitor.in_window

    def questioner() -> None:
        for condition, words in ((is_kept, ["stop"]), (lambda: True, ["resume"]), (is_kept, ["window", "--now"])):
            wait_until(condition)
            found["answers"].append(ask(folder, *words))

    with mock.patch.multiple(plans, _LEAD_S=LEAD_S, _LEAD_STEPS=LEAD_STEPS, LOOK_S=LOOK_S):
        for step in steps_during(questioner, rank, 6 * EVERY):
            with monitor.step(step):
                training.step()
                sleeping.sleep()
                found["arms"].append(sleeping.arm)
                found["within"].append(monitor.in_window)
        monitor.close()
    return {**found, "digest": training.digest(), "steps": len(found["within"]), "left": sleeping.arm}


@pytest.mark.nightly
def test_a_stop_while_an_arm_is_kept_puts_back_the_setting_on_all_ranks_at_the_same_step(tmp_path: Path) -> None:
    ranks = run_ranks(train_and_decide, 2, str(tmp_path), timeout_s=TIMEOUT_S)
    stop, resume, now = ranks[0]["answers"]
    assert [answer["code"] for answer in ranks[0]["answers"]] == [0, 0, 0], ranks[0]["answers"]
    arms, within = ranks[0]["arms"], ranks[0]["within"]
    assert (arms, within) == (ranks[1]["arms"], ranks[1]["within"])
    kept = [step for step, arm in enumerate(arms) if arm and not within[step]]
    between = range(stop["from_step"], resume["from_step"])
    assert any(step < between.start for step in kept)
    assert any(step >= between.stop for step in kept)
    assert not any(arms[step] or within[step] for step in between)
    assert within[now["from_step"]]
    assert now["from_step"] in [report.first_step for report in read(tmp_path).arms]
    assert not any(rank["left"] for rank in ranks)
    assert [rank["digest"] for rank in ranks] == digests_without_library(ranks[0]["steps"])
