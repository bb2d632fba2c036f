"""Carries to a machine without a network what it may lack, and installs it there beside the torch that it has.

That machine is taken to have torch, numpy, scipy, rich, click, pytest and what else images for deep learning have. Its
torch is never replaced: nothing is installed with its dependencies.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

from gpu_steps.environment import ROOT, child_environment

# What the library and its tests need and such images lack; deepspeed's and megatron-core's own needs included.
PACKAGES = (
    "msgspec", "isal", "deepspeed", "megatron-core", "hjson", "pydantic", "pydantic-core", "annotated-types",
    "typing-inspection", "einops", "py-cpuinfo", "msgpack", "ninja", "packaging", "psutil", "tqdm", "pytest-timeout",
    "hypothesis", "sortedcontainers", "nvidia-ml-py",
)  # fmt: skip
# What that machine is taken to have.
THERE = ("torch", "numpy", "typing-extensions", "pytest")
# Builds this project, in an environment of pip's own.
_BUILD = ("setuptools",)
# Published as sources only.
_FROM_SOURCE = ("deepspeed",)
PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MAX_BYTES = 60 * 2**20
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def pack(folder: Path) -> int:
    """Collect the wheels, in the versions of ``constraints.txt``, and the link's kernels; returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = tested_versions()
    wanted = [f"{name}=={versions[name]}" if name in versions else name for name in (*PACKAGES, *_BUILD)]
    binary = [text for text in wanted if text.split("==")[0] not in _FROM_SOURCE]
    platforms = [part for platform in _PLATFORMS for part in ("--platform", platform)]
    target = ("--python-version", PYTHON, "--implementation", "cp", *platforms)
    download = ("download", "--quiet", "--no-deps", "--only-binary=:all:", *target, "--dest", str(folder))
    if code := _pip(*download, *binary):
        return code
    # A wheel of deepspeed without compiled operators is the same on every machine.
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    if code := _pip(*build, *(text for text in wanted if text not in binary), environment={"DS_BUILD_OPS": "0"}):
        return code
    size = sum(file.stat().st_size for file in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 2**20:.1f} MiB, in {folder}")
    if size > MAX_BYTES:
        print(f"that is more than {MAX_BYTES / 2**20:.0f} MiB", file=sys.stderr)
        return 1
    return _kernels("--pack", folder)


def unpack(folder: Path) -> int:
    """Install the wheels whose package is missing here, and this project from its sources; returns the exit code."""
    wheels = [file for file in sorted(folder.glob("*.whl")) if package_of(file) not in _BUILD]
    missing = [file for file in wheels if not is_installed(package_of(file))]
    if not wheels:
        print(f"there are no wheels in {folder}", file=sys.stderr)
        return 1
    install = ("install", "--quiet", "--no-index", "--no-deps", "--find-links", str(folder))
    if missing and (code := _pip(*install, *map(str, missing))):
        return code
    print(f"installed: {', '.join(package_of(file) for file in missing) or 'nothing, all were there'}")
    return _pip(*install, "--editable", str(ROOT)) or _kernels("--unpack", folder)


def tested_versions() -> dict[str, str]:
    """The versions of ``constraints.txt`` for that machine's Python, by the package's normalised name."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # whoever packs has pip, and perhaps nothing else
        from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]

    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    python = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    wanted = [
        wanted
        for wanted in map(Requirement, filter(None, lines))
        if not wanted.marker or wanted.marker.evaluate(python)
    ]
    return {_normalised(wanted.name): next(iter(wanted.specifier)).version for wanted in wanted}


def package_of(wheel: Path) -> str:
    """The package that a wheel holds."""
    return _normalised(wheel.name.split("-")[0])


def is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _kernels(action: str, folder: Path) -> int:
    """The compiled kernels of the loopback link, for images without nvcc."""
    command = [sys.executable, "-m", "tests.gpu.loopback", action, str(folder.resolve())]
    return subprocess.run(command, check=False, env=child_environment(), cwd=ROOT).returncode


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*arguments: str, environment: dict[str, str] | None = None) -> int:
    # Images mark their Python as managed by the system; there is no other to install into.
    variables = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1", **(environment or {})}
    return subprocess.run([*_PIP, *arguments], check=False, env=variables).returncode
