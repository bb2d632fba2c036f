"""Builds the libraries of the simulated GPU: ``python -m tests.simulated_gpu.build``, with the Python that has torch.

It needs g++, and downloads headers with pip the first time. What is built lies in ``build/simulated_gpu`` and is used
again until a source or torch changes. torch is not imported: without these libraries it cannot be.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "device"
BUILD = HERE.parent.parent / "build" / "simulated_gpu"
LIBRARIES = BUILD / "lib"
_HEADERS = BUILD / "headers"
# The NVML that follows a script follows the device here.
_NVML = HERE.parent / "instruments" / "power" / "fakes"
_OPTIONS = ("-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden")
_COMPILE = {".cpp": ("g++", "-std=c++17", *_OPTIONS), ".c": ("gcc", "-std=gnu11", "-DSIMULATED_GPU", *_OPTIONS)}


@dataclass(frozen=True)
class Library:
    """One of CUDA's libraries.

    Attributes:
        soname: by which torch's libraries ask for it.
        prefix: pattern of its functions' names.
        error: what functions return that the simulation does not have: "not supported", as the library puts it.
        folders: of its sources, or single sources; none: nothing but such functions.
    """

    soname: str
    prefix: str
    error: int
    folders: tuple[str, ...] = ()


# Patterns are tried in this order.
_LIBRARIES = (
    Library("libcudart.so.13", "(__)?cuda", 801, ("core", "compute", "runtime")),
    Library("libcublasLt.so.13", "cublasLt", 15, ("cublas/cublaslt.cpp",)),
    Library("libcublas.so.13", "cublas", 15, ("cublas/cublas.cpp",)),
    Library("libcudnn.so.9", "cudnn", 3000, ("others/cudnn.cpp",)),
    Library("libcusparseLt.so.0", "cusparseLt", 10),
    Library("libcusparse.so.12", "cusparse", 10),
    Library("libcusolver.so.12", "cusolver", 9),
    Library("libcufft.so.12", "cufft", 16),
    Library("libcurand.so.10", "curand", 999),
    Library("libnccl.so.2", "nccl", 5, ("nccl",)),
    Library("libcupti.so.13", "cupti", 9, ("cupti",)),
    Library("libnvrtc.so.13", "nvrtc", 6, ("others/nvrtc.cpp",)),
    Library("libnvshmem_host.so.3", "nvshmem", 1),
    Library("libcufile.so.0", "cuFile", 5001),
    Library("libcuda.so.1", "cu[A-Z]", 801, ("others/driver.cpp",)),
    Library("libnvidia-ml.so.1", "nvml", 3, (str(_NVML / "nvml.c"),)),
)
_RUNTIME = _LIBRARIES[0]


def main() -> int:
    """Build what is out of date."""
    if shutil.which("g++") is None:
        print("the simulated GPU is built with g++, which this machine does not have", file=sys.stderr)
        return 1
    folder = build()
    print(f"the simulated GPU is in {folder}")
    return 0


def build() -> Path:
    """The folder of the libraries; set ``LD_LIBRARY_PATH`` to it for a process that is to run on the simulation."""
    stamp, wanted = BUILD / "built", _fingerprint()
    if stamp.exists() and stamp.read_text() == wanted:
        return LIBRARIES
    _download_headers()
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    symbols = _wanted_symbols()
    with tempfile.TemporaryDirectory(dir=BUILD) as name:
        objects = _compile(Path(name))
        # The runtime first: the others link to the simulation in it.
        for library in _LIBRARIES:
            _link(library, objects, symbols[library], Path(name))
    stamp.write_text(wanted)
    return LIBRARIES


def _fingerprint() -> str:
    found = hashlib.sha256(importlib.metadata.version("torch").encode())
    files = [
        *SOURCES.rglob("*.cpp"),
        *SOURCES.rglob("*.h"),
        HERE / "headers.txt",
        Path(__file__),
        *_NVML.glob("*.[ch]"),
    ]
    for file in sorted(files):
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def _download_headers() -> None:
    if _HEADERS.exists():
        return
    partial = _HEADERS.with_name("headers-partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tempfile.TemporaryDirectory() as wheels:
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes")
        subprocess.run([*command, "-r", str(HERE / "headers.txt"), "-d", wheels], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(partial, [name for name in archive.namelist() if "/include/" in name])
    partial.rename(_HEADERS)  # whole or not at all


def _compile(folder: Path) -> dict[Path, Path]:
    """The object of each source."""
    include = next(_HEADERS.rglob("cuda_runtime_api.h")).parent
    sources = [*sorted(SOURCES.rglob("*.cpp")), _NVML / "nvml.c"]
    objects = {source: folder / f"{number}-{source.name}.o" for number, source in enumerate(sources)}

    def compile_one(source: Path) -> None:
        command = (*_COMPILE[source.suffix], "-isystem", include, "-c", source, "-o", objects[source])
        subprocess.run(command, check=True)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, sources))
    return objects


def _wanted_symbols() -> dict[Library, dict[str, str]]:
    """What torch's libraries ask of each library: names, with the version that they ask for or nothing."""
    found: dict[Library, dict[str, str]] = {library: {} for library in _LIBRARIES}
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed here; run python3 dev.py test --simulated-gpu")
    for file in (Path(spec.origin).parent / "lib").glob("*.so*"):
        names = _symbols(file, "--dynamic", "--undefined-only")
        if file.name == "libc10_cuda.so":  # it looks up functions of the driver and of NVML by these names
            names += [name.decode() for name in re.findall(rb"\0((?:cu[A-Z]|nvml)\w+)(?=\0)", file.read_bytes())]
        for line in names:
            name, _, version = line.partition("@")
            library = next((one for one in _LIBRARIES if re.match(one.prefix, name)), None)
            if library is not None:
                found[library][name] = version or found[library].get(name, "")
    return found


