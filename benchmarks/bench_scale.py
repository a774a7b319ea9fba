"""Measures how Prometheus, with our rules, and VictoriaMetrics behind it fare with ever more nodes of eight GPUs.

A node is the page of the real sidecar with a real job of eight ranks on the described machine h100, taken twice; what
moved between the two moves on, what did not stays, under other names of run, rank and GPU. One process plays as many
nodes as are asked for, eight to a run. The real Prometheus scrapes them every 15 s, evaluates deploy/prometheus/rules
and writes everything on to the real VictoriaMetrics (Debian's packages). After each number of nodes: series, samples
a second, memory, processor time, time of the rules, bandwidth, and how long the queries of dashboards take. A line
through the measured points says what 1,000 and 10,000 nodes would take; that part is computed, and marked so. Rules
over hours see the minutes that the run lasts. The engines run niced; of what is timed the best of several counts, and
a number of nodes of which not all were scraped is told, but is not part of the line. Prints one JSON document.

    python benchmarks/bench_scale.py [--quick] [--nodes 50,100,200,300] [--seconds 55]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import math
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
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_sidecar import child, feed_directory
from report import report
from typing_extensions import Self

REPOSITORY = Path(__file__).resolve().parent.parent
RULES = REPOSITORY / "deploy/prometheus/rules"
DASHBOARDS = REPOSITORY / "dashboards/json"
RANKS = 8
NODES_OF_A_RUN = 8
SCRAPE_SECONDS = 15
APART_SECONDS = 10.0
QUERY_TRIES = 3
MEMORY_SHARE = 0.5  # of what is free; a stage that would need more is not begun
ASKED = (1_000, 10_000)

PER_NODE = re.compile(
    r"training_(energy|carbon|cost|embodied|water|productive_energy|wasted_energy|process|rank)"
)
"""Families without a rank that each node has; all others come from the run's first node."""
LINE = re.compile(r"^(?P<series>[^ #]\S*(?:\{.*\})?) (?P<value>\S+)$", re.MULTILINE)


def be_rank() -> None:
    """One rank of the job: trains, in time and in numbers only, until it is killed."""
    from exporter import training

    rank = int(os.environ["RANK"])
    training.describe(
        model="bench",
        precision="bf16",
        flops_method="6N",
        flops_per_token=6e9,
        step_target=10**6,
        world_size=RANKS,
    )
    print("ready", flush=True)
    with training.application(), training.training_loop(train_iterations_start=0):
        for step in range(1, sys.maxsize):
            with training.data_loading():
                time.sleep(0.02)
            with training.training_iteration():
                with training.model_forward():
                    time.sleep(0.1)
                with training.model_backward():
                    time.sleep(0.2 + 0.01 * rank)
                with training.optimizer_update():
                    time.sleep(0.02)
                training.record(
                    loss=3 / step + 2, grad_norm=1.0, learning_rate=1e-4, samples=8, tokens=16_384
                )


def pages() -> tuple[str, str]:
    """The page of one node, twice."""
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(feed_directory())
        options = directory / "config.yaml"
        options.write_text(
            "energy: {pue: 1.2, carbon_intensity: 300, currency: EUR, electricity_price: 0.3, whole_machine: true,"
            f" lock_dir: {directory}}}\n"
        )
        flags = ["--web.listen-address=127.0.0.1:0", f"--feed.dir={directory}", "--gpu.replay=h100"]
        command = [sys.executable, "-m", "exporter", *flags, f"--config.file={options}"]
        _, url = stack.enter_context(child(command, until=r"http://127\.0\.0\.1:\d+"))
        for rank in range(RANKS):
            own = {"EXPORTER_FEED_DIR": str(directory), "EXPORTER_RUN": "bench", "RANK": str(rank)}
            stack.enter_context(child([sys.executable, __file__, "rank"], until="ready", environment=own))
        time.sleep(15)
        first = ask(f"{url}/metrics")
        time.sleep(APART_SECONDS)
        return first, ask(f"{url}/metrics")


@dataclass(frozen=True, slots=True)
class Moving:
    """A series that changes: where it was, how much a second, and whether it may only grow."""

    series: str
    value: float
    slope: float
    counts: bool


