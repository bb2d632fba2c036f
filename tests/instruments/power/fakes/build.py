"""Build the fake drivers with the machine's C compiler, once for each content."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def compiler() -> str | None:
    """The C compiler, if there is one."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


@functools.cache
def nvml(old_driver: bool = False) -> Path:
    """Path of a fake ``libnvidia-ml.so.1``.

    Args:
        old_driver: without the functions that came with R510 and later.
    """
    return _compile("nvml.c", "libnvidia-ml.so.1", ("-DOLD_DRIVER",) if old_driver else ())


@functools.cache
def amdsmi(missing: str = "") -> Path:
    """Path of a fake ``libamd_smi.so``.

    Args:
        missing: a symbol that it is to lack, as a library does that is older than the Python package.
    """
    package = importlib.util.find_spec("amdsmi")  # does not import it
    assert package is not None
    assert package.origin is not None
    wrapper = (Path(package.origin).parent / "amdsmi_wrapper.py").read_text()
    needed = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    present = set(re.findall(r"^API \w+ (amdsmi_\w+)\(", (HERE / "amdsmi.c").read_text(), re.MULTILINE))
    assert len(needed) > 100, "the wrapper binds its functions in another way than it did"
    # Functions that set something are counted as writes; 2 is AMDSMI_STATUS_NOT_SUPPORTED.
    stubs = "".join(
        f"API int {name}(void) {{ {'fake_write_count++; ' if _changes(name) else ''}return 2; }}\n"
        for name in sorted(needed - present - {missing})
    )
    return _compile("amdsmi.c", "libamd_smi.so", (), stubs)


def _changes(name: str) -> bool:
    return "_set_" in name or "_reset_" in name


def _compile(source: str, soname: str, flags: tuple[str, ...], stubs: str = "") -> Path:
    """Compile into a folder that is named after all that goes in, so that a second run has nothing to do."""
    tool = compiler()
    assert tool is not None
    inputs = [(HERE / name).read_bytes() for name in (source, "script.h", "settable.h")] + [
        stubs.encode(),
        repr(flags).encode(),
    ]
    digest = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"overlap-fake-drivers-{os.getuid()}", digest)
    library = folder / soname
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stubs.inc").write_text(stubs)
    unfinished = folder / f"{soname}.{os.getpid()}"
    command = [tool, "-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", *flags]
    command += [f"-I{folder}", f"-Wl,-soname,{soname}", "-o", str(unfinished), str(HERE / source), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    unfinished.rename(library)
    return library
