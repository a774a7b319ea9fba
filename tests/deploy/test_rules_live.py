"""Every rule, evaluated by a real Prometheus that scraped the real exporter of the demo."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from prometheus_support import Prometheus, fetch, needs_prometheus
from rules_support import Rule, Selector, accelerated_rules, recording_rules, rules, selectors, thresholds
from run_support import running_process
from waiting import PATIENCE, wait_until

pytestmark = [needs_prometheus, pytest.mark.timeout(180)]

CONFIGURATION = """\
energy: {pue: 1.2, carbon_intensity: 300, currency: EUR, electricity_price: 0.3, lock_dir: LOCKS, whole_machine: true}
"""

ABSENT = {
    'ALERTS{alertstate="firing",alertname="NvmlDown"}': "the driver is read at every scrape",
    'ALERTS{alertstate="firing",run!="",alertname=~"RunDied|TrainingHang"}': "no run dies or hangs",
    'ALERTS{alertstate="firing",run!="",severity="critical",alertname!="TrainingLossNonFinite"}': "no run has a critical problem",
    'ALERTS{alertstate="firing",run!="",severity="warning"}': "no warning about a run fires in the first minutes",
    "exporter_series_dropped_total": "before the first dropped series",
    "cgroup_memory_limit_bytes": "the cgroup of the tests has no limit",
    "cgroup_memory_working_set_bytes": "without a cgroup",
    "cgroup_memory_events_total": "without a cgroup",
    "cgroup_cpu_periods_total": "without a CPU limit some kernels do not count",
    "cgroup_cpu_throttled_periods_total": "without a CPU limit some kernels do not count",
    "cgroup_pressure_io_waiting_seconds_total": "with cgroup v1, or a kernel without PSI",
    "exporter_energy_crosscheck": "needs five minutes of two sources",
    "exporter_energy_gap_seconds_total": "without missed passes",
    "exporter_web_config_last_reload_successful": "without a web configuration",
    "gpu_temperature_threshold_celsius": "GPUs since Hopper report a thermal margin instead",
    "gpu_error_info": "every GPU responds",
    "gpu_xid_errors_total": "before the first Xid",
    "gpu_xid_last_timestamp_seconds": "before the first Xid",
    "gpu_power_idle_watts": "before the GPU was idle once",
    "host_cpu_power_watts": "without RAPL",
    "host_cpu_power_idle_watts": "without RAPL",
    "host_rdma_port_state": "without RDMA",
    "host_rdma_link_downed_total": "without RDMA",
    "training_carbon_intensity_last_update_timestamp_seconds": "a configured value has no update time",
    "training_checkpoint_dir_available_bytes": "no directory is configured",
    "training_checkpoint_dir_size_bytes": "no directory is configured",
    "training_checkpoint_last_bytes": "the demo does not report the size of its checkpoints",
    "training_checkpoints_total": "before the first save, or the first that fails",
    "training_checkpoint_duration_seconds_count": "before the first save",
    "training_checkpoint_duration_seconds_sum": "before the first save",
    "training_checkpoint_interval_seconds": "before the second save",
    "training_checkpoint_last_success_timestamp_seconds": "before the first save",
    "training_gpu_alloc_retries_total": "without torch",
    "training_hang_info": "no run hangs",
    "training_rank_last_exit_timestamp_seconds": "no rank has failed",
    "training_run_outcome_info": "the run of the demo has not ended",
    "training_hardware_flops_total": "the demo does not record hardware FLOPs",
    "training_nonfinite_total": "before the first value that is not finite",
    "training_peak_flops_per_second": "the ranks of the demo name no GPU",
    "training_rank_info": "the ranks of the demo name no GPU",
    'training_phase_active{phase="validation"}': "before the first validation",
    "training_process_gpu_memory_bytes": "the replayed GPUs are held by processes of another machine",
    "training_process_state": "a state that no process is in",
}
"""Families or series that can be absent in this test, with the reason."""


EMPTY_RECORDS = {
    "run:training_mttf:seconds": "before the first interruption",
    "gpu:gpu_recovery_action:info": "no GPU requests an action",
    "instance:gpu_unknown:sum": "the driver is read at every scrape",
    "instance:gpu_driver_down:timestamp_seconds": "the driver is read at every scrape",
    "instance:gpu_driver_down_onset:timestamp_seconds": "the driver is read at every scrape",
    "instance:gpu_driver_down_start:timestamp_seconds": "the driver is read at every scrape",
    "run:training_driver_down:info": "the driver is read at every scrape",
    "gpu:gpu_lost:timestamp_seconds": "no GPU is lost",
    "gpu:gpu_lost_onset:timestamp_seconds": "no GPU is lost",
    "gpu:gpu_lost_start:timestamp_seconds": "no GPU is lost",
    "rank:training_slow:timestamp_seconds": "no rank is slow",
    "rank:training_slow_onset:timestamp_seconds": "no rank is slow",
    "rank:training_slow_start:timestamp_seconds": "no rank is slow",
    "run:training_data_wait:timestamp_seconds": "no rank waits for data",
    "run:training_data_wait_onset:timestamp_seconds": "no rank waits for data",
    "run:training_data_wait_start:timestamp_seconds": "no rank waits for data",
    "gpu:gpu_throttled:timestamp_seconds": "no GPU is throttled",
    "gpu:gpu_throttled_onset:timestamp_seconds": "no GPU is throttled",
    "gpu:gpu_throttled_start:timestamp_seconds": "no GPU is throttled",
    "gpu:gpu_fault:urgency": "no GPU has a problem",
    "gpu:gpu_problem:urgency": "no GPU has a problem",
    "gpu:gpu_problem:timestamp_seconds": "no GPU has a problem",
    "gpu:gpu_problem_onset:timestamp_seconds": "no GPU has a problem",
    "gpu:gpu_problem_start:timestamp_seconds": "no GPU has a problem",
    "gpu:gpu_throttled_temperature:celsius": "no GPU is throttled",
    "run:training_early_end:info": "no run has ended",
    "run:training_odd_phase:info": "the ranks are in one phase",
    "run:training_standstill:info": "no run stands still",
    "run:training_unknown:info": "no run and no rank is without samples",
    "run:training_unseen:timestamp_seconds": "no run is without samples",
}
"""Recording rules without a result although their families exist, with the reason."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Yield a Prometheus with the rules, evaluated every second, after half a cycle of the demo."""
    directory = accelerated_rules(tmp_path_factory.mktemp("live"), 1)
    (directory / "locks").mkdir()
    (directory / "config.yaml").write_text(CONFIGURATION.replace("LOCKS", str(directory / "locks")))
    command = [sys.executable, "-m", "exporter", "demo", "--web.listen-address=127.0.0.1:0"]
    flags = ["--gpu.replay=h100", f"--config.file={directory / 'config.yaml'}"]
    listening, extra_config = r"http://(127\.0\.0\.1:\d+)/metrics", f"rule_files: ['{directory}/*.yml']\n"
    streams = (directory / "log").open("w")
    with streams as log, running_process([*command, *flags], directory, stdout=log, stderr=log) as demo:
        target = {
            "training": wait_until(lambda: re.search(listening, (directory / "log").read_text()), 30)[1]
        }
        with Prometheus(
            directory / "prometheus", target, scrape_seconds=1, extra_config=extra_config
        ) as running:
            wait_until(lambda: running.value('up{job="training"}') == 1, 30)
            time.sleep(10)  # time for an alert that would wrongly fire
            yield running
        demo.send_signal(signal.SIGTERM)  # the demo removes its directory
        demo.wait(30 * PATIENCE)