class Node:
    """One target: the text that stays, and the series that move.

    Args:
        number: Of the node.
        texts: The two pages.
    """

    def __init__(self, number: int, texts: tuple[str, str]) -> None:
        before = {found["series"]: float(found["value"]) for found in LINE.finditer(texts[0])}
        types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", texts[1], re.MULTILINE))
        now = time.time()
        self._moving: list[Moving] = []
        still = []
        for line in texts[1].splitlines():
            found = LINE.match(line)
            if found is None:
                still.append(line)
                continue
            series, value = found["series"], float(found["value"])
            name = re.split(r"[{ ]", series)[0]
            if (
                'run="' in series
                and 'rank="' not in series
                and number % NODES_OF_A_RUN
                and not PER_NODE.match(name)
            ):
                continue
            renamed = self._renamed(series, number)
            slope = (value - before.get(series, value)) / APART_SECONDS
            if name.endswith("_timestamp_seconds") and now - value < 2 * APART_SECONDS + SCRAPE_SECONDS:
                slope = 1.0
            if slope == 0:
                still.append(f"{renamed} {value:g}")
                continue
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            counts = types.get(name, types.get(family)) in {"counter", "histogram", "summary"} or slope == 1.0
            self._moving.append(Moving(renamed, value, slope, counts))
        self._still = "\n".join(still)
        self._phase = number * 0.37
        self._pace = 1 + 0.05 * math.sin(number)

    @staticmethod
    def _renamed(series: str, number: int) -> str:
        run, place = divmod(number, NODES_OF_A_RUN)
        series = series.replace('run="bench"', f'run="run-{run}"')
        series = re.sub(r'rank="(\d+)"', lambda found: f'rank="{int(found[1]) + place * RANKS}"', series)
        return re.sub(r"GPU-[0-9a-f]{8}-", f"GPU-{number:08x}-", series)

    def page(self, elapsed: float) -> str:
        """What it says after so many seconds."""
        swing = 1 + 0.05 * math.sin(elapsed / 7 + self._phase)
        lines = [
            f"{each.series} {each.value + each.slope * elapsed * self._pace!r}"
            if each.counts
            else f"{each.series} {each.value * swing!r}"
            for each in self._moving
        ]
        return "\n".join([self._still, *lines, ""])

    @property
    def series(self) -> int:
        """How many it has."""
        return len(self._moving) + sum(not line.startswith("#") for line in self._still.splitlines())


def be_fleet(directory: Path) -> None:
    """Play nodes at /<number> until killed."""
    texts = (directory / "first").read_text(), (directory / "second").read_text()
    nodes: dict[int, Node] = {}
    began = time.monotonic()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                number = int(head.split(b" ", 2)[1].strip(b"/"))
                if number not in nodes:
                    nodes[number] = Node(number, texts)
                packer = zlib.compressobj(1, wbits=31)
                body = packer.compress(nodes[number].page(time.monotonic() - began).encode()) + packer.flush()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
                    b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
                )
                writer.write(body)
                await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()

    asyncio.run(serve())


def ask(url: str) -> str:
    """The body of an answer."""
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        body: bytes = answer.read()
        if answer.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
    return body.decode()


def own_numbers(url: str) -> dict[str, float]:
    """An engine's page about itself, summed by name."""
    numbers: dict[str, float] = {}
    for found in LINE.finditer(ask(f"{url}/metrics")):
        name = found["series"].partition("{")[0]
        with contextlib.suppress(ValueError):
            numbers[name] = numbers.get(name, 0.0) + float(found["value"])
    return numbers


def port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def engine(command: Sequence[str], url: str, log: Path) -> Iterator[str]:
    """Run one of the engines, kindly, while the block lasts."""
    with log.open("w") as errors:
        process = subprocess.Popen(["nice", *command], stdout=errors, stderr=errors)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                ask(f"{url}/metrics")
                break
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def expressions(dashboard: str, run: str) -> list[tuple[str, bool]]:
    """The queries of a dashboard as Grafana would send them, and whether each is an instant one."""
    values = {"run": run, "__rate_interval": "1m", "__interval": "15s", "__range": "1h"}
    found = []

    def walk(panels: list[dict[str, Any]]) -> None:
        for panel in panels:
            walk(panel.get("panels", []))
            for target in panel.get("targets", []):
                text = re.sub(
                    r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))",
                    lambda name: values.get(name[1] or name[2], ".+"),
                    target["expr"],
                )
                found.append((text, bool(target.get("instant"))))

    walk(json.loads((DASHBOARDS / f"{dashboard}.json").read_text())["panels"])
    return found


def free_bytes() -> float:
    """Memory that could be had."""
    found = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    assert found is not None
    return float(found[1]) * 1024


