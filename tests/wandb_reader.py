"""Reads offline W&B runs back through W&B's own reader."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.margins import PATIENCE_S

SETTINGS = {
    "mode": "offline",
    "console": "off",
    "x_disable_stats": True,
    "x_disable_meta": True,
    "disable_git": True,
    "save_code": False,
    "silent": True,
}


@dataclass
class OfflineRun:
    """What an offline run logged."""

    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    folder: Path = Path()

    def values(self, key: str) -> list[Any]:
        return [row[key] for row in self.history if key in row]

    def tables(self, key: str) -> list[dict[str, Any]]:
        paths = [path for path in self.files if path.startswith(f"media/table/{key}_")]
        return [json.loads((self.folder / "files" / path).read_text()) for path in paths]


def read_run(folder: Path, timeout_s: float = PATIENCE_S) -> OfflineRun:
    """Read the one run below ``folder``; waits for its last record, which comes after ``finish()`` has returned."""
    deadline = time.monotonic() + timeout_s
    while True:
        files = list(folder.rglob("run-*.wandb"))
        if len(files) == 1:
            records = _records(files[0])
            if any(record["type"] == "exit" for record in records):
                return _run(records, files[0].parent)
        assert time.monotonic() < deadline, f"no finished run below {folder}: {files}"
        time.sleep(0.05)


def _records(file: Path) -> list[dict[str, Any]]:
    import wandb

    if importlib.util.find_spec("wandb.sdk.internal.datastore") is not None:
        return list(_records_of_old_versions(file))
    reader = Path(wandb.__file__).parent / "bin" / "wandb-core"
    command = [reader, "leet", "inspect", "--no-observability", "--json", "--run-file", file, file.parent]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [json.loads(line) for line in output.splitlines() if line]


def _records_of_old_versions(file: Path) -> Iterator[dict[str, Any]]:
    """The same where ``wandb-core`` cannot inspect yet: W&B had a reader in Python then."""
    from google.protobuf.json_format import MessageToDict
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    with store._fp, contextlib.suppress(AssertionError):  # the last record is not written to its end yet
        while (data := store.scan_data()) is not None:
            message = wandb_internal_pb2.Record()
            message.ParseFromString(data)
            kind = message.WhichOneof("record_type")
            content = MessageToDict(getattr(message, kind), preserving_proto_field_name=True)
            for part, name in ((content, "item"), (content, "update"), (content.get("config", {}), "update")):
                if name in part:
                    part[name] = {_key(item): json.loads(item["value_json"]) for item in part[name]}
            yield {"type": kind, kind: content}


def _key(item: dict[str, Any]) -> str:
    return item.get("key") or ".".join(item["nested_key"])


def _run(records: list[dict[str, Any]], folder: Path) -> OfflineRun:
    run = OfflineRun(folder=folder)
    for record in records:
        kind = record["type"]
        content = record.get(kind, {})
        if kind == "history":
            run.history.append(content["item"])
            run.order += [f"log {key}" for key in content["item"]]
        elif kind == "metric":
            run.metrics[content.get("name") or content.get("glob_name")] = content
            run.order.append(f"define {content.get('name')}")
        elif kind in ("config", "run"):
            config = content.get("config", content) if kind == "run" else content
            run.config.update(config.get("update", {}))
        elif kind == "files":
            run.files += [entry["path"] for entry in content["files"]]
    return run
