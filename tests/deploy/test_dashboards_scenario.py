"""Every query of every dashboard against the real Prometheus, which has scraped real exporters and a real job.

The scenario runs once: six machines, two runs, a pause, a straggler, a crash, heat, a lost GPU, a dead exporter.
A query returns data, or is listed below with the reason.
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
from dashboards_support import MODELS, Served, asked, filled
from prometheus_support import Prometheus, fetch
from run_support import web_server

from dashboards.scenario import Timeline
from dashboards.scenario.cluster import RUN, Cluster

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="install Prometheus: apt-get install prometheus"
    ),
]

SECONDS = 80.0

VIRTUAL = "virtual machines, where these tests run, have no such hardware"
NO_MOUNT = "neither NFS nor Lustre is mounted where tests run"
NO_TORCH = "the scenario's job waits instead of computing, without torch"
NOT_TOLD = "the job of the scenario does not record it"
REPLAYED = "the processes of a described GPU are described too, and are none of the job's"
NO_LIMIT = "only in a container with such a limit"
WHOLE = "MIG; node-4 has a separate test"
LATER = "needs a counter that was watched for longer than the scenario lasts"

OF_THE_MACHINE = "training-node"
"""The dashboard of this machine: families that the machine lacks can be absent."""

WITHOUT_DATA: dict[tuple[str, str], dict[str, str]] = {
    ("training-energy", VIRTUAL): {"Power of nodes": "B"},
    ("training-energy", LATER): {"Source of each number": "B"},
    ("training-gpus", REPLAYED): {"GPU memory by rank": "A"},
    ("training-gpus", WHOLE): {"SM activity of instances (MIG)": "A", "Memory of instances (MIG)": "A"},
    ("training-node", NO_LIMIT): {
        "CPU of the container, and its limit": "B",
        "Memory of the container, and its limit": "CD",
    },
    ("training-node", VIRTUAL): {"RDMA": "AB", "Network errors": "DE"},
    ("training-node", NO_MOUNT): {"NFS and Lustre latency": "AB"},
    ("training-run", NOT_TOLD): {"Learning rate, loss scale": "B"},
    ("training-ranks", NO_TORCH): {"All ranks, the slowest first": "G"},
    ("training-run", NO_TORCH): {
        "Memory of tensors": "A",
        "Allocation retries and failures": "AB",
        "GPU time of a step": "AB",
    },
    ("training-run", LATER): {"Step time": "B"},
}
"""(dashboard, reason) → panel → letters of the queries that can be empty."""


def excused() -> set[tuple[str, str, str]]:
    """(dashboard, panel, letter) of every query that may be empty."""
    return {
        (uid, panel, letter)
        for (uid, _), panels in WITHOUT_DATA.items()
        for panel, letters in panels.items()
        for letter in letters
    }


SCRAPED = "min(min_over_time(up[8s]))"
OF_A_MOMENT = {
    "Loss by step",  # its last row
    "Time lost to the slowest rank",
    "Mean SM activity",
    "Ranks by phase",
    "Slowest rank",
    "Waiting for data",
    "Waiting for data, slowest rank",
    "Swap and page faults",  # this machine has one or two
}
"""Panels about the very second; two servers scrape in different ones."""
AGE = re.compile(r"^time\(\) -|timestamp\(|:age_seconds")
MISSED = (0.8, 0.84)
"""Time without successful scrapes of one Prometheus server; all faults precede it."""


def refusing(begin: float, end: float) -> Callable[[str, str, bytes], tuple[int, bytes]]:
    """Proxy between Prometheus and its targets that refuses connections during an interval of Unix seconds."""

    def answer(_method: str, path: str, _body: bytes) -> tuple[int, bytes]:
        if begin <= time.time() < end:
            return 503, b""
        found = fetch(path)
        return (502, b"") if found is None else (200, found.encode())

    return answer


def over_a_missed_scrape(job: dict[str, Any], proxy: str) -> list[dict[str, Any]]:
    return [job | {"proxy_url": proxy}]


def with_two_targets_a_node(job: dict[str, Any], proxy: str) -> list[dict[str, Any]]:
    """The exporter of a node with its GPUs, and the sidecar of a job without GPUs, as in deploy/kubernetes."""
    del proxy

    def only(pod: str, dropped: str) -> dict[str, Any]:
        relabelled = [{"target_label": "job", "replacement": "training"}]
        relabelled += [{"target_label": "pod", "replacement": pod}]
        drop = {"source_labels": ["__name__"], "regex": dropped, "action": "drop"}
        return job | {"job_name": pod, "relabel_configs": relabelled, "metric_relabel_configs": [drop]}

    energy = "exporter_energy_.*|host_(cpu|dram)_(energy|power)_.*"
    return [only("node", "training_.*"), only("sidecar", f"gpu_.*|exporter_nvml_.*|{energy}")]


SCRAPES = (over_a_missed_scrape, with_two_targets_a_node)


@dataclass
class Played:
    """The finished scenario, with additional Prometheus servers of other configurations."""

    cluster: Cluster
    others: dict[str, Prometheus] = field(default_factory=dict)
    end: float = 0.0

    def settle(self) -> None:
        """End the scenario once every server has scraped every target for some time."""
        for _ in range(60):
            self.end = time.time() - 1
            found = [self.cluster.query(SCRAPED, time=str(self.end))]
            found += [other.query(SCRAPED, at=self.end) for other in self.others.values()]
            if all(series["value"][1] == "1" for each in found for series in each):
                return
            time.sleep(1)

    def served(self, url: str, ago: int = 0) -> Served:
        return Served(url, self.cluster.started, self.end - ago)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    work = tmp_path_factory.mktemp("scenario")
    with contextlib.ExitStack() as stack:
        playing = stack.enter_context(Cluster(work, Timeline(seconds=SECONDS)))
        played = Played(playing)
        missed = (playing.started + playing.timeline.at(share) for share in MISSED)
        proxy = stack.enter_context(web_server(refusing(*missed)))
        for scrapes in SCRAPES:
            other = Prometheus(work / scrapes.__name__, {})
            configuration = yaml.safe_load((work / "prometheus/prometheus.yaml").read_text())
            [job] = configuration["scrape_configs"]
            configuration["scrape_configs"] = scrapes(job, proxy)
            (work / scrapes.__name__ / "prometheus.yml").write_text(yaml.safe_dump(configuration))
            played.others[scrapes.__name__] = stack.enter_context(other)
        playing.wait()
        time.sleep(2)
        played.settle()
        yield played


@pytest.fixture(scope="module")
def cluster(scenario: Played) -> Cluster:
    return scenario.cluster


@pytest.fixture(scope="module")
def served(scenario: Played) -> Served:
    return scenario.served(scenario.cluster.url)


CHOSEN = {
    "training-run": {"run": RUN},
    "training-ranks": {"run": RUN, "rank": "3"},
    "training-gpus": {"node": "node-2"},
    "training-node": {"node": "node-1"},
    "training-fleet": {"perf_tag": "llama-7b-bf16"},
}


@pytest.mark.parametrize("uid", sorted(MODELS))
def test_every_query_returns_data_or_is_listed(uid: str, served: Served) -> None:
    values = served.values(MODELS[uid]) | CHOSEN.get(uid, {})

    empty = [
        f"{one}: {filled(one.expression, values)}"
        for one in asked(uid)
        if (uid, one.panel, one.letter) not in excused()
        and not served.answer(one, values)
        and not (uid == OF_THE_MACHINE and served.lacks(one))
    ]

    assert not empty, "\n".join(empty)


@pytest.mark.parametrize("uid", sorted(MODELS))
@pytest.mark.parametrize("scrapes", SCRAPES, ids=lambda scrapes: scrapes.__name__)
def test_no_event_or_total_is_doubled_and_nothing_is_missing(
    uid: str, scrapes: Any, scenario: Played, served: Served
) -> None:
    urls = scenario.cluster.url, scenario.others[scrapes.__name__].url
    values = served.values(MODELS[uid]) | CHOSEN.get(uid, {})
    wrong = {one: "" for one in asked(uid) if one.panel not in OF_A_MOMENT and not AGE.search(one.expression)}
    for ago in (0, 2, 4):  # a doubled series is doubled at each of these times
        for one in list(wrong):
            usual, found = (scenario.served(url, ago).shown(one, values) for url in urls)
            ratio = (abs(sum(found.values())) + 0.05) / (abs(sum(usual.values())) + 0.05)
            wrong[one] = f"{one}: {usual} became {found}"
            if usual.keys() == found.keys() and 0.5 < ratio < 1.8:
                del wrong[one]

    assert not wrong, "\n".join(wrong.values())


def test_mig_panels_show_divided_gpus(served: Served) -> None:
    uid = "training-gpus"
    values = served.values(MODELS[uid]) | {"node": "node-4"}

    shown = {one.panel: served.answer(one, values) for one in asked(uid) if "(MIG)" in one.panel}

    assert shown["Memory of instances (MIG)"]
    assert not shown["SM activity of instances (MIG)"], "an A100 has no performance counters"


def test_a_dead_exporter_is_a_gap_and_not_a_flat_line(cluster: Cluster) -> None:
    timeline = cluster.timeline
    middle = cluster.started + timeline.at(sum(timeline.down) / 2)

    assert cluster.query('up{instance="node-3"} == 0', time=str(middle))
    assert not cluster.query('host_load1{instance="node-3"}', time=str(middle))
    assert cluster.query('host_load1{instance="node-3"}', time=str(cluster.started + timeline.seconds))


def test_the_straggler_is_named_with_its_machine(cluster: Cluster) -> None:
    timeline = cluster.timeline
    slow = cluster.started + timeline.at(timeline.crash) - 2
    values = {"cluster": ".*", "run": RUN, "rank": "3"}
    of_table = {
        one.letter: filled(
            one.expression, values, {"__rate_interval": "15s", "__range": "30s", "__interval": "2s"}
        )
        for one in asked("training-ranks")
        if one.panel == "All ranks, the slowest first"
    }

    def by_rank(letter: str, after: float = 0.0) -> dict[str, dict[str, Any]]:
        found = cluster.query(of_table[letter], time=str(slow + after))
        return {series["metric"]["rank"]: series for series in found}

    gpu = by_rank("A")["3"]["metric"]
    speed = {rank: float(series["value"][1]) for rank, series in by_rank("B").items()}
    # A described GPU follows the clock of its exporter, whose start depends on the load of the machine.
    held_back = [by_rank("D", after) for after in range(-20, 40, 2)]
    assert min(speed, key=lambda rank: speed[rank]) == "3"
    assert speed["3"] < 0.8
    assert max(float(each["3"]["value"][1]) for each in held_back if "3" in each) > 0.2
    assert max(float(each["0"]["value"][1]) for each in held_back if "0" in each) < 0.05
    assert (gpu["instance"], gpu["gpu"]) == ("node-2", "1")


def test_the_list_names_queries_that_exist() -> None:
    there = {(uid, one.panel, one.letter) for uid in MODELS for one in asked(uid)}

    assert excused() <= there
