"""All dashboard queries on a real Prometheus server that scraped real exporters and jobs.

The scenario runs once: six nodes and two runs with a pause, a straggler, a crash, heat, a lost GPU and an
exporter that is down. Each query returns data or is listed in WITHOUT_DATA with the reason.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from dashboards_support import MODELS, ScenarioPrometheus, fill_variables, panel_queries
from panel_support import query_of_column
from prometheus_support import Prometheus, fetch
from run_support import web_server
from waiting import wait_until

from dashboards.scenario import Timeline
from dashboards.scenario.cluster import FAULTY_RUN, Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="install Prometheus: apt-get install prometheus"
    ),
]

SCENARIO_SECONDS = 80.0

NO_HARDWARE = "the tests run on virtual machines, which have no such hardware"
NO_MOUNT = "the test machine mounts neither NFS nor Lustre"
USUAL_LOSSES = "a loss below 15 % of the time has no start"
TOKENS = "the job of the scenario counts tokens, whose curve is that of the samples"
THROTTLED = "heat throttles a GPU of the node"
NO_LONG_PHASE = "no rank stays long in a phase"
NO_TORCH = "the scenario's job waits instead of computing, without torch"
NOT_RECORDED = "the job of the scenario does not record it"
REPLAYED = "a replayed GPU has replayed processes, which are not the ranks of the job"
NO_LIMIT = "the tests do not run in a container with this limit"
NO_MIG = "the GPUs of node-2 are not in MIG mode; a separate test covers node-4"
NOT_OVERDUE = "a failed save is followed by a save before three intervals"
NODE_IS_KNOWN = "the exporter of the node is up"
NO_OUTAGE = "every run has samples at the end of the scenario"
NOT_PER_CORE = "the option per_core is off"
TOO_SHORT = "the query needs data from a longer time than the scenario"

MACHINE_DASHBOARD = "training-node"
"""Dashboard of the test machine; families of hardware that this machine does not have may be absent."""

WITHOUT_DATA: dict[tuple[str, str], dict[str, str]] = {
    ("training-energy", USUAL_LOSSES): {"Losses now": "FG"},  # columns Since and Lost
    ("training-energy", TOO_SHORT): {
        "Joules per step and GPU": "A",
        "Joules per token": "A",
        "Source of each number": "C",  # column Counter / power
    },
    ("training-energy", NO_OUTAGE): {"Losses now": "E"},  # column Unknown/h
    ("training-gpus", THROTTLED): {"Throttled, 2 min": "B"},
    ("training-gpus", NODE_IS_KNOWN): {
        "GPUs slowed by heat or the power brake, by reason": "B",
        "GPUs at another limit of the clock, by reason": "B",
    },
    ("training-gpus", REPLAYED): {"GPU memory by rank": "A"},
    ("training-gpus", NO_MIG): {"SM activity of instances (MIG)": "A", "Memory of instances (MIG)": "A"},
    ("training-node", NO_LIMIT): {
        "CPU of the container, and its limit": "B",
        "Memory of the container, and its limit": "CD",
    },
    ("training-node", NO_HARDWARE): {"RDMA": "AB"},
    ("training-node", NOT_PER_CORE): {"Busiest CPUs": "A"},
    ("training-node", NO_MOUNT): {"NFS and Lustre latency": "A"},
    ("training-run", NOT_RECORDED): {"Learning rate, loss scale": "B"},
    ("training-run", NOT_OVERDUE): {"Work at risk or lost": "B"},
    ("training-ranks", NO_TORCH): {"All ranks, the worst first": "K"},  # column GPU idle
    ("training-ranks", NO_LONG_PHASE): {"All ranks, the worst first": "C"},  # column In phase since
    ("training-run", NO_TORCH): {
        "GPU memory allocated by PyTorch": "A",
        "Allocation retries and failures": "A",
        "GPU time of a step": "AB",
    },
    ("training-run", TOKENS): {"Throughput": "B"},
    ("training-run", TOO_SHORT): {"Step time": "B"},
}
"""Queries that may return no data: (dashboard, reason) → panel → reference ids, each a letter."""


def queries_without_data() -> set[tuple[str, str, str]]:
    """Return (dashboard, panel, reference id) of each query that may return no data."""
    return {
        (uid, panel, ref_id)
        for (uid, _), panels in WITHOUT_DATA.items()
        for panel, ref_ids in panels.items()
        for ref_id in ref_ids
    }


ALL_TARGETS_UP = "min(min_over_time(up[8s]))"
MOMENTARY_PANELS = {
    "Loss by step",  # the last row is not complete
    "Losses now",  # a loss close to zero is a row, or none
    "Losses now, by cause",
    "GPU power now",
    "Cost and loss of each run",  # with the current power
    "Energy and cost of each node, in this time range",  # with the current power
    "What is wrong",  # a text contains the value
    "State",  # the text contains the slowest rank
    "Time by phase",  # the rest of the phases is close to zero
    "Lost: slowest rank or no step",
    "Exporters, drivers and GPUs with a failure",  # a start of seconds may lie between two scrapes
    "SM active",
    "SM activity, used GPUs",
    "Ranks by phase",
    "Slowest rank",
    "Verdict of each run with a problem",  # a loss close to the threshold changes the verdict between two evaluations
    "Waiting for data, last 2 min",
    "Swap and page faults",  # single page faults of the test machine
    "Ethernet",  # traffic of other programs on the test machine
}
"""Panels whose values change every second, so that two servers with different scrape times disagree."""
AGE = re.compile(r"^time\(\) -|timestamp\(|:age_seconds")
MISSED_SCRAPES = (0.8, 0.84)
"""Start and end, as fractions of the scenario, of the failed scrapes of one server; all other faults precede these scrapes."""


def refuse_during(start: float, end: float) -> Callable[[str, str, bytes], tuple[int, bytes]]:
    """Return the handler of an HTTP proxy that answers with status 503 during an interval in Unix seconds."""

    def respond(_method: str, path: str, _body: bytes) -> tuple[int, bytes]:
        if start <= time.time() < end:
            return 503, b""
        page = fetch(path)
        return (502, b"") if page is None else (200, page.encode())

    return respond


def with_a_missed_scrape(job: dict[str, Any], proxy: str) -> list[dict[str, Any]]:
    return [job | {"proxy_url": proxy}]


def with_two_targets_per_node(job: dict[str, Any], proxy: str) -> list[dict[str, Any]]:
    """Return scrape configurations for an exporter with the node's GPUs and a sidecar without GPUs, as in deploy/kubernetes."""
    del proxy

    def target(pod: str, dropped: str) -> dict[str, Any]:
        relabeled = [{"target_label": "job", "replacement": "training"}]
        relabeled += [{"target_label": "pod", "replacement": pod}]
        drop = {"source_labels": ["__name__"], "regex": dropped, "action": "drop"}
        return job | {"job_name": pod, "relabel_configs": relabeled, "metric_relabel_configs": [drop]}

    energy = "exporter_energy_.*|host_(cpu|dram)_(energy|power)_.*"
    return [target("node", "training_.*"), target("sidecar", f"gpu_.*|exporter_nvml_.*|{energy}")]


