"""Arms: alternatives that the job's own configuration is compared with, one per window.

An arm is sequential steps, or any switch that can be turned between two steps. It turns a ``Switch``: its own, or one
that the framework's adapter offers under ``needs``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap_callbacks import _validation
from overlap_callbacks.analysis.results.arm import ComparedArm
from overlap_callbacks.gate import tf32
from overlap_callbacks.gate.switches import FunctionSwitch, RefusedError, Switch, expect_taken
from overlap_callbacks.instruments import device

# Adapters' offers: each makes the switch of an arm. Raises ValueError if this job's switch must not be turned.
Offers = Mapping[str, Callable[[Any], Switch]]

_MAX_NAME_LENGTH = 60


class BaseArm:
    """Base of all arms.

    Attributes:
        name: used in metric keys (``arm/<name>_speedup``), so letters, digits and ``_``.
        equal_results: whether losses and weights stay bit-identical.
        sequential: whether its steps are sequential: compute and communication never overlap.
        family: of arms that differ in one number; empty if none.
        setting: that number; None if the arm has none.
        may_be_kept: whether ``decide`` may turn it on between windows; else it is recommended at most.
        needs: what an adapter must offer for it; empty if nothing.
        line: what to write into the job to have it in all steps; empty if only the user knows.
    """

    name = ""
    equal_results = True
    sequential = False
    family = ""
    setting: float | None = None
    may_be_kept = True
    needs = ""
    line = ""

    @property
    def facts(self) -> ComparedArm:
        """What the record says of it."""
        return ComparedArm(self.name, self.equal_results, self.sequential, self.family, self.setting)

    def switch(self, offers: Offers) -> Switch | None:
        """Make this arm's switch, before its first window; None if the gate makes its steps sequential.

        Raises ValueError if this job cannot have the arm; the message says why.
        """
        offer = offers.get(self.needs)
        if offer is None:
            raise ValueError(f"nothing in this job offers it: {_HOW_TO_OFFER[self.needs]}")
        return offer(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__} (arm {self.name!r})"


class Sequential(BaseArm):
    """Sequential steps, by the gate or as ``attach(..., sequential="native")`` asks for. The default arm."""

    name = "sequential"
    sequential = True

    def switch(self, offers: Offers) -> Switch | None:
        return None


class Native(BaseArm):
    """Sequential steps by the framework's own switches. If its figures agree with ``Sequential()``, both are sound."""

    name = "native"
    sequential = True
    needs = "native"


class Arm(BaseArm):
    """A user-defined switch.

    Args:
        name: letters, digits and ``_``.
        on: turns it, between two steps, on every rank. If it raises, measuring ends and ``off`` is called.
        off: turns it back: between two steps, or in a step that has issued no collective yet. It may be called twice.
        equal_results: whether losses and weights stay bit-identical. For the record and tables; nothing checks it.
        family: of several settings of one switch, whose curve the page draws. Named like an arm.
        setting: the arm's number in its family.

    Raises:
        TypeError, ValueError: an argument has the wrong type or value.
    """

    def __init__(
        self,
        name: str,
        on: Callable[[], None],
        off: Callable[[], None],
        *,
        equal_results: bool,
        family: str = "",
        setting: float | None = None,
    ) -> None:
        for option, given in (("name", name), *([("family", family)] if family else ())):
            if not isinstance(given, str) or not re.fullmatch(r"[A-Za-z0-9_]+", given) or len(given) > _MAX_NAME_LENGTH:
                raise ValueError(
                    f"{option} must be 1 to {_MAX_NAME_LENGTH} letters, digits and underscores, got {given!r}"
                )
        if (setting is None) != (not family):
            raise ValueError(f"give family and setting together, got family={family!r} and setting={setting!r}")
        for option, function in (("on", on), ("off", off)):
            if not callable(function):
                raise TypeError(f"{option} must be a function without arguments, got {function!r}")
        self.name = name
        self.equal_results = _validation.flag("equal_results", equal_results)
        self.family = family
        self.setting = None if setting is None else _validation.real("setting", setting)
        self._on, self._off = on, off

    def switch(self, offers: Offers) -> Switch | None:
        return FunctionSwitch(self.name, self._on, self._off, only_between_steps=True)


