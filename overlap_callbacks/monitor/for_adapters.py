"""What a monitor offers to adapters, beside what users call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from overlap_callbacks.gate.arms import Offers
from overlap_callbacks.gate.switch import OverlapSwitch, Switch
from overlap_callbacks.instruments.device import Stream
from overlap_callbacks.monitor.config import MonitorConfig, as_settings
from overlap_callbacks.monitor.driver import StepDriver
from overlap_callbacks.monitor.race.repeatable import RepeatableStep
from overlap_callbacks.sinks import Sink

T = TypeVar("T")


class ForAdapters:
    """The part of ``OverlapMonitor`` that adapters call, and what they ask of the open step."""

    _driver: StepDriver
    config: MonitorConfig

    @property
    def arm(self) -> str | None:
        """Name of the switch that is turned in the open step; None if none is. ``mode`` tells what the gate does."""
        state = self._driver.switch
        return state.form.name if self._driver.open and state.is_turned and state.form is not None else None

    @property
    def in_step(self) -> bool:
        """Whether a step is open: begun, and not ended."""
        return self._driver.open

    @property
    def in_window(self) -> bool:
        """Whether a window is open."""
        return self._driver.runner.in_window

    def name_groups(self, dimensions: Mapping[str, str]) -> None:
        """Say which dimension of parallelism process groups serve, by ``group.group_name``; for the report.

        DeviceMesh and Megatron-core describe their groups, so only others need it.
        """
        self._driver.gate.dimensions.update(dimensions)

    def name_computing_streams(self, streams: Iterable[Stream]) -> None:
        """Name streams that compute and issue no collective, which sequential steps order with the others."""
        self._driver.gate.side_streams.extend(streams)

    def tell_configuration(self, facts: Mapping[str, object]) -> None:
        """Say what is known of the job's configuration, for the record: model, buckets. Before the first window.

        Args:
            facts: by name. What is no number, text, True or False is told as text; what is too long is cut.
        """
        self.config.configuration.update(as_settings(facts))

    def tell_model_chunks(self, number: int) -> None:
        """Say how many model chunks of an interleaved pipeline this rank has; messages alone do not always tell it."""
        self._driver.window_runner.model_chunks = number

    def tell_micro_batch(self) -> None:
        """Say that the open step trains on one more micro-batch. Steps with more or fewer are of other kinds."""
        self._driver.gate.micro_batches += 1

    def expect_nested_collectives(self) -> None:
        """Say that operators issue collectives themselves, as those on DTensors do. Call it before the first window.

        The gate then stands where it sees them too, which costs some microseconds a collective between windows.
        """
        self._driver.gate.nested = True

    def use_native(self, form: OverlapSwitch) -> None:
        """Run sequential steps by a framework's own switches instead of the gate. Call it before the first step.

        The order check is made all the same, and the collectives are recorded, but not serialised.
        """
        if not isinstance(form, OverlapSwitch):
            raise TypeError(f"form must be an OverlapSwitch, got {form!r} (a {type(form).__name__})")
        self._driver.switch.adopt(form)

    def offer_switches(self, offers: Offers) -> None:
        """Offer what arms need of the framework, by ``BaseArm.needs``. Call it before the first step.

        Args:
            offers: make the switch of an arm when its first window comes. They raise ValueError where this job's must
                not be turned.
        """
        self._driver.switch.offers.update(offers)

    def offer_repetition(self, step: RepeatableStep) -> None:
        """Offer a step that can be repeated, for ``check_gradients``. Call it before the first window."""
        self._driver.slot.race.step = step

    @property
    def is_repeating(self) -> bool:
        """Whether a step is repeated just now, which is no step of training."""
        return self._driver.slot.race.running

    def is_turned(self, switch: Switch) -> bool:
        """Whether the open step runs with this switch turned."""
        state = self._driver.switch
        return state.form is switch and state.is_turned

    def post(self, issue: Callable[[], T], works_of: Callable[[T], Sequence[Any]]) -> tuple[T, list[Any]]:
        """Issue a batch of sends and receives, and wait for them in sequential steps; see ``Gate.post``."""
        return self._driver.gate.post(issue, works_of)

    def call_on_close(self, action: Callable[[], None]) -> None:
        """Have ``close()`` call ``action``, once: an adapter takes off its hooks."""
        self._driver.on_close.append(action)

    def sink_failed(self, sink: Sink, error: Exception) -> None:
        """Say that a sink failed and is not used again; raised at the next step if strict."""
        self._driver.faults.sink_failed(sink, error)