SCRAPE_CHANGES = (with_a_missed_scrape, with_two_targets_per_node)


@dataclass
class FinishedScenario:
    """Scenario after its end, with additional Prometheus servers that had other scrape configurations."""

    cluster: Cluster
    other_servers: dict[str, Prometheus] = field(default_factory=dict)
    end: float = 0.0

    def wait_for_scrapes(self) -> None:
        """Set the end of the time range to a time at which each server has scraped all targets for 8 s. Fail the tests at the limit."""

        def are_all_targets_up() -> bool:
            self.end = time.time() - 1
            results = [self.cluster.query(ALL_TARGETS_UP, time=str(self.end))]
            results += [
                other.query(ALL_TARGETS_UP, time_seconds=self.end) for other in self.other_servers.values()
            ]
            return all(result and result[0]["value"][1] == "1" for result in results)

        wait_until(are_all_targets_up)

    def prometheus(self, url: str, seconds_ago: int = 0) -> ScenarioPrometheus:
        """Return a client whose time range ends some seconds before the end of the scenario."""
        return ScenarioPrometheus(url, self.cluster.start_time, self.end - seconds_ago)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedScenario]:
    directory = tmp_path_factory.mktemp("scenario")
    with contextlib.ExitStack() as stack:
        running_cluster = stack.enter_context(Cluster(directory, Timeline(duration_seconds=SCENARIO_SECONDS)))
        finished_scenario = FinishedScenario(running_cluster)
        missed_interval = (
            running_cluster.start_time + running_cluster.timeline.to_seconds(fraction)
            for fraction in MISSED_SCRAPES
        )
        proxy = stack.enter_context(web_server(refuse_during(*missed_interval)))
        for scrape_change in SCRAPE_CHANGES:
            other = Prometheus(directory / scrape_change.__name__, {})
            configuration = yaml.safe_load((directory / "prometheus/prometheus.yaml").read_text())
            (job,) = configuration["scrape_configs"]
            configuration["scrape_configs"] = scrape_change(job, proxy)
            (directory / scrape_change.__name__ / "prometheus.yml").write_text(yaml.safe_dump(configuration))
            finished_scenario.other_servers[scrape_change.__name__] = stack.enter_context(other)
        running_cluster.wait_until_end()
        time.sleep(2)  # for the last scrapes and the rules that read them
        finished_scenario.wait_for_scrapes()
        # Jobs, exporters, scrapes and rules would otherwise load both cores during the queries, whose times have passed.
        running_cluster.stop_collection()
        for other_server in finished_scenario.other_servers.values():
            other_server.stop_collection()
        yield finished_scenario