class SmCarveout(BaseArm):
    """Matrix products leave some SMs free for collectives (torch's experimental carve-out).

    A different grid may add up in a different order, so results may differ in their last bits.

    Args:
        num_sms: SMs that matrix products do not use.
    """

    equal_results = False
    family = "sm_carveout"

    def __init__(self, num_sms: int) -> None:
        self.num_sms = _validation.count("num_sms", num_sms, minimum=1)
        self.setting = self.num_sms
        self.name = f"sm_carveout_{self.num_sms}"
        self.line = f"torch._C._set_sm_carveout_experimental({self.num_sms})"

    def switch(self, offers: Offers) -> Switch | None:
        _expect_cuda(self.name)
        if not hasattr(torch._C, "_set_sm_carveout_experimental"):
            raise ValueError(f"torch {torch.__version__} has no carve-out of SMs")
        num_sms = device.properties(torch.device("cuda")).multi_processor_count
        if self.num_sms >= num_sms:
            raise ValueError(f"num_sms must leave some of the device's {num_sms} SMs to compute, got {self.num_sms}")
        before: list[int | None] = []

        def on() -> None:
            before[:] = [torch._C._get_sm_carveout_experimental()]
            torch._C._set_sm_carveout_experimental(self.num_sms)
            expect_taken("the carve-out of SMs", torch._C._get_sm_carveout_experimental() == self.num_sms)

        def off() -> None:
            while before:
                torch._C._set_sm_carveout_experimental(before.pop())

        return FunctionSwitch("_set_sm_carveout_experimental", on, off, only_between_steps=False)


class PowerCap(BaseArm):
    """Each rank's GPU has a lower or higher power limit. Needs the right to set it, which is root's.

    For energy against time: ``decide`` never keeps it. A process beside each rank restores the limit, even if the rank
    is killed. The limit holds for everything that runs on the GPU.

    Args:
        power_w: the limit, in watts.
    """

    family = "power_cap"
    may_be_kept = False

    def __init__(self, power_w: float) -> None:
        self.power_w = self.setting = _validation.positive("power_w", power_w)
        self.name = f"power_cap_{self.power_w:g}".replace(".", "_").replace("+", "")
        amd = f"amd-smi set --gpu all --power-cap {self.power_w:.0f}"  # which takes whole watts only
        self.line = amd if torch.version.hip else f"nvidia-smi -pl {self.power_w:g}"

    def switch(self, offers: Offers) -> Switch | None:
        _expect_cuda(self.name)
        from overlap_callbacks.instruments.caps.own_device import device_for
        from overlap_callbacks.instruments.caps.settings import CapError, Caps

        caps = Caps(power_w=self.power_w)
        own = device_for(caps)

        def change(by: Callable[[], None]) -> None:
            try:
                by()
            except CapError as error:
                raise RefusedError(f"the power limit: {error} [OC144]") from error

        return FunctionSwitch(
            self.name, lambda: change(lambda: own.cap(caps)), lambda: change(own.restore), only_between_steps=False
        )


class AllowTF32(BaseArm):
    """32-bit matrix products and convolutions may run in TF32. Results differ.

    Args:
        allowed: False to forbid it, in a job that allows it.
    """

    equal_results = False

    def __init__(self, allowed: bool = True) -> None:
        self.allowed = _validation.flag("allowed", allowed)
        self.name = "allow_tf32" if allowed else "no_tf32"
        self.line = tf32.line(allowed)

    def switch(self, offers: Offers) -> Switch | None:
        _expect_cuda(self.name)
        return tf32.TF32Switch(self.allowed)


class Prefetch(BaseArm):
    """FSDP2 gathers the parameters of some modules in advance. Needs ``attach(optimizer, model=model)``.

    Args:
        forward: number of modules ahead in the forward pass; 0 for FSDP2's default.
        backward: the same in the backward pass.

    Raises:
        TypeError, ValueError: a count is not a whole number of 0 or more.
    """

    needs = "fsdp2_prefetch"

    def __init__(self, forward: int = 1, backward: int = 1) -> None:
        self.forward = _validation.count("forward", forward, minimum=0)
        self.backward = _validation.count("backward", backward, minimum=0)
        self.name = f"prefetch_{self.forward}_{self.backward}"
        if self.forward == self.backward:
            self.family, self.setting = "prefetch", self.forward
        elif not (self.forward and self.backward):
            self.family = "prefetch_forward" if self.forward else "prefetch_backward"
            self.setting = self.forward or self.backward
        calls = (
            f"layer.set_modules_to_forward_prefetch(layers[i + 1 : i + {self.forward + 1}])" if self.forward else "",
            f"layer.set_modules_to_backward_prefetch(layers[max(0, i - {self.backward}) : i][::-1])"
            if self.backward
            else "",
        )
        self.line = f"for i, layer in enumerate(layers): {'; '.join(filter(None, calls))}" if any(calls) else ""


class Reshard(BaseArm):
    """FSDP2 frees the gathered parameters after the forward pass, or keeps them. Needs ``attach(..., model=model)``.

    Kept parameters are not gathered again in the backward pass, but take memory until then.

    Args:
        after_forward: whether they are freed.
    """

    needs = "fsdp2_reshard"

    def __init__(self, after_forward: bool) -> None:
        self.after_forward = _validation.flag("after_forward", after_forward)
        self.name = "reshard" if after_forward else "no_reshard"
        self.line = f"fully_shard(module, reshard_after_forward={self.after_forward})"


