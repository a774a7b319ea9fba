"""Command `python -m dashboards.incidents --out DIR [--serve]`: play the incidents, or serve the data of a play."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from dashboards.incidents import PARTS, TIMES, Incident, Part, world_size
from dashboards.scenario.prometheus import ROOT, Intervals, Server, free_port, start_prometheus

SCRAPE_SECONDS = 15.0
START_SECONDS = 60.0
"""Time for the processes to start."""
FIRST_STEP_SECONDS = 15.0
"""Time from the start of an attempt to the first step."""
JOB = "training"
MACHINES = ROOT / "exporter" / "replay" / "described"
GPUS = 8
GPU_MEMORY = 71_000_000_000
ENERGY = {
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
HOT_GPU, FAULTY_GPU, LOST_GPU = 2, 5, 1
"""GPU of rank 2 of the straggler on its node; GPU of rank 1 of the run with Xid errors; GPU of rank 1 of `lost-card`."""


class Play:
    """Processes of the incidents, in a directory."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._begin = 0.0
        self._ports: dict[str, int] = {}
        self._sidecars: dict[str, subprocess.Popen[bytes]] = {}
        self._ranks: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._spares: dict[int, subprocess.Popen[bytes]] = {}
        self._prometheus: Server | None = None
        self.stopped = threading.Event()

    def run(self) -> None:
        """Play until the end of the scenario, or until `stopped` is set."""
        try:
            self._start()
            for at, act in self._events():
                if self.stopped.wait(max(0.0, self._begin + at - time.time())):
                    break
                act()
        finally:
            self._end()

    def _start(self) -> None:
        for part in PARTS:
            for place, rank in enumerate(part.ranks):
                self._ranks[part.run, rank] = self._rank(part, rank, part.first_gpu + place)
                if part.incident is Incident.KILL:
                    self._spares[rank] = self._rank(part, rank, part.first_gpu + place)
        self._begin = time.time() + START_SECONDS
        for node in dict.fromkeys(part.node for part in PARTS):
            self._ports[node] = free_port()
            self._sidecar(node)
        for process in self._ranks.values():
            self._go(process, first=FIRST_STEP_SECONDS, step=0)
        times = {"begin": self._begin, "end": self._begin + TIMES.end}
        (self._out / "times.json").write_text(json.dumps(times), encoding="utf-8")
        self._prometheus = start_prometheus(
            self._out / "prometheus", JOB, self._ports, Intervals(SCRAPE_SECONDS)
        )

    def _rank(self, part: Part, rank: int, gpu: int) -> subprocess.Popen[bytes]:
        feed = self._out / part.node / "feed"
        feed.mkdir(parents=True, exist_ok=True)
        feed.chmod(0o700)
        own = {
            "EXPORTER_FEED_DIR": str(feed),
            "EXPORTER_RUN": part.run,
            "RANK": str(rank),
            "LOCAL_RANK": str(gpu),
            "WORLD_SIZE": str(world_size(part.incident)),
            "USER": "mia" if part.incident is Incident.NONE else "jo",
            "PYTHONPATH": str(ROOT),
        }
        plan = json.dumps({"incident": part.incident.value, "rank": rank})
        with (self._out / "ranks.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dashboards.incidents.job", plan],
                stdin=subprocess.PIPE,  # the rank ends when the pipe closes
                stdout=log,
                stderr=log,
                env=_environment() | own,
            )

    def _go(self, process: subprocess.Popen[bytes], *, first: float, step: int) -> None:
        start = json.dumps({"begin": self._begin, "first": first, "step": step})
        if process.stdin is not None:
            process.stdin.write(start.encode() + b"\n")
            process.stdin.flush()

    def _sidecar(self, node: str) -> None:
        directory = self._out / node
        (directory / "lock").mkdir(exist_ok=True)
        machine = directory / "machine.yaml"
        if not machine.exists():
            machine.write_text(json.dumps(self._machine(node)), encoding="utf-8")
            configuration = {
                "feed": {"dir": str(directory / "feed")},
                "gpu": {"replay": str(machine)},
                "energy": ENERGY | {"lock_dir": str(directory / "lock")},
            }
            (directory / "exporter.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        with (directory / "exporter.log").open("ab") as log:
            self._sidecars[node] = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "exporter",
                    f"--config.file={directory / 'exporter.yaml'}",
                    f"--web.listen-address=127.0.0.1:{self._ports[node]}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=_environment(),
            )

    def _machine(self, node: str) -> dict[str, Any]:
        """Return eight H100 with the load of their ranks, and the faults of the node's incidents."""
        machine: dict[str, Any] = yaml.safe_load((MACHINES / "h100.yaml").read_text(encoding="utf-8"))
        model = machine["models"].pop("h100") | {"processes": []}
        used = {"energy": {"idle": 71000, "busy": 692000, "counter_from": 1}}
        free = {"memory_used": 552_599_552}
        machine["gpus"], machine["timeline"] = [], _faults(node)
        for gpu in range(GPUS):
            holder = next(
                (
                    (part, rank)
                    for part in PARTS
                    for place, rank in enumerate(part.ranks)
                    if part.node == node and part.first_gpu + place == gpu
                ),
                None,
            )
            steps = [{"seconds": "10s", "level": 0.0}] if holder is None else _load(holder[0].incident)
            machine["models"][f"card-{gpu}"] = model | {
                "load": {"steps": steps, "ripple": 0.03},
                "values": model["values"] | used | (free if holder is None else {"memory_used": GPU_MEMORY}),
            }
            pids = []
            if holder is not None:
                pids = [self._ranks[holder[0].run, holder[1]].pid]
                pids += [self._spares[holder[1]].pid] if holder[0].incident is Incident.KILL else []
            machine["gpus"].append(
                {
                    "model": f"card-{gpu}",
                    "uuid": f"GPU-{node[-2:]}{gpu:06d}-0000-0000-0000-000000000000",
                    "processes": [{"pid": pid, "memory": GPU_MEMORY, "sm": 97} for pid in pids],
                }
            )
        return machine

    def _events(self) -> list[tuple[float, Callable[[], None]]]:
        node = PARTS[-1].node
        return [
            (TIMES.incident, self._kill),
            (TIMES.incident, self._sidecars[node].kill),
            (TIMES.exporter_back, lambda: self._sidecar(node)),
            (TIMES.restart, self._restart),
            (TIMES.end, lambda: None),
        ]

    def _kill(self) -> None:
        """Kill rank 1; the launcher ends the other rank, as torchrun does."""
        run = Incident.KILL.value
        self._ranks[run, 1].kill()
        time.sleep(1)
        self._ranks[run, 0].terminate()

    def _restart(self) -> None:
        for rank, process in self._spares.items():
            self._ranks[Incident.KILL.value, rank].wait()
            self._ranks[Incident.KILL.value, rank] = process
            self._go(process, first=TIMES.restart + FIRST_STEP_SECONDS, step=350)
        self._spares = {}

    def _end(self) -> None:
        for process in (*self._ranks.values(), *self._spares.values()):
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        everything = [*self._ranks.values(), *self._sidecars.values()]
        everything += [self._prometheus.process] if self._prometheus else []
        for process in everything:
            process.terminate()
        for process in everything:
            process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("EXPORTER_")}


