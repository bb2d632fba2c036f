#!/usr/bin/env python3
"""Set-up and everyday commands, with nothing but Python: ``python3 dev.py demo``, ``python3 dev.py test``.

Each makes (or reuses) the virtual environment ``.venv`` beside this file and installs the tested versions of
``constraints.txt`` into it, so that it works beside any other installation. ``python3 dev.py test --versions oldest``
(or ``newest``) has an environment of its own, ``.venv-oldest``, with the versions of ``constraints-oldest.txt`` (or the
newest that pip finds, looked up once a day), and runs the tests that depend on them. ``python3 dev.py test
--simulated-gpu`` has one too, with the CUDA build of torch, and runs ``tests/simulated_gpu`` and ``tests/gpu`` on a
simulated device.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENV = HERE / ".venv"
EXTRAS = {"demo": "lightning,wandb,report", "test": "test", "check": "dev", "docs": "docs", "campaign": "test"}
# Exit code where the CUDA build of torch cannot be had, as without a network.
NOT_INSTALLED = 3
USAGE = """usage: python3 dev.py demo|test|check|docs|campaign [arguments passed on]
 to `overlap demo`, pytest, nothing, `mkdocs build`, or the faults put into running jobs (`campaign --help`)
       python3 dev.py test --versions oldest|newest [arguments passed on to pytest]
       python3 dev.py test|campaign --simulated-gpu [arguments passed on]"""
# What holds for one set of versions only: the style of the docs and of the code, pages in a browser.
SIMULATED_GPU_TESTS = ("tests/simulated_gpu", "tests/gpu", "tests/campaign/test_quick.py")
VERSION_TESTS = ("tests", "--ignore=tests/docs", "--ignore=tests/gpu", "--ignore=tests/report/html")


def main() -> int:
    """Set up, then run one command."""
    if len(sys.argv) < 2 or sys.argv[1] not in EXTRAS:
        print(USAGE, file=sys.stderr)
        return 2
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        print(f"Python 3.11 to 3.13 is needed, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    command, arguments, versions = sys.argv[1], sys.argv[2:], "tested"
    if command in ("test", "campaign") and arguments[:1] == ["--simulated-gpu"]:
        return on_simulated_gpu(command, arguments[1:])
    if command == "test" and arguments[:1] == ["--versions"]:
        versions = "".join(arguments[1:2])
        if versions not in ("oldest", "newest"):
            print(f"--versions must be oldest or newest, got {versions!r}\n{USAGE}", file=sys.stderr)
            return 2
        # Options alone, such as -x, go with the tests chosen here.
        arguments = arguments[2:]
        if all(argument.startswith("-") for argument in arguments):
            arguments = [*VERSION_TESTS, *arguments]
    if command == "demo":
        print("the demo takes two to four minutes, the first time mostly to install torch", flush=True)
    bin_folder = set_up(EXTRAS[command], versions)
    if command == "demo":
        return run(bin_folder / "overlap", "demo", *arguments)
    if command == "test":
        return run_tests((bin_folder / "python", "-m", "pytest"), arguments)
    if command == "docs":
        return run(bin_folder / "python", "-m", "mkdocs", "build", "--strict", *arguments)  # into site/
    if command == "campaign":
        return run(bin_folder / "python", "-m", "tests.campaign", *arguments)
    return max(
        run(bin_folder / "ruff", "check", "."),
        run(bin_folder / "ruff", "format", "--check", "."),
        run(bin_folder / "mypy"),
    )


def on_simulated_gpu(command: str, arguments: list[str]) -> int:
    """Build the simulated GPU and run tests on it, by default those of CUDA that are not nightly, or the campaign."""
    if shutil.which("g++") is None:
        print("no g++ on this machine, and the simulated GPU is built with it: its tests did not run", file=sys.stderr)
        return NOT_INSTALLED
    python = set_up_simulated_gpu() / "python"
    if code := run(python, "-m", "tests.simulated_gpu.build"):
        return code
    # Without these libraries this torch cannot even be imported. Only what runs below this process gets them.
    os.environ["LD_LIBRARY_PATH"] = str(HERE / "build" / "simulated_gpu" / "lib")
    if command == "campaign":
        return run(python, "-m", "tests.campaign", *arguments)
    if arguments and all(argument.startswith("-") for argument in arguments):
        arguments = [*SIMULATED_GPU_TESTS, "-m", "not nightly", *arguments]
    # A rank here computes on a device of its own: two files at a time keep two cores busy.
    return run_tests((python, "-m", "pytest"), arguments, SIMULATED_GPU_TESTS, processes=2)


def set_up_simulated_gpu() -> Path:
    """The folder of programs of ``.venv-simulated-gpu``: the CUDA build of torch without any of NVIDIA's packages."""
    folder, torch = VENV.with_name(".venv-simulated-gpu"), HERE / "constraints-simulated-gpu.txt"
    bin_folder = make_environment(folder)
    stamp = folder / "installed"
    inputs = ("pyproject.toml", "constraints-hashed.txt", torch.name)
    wanted = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in inputs) + str(HERE).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        print("installing the CUDA build of torch (527 MB) and the versions of constraints.txt", flush=True)
        others = folder / "others.txt"
        others.write_text(without_cuda((HERE / "constraints-hashed.txt").read_text()))
        # With dependencies pip would fetch CUDA itself, for torch.
        pip = (bin_folder / "python", "-m", "pip", "install", "--quiet", "--no-deps")
        for what in (("--require-hashes", "-r", torch), ("--require-hashes", "-r", others), ("-e", HERE)):
            if code := run(*pip, *what):
                if torch in what:
                    print("the CUDA build of torch cannot be had here: its tests did not run", file=sys.stderr)
                    code = NOT_INSTALLED
                sys.exit(code)
        stamp.write_text(wanted)
    return bin_folder


