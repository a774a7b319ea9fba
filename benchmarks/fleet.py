"""Simulated fleet on one machine: recorded nodes, a Prometheus agent, VictoriaMetrics, and vmalert with the deployed rules.

The page of the real sidecar, for a job of eight ranks on the described machine h100, is recorded twice. A single process serves
the page for each node, with other names of run, rank and GPU. Values that changed between the recordings continue to change at
that rate. A run has eight nodes. The real Prometheus in agent mode scrapes the nodes every 15 s and writes to VictoriaMetrics, on
which vmalert evaluates deploy/prometheus/rules (Debian's packages). Prints a JSON document.

For each number of nodes, the figures are series and samples, memory and CPU time of each program, the number of recorded series, and
the durations of an evaluation of all rules and of the queries of the dashboards *Fleet* and *Run* over an hour. The column of 10,000
nodes is a linear extrapolation from the stages in which all nodes were scraped and all rules evaluated in time.

    python benchmarks/fleet.py [--quick] [NODES ...]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from report import QUICK, REPOSITORY, child, describe_run, feed_directory

NODES = (2, 4, 8) if QUICK else (100, 300, 1000, 2000)
COMPUTED_NODES = 10_000
RANKS = NODES_OF_A_RUN = 8
SCRAPE_SECONDS = 15
PAGE_INTERVAL_SECONDS = 10.0
MEASURED_SECONDS = 30 if QUICK else 60
QUERY_TRIES = 3
PER_NODE = re.compile(r"training_(energy|carbon|cost|productive_energy|wasted_energy|process|rank|gpu)")
"""Families with a run and without a rank that each node publishes. The other such families come from the first node of a run."""
LINE = re.compile(r"^(?P<series>[^ #]\S*(?:\{.*\})?) (?P<value>\S+)$", re.MULTILINE)


def be_rank() -> None:
    """Record an iteration every third of a second as a rank of the job, until SIGKILL; rank 7 is slower than rank 0."""
    from exporter import training

    rank = int(os.environ["RANK"])
    print("ready", flush=True)
    with training.application(), training.training_loop(train_iterations_start=0):
        while True:
            with training.data_loading():
                time.sleep(0.02)
            with training.training_iteration():
                with training.model_forward():
                    time.sleep(0.1)
                with training.model_backward():
                    time.sleep(0.2 + 0.01 * rank)
                training.record(loss=2.0, grad_norm=1.0, learning_rate=1e-4, samples=8, tokens=16_384)


def record_pages() -> tuple[str, str]:
    """Return two pages of a node, `PAGE_INTERVAL_SECONDS` apart."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(feed_directory())
        config_file = directory / "config.yaml"
        config_file.write_text(f"energy: {{carbon_intensity: 300, lock_dir: {directory}}}\n")
        command = [
            sys.executable, "-m", "exporter", "--web.listen-address=127.0.0.1:0", f"--feed.dir={directory}",
            "--gpu.replay=h100", f"--config.file={config_file}",
        ]  # fmt: skip
        _, url = stack.enter_context(child(command, ready_pattern=r"http://127\.0\.0\.1:\d+"))
        for rank in range(RANKS):
            environment = {"EXPORTER_FEED_DIR": str(directory), "EXPORTER_RUN": "RUN", "RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
            stack.enter_context(
                child([sys.executable, __file__, "rank"], ready_pattern="ready", **environment)
            )
        time.sleep(30)
        first = fetch(f"{url}/metrics")
        time.sleep(PAGE_INTERVAL_SECONDS)
        return first, fetch(f"{url}/metrics")


class PageTemplate:
    """Page of a node at any time after the recording, with placeholders for the names of run, rank and GPU.

    Args:
        pages: Two pages of the recorded node, `PAGE_INTERVAL_SECONDS` apart.
        has_rank_zero: True for the node of rank 0, which publishes the families of the whole run.
    """

    def __init__(self, pages: tuple[str, str], *, has_rank_zero: bool) -> None:
        earlier_values = {match["series"]: float(match["value"]) for match in LINE.finditer(pages[0])}
        self.lines: list[str] = []
        self.changing_series: list[tuple[str, float, float]] = []  # series, value, and change per second
        for line in pages[1].splitlines():
            match = LINE.match(line)
            if match is None:
                self.lines.append(line)
                continue
            series, value = match["series"], float(match["value"])
            if (
                not has_rank_zero
                and 'run="' in series
                and 'rank="' not in series
                and not PER_NODE.match(series)
            ):
                continue
            series = re.sub(r'rank="(\d)"', r'rank="<\1>"', series.replace('run="RUN"', 'run="run-<run>"'))
            series = re.sub(r"GPU-[0-9a-f]{8}-", "GPU-<node>-", series)
            change = value - earlier_values.get(match["series"], value)
            if change:
                self.changing_series.append((series, value, change / PAGE_INTERVAL_SECONDS))
            else:
                self.lines.append(f"{series} {match['value']}")

    @property
    def series_count(self) -> int:
        """Number of series of a node."""
        return len(self.changing_series) + sum(not line.startswith("#") for line in self.lines)

    @lru_cache(maxsize=2)  # noqa: B019  # the two templates live as long as the process
    def page_at(self, second: int) -> str:
        """Return the page with placeholders at a number of seconds after the recording."""
        changing_lines = [
            f"{series} {value + change_per_second * second!r}"
            for series, value, change_per_second in self.changing_series
        ]
        return "\n".join([*self.lines, *changing_lines, ""])

    def page(self, node: int, second: int) -> str:
        """Return the page of a node, by the number of the node."""
        run, node_of_run = divmod(node, NODES_OF_A_RUN)
        text = self.page_at(second).replace("<run>", str(run)).replace("<node>", f"{node:08x}")
        for rank in range(RANKS):
            text = text.replace(f'"<{rank}>"', f'"{rank + node_of_run * RANKS}"')
        return text


def play(directory: Path) -> None:
    """Serve the page of each node at /NUMBER until SIGKILL. Accept alerts in place of Alertmanager."""
    pages = (directory / "first").read_text(), (directory / "second").read_text()
    templates = PageTemplate(pages, has_rank_zero=True), PageTemplate(pages, has_rank_zero=False)
    started = time.monotonic()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = b""
                if length := re.search(rb"(?i)content-length: (\d+)", head):
                    await reader.readexactly(int(length[1]))
                else:
                    node = int(head.split(b" ", 2)[1].strip(b"/"))
                    second = int(time.monotonic() - started)
                    body = templates[node % NODES_OF_A_RUN > 0].page(node, second).encode()
                content_type = b"Content-Type: text/plain; version=0.0.4\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n" % (content_type, len(body)))
                writer.write(body)
                await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()

    asyncio.run(serve())


