"""``overlap predict`` as users call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from overlap_callbacks.analysis.communication.model_shape import PRESETS
from overlap_callbacks.analysis.results.arrivals import ONE_HOST, SizeTransfer
from overlap_callbacks.analysis.results.estimate import Estimate
from overlap_callbacks.analysis.results.report import Throughput
from overlap_callbacks.analysis.results.window import CollectiveTime
from overlap_callbacks.cli import main
from overlap_callbacks.experiments.study.models import MODELS, Transformer
from overlap_callbacks.report.views.predict import gib_in_words
from tests.commands import invoke
from tests.report.runs import window, write

GPT3 = ["--model", "gpt3-6.7b", "--pp", "4", "--tp", "2", "--dp", "4", "--micro-batch", "1", "--global-batch", "512"]
BY_HAND = ["--layers", "54", "--hidden", "2000", "--sequence", "1024", "--vocabulary", "50257", "--recompute", "full"]
BY_HAND += ["--dtype", "bf16", "--layout", "megatron"]
FAST = ["--bandwidth", "20", "--peak", "312"]
ACTIVATION = 2 * 2048 * 4096  # 2bsh of gpt3-6.7b in 16 bit


def predict(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["predict", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["predict", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    return result.output


def messages(found: Any, rank: int, dimension: str) -> dict[tuple[str, int], int]:
    rows = [row for row in found["messages"] if (row["rank"], row["dimension"]) == (rank, dimension)]
    return {(row["operator"], row["bytes_each"]): row["messages"] for row in rows}


def test_every_kind_of_rank_with_all_that_it_sends() -> None:
    found = predict(*GPT3)
    assert {row["rank"] for row in found["messages"]} == {0, 8, 24}  # the first stage, the middle ones, the last
    # 128 micro-batches of 8 layers with 4 all-reduces, and the embedding's.
    assert messages(found, 0, "tensor") == {("allreduce_", ACTIVATION): 128 * (8 * 4 + 1)}
    assert messages(found, 8, "tensor") == {("allreduce_", ACTIVATION): 128 * 8 * 4}
    # The last stage has the output layer's, and three of the loss, of 4 bytes a token.
    assert messages(found, 24, "tensor") == {("allreduce_", ACTIVATION): 128 * 33, ("allreduce_", 4 * 2048): 384}
    assert messages(found, 0, "pipeline") == {("send", ACTIVATION): 128, ("recv_", ACTIVATION): 128}
    # Words are padded to 50432, a multiple of 256; half of them on each tensor rank, in the width of the parameters.
    assert messages(found, 0, "embedding") == {("allreduce_", 2 * 25216 * 4096): 1}
    for row in found["messages"]:
        assert row["bytes"] == row["messages"] * row["bytes_each"]
    (send, *_) = [row for row in found["messages"] if row["operator"] == "send"]
    assert send["wire_bytes"] == send["bytes"]
    assert found["world_size"] == 32
    assert found["parameters"] == 6_658_404_352
    assert len({row["rank"] for row in predict(*GPT3, "--all-ranks")["messages"]}) == 32


def test_step_times_are_the_terms_of_equation_1() -> None:
    found = predict(*GPT3, *FAST)
    terms = ("compute_ms", "tensor_ms", "pipeline_ms", "data_ms", "bubble_ms")
    for step in (found["step"], found["paper_step"]):
        assert step["iteration_ms"] == pytest.approx(sum(step[term] for term in terms))
    # 4224 all-reduces of 2bsh, 2(t-1)/t = 1, at 20 GB/s.
    assert found["step"]["tensor_ms"] == pytest.approx(4224 * ACTIVATION / 20e9 * 1e3)
    assert found["expected_bubble_ratio"] == pytest.approx(3 / 131)
    slower = predict(*GPT3, *FAST, "--data-bandwidth", "10")["step"]
    assert slower["data_ms"] == pytest.approx(2 * found["step"]["data_ms"])
    assert slower["tensor_ms"] == found["step"]["tensor_ms"]


def test_without_bandwidths_there_is_no_step_time_and_a_note_says_why() -> None:
    found = predict(*GPT3, "--peak", "312")
    assert (found["step"], found["paper_step"]) == (None, None)
    (note,) = found["notes"]
    assert note == (
        "no step time without --tensor-bandwidth and --pipeline-bandwidth and --data-bandwidth "
        "(--bandwidth sets all of them)"
    )


def test_a_job_without_rates_has_those_of_a_usual_machine_and_says_so() -> None:
    found = predict("--model", "gpt3-6.7b", "--pp", "4", "--tp", "2", "--dp", "4")
    assert found["micro_batches"] == 16  # four for each stage
    (note,) = found["notes"]
    assert note.startswith("assumed, as no rates are given: h100 at 40% of its peak; nvlink4 within hosts of 8 ranks")
    step = found["step"]
    assert step["hidden_ms"] == pytest.approx(step["compute_ms"] + step["bubble_ms"])
    assert found["device_bytes"] == 80 * 2**30
    named = predict(
        "--model", "gpt3-6.7b", "--pp", "4", "--tp", "2", "--dp", "4", "--gpu", "h100", "--network", "ib-ndr"
    )
    assert named["step"] == step
    assert named["notes"][0].startswith("rates by name: ")
    # Tensor and data groups are within a host of 8 ranks, the pipeline is not.
    rates = ["--peak", "h100", "--bandwidth", "nvlink4", "--pipeline-bandwidth", "ib-ndr"]
    assert predict("--model", "gpt3-6.7b", "--pp", "4", "--tp", "2", "--dp", "4", *rates)["step"] == step
    numbers = ["--peak", "989.4", "--bandwidth", str(0.8 * 450), "--pipeline-bandwidth", str(0.8 * 50)]
    same = predict("--model", "gpt3-6.7b", "--pp", "4", "--tp", "2", "--dp", "4", *numbers)["step"]
    assert same == pytest.approx(step)


def test_hosts_and_their_network_decide_how_long_messages_take() -> None:
    job = ["--model", "gpt3-6.7b", "--tp", "4", "--dp", "2"]
    within = predict(*job)["step"]
    split = predict(*job, "--ranks-per-host", "4")["step"]
    assert split["tensor_ms"] == within["tensor_ms"]
    assert split["data_ms"] == pytest.approx(within["data_ms"] * 450 / 50)
    slower = predict(*job, "--ranks-per-host", "2", "--network", "25")["step"]
    assert slower["tensor_ms"] == pytest.approx(within["tensor_ms"] * 0.8 * 450 / 25)
    # Other layouts have their own links: within a host all of them are fast.
    asked = [choice for choice in predict(*job, "--what-if")["what_if"] if choice["is_asked"]]
    assert [(one["p"], one["t"], one["d"]) for one in asked] == [(1, 4, 2)]
    assert asked[0]["step"] == within


def test_the_step_time_comes_first_with_and_without_overlap_and_messages_when_they_are_asked_for() -> None:
    job = ["predict", "--model", "gpt3-6.7b", "--pp", "4", "--dp", "8"]
    step = predict(*job[1:])["step"]
    shown = invoke(*job, env={"COLUMNS": "200"}).stdout
    first = f"A step takes {step['hidden_ms']:,.0f} ms if communication is hidden, {step['iteration_ms']:,.0f} if not; "
    assert shown.startswith(f"{first}56 GiB a device, which fits into 80. 6,658,404,352 parameters on 32 ranks")
    assert "--messages shows what is sent" in shown
    assert "send" not in shown.replace("sent", "")
    assert shown.index("How long does a step take?") < shown.index("What is it based on?")
    everything = invoke(*job, "--messages", env={"COLUMNS": "200"}).stdout
    assert everything.startswith(first)
    assert everything.index("How long does a step take?") < everything.index("Messages of a step")
    assert "Traffic by dimension of parallelism" in everything
    small = invoke(*job, "--gpu", "a100-40gb", env={"COLUMNS": "200"}).stdout
    assert "56 GiB a device, which does not fit into 40." in small


def test_memory_is_whole_unless_that_shows_none_or_what_does_not_fit_as_if_it_did() -> None:
    gib = 2**30
    assert [gib_in_words(needed * gib, 80 * gib) for needed in (59.4, 80.0, 80.2, 80.04, 0.3)] == [
        "59", "80", "80.2", "80.04", "0.3",
    ]  # fmt: skip
    assert [gib_in_words(needed * gib, None) for needed in (80.2, 0.04)] == ["80", "0.04"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h900"], "--gpu must be one of v100, a100"),
        (["--gpu", "5"], "mi325x, got '5'"),
        (["--network", "fast"], "'fast' is neither a number nor one of nvlink1"),
        (["--network", "-1"], "network must be a positive, finite number of GB/s, got -1"),
        (["--peak", "fast"], "'fast' is neither a number nor one of v100"),
        (["--gpu", "v100"], "the peak of v100 in bf16 is not known"),
        (["--layout", "fsdp"], "did you mean fsdp2?"),
        (["--model", "gpt3-1.3B"], "did you mean gpt3-1.3b?"),
        (["--model", "resnet50"], "resnet50 is a network for images, and predict knows transformers"),
    ],
)
def test_names_that_are_not_known_are_refused_with_those_that_are(arguments: list[str], says: str) -> None:
    result = invoke("predict", "--model", "gpt2", "--dp", "2", *arguments)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


def test_predict_and_study_know_the_same_models() -> None:
    assert set(PRESETS) == {name for name, model in MODELS.items() if isinstance(model, Transformer)}
    for name in PRESETS:
        assert MODELS[name].shape == PRESETS[name]  # type: ignore[union-attr]
    assert PRESETS["gpt3-xl"] == PRESETS["gpt3-1.3b"]
    result = invoke("predict", "--layers", "2")
    assert all(name in result.stderr for name in PRESETS)


def test_sizes_by_hand_and_layers_that_do_not_divide() -> None:
    found = predict(*BY_HAND, "--pp", "4", "--tp", "2", "--global-batch", "1")
    # 14 layers of 6 all-reduces with full recomputation, and the embedding's; 13 on the third stage.
    assert messages(found, 0, "tensor") == {("allreduce_", 2 * 1024 * 2000): 14 * 6 + 1}
    assert messages(found, 4, "tensor") == {("allreduce_", 2 * 1024 * 2000): 13 * 6}
    assert "54 layers do not divide over 4 stages: taken is 14,14,13,13" in found["notes"][0]
    chosen = predict(*BY_HAND, "--pp", "4", "--tp", "2", "--stages", "12,14,14,14", "--global-batch", "1")
    assert messages(chosen, 0, "tensor") == {("allreduce_", 2 * 1024 * 2000): 12 * 6 + 1}


def test_a_known_model_is_split_as_its_study_did() -> None:
    found = predict("--model", "gpt-3b", "--pp", "4", "--tp", "2", "--global-batch", "1")
    assert "54 layers do not divide over 4 stages: taken is 14,14,13,13" in found["notes"][0]
    assert messages(found, 0, "tensor") == {("allreduce_", 2 * 1024 * 2000): 14 * 4 + 1}


@pytest.mark.parametrize(
    ("arguments", "dtype", "gradient_dtype"),
    [
        ([], "bf16", "bf16"),
        (["--dtype", "fp16"], "fp16", "fp16"),
        (["--gradient-dtype", "fp32"], "bf16", "fp32"),
        (["--layout", "megatron-lm"], "bf16", "fp32"),
        (["--layout", "megatron-lm", "--dtype", "bf16"], "bf16", "fp32"),
        (["--layout", "megatron-lm", "--dtype", "fp16"], "fp16", "fp16"),
        (["--layout", "megatron-lm", "--gradient-dtype", "bf16"], "bf16", "bf16"),
        (["--layout", "ddp"], "fp32", "fp32"),
        (["--layout", "ddp", "--dtype", "bf16"], "bf16", "bf16"),
        (["--layout", "fsdp2"], "bf16", "bf16"),
    ],
)
def test_gradients_have_the_width_of_the_parameters_but_in_megatron_lm_with_bf16(
    arguments: list[str], dtype: str, gradient_dtype: str
) -> None:
    found = predict("--model", "gpt2", "--dp", "2", "--global-batch", "2", *arguments)
    assert (found["dtype"], found["gradient_dtype"]) == (dtype, gradient_dtype)
    reduced = sum(row["bytes"] for row in found["messages"] if "reduce" in row["operator"])
    width = {"bf16": 2, "fp16": 2, "fp32": 4}[gradient_dtype]
    assert reduced == pytest.approx(width * 124_439_808, rel=1e-3)


def test_megatron_reduces_all_gradients_at_once_by_default() -> None:
    def data(*arguments: str) -> int:
        found = predict("--model", "gpt2-xl", "--dp", "2", "--global-batch", "2", *arguments)
        return sum(messages(found, 0, "data").values())

    assert data() == data("--no-overlap-grad-reduce") == data("--layout", "megatron-lm") == 1
    assert data("--overlap-grad-reduce") > 10


@pytest.mark.parametrize(("hidden", "tp"), [(2000, 8), (1600, 4), (768, 1)])
def test_heads_that_are_not_given_suit_tp(hidden: int, tp: int) -> None:
    found = predict("--layers", "2", "--hidden", str(hidden), "--sequence", "8", "--vocabulary", "10", "--tp", str(tp))
    assert found["world_size"] == tp
    assert "tp must divide hidden=64, got 3" in error(
        "--layers", "2", "--hidden", "64", "--sequence", "8", "--vocabulary", "10", "--tp", "3"
    )


def test_other_layouts_are_sorted_by_step_time_and_infeasible_ones_are_named() -> None:
    choices = predict(*GPT3, *FAST, "--what-if", "--memory", "40")["what_if"]
    times = [choice["step"]["iteration_ms"] for choice in choices if not choice["infeasible"]]
    assert len(times) > 5
    assert times == sorted(times)
    assert "a device has 40.0 GiB" in next(c["infeasible"] for c in choices if (c["p"], c["t"], c["d"]) == (1, 1, 32))


def test_tables_for_people() -> None:
    result = CliRunner().invoke(main, ["predict", *GPT3, *FAST, "--what-if", "--messages"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in (
        "6,658,404,352 parameters on 32 ranks",
        "all_reduce",
        "16,777,216",
        "as asked",
        "Paper's",
        "pp",
    ):
        assert text in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt9"], "model must be one of gpt3-125m,"),
        (["--model", "gpt3-6.7b", "--gradient-dtype", "fp8"], "gradient-dtype must be one of bf16, fp16, fp32, got"),
        (
            ["--model", "gpt3-6.7b", "--dp", "4", "--global-batch", "6"],
            "--global-batch must be a multiple of --micro-batch x --dp = 4, got 6",
        ),
        (["--model", "gpt3-6.7b", "--tp", "3"], "tp must divide hidden=4096, got 3"),
        (["--model", "gpt3-6.7b", "--pp", "0"], "pp must be at least 1, got 0"),
        (["--model", "gpt3-6.7b", "--bandwidth", "-1"], "bandwidth must be a positive, finite number of GB/s, got -1"),
        (["--model", "gpt3-6.7b", "--data-bandwidth", "0"], "data bandwidth must be a positive"),
        (["--model", "gpt3-6.7b", "--bandwidth", "nan"], "bandwidth must be a positive"),
        (["--model", "gpt3-6.7b", "--peak", "-3"], "peak must be a positive, finite number of TFLOP/s, got -3"),
        (["--model", "gpt3-6.7b", "--dp", "2", "--peak", "0"], "peak must be a positive, finite number of TFLOP/s"),
        (
            ["--model", "gpt2", "--dp", "2", "--bandwidth", "1e-300"],
            "bandwidth must be from 1e-06 to 1,000,000 GB/s, got 1e-300",
        ),
        (["--model", "gpt2", "--peak", "1e300"], "peak must be from 1e-06 to 1,000,000 TFLOP/s, got 1e+300"),
        (["--model", "gpt2", "--latency", "-1"], "latency must be from 0 to 1,000,000 us, got -1"),
        (["--model", "gpt2", "--latency", "nan"], "latency must be from 0 to 1,000,000 us, got nan"),
        (["--model", "gpt2", "--utilisation", "1e-300"], "utilisation must be at least 1e-06, got 1e-300"),
        (
            ["--model", "gpt2", "--tp", "2", "--sequence-parallel", "--layout", "ddp"],
            "--sequence-parallel must be off outside",
        ),
        (["--model", "gpt2", "--by", "host"], "by host: on which host each rank runs is not known"),
        (["--model", "gpt2", "--dp", "2", "--svg", "/nowhere/a.svg"], "--svg /nowhere/a.svg cannot be written"),
        (["--model", "gpt2", "--dp", "2", "--mapping", "tp-pp"], "mapping must name each dimension of the job once"),
        (
            ["--model", "gpt3-6.7b", "--utilisation", "40"],
            "utilisation must be a fraction above 0 and at most 1, got 40",
        ),
        (["--model", "gpt3-6.7b", "--memory", "inf"], "memory must be a positive, finite number of GiB, got inf"),
        (["--model", "gpt3-6.7b", "--dp", "1000000000000", "--what-if"], "dp must be at most 1000000000, got 1000"),
        (
            ["--model", "gpt3-6.7b", "--tp", "8", "--dp", "1000000"],
            "--pp x --tp x --dp must be at most 1000000 ranks, got 8",
        ),
        (["--model", "gpt2", "--layers", "1000000"], "layers must be at most 10000, got 1000000"),
        (
            ["--layers", "4", "--hidden", "9" * 40, "--sequence", "8", "--vocabulary", "10"],
            "hidden must be at most 1000000000, got 999",
        ),
        (["--layers", "3", "--hidden", "64"], "give --model, or all its sizes: --sequence, --vocabulary missing"),
        (["--model", "gpt3-6.7b", "--pp", "2", "--stages", "16,x"], "stages must be numbers with commas between them"),
        (["--model", "gpt2", "--pp", "2", "--stages", "6,,6"], "stages must be numbers with commas between them"),
        (["--model", "gpt3-6.7b", "--check", "nowhere"], "no record at"),
    ],
)
def test_bad_input_gives_one_clear_sentence(arguments: list[str], message: str) -> None:
    assert message in error(*arguments)


def test_tables_name_operators_and_peers_in_narrow_terminals() -> None:
    result = CliRunner().invoke(main, ["predict", *GPT3, "--messages"], env={"COLUMNS": "80"})
    assert "messages in bf16, gradients in bf16" in " ".join(result.output.split())
    assert "…" not in result.output
    # The second stage sends to the third and to the first.
    for peer in ("to 16", "to 0", "from 16", "from 0"):
        assert f" {peer} " in result.output
    alone = CliRunner().invoke(main, ["predict", "--model", "gpt2", "--dp", "1"], env={"COLUMNS": "200"})
    assert "on 1 rank, 1 micro-batch a step" in alone.output
    assert "Nothing is sent: every group has one rank." in alone.output


def collective(**changes: Any) -> CollectiveTime:
    size = changes.pop("size", 40_000_000)
    fields = {
        "operator": "allreduce_", "group": "default_pg", "group_size": 2, "backend": "gloo", "messages": 2,
        "bytes_in": size, "bytes_out": size, "isolated_ms": 25.0, "dimension": "world", "timed_bytes": float(size),
        "transfer_ms": 20.0,
    }  # fmt: skip
    return CollectiveTime(**{**fields, **changes})


def recorded(folder: Path, *collectives: CollectiveTime, **changes: Any) -> str:
    report = msgspec.structs.replace(window(), **changes)
    samples = tuple([msgspec.structs.replace(sample, collectives=collectives) for sample in report.samples])
    return str(write(folder, msgspec.structs.replace(report, collectives=collectives, samples=samples)))


def test_bandwidths_come_from_the_transfers_of_a_record_unless_they_are_given(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", collective(), collective(group_size=1, operator="barrier"))
    job = ["--model", "gpt2", "--layout", "ddp", "--dp", "2", "--global-batch", "2", "--peak", "1"]
    found = predict(*job, "--from", run)
    # 40 MB in a ring of two, 2 * 1/2, in 20 ms: 2 GB/s. 124,439,808 gradients in 32 bit.
    assert found["step"]["data_ms"] == pytest.approx(4 * 124_439_808 / 2e9 * 1e3)
    (note,) = predict("--model", "gpt2", "--tp", "2", "--peak", "1", "--from", run)["notes"]
    assert note.startswith("no step time without --tensor-bandwidth: the record of ")
    assert note.endswith(" has no timed messages of tensor parallelism")
    assert predict(*job, "--from", run, "--data-bandwidth", "1")["step"]["data_ms"] == pytest.approx(
        4 * 124_439_808 / 1e9 * 1e3
    )


# 90 ms of a sequential step are left beside 20 ms of transfers: 1.8e9 FLOP on two devices are 10 GFLOP/s. The ring has
# a latency of 1 ms and 1 GB/s.
RATES: dict[str, Any] = {
    "e2e_sequential_ms": Estimate(110.0, None, None, 4, 0),
    "throughput": Throughput(flop_per_step=1.8e9, num_devices=2),
    "transfers": (
        SizeTransfer("allreduce_", "world", 2, ONE_HOST, 9, 3, 3_000, 3 * (2 * 1.0 + 0.001)),
        SizeTransfer("allreduce_", "world", 2, ONE_HOST, 23, 1, 10_000_000, 2 * 1.0 + 10.0),
    ),
}
DATA_PARALLEL = ["--model", "gpt2", "--layout", "ddp", "--dp", "2", "--global-batch", "2"]


def test_the_rate_of_compute_and_the_latency_come_from_a_record_too(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", collective(), collective(group_size=1, operator="barrier"), **RATES)
    found = predict(*DATA_PARALLEL, "--from", run)
    same = ["--peak", "0.01", "--utilisation", "1"]
    told = predict(*DATA_PARALLEL, *same, "--bandwidth", "1", "--latency", "1000")
    assert found["step"] == pytest.approx(told["step"])
    (note,) = found["notes"]
    assert note == (
        "step times are of 0.01 TFLOP/s of compute; 1 GB/s and 1,000 us a step of the ring of data parallelism"
    )
    # What is given counts, and a bandwidth that is given has the latency that is given.
    assert predict(*DATA_PARALLEL, "--from", run, *same)["step"] == pytest.approx(told["step"])
    plain = predict(*DATA_PARALLEL, *same, "--bandwidth", "1")
    assert predict(*DATA_PARALLEL, "--from", run, "--bandwidth", "1")["step"] == pytest.approx(plain["step"])
    assert plain["step"]["data_ms"] < told["step"]["data_ms"]
    assert plain["paper_step"] == pytest.approx(told["paper_step"])


def test_what_a_record_lacks_comes_from_a_gpu_by_name_and_what_it_has_counts_first(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", collective(), collective(group_size=1, operator="barrier"), **RATES)
    job = ["--model", "gpt2", "--tp", "2", "--dp", "2", "--global-batch", "2"]
    named, rates = predict(*job, "--from", run, "--gpu", "A100", "--network", "25")["notes"]
    assert named.startswith("rates by name: nvlink3 within hosts of 8 ranks and 25 GB/s between them, links by name at")
    assert rates.startswith("step times are of 0.01 TFLOP/s of compute; 240 GB/s of tensor parallelism; 1 GB/s and ")
    assert predict(*job, "--gpu", "a100", "--peak", "1", "--bandwidth", "1")["notes"] == []


def test_a_second_record_adds_what_the_first_lacks(tmp_path: Path) -> None:
    data = recorded(tmp_path / "data", collective(), **RATES)
    tensor = recorded(tmp_path / "tensor", collective(dimension="tensor", transfer_ms=10.0))
    job = ["--model", "gpt2", "--tp", "2", "--dp", "2", "--global-batch", "2"]
    found = predict(*job, "--from", tensor, "--from", data)
    told = predict(*job, "--peak", "0.01", "--utilisation", "1", "--bandwidth", "1", "--latency", "1000")
    assert found["step"]["data_ms"] == pytest.approx(told["step"]["data_ms"])
    # 40 MB in 10 ms: 4 GB/s, without a latency.
    assert found["step"]["tensor_ms"] < told["step"]["tensor_ms"] / 3
    (note,) = predict(*job, "--from", tensor)["notes"]
    assert note.startswith("no step time without --peak and --data-bandwidth: the record of ")
    assert note.endswith(" has no FLOP of a step with its sequential time and no timed messages of data parallelism")


@pytest.mark.parametrize(
    "lacking",
    [
        {"throughput": None},
        {"throughput": Throughput(tokens_per_s=1.0, num_devices=2)},
        {"e2e_sequential_ms": None},
        {"e2e_sequential_ms": Estimate(15.0, None, None, 4, 0)},
        {"valid": False},
    ],
    ids=["nothing told", "no FLOP", "no sequential steps", "less than the transfers", "invalid"],
)
def test_a_record_without_the_rate_of_compute_gives_none(tmp_path: Path, lacking: dict[str, Any]) -> None:
    run = recorded(tmp_path / "run", collective(), **{**RATES, **lacking})
    found = predict(*DATA_PARALLEL, "--from", run)
    assert found["step"] is None
    assert found["notes"][0].startswith("no step time without --peak: the record of ")


def test_the_bubble_of_a_pipeline_is_not_taken_for_compute(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", collective(), collective(operator="send", dimension="pipeline"), **RATES)
    assert predict(*DATA_PARALLEL, "--from", run)["step"] is None


def test_a_record_is_compared_with_the_prediction_row_by_row(tmp_path: Path) -> None:
    job = ["--layers", "2", "--hidden", "64", "--sequence", "8", "--vocabulary", "10", "--layout", "ddp", "--dp", "2"]
    (row,) = predict(*job)["messages"]
    equal = collective(messages=row["messages"], size=row["bytes"])
    run = recorded(tmp_path / "run", equal, collective(operator="broadcast_", size=8))
    differs = CliRunner().invoke(main, ["predict", "--json", *job, "--check", run])
    assert differs.exit_code == 1
    first, second = json.loads(differs.stdout)[:2]
    assert (first["messages"], first["bytes"]) == (first["measured_messages"], first["measured_bytes"])
    assert first["bytes"] == row["bytes"] > 0
    assert (first["equal"], second["equal"]) == (True, False)
    assert (second["operator"], second["messages"], second["measured_messages"]) == ("broadcast_", 0, 2)
    result = CliRunner().invoke(main, ["predict", *job, "--check", str(tmp_path / "run")], env={"COLUMNS": "80"})
    assert "of 4 rows are equal, to the byte. A row that differs has two lines." in result.output
    assert [line.split()[-1] for line in result.output.splitlines() if "broadcast" in line] == ["predicted"] * 2
    assert result.exit_code == 1
    assert "--pp x --tp x --dp must be the 2 ranks" in error(*job, "--dp", "4", "--check", str(tmp_path / "run"))
    alike = CliRunner().invoke(main, ["predict", *job, "--check", recorded(tmp_path / "alike", equal)])
    assert alike.exit_code == 0, alike.output


def test_experts() -> None:
    job = [*BY_HAND, "--recompute", "none", "--experts", "8", "--experts-per-token", "2", "--dp", "8", "--ep", "8"]
    found = predict(*job)
    # A layer: tokens go and come back, forward and backward; their weights one way each; two for each token.
    assert messages(found, 0, "expert") == {
        ("_allgather_base_", 8 * 8 * 8): 54,
        ("alltoall_base_", 2 * 2 * 1024 * 2000): 4 * 54,
        ("alltoall_base_", 2 * 2 * 1024): 2 * 54,
    }
    # An expert's gradients are on no other rank.
    assert {row["group_size"] for row in found["messages"] if row["dimension"] == "data"} == {8}
    assert "experts are predicted for layout megatron with --pp=1" in error(*job, "--tp", "2")


def test_the_matrix_of_a_job_is_predicted_for_its_hosts_and_for_another_mapping(tmp_path: Path) -> None:
    job = ["--model", "gpt3-6.7b", "--pp", "2", "--tp", "2", "--dp", "2", "--global-batch", "4"]
    as_given, other = predict(*job, "--ranks-per-host", "4", "--mapping", "tp-pp-dp")["traffic"]
    assert (as_given["mapping"], other["mapping"]) == ("tp-dp-pp", "tp-pp-dp")
    crossing = [
        {row["dimension"]: row["between_hosts_bytes"] for row in found["dimensions"]} for found in (as_given, other)
    ]
    # Two micro-batches there and back, of each of four ranks of a stage.
    assert (crossing[0]["pipeline"], crossing[0]["data"]) == (4 * 2 * 2 * ACTIVATION, 0)
    assert crossing[1]["pipeline"] == 0 < crossing[1]["data"]
    first = [row for row in predict(*job)["messages"] if row["rank"] == 0 and row["operator"] != "recv_"]
    assert sum(as_given["sent_bytes"][0]) == pytest.approx(sum(row["wire_bytes"] for row in first))
    assert predict(*job)["traffic"][0]["dimensions"][0]["between_hosts_bytes"] is None

    picture = tmp_path / "a.svg"
    result = CliRunner().invoke(main, ["predict", *job, "--dp", "8", "--global-batch", "8", "--svg", str(picture)])
    assert picture.read_text().startswith("<svg")
    shown = " ".join(result.output.split())
    assert "A step of all ranks, as predicted." in shown
    assert "The matrix is drawn in" in shown
    assert "--svg or --png" not in shown


def test_what_a_check_would_not_look_at_is_refused() -> None:
    found = error("--model", "gpt2", "--dp", "2", "--check", "runs", "--what-if", "--all-ranks", "--from", "other")
    assert found == (
        "Error: --check compares messages, and nothing else: leave out --what-if and --all-ranks and --from, or "
        "--check\n"
    )
