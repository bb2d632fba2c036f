"""The compiled kernels of the link: made by nvcc here, or made elsewhere and brought along.

python -m tests.gpu.loopback --pack FOLDER      where nvcc is: compile them for every usual GPU
python -m tests.gpu.loopback --unpack FOLDER    where it is not: put them where the link looks for them
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.gpu.loopback.packing import pack, unpack


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


sys.exit(main())
