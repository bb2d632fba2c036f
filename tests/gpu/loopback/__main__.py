"""Packs and unpacks the compiled kernels: see ``device_link.py``."""

from __future__ import annotations

import sys

from overlap_callbacks.experiments.loopback.device_link import main

sys.exit(main())
