"""Reloads of a running sidecar, and energy and processes of a real job after SIGKILL and beside a second exporter."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serve_support import Sidecar, recording, sidecar
from waiting import wait_until

from exporter.cli import wiring
from exporter.cli.configuration import Configuration
from exporter.cli.wiring import Wiring
from exporter.collectors.gpu.collector import GpuCollector
from exporter.collectors.scheduler import Scheduler
from exporter.feed.reader import FeedReader
from exporter.ledger.collector import JobCollector
from exporter.ledger.state.store import StateStore

RELOAD_SUCCESS = "exporter_config_last_reload_successful"
SUCCESS_TIME = "exporter_config_last_reload_success_timestamp_seconds"


def reload_by_http(running: Sidecar) -> None:
    running.request("/-/reload", "POST")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("collectors: {memory: {interval: 1s}, pressure: {enabled: false}}\n")
    return path


def test_a_reload_adds_removes_and_reschedules_collectors(tmp_path: Path, file: Path) -> None:
    interval_series = 'exporter_collector_interval_seconds{collector="%s"}'
    with sidecar(tmp_path, f"--config.file={file}") as running:
        initial_collectors = running.collectors()
        file.write_text(
            "collectors: {memory: {enabled: false}, cpu: {interval: 2s, per_core: true}}\nfeed: {interval: 2s}"
        )
        running.reload()
        reloaded_collectors = running.collectors()
        intervals = [running.sample(interval_series % name) for name in ("cpu", "feed")]
        wait_until(lambda: 'host_cpu_seconds_total{cpu="0",' in running.page)
        memory_bytes = running.sample("host_memory_total_bytes")

    assert initial_collectors - reloaded_collectors == {"memory"}
    assert reloaded_collectors - initial_collectors == {"pressure"}
    assert (intervals, memory_bytes) == ([2, 2], None)


def test_an_invalid_file_changes_nothing_and_every_problem_is_logged(tmp_path: Path, file: Path) -> None:
    with sidecar(tmp_path, f"--config.file={file}", "--web.enable-lifecycle") as running:
        initial_config, initial_time = running.request("/config"), running.sample(SUCCESS_TIME)
        file.write_text("collectors: {memory: {interval: 0s}, clod: {}}\nlog: {level: loud}\n")
        reload_by_http(running)
        success_after_error, time_after_error = running.sample(RELOAD_SUCCESS), running.sample(SUCCESS_TIME)
        is_unchanged = running.request("/config") == initial_config
        file.write_text("")
        reload_by_http(running)
        success_after_fix = running.sample(RELOAD_SUCCESS)

    assert (success_after_error, success_after_fix) == (0, 1)
    assert time_after_error == initial_time
    assert is_unchanged
    for problem in (f"{file}:1:33: collectors.memory.interval", "unknown key", f"{file}:2:14: log.level"):
        assert problem in running.log


def test_a_rescheduled_collector_continues_immediately(tmp_path: Path, file: Path) -> None:
    with sidecar(tmp_path, f"--config.file={file}", "--web.enable-lifecycle") as running:
        wait_until(lambda: running.sample("host_memory_total_bytes") is not None)
        file.write_text("collectors: {memory: {interval: 1h}}")
        reload_by_http(running)
        wait_until(lambda: running.sample("host_memory_total_bytes") is not None)
        interval = running.sample('exporter_collector_interval_seconds{collector="memory"}')

    assert interval == 3600


def test_an_option_that_needs_a_restart_keeps_its_value_and_is_logged_once(
    tmp_path: Path, file: Path
) -> None:
    with sidecar(tmp_path, f"--config.file={file}") as running:
        file.write_text("exposition: {max_series: 500}\nstate: {dir: other}\nlog: {format: json}")
        running.reload()
        running.reload()
        config = running.request("/config")[1]

    restart_lines = [line for line in running.log.splitlines() if "needs a restart" in line]
    assert [line.rpartition("setting=")[2] for line in restart_lines] == [
        "state.dir",
        "exposition.max_series",
    ]
    assert "max_series: 15000" in config
    assert "format: json" in config


@contextlib.contextmanager
def wired(directory: Path, configuration: Configuration, scheduler: Scheduler) -> Iterator[Wiring]:
    """Build a schedule, which does not run."""
    state = StateStore(directory, sidecar="test")
    jobs = JobCollector(FeedReader(directory), state)
    built = Wiring(configuration, scheduler, jobs=jobs, state=state, feed_directory=directory)
    try:
        built.apply(configuration)
        yield built
    finally:
        built.close()


class CollectorWithoutDescriptors(GpuCollector):
    """GPU collector for which the process has no descriptor left."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def refuse_descriptors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wiring, "GpuCollector", CollectorWithoutDescriptors)