@pytest.fixture(scope="module")
def cluster(scenario: FinishedScenario) -> Cluster:
    return scenario.cluster


@pytest.fixture(scope="module")
def prometheus(scenario: FinishedScenario) -> ScenarioPrometheus:
    return scenario.prometheus(scenario.cluster.url)


SELECTED_VALUES = {
    "training-run": {"run": FAULTY_RUN},
    "training-ranks": {"run": FAULTY_RUN, "rank": "3"},
    "training-gpus": {"node": "node-2"},
    "training-node": {"node": "node-1"},
    "training-fleet": {"perf_tag": "llama-7b-bf16"},
}


@pytest.mark.parametrize("uid", sorted(MODELS))
def test_every_query_returns_data_or_is_listed(uid: str, prometheus: ScenarioPrometheus) -> None:
    values = prometheus.variable_values(MODELS[uid]) | SELECTED_VALUES.get(uid, {})

    empty = [
        f"{query}: {fill_variables(query.expression, values)}"
        for query in panel_queries(uid)
        if (uid, query.panel, query.ref_id) not in queries_without_data()
        and not prometheus.series(query, values)
        and not (uid == MACHINE_DASHBOARD and prometheus.uses_absent_family(query))
    ]

    assert not empty, "\n".join(empty)


@pytest.mark.parametrize("uid", sorted(MODELS))
@pytest.mark.parametrize("scrape_change", SCRAPE_CHANGES, ids=lambda change: change.__name__)
def test_a_missed_scrape_or_a_second_target_per_node_doubles_no_total_and_removes_no_series(
    uid: str, scrape_change: Any, scenario: FinishedScenario, prometheus: ScenarioPrometheus
) -> None:
    urls = scenario.cluster.url, scenario.other_servers[scrape_change.__name__].url
    values = prometheus.variable_values(MODELS[uid]) | SELECTED_VALUES.get(uid, {})
    differences = {
        query: ""
        for query in panel_queries(uid)
        if query.panel not in MOMENTARY_PANELS and not AGE.search(query.expression)
    }
    for seconds_ago in (0, 2, 4, 6, 8, 12, 16, 20):  # a doubled series is doubled at each of these times
        for query in list(differences):
            expected, actual = (
                scenario.prometheus(url, seconds_ago).sums_by_labels(query, values) for url in urls
            )
            ratio = (abs(sum(actual.values())) + 0.05) / (abs(sum(expected.values())) + 0.05)
            differences[query] = f"{query}: {expected} became {actual}"
            # Of GPUs with nearly equal power, topk selects different ones in each server.
            has_same_series = expected.keys() == actual.keys() or (
                "topk" in query.expression and len(expected) == len(actual)
            )
            # A doubled total has a ratio of 2. The servers scrape at different times, so that equal totals have other ratios.
            if has_same_series and 0.5 < ratio < 1.8:
                del differences[query]

    assert not differences, "\n".join(differences.values())


