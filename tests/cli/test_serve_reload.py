"""Reload in a running sidecar: what changes, what stays, and what is told."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from serve_support import Sidecar, sidecar
from waiting import wait_until

SUCCESSFUL = "exporter_config_last_reload_successful"
SUCCESS_TIME = "exporter_config_last_reload_success_timestamp_seconds"


def by_signal(running: Sidecar) -> None:
    before = running.log.count("reloaded")
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: running.log.count("reloaded") > before)


def by_http(running: Sidecar) -> None:
    running.ask("/-/reload", "POST")


WAYS = pytest.mark.parametrize("reload", [by_signal, by_http])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("collectors: {memory: {interval: 1s}, pressure: {enabled: false}}\n")
    return path


@WAYS
def test_collectors_are_added_removed_and_timed_anew(
    tmp_path: Path, file: Path, reload: Callable[[Sidecar], None]
) -> None:
    interval = 'exporter_collector_interval_seconds{collector="%s"}'
    with sidecar(tmp_path, f"--config.file={file}", "--web.enable-lifecycle") as running:
        before = running.collectors()
        file.write_text(
            "collectors: {memory: {enabled: false}, cpu: {interval: 2s, per_core: true}}\nfeed: {interval: 2s}"
        )
        reload(running)
        after = running.collectors()
        times = [running.sample(interval % name) for name in ("cpu", "feed")]
        wait_until(lambda: 'host_cpu_seconds_total{cpu="0",' in running.ask("/metrics")[1])
        gone = running.sample("host_memory_total_bytes")

    assert before - after == {"memory"}
    assert after - before == {"pressure"}
    assert times == [2, 2]
    assert gone is None


@WAYS
def test_a_wrong_file_changes_nothing_and_is_told_in_full(
    tmp_path: Path, file: Path, reload: Callable[[Sidecar], None]
) -> None:
    with sidecar(tmp_path, f"--config.file={file}", "--web.enable-lifecycle") as running:
        before, time_before = running.ask("/config"), running.sample(SUCCESS_TIME)
        file.write_text("collectors: {memory: {interval: 0s}, clod: {}}\nlog: {level: loud}\n")
        reload(running)
        bad, time_bad = running.sample(SUCCESSFUL), running.sample(SUCCESS_TIME)
        unchanged = running.ask("/config") == before
        file.write_text("")
        reload(running)
        good = running.sample(SUCCESSFUL)

    assert (bad, good) == (0, 1)
    assert time_bad == time_before
    assert unchanged
    for problem in (f"{file}:1:33: collectors.memory.interval", "unknown key", f"{file}:2:14: log.level"):
        assert problem in running.log


def test_a_collector_that_is_only_timed_anew_goes_on_at_once(tmp_path: Path, file: Path) -> None:
    with sidecar(tmp_path, f"--config.file={file}", "--web.enable-lifecycle") as running:
        wait_until(lambda: running.sample("host_memory_total_bytes") is not None)
        file.write_text("collectors: {memory: {interval: 1h}}")
        by_http(running)
        wait_until(lambda: running.sample("host_memory_total_bytes") is not None)
        interval = running.sample('exporter_collector_interval_seconds{collector="memory"}')

    assert interval == 3600


def test_http_answers_with_the_problems(tmp_path: Path, file: Path) -> None:
    with sidecar(tmp_path, f"--config.file={file}", "--web.enable-lifecycle") as running:
        good = running.ask("/-/reload", "POST")
        file.write_text("nonsense: 1")
        bad = running.ask("/-/reload", "PUT")

    assert good == (200, "reloaded\n")
    assert bad[0] == 500
    assert f'{file}:1:1: nonsense: unknown key "nonsense"' in bad[1]


def test_what_needs_a_restart_keeps_its_value_and_is_told_once(tmp_path: Path, file: Path) -> None:
    with sidecar(tmp_path, f"--config.file={file}") as running:
        file.write_text("exposition: {max_series: 500}\nstate: {dir: other}\nlog: {level: warn}")
        by_signal_quietly(running)
        by_signal_quietly(running)
        config = running.ask("/config")[1]

    told = [line for line in running.log.splitlines() if "needs a restart" in line]
    assert [line.rpartition("setting=")[2] for line in told] == ["state.dir", "exposition.max_series"]
    assert "max_series: 15000" in config
    assert "level: warn" in config


def by_signal_quietly(running: Sidecar) -> None:
    before = running.sample(SUCCESS_TIME)
    running.process.send_signal(signal.SIGHUP)
    wait_until(lambda: running.sample(SUCCESS_TIME) != before)


def test_a_flag_still_wins_over_the_file(tmp_path: Path, file: Path) -> None:
    with sidecar(tmp_path, f"--config.file={file}", "--log.level=info") as running:
        file.write_text("log: {level: error, format: json}")
        by_signal_quietly(running)
        config = running.ask("/config")[1]

    assert "level: info" in config
    assert "format: json" in config
