from __future__ import annotations

import pytest

from overlap_callbacks.gate.switches import OverlapSwitch, SwitchState


class TwoFlags(OverlapSwitch):
    """Turns one flag, then another; the second may have been turned by somebody else."""

    def __init__(self) -> None:
        self.flags = {"first": True, "second": True}

    def disable(self) -> None:
        for name, value in self.flags.items():
            if not value:
                raise RuntimeError(f"{name} was switched off by somebody else")
            self.flags[name] = False

    def restore(self) -> None:
        self.flags["first"] = True


def test_a_form_that_fails_half_way_is_put_back_before_any_step_runs_like_this() -> None:
    form = TwoFlags()
    form.flags["second"] = False
    switch = SwitchState()
    switch.adopt(form)
    with pytest.raises(RuntimeError, match="second was switched off"):
        switch.turn(on=True)
    assert form.flags["first"]
    assert not switch.is_sequential


def test_a_form_is_turned_once_each_way() -> None:
    form = TwoFlags()
    switch = SwitchState()
    switch.adopt(form)
    switch.turn(on=True)
    switch.turn(on=True)  # would raise, were it turned again
    assert switch.is_sequential
    assert not form.flags["first"]
    switch.turn(on=False)
    assert form.flags["first"]
    assert not switch.must_wait(communicated=True)