def refuse_threads(patch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("refuse", [refuse_descriptors, refuse_threads])
def test_a_reload_that_fails_changes_no_collector_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch], None]
) -> None:
    initial = Configuration()
    collectors, memory = initial.collectors, initial.collectors.memory
    changed = replace(
        initial,
        collectors=replace(
            collectors,
            cpu=replace(collectors.cpu, enabled=False),
            memory=replace(memory, interval=30.0),
            disk=replace(collectors.disk, partitions=True),
        ),
        gpu=replace(initial.gpu, retry=7.0),
        goodput=replace(initial.goodput, hang_after=60.0),
    )
    scheduler = Scheduler(publish=lambda _name, _families: None, withdraw=lambda _name: None)
    with wired(tmp_path, initial, scheduler) as built:
        initial_statuses, initial_gpu = scheduler.statuses(), built.gpu
        with monkeypatch.context() as patched:
            refuse(patched)
            with pytest.raises((OSError, RuntimeError)):
                built.apply(changed)
        failed_statuses, failed_gpu = scheduler.statuses(), built.gpu
        failed_goodput = built._jobs.sessions.options
        built.apply(changed)
        names = {status.name for status in scheduler.statuses()}

        assert failed_statuses == initial_statuses
        assert failed_gpu is initial_gpu
        assert failed_goodput == initial.goodput
        assert "cpu" not in names
        assert built.gpu is not initial_gpu


JOB = """
import sys, exporter
stat = exporter.Stat("x", {exporter.Aggregation.MEAN})
stat.add(1)
exporter.flush()
print("recording", flush=True)
while not sys.stdin.readline():
    pass
"""

CONFIGURATION = """
collectors:
  processes: {{interval: 200ms}}
  rapl: {{interval: 200ms}}
energy:
  enabled: {enabled}
  interval: 200ms
  lock_dir: {directory}
  whole_machine: true
  cpu_tdp_watts: 100
  carbon_intensity: 360
"""

ENERGY = 'training_energy_joules_total{component="cpu",method="whole",run="r"}'
CARBON = 'training_carbon_grams_total{component="cpu",run="r"}'
COUNTING = "exporter_energy_counting"
CPU_SECONDS = 'training_process_cpu_seconds_total{mode="user",rank="3",role="trainer",run="r"}'


def write_configuration(tmp_path: Path, *, is_enabled: bool = True) -> str:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIGURATION.format(directory=tmp_path, enabled=str(is_enabled).lower()))
    return f"--config.file={file}"


def test_after_a_killed_sidecar_energy_continues_and_cpu_time_is_counted_again(tmp_path: Path) -> None:
    def joules(running: Sidecar) -> float:
        return running.sample(ENERGY) or 0.0

    with recording(tmp_path, JOB, 3):
        with sidecar(tmp_path, write_configuration(tmp_path)) as killed:
            wait_until(lambda: joules(killed) > 5.0 and killed.sample(CARBON))
            initial_joules = joules(killed)
            wait_until(lambda: killed.sample(CPU_SECONDS))
            killed.end(signal.SIGKILL)
        with sidecar(tmp_path, write_configuration(tmp_path)) as restarted:
            joules_after_restart = wait_until(
                lambda: restarted.sample(CPU_SECONDS) is not None and joules(restarted)
            )
            wait_until(lambda: joules(restarted) > initial_joules)
            initial_cpu_seconds = restarted.sample(CPU_SECONDS)
            wait_until(lambda: (restarted.sample(CPU_SECONDS) or 0.0) > (initial_cpu_seconds or 0.0))
            page = restarted.page

    assert joules_after_restart >= initial_joules
    assert 'training_process_up{rank="3",run="r"} 1' in page
    assert 'training_process_proportional_bytes{rank="3",role="trainer",run="r"}' in page


def test_only_one_of_two_sidecars_on_a_machine_counts_energy(tmp_path: Path) -> None:
    second_state = tmp_path / "other"
    second_state.mkdir()
    flag = write_configuration(tmp_path)
    with sidecar(tmp_path, flag) as first:
        wait_until(lambda: first.sample(COUNTING) == 1)
        with sidecar(second_state, flag) as second:
            wait_until(lambda: "another exporter on this machine counts the energy" in second.log)
            wait_until(lambda: second.sample(COUNTING) == 0)
            page = second.page
            assert first.end() == 0
            wait_until(lambda: second.sample(COUNTING) == 1)

    assert "host_cpu_energy_joules_total{" not in page


def test_energy_can_be_switched_off_and_on_again(tmp_path: Path) -> None:
    with recording(tmp_path, JOB, 3), sidecar(tmp_path, write_configuration(tmp_path)) as running:
        initial_joules = wait_until(lambda: running.sample(ENERGY))
        write_configuration(tmp_path, is_enabled=False)
        running.reload()
        wait_until(lambda: running.sample(ENERGY) is None)
        assert "energy" not in running.collectors()
        write_configuration(tmp_path)
        running.reload()
        final_joules = wait_until(lambda: running.sample(ENERGY))

    assert final_joules >= initial_joules