def can_be_absent(rule: Rule) -> bool:
    """Return True if a part of the expression can be absent. Recording rules are resolved to families."""
    by_name = {record.name: record for record in recording_rules()}
    names = [selector.name for selector in selectors(rule.expr)]
    return any(
        name in {**ABSENT, **EMPTY_RECORDS} or (name in by_name and can_be_absent(by_name[name]))
        for name in names
        if name != rule.name
    )


def missing_after_waiting(missing_names: Callable[[], list[str]]) -> list[str]:
    """Wait until no name is missing, or for four minutes. Return the names that are missing then."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not missing_names(), 60)
    return missing_names()


def test_every_recording_rule_has_data_or_a_listed_reason(prometheus: Prometheus) -> None:
    expected_names = [
        rule.name for rule in recording_rules() if rule.name not in EMPTY_RECORDS and not can_be_absent(rule)
    ]

    def missing_names() -> list[str]:
        return [name for name in expected_names if not prometheus.query(f"present_over_time({name}[2m])")]

    assert missing_after_waiting(missing_names) == []


def queried_selectors() -> list[Selector]:
    """Return the distinct selectors of all rules."""
    return sorted({selector for rule in rules() for selector in selectors(rule.expr)}, key=str)


def test_every_family_of_the_rules_is_present_or_absent_for_a_listed_reason(prometheus: Prometheus) -> None:
    known_names = {rule.name for rule in [*recording_rules(), *thresholds()]} | set(ABSENT)
    expected_selectors = [
        selector for selector in queried_selectors() if not {selector.name, str(selector)} & known_names
    ]

    def missing_names() -> list[str]:
        return [
            str(selector)
            for selector in expected_selectors
            if not prometheus.query(f"present_over_time({selector}[2m])")
        ]

    assert missing_after_waiting(missing_names) == []


def test_no_rule_fails_and_no_critical_alert_fires_except_for_a_loss_that_is_not_finite(
    prometheus: Prometheus,
) -> None:
    body = fetch(f"{prometheus.url}/api/v1/rules")
    assert body is not None
    live_rules = [rule for group in json.loads(body)["data"]["groups"] for rule in group["rules"]]

    assert len(live_rules) == len(rules())
    assert [(rule["name"], rule["lastError"]) for rule in live_rules if rule.get("lastError")] == []
    assert (
        prometheus.query('ALERTS{alertstate="firing",severity="critical",alertname!="TrainingLossNonFinite"}')
        == []
    )
