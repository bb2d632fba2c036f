"""The options of a monitor are checked once, in one place."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from overlap_callbacks import JsonlSink, OverlapMonitor, Schedule, WandbSink
from overlap_callbacks.analysis.results.run import Workload
from overlap_callbacks.monitor.config import MonitorConfig, apply_env_overrides, as_settings

BAD = {
    "schedule": ({"every_n_steps": 5}, TypeError),
    "sinks": ("jsonl", TypeError),
    "strict": (1, TypeError),
    "max_overhead": (0, ValueError),
    "order_timeout_s": (0, ValueError),
    "report_timeout_s": ("10", TypeError),
    "power": (None, TypeError),
    "power_interval_s": (1e-4, ValueError),
    "power_idle_interval_s": (True, TypeError),
    "power_per_node": ("yes", TypeError),
    "tokens_per_step": (0, ValueError),
    "hosts": ("no", TypeError),
    "samples_per_step": (0, ValueError),
    "flop_per_step": (-1.0, ValueError),
    "model_parameters": ("7B", TypeError),
    "model_preset": ("gpt5", ValueError),
    "precision": ("int8", ValueError),
    "quick": ("yes", TypeError),
    "peak_flop_per_s": (float("inf"), ValueError),
    "settings": (["bucket_mb"], TypeError),
    "sample_experts_every": (0, ValueError),
    "annotate_steps": ("nvtx", TypeError),
    "detail": ("much", ValueError),
}


@pytest.mark.parametrize("option", BAD)
@pytest.mark.parametrize("make", [MonitorConfig, OverlapMonitor])
def test_a_wrong_value_is_refused_with_its_name_and_what_was_given(make: Any, option: str) -> None:
    value, error = BAD[option]
    with pytest.raises(error, match=option) as raised:
        make(**{option: value})
    assert repr(value) in str(raised.value)


def test_the_constructor_of_a_monitor_has_the_options_of_its_config_and_their_defaults() -> None:
    parameters = inspect.signature(OverlapMonitor).parameters
    fields = {field.name: field for field in dataclasses.fields(MonitorConfig) if field.init}
    assert list(parameters) == list(fields)
    # What a config makes for itself is None in the constructor.
    for name in parameters.keys() - {"schedule", "sinks", "run_dir"}:
        assert parameters[name].default == fields[name].default


@pytest.mark.parametrize(
    ("precision", "given"),
    [
        ("bf16", [torch.bfloat16, "bfloat16", "BF16", "bf16-mixed", "bf16-true", "torch.bfloat16"]),
        ("fp16", [torch.float16, torch.half, "half", "float16", "16-mixed", "16"]),
        ("fp32", [torch.float32, "float", "float32", "32-true", "single"]),
        ("fp8", [torch.float8_e4m3fn, torch.float8_e5m2, "float8", "fp8"]),
        ("tf32", ["TF32", "tensorfloat32"]),
    ],
)
def test_a_precision_may_be_a_torch_dtype_or_a_usual_name(precision: str, given: list[Any]) -> None:
    assert [MonitorConfig(precision=name).precision for name in given] == [precision] * len(given)


@pytest.mark.parametrize("given", [torch.float64, torch.int8, "bf17", 32.5, "fp32 ", b"fp32"])
def test_another_precision_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="precision must be one of fp32, tf32, bf16, fp16, fp8, or a torch dtype"):
        MonitorConfig(precision=given)


@pytest.mark.parametrize(("word", "quick"), [("quick", True), (" QUICK ", True), ("on", False), ("1", False)])
def test_the_environment_asks_for_a_quick_answer(monkeypatch: pytest.MonkeyPatch, word: str, quick: bool) -> None:
    monkeypatch.setenv("OVERLAP_CALLBACKS", word)
    assert apply_env_overrides(MonitorConfig())[0].quick is quick


def test_another_word_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERLAP_CALLBACKS", "quikc")
    with pytest.raises(ValueError, match="OVERLAP_CALLBACKS must be on, off or quick, got 'quikc'"):
        apply_env_overrides(MonitorConfig())


def test_only_one_option_may_give_the_flop_of_a_step() -> None:
    with pytest.raises(ValueError, match="give one of flop_per_step and model_preset"):
        MonitorConfig(flop_per_step=1e15, model_preset="gpt2")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"": 1}, "a name must be text"),
        ({"a": None}, r"settings\['a'\] must be a number"),
        ({"a": float("nan")}, r"settings\['a'\] must be finite"),
        ({"a": "x" * 101}, "at most 100 characters"),
        ({str(number): 1 for number in range(33)}, "at most 32"),
        ({"a": "\ud800"}, "text must be valid Unicode"),
        ({"a\ud800": 1}, "text must be valid Unicode"),
        ({"a": 10**30}, r"settings\['a'\] must be at most"),
    ],
)
def test_settings_that_no_record_keeps_are_refused(settings: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        MonitorConfig(settings=settings)


def test_the_facts_about_the_work_are_kept_together() -> None:
    config = MonitorConfig(tokens_per_step=64, model_parameters=10, precision="fp8", settings={"bucket_mb": 25})
    assert config.workload == Workload(
        tokens_per_step=64, model_parameters=10.0, precision="fp8", settings={"bucket_mb": 25}
    )


def test_numbers_and_text_of_numpy_reach_the_record() -> None:
    settings: Any = {np.str_("lr"): np.float64(0.1), "mb": np.int64(25), "half": np.float32(0.5), "on": np.bool_(True)}
    config = MonitorConfig(settings=settings, model_preset=np.str_("gpt2"), schedule=Schedule(blocks=np.str_("OSSO")))
    told = msgspec.json.decode(msgspec.json.encode([config.workload, config.schedule.as_dict()]))
    assert told[0]["settings"] == {"lr": 0.1, "mb": 25, "half": 0.5, "on": True}
    assert (told[0]["model_preset"], told[1]["blocks"]) == ("gpt2", "OSSO")
    assert msgspec.json.encode(as_settings({"bucket": np.int64(5), "lr": np.float64(0.5)})) == b'{"bucket":5,"lr":0.5}'


def test_checked_values_are_kept_and_an_option_cannot_be_changed_later() -> None:
    sink = JsonlSink("folder")
    config = MonitorConfig(sinks=sink, run_dir="folder", max_overhead=1, order_timeout_s=3)
    assert config.sinks == [sink]
    assert config.run_dir == Path("folder")
    assert (type(config.max_overhead), type(config.order_timeout_s)) == (float, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strict = True  # type: ignore[misc]


def test_without_sinks_a_monitor_keeps_a_record_in_its_folder_and_follows_the_active_wandb_run(tmp_path: Path) -> None:
    monitor = OverlapMonitor(run_dir=tmp_path)
    record, wandb = monitor.config.sinks
    assert isinstance(record, JsonlSink)
    assert record.path.parent == monitor.run_dir == tmp_path
    assert isinstance(wandb, WandbSink)
    monitor.close()


def test_detail_is_that_of_the_wandb_sink_that_a_monitor_makes() -> None:
    for options, detail in (({}, "short"), ({"detail": "all"}, "all")):
        (sink,) = [sink for sink in OverlapMonitor(**options).config.sinks if isinstance(sink, WandbSink)]
        assert sink._detail == detail