def test_mig_panels_show_divided_gpus(prometheus: ScenarioPrometheus) -> None:
    uid = "training-gpus"
    values = prometheus.variable_values(MODELS[uid]) | {"node": "node-4"}

    series = {
        query.panel: prometheus.series(query, values)
        for query in panel_queries(uid)
        if "(MIG)" in query.panel
    }

    assert series["Memory of instances (MIG)"]
    # The divided GPUs are A100s, which have no performance counters.
    assert not series["SM activity of instances (MIG)"]


def test_an_exporter_that_is_down_is_a_gap_and_not_a_flat_line(cluster: Cluster) -> None:
    timeline = cluster.timeline
    outage_middle = cluster.start_time + timeline.to_seconds(sum(timeline.exporter_down_range) / 2)

    assert cluster.query('up{instance="node-3"} == 0', time=str(outage_middle))
    assert not cluster.query('host_load1{instance="node-3"}', time=str(outage_middle))
    assert cluster.query(
        'host_load1{instance="node-3"}', time=str(cluster.start_time + timeline.duration_seconds)
    )


def test_the_straggler_is_named_with_its_machine(cluster: Cluster) -> None:
    timeline = cluster.timeline
    straggler_time = cluster.start_time + timeline.to_seconds(timeline.crash_time) - 2
    values = {"cluster": ".*", "run": FAULTY_RUN, "rank": "3"}
    table = "All ranks, the worst first"
    expressions = {
        query.ref_id: fill_variables(
            query.expression, values, {"__rate_interval": "15s", "__range": "30s", "__interval": "2s"}
        )
        for query in panel_queries("training-ranks")
        if query.panel == table
    }

    def series_by_rank(ref_id: str, offset_seconds: float = 0.0) -> dict[str, dict[str, Any]]:
        result = cluster.query(expressions[ref_id], time=str(straggler_time + offset_seconds))
        return {series["metric"]["rank"]: series for series in result}

    def column_by_rank(column: str, offset_seconds: float = 0.0) -> dict[str, float]:
        ref_id = query_of_column("training-ranks", table, column)
        return {rank: float(row["value"][1]) for rank, row in series_by_rank(ref_id, offset_seconds).items()}

    straggler = series_by_rank("A")["3"][
        "metric"
    ]  # query A has the labels of each row, with its node and GPU
    speeds = column_by_rank("Speed")
    # The faults of a replayed GPU are relative to the start of its exporter, which depends on the load of the test machine.
    throttled_ratios = [column_by_rank("Throttled, 2 min", seconds) for seconds in range(-20, 40, 2)]
    assert min(speeds, key=lambda rank: speeds[rank]) == "3"
    assert speeds["3"] < 0.8
    assert max(ratios["3"] for ratios in throttled_ratios if "3" in ratios) > 0.05
    assert max(ratios["0"] for ratios in throttled_ratios if "0" in ratios) < 0.05
    assert straggler["instance"] == "node-2"
    assert straggler["gpu"] == "1"


def test_the_list_names_queries_that_exist() -> None:
    existing_queries = {(uid, query.panel, query.ref_id) for uid in MODELS for query in panel_queries(uid)}

    assert queries_without_data() <= existing_queries