def best_of(address: str) -> float:
    """The shortest of several askings, since others use the machine too; infinite when it is refused."""
    best = math.inf
    for _ in range(QUERY_TRIES):
        began = time.perf_counter()
        try:
            ask(address)
        except urllib.error.HTTPError:
            return math.inf
        best = min(best, time.perf_counter() - began)
    return best


class Work:
    """Processor time of an engine while the block lasts, beyond what it takes anyway: others' load does not count.

    Args:
        url: Of the engine.
        cores: What it takes anyway.
    """

    def __init__(self, url: str, cores: float) -> None:
        self._url = url
        self._cores = cores
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._cpu = own_numbers(self._url)["process_cpu_seconds_total"]
        self._began = time.monotonic()
        return self

    def __exit__(self, *raised: object) -> None:
        cpu = own_numbers(self._url)["process_cpu_seconds_total"] - self._cpu
        self.seconds = round(max(cpu - self._cores * (time.monotonic() - self._began), 0.0) / QUERY_TRIES, 3)


def query_times(url: str, dashboard: str, run: str, cores: float) -> dict[str, float]:
    """What a dashboard's queries over an hour take, one after the other, and the slowest."""
    with Work(url, cores) as work:
        seconds = [best_of(address) for address in addresses(url, dashboard, run)]
    answered = [each for each in seconds if each < math.inf]
    told: dict[str, float] = {
        "queries": len(seconds),
        "refused": len(seconds) - len(answered),
        "cpu_seconds": work.seconds,
        "wall_seconds": round(sum(answered), 3),
        "slowest_seconds": round(max(answered), 3),
    }
    return told


def addresses(url: str, dashboard: str, run: str) -> Iterator[str]:
    """Where Grafana would ask."""
    end = time.time()
    for text, instant in expressions(dashboard, run):
        asked = {"query": text, "time": str(end)}
        if not instant:
            asked = {"query": text, "start": str(end - 3600), "end": str(end), "step": "15"}
        yield f"{url}/api/v1/query{'' if instant else '_range'}?{urllib.parse.urlencode(asked)}"


def rule_times(url: str, cores: float) -> dict[str, float | str]:
    """What all rules take, asked one after the other as Prometheus evaluates them, and which takes longest."""
    with Work(url, cores) as work:
        seconds = rule_seconds(url)
    slowest = max(seconds, key=lambda name: seconds[name])
    return {
        "rules": len(seconds),
        "cpu_seconds": work.seconds,
        "wall_seconds": round(sum(seconds.values()), 3),
        "slowest": slowest,
        "slowest_seconds": round(seconds[slowest], 3),
    }