def fetch(url: str, **parameters: object) -> str:
    """Return the body of a response."""
    address = f"{url}?{urllib.parse.urlencode(parameters)}" if parameters else url
    with urllib.request.urlopen(address, timeout=120) as response:
        body: bytes = response.read()
    return body.decode()


def engine_metrics(url: str) -> dict[str, float]:
    """Return the metrics of an engine about itself, summed by name."""
    metrics: dict[str, float] = {}
    for line in LINE.finditer(fetch(f"{url}/metrics")):
        name = line["series"].partition("{")[0]
        with contextlib.suppress(ValueError):
            metrics[name] = metrics.get(name, 0.0) + float(line["value"])
    return metrics


@contextlib.contextmanager
def engine(log: Path, *command: str) -> Iterator[tuple[int, str]]:
    """Run an engine during the block. Yields its process id and its address, which replaces LISTEN in the command."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [part.replace("LISTEN", listen) for part in command], stdout=errors, stderr=errors
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                fetch(f"http://{listen}/metrics")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not answer: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield process.pid, f"http://{listen}"
    finally:
        process.kill()
        process.wait()


class Fleet:
    """Simulated fleet: the player of the nodes, the engines, and the file with the targets.

    Args:
        stack: Exit stack that ends the processes.
        pages: Two pages of the recorded node.
    """

    def __init__(self, stack: contextlib.ExitStack, pages: tuple[str, str]) -> None:
        self.work = work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
        for name, text in zip(("first", "second"), pages, strict=True):
            (work / name).write_text(text)
        player, self.player = stack.enter_context(
            child([sys.executable, __file__, "play", work], ready_pattern=r"http://127\.0\.0\.1:\d+")
        )
        store, self.store = stack.enter_context(
            engine(work / "store.log", "victoria-metrics", f"-storageDataPath={work}/store", "-httpListenAddr=LISTEN",
                   "-search.maxUniqueTimeseries=5000000", "-search.maxQueryDuration=120s")
        )  # fmt: skip
        (work / "targets.json").write_text("[]")
        (work / "agent.yml").write_text(
            f"global: {{scrape_interval: {SCRAPE_SECONDS}s, external_labels: {{cluster: simulated}}}}\n"
            "scrape_configs:\n"
            "- job_name: training\n"
            f"  file_sd_configs: [{{files: ['{work}/targets.json'], refresh_interval: 1s}}]\n"
            f"remote_write: [{{url: '{self.store}/api/v1/write'}}]\n"
        )
        agent, self.agent = stack.enter_context(
            engine(work / "agent.log", "prometheus", "--enable-feature=agent", f"--config.file={work}/agent.yml",
                   f"--storage.agent.path={work}/agent", "--web.listen-address=LISTEN")
        )  # fmt: skip
        (work / "rules").mkdir()
        for path in (REPOSITORY / "deploy/prometheus/rules").glob("*.yml"):
            # Debian's vmalert is too old for this key.
            text = re.sub(r"^ +keep_firing_for:.*\n", "", path.read_text(), flags=re.MULTILINE)
            (work / "rules" / path.name).write_text(text)
        alerts, self.alerts = stack.enter_context(
            engine(work / "alerts.log", "vmalert", f"-rule={work}/rules/*.yml", f"-datasource.url={self.store}",
                   f"-remoteWrite.url={self.store}", f"-notifier.url={self.player}", "-httpListenAddr=LISTEN",
                   "-rule.validateTemplates=false", "-datasource.queryStep=15s")
        )  # fmt: skip
        self.engines = {
            "player": psutil.Process(player.pid),
            "Prometheus agent": psutil.Process(agent),
            "VictoriaMetrics": psutil.Process(store),
            "vmalert": psutil.Process(alerts),
        }

    def stage(self, nodes: int) -> dict[str, float]:
        """Return the figures for a number of scraped nodes, measured in steady state."""
        address = self.player.removeprefix("http://")
        targets = [
            {
                "targets": [address],
                "labels": {"__metrics_path__": f"/{node}", "instance": f"node-{node}:20909"},
            }
            for node in range(nodes)
        ]
        (self.work / "targets.new").write_text(json.dumps(targets))
        (self.work / "targets.new").replace(self.work / "targets.json")
        # The state is steady after a scrape of each target and an evaluation of the slowest group of rules.
        time.sleep(2 * SCRAPE_SECONDS + 30)
        seconds = {name: sum(process.cpu_times()[:2]) for name, process in self.engines.items()}
        metrics_before = {"agent": engine_metrics(self.agent), "alerts": engine_metrics(self.alerts)}
        started = time.monotonic()
        time.sleep(MEASURED_SECONDS)
        elapsed_seconds = time.monotonic() - started
        metrics_after = {"agent": engine_metrics(self.agent), "alerts": engine_metrics(self.alerts)}

        def increase(engine: str, name: str) -> float:
            return metrics_after[engine].get(name, 0.0) - metrics_before[engine].get(name, 0.0)

        figures: dict[str, float] = {
            "nodes": nodes,
            "nodes scraped": self.count('up{job="training"} == 1'),
            "series": metrics_after["agent"]["prometheus_agent_active_series"],
            "samples a second": increase("agent", "prometheus_agent_samples_appended_total")
            / elapsed_seconds,
            "remote write, MB/s": increase("agent", "prometheus_remote_storage_bytes_total")
            / elapsed_seconds
            / 1e6,
            "records": self.count('{__name__=~".+:.+"}'),
        }
        for name, process in self.engines.items():
            if name != "player":
                figures[f"{name}, cores"] = (sum(process.cpu_times()[:2]) - seconds[name]) / elapsed_seconds
                figures[f"{name}, GiB"] = process.memory_info().rss / 2**30
        evaluations = increase("alerts", "vmalert_iteration_total") or 1.0
        groups = len(json.loads(fetch(f"{self.alerts}/api/v1/rules"))["data"]["groups"])
        evaluation_seconds = increase("alerts", "vmalert_iteration_duration_seconds_sum")
        figures["all rules once, s"] = evaluation_seconds / evaluations * groups
        figures["Fleet, all queries, s"] = sum(self.query_seconds("fleet"))
        figures["Run, all queries, s"] = sum(self.query_seconds("run"))
        return figures

    def count(self, selector: str) -> float:
        """Return the number of series of a selector."""
        result = json.loads(fetch(f"{self.store}/api/v1/query", query=f"count({selector})"))["data"]["result"]
        return float(result[0]["value"][1]) if result else 0.0

    def query_seconds(self, board: str) -> Iterator[float]:
        """Yield the shortest of three durations of each query of a dashboard over the last hour."""
        end = time.time()
        for text, instant in expressions(board):
            parameters: dict[str, object] = {"query": text, "time": end}
            if not instant:
                parameters = {"query": text, "start": end - 3600, "end": end, "step": SCRAPE_SECONDS}
            durations = []
            for _ in range(QUERY_TRIES):
                started = time.perf_counter()
                fetch(f"{self.store}/api/v1/query{'' if instant else '_range'}", **parameters)
                durations.append(time.perf_counter() - started)
            yield min(durations)


def expressions(board: str) -> list[tuple[str, bool]]:
    """Return the queries of a dashboard with Grafana's variables replaced, each with True for an instant query."""
    values = {"run": "run-0", "__rate_interval": "1m", "__interval": "15s", "__range": "1h"}
    queries = []

    def walk(panels: Sequence[dict[str, Any]]) -> None:
        for panel in panels:
            walk(panel.get("panels", []))
            for target in panel.get("targets", []):
                text = re.sub(
                    r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))",
                    lambda name: values.get(name[1] or name[2], ".+"),
                    target["expr"],
                )
                queries.append((text, bool(target.get("instant"))))

    walk(json.loads((REPOSITORY / f"dashboards/json/training-{board}.json").read_text())["panels"])
    return queries


