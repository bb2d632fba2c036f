"""What the files say of versions: bounds, constraints, hashes, and tests that are known to fail."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from overlap_callbacks.integrations.base import KNOWN_TO_WORK
from tests.known_failures import KNOWN_FAILURES

ROOT = Path(__file__).parent.parent
ADAPTERS = {
    "pytorch": ("torch",),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed",),
    "megatron": ("megatron-core",),
    "huggingface": ("transformers", "accelerate"),
}


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_versions", ROOT / "docs" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bounds() -> dict[str, Requirement]:
    """What pyproject.toml asks for, by name; those of the docs, of development and of other loops left out."""
    text = (ROOT / "pyproject.toml").read_text()
    text = text[text.index("dependencies = [") : text.index("[project.scripts]")]
    text = re.sub(r"^(docs|loops|dev|test) = .*$", "", text, flags=re.MULTILINE)
    found = [Requirement(line) for line in re.findall(r'"([a-z-]+>=[^";]+)', text)]
    return {requirement.name: requirement for requirement in found}


def test_the_page_shows_the_versions_and_failures_of_today(page: ModuleType) -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    assert page.with_tables(text) == text, "docs/versions.md is out of date: run python3 docs/versions.py"


def test_the_oldest_set_has_each_lower_bound(page: ModuleType) -> None:
    oldest = page.versions("constraints-oldest.txt")
    asked = bounds()
    assert {"torch", "lightning", "amdsmi"} <= set(asked)
    for name, requirement in asked.items():
        (bound,) = requirement.specifier
        release = bound.version
        assert oldest[name] == release or oldest[name].startswith(f"{release}."), name


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapters_page_and_messages_have_the_oldest_and_the_tested_version(page: ModuleType, adapter: str) -> None:
    text = (ROOT / "docs" / "frameworks" / f"{adapter}.md").read_text()
    for package in ADAPTERS[adapter]:
        for file in ("constraints-oldest.txt", "constraints.txt"):
            version = page.versions(file)[package]
            assert version in text, package
            assert version in KNOWN_TO_WORK[package]


def entries(file: str) -> dict[tuple[str, str], list[str]]:
    """(package, version) of a file of constraints, with the options after each."""
    found: dict[tuple[str, str], list[str]] = {}
    options: list[str] = []
    for line in (ROOT / file).read_text().splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)", line):
            options = found.setdefault((re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]), [])
        elif not line.startswith("#"):
            options.append(line.strip(" \\"))
    return found


def test_with_hashes_the_tested_versions_are_the_same() -> None:
    hashed = entries("constraints-hashed.txt")
    assert set(entries("constraints.txt")) <= set(hashed)
    for package, options in hashed.items():
        assert options, package
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", option) for option in options), package


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt", "constraints-hashed.txt"])
def test_constraints_name_no_index(file: str) -> None:
    text = (ROOT / file).read_text()
    assert "://" not in text
    assert "index-url" not in text


def test_known_failures_are_tests_that_there_are() -> None:
    for known in KNOWN_FAILURES:
        for test in known.tests:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text()
            name = function.partition("[")[0].rpartition("::")[2]  # without its class
            assert name == "*" or f"def {name}(" in text, test


def test_a_failure_is_known_with_the_versions_that_it_names_only() -> None:
    (known, *_) = KNOWN_FAILURES
    assert known.applies("2.8.0+cu128")
    assert not known.applies("2.9.0")
    assert known.names("tests/gate/test_records.py::test_x[all_to_all-watched]")
    assert not known.names("tests/gate/test_records.py::test_x[all_to_all_single-watched]")
