"""The Grafana dashboard: the figures of today, in Grafana's own form; each query has a value after a real run."""

from __future__ import annotations

import http.server
import importlib.util
import json
import math
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from overlap_callbacks import arms
from overlap_callbacks.instruments.power import INSTANTANEOUS, PowerSource, Reading, SourceInfo, meter
from overlap_callbacks.sinks import PrometheusSink
from tests.distributed import run_ranks
from tests.docs.conftest import DOCS
from tests.margins import PATIENCE_S
from tests.monitor.jobs import Training, new_monitor, tiny_schedule

DASHBOARD = json.loads((DOCS / "assets" / "grafana.json").read_text())
TARGETS = {
    f"{panel['title']}, {target['refId']}": target for panel in DASHBOARD["panels"] for target in panel["targets"]
}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_grafana", DOCS / "grafana.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_has_the_figures_of_today(generator: ModuleType) -> None:
    assert generator.FILE.read_text() == generator.text(), "out of date: run python3 docs/grafana.py"
    assert [panel["title"] for panel in DASHBOARD["panels"]] == [title for title, _ in generator.PANELS]
    assert len(TARGETS) == sum(len(keys) for _, keys in generator.PANELS)


def test_grafanas_own_library_reads_all_of_it() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder
    read = json.loads(encoder().encode(models.Dashboard.from_json(DASHBOARD)))
    assert _kept(DASHBOARD, read) == []


def _kept(written: Any, read: Any, place: str = "") -> list[str]:
    """Where what was read lacks something that was written: what the schema does not know is dropped."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [lost for key in written for lost in _kept(written[key], read.get(key), f"{place}/{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [lost for n, one in enumerate(written) for lost in _kept(one, read[n], f"{place}/{n}")]
    return [] if written == read else [place]


# -- a real run, scraped by a real Prometheus


class Sensor(PowerSource):
    """This machine may have none: 100 W at any time."""

    def __init__(self) -> None:
        self.info = SourceInfo("test", "a device", "one", INSTANTANEOUS, 0.001, None, 0.01)

    def sample(self) -> Reading:
        return Reading(time_ns=time.perf_counter_ns(), averaging_s=0.001, power_w=100.0)

    def close(self) -> None:
        """Nothing is open."""


def _train(rank: int) -> str:
    """Trains with windows against sequential steps and an arm, and returns what its port served at the end."""
    meter.find_source = lambda *_, **options: Sensor()
    sink = PrometheusSink(port=0)
    off = arms.Arm("switch", lambda: None, lambda: None, equal_results=True)
    schedule = tiny_schedule(every_n_steps=40, repeats=2, steps_per_block=3, profiled_steps=2)
    monitor = new_monitor(sink, arms=[arms.Sequential(), off], schedule=schedule, power_interval_s=0.005, strict=True)
    training = Training(rank)
    for step in range(82):
        with monitor.step(step):
            training.step()
            time.sleep(0.02)
    text = ""
    deadline = time.monotonic() + PATIENCE_S
    while rank == 0 and "overlap_arm_speedup_ratio{" not in text and time.monotonic() < deadline:
        text = _read(f"http://127.0.0.1:{sink.port}/metrics")
        time.sleep(0.1)
    monitor.close()
    with pytest.raises(OSError, match="refused"):
        _read(f"http://127.0.0.1:{sink.port}/metrics")
    return text


def _read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
    return text


class Prometheus:
    """Prometheus, scraping what a run exported; ``query`` is one of the dashboard."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **parameters: str) -> Any:
        return json.loads(_read(f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found


@pytest.fixture(scope="module")
def exported() -> str:
    text: str = run_ranks(_train, 2)[0]
    return text


@pytest.fixture(scope="module")
def prometheus(exported: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(exported.encode())

        def log_message(self, *arguments: object) -> None:
            """Tests are silent."""

    folder = tmp_path_factory.mktemp("prometheus")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    job = {"job_name": "train", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen(
        [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
         f"--web.listen-address={address}", "--log.level=error"]
    )  # fmt: skip
    try:
        made = Prometheus(f"http://{address}")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not _scraped(made):
            assert process.poll() is None
            time.sleep(0.1)
        yield made
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()
        thread.join()


def _scraped(prometheus: Prometheus) -> bool:
    try:
        return bool(prometheus.query("overlap_run_info"))
    except OSError:
        return False


def _instance(prometheus: Prometheus) -> str:
    (variable,) = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
    assert asked is not None
    (instance,) = prometheus.ask(f"label/{asked[2]}/values", **{"match[]": asked[1]})
    return str(instance)


@pytest.mark.parametrize("target", TARGETS)
def test_each_query_has_a_value_after_a_real_run(prometheus: Prometheus, target: str) -> None:
    expression, legend = TARGETS[target]["expr"], TARGETS[target]["legendFormat"]
    found = prometheus.query(expression.replace("$instance", _instance(prometheus)))
    assert found, expression
    for series in found:
        assert math.isfinite(float(series["value"][1]))
        assert set(re.findall(r"{{(\w+)}}", legend)) <= set(series["metric"])
    modes = {series["metric"].get("mode") for series in found}
    assert modes in ({None}, {"overlapped", "sequential"})
    assert len(found) == len(modes)