class SharedReduceScatter(BaseArm):
    """FSDP2 reduces gradients in the all-gather's group. Needs ``attach(..., model=model)``.

    For a job that has called ``set_separate_reduce_scatter_group()`` (torch 2.13): does the separate group pay?
    """

    name = "shared_reduce_scatter"
    needs = "fsdp2_shared_reduce_scatter"
    line = "model.set_separate_reduce_scatter_group(False)"


class _ZeroLimit(BaseArm):
    """A limit of ZeRO-3's fetching. ``key`` is its name in DeepSpeed's configuration."""

    needs = "zero3_limit"
    key = ""

    def __init__(self, elements: int) -> None:
        self.elements = self.setting = _validation.count("elements", elements, minimum=0)
        self.name = f"{self.family}_{self.elements}"
        self.line = f'"{self.key}": {self.elements}'


class ZeroPrefetchBucket(_ZeroLimit):
    """ZeRO-3 prefetches parameters (``stage3_prefetch_bucket_size``). Needs the DeepSpeed adapter.

    Args:
        elements: maximum number of parameters to prefetch; 0 for none.
    """

    family = "zero_prefetch_bucket"
    key = "stage3_prefetch_bucket_size"


class ZeroLiveParameters(_ZeroLimit):
    """ZeRO-3 prefetches only until so many parameters are gathered (``stage3_max_live_parameters``).

    Needs the DeepSpeed adapter.

    Args:
        elements: maximum number of parameters that are gathered at a time, those in use excepted.
    """

    family = "zero_live_parameters"
    key = "stage3_max_live_parameters"


def checked_arms(arms: Sequence[BaseArm] | None) -> tuple[BaseArm, ...]:
    """The arms of a monitor; None for the default, ``Sequential()`` alone.

    Raises TypeError if it is not a list of arms, ValueError if there is none, or two have the same name.
    """
    if arms is None:
        return (Sequential(),)
    if not isinstance(arms, (list, tuple)):
        raise TypeError(f"arms must be a list of arms, such as [Sequential()], got {arms!r} (a {type(arms).__name__})")
    for arm in arms:
        if not isinstance(arm, BaseArm):
            raise TypeError(f"arms must be a list of arms, got {arm!r} (a {type(arm).__name__}) in it")
    if not arms:
        raise ValueError("arms is empty: give at least one, such as Sequential()")
    names = [arm.name for arm in arms]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"arms has {', '.join(twice)} more than once: each name may occur once")
    return tuple(arms)


# -- deciding


@dataclass(frozen=True, kw_only=True)
class Keep:
    """For ``decide``: find the best arm in the live job, and keep it turned on between windows while it wins.

    Attributes:
        budget: maximum fraction of training time that the search and a kept arm may cost, but for the dearest window.
        wrong: maximum probability of a wrong verdict on any arm.

    Raises:
        TypeError, ValueError: a value is not a fraction, or ``wrong`` is above 0.5.
    """

    budget: float = 0.005
    wrong: float = 0.05

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _validation.fraction("budget", self.budget))
        object.__setattr__(self, "wrong", _validation.fraction("wrong", self.wrong))
        if self.wrong > _MOST_WRONG:
            raise ValueError(f"wrong must be at most {_MOST_WRONG:g}, got {self.wrong!r}")


RECOMMEND = "recommend"
_MOST_WRONG = 0.5


def checked_decide(decide: Any, arms: Sequence[BaseArm], max_overhead: float | None) -> Keep | str | None:
    """The option ``decide``. Raises TypeError or ValueError if it is wrong, or does not fit the other two."""
    if decide is None:
        return None
    if not isinstance(decide, Keep) and decide != RECOMMEND:
        what = ValueError if isinstance(decide, str) else TypeError
        raise what(f"decide must be {RECOMMEND!r}, Keep(...) or None, got {decide!r} (a {type(decide).__name__})")
    if all(arm.sequential for arm in arms):
        raise ValueError("decide has nothing to decide: give arms=[...] one that is not sequential steps")
    if isinstance(decide, Keep) and max_overhead is not None and decide.budget > max_overhead:
        raise ValueError(
            f"decide: budget={decide.budget:g} is above max_overhead={max_overhead:g}, which holds for all together: "
            "give a smaller budget or a larger max_overhead"
        )
    return decide if isinstance(decide, Keep) else RECOMMEND


def _expect_cuda(name: str) -> None:
    if not device.has_cuda():
        raise ValueError(f"{name} changes nothing without a CUDA device")


_HOW_TO_OFFER = {
    "native": "attach the adapter of your framework; for DDP and FSDP, attach(optimizer, model=model)",
    "fsdp2_prefetch": "attach(optimizer, model=model) with a model that fully_shard has sharded",
    "fsdp2_reshard": "attach(optimizer, model=model) with a model that fully_shard has sharded",
    "fsdp2_shared_reduce_scatter": "attach(optimizer, model=model) with a model that fully_shard has sharded",
    "zero3_limit": "attach to a DeepSpeed engine of ZeRO stage 3",
}
