#!/usr/bin/env python3
"""Writes the tables of versions and of known failures into docs/versions.md: ``python3 docs/versions.py``.

The first comes from constraints-oldest.txt and constraints.txt, the second from tests/known_failures.py.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.known_failures import KNOWN_FAILURES  # noqa: E402

PAGE = ROOT / "docs" / "versions.md"
PACKAGES = {
    "torch": "torch", "numpy": "NumPy", "scipy": "SciPy", "msgspec": "msgspec", "click": "Click", "rich": "Rich",
    "lightning": "Lightning", "deepspeed": "DeepSpeed", "megatron-core": "Megatron-core",
    "transformers": "Transformers", "accelerate": "Accelerate", "wandb": "W&B", "tensorboard": "TensorBoard",
    "prometheus-client": "Prometheus", "mlflow-skinny": "MLflow", "opentelemetry-sdk": "OpenTelemetry",
    "nvidia-ml-py": "NVML", "amdsmi": "AMD SMI",
}  # fmt: skip


def versions(file: str) -> dict[str, str]:
    """The versions of a file of constraints, by the package's normalised name; the last line of several counts."""
    lines = (ROOT / file).read_text().splitlines()
    found = (re.match(r"([A-Za-z0-9._-]+)==([^ ;\\]+)", line) for line in lines)
    return {re.sub(r"[-_.]+", "-", match[1]).lower(): match[2] for match in found if match}


def with_tables(page: str) -> str:
    """The page with today's tables between their marks."""
    oldest, tested = versions("constraints-oldest.txt"), versions("constraints.txt")
    rows = [f"| {title} | {oldest[name]} | {tested[name]} |" for name, title in PACKAGES.items()]
    header = "| package | oldest (`constraints-oldest.txt`) | tested (`constraints.txt`) |\n| --- | --- | --- |"
    page = _between(page, "versions", "\n".join([header, *rows]))
    reasons: dict[str, list[str]] = {}
    for known in KNOWN_FAILURES:
        reason = re.sub(r" \(`.*?`\)", "", known.reason)
        if reason not in reasons.setdefault(f"{known.package} `{known.versions}`", []):
            reasons[f"{known.package} `{known.versions}`"].append(reason)
    rows = [f"| {package} | {'<br>'.join(found)} |" for package, found in reasons.items()]
    return _between(page, "known failures", "\n".join(["| with | what fails |\n| --- | --- |", *rows]))


def _between(page: str, name: str, table: str) -> str:
    begin, end = f"<!-- {name}: written by `python3 docs/versions.py` -->", f"<!-- end of the {name} -->"
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{PAGE.name} must hold the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
