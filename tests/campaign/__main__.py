"""The command: ``python -m tests.campaign``."""

from __future__ import annotations

import sys

from tests.campaign.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
