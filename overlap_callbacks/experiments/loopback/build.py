"""The compiled kernels of the link: made by nvcc here, or made elsewhere and brought along.

python -m tests.gpu.loopback --pack FOLDER      where nvcc is: compile them for every usual GPU
python -m tests.gpu.loopback --unpack FOLDER    where it is not: put them where the link looks for them
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cu")
# A compiled library to use in place of the source; and where compiled ones are kept.
LIBRARY_VARIABLE, CACHE_VARIABLE = "LOOPBACK_LIBRARY", "LOOPBACK_CACHE"
_PACKED = "packed"  # in place of an architecture: for all of these, and for later ones through the code of the first
_PACKED_FOR = ("80", "90", "100")


def compiler() -> str | None:
    """Nvcc of this machine; None without one."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def compile_library(architecture: str, folder: Path) -> Path:
    """Compile the kernels, unless ``folder`` has them already.

    Args:
        architecture: for nvcc, e.g. ``sm_90``.
        folder: is made where it is missing.

    Raises:
        RuntimeError: there is no nvcc.
        subprocess.CalledProcessError: it fails.
    """
    return _compile(architecture, (f"-arch={architecture}",), folder)


def pack(folder: Path) -> Path:
    """Compile the kernels for the usual GPUs, into one library. Raises as ``compile_library``."""
    codes = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in _PACKED_FOR]
    later = f"-gencode=arch=compute_{_PACKED_FOR[0]},code=compute_{_PACKED_FOR[0]}"
    return _compile(_PACKED, (*codes, later), folder)


def unpack(folder: Path) -> Path | None:
    """Put a packed library where the link looks for it; None if ``folder`` has none of these sources."""
    packed = _library(_PACKED, folder)
    if not packed.exists():
        return None
    target = _library(_PACKED, cache())
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(packed, target)
    return target


def find_library() -> Path | None:
    """The compiled library that was brought along; None where there is none of these sources."""
    given = os.environ.get(LIBRARY_VARIABLE)
    if given is not None:
        return Path(given)
    packed = _library(_PACKED, cache())
    # One made here fits this machine's driver and device best.
    return packed if compiler() is None and packed.exists() else None


def cache() -> Path:
    """The folder of compiled libraries."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path(tempfile.gettempdir(), f"loopback-{os.getuid()}")


def _library(architecture: str, folder: Path) -> Path:
    """The file of a library, which is another one for other sources."""
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return folder / f"libloopback-{architecture}-{name}.so"


def _compile(architecture: str, code: Sequence[str], folder: Path) -> Path:
    nvcc = compiler()
    if nvcc is None:
        raise RuntimeError(
            f"there is no nvcc: compile {SOURCE.name} elsewhere and set {LIBRARY_VARIABLE} to the result"
        )
    library = _library(architecture, folder)
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.so")
        options = ("-O2", "-shared", "-Xcompiler", "-fPIC", *code)
        subprocess.run([nvcc, *options, str(SOURCE), "-o", str(partial)], check=True, capture_output=True, text=True)
        partial.rename(library)  # whole or not at all
    return library


def main() -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--pack", type=Path, metavar="FOLDER")
    action.add_argument("--unpack", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    try:
        library = pack(options.pack) if options.pack else unpack(options.unpack)
    except RuntimeError as error:
        print(f"the loopback steps will need nvcc on the other machine: here {error}", file=sys.stderr)
        return 0
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    if library is None:
        print("no compiled kernels of these sources came along: the loopback steps need nvcc", file=sys.stderr)
    else:
        print(f"compiled kernels of the loopback link: {library}")
    return 0
