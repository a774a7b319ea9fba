"""Energy ledger: shares of runs, carbon and cost, state and restarts, and one counting exporter per machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from energy_support import EnergyNode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_support import START, Clock, Page

from exporter.collectors.job import MAX_EXITED_RUNS, EnergyReading, GpuProcessUse, MachineUse, RunUse
from exporter.errors import CollectError
from exporter.ledger.energy.carbon_file import CarbonFile
from exporter.ledger.energy.node_lock import NodeLock
from exporter.ledger.energy.options import EnergyOptions, Intensity

ENERGY_JOULES = "training_energy_joules_total"
JOULES_PER_KWH = 3.6e6


@dataclass
class Run:
    """Load of a run: busy CPUs, memory, and SM utilization by GPU (None if unknown)."""

    cpus: float = 1.0
    allowed_cpus: int = 4
    resident_bytes: int = 250
    gpus: Mapping[str, float | None] = field(default_factory=dict)
    gpu_bytes: int | None = 1 << 30
    cpu_seconds: float = 0.0


class Node(EnergyNode):
    """Machine of 4 CPUs with controlled power. `foreign_cpus` of them belong to processes of no run."""

    def __init__(
        self,
        directory: Path,
        *,
        watts: Mapping[str, float] | None = None,
        runs: Mapping[str, Run] | None = None,
        **options: Any,
    ) -> None:
        self.watts = dict(watts or {"package0": 100.0})
        self.runs = dict(runs or {})
        self.idle_watts: float | None = None
        self.foreign_cpus = 0.0
        self.foreign_gpu_use: dict[str, float] = {}
        self.unreadable_devices: set[str] = set()
        self.has_visible_processes = True
        self.busy_seconds = 0.0
        self.joules: dict[str, float] = {}
        super().__init__(directory, clock=Clock(wall=START, monotonic=1000.0), **options)

    def work_for(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.busy_seconds += seconds * (self.foreign_cpus + sum(run.cpus for run in self.runs.values()))
        for run in self.runs.values():
            run.cpu_seconds += seconds * run.cpus
        for device, watts in self.watts.items():
            self.joules[device] = self.joules.get(device, 0.0) + watts * seconds

    def collect(self) -> Page:
        page = super().collect()
        assert page.families.keys() <= {spec.name for spec in self.collector.specs}
        for name, family in page.families.items():
            for sample in family.samples:
                assert sample.value >= 0
                assert sample.value <= 1 or not name.endswith("_ratio")
        return page

    def collect_after(self, seconds: float) -> Page:
        self.work_for(seconds)
        return self.collect()

    def readings(self) -> list[EnergyReading]:
        return [
            EnergyReading(
                "gpu" if device.startswith("GPU") else "dram" if device == "dram0" else "cpu",
                device,
                "nvml_counter" if device.startswith("GPU") else "rapl",
                is_measured=True,
                joules=None if device in self.unreadable_devices else self.joules.get(device, 0.0),
                register_joules=self.joules.get(device, 0.0),
                watts=watts,
                time=self.clock.monotonic,
                idle_watts=self.idle_watts,
                name="NVIDIA H100" if device.startswith("GPU") else device,
                power_joules=self.joules.get(device, 0.0) * 1.25 if device.startswith("GPU") else None,
            )
            for device, watts in self.watts.items()
        ]

    def alive(self) -> set[str]:
        return set(self.runs)

    def use(self) -> MachineUse | None:
        runs = tuple(
            RunUse(name, frozenset({pid}), run.cpu_seconds, run.allowed_cpus, run.resident_bytes)
            for pid, (name, run) in enumerate(self.runs.items(), 1)
        )
        return (
            MachineUse(self.clock.monotonic, runs, self.busy_seconds, cpus=4, memory_used_bytes=1000)
            if self.has_visible_processes
            else None
        )

    def gpu_use(self) -> list[GpuProcessUse]:
        job_uses = [
            (pid, uuid, run.gpu_bytes, ratio)
            for pid, run in enumerate(self.runs.values(), 1)
            for uuid, ratio in run.gpus.items()
        ]
        foreign_uses = [(4711, uuid, 1 << 30, ratio) for uuid, ratio in self.foreign_gpu_use.items()]
        return [
            GpuProcessUse(pid, uuid[-1], uuid, size, {} if ratio is None else {"sm": ratio})
            for pid, uuid, size, ratio in (*job_uses, *foreign_uses)
        ]


def observed_node(directory: Path, **options: Any) -> Node:
    """Return a machine after the first pass of the ledger."""
    node = Node(directory, **options)
    node.collect()
    return node


def cpu_energy(page: Page, run: str = "r") -> float | None:
    joules = page.get(ENERGY_JOULES, run=run, component="cpu", method="cpu_share")
    return None if joules is None else round(joules, 6)


def test_the_only_run_on_a_gpu_is_attributed_its_energy_starting_at_zero(tmp_path: Path) -> None:
    node = Node(tmp_path, watts={"GPU-a": 500.0, "GPU-b": 70.0}, runs={"r": Run(gpus={"GPU-a": 0.5})})
    first_page = node.collect()
    page = node.collect_after(5.0)

    assert first_page.get(ENERGY_JOULES, run="r", component="gpu", method="exclusive") == 0.0
    assert page.get(ENERGY_JOULES, run="r", component="gpu", method="exclusive") == 2500.0
    assert page.get("training_energy_share_ratio", run="r", component="gpu", device="GPU-a") == 1.0
    assert page.get("training_energy_share_ratio", run="r", component="gpu", device="GPU-b") is None


@pytest.mark.parametrize(
    ("ratios", "sizes", "foreign_use", "expected"),
    [
        ((0.6, 0.2), (1, 1), 0.2, {("sm_share", "one"): 600, ("sm_share", "two"): 200}),
        ((None, None), (300, 100), None, {("memory_share", "one"): 750, ("memory_share", "two"): 250}),
        ((None, None), (None, None), None, {}),
    ],
    ids=["utilization", "memory", "unknown"],
)
def test_a_shared_gpu_is_divided_by_known_use_and_foreign_use_is_unattributed(
    tmp_path: Path,
    ratios: tuple[float | None, float | None],
    sizes: tuple[int | None, int | None],
    foreign_use: float | None,
    expected: dict[tuple[str, str], float],
) -> None:
    runs = {
        name: Run(gpus={"GPU-a": ratio}, gpu_bytes=size)
        for name, ratio, size in zip(("one", "two"), ratios, sizes, strict=True)
    }
    node = Node(tmp_path, watts={"GPU-a": 100.0}, runs=runs)
    node.foreign_gpu_use = {} if foreign_use is None else {"GPU-a": foreign_use}
    node.collect()
    joules_by_series = node.collect_after(10.0).all(ENERGY_JOULES)

    assert {
        (dict(labels)["method"], dict(labels)["run"]): joules for labels, joules in joules_by_series.items()
    } == pytest.approx(expected)


def test_cpu_energy_is_divided_by_work_and_idle_power_by_allowed_cpus(tmp_path: Path) -> None:
    node = Node(tmp_path, runs={"r": Run(cpus=3.0, allowed_cpus=2)})
    node.idle_watts, node.foreign_cpus = 40.0, 1.0
    node.collect()

    # 600 of 1000 J are for work, and the run does 3/4 of the work. 400 J are idle energy, and the run may use half of the CPUs.
    assert cpu_energy(node.collect_after(10.0)) == 450.0 + 200.0


def test_memory_energy_is_divided_by_resident_memory(tmp_path: Path) -> None:
    node = observed_node(tmp_path, watts={"dram0": 20.0}, runs={"r": Run(resident_bytes=250)})

    # The run uses a quarter of the memory.
    assert (
        node.collect_after(10.0).get(ENERGY_JOULES, run="r", component="dram", method="memory_share") == 50.0
    )


def test_the_only_run_of_a_machine_is_attributed_all_energy_without_visible_processes(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, options=EnergyOptions(whole_machine=True), runs={"r": Run()})
    node.has_visible_processes = False
    node.collect()

    assert node.collect_after(10.0).get(ENERGY_JOULES, run="r", component="cpu", method="whole") == 1000.0


def test_energy_of_a_machine_without_a_job_is_unattributed(tmp_path: Path) -> None:
    node = observed_node(tmp_path)
    node.collect_after(3600.0)
    node.runs["r"] = Run(cpus=4.0)

    assert [cpu_energy(node.collect_after(5.0)), cpu_energy(node.collect_after(5.0))] == [0.0, 500.0]


PRICED_OPTIONS = EnergyOptions(
    pue=1.5,
    carbon_intensity=360.0,
    carbon_zone="DE",
    carbon_factor="lifecycle",
    carbon_kind="average",
    electricity_price=0.36,
    currency="EUR",
    gpu_hour_price=3.6,
)


def test_energy_becomes_carbon_and_cost_and_gpu_time_becomes_cost(tmp_path: Path) -> None:
    node = observed_node(
        tmp_path, options=PRICED_OPTIONS, watts={"GPU-a": 500.0}, runs={"r": Run(gpus={"GPU-a": 1.0})}
    )
    page = node.collect_after(500.0)
    joules, eur, gpu = 250_000.0, {"currency": "EUR"}, {"run": "r", "component": "gpu"}
    grid = {"zone": "DE", "source": "config", "factor": "lifecycle", "kind": "average"}
    expected: list[tuple[str, dict[str, str], float]] = [
        ("carbon_grams_total", gpu, joules * 1.5 * 1e-4),
        ("cost_total", {"run": "r", "kind": "electricity", **eur}, joules * 1.5 * 1e-7),
        ("cost_total", {"run": "r", "kind": "device_time", **eur}, 500 * 0.001),
        ("power_usage_effectiveness", {"source": "config"}, 1.5),
        ("carbon_intensity_grams_per_joule", grid, 1e-4),
        ("electricity_price_per_joule", {"source": "config", **eur}, 1e-7),
        ("gpu_price_per_second", eur, 0.001),
    ]

    for name, labels, value in expected:
        assert page.get(f"training_{name}", **labels) == pytest.approx(value), name


def test_a_changed_carbon_file_applies_to_later_energy_only(tmp_path: Path) -> None:
    file = tmp_path / "carbon"
    file.write_text("360\n")
    node = observed_node(
        tmp_path, options=EnergyOptions(carbon_intensity_file=file), runs={"r": Run(cpus=4.0)}
    )
    page = node.collect_after(5.0)
    file.write_text("36\n")
    os.utime(file, (START + 7, START + 7))
    later_page = node.collect_after(5.0)

    assert page.get("training_carbon_grams_total", run="r", component="cpu") == pytest.approx(500 * 1e-4)
    assert later_page.get("training_carbon_grams_total", run="r", component="cpu") == pytest.approx(
        500 * 1.1e-4
    )
    timestamp = later_page.get("training_carbon_intensity_last_update_timestamp_seconds", source="file")
    assert timestamp == START + 7


def test_a_broken_carbon_file_is_a_problem_of_the_collector_and_keeps_the_last_value(tmp_path: Path) -> None:
    file = tmp_path / "carbon"
    file.write_text("360\n")
    os.utime(file, (START - 5, START - 5))
    node = observed_node(tmp_path, options=EnergyOptions(carbon_intensity_file=file), runs={"r": Run()})
    file.write_text("three hundred\n")
    failed_page = node.collect_after(5.0)
    problems = node.last_collected.problems
    file.write_text("36\n")
    os.utime(file, (START, START))
    recovered_page = node.collect_after(5.0)

    name = "training_carbon_intensity_grams_per_joule"
    assert failed_page.get(name, source="file") == pytest.approx(1e-4)
    assert [reason for reason, _ in problems] == ["carbon_file"]
    assert recovered_page.get(name, source="file") == pytest.approx(1e-5)
    assert node.last_collected.problems == []


@pytest.mark.parametrize(
    ("content", "is_valid"),
    [
        (b"327.5\n", True),
        (b"\xef\xbb\xbf327.5\r\n", True),
        (b"", False),
        (b"nan", False),
        (b"1e9", False),
        (b"327,5", False),
        (b"\xff\xfe", False),
        (b"1" * (5 << 20), False),
        (None, False),
    ],
)
def test_only_a_carbon_file_with_a_plausible_number_is_accepted_and_a_pipe_does_not_block(
    content: bytes | None, is_valid: bool, tmp_path: Path
) -> None:
    file = tmp_path / "carbon"
    os.mkfifo(file) if content is None else file.write_bytes(content)
    os.utime(file, (START - 1, START - 1))
    carbon = CarbonFile(file)
    with nullcontext() if is_valid else pytest.raises(CollectError, match=str(file)):
        carbon.read()

    assert carbon.intensity == (Intensity(327.5 / JOULES_PER_KWH, "file", START - 1) if is_valid else None)


def test_counters_continue_after_a_restart_and_the_gap_belongs_to_surviving_runs(
    tmp_path: Path,
) -> None:
    node = observed_node(tmp_path, options=PRICED_OPTIONS, runs={"old": Run(cpus=4.0)})
    initial_page = node.collect_after(100.0)
    node.work_for(30.0)
    node.runs["new"] = Run(cpus=0.0)
    node.restart()
    first_page = node.collect()
    later_page = node.collect_after(10.0)

    assert [cpu_energy(page, "old") for page in (initial_page, first_page, later_page)] == [
        10_000,
        10_000,
        14_000,
    ]
    assert [cpu_energy(page, "new") for page in (first_page, later_page)] == [0, 0]
    carbon = later_page.get("training_carbon_grams_total", run="old", component="cpu")
    assert carbon == pytest.approx(14_000.0 * 1.5 * 1e-4)


def test_a_run_that_returns_after_its_series_have_ended_continues_without_the_energy_of_the_gap(
    tmp_path: Path,
) -> None:
    node = observed_node(tmp_path, runs={"r": Run(cpus=4.0)})
    node.collect_after(10.0)
    run = node.runs.pop("r")
    page_while_lingering = node.collect_after(100.0)
    final_page = [node.collect_after(100.0) for _ in range(10)][-1]  # the series end after 900 s
    node.runs["r"] = run
    node.collect_after(5.0)

    assert [
        cpu_energy(page_while_lingering),
        cpu_energy(final_page),
        cpu_energy(node.collect_after(5.0)),
    ] == [
        1000,
        None,
        1500,
    ]


def test_the_energy_of_the_runs_that_ended_last_is_shown(tmp_path: Path) -> None:
    node = observed_node(tmp_path, runs={"running": Run()})
    for number in range(MAX_EXITED_RUNS + 5):
        node.runs[f"short-{number}"] = Run()
        node.collect_after(5.0)
        node.collect_after(5.0)
        del node.runs[f"short-{number}"]
    page = node.collect_after(5.0)
    shown_runs = {f"short-{number}" for number in range(5, MAX_EXITED_RUNS + 5)}

    assert {dict(labels)["run"] for labels in page.all(ENERGY_JOULES)} == {"running", *shown_runs}


def test_unsaved_totals_are_suppressed_and_not_lost(tmp_path: Path) -> None:
    node = observed_node(tmp_path, runs={"r": Run(cpus=4.0)})
    ledger = tmp_path / "ledger"
    ledger.rename(tmp_path / "away")
    ledger.write_text("")  # a file where the directory was
    suppressed_page = node.collect_after(5.0)
    ledger.unlink()
    (tmp_path / "away").rename(ledger)

    assert [cpu_energy(suppressed_page), cpu_energy(node.collect_after(5.0))] == [None, 1000]


def test_a_gpu_has_its_source_and_the_ratio_of_its_counter_to_its_power(tmp_path: Path) -> None:
    node = observed_node(tmp_path, watts={"package0": 100.0, "GPU-a": 100.0}, runs={"r": Run()})
    page = [node.collect_after(5.0) for _ in range(60)][-1]

    assert page.get("exporter_energy_crosscheck", device="GPU-a") == pytest.approx(0.8)
    assert page.get("exporter_energy_crosscheck", device="package0") is None
    labels = {"component": "gpu", "device": "GPU-a", "source": "nvml_counter", "name": "NVIDIA H100"}
    assert page.get("exporter_energy_source_info", measured="true", **labels) == 1


def test_a_restarted_counter_loses_no_energy_of_the_run(tmp_path: Path) -> None:
    node = observed_node(tmp_path, watts={"GPU-a": 400.0}, runs={"r": Run(gpus={"GPU-a": 1.0})})
    node.collect_after(10.0)
    node.joules["GPU-a"] = 0.0  # a configuration reload replaces the collector
    page = node.collect_after(5.0)

    assert page.get(ENERGY_JOULES, run="r", component="gpu", method="exclusive") == pytest.approx(
        4000.0 + 2000.0
    )


LOCK_HOLDER = """
import sys
from pathlib import Path
from exporter.ledger.energy.node_lock import NodeLock
lock = NodeLock(Path(sys.argv[1]), "boot")
print(lock.acquire(), flush=True)
sys.stdin.readline()
"""
"""Program that holds the lock of the machine until its input closes."""


def test_the_second_exporter_of_a_machine_counts_after_the_first_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCK_HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as lock_holder:
        assert lock_holder.stdout is not None
        assert lock_holder.stdout.readline() == "True\n"
        node = Node(tmp_path, runs={"r": Run(cpus=4.0)})
        refused_page = node.collect()
        unsupported = node.last_collected.unsupported
        node.collect_after(5.0)
        lock_holder.kill()
    first_owned_page = node.collect_after(5.0)

    assert refused_page.families.keys() == {"exporter_energy_counting"}
    assert refused_page.get("exporter_energy_counting") == 0
    assert "another exporter" in unsupported[0]
    assert first_owned_page.get("exporter_energy_counting") == 1
    assert cpu_energy(node.collect_after(5.0)) == 500


def test_a_removed_lock_file_is_not_a_lock(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path, "boot")
    assert lock.acquire()
    lock.path.unlink()

    assert lock.acquire()
    assert oct(lock.path.stat().st_mode & 0o777) == "0o666"


def test_an_exporter_counts_energy_if_the_lock_file_cannot_be_created(tmp_path: Path) -> None:
    lock_at_link = NodeLock(tmp_path, "boot")
    lock_at_link.path.symlink_to(tmp_path / "elsewhere")

    for lock in (NodeLock(tmp_path / "missing", "boot"), lock_at_link):
        assert lock.acquire()
        assert lock.cannot_lock
    assert not (tmp_path / "elsewhere").exists()


def counters(page: Page) -> Mapping[tuple[object, ...], float]:
    return {
        (name, labels): value
        for name, family in page.families.items()
        for labels, value in page.all(name).items()
        if family.type == "counter" and name.startswith("training_")
    }


EVENTS = [
    "no event",
    "sidecar restarts",
    "machine reboots",
    "counter falls",
    "counter jumps",
    "run starts",
    "run ends",
    "counter is unreadable",
    "processes are invisible",
    "clock steps back",
]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 2000)), max_size=25))
def test_no_counter_decreases_in_any_sequence_of_events(
    tmp_path: Path, events: list[tuple[str, float]]
) -> None:
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    directory.mkdir()
    watts = {"package0": 90.0, "GPU-a": 300.0}
    node = Node(directory, options=PRICED_OPTIONS, watts=watts, runs={"r": Run(gpus={"GPU-a": 0.5})})
    previous: dict[tuple[object, ...], float] = {}
    for event, amount in events:
        node.unreadable_devices.clear()
        node.has_visible_processes = event != "processes are invisible"
        if event == "sidecar restarts":
            node.work_for(amount)
            node.restart()
        elif event == "machine reboots":
            node.boot, node.clock.monotonic, node.joules = f"boot{amount}", 10.0, {}
            node.restart()
        elif event == "counter falls":
            node.joules["GPU-a"] = amount
        elif event == "counter jumps":
            node.joules["package0"] = amount * 1e6
        elif event == "run starts":
            node.runs[f"r{int(amount) % 3}"] = Run(gpus={"GPU-a": 0.1})
        elif event == "run ends":
            node.runs.pop(f"r{int(amount) % 3}", None)
        elif event == "counter is unreadable":
            node.unreadable_devices.add("package0")
        elif event == "clock steps back":
            node.clock.wall -= amount * 100
        current = counters(node.collect_after(5.0))

        for name, value in current.items():
            assert value >= previous.get(name, 0.0)
        previous.update(current)
