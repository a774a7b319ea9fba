"""Alerts of each fault of a simulated job, through the real recording, the real ledger and all rules.

Two ranks first train without a fault, then for half an hour with it. Over the whole time, exactly the expected alerts fire.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ledger_support import Clock, SimulatedSidecar, make_process, make_snapshot
from prometheus_client.core import Metric
from rules_support import RULES, needs_promtool, promtool, rules, selectors, write_alert_rules
from training_support import SimulatedTraining

from exporter.feed.snapshot import ProcessIdentity
from exporter.training import kinds

NODES = [f"n{number}" for number in range(1, 5)]
"""Nodes on one switch. The job runs on the first."""
INTERVAL_SECONDS = 60
FAULT_SCRAPES = 30
"""Scrapes from the start of the fault to the end of the scenario."""
GRAD_SYNC = kinds.named_kind("grad_sync", is_phase=True)


@dataclass
class Rank:
    """Rank of the job, with its own simulated clock."""

    process: ProcessIdentity
    time: float  # end of the last completed block
    job: SimulatedTraining = field(init=False)
    sequence: int = 0
    is_stuck: bool = False  # True if the rank never leaves its block

    def __post_init__(self) -> None:
        self.job = SimulatedTraining(self.time)
        self.job.enter(kinds.TRAINING_LOOP, self.time)
        self.job.publish(self.time)

    def step(self, seconds: float = 5.0, compute: float = 4.0, loss: float = 2.5) -> None:
        """Complete a step of *seconds*: compute for *compute* seconds, then wait for the other ranks."""
        start, end = self.time, self.time + seconds
        self.job.enter(kinds.TRAINING_ITERATION, start)
        self.job.numbers.record("loss", "train", loss)
        self.job.run_block(GRAD_SYNC, start + compute, end)
        self.job.leave(end)
        self.time = end

    def save(self, seconds: float = 5.0) -> None:
        end, state = self.time + seconds, self.job.state
        steps = state.progress.steps
        save = state.checkpoints.begin(steps, "sync", self.time, steps)
        self.job.run_block(kinds.CHECKPOINT_SAVE, self.time, end)
        state.checkpoints.succeed(save, end, end)
        self.time = end

    def enter_forever(self, block_kind: kinds.BlockKind) -> None:
        """Enter a block that never ends, unless the rank is already in one."""
        if not self.is_stuck:
            self.job.enter(block_kind, self.time)
        self.is_stuck = True

    def publish(self, sidecar: SimulatedSidecar, now: float) -> None:
        self.sequence += 1
        readings = self.job.publish(now)
        snapshot = make_snapshot(self.process, *readings, sequence=self.sequence, written=now)
        recording = snapshot.recording.replace(training=self.job.last_published())
        sidecar.feed.publish(snapshot.replace(recording=recording))


class Simulation:
    """Job, sidecar and Prometheus in simulated time, which starts at 0 as in promtool.

    Args:
        directory: State directory of the sidecar.
        healthy_scrapes: Number of scrapes before the fault starts.
    """

    def __init__(self, directory: Path, healthy_scrapes: int) -> None:
        self.healthy_scrapes = healthy_scrapes
        self.sidecar = SimulatedSidecar(directory, clock=Clock(wall=1.0))
        self.ranks = [Rank(make_process(rank=rank, started=1.0).replace(trains=True), 1.0) for rank in (0, 1)]
        self.job_is_alive = True
        self.exporter_is_up = True
        self.lost_gpus = 0
        self.switch_is_lost = False
        self.series: dict[str, list[str]] = {}
        self.scrapes = 0

    def advance(self, action: Callable[[Rank], None]) -> None:
        """Advance the clock by a minute, in which each rank repeats an action, then scrape."""
        self.sidecar.clock.advance(INTERVAL_SECONDS)
        now = self.sidecar.clock.wall
        for rank in self.ranks if self.job_is_alive else ():
            while rank.time < now - 10.0 and not rank.is_stuck:
                action(rank)
            rank.publish(self.sidecar, now)
        self.scrape()

    def kill_job(self) -> None:
        self.job_is_alive = False
        for rank in self.ranks:
            self.sidecar.feed.kill(rank.process)

    def scrape(self) -> None:
        samples: dict[str, float] = {'up{instance="n1",job="training"}': float(self.exporter_is_up)}
        samples |= {f'exporter_build_info{{instance="{node}",job="training"}}': 1.0 for node in NODES}
        for node in NODES:
            samples |= self.hardware(node) if self.exporter_is_up or node != "n1" else {}
        if self.exporter_is_up:
            for rank in self.ranks:
                name = (
                    f'training_process_up{{instance="n1",job="training",rank="{rank.process.rank}",run="r"}}'
                )
                samples[name] = float(self.job_is_alive)
            samples.update(queried_samples(self.sidecar.collector.collect()))
        for name in samples.keys() - self.series.keys():
            self.series[name] = ["_"] * self.scrapes
        for name, series in self.series.items():
            value = samples.get(name)
            absent = "stale" if series and series[-1] not in {"_", "stale"} else "_"
            series.append(absent if value is None else repr(value))
        self.scrapes += 1

    def hardware(self, node: str) -> dict[str, float]:
        """Return the samples of a node's link to the switch, and of the two GPUs of the first node."""
        target = f'instance="{node}",job="training"'
        port = f'{target},device="mlx5_0",port="1"'
        samples = {
            f"host_rdma_port_state{{{port}}}": 1.0 if self.switch_is_lost else 4.0,
            f"host_rdma_link_downed_total{{{port}}}": float(self.switch_is_lost),
        }
        if node == "n1":
            samples |= {f"gpu_nvml_up{{{target}}}": 1.0, f"gpu_devices_expected{{{target}}}": 2.0}
            samples[f"gpu_devices{{{target}}}"] = 2.0 - self.lost_gpus
            for gpu in (0, 1):
                samples[f'gpu_up{{{target},gpu="{gpu}",uuid="GPU-{gpu}"}}'] = float(gpu >= self.lost_gpus)
            if self.lost_gpus:
                xid = f'{target},gpu="0",uuid="GPU-0",xid="79"'
                samples |= {
                    f"gpu_xid_errors_total{{{xid}}}": 1.0,
                    f"gpu_xid_last_timestamp_seconds{{{xid}}}": float(
                        self.healthy_scrapes * INTERVAL_SECONDS
                    ),
                }
        return samples

    def fired_alerts(self, directory: Path) -> set[str]:
        """Return the names of the alerts that fired at any time."""
        duration = f"{self.scrapes - 1}m"
        case = {
            "interval": f"{INTERVAL_SECONDS}s",
            "input_series": [
                {"series": name, "values": " ".join(series)} for name, series in self.series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'group by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{duration}]))',
                    "eval_time": duration,
                    "exp_samples": [{"labels": '{alertname="none"}', "value": 0}],
                }
            ],
        }
        series_names = [name.partition("{")[0] for name in self.series]
        write_alert_rules(directory / "rules.json", [path.name for path in RULES], series_names)
        body = {
            "rule_files": ["rules.json"],
            "evaluation_interval": f"{INTERVAL_SECONDS}s",
            "tests": [case],
        }
        path = directory / "case.json"  # JSON is valid YAML
        path.write_text(json.dumps(body), encoding="utf-8")
        completed = promtool("test", "rules", path)
        actual_text = (completed.stdout + completed.stderr).partition("got:")[2]
        assert actual_text, completed.stdout + completed.stderr
        return {part.split('"')[1] for part in actual_text.split("alertname=")[1:]} - {"none"}


