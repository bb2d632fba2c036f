"""The wheel and the source distribution: built, installed each in a clean environment, and used there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.margins import PATIENCE_S
from tests.toggling import at_night

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "report" / "records" / "schema-2-with-arms.jsonl"
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
USE = (
    "import overlap_callbacks\n"
    "from overlap_callbacks.integrations import pytorch\n"
    "assert overlap_callbacks.attach is pytorch.attach\n"
    "print(overlap_callbacks.__file__, pytorch.__file__)"
)


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(*folders: str) -> Iterator[str]:
    """What git knows of these folders, new files included."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *folders, cwd=ROOT)
    yield from [name for name in listed.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built of a copy: setuptools writes into the sources."""
    sources, folder = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for name in tracked("overlap_callbacks", "integrations", "docs", "pyproject.toml", "README.md", "LICENSE"):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, sources / name)
    for kind in ("build_sdist", "build_wheel"):
        run(sys.executable, "-c", BUILD, kind, folder, cwd=sources)
    return folder


def names_in(built: Path, kind: str) -> set[str]:
    (file,) = built.glob(kind)
    if file.suffix == ".whl":
        return set(zipfile.ZipFile(file).namelist())
    with tarfile.open(file) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_everything_of_the_package_is_in_it(built: Path, kind: str) -> None:
    """Templates, scripts and styles too, not modules alone."""
    inside = names_in(built, kind)
    wanted = set(tracked("overlap_callbacks", "integrations"))
    if kind == "*.whl":
        wanted = {f"overlap_callbacks/{name}" if name.startswith("integrations/") else name for name in wanted}
    assert {Path(name).suffix for name in wanted} >= {".py", ".j2", ".js", ".css"}
    assert not wanted - inside


@pytest.mark.parametrize("kind", at_night(["*.whl", "*.tar.gz"], ["*.tar.gz"]))
def test_it_can_be_installed_and_used(built: Path, kind: str, tmp_path: Path) -> None:
    """In an environment that has the other packages, and not this project."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    own = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    # Packages alone: .pth files there, as of this project's editable installation, are not read.
    (own / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    (file,) = built.glob(kind)
    python, overlap = folder / "bin" / "python", folder / "bin" / "overlap"
    pip = (python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip, file, cwd=tmp_path)
    found = run(python, "-c", USE, cwd=tmp_path).split()
    assert [Path(name).is_relative_to(own) for name in found] == [True, True]
    said = " ".join(run(overlap, "--help", cwd=tmp_path).split())
    assert "show" in said
    # The pages that messages name are installed too.
    pages = folder / "share" / "overlap-callbacks" / "docs"
    assert str(pages).replace("-", "") in said.replace(" ", "").replace("-", "")
    assert (pages / "troubleshooting.md").read_text() == (ROOT / "docs" / "troubleshooting.md").read_text()
    assert (pages / "frameworks" / "pytorch.md").is_file()
    assert "Nothing overlaps in this job" in run(overlap, "show", RECORD, cwd=tmp_path)
    run(overlap, "report", RECORD, "-o", "page.html", cwd=tmp_path)
    assert "</html>" in (tmp_path / "page.html").read_text()