def _symbols(file: Path, *options: str) -> list[str]:
    done = subprocess.run(["nm", *options, str(file)], capture_output=True, text=True, check=False)
    return [line.split()[-1] for line in done.stdout.splitlines() if line.strip()]


def _link(library: Library, objects: dict[Path, Path], symbols: dict[str, str], folder: Path) -> None:
    own = [
        object_
        for source, object_ in objects.items()
        if any(source.is_relative_to(SOURCES / place) for place in library.folders)
    ]
    defined = {name for object_ in own for name in _symbols(object_, "--defined-only")}
    stubs, script = folder / f"{library.soname}.c", folder / f"{library.soname}.map"
    stubs.write_text(_stubs(library, sorted(symbols.keys() - defined)))
    # torch asks for most functions by name and version; a library without that version is refused.
    version = next((version for version in symbols.values() if version), library.soname)
    script.write_text(
        f"{version} {{ global: cu*; __cuda*; nccl*; nv*; _ZN*10simulation*; _ZN*7compute*; simulated_*; local: *; }};\n"
    )
    compiled = folder / f"{library.soname}.stubs.o"
    subprocess.run(["gcc", "-O1", "-fPIC", "-fno-builtin", "-w", "-c", str(stubs), "-o", str(compiled)], check=True)
    others = [] if library is _RUNTIME or not own else [f"-L{LIBRARIES}", f"-l:{_RUNTIME.soname}"]
    versioned = [f"-Wl,--version-script={script}"] if any(symbols.values()) or library is _RUNTIME else []
    partial = folder / library.soname
    command = ["g++", "-shared", "-o", str(partial), f"-Wl,-soname,{library.soname}", *versioned]
    subprocess.run([*command, *map(str, own), str(compiled), *others, "-lpthread", "-ldl"], check=True)
    partial.replace(LIBRARIES / library.soname)


def _stubs(library: Library, names: list[str]) -> str:
    """C source of the functions that the simulation lacks; with ``SIMGPU_TRACE`` they say when they are called."""
    head = f"""#include <stdio.h>
#include <stdlib.h>
static long missing(const char *name) {{
  if (getenv("SIMGPU_TRACE")) fprintf(stderr, "[simulated GPU] %s is missing\\n", name);
  return {library.error};
}}
"""
    return head + "".join(
        f'__attribute__((visibility("default"))) long {name}(void) {{ return missing("{name}"); }}\n' for name in names
    )


if __name__ == "__main__":
    sys.exit(main())