QUERIED_NAMES = {selector.name for rule in rules() for selector in selectors(rule.expr)}


def queried_samples(metrics: list[Metric]) -> dict[str, float]:
    """Return the samples that the rules query, keyed by series in promtool's notation."""
    samples = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name in QUERIED_NAMES:
                labels = {**sample.labels, "instance": "n1", "job": "training"}
                matchers = ",".join(f"{name}={json.dumps(text)}" for name, text in sorted(labels.items()))
                samples[f"{sample.name}{{{matchers}}}"] = float(sample.value)
    return samples


Action = Callable[[Rank], None]
"""Work of a rank, repeated for a minute."""


def train(rank: Rank, *, seconds: float = 5.0, compute: float = 4.0, loss: float = 2.5) -> None:
    """Complete a step, and save a checkpoint about every ten minutes."""
    rank.step(seconds, compute, loss)
    if int(rank.time // seconds) % int(600 // seconds) == 0:
        rank.save()


def no_fault(simulation: Simulation) -> Action:
    del simulation
    return train


def nan_loss(simulation: Simulation) -> Action:
    return lambda rank: train(
        rank, loss=math.nan if simulation.scrapes == simulation.healthy_scrapes else 2.5
    )


def hang(simulation: Simulation) -> Action:
    del simulation
    return lambda rank: rank.enter_forever(kinds.TRAINING_ITERATION)


def straggler(simulation: Simulation) -> Action:
    del simulation
    return lambda rank: train(rank, compute=5.0 if rank.process.rank else 2.0)


def sidecar_killed(simulation: Simulation) -> Action:
    if simulation.scrapes == simulation.healthy_scrapes:
        simulation.exporter_is_up = False
    elif simulation.scrapes == simulation.healthy_scrapes + 12:
        simulation.sidecar.restart()
        simulation.exporter_is_up = True
    return train


def job_killed(simulation: Simulation) -> Action:
    if simulation.job_is_alive:
        simulation.kill_job()
    return train


def slower_steps(simulation: Simulation) -> Action:
    del simulation
    return lambda rank: train(rank, seconds=8.0, compute=6.4)


def save_that_hangs(simulation: Simulation) -> Action:
    del simulation
    return lambda rank: rank.enter_forever(kinds.CHECKPOINT_SAVE)


def gpu_lost(simulation: Simulation) -> Action:
    simulation.lost_gpus = 1
    return train


def switch_lost(simulation: Simulation) -> Action:
    simulation.switch_is_lost = True
    return train


Fault = Callable[[Simulation], Action]
"""Function that changes a simulation before each minute of the fault, and returns what its ranks do."""
FAULTS: dict[Fault, set[str]] = {
    no_fault: set(),
    nan_loss: {"TrainingLossNonFinite"},
    hang: {"TrainingHang"},
    straggler: {"TrainingStraggler"},
    sidecar_killed: {"ExporterDown"},
    job_killed: {"RunDied"},
    slower_steps: {"RunSlower"},
    save_that_hangs: {"CheckpointHangs"},
    gpu_lost: {"GpuLost", "GpuMissing", "GpuXidCritical"},
    switch_lost: {"IbLinkDown"},
}
"""Expected alerts of each fault."""


@needs_promtool
@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_fires_only_the_expected_alerts(tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "state").mkdir()
    # RunSlower compares with the hour before.
    healthy_scrapes = 80 if fault in {no_fault, slower_steps} else 20
    simulation = Simulation(tmp_path / "state", healthy_scrapes)
    while simulation.scrapes <= healthy_scrapes + FAULT_SCRAPES:
        simulation.advance(
            no_fault(simulation) if simulation.scrapes < healthy_scrapes else fault(simulation)
        )

    assert simulation.fired_alerts(tmp_path) == FAULTS[fault]
