"""Every way out of a capped experiment, in real processes: the device ends as it was."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overlap_callbacks.experiments.supervisor import processes_with
from overlap_callbacks.instruments.caps.capped import capped
from overlap_callbacks.instruments.caps.settings import CapError, Caps
from tests.instruments.power.fakes import build
from tests.margins import PATIENCE_S

pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="no C compiler to build the fake driver with"),
    pytest.mark.skipif(os.geteuid() != 0, reason="caps need root"),
]

BEFORE_W = 650.0
_STATE = struct.Struct("16d16dq64s")
# Prints a line once the cap is in force; what follows is the way out.
_PROGRAM = """
import os, signal, subprocess, sys
from pathlib import Path
from overlap_callbacks.instruments.caps import capped as room
from overlap_callbacks.instruments.caps.settings import Caps
from overlap_callbacks.experiments.supervisor import interruptible

keepers = []
popen = subprocess.Popen
room.subprocess.Popen = lambda *a, **k: keepers.append(popen(*a, **k)) or keepers[-1]

def way_out(name):
    if name == "raise":
        raise ValueError("the experiment failed")
    if name == "child":
        child = popen(["sleep", "60"])
        child.kill()
        child.wait()
    if name == "keeper killed" or name == "both killed":
        keepers[0].kill()
        keepers[0].wait()
    if name == "both killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "keeper crashed":
        keepers[0].stdin.write(b"no request\\n")
        keepers[0].stdin.flush()
        assert keepers[0].wait(60) == 1  # a traceback
    if name == "pipe held open":
        child = os.fork()
        if child == 0:
            import time
            for number in (0, 1, 2):
                os.close(number)
            time.sleep(30)
            os._exit(0)
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, name))
    if name == "unhandled SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if name == "exit":
        os._exit(3)

def main(name, folder):
    with room.capped(Caps(power_w=300.0, clock_mhz=1200), folder=Path(folder)):
        print("capped", flush=True)
        sys.stdin.readline()
        way_out(name)

name, folder = sys.argv[1:]
if name.startswith("unhandled"):
    main(name, folder)
else:
    with interruptible():
        main(name, folder)
"""
WAYS = ("end", "raise", "child", "SIGTERM", "SIGINT", "SIGHUP", "SIGKILL", "unhandled SIGTERM", "exit",
        "keeper killed", "keeper crashed", "pipe held open", "both killed")  # fmt: skip
# What becomes of the calls that put back, after the four that set. A keeper that crashes has tried five times and given
# its first device up; else the first two calls fail, lie or leave the device unreadable.
PLANS = {"keeper crashed": "oooo" + "f" * 10}
FAILING = {"end": "oooofl", "raise": "oooolf", "SIGTERM": "oooorf", "SIGKILL": "oooofl", "keeper killed": "oooolr"}
# What puts back is the same for both vendors. What finds the driver is asked where it is found.
VENDORS = {"nvml": (build.nvml, WAYS), "amdsmi": (build.amdsmi, ("end", "SIGKILL", "keeper killed", "both killed"))}


def _state(file: Path) -> tuple[float, float, float, float]:
    values = _STATE.unpack(file.read_bytes())
    return values[0], values[1], values[16], values[17]


def _start(way: str, folder: Path, library: Path, plan: str = "", **variables: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    state = folder / "state"
    if not state.exists():
        state.write_bytes(_STATE.pack(*[BEFORE_W] * 16, *[0.0] * 16, 0, plan.encode()))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "FAKE_STATE": str(state), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, way, str(folder / "journal")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _await_before(folder: Path, timeout_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while _state(folder / "state") != (BEFORE_W, BEFORE_W, 0.0, 0.0):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("vendor", VENDORS)
def test_on_every_way_out_the_devices_end_as_before(vendor: str, tmp_path: Path) -> None:
    make, ways = VENDORS[vendor]
    library = make()
    holders: list[int] = []
    started = {way: _start(way, tmp_path / way.replace(" ", "-"), library, PLANS.get(way, "")) for way in ways}
    try:
        for way, process in started.items():
            assert process.stdout is not None
            assert process.stdout.readline() == "capped\n", f"{way}: {process.stderr and process.stderr.read()}"
            assert _state(tmp_path / way.replace(" ", "-") / "state") == (300.0, 300.0, 1200.0, 1200.0), way
        for way, process in started.items():
            said, _ = process.communicate("go\n", timeout=PATIENCE_S)
            holders += [int(line) for line in said.split()]
            folder = tmp_path / way.replace(" ", "-")
            if way != "both killed":
                assert _await_before(folder), way
                assert not (folder / "journal" / "before.json").exists(), way
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
        for holder in holders:
            os.kill(holder, signal.SIGKILL)
    # Nobody was left to put anything back: the next experiment on this machine does.
    folder = tmp_path / "both-killed"
    assert _state(folder / "state") == (300.0, 300.0, 1200.0, 1200.0)
    again = _start("end", folder, library)
    _, said = again.communicate("go\n", timeout=PATIENCE_S)
    assert "an earlier experiment did not put its caps back" in said
    assert _await_before(folder)


@pytest.mark.parametrize("vendor", VENDORS)
def test_ways_out_with_a_driver_that_fails_to_put_back_at_first(vendor: str, tmp_path: Path) -> None:
    library = VENDORS[vendor][0]()
    started = {way: _start(way, tmp_path / way, library, plan) for way, plan in FAILING.items()}
    try:
        for process in started.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "capped\n"
        for way, process in started.items():
            process.communicate("go\n", timeout=PATIENCE_S)
            assert _await_before(tmp_path / way), way
            assert not (tmp_path / way / "journal" / "before.json").exists(), way
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


def test_a_supervisor_that_kills_a_command_spares_the_keeper_of_its_caps(tmp_path: Path) -> None:
    mark = f"OVERLAP_CALLBACKS_COMMAND_{os.getpid()}"  # as supervise marks all processes of a command
    process = _start("end", tmp_path, build.nvml(), **{mark: "1"})
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "capped\n"
        assert processes_with(mark, "1") == [process.pid]
    finally:
        process.kill()
        process.communicate()
    assert _await_before(tmp_path)


def test_without_root_a_cap_is_refused_and_no_cap_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CapError, match="need root"), capped(Caps(power_w=300.0)):
        pass
    with capped(Caps()) as devices:
        assert devices == []
