"""Command `python -m dashboards.incidents --out DIR [--serve]`: run the session and store its data, or serve stored data."""

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

from dashboards.incidents import (
    FIRST_STEP_SECONDS,
    PLACEMENTS,
    TIMES,
    RunPlacement,
    SessionRun,
    world_size,
)
from dashboards.scenario import SITE_ENERGY
from dashboards.scenario.machine import GPUS_PER_NODE, MACHINE_DIRECTORY
from dashboards.scenario.prometheus import ROOT, Intervals, PrometheusServer, free_port, start_prometheus
from exporter.replay.machines import DIRECTORY_VARIABLE

SCRAPE_INTERVAL_SECONDS = 15.0
STARTUP_SECONDS = 60.0
"""Seconds from the start of the first exporter to the start of the session."""
SCRAPE_JOB = "training"
GPU_MEMORY_BYTES, IDLE_GPU_MEMORY_BYTES = 71_000_000_000, 552_599_552
GPU_ENERGY_COUNTER = {"idle": 71_000, "busy": 692_000, "counter_from": 1}
"""Energy counter of a GPU in the notation of the replay: its growth per second in millijoules, when idle and when busy."""
HOT_GPU, MEMORY_ERROR_GPU, LOST_GPU = 2, 5, 1
"""Indexes of the GPUs of rank 2 of `straggler`, rank 1 of `xid-ecc`, and rank 1 of `lost-gpu`."""

RESUME_STEP = 300
"""Step of the last checkpoint that `killed` saves before its ranks are killed, if no step of the run was late."""


