"""Processes of the scenario: exporters of six nodes, ranks of two runs, and a Prometheus server.

A thread kills and restarts an exporter and a run at the times of the timeline. The ranks and the replayed GPUs follow the
timeline themselves. All files are in one directory, which the caller removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from typing_extensions import Self

from dashboards.scenario import SITE_ENERGY, Timeline, machine
from dashboards.scenario.prometheus import ROOT, Intervals, PrometheusServer, free_port, start_prometheus
from exporter.replay.machines import DIRECTORY_VARIABLE

SCRAPE_INTERVAL_SECONDS = 1.0
RULE_INTERVAL_SECONDS = 3.0
FAULTY_RUN, BASELINE_RUN = "llama-7b-b", "llama-7b-a"
CRASHING_RANK, STRAGGLER_RANK = 2, 3
"""Ranks of `FAULTY_RUN`. The straggler is on the GPU of node-2 that overheats."""
SCRAPE_JOB = "training"


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Rank of a run on a node."""

    run: str
    rank: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Node:
    """Node of the scenario: its replayed machine and its ranks, if any."""

    name: str  # label `instance` in Prometheus
    replay: str | dict[str, Any]  # name of a packaged machine, or a machine description
    placements: Sequence[RankPlacement] = ()


def scenario_nodes(timeline: Timeline) -> tuple[Node, ...]:
    """Return the nodes of the scenario."""
    return (
        Node(
            "node-1",
            machine.h100_machine(timeline, first_gpu_number=1),
            (
                RankPlacement(FAULTY_RUN, rank=0, local_rank=0),
                RankPlacement(FAULTY_RUN, rank=1, local_rank=1),
            ),
        ),
        Node(
            "node-2",
            machine.h100_machine(timeline, first_gpu_number=9, has_faults=True),
            (
                RankPlacement(FAULTY_RUN, rank=2, local_rank=0),
                RankPlacement(FAULTY_RUN, rank=3, local_rank=1),
            ),
        ),
        Node("node-3", "no-gpu"),
        Node("node-4", "a100-mig"),
        Node(
            "node-5",
            machine.h100_machine(timeline, first_gpu_number=17, is_steady=True),
            (
                RankPlacement(BASELINE_RUN, rank=0, local_rank=0),
                RankPlacement(BASELINE_RUN, rank=1, local_rank=1),
            ),
        ),
        Node(
            "node-6",
            machine.h100_machine(timeline, first_gpu_number=25, is_steady=True),
            (
                RankPlacement(BASELINE_RUN, rank=2, local_rank=0),
                RankPlacement(BASELINE_RUN, rank=3, local_rank=1),
            ),
        ),
    )


