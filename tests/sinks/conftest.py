from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb as if it had never run on this machine, and gone again afterwards."""
    for name in ("WANDB_DIR", "HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    gc.freeze()  # the garbage of this test is looked for, not that of all that is loaded
    yield
    if sys.modules.get("wandb") is not None:
        sys.modules["wandb"].teardown()
        with warnings.catch_warnings():
            # wandb leaves the folders in which it prepares artifacts to the garbage collector, which says so.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of files, where MLflow keeps what is logged."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    if (mlflow := sys.modules.get("mlflow")) is not None:
        mlflow.set_experiment(experiment_id="0")  # it keeps the one that another test has set


class Collector:
    """A collector of OpenTelemetry's: reads what is sent to it.

    Attributes:
        requests: as read, one for each message.
        status: of the answers.
    """

    def __init__(self) -> None:
        from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service

        self.requests: list[Any] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/metrics"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.requests.append(service.ExportMetricsServiceRequest.FromString(body))
                self.send_response(collector.status)
                self.end_headers()
                self.wfile.write(service.ExportMetricsServiceResponse().SerializeToString())

            def log_message(self, *arguments: object) -> None:
                """Tests are silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}/v1/metrics"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto")
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()
