"""A job without a network: imports the library, trains the demo, shows its record, writes its page."""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
from pathlib import Path
from typing import Any

_LOCAL_NAMES = ("localhost", "", None)
# What was asked for, in the job's folder: whoever asks may catch the error and say nothing.
ASKED = "asked"


class RequestError(AssertionError):
    """Something was about to leave the machine."""


def _refuse_others(host: Any, what: str) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (*_LOCAL_NAMES, socket.gethostname()):
        return
    try:
        if ipaddress.ip_address(str(name).split("%")[0]).is_loopback:
            return
    except ValueError:
        pass
    raise RequestError(f"{what} asked for {host!r}")


def forbid_requests(folder: Path) -> None:
    """Make the network's functions raise for anything but this machine, and note it in a file of this folder."""
    real_connect, real_connect_ex, real_resolve = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def refuse(host: Any, what: str) -> None:
        try:
            _refuse_others(host, what)
        except RequestError as error:
            with (folder / ASKED).open("a") as file:
                file.write(f"{error}\n")
            raise

    def guarded(real: Any) -> Any:
        def connect(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6):
                refuse(address[0], "connect")
            return real(self, address)

        return connect

    def resolve(host: Any, *args: Any, **options: Any) -> Any:
        refuse(host, "getaddrinfo")
        return real_resolve(host, *args, **options)

    socket.socket.connect = guarded(real_connect)  # type: ignore[method-assign]
    socket.socket.connect_ex = guarded(real_connect_ex)  # type: ignore[method-assign]
    socket.getaddrinfo = resolve


def run_rank_offline(config: str) -> None:
    """A rank of the demo, whose process may not ask the network either."""
    forbid_requests(Path(json.loads(config)["run_dir"]).parent)
    from overlap_callbacks.cli.demo.worker import main as run_rank

    run_rank(config)


def main(folder: Path) -> None:
    forbid_requests(folder)
    from overlap_callbacks.cli import main as overlap
    from overlap_callbacks.cli.demo import command

    command.WORKER = "tests.offline_jobs"
    demo = ["--steps", "95", "--layers", "2", "--hidden", "128", "--bucket-mb", "0.2"]
    overlap(["demo", *demo, "--run-dir", str(folder / "run"), "--json"], standalone_mode=False)
    overlap(["show", str(folder / "run")], standalone_mode=False)
    overlap(["report", str(folder / "run"), "--output", str(folder / "page.html")], standalone_mode=False)


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        run_rank_offline(sys.argv[1])
    else:
        main(Path(sys.argv[1]))
