"""``dev.py``: the environments of other versions, and the tests that run in them. Nothing is installed here."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def dev(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script in a checkout of its own. In place of environments it makes folders."""
    spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for file in ("pyproject.toml", "constraints.txt", "constraints-oldest.txt", "constraints-hashed.txt"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module.venv, "create", make_folder)
    return module


def make_folder(folder: Path, with_pip: bool) -> None:
    assert with_pip
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()


def commands(dev: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[list[str]]:
    """What the script would run."""
    found: list[list[str]] = []
    monkeypatch.setattr(dev, "run", lambda *command: found.append([str(part) for part in command]) or 0)
    monkeypatch.setattr(sys, "argv", ["dev.py", *arguments])
    assert dev.main() == 0
    return found


@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_other_versions_have_an_environment_of_their_own(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, versions: str
) -> None:
    *installing, testing = commands(dev, monkeypatch, "test", "--versions", versions, "-x")
    environment = str(tmp_path / f".venv-{versions}" / "bin" / "python")
    assert {command[0] for command in (*installing, testing)} == {environment}
    assert [command[-1] for command in installing] == ["torch", f"{tmp_path}[test]"]
    for command in installing:
        if versions == "oldest":
            assert command[command.index("-c") + 1] == str(tmp_path / "constraints-oldest.txt")
        else:
            assert "-c" not in command
            assert command[command.index("--upgrade-strategy") + 1] == "eager"
    # All rooms but those whose tests hold for one set of versions only.
    left_out = {"--ignore=tests/docs", "--ignore=tests/gpu", "--ignore=tests/report/html"}
    assert testing[1:] == ["-m", "pytest", "tests", *sorted(left_out), "-x"]


def test_the_tests_that_are_named_run_alone_with_other_versions(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = commands(dev, monkeypatch, "test", "--versions", "oldest", "tests/gate", "-x")
    assert found[-1][1:] == ["-m", "pytest", "tests/gate", "-x"]


def test_what_is_installed_already_is_not_installed_again_until_a_requirement_changes(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ("test", "--versions", "oldest", "tests/gate")
    assert len(commands(dev, monkeypatch, *arguments)) == 3
    assert len(commands(dev, monkeypatch, *arguments)) == 1
    with (tmp_path / "constraints-oldest.txt").open("a") as file:
        file.write("numpy==1.26.1\n")
    assert len(commands(dev, monkeypatch, *arguments)) == 3
    assert len(commands(dev, monkeypatch, "test", "tests/gate")) == 3  # the tested versions are elsewhere


def test_the_simulated_gpu_has_an_environment_without_nvidias_packages(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dev.shutil, "which", lambda _: "g++")
    monkeypatch.setattr(dev.os, "environ", {})
    (tmp_path / "constraints-simulated-gpu.txt").write_text("torch===2.13.0\n")
    torch, others, project, building, testing = commands(dev, monkeypatch, "test", "--simulated-gpu", "-x")
    assert {command[0] for command in (torch, testing)} == {str(tmp_path / ".venv-simulated-gpu" / "bin" / "python")}
    # With dependencies pip would fetch CUDA's own libraries, and torch prefers those to the simulated ones.
    assert all("--no-deps" in command for command in (torch, others, project))
    assert all("--require-hashes" in command for command in (torch, others))
    assert building[-2:] == ["-m", "tests.simulated_gpu.build"]
    assert testing[1:] == ["-m", "pytest", *dev.SIMULATED_GPU_TESTS, "-m", "not nightly", "-x"]
    assert dev.os.environ["LD_LIBRARY_PATH"] == str(tmp_path / "build" / "simulated_gpu" / "lib")
    assert len(commands(dev, monkeypatch, "test", "--simulated-gpu", "tests/gate")) == 2
    _, several, alone = commands(dev, monkeypatch, "test", "--simulated-gpu")
    assert several[several.index("--no-loadscope-reorder") + 1 :] == [*dev.SIMULATED_GPU_TESTS]
    assert "alone and not nightly" in alone
    monkeypatch.setattr(dev, "HERE", ROOT)
    assert ROOT / "tests" / "campaign" / "test_quick.py" in dev.files_marked("alone", dev.SIMULATED_GPU_TESTS)


def test_the_simulated_gpu_installs_everything_but_cuda_in_addition_to_torch(dev: ModuleType) -> None:
    kept = dev.without_cuda((ROOT / "constraints-hashed.txt").read_text())
    names = set(re.findall(r"^([a-z][\w.-]*)==", kept, re.M))
    assert {"deepspeed", "lightning", "megatron-core", "numpy", "nvidia-ml-py", "torchmetrics"} <= names
    assert not names & {"torch", "triton", "nvidia-cublas", "cuda-bindings", "nvidia-nccl-cu13"}
    assert kept.count("--hash") >= len(names)


def test_where_the_cuda_build_cannot_be_had_an_exit_code_of_its_own_says_so(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev.shutil, "which", lambda _: "g++")
    (tmp_path / "constraints-simulated-gpu.txt").write_text("torch===2.13.0\n")
    monkeypatch.setattr(dev, "make_environment", lambda folder: folder.mkdir(exist_ok=True) or folder)

    def ends_where(fails: str) -> tuple[object, str]:
        monkeypatch.setattr(dev, "run", lambda *command: int(any(fails in str(part) for part in command)))
        with pytest.raises(SystemExit) as ended:
            dev.on_simulated_gpu("test", [])
        return ended.value.code, capsys.readouterr().err

    code, said = ends_where("constraints-simulated-gpu.txt")
    assert code == dev.NOT_INSTALLED
    assert "did not run" in said
    assert ends_where("others.txt") == (1, "")  # that of the project is ours to mend


def test_without_a_compiler_the_tests_on_the_simulated_gpu_do_not_pass_and_the_reason_is_said(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev.shutil, "which", lambda _: None)
    assert dev.on_simulated_gpu("test", []) == dev.NOT_INSTALLED
    assert "no g++" in capsys.readouterr().err


def test_versions_that_there_are_not_are_refused_with_the_two_that_there_are() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "dev.py"), "test", "--versions", "older"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--versions must be oldest or newest, got 'older'" in done.stderr


def test_all_tests_are_run_but_the_nightly_ones_and_those_that_measure_times_by_themselves(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tests" / "gate").mkdir(parents=True)
    for name, text in (("test_timing.py", "pytestmark = pytest.mark.alone\n"), ("test_other.py", "alone = 1\n")):
        (tmp_path / "tests" / "gate" / name).write_text(text)
    *_, several, alone = commands(dev, monkeypatch, "test")
    assert several[several.index("-m", 3) + 1] == "not alone and not nightly"
    assert several[several.index("-n") + 1] == "4"
    assert alone[alone.index("-m", 3) + 1 :] == [
        "alone and not nightly",
        str(tmp_path / "tests" / "gate" / "test_timing.py"),
    ]


def test_what_passed_only_when_repeated_is_listed_at_the_end(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
    cache.parent.mkdir(parents=True)
    first_part = [(1, ["a.py::shaky", "b.py::broken"]), (1, ["b.py::broken"])]
    runs = iter([*first_part, (0, ["b.py::broken"])])

    def pytest_run(*_: object) -> int:
        code, failed = next(runs)
        cache.write_text(json.dumps(dict.fromkeys(failed, True)))
        return code

    monkeypatch.setattr(dev, "run", pytest_run)
    assert dev.run_tests(("pytest",), []) == 1
    assert capsys.readouterr().out.endswith("passed only when repeated:\n  a.py::shaky\n")


def test_a_setting_that_has_every_process_compile_what_it_loads_is_not_passed_on(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert dev.run(sys.executable, "-c", "import sys; sys.exit(sys.dont_write_bytecode)") == 0