class SessionProcesses:
    """Ranks of the runs, exporters of the nodes, and the Prometheus server. All files are in one directory.

    Args:
        directory: Directory for the configurations, logs and data, without an earlier session.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._start_time = 0.0
        self._ports: dict[str, int] = {}
        self._exporters: dict[str, subprocess.Popen[bytes]] = {}
        self._ranks: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self._prometheus: PrometheusServer | None = None
        self.stop_event = threading.Event()

    def run(self) -> None:
        """Run the session until its end, or until `stop_event` is set.

        Raises:
            SystemExit: An exporter has exited before the end.
            FileNotFoundError, RuntimeError, TimeoutError: Prometheus does not start; see `start_prometheus`.
        """
        try:
            self._start()
            for seconds, action in self._timeline():
                if not self._wait_until(self._start_time + seconds):
                    break
                action()
        finally:
            self._stop_processes()

    def _wait_until(self, end_time: float) -> bool:
        """Wait until a time and return True, or return False if `stop_event` is set earlier.

        Raises:
            SystemExit: An exporter has exited.
        """
        while (remaining_seconds := end_time - time.time()) > 0:
            if self.stop_event.wait(min(1.0, remaining_seconds)):
                return False
            for node, process in self._exporters.items():
                if process.poll() is not None:
                    log = self._directory / node / "exporter.log"
                    message = f"the exporter of {node} has exited with status {process.returncode}; see {log}"
                    raise SystemExit(message)
        return not self.stop_event.is_set()

    def _start(self) -> None:
        """Start the ranks, the exporters, the training and Prometheus, and write the times of the session to `times.json`."""
        for placement in PLACEMENTS:
            for gpu, rank in zip(placement.gpus, placement.ranks, strict=True):
                self._ranks[placement.run.value, rank] = self._start_rank(placement, rank, gpu)
        self._start_time = time.time() + STARTUP_SECONDS
        for node in dict.fromkeys(placement.node for placement in PLACEMENTS):
            self._ports[node] = free_port()
            self._start_exporter(node)
        for process in self._ranks.values():
            self._start_training(process, first_step_offset_seconds=FIRST_STEP_SECONDS, resume_step=0)
        times = {"start": self._start_time, "end": self._start_time + TIMES.end_seconds}
        (self._directory / "times.json").write_text(json.dumps(times), encoding="utf-8")
        self._prometheus = start_prometheus(
            self._directory / "prometheus", SCRAPE_JOB, self._ports, Intervals(SCRAPE_INTERVAL_SECONDS)
        )

    def _start_rank(self, placement: RunPlacement, rank: int, gpu: int) -> subprocess.Popen[bytes]:
        """Start the process of a rank, which waits for the start message, and write its process id for the replay of the GPU."""
        feed = self._directory / placement.node / "feed"
        feed.mkdir(parents=True, exist_ok=True)
        feed.chmod(0o700)
        rank_environment = {
            "EXPORTER_FEED_DIR": str(feed),
            "EXPORTER_RUN": placement.run.value,
            "RANK": str(rank),
            "LOCAL_RANK": str(gpu),
            "WORLD_SIZE": str(world_size(placement.run)),
            "USER": "mia" if placement.run is SessionRun.HEALTHY else "jo",
            "PYTHONPATH": str(ROOT),
        }
        plan = json.dumps({"run": placement.run.value, "rank": rank})
        with (self._directory / "ranks.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dashboards.incidents.job", plan],
                stdin=subprocess.PIPE,  # the rank exits when the pipe is closed
                stdout=log,
                stderr=log,
                env=_environment() | rank_environment,
            )
        self._pid_path(placement.node, gpu).write_text(str(process.pid), encoding="utf-8")
        return process

    def _pid_path(self, node: str, gpu: int) -> Path:
        """Return the path of the file with the process id of the rank on a GPU, which the replay reads at each call."""
        return self._directory / node / f"gpu-{gpu}.pid"

    def _start_training(
        self, process: subprocess.Popen[bytes], *, first_step_offset_seconds: float, resume_step: int
    ) -> None:
        """Send the start message for which a rank waits."""
        start_message = {
            "start_time": self._start_time,
            "first_step_offset_seconds": first_step_offset_seconds,
            "resume_step": resume_step,
        }
        if process.stdin is not None:
            process.stdin.write(json.dumps(start_message).encode() + b"\n")
            process.stdin.flush()

    def _start_exporter(self, node: str) -> None:
        """Start the exporter of a node, which replays the machine of the node."""
        directory = self._directory / node
        (directory / "lock").mkdir(exist_ok=True)
        machine_path = directory / "machine.yaml"
        if not machine_path.exists():
            machine_path.write_text(json.dumps(self._machine_description(node)), encoding="utf-8")
            configuration = {
                "feed": {"dir": str(directory / "feed")},
                "gpu": {"replay": machine_path.stem},
                "energy": SITE_ENERGY | {"lock_dir": str(directory / "lock")},
            }
            (directory / "exporter.yaml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        with (directory / "exporter.log").open("ab") as log:
            self._exporters[node] = subprocess.Popen(
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
                env=_environment() | {DIRECTORY_VARIABLE: str(directory)},
            )

    def _machine_description(self, node: str) -> dict[str, Any]:
        """Return the description of a machine with eight H100.

        The description contains the load and the processes of the ranks on the node, and the faults of the incidents.
        """
        machine: dict[str, Any] = yaml.safe_load(
            (MACHINE_DIRECTORY / "h100.yaml").read_text(encoding="utf-8")
        )
        model = machine["models"].pop("h100") | {"processes": []}
        machine["gpus"], machine["timeline"] = [], _faults(node)
        for gpu in range(GPUS_PER_NODE):
            placement = _ranks_on_gpu(node, gpu)
            pid_files = [] if placement is None else [str(self._pid_path(node, gpu))]
            memory_bytes = IDLE_GPU_MEMORY_BYTES if placement is None else GPU_MEMORY_BYTES
            machine["models"][f"h100-{gpu}"] = model | {
                "load": {"steps": _load_steps(placement), "ripple": 0.03},
                "values": model["values"] | {"energy": GPU_ENERGY_COUNTER, "memory_used": memory_bytes},
            }
            machine["gpus"].append(
                {
                    "model": f"h100-{gpu}",
                    "uuid": f"GPU-{node[-2:]}{gpu:06d}-0000-0000-0000-000000000000",
                    "processes": [
                        {"pid_file": path, "memory": GPU_MEMORY_BYTES, "sm": 97} for path in pid_files
                    ],
                }
            )
        return machine

    def _timeline(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the actions of the session, each with its time in seconds since the start, in ascending order."""
        node = PLACEMENTS[-1].node
        return [
            (TIMES.incident_start_seconds, self._kill_run),
            (TIMES.incident_start_seconds, lambda: self._kill_exporter(node)),
            (TIMES.exporter_restart_seconds, lambda: self._start_exporter(node)),
            (TIMES.killed_run_restart_seconds, self._restart_run),
            (TIMES.end_seconds, lambda: None),
        ]

    def _kill_exporter(self, node: str) -> None:
        process = self._exporters.pop(node)
        process.kill()
        process.wait()

    def _kill_run(self) -> None:
        """Kill rank 1 with SIGKILL and terminate rank 0, as torchrun does."""
        run = SessionRun.KILLED.value
        self._ranks[run, 1].kill()
        time.sleep(1)
        self._ranks[run, 0].terminate()

    def _restart_run(self) -> None:
        """Start new processes for the killed ranks, which resume from the checkpoint of step RESUME_STEP."""
        for placement in PLACEMENTS:
            if placement.run is not SessionRun.KILLED:
                continue
            for gpu, rank in zip(placement.gpus, placement.ranks, strict=True):
                self._ranks[placement.run.value, rank].wait()
                process = self._ranks[placement.run.value, rank] = self._start_rank(placement, rank, gpu)
                self._start_training(
                    process,
                    first_step_offset_seconds=TIMES.killed_run_restart_seconds + FIRST_STEP_SECONDS,
                    resume_step=RESUME_STEP,
                )

    def _stop_processes(self) -> None:
        for process in self._ranks.values():
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        processes = [*self._ranks.values(), *self._exporters.values()]
        processes += [self._prometheus.process] if self._prometheus else []
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of this command, without the variables of the exporter."""
    return {name: value for name, value in os.environ.items() if not name.startswith("EXPORTER_")}


def _ranks_on_gpu(node: str, gpu: int) -> RunPlacement | None:
    """Return the ranks of the run that uses a GPU, or None if no run uses the GPU."""
    for placement in PLACEMENTS:
        if placement.node == node and gpu in placement.gpus:
            return placement
    return None


def _load_steps(placement: RunPlacement | None) -> list[dict[str, Any]]:
    """Return the steps of the load of a GPU that the ranks of a run use, or that no run uses.

    The replay starts with the exporter, at most STARTUP_SECONDS before the start of the session. A restarted exporter replays the load
    from the first step again.
    """
    if placement is None:
        return [{"seconds": "10s", "level": 0.0}]
    later_steps = {
        SessionRun.LOADER_STALL: [(TIMES.end_seconds, 0.38)],
        SessionRun.HANG: [(TIMES.end_seconds, 1.0)],
        SessionRun.KILLED: [
            (TIMES.killed_run_restart_seconds - TIMES.incident_start_seconds + FIRST_STEP_SECONDS, 0.0),
            (TIMES.end_seconds, 0.93),
        ],
        SessionRun.FINISHED: [
            (TIMES.finished_run_end_seconds - TIMES.incident_start_seconds, 0.93),
            (TIMES.end_seconds, 0.0),
        ],
    }.get(placement.run, [(TIMES.end_seconds, 0.93)])
    steps = [
        (STARTUP_SECONDS + FIRST_STEP_SECONDS - 5.0, 0.02),
        (TIMES.incident_start_seconds - FIRST_STEP_SECONDS, 0.93),
        *later_steps,
    ]
    return [{"seconds": f"{seconds:g}s", "level": level} for seconds, level in steps]


def _faults(node: str) -> list[dict[str, Any]]:
    """Return the timeline of GPU faults on a node, which is empty if its GPUs have no faults."""
    incident_start = f"{STARTUP_SECONDS + TIMES.incident_start_seconds:g}s"
    if node == "gpu-09":
        overheating = {
            "clock_sm": {"idle": 345, "busy": 1290},
            "temperature": {"idle": 62, "busy": 89},
            "power": {"idle": 71_000, "busy": 468_000},
            "throttle_hw_thermal": {"idle": 600_000_000, "busy": 600_000_000, "counter_from": 0},
            "throttle_thermal": {"idle": 600_000_000, "busy": 600_000_000, "counter_from": 0},
        }
        ecc_errors = {
            "ecc_uncorrected_dram": 2,
            "ecc_corrected_dram": 14,
            "remapping_pending": 1,
            "recovery_action": 1,
        }
        return [
            {"at": incident_start, "gpus": [HOT_GPU], "set": overheating},
            {"at": incident_start, "gpus": [MEMORY_ERROR_GPU], "xid": [48, 63], "set": ecc_errors},
        ]
    if node == "gpu-10":
        return [
            {"at": incident_start, "gpus": [LOST_GPU], "xid": [79]},
            {"at": incident_start, "gpus": [LOST_GPU], "lost": True},
        ]
    return []


def main(arguments: Sequence[str]) -> int:
    """Run the session and store its data, or serve stored data until a signal. Return 0."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.incidents", description=__doc__)
    parser.add_argument(
        "--out",
        dest="output_directory",
        type=Path,
        required=True,
        help="directory for configurations, logs and data, without an earlier session unless --serve is set",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="serve the data that an earlier run of this command stored in --out",
    )
    options = parser.parse_args(arguments)
    options.output_directory.mkdir(parents=True, exist_ok=True)
    processes = SessionProcesses(options.output_directory.resolve())
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: processes.stop_event.set())
    if options.serve:
        server = start_prometheus(
            options.output_directory.resolve() / "prometheus",
            SCRAPE_JOB,
            {},
            Intervals(SCRAPE_INTERVAL_SECONDS),
        )
        print(server.url, flush=True)  # noqa: T201  # the address is the output of the command
        processes.stop_event.wait()
        server.process.terminate()
        server.process.wait()
    else:
        processes.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
