"""Writes a Kineto trace's events as Nsight Systems would export them, by NVIDIA's published SQLite schema.

Nsight Systems is not at hand where these tests run. The schema is that of "SQLite Export Schema Reference" of its
manual, reduced to the columns that a reader of kernels may need. Times are kept to the nanosecond.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, mangledName INTEGER, registersPerThread INTEGER NOT NULL,
    gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL,
    blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL,
    dynamicSharedMemory INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
    copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL,
    streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL,
    bytes INTEGER NOT NULL, memKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, color INTEGER,
    text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER);
"""

_COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "HtoH": 9, "PtoP": 10}
_MEMORIES = {"Pageable": 0, "Pinned": 1, "Device": 2, "Array": 3, "Managed": 4}


def nanoseconds(microseconds: Any) -> int:
    return int((Decimal(str(microseconds)) * 1000).to_integral_value())


def number_of(process: int, thread: int = 0, host: int = 1) -> int:
    """Host, process and thread in one number, as the schema has it; SQLite's numbers have a sign."""
    number = host << 56 | process << 24 | thread
    return number - 2**64 if number >= 2**63 else number


class NsysFile:
    """A report that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.host = path, 1
        self._tables = sqlite3.connect(path)
        self._tables.executescript(SCHEMA)
        self._texts: dict[str, int] = {}

    def text(self, value: str) -> int:
        if value not in self._texts:
            self._texts[value] = len(self._texts) + 1
            self._tables.execute("INSERT INTO StringIds VALUES (?, ?)", (self._texts[value], value))
        return self._texts[value]

    def row(self, table: str, **values: Any) -> None:
        marks = ", ".join("?" * len(values))
        self._tables.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))

    def execute(self, statement: str) -> None:
        self._tables.execute(statement)

    def add(self, events: Iterable[dict[str, Any]], process: int = 77) -> None:
        """Add the kernels, copies, calls and ranges of a Kineto trace."""
        for event in events:
            if event.get("ph") == "X":
                self._add(event, process)

    def _add(self, event: dict[str, Any], process: int) -> None:
        category, name, args = event.get("cat"), str(event.get("name")), event.get("args", {})
        start = nanoseconds(event["ts"])
        times = {"start": start, "end": start + nanoseconds(event["dur"])}
        if category in ("cuda_runtime", "hip_runtime", "cuda_driver"):
            self.row(
                "CUPTI_ACTIVITY_KIND_RUNTIME", **times, eventClass=0,
                globalTid=number_of(process, event["tid"], self.host), correlationId=args.get("correlation"),
                nameId=self.text(f"{name}_v7000"), returnValue=0,
            )  # fmt: skip
        elif category == "user_annotation":
            numbered = len(self._texts) % 2 == 0  # both forms occur
            text = {"textId": self.text(name)} if numbered else {"text": name}
            self.row(
                "NVTX_EVENTS", **times, **text, eventType=59, globalTid=number_of(process, event["tid"], self.host)
            )
        if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            return
        place = {
            **times, "deviceId": args["device"], "contextId": 1, "streamId": args["stream"],
            "correlationId": args.get("correlation"), "globalPid": number_of(process, host=self.host),
        }  # fmt: skip
        if category == "gpu_memset":
            self.row("CUPTI_ACTIVITY_KIND_MEMSET", **place, value=0, bytes=args.get("bytes", 0), memKind=2)
        elif category == "gpu_memcpy":
            found = re.fullmatch(r"Memcpy (\w+) \((\w+) -> (\w+)\)", name)
            kind, source, target = found.groups() if found else ("?", "?", "?")
            self.row(
                "CUPTI_ACTIVITY_KIND_MEMCPY", **place, bytes=args.get("bytes", 0), copyKind=_COPIES.get(kind, 0),
                srcKind=_MEMORIES.get(source, 0xFFFF), dstKind=_MEMORIES.get(target, 0xFFFF),
            )  # fmt: skip
        else:
            directions = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
            sizes = zip(directions, args.get("grid", [0] * 3) + args.get("block", [0] * 3), strict=True)
            self.row(
                "CUPTI_ACTIVITY_KIND_KERNEL", **place, **dict(sizes), demangledName=self.text(name),
                shortName=self.text(name.partition("<")[0]), registersPerThread=args.get("registers per thread", 0),
                staticSharedMemory=args.get("shared memory", 0), dynamicSharedMemory=0,
            )  # fmt: skip

    def close(self) -> Path:
        self._tables.commit()
        self._tables.close()
        return self.path


def of_kineto(trace: Path, path: Path) -> Path:
    """A report that holds what a Kineto file holds."""
    content = trace.read_bytes()
    content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    document = json.loads(content, parse_float=Decimal)
    report = NsysFile(path)
    for device in document.get("deviceProperties", ()):
        report.row("TARGET_INFO_GPU", vmId=0, id=device["id"], name=device["name"])
    report.add(document["traceEvents"])
    return report.close()


def in_parquet(database: Path, folder: Path) -> Path:
    """The same as ``nsys export --type parquetdir`` would write it: a folder with a file for each table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    tables = sqlite3.connect(database)
    for (name,) in tables.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        found = tables.execute(f"SELECT * FROM {name}")
        columns = [column for column, *_ in found.description]
        values = list(zip(*found.fetchall(), strict=True)) or [()] * len(columns)
        arrays = {
            column: pa.array([n & 2**64 - 1 for n in of], pa.uint64()) if "global" in column else pa.array(of)
            for column, of in zip(columns, values, strict=True)
        }
        pq.write_table(pa.table(arrays), folder / f"{name}.parquet")
    tables.close()
    return folder