def extrapolate(stages: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the linear extrapolation of the figures to 10,000 nodes.

    The durations of queries are omitted, because on this machine the queries wait for the evaluation of the rules.
    """
    nodes = [stage["nodes"] for stage in stages]
    lines = {
        name: statistics.linear_regression(nodes, [stage[name] for stage in stages])
        for name in stages[0]
        if name not in {"nodes", "nodes scraped"} and "queries" not in name
    }
    return {"nodes": COMPUTED_NODES} | {
        name: line.intercept + line.slope * COMPUTED_NODES for name, line in lines.items()
    }


def main() -> None:
    """Measure the stages until the machine is full, and print the report."""
    if missing := [name for name in ("prometheus", "victoria-metrics", "vmalert") if not shutil.which(name)]:
        raise SystemExit(f"not installed: {', '.join(missing)} (scripts/install-system-packages)")
    node_counts = [int(argument) for argument in sys.argv[1:] if argument.isdigit()] or NODES
    pages = record_pages()
    stages: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        fleet = Fleet(stack, pages)
        for nodes in node_counts:
            stages.append(fleet.stage(nodes))
            print(json.dumps(stages[-1]), file=sys.stderr)
            # The machine is full if nodes were not scraped, or if the next stage would not fit into memory.
            memory_bytes = sum(process.memory_info().rss for process in fleet.engines.values())
            if stages[-1]["nodes scraped"] < nodes or memory_bytes * 2 > psutil.virtual_memory().available:
                break
    records_per_node = stages[0]["records"] / stages[0]["nodes"]
    complete_stages = [
        stage
        for stage in stages
        if stage["nodes scraped"] == stage["nodes"]
        and stage["records"] > 0.9 * records_per_node * stage["nodes"]
    ]
    series = {
        "first of a run": PageTemplate(pages, has_rank_zero=True).series_count,
        "others": PageTemplate(pages, has_rank_zero=False).series_count,
    }
    result = {
        "series of a node": series,
        "measured": stages,
        "computed": extrapolate(complete_stages) if len(complete_stages) > 1 else {},
    }
    print(json.dumps({**describe_run(), **result}, indent=1))


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["rank"]:
            be_rank()
        case ["play"]:
            play(Path(sys.argv[2]))
        case _:
            main()
