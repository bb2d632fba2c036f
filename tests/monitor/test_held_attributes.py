from __future__ import annotations

from types import SimpleNamespace

from overlap_callbacks.monitor.race.repeatable import HeldAttributes


def test_values_and_what_containers_held_come_back_in_the_same_containers() -> None:
    inner, thing = [1, 2], object()
    holder = SimpleNamespace(count=1, name="a", gone=None, by_key={"a": inner, "b": thing}, thing=thing)
    by_key, held = holder.by_key, HeldAttributes([(holder, True)])
    holder.count, holder.name, holder.new = 2, "b", 3
    del holder.gone
    inner.append(3)
    by_key.clear()
    holder.by_key = {"other": 1}
    held.put_back()
    assert vars(holder) == {"count": 1, "name": "a", "gone": None, "by_key": {"a": [1, 2], "b": thing}, "thing": thing}
    assert holder.by_key is by_key
    assert by_key["a"] is inner


def test_containers_that_are_the_users_are_left_alone() -> None:
    holder = SimpleNamespace(count=1, hooks=["one"])
    held = HeldAttributes([(holder, False)])
    holder.count = 2
    holder.hooks.append("two")
    holder.more = {}
    held.put_back()
    assert vars(holder) == {"count": 1, "hooks": ["one", "two"], "more": {}}
