"""Tests that are known to fail with some versions of other packages, each with the reason.

Where such a version is installed, ``tests/conftest.py`` expects these tests to fail: one that passes is an error.
``docs/versions.md`` shows the list (``python docs/versions.py`` writes it there).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import metadata

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class KnownFailure:
    """Tests that fail for one reason.

    Attributes:
        package: whose version is the reason.
        versions: with which they fail, such as ``<2.9``.
        tests: as pytest names them; ``*`` stands for anything.
        reason: one sentence.
        spoils: whether they spoil what runs after them in their process, so that they are not run at all.
    """

    package: str
    versions: str
    tests: tuple[str, ...]
    reason: str
    spoils: bool = False

    def applies(self, installed: str | None = None) -> bool:
        """Whether such a version is installed.

        Args:
            installed: the version to judge instead.
        """
        try:
            version = installed or metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return False
        return SpecifierSet(self.versions).contains(version, prereleases=True)

    def names(self, test: str) -> bool:
        """Whether it is one of these tests."""
        return any(_compiled(pattern).fullmatch(test) for pattern in self.tests)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", ".*"))


KNOWN_FAILURES = (
    KnownFailure(
        "torch",
        "<2.9",
        ("tests/gate/test_records.py::*[all_to_all]", "tests/gate/test_records.py::*[all_to_all-*]"),
        "Gloo of torch 2.8 has no all-to-all of lists (`Backend gloo does not support alltoall`).",
    ),
    KnownFailure(
        "torch",
        "<2.9",
        ("tests/gate/test_dispatcher.py::test_a_collective_of_fake_tensors_is_not_recorded",),
        "torch 2.8 has no all-reduce of fake tensors (`UnsupportedOperatorException: c10d.allreduce_.default`).",
    ),
    KnownFailure(
        "torch",
        "<2.9",
        (
            "tests/instruments/test_other_profilers.py::test_an_unseen_preparation_is_repeated[2-3]",
            "tests/instruments/test_other_profilers.py::test_an_unseen_preparation_is_repeated[2-7]",
        ),
        "In torch 2.8 no profiler can be prepared while another one is (`Can't disable Kineto profiler when it's not "
        "running`).",
    ),
    KnownFailure(
        "torch",
        "<2.9",
        (
            "tests/monitor/test_window.py::test_a_profiler_that_raises_loses_only_kernel_times_and_leaves_room_for_the_next"
            "[_enable_profiler-could not start]",
            "tests/monitor/test_window.py::test_after_a_failed_start_no_profiler_counts_as_running",
        ),
        "After a profiler that could not start, torch 2.8 starts no other one in the process (`Can't disable Kineto "
        "profiler when it's not running`).",
        spoils=True,
    ),
    KnownFailure(
        "torch",
        "<2.9",
        (
            "tests/experiments/bench/test_bench_command.py::test_the_loopback_link_in_its_cpu_form_says_what_it_is",
            "tests/experiments/bench/test_caps.py::TestWithADriver::test_each_point_runs_under_its_cap_and_one_that_is_"
            "refused_is_a_note",
            "tests/experiments/bench/test_gemm_bench.py::test_a_known_slowdown_is_reported_on_the_loopback_link",
            "tests/experiments/bench/test_plans.py::test_a_launchers_ranks_count",
            "tests/experiments/bench/test_plans.py::test_what_cannot_be_is_refused_in_a_sentence[*--link loopback*]",
        ),
        "The loopback link needs torch 2.9, and says so.",
    ),
    KnownFailure(
        "torch",
        "<2.9",
        ("tests/monitor/test_experts_in_a_job.py::test_even_lists_of_tensors_are_no_splits",),
        "Gloo of torch 2.8 has no all-to-all of lists (`Backend gloo does not support alltoall`).",
    ),
    KnownFailure(
        "transformers",
        "<5",
        tuple(
            f"tests/integrations/test_transformers.py::{test}"
            for test in (
                "test_the_trainers_weights_are_bit_identical_absent_attached_toggling_and_forced[1]",
                "test_the_trainers_weights_are_bit_identical_absent_attached_toggling_and_forced[2]",
                "test_a_step_in_which_an_iterable_data_set_ends_goes_on_in_the_next_epoch_and_does_not_count",
                "test_evaluation_logging_and_checkpoints_between_steps_leave_a_window_whole",
                "test_a_second_callback_on_one_trainer_is_switched_off_with_one_warning",
            )
        ),
        "DDP broadcasts other buffers of the models. Weights are equal.",
    ),
    KnownFailure(
        "transformers",
        "<5",
        ("tests/integrations/test_transformers.py::test_a_resumed_training_goes_on_counting_where_it_was",),
        "The Trainer does not load its own checkpoint on a CPU with torch 2.8 (`don't know how to "
        "restore data location of torch.storage.UntypedStorage (tagged with cpu:0)`).",
    ),
    KnownFailure(
        "transformers",
        "<5",
        (
            "tests/integrations/test_huggingface_sharded.py::test_a_sharded_trainers_weights_are_bit_identical_absent_"
            "attached_toggling_and_forced[fsdp2-1]",
            "tests/integrations/test_huggingface_sharded.py::test_a_sharded_trainers_weights_are_bit_identical_absent_"
            "attached_toggling_and_forced[fsdp2-2]",
        ),
        "The Trainer takes FSDP1 for `fsdp=True`, which does not start on a CPU ("
        "`There are currently no available devices found`).",
    ),
    KnownFailure(
        "deepspeed",
        "<0.18.3",
        tuple(
            f"tests/integrations/test_deepspeed.py::test_the_collectives_recorded_are_those_worked_out_by_hand[{job}]"
            for job in (
                "zero0",
                "zero0 accumulating",
                "zero0 for many steps",
                "zero1 bf16",
                "zero2 bf16",
                "zero3 accumulating",
                "pipeline",
                "pipeline for many steps",
            )
        ),
        "Other messages than the newest: no sum of the gradients' norm without ZeRO and in pipelines, no question for "
        "overflows from ZeRO-1 and 2 in bf16.",
    ),
    KnownFailure(
        "deepspeed",
        "<0.18.3",
        (
            *(
                "tests/integrations/test_deepspeed.py::test_weights_are_bit_identical_absent_toggling_every_step_and_"
                f"forced[{job}]"
                for job in ("zero3", "zero3 accumulating", "zero3 bf16")
            ),
            "tests/integrations/test_huggingface_sharded.py::test_a_sharded_trainers_weights_are_bit_identical_absent_"
            "attached_toggling_and_forced[zero3-1]",
        ),
        "ZeRO-3 changes its messages in the third step too: a forced job has two overlapped steps. Weights are equal.",
    ),
    KnownFailure(
        "deepspeed",
        "<0.18.3",
        ("tests/integrations/test_deepspeed.py::test_steps_have_deepspeeds_numbers_and_bounds",),
        "ZeRO-3 sends other messages in a step after the recorded one: a sequential step is left out, with a note.",
    ),
    KnownFailure(
        "deepspeed",
        "<0.18.3",
        tuple(
            f"tests/integrations/test_predicted_messages.py::test_sharded_jobs_send_what_is_predicted[{job} {model}]"
            for job in ("zero2 in 16 bit", "zero3")
            for model in ("gpt", "llama")
        ),
        "`overlap predict` counts the messages of newer versions.",
    ),
    KnownFailure(
        "transformers",
        "<5",
        tuple(
            f"tests/integrations/test_predicted_messages.py::test_sharded_jobs_send_what_is_predicted[ddp {model}]"
            for model in ("gpt", "llama")
        ),
        "DDP broadcasts other buffers of the models. Weights are equal.",
    ),
    KnownFailure(
        "wandb",
        "<0.24",
        (
            "tests/sinks/wandb/test_down.py::test_training_never_waits_and_no_window_is_missing_from_the_record[hang]",
            "tests/sinks/wandb/test_down.py::test_training_never_waits_and_no_window_is_missing_from_the_record[error]",
            "tests/sinks/wandb/test_down.py::test_training_never_waits_and_no_window_is_missing_from_the_record[refuse]",
            "tests/sinks/wandb/test_down.py::test_a_run_that_the_server_does_not_begin_is_offline_and_the_process_ends[hang]",
            "tests/sinks/wandb/test_down.py::test_a_run_that_the_server_does_not_begin_is_offline_and_the_process_ends[error]",
        ),
        "With a server that does not answer, W&B waits at the interpreter's end, and begins no offline run. Steps are "
        "no slower, and the record is whole.",
    ),
    KnownFailure(
        "wandb",
        "<0.24",
        ("tests/sinks/wandb/test_down.py::test_a_users_run_whose_server_goes_down_later",),
        "The test's run has a newer setting (`finish_timeout`).",
    ),
    KnownFailure(
        "wandb",
        "<0.24",
        (
            "tests/sinks/wandb/test_online.py::test_all_of_a_run_arrives",
            "tests/sinks/wandb/test_online.py::test_the_record_arrives_as_it_is_on_disk",
            "tests/sinks/wandb/test_online.py::test_a_users_run_gets_the_record_and_goes_on",
            "tests/sinks/wandb/test_workspace.py::test_it_is_saved_in_the_project_once_with_all_its_sections",
        ),
        "The tests' own server answers what W&B 0.31 asks.",
    ),
    KnownFailure(
        "wandb",
        "<0.24",
        ("tests/sinks/wandb/test_content.py::test_verdicts_are_text_in_the_summary",),
        "The test reads the summary through a newer command.",
    ),
)


def known_failure(test: str) -> KnownFailure | None:
    """The reason why this test fails with the installed versions; None if it should pass."""
    return next((known for known in KNOWN_FAILURES if known.names(test) and known.applies()), None)