class Cluster:
    """Context manager that starts the processes of the scenario and stops them on exit.

    Args:
        directory: Empty directory for the configurations, logs and data.
        timeline: Duration of the scenario and times of its events.
        environ: Environment of the processes. Variables of the exporter and RANK are removed, and PYTHONPATH is this checkout.

    Attributes:
        timeline: Duration of the scenario and times of its events.
        start_time: Unix time of the start of the scenario; 0 before the start.
        url: Base URL of the Prometheus server; empty before the start.
    """

    def __init__(self, directory: Path, timeline: Timeline, environ: Mapping[str, str] = os.environ) -> None:
        self.timeline = timeline
        self.start_time = 0.0
        self.url = ""
        self._directory = directory
        self._environment = {
            name: value
            for name, value in environ.items()
            if not name.startswith("EXPORTER_") and name != "RANK"
        } | {"PYTHONPATH": str(ROOT)}
        self._nodes = scenario_nodes(timeline)
        self._ports: dict[str, int] = {}
        self._exporters: dict[str, subprocess.Popen[bytes]] = {}
        self._ranks: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._prometheus: PrometheusServer | None = None
        self._stop_event = threading.Event()
        self._timeline_thread = threading.Thread(target=self._run_timeline, name="scenario", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._prepare_nodes()
            self.start_time = time.time()  # the replay of a GPU starts with its exporter
            for node in self._nodes:
                self._start_exporter(node)
            for node in self._nodes:
                for placement in node.placements:
                    self._start_rank(node, placement, attempt=0)
            intervals = Intervals(SCRAPE_INTERVAL_SECONDS, RULE_INTERVAL_SECONDS)
            self._prometheus = start_prometheus(
                self._directory / "prometheus", SCRAPE_JOB, self._ports, intervals
            )
            self.url = self._prometheus.url
            self._timeline_thread.start()
        except BaseException:
            self._stop_processes()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_processes()

    def wait_until_end(self) -> None:
        """Wait for the end of the scenario."""
        remaining_seconds = self.start_time + self.timeline.duration_seconds - time.time()
        if remaining_seconds > 0:
            time.sleep(remaining_seconds)

    def stop_collection(self) -> None:
        """Stop the ranks, the exporters, the scrapes and the rules. The Prometheus server still answers queries."""
        self._stop_timeline()
        self._stop([*self._ranks.values(), *self._exporters.values()])
        if self._prometheus is not None:
            self._prometheus.stop_collection()

    def query(self, expression: str, **parameters: str) -> list[dict[str, Any]]:
        """Return the series of an instant query to the Prometheus server."""
        request_body = urllib.parse.urlencode({"query": expression, **parameters}).encode()
        with urllib.request.urlopen(f"{self.url}/api/v1/query", data=request_body, timeout=30) as response:  # noqa: S310  # the URL is built from 127.0.0.1
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        return result

    # ------------------------------------------------------------ processes

    def _prepare_nodes(self) -> None:
        """Create the directories and configurations of the nodes, and choose the ports of the exporters."""
        for node in self._nodes:
            directory = self._directory / node.name
            for name in ("feed", "lock", "checkpoints"):
                (directory / name).mkdir(parents=True)
                (directory / name).chmod(0o700)
            replay = node.replay
            if isinstance(replay, dict):
                # JSON is valid YAML; yaml.safe_dump would write aliases.
                (directory / "machine.yaml").write_text(json.dumps(replay), encoding="utf-8")
                replay = "machine"  # stem of machine.yaml, in the directory that `DIRECTORY_VARIABLE` names
            configuration: dict[str, Any] = {
                "feed": {"dir": str(directory / "feed")},
                "collectors": {
                    "processes": {"interval": "2s"},
                    "process_memory": {"interval": "5s", "deadline": "4s"},
                    "checkpoint_dirs": {"interval": "5s", "deadline": "4s", "paths": [str(self._directory)]},
                    "filesystem": {"interval": "5s", "deadline": "4s", "mount_points_include": ["/"]},
                },
                "gpu": {"replay": replay, "interval": "1s", "retry": "2s"},
                "energy": SITE_ENERGY
                | {"interval": "2s", "whole_machine": True, "lock_dir": str(directory / "lock")},
            }
            (directory / "exporter.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
            self._ports[node.name] = free_port()

    def _start_exporter(self, node: Node) -> None:
        """Start the exporter of a node, with the configuration from `_prepare_nodes`."""
        directory = self._directory / node.name
        with (directory / "exporter.log").open("ab") as log:
            self._exporters[node.name] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "exporter",
                    f"--config.file={directory / 'exporter.yaml'}",
                    f"--web.listen-address=127.0.0.1:{self._ports[node.name]}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**self._environment, DIRECTORY_VARIABLE: str(directory)},
            )

    def _start_rank(self, node: Node, placement: RankPlacement, *, attempt: int) -> None:
        """Start the process of a rank; *attempt* is 0, or 1 after the restart of the run."""
        run, rank = placement.run, placement.rank
        directory = self._directory / node.name
        world_size = sum(
            1 for other_node in self._nodes for other in other_node.placements if other.run == run
        )
        environment = self._environment | {
            "EXPORTER_FEED_DIR": str(directory / "feed"),
            "EXPORTER_RUN": run,
            "RANK": str(rank),
            "LOCAL_RANK": str(placement.local_rank),
            "WORLD_SIZE": str(world_size),
        }
        plan = {
            "start": self.start_time,
            "duration_seconds": self.timeline.duration_seconds,
            "baseline": run == BASELINE_RUN,
            "rank": rank,
            "straggler": run == FAULTY_RUN and rank == STRAGGLER_RANK,
            "attempt": attempt,
            "checkpoint_path": str(self._directory / f"{run}.step"),
        }
        with (directory / f"{run}-{rank}.log").open("ab") as log:
            self._ranks[(run, rank)] = subprocess.Popen(
                [sys.executable, "-m", "dashboards.scenario.job", json.dumps(plan)],
                stdin=subprocess.PIPE,  # the rank exits when the pipe is closed
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment,
            )

    # ------------------------------------------------------------ events

    def _run_timeline(self) -> None:
        """Kill and restart an exporter and a run, until the last event or the stop of the scenario."""
        timeline = self.timeline
        (node_without_gpus,) = (node for node in self._nodes if node.name == "node-3")
        events = sorted(
            [
                (
                    timeline.to_seconds(timeline.exporter_down_range[0]),
                    self._exporters[node_without_gpus.name].kill,
                ),
                (
                    timeline.to_seconds(timeline.exporter_down_range[1]),
                    lambda: self._restart_exporter(node_without_gpus),
                ),
                (timeline.to_seconds(timeline.crash_time), self._crash_run),
                (timeline.to_seconds(timeline.crash_time + timeline.downtime), self._restart_run),
            ],
            key=lambda event: event[0],
        )
        for seconds, action in events:
            if self._stop_event.wait(max(0.0, self.start_time + seconds - time.time())):
                return
            action()

    def _restart_exporter(self, node: Node) -> None:
        self._exporters[node.name].wait()
        self._start_exporter(node)

    def _crash_run(self) -> None:
        """Kill a rank and terminate the remaining ranks, as torchrun does."""
        ranks = {rank: process for (run, rank), process in self._ranks.items() if run == FAULTY_RUN}
        killed_rank = ranks.pop(CRASHING_RANK)
        killed_rank.kill()
        time.sleep(min(1.0, self.timeline.to_seconds(0.01)))
        for process in ranks.values():
            process.terminate()
        for process in (killed_rank, *ranks.values()):
            process.wait()
            _close_stdin(process)

    def _restart_run(self) -> None:
        for node in self._nodes:
            for placement in node.placements:
                if placement.run == FAULTY_RUN:
                    self._start_rank(node, placement, attempt=1)

    def _stop_processes(self) -> None:
        self._stop_timeline()
        processes = [*self._ranks.values(), *self._exporters.values()]
        if self._prometheus is not None:
            processes.append(self._prometheus.process)
        self._stop(processes)

    def _stop_timeline(self) -> None:
        self._stop_event.set()
        if self._timeline_thread.is_alive():
            self._timeline_thread.join(timeout=10)

    def _stop(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            _close_stdin(process)
        for process in processes:
            process.terminate()
        for process in processes:
            _wait_or_kill(process)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(OSError):
            process.stdin.close()
