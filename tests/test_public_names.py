"""Names that are found from the package, each loaded on first use."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import overlap_callbacks
from tests.integrations.test_lines_gone_wrong import needs


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_names_are_listed_and_nothing_is_loaded_for_that() -> None:
    listed = run(
        "import sys, overlap_callbacks\n"
        "print(*dir(overlap_callbacks))\n"
        "assert not {'torch', 'lightning', 'transformers'} & sys.modules.keys()\n"
    ).split()
    assert {"attach", "close", "write_page", "record", "arms", *overlap_callbacks.__all__} <= set(listed)


def test_attach_is_found_from_the_package() -> None:
    from overlap_callbacks.integrations import pytorch
    from overlap_callbacks.monitor import attaching

    assert overlap_callbacks.attach is pytorch.attach
    assert overlap_callbacks.close is attaching.close


@needs("lightning")
@needs("transformers")
def test_callbacks_are_found_from_the_package_and_that_of_the_one_framework_in_use_by_both_names() -> None:
    found = run(
        "import sys, overlap_callbacks\n"
        "assert {'TransformersCallback', 'LightningCallback'} <= {*dir(overlap_callbacks)}\n"
        "assert not {'transformers', 'lightning'} & sys.modules.keys()\n"
        "found = [overlap_callbacks.TransformersCallback.__module__, overlap_callbacks.OverlapCallback.__module__]\n"
        "assert 'lightning' not in sys.modules\n"
        "print(*found, overlap_callbacks.LightningCallback.__module__)\n"  # Lightning loads Transformers too
    )
    expected = ("transformers", "transformers", "lightning")
    assert found.split() == [f"overlap_callbacks.integrations.{name}" for name in expected]


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        ((), "neither Lightning nor Transformers is loaded"),
        (("transformers", "lightning.pytorch"), "Lightning and Transformers are both loaded"),
    ],
)
def test_a_callback_that_may_be_either_is_refused_with_both_names(
    monkeypatch: pytest.MonkeyPatch, loaded: tuple[str, ...], said: str
) -> None:
    for name in ("transformers", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in loaded:
        monkeypatch.setitem(sys.modules, name, Any)  # type: ignore[arg-type]
    with pytest.raises(AttributeError) as raised:
        _ = overlap_callbacks.OverlapCallback
    assert said in str(raised.value)
    assert "overlap_callbacks.LightningCallback or overlap_callbacks.TransformersCallback" in str(raised.value)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'attache'"):
        _ = overlap_callbacks.attache


@pytest.fixture
def none_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No callback has been used yet."""
    for name in ("LightningCallback", "TransformersCallback"):
        monkeypatch.delitem(vars(overlap_callbacks), name, raising=False)


@pytest.mark.usefixtures("none_loaded")
def test_callbacks_are_listed_where_all_that_they_need_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "pytorch_lightning", "transformers", "accelerate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    installed = {"accelerate", "pytorch_lightning"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in installed else None)
    assert "TransformersCallback" not in dir(overlap_callbacks)
    assert "LightningCallback" in dir(overlap_callbacks)


@pytest.mark.usefixtures("none_loaded")
def test_names_are_listed_where_a_package_has_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "pytorch_lightning", "transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # without a spec
    listed = dir(overlap_callbacks)
    assert "attach" in listed
    assert not {"LightningCallback", "TransformersCallback"} & set(listed)