def _load(incident: Incident) -> list[dict[str, Any]]:
    """Return the load of a GPU over the scenario; it starts with the sidecar, some seconds before `begin`."""
    after = {
        Incident.LOADER: [(TIMES.end, 0.38)],
        Incident.HANG: [(TIMES.end, 1.0)],
        Incident.KILL: [(TIMES.restart - TIMES.incident + FIRST_STEP_SECONDS, 0.0), (TIMES.end, 0.93)],
        Incident.FINISHED: [(TIMES.finished - TIMES.incident, 0.93), (TIMES.end, 0.0)],
    }.get(incident, [(TIMES.end, 0.93)])
    steps = [
        (START_SECONDS + FIRST_STEP_SECONDS - 5.0, 0.02),
        (TIMES.incident - FIRST_STEP_SECONDS, 0.93),
        *after,
    ]
    return [{"seconds": f"{seconds:g}s", "level": level} for seconds, level in steps]


def _faults(node: str) -> list[dict[str, Any]]:
    at = f"{START_SECONDS + TIMES.incident:g}s"
    if node == "gpu-09":
        hot = {
            "clock_sm": {"idle": 345, "busy": 1290},
            "temperature": {"idle": 62, "busy": 89},
            "power": {"idle": 71_000, "busy": 468_000},
            "throttle_hw_thermal": {"idle": 600_000_000, "busy": 600_000_000, "counter_from": 0},
            "throttle_thermal": {"idle": 600_000_000, "busy": 600_000_000, "counter_from": 0},
        }
        ecc = {
            "ecc_uncorrected_dram": 2,
            "ecc_corrected_dram": 14,
            "remapping_pending": 1,
            "recovery_action": 1,
        }
        return [
            {"at": at, "gpus": [HOT_GPU], "set": hot},
            {"at": at, "gpus": [FAULTY_GPU], "xid": [48, 63], "set": ecc},
        ]
    if node == "gpu-10":
        return [{"at": at, "gpus": [LOST_GPU], "xid": [79]}, {"at": at, "gpus": [LOST_GPU], "lost": True}]
    return []


def main(arguments: Sequence[str]) -> int:
    """Play the incidents, or serve kept data until a signal; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.incidents", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the data")
    parser.add_argument("--serve", action="store_true", help="serve the data of an earlier play")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    play = Play(given.out.resolve())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: play.stopped.set())
    if given.serve:
        server = start_prometheus(given.out.resolve() / "prometheus", JOB, {}, Intervals(SCRAPE_SECONDS))
        print(server.url, flush=True)  # noqa: T201  # the address is the output
        play.stopped.wait()
        server.process.terminate()
        server.process.wait()
    else:
        play.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
