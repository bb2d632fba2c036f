"""How many steps of changing modes adapters are tested with: few for each change of the code, all of them at night."""

from __future__ import annotations

import os

# ``.ci/nightly`` sets the variable. A mode that hangs or changes something does so in few steps, as a rule.
TOGGLING_STEPS = 200 if os.environ.get("OVERLAP_LONG_TESTS") else 60