def rule_seconds(url: str) -> dict[str, float]:
    """Wall time of each rule."""
    groups = json.loads(ask(f"{url}/api/v1/rules"))["data"]["groups"]
    return {
        rule["name"]: best_of(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': rule['query']})}")
        for group in groups
        for rule in group["rules"]
    }


def measured(prometheus: str, store: str, seconds: float) -> dict[str, float]:
    """Wait, and say what the engines cost meanwhile, from what they tell of themselves."""
    before = own_numbers(prometheus), own_numbers(store)
    began = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    after = own_numbers(prometheus), own_numbers(store)

    def rate(name: str, page: int = 0) -> float:
        return (after[page].get(name, 0.0) - before[page].get(name, 0.0)) / passed

    return {
        "series": after[0]["prometheus_tsdb_head_series"],
        "samples_per_second": round(rate("prometheus_tsdb_head_samples_appended_total"), 1),
        "prometheus_mib": round(after[0]["process_resident_memory_bytes"] / 2**20, 1),
        "prometheus_cores": round(rate("process_cpu_seconds_total"), 3),
        "remote_write_bytes_per_second": round(rate("prometheus_remote_storage_bytes_total"), 1),
        "victoriametrics_mib": round(after[1]["process_resident_memory_bytes"] / 2**20, 1),
        "victoriametrics_cores": round(rate("process_cpu_seconds_total", 1), 3),
        "victoriametrics_rows_per_second": round(rate("vm_rows_inserted_total", 1), 1),
    }


def lines(stages: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What more nodes would take, by a line through the points of each number; dashboards grow with runs, not here."""
    if len(stages) < 3:
        return {}  # a line through two points is no fit
    nodes = [float(stage["nodes"]) for stage in stages]
    asked: dict[str, dict[str, float]] = {f"{number} nodes": {} for number in ASKED}
    for name in stages[0]["engines"]:
        fit = statistics.linear_regression(nodes, [stage["engines"][name] for stage in stages])
        for number in ASKED:
            asked[f"{number} nodes"][name] = round(fit.intercept + fit.slope * number, 2)
    fit = statistics.linear_regression(nodes, [stage["rules"]["cpu_seconds"] for stage in stages])
    for number in ASKED:
        asked[f"{number} nodes"]["cpu_seconds of all rules"] = round(fit.intercept + fit.slope * number, 3)
    return asked


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--nodes", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    numbers = [
        int(each) for each in (options.nodes or ("2,4" if options.quick else "50,100,200,300")).split(",")
    ]
    seconds = options.seconds or (SCRAPE_SECONDS + 5 if options.quick else 55)
    for program in ("prometheus", "victoria-metrics"):
        if shutil.which(program) is None:
            report({"skipped": f"{program} is not installed: apt-get install {program}"})
            return
    first, second = pages()
    stages: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (work / "first").write_text(first)
        (work / "second").write_text(second)
        command = ["nice", sys.executable, __file__, "fleet", str(work)]
        _, fleet = stack.enter_context(child(command, until=r"http://127\.0\.0\.1:\d+"))
        store = f"127.0.0.1:{port()}"
        stack.enter_context(
            engine(
                ["victoria-metrics", f"-storageDataPath={work / 'store'}", f"-httpListenAddr={store}"],
                f"http://{store}",
                work / "store.log",
            )
        )
        (work / "prometheus.yml").write_text(
            f"global: {{scrape_interval: {SCRAPE_SECONDS}s, evaluation_interval: 30s}}\n"
            f"rule_files: ['{RULES}/*.yml']\n"
            "scrape_configs:\n"
            "- job_name: training\n"
            f"  file_sd_configs: [{{files: ['{work}/targets.json'], refresh_interval: 1s}}]\n"
            "  relabel_configs:\n"
            "  - {source_labels: [__param_node], regex: (.*), replacement: 'node-$1:20909', target_label: instance}\n"
            "  - {source_labels: [__param_node], regex: (.*), replacement: '/$1', target_label: __metrics_path__}\n"
            "  - {regex: __param_node, action: labeldrop}\n"
            f"remote_write: [{{url: 'http://{store}/api/v1/write'}}]\n"
        )
        (work / "targets.json").write_text("[]")
        listen = f"127.0.0.1:{port()}"
        flags = [f"--config.file={work / 'prometheus.yml'}", f"--storage.tsdb.path={work / 'data'}"]
        prometheus = stack.enter_context(
            engine(["prometheus", *flags, f"--web.listen-address={listen}"], f"http://{listen}", work / "log")
        )
        for count in numbers:
            if stages:
                of_one = stages[-1]["engines"]["prometheus_mib"] * 2**20 / stages[-1]["nodes"]
                if of_one * (count - stages[-1]["nodes"]) > MEMORY_SHARE * free_bytes():
                    break
            address = fleet.removeprefix("http://")
            targets = [{"targets": [address], "labels": {"__param_node": str(each)}} for each in range(count)]
            (work / "targets.new").write_text(json.dumps(targets))
            (work / "targets.new").replace(work / "targets.json")
            time.sleep(SCRAPE_SECONDS + 2)  # every target has been scraped once: what follows is steady
            engines = measured(prometheus, f"http://{store}", max(seconds - SCRAPE_SECONDS - 2, 5))
            up = json.loads(ask(f"{prometheus}/api/v1/query?query=sum(up)"))["data"]["result"]
            runs = {"training-fleet": ".+", "training-ranks": "run-0", "training-run": "run-0"}
            cores = engines["prometheus_cores"]
            boards = {name: query_times(prometheus, name, run, cores) for name, run in runs.items()}
            scraped = int(float(up[0]["value"][1]))
            load = os.getloadavg()[0]  # of a machine that others may be using
            stages.append(
                {
                    "nodes": count,
                    "scraped": scraped,
                    "load": load,
                    "engines": engines,
                    "rules": rule_times(prometheus, cores),
                    "dashboards": boards,
                }
            )
            if scraped < count:
                break
    texts = first, second
    report(
        {
            "series of a node": {"first of its run": Node(0, texts).series, "others": Node(1, texts).series},
            "scrape interval": SCRAPE_SECONDS,
            "measured": stages,
            "extrapolated": lines([stage for stage in stages if stage["scraped"] == stage["nodes"]]),
        }
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        be_rank()
    elif sys.argv[1:2] == ["fleet"]:
        be_fleet(Path(sys.argv[2]))
    else:
        main()
