"""Processes of the scenario: start, timed faults, and end.

Parent of all processes: the exporters of six machines, the ranks of two runs, and one Prometheus. A separate thread
follows the timeline. All files are in one directory, which the caller removes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
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

from dashboards.scenario import Timeline, machine
from dashboards.scenario.prometheus import ROOT, Intervals, Server, free_port, start_prometheus
from exporter.replay.machines import DIRECTORY_VARIABLE

SCRAPE_SECONDS = 1.0
RULES_SECONDS = 3.0
RUN, BASELINE = "llama-7b-b", "llama-7b-a"
JOB = "training"

ENERGY = {
    "interval": "2s",
    "whole_machine": True,
    "cpu_tdp_watts": 350,
    "cpu_idle_watts": 90,
    "pue": 1.12,
    "carbon_intensity": 344,
    "carbon_zone": "DE",
    "carbon_factor": "lifecycle",
    "carbon_kind": "average",
    "currency": "EUR",
    "electricity_price": 0.21,
    "gpu_hour_price": 2.4,
}
"""Prices and intensities of an invented site."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine."""

    name: str  # instance label in Prometheus
    replay: str | dict[str, Any]  # its GPUs: a machine of the package, or a description
    ranks: Sequence[tuple[str, int, int]] = ()  # (run, rank, local rank) of its processes


def nodes(timeline: Timeline) -> tuple[Node, ...]:
    """The machines of the scenario."""
    return (
        Node("node-1", machine.h100(timeline, first_uuid=1), ((RUN, 0, 0), (RUN, 1, 1))),
        Node("node-2", machine.h100(timeline, first_uuid=9, faults=True), ((RUN, 2, 0), (RUN, 3, 1))),
        Node("node-3", "no-gpu"),
        Node("node-4", "a100-mig"),
        Node(
            "node-5", machine.h100(timeline, first_uuid=17, steady=True), ((BASELINE, 0, 0), (BASELINE, 1, 1))
        ),
        Node(
            "node-6", machine.h100(timeline, first_uuid=25, steady=True), ((BASELINE, 2, 0), (BASELINE, 3, 1))
        ),
    )


