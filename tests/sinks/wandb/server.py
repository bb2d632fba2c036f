"""A W&B server on this machine: as much of it as runs, tables, alerts, artifacts and workspaces need.

What it was sent is kept, to be looked at. It can be told to misbehave: to hang, or to answer 500.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

HANG, ERROR = "hang", "error"


class ServedRun:
    """What the server knows of a run."""

    def __init__(self) -> None:
        self.bucket: dict[str, Any] = {}
        self.lines: dict[str, dict[int, str]] = defaultdict(dict)
        self.files: dict[str, bytes] = {}
        self.exit_code: int | None = None

    def _parsed(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in sorted(self.lines[name].items())]

    @property
    def history(self) -> list[dict[str, Any]]:
        return self._parsed("wandb-history.jsonl")

    @property
    def summary(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for line in self._parsed("wandb-summary.json"):
            merged.update(line)
        return merged

    @property
    def config(self) -> dict[str, Any]:
        return {key: entry["value"] for key, entry in json.loads(self.bucket.get("config") or "{}").items()}

    def values(self, key: str) -> list[Any]:
        return [row[key] for row in self.history if key in row]

    def table(self, key: str) -> dict[str, Any]:
        """The table that was logged last under a key."""
        found: dict[str, Any] = json.loads(self.files[self.values(key)[-1]["path"]])
        return found

    def text(self, key: str) -> str:
        """The picture that was logged last under a key."""
        return self.files[self.values(key)[-1]["path"]].decode()


class WandbServer:
    """Serves on a free port until the ``with`` block ends.

    Attributes:
        trouble: None, ``HANG`` (requests are held until the end) or ``ERROR`` (all are answered 500).
        troubled: requests that were not served.
        views: workspaces that were saved, by id.
        alerts: as they came.
        artifacts: with the bytes of their files, by id.
        unknown: operations that were not understood.
    """

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.troubled = 0
        self.runs: dict[str, ServedRun] = defaultdict(ServedRun)
        self.views: dict[str, dict[str, Any]] = {}
        self.alerts: list[dict[str, Any]] = []
        self.artifacts: dict[str, dict[str, Any]] = {}
        self.unknown: list[str] = []
        self._released = threading.Event()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                code, answer = server.answer(self.command, self.path, body)
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that has gone away
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def hanging(self) -> bool:
        """Whether held requests are still held."""
        return not self._released.is_set()

    @property
    def run(self) -> ServedRun:
        """The only run."""
        (run,) = self.runs.values()
        return run

    def environment(self) -> dict[str, str]:
        return environment(self.url)

    # -- requests

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        if self.trouble is not None:
            self.troubled += 1
            if self.trouble == HANG:
                self._released.wait()
            return 500, b"{}"
        try:
            with self._lock:
                return 200, self._route(method, path, body)
        except Exception as error:  # not a 5xx: wandb would try again for minutes
            self.unknown.append(f"{path}: {error!r}")
            return 400, b"{}"

    def _route(self, method: str, path: str, body: bytes) -> bytes:
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        if parts == ["graphql"]:
            return json.dumps(self._graphql(json.loads(body))).encode()
        if parts[0] == "files" and parts[-1] == "file_stream":
            self._stream(self.runs[parts[3]], json.loads(body))
            return b"{}"
        if parts[0] == "upload" and method == "PUT":
            kind, owner, name = parts[1], parts[2], "/".join(parts[3:])
            (self.runs[owner].files if kind == "run" else self.artifacts[owner]["files"])[name] = body
            return b""
        raise ValueError("no such address")

    def _stream(self, run: ServedRun, message: dict[str, Any]) -> None:
        for name, chunk in (message.get("files") or {}).items():
            if name == "wandb-summary.json":
                run.lines[name].clear()
            run.lines[name].update({chunk["offset"] + i: line for i, line in enumerate(chunk["content"])})
        if message.get("complete"):
            run.exit_code = message.get("exitcode")

    def _graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        query, given = request["query"], request.get("variables") or {}
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = request.get("operationName") or (found.group(1) if found else "")
        operation = getattr(self, f"_op_{name}", None)
        if operation is None:
            self.unknown.append(name)
            return {"data": None, "errors": [{"message": f"unknown operation {name}"}]}
        return {"data": operation(given["input"] if set(given) == {"input"} else given)}

    def _address(self, kind: str, owner: str, name: str) -> str:
        return f"{self.url}/upload/{kind}/{owner}/{quote(name)}"

    # -- operations: each takes the variables and gives the data

    def _op_Viewer(self, _: Any) -> Any:
        return {
            "viewer": {
                "id": "me", "entity": "team", "username": "me", "name": "Me", "email": "me@example.org",
                "flags": "{}", "admin": False, "teams": {"edges": []},
            }
        }  # fmt: skip

    def _op_UpsertBucket(self, given: Any) -> Any:
        run = self.runs[given["name"]]
        inserted = not run.bucket
        run.bucket.update({key: value for key, value in given.items() if value is not None})
        project = {"id": "p", "name": run.bucket.get("project"), "entity": {"id": "e", "name": "team"}}
        bucket = {
            "id": given["name"], "name": given["name"], "displayName": given["name"], "description": None,
            "config": run.bucket.get("config"), "sweepName": None, "historyLineCount": len(run.history),
            "project": project,
        }  # fmt: skip
        return {"upsertBucket": {"inserted": inserted, "bucket": bucket}}

    def _op_RunResumeStatus(self, _: Any) -> Any:
        return {"model": None}

    def _op_RunStoppedStatus(self, _: Any) -> Any:
        return {"project": {"run": {"stopped": False}}}

    def _op_ServerFeaturesQuery(self, _: Any) -> Any:
        return {"serverInfo": {"features": []}}

    def _op_OrganizationCoreWeaveOrganizationID(self, _: Any) -> Any:
        return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}

    def _op_CreateRunFiles(self, given: Any) -> Any:
        run = given["run"]
        files = [{"name": name, "uploadUrl": self._address("run", run, name)} for name in given["files"]]
        return {"createRunFiles": {"runID": run, "uploadHeaders": [], "files": files}}

    def _op_NotifyScriptableRunAlert(self, given: Any) -> Any:
        self.alerts.append(given)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _op_ArtifactType(self, _: Any) -> Any:
        return {"project": {"artifact": None}}

    def _op_CreateArtifact(self, given: Any) -> Any:
        artifact = f"artifact{len(self.artifacts)}"
        self.artifacts[artifact] = {**given, "files": {}}
        sequence = {"id": f"sequence-{artifact}", "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": artifact, "state": "PENDING", "artifactSequence": sequence}}}

    def _op_CreateArtifactManifest(self, given: Any) -> Any:
        artifact = given["artifactID"]
        file = {
            "id": "m", "name": "manifest", "displayName": "manifest", "uploadHeaders": [],
            "uploadUrl": self._address("artifact", artifact, "manifest"),
        }  # fmt: skip
        return {"createArtifactManifest": {"artifactManifest": {"id": f"manifest-{artifact}", "file": file}}}

    def _op_CreateArtifactFiles(self, given: Any) -> Any:
        nodes = [
            {
                "id": "f", "name": file["name"], "displayName": file["name"], "uploadHeaders": [],
                "uploadUrl": self._address("artifact", file["artifactID"], file["name"]),
                "storagePath": None, "uploadMultipartUrls": None, "artifact": {"id": file["artifactID"]},
            }
            for file in given["artifactFiles"]
        ]  # fmt: skip
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _op_CommitArtifact(self, given: Any) -> Any:
        self.artifacts[given["artifactID"]]["committed"] = True
        return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": "d"}}}

    def _op_UpsertView2(self, given: Any) -> Any:
        view = given.get("id") or f"view{len(self.views)}"
        inserted = view not in self.views
        self.views[view] = {**given, "id": view}
        return {"upsertView": {"view": {"id": view, "name": given["name"]}, "inserted": inserted}}


def environment(url: str) -> dict[str, str]:
    """What makes wandb talk to a server at ``url``."""
    return {
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "f" * 40,
        "WANDB_MODE": "online",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
    }


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """An address at which nobody listens."""
    import socket

    with socket.socket() as taken:  # bound and not listening: nobody else can have the port meanwhile
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