def without_cuda(requirements: str) -> str:
    """The requirements but torch and what it needs of CUDA."""
    packages = re.split(r"\n(?=\S)", requirements)
    return "\n".join([one for one in packages if not re.match(r"(torch|triton)==|cuda-|nvidia-(?!ml-py)", one)]) + "\n"


def make_environment(folder: Path) -> Path:
    """Make a virtual environment unless it is there; its folder of programs."""
    if not (folder / "bin" / "python").exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True)
    return folder / "bin"


def set_up(extras: str, versions: str = "tested") -> Path:
    """The virtual environment's folder of programs, with the project and ``extras`` installed.

    Args:
        extras: of ``pyproject.toml``, separated by commas.
        versions: ``tested`` (``constraints.txt``), ``oldest`` (``constraints-oldest.txt``) or ``newest``.
    """
    folder = VENV if versions == "tested" else HERE / f".venv-{versions}"
    constraints = {"tested": "constraints.txt", "oldest": "constraints-oldest.txt", "newest": None}[versions]
    bin_folder = make_environment(folder)
    # Installed before with the same requirements? Then there is nothing to do.
    inputs = b"".join((HERE / name).read_bytes() for name in ("pyproject.toml", constraints) if name)
    if versions == "newest":
        inputs += datetime.date.today().isoformat().encode()
    stamp = folder / f"installed-{extras.replace(',', '-')}"
    wanted = hashlib.sha256(inputs + str(HERE).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        source = f"versions of {constraints}" if constraints else "newest versions"
        print(f"installing overlap-callbacks[{extras}] with the {source}", flush=True)
        options = ("-c", HERE / constraints) if constraints else ("--upgrade", "--upgrade-strategy", "eager")
        pip = (bin_folder / "python", "-m", "pip", "install", "--quiet", *options)
        # torch first: with it installed, no other package's requirement can pull a different build.
        for what in (("torch",), ("-e", f"{HERE}[{extras}]")):
            if code := run(*pip, *what):
                sys.exit(code)
        stamp.write_text(wanted)
    return bin_folder


def run_tests(
    pytest: tuple[object, ...], arguments: list[str], places: tuple[str, ...] = ("tests",), processes: int = 4
) -> int:
    """Run pytest with these arguments; without any, run all tests in these places. Returns the exit code."""
    if arguments:
        return run(*pytest, *arguments)
    # Tests wait for half of their time, for processes of theirs: four files at a time keep two cores busy. Those that
    # measure times run by themselves. What fails runs again: a test that needs that is one to mend, so it is named.
    several = ("-n", processes, "--dist", "loadfile", "--no-loadscope-reorder", *places)
    codes, repeated = [], []
    alone = files_marked("alone", places)
    for which, options in (("not alone and not nightly", several), ("alone and not nightly", alone)):
        code = run(*pytest, "--durations", "25", "-m", which, *options)
        if code == 1:
            print("what failed runs again by itself", flush=True)
            failed = last_failed()
            code = run(*pytest, "--last-failed", "--last-failed-no-failures", "none", "-m", which, *places)
            repeated += sorted(failed - last_failed())
        codes.append(code)
    if repeated:
        print("passed only when repeated:", *repeated, sep="\n  ", flush=True)
    return max(codes)


def last_failed() -> set[str]:
    """The tests that failed when they last ran, as pytest keeps them."""
    file = HERE / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return set(json.loads(file.read_text())) if file.exists() else set()


def files_marked(name: str, places: tuple[str, ...]) -> list[Path]:
    """The test files in these places that use a marker. To collect all tests for a few of them takes half a minute."""
    paths = [HERE / place for place in places]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    return [file for file in files if f"mark.{name}" in file.read_text()]


def run(*command: object) -> int:
    """Run a program in this folder's environment; its exit code."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "NO_MKDOCS_2_WARNING": "1"}
    # Container images often set it. Tests start thousands of processes, and each would compile all that it loads.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run([str(part) for part in command], check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
