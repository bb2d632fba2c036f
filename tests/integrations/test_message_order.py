"""Which orders of messages finish if each is waited for."""

from __future__ import annotations

from overlap_callbacks.integrations._pytorch_pipelining import all_finish


def test_messages_that_can_complete_one_after_the_other_are_distinguished_from_those_that_cannot() -> None:
    there, back = ("forward", 1, 0), ("backward", 0, 0)
    assert all_finish([[there, back], [there, back]])
    assert not all_finish([[there, back], [back, there]])
    assert not all_finish([[there], []])
    # Three ranks in a ring, each of which sends before it receives.
    assert not all_finish([["a", "c"], ["b", "a"], ["c", "b"]])  # type: ignore[list-item]
