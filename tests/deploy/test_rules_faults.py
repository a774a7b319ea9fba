"""The table of faults: a job on paper through the real recording, the real ledger and all rules, fault by fault.

Two ranks train for eighty minutes without a fault; the next half hour fires exactly the expected alerts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from ledger_support import Clock, Sidecar, make_process, make_snapshot
from prometheus_client.core import Metric
from rules_support import RULES, needs_promtool, promtool, rules, selectors
from training_support import SimulatedTraining

from exporter.feed.snapshot import ProcessIdentity
from exporter.training import kinds

NODES = [
    f"n{number}" for number in range(1, 5)
]  # both are connected to one switch; the job runs on the first
INTERVAL = 60
FAULT, END = 80, 110  # in scrapes
SYNC = kinds.named_kind("grad_sync", phase=True)


@dataclass
class Rank:
    """Rank of the job with its simulated clock."""

    process: ProcessIdentity
    at: float
    job: SimulatedTraining = field(init=False)
    sequence: int = 0
    stuck: bool = False  # the rank never leaves the block

    def __post_init__(self) -> None:
        self.job = SimulatedTraining(self.at)
        self.job.enter(kinds.TRAINING_LOOP, self.at)
        self.job.publish(self.at)

    def step(self, seconds: float = 5.0, compute: float = 4.0, loss: float = 2.5) -> None:
        """Complete a step: compute for the given time, then wait for the other ranks."""
        begin, end = self.at, self.at + seconds
        self.job.enter(kinds.TRAINING_ITERATION, begin)
        self.job.numbers.record("loss", "train", loss)
        self.job.block(SYNC, begin + compute, end)
        self.job.leave(end)
        self.at = end

    def save(self, seconds: float = 5.0) -> None:
        end, state = self.at + seconds, self.job.state
        steps = state.progress.steps
        save = state.checkpoints.begin(steps, "sync", self.at, steps)
        self.job.block(kinds.CHECKPOINT_SAVE, self.at, end)
        state.checkpoints.succeed(save, end, end)
        self.at = end

    def enter(self, kind: kinds.BlockKind) -> None:
        """Start a block that never ends."""
        if not self.stuck:
            self.job.enter(kind, self.at)
        self.stuck = True

    def write(self, sidecar: Sidecar, now: float) -> None:
        self.sequence += 1
        readings = self.job.publish(now)
        snapshot = make_snapshot(self.process, *readings, sequence=self.sequence, written=now)
        recording = snapshot.recording.replace(training=self.job.reading())
        sidecar.feed.publish(snapshot.replace(recording=recording))


class World:
    """Job, sidecar and Prometheus in simulated time, which starts at 0 as in promtool."""

    def __init__(self, directory: Path) -> None:
        self.sidecar = Sidecar(directory, clock=Clock(wall=1.0))
        self.ranks = [Rank(make_process(rank=rank, started=1.0).replace(trains=True), 1.0) for rank in (0, 1)]
        self.alive = True
        self.scrapable = True
        self.lost_cards = 0
        self.switch_is_lost = False
        self.series: dict[str, list[str]] = {}
        self.scrapes = 0

    def go_on(self, act: Callable[[Rank], None]) -> None:
        """Let a minute pass, in which every rank does this over and over, and scrape."""
        self.sidecar.clock.advance(INTERVAL)
        now = self.sidecar.clock.wall
        for rank in self.ranks if self.alive else ():
            while rank.at < now - 10.0 and not rank.stuck:
                act(rank)
            rank.write(self.sidecar, now)
        self.scrape()

    def kill(self) -> None:
        self.alive = False
        for rank in self.ranks:
            self.sidecar.feed.kill(rank.process)

    def scrape(self) -> None:
        samples: dict[str, float] = {'up{instance="n1",job="training"}': float(self.scrapable)}
        samples |= {f'exporter_build_info{{instance="{node}",job="training"}}': 1.0 for node in NODES}
        for node in NODES:
            samples |= self.hardware(node) if self.scrapable or node != "n1" else {}
        if self.scrapable:
            for rank in self.ranks:
                up = f'training_process_up{{instance="n1",job="training",rank="{rank.process.rank}",run="r"}}'
                samples[up] = float(self.alive)
            samples.update(values(self.sidecar.collector.collect()))
        for name in samples.keys() - self.series.keys():
            self.series[name] = ["_"] * self.scrapes
        for name, published in self.series.items():
            value = samples.get(name)
            missing_value = "stale" if published and published[-1] not in {"_", "stale"} else "_"
            published.append(missing_value if value is None else repr(value))
        self.scrapes += 1

    def hardware(self, node: str) -> dict[str, float]:
        """Series of a node about the link to the switch; the first node also has two cards."""
        of = f'instance="{node}",job="training"'
        port = f'{of},device="mlx5_0",port="1"'
        published = {
            f"host_rdma_port_state{{{port}}}": 1.0 if self.switch_is_lost else 4.0,
            f"host_rdma_link_downed_total{{{port}}}": float(self.switch_is_lost),
        }
        if node == "n1":
            published |= {f"gpu_nvml_up{{{of}}}": 1.0, f"gpu_devices_expected{{{of}}}": 2.0}
            published[f"gpu_devices{{{of}}}"] = 2.0 - self.lost_cards
            for card in (0, 1):
                published[f'gpu_up{{{of},gpu="{card}",uuid="GPU-{card}"}}'] = float(card >= self.lost_cards)
            if self.lost_cards:
                xid = f'{of},gpu="0",uuid="GPU-0",xid="79"'
                published |= {
                    f"gpu_xid_errors_total{{{xid}}}": 1.0,
                    f"gpu_xid_last_timestamp_seconds{{{xid}}}": float(FAULT * INTERVAL),
                }
        return published

    def firing(self, directory: Path) -> set[str]:
        """Every alert that fired at any time."""
        case = {
            "interval": f"{INTERVAL}s",
            "input_series": [
                {"series": name, "values": " ".join(published)} for name, published in self.series.items()
            ],
            "promql_expr_test": [
                {
                    "expr": f'group by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{END}m]))',
                    "eval_time": f"{END}m",
                    "exp_samples": [{"labels": '{alertname="none"}', "value": 0}],
                }
            ],
        }
        body = {"rule_files": [*map(str, RULES)], "evaluation_interval": "30s", "tests": [case]}
        path = directory / "case.yaml"
        path.write_text(yaml.safe_dump(body), encoding="utf-8")
        completed = promtool("test", "rules", path)
        actual_text = (completed.stdout + completed.stderr).partition("got:")[2]
        assert actual_text, completed.stdout + completed.stderr
        return {word.split('"')[1] for word in actual_text.split("alertname=")[1:]} - {"none"}


QUERIED = {selector.name for rule in rules() for selector in selectors(rule.expr)}


def values(metrics: list[Metric]) -> dict[str, float]:
    """Series used by the rules, by their text."""
    samples = {}
    for metric in metrics:
        for sample in metric.samples:
            if sample.name in QUERIED:
                labels = {**sample.labels, "instance": "n1", "job": "training"}
                inside = ",".join(f"{name}={json.dumps(text)}" for name, text in sorted(labels.items()))
                samples[f"{sample.name}{{{inside}}}"] = float(sample.value)
    return samples


def train(rank: Rank, *, seconds: float = 5.0, compute: float = 4.0, loss: float = 2.5) -> None:
    """A step, and a save every ten minutes or so."""
    rank.step(seconds, compute, loss)
    if int(rank.at // seconds) % int(600 // seconds) == 0:
        rank.save()


def healthy(world: World) -> Callable[[Rank], None]:
    del world
    return train


def nan(world: World) -> Callable[[Rank], None]:
    return lambda rank: train(rank, loss=math.nan if world.scrapes == FAULT else 2.5)


def hang(world: World) -> Callable[[Rank], None]:
    del world
    return lambda rank: rank.enter(kinds.TRAINING_ITERATION)


def straggler(world: World) -> Callable[[Rank], None]:
    del world
    return lambda rank: train(rank, compute=5.0 if rank.process.rank else 2.0)


def sidecar_killed(world: World) -> Callable[[Rank], None]:
    if world.scrapes == FAULT:
        world.scrapable = False
    elif world.scrapes == FAULT + 12:
        world.sidecar.restart()
        world.scrapable = True
    return train


def job_killed(world: World) -> Callable[[Rank], None]:
    if world.alive:
        world.kill()
    return train


def slower(world: World) -> Callable[[Rank], None]:
    del world
    return lambda rank: train(rank, seconds=8.0, compute=6.4)


def save_that_hangs(world: World) -> Callable[[Rank], None]:
    del world
    return lambda rank: rank.enter(kinds.CHECKPOINT_SAVE)


def card_lost(world: World) -> Callable[[Rank], None]:
    world.lost_cards = 1
    return train


def switch_lost(world: World) -> Callable[[Rank], None]:
    world.switch_is_lost = True
    return train


Fault = Callable[[World], Callable[[Rank], None]]
FAULTS: dict[Fault, set[str]] = {
    healthy: set(),
    nan: {"TrainingLossNonFinite"},
    hang: {"TrainingHang"},
    straggler: {"TrainingStraggler"},
    sidecar_killed: {"ExporterDown"},
    job_killed: {"RunDied"},
    slower: {"RunSlower"},
    save_that_hangs: {"CheckpointHangs"},
    card_lost: {"GpuLost", "GpuMissing", "GpuXidCritical"},
    switch_lost: {"IbLinkDown"},
}


@needs_promtool
@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_fires_only_the_expected_alerts(tmp_path: Path, fault: Fault) -> None:
    (tmp_path / "state").mkdir()
    world = World(tmp_path / "state")
    while world.scrapes <= END:
        world.go_on(healthy(world) if world.scrapes < FAULT else fault(world))

    assert world.firing(tmp_path) == FAULTS[fault]