class Cluster:
    """Processes of the scenario in an empty directory; a context manager."""

    def __init__(self, work: Path, timeline: Timeline, environ: Mapping[str, str] = os.environ) -> None:
        self.timeline = timeline
        self.started = 0.0
        self.url = ""
        self._work = work
        self._environment = {
            name: value
            for name, value in environ.items()
            if not name.startswith("EXPORTER_") and name != "RANK"
        } | {"PYTHONPATH": str(ROOT)}
        self._nodes = nodes(timeline)
        self._ports: dict[str, int] = {}
        self._sidecars: dict[str, subprocess.Popen[bytes]] = {}
        self._ranks: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._prometheus: Server | None = None
        self._stopping = threading.Event()
        self._director = threading.Thread(target=self._direct, name="scenario", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._prepare()
            self.started = time.time()  # the described machines begin to live when their exporters start
            for node in self._nodes:
                self._start_sidecar(node)
            for node in self._nodes:
                for run, rank, local in node.ranks:
                    self._start_rank(node, run, rank, local, attempt=0)
            intervals = Intervals(SCRAPE_SECONDS, RULES_SECONDS)
            self._prometheus = start_prometheus(self._work / "prometheus", JOB, self._ports, intervals)
            self.url = self._prometheus.url
            self._director.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def wait(self) -> None:
        """Until the scenario is over."""
        left = self.started + self.timeline.seconds - time.time()
        if left > 0:
            time.sleep(left)

    def query(self, expression: str, **parameters: str) -> list[dict[str, Any]]:
        """An instant query to the scenario's Prometheus."""
        asked = urllib.parse.urlencode({"query": expression, **parameters}).encode()
        with urllib.request.urlopen(f"{self.url}/api/v1/query", data=asked, timeout=30) as answer:  # noqa: S310  # ours
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result

    # ------------------------------------------------------------ processes

    def _prepare(self) -> None:
        for node in self._nodes:
            directory = self._work / node.name
            for name in ("feed", "lock", "checkpoints"):
                (directory / name).mkdir(parents=True)
                (directory / name).chmod(0o700)
            replay = node.replay
            if isinstance(replay, dict):
                machine = json.dumps(replay)  # which is YAML, without aliases
                (directory / "machine.yaml").write_text(machine, encoding="utf-8")
                replay = "machine"
            configuration: dict[str, Any] = {
                "feed": {"dir": str(directory / "feed")},
                "collectors": {
                    "processes": {"interval": "2s"},
                    "process_memory": {"interval": "5s", "deadline": "4s"},
                    "checkpoint_dirs": {"interval": "5s", "deadline": "4s", "paths": [str(self._work)]},
                    "filesystem": {"interval": "5s", "deadline": "4s", "mount_points_include": ["/"]},
                },
                "gpu": {"replay": replay, "interval": "1s", "retry": "2s"},
                "energy": ENERGY | {"lock_dir": str(directory / "lock")},
            }
            (directory / "exporter.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
            self._ports[node.name] = free_port()

    def _start_sidecar(self, node: Node) -> None:
        directory = self._work / node.name
        with (directory / "exporter.log").open("ab") as log:
            self._sidecars[node.name] = subprocess.Popen(
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

    def _start_rank(self, node: Node, run: str, rank: int, local: int, *, attempt: int) -> None:
        directory = self._work / node.name
        world = sum(1 for one in self._nodes for of, _, _ in one.ranks if of == run)
        environment = self._environment | {
            "EXPORTER_FEED_DIR": str(directory / "feed"),
            "EXPORTER_RUN": run,
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(world),
        }
        plan = {
            "begin": self.started,
            "seconds": self.timeline.seconds,
            "baseline": run == BASELINE,
            "straggler": run == RUN and rank == world - 1,
            "crashes": run == RUN and rank == world - 2,
            "attempt": attempt,
            "checkpoint": str(self._work / f"{run}.step"),
        }
        with (directory / f"{run}-{rank}.log").open("ab") as log:
            self._ranks[(run, rank)] = subprocess.Popen(
                [sys.executable, "-m", "dashboards.scenario.job", json.dumps(plan)],
                stdin=subprocess.PIPE,  # closed at the end of the scenario
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment,
            )

    # ------------------------------------------------------------ events

    def _direct(self) -> None:
        """Follow the timeline."""
        timeline = self.timeline
        third = self._nodes[2]
        events = sorted(
            [
                (timeline.at(timeline.down[0]), self._sidecars[third.name].kill),
                (timeline.at(timeline.down[1]), lambda: self._revive(third)),
                (timeline.at(timeline.crash), self._crash),
                (timeline.at(timeline.crash + timeline.restart), self._restart),
            ],
            key=lambda event: event[0],
        )
        for at, act in events:
            if self._stopping.wait(max(0.0, self.started + at - time.time())):
                return
            act()

    def _revive(self, node: Node) -> None:
        self._sidecars[node.name].wait()
        self._start_sidecar(node)

    def _crash(self) -> None:
        """Kill one rank and terminate the remaining ranks, as torchrun does."""
        ranks = {rank: process for (run, rank), process in self._ranks.items() if run == RUN}
        victim = ranks.pop(len(ranks) - 2)
        victim.send_signal(signal.SIGKILL)
        time.sleep(min(1.0, self.timeline.at(0.01)))
        for process in ranks.values():
            process.terminate()
        for process in (victim, *ranks.values()):
            process.wait()
            _close(process)

    def _restart(self) -> None:
        for node in self._nodes:
            for run, rank, local in node.ranks:
                if run == RUN:
                    self._start_rank(node, run, rank, local, attempt=1)

    def _end(self) -> None:
        self._stopping.set()
        if self._director.is_alive():
            self._director.join(timeout=10)
        for process in self._ranks.values():
            _close(process)
        everything = [*self._ranks.values(), *self._sidecars.values()]
        if self._prometheus is not None:
            everything.append(self._prometheus.process)
        for process in everything:
            process.terminate()
        for process in everything:
            _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(OSError):
            process.stdin.close()
