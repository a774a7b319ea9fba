"""Unchanged torchrun under `run`: same exit status and output as without the exporter, and all events on the page."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from bridges_support import create_distribution, needs
from fork_server import forked_interpreter
from places import TESTS
from program_support import page_of_feed, sum_by_labels
from run_support import (
    child_environment,
    fetch_page,
    free_port,
    run_command,
    run_to_completion,
    running_process,
)
from waiting import PATIENCE, wait_until

pytestmark = [needs("torch"), pytest.mark.timeout(180)]


def job_environment(path: Path, **extra: str) -> dict[str, str]:
    """Return the environment of a job in which the package is installed."""
    env = child_environment(
        OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", EXPORTER_FLUSH_SECONDS="0.2", **extra
    )
    env["PYTHONPATH"] = f"{create_distribution(path / 'site')}:{env['PYTHONPATH']}:{TESTS}"
    return env


def torchrun_command(interpreter: str, ranks: int, script: Path, *arguments: object) -> list[str]:
    rendezvous_options = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    worker_options = [f"--nproc-per-node={ranks}", "--max-restarts=1"]
    launcher = [interpreter, "-m", "torch.distributed.run"]
    return [*launcher, *rendezvous_options, *worker_options, str(script), *map(str, arguments)]


@dataclass
class Outcome:
    """Exit status and normalized output of a job, and the last page of the sidecar."""

    status: int
    stdout_lines: list[str]
    stderr_lines: list[str]
    page: str


def run_job(
    path: Path,
    job: list[str],
    env: dict[str, str],
    *,
    is_under_run: bool,
    sigterm_when: Callable[[], bool] | None = None,
) -> Outcome:
    """Run a job to its end, with or without `run`. Send SIGTERM once *sigterm_when* is true."""
    feed, port, last_page = path / "feed", free_port(), ""
    feed.mkdir(exist_ok=True)
    command = (
        run_command(feed, job, "--run.linger=100s", "--run.name=llama", port=port) if is_under_run else job
    )
    with (
        (path / "out").open("w+") as stdout,
        (path / "err").open("w+") as stderr,
        running_process(command, path, env=env, stdout=stdout, stderr=stderr, cwd=path) as process,
    ):
        if sigterm_when is not None:
            wait_until(lambda: sigterm_when() and (fetch_page(port) or not is_under_run), 60)
            process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            last_page = fetch_page(port) or last_page  # as a regular scraper, for which `run` waits
            time.sleep(0.3)
    return Outcome(
        process.returncode, normalized_lines(path / "out"), normalized_lines(path / "err"), last_page
    )


def normalized_lines(path: Path) -> list[str]:
    """Return the sorted lines of an output, with digits replaced.

    Stack frames are left out, because they depend on the timing of the signal, and so is the log of the sidecar.
    """
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return sorted(
        re.sub(r"\d+", "#", line) for line in lines if not line.startswith((" ", "time=", "exporter:"))
    )


def test_a_job_that_fails_twice_behaves_as_without_the_exporter_and_is_recorded_completely(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    call = f"train_with_two_failures({str(tmp_path)!r})"
    script.write_text(f"from programs.torchrun import train_with_two_failures\n{call}\n")
    env, interpreter = job_environment(tmp_path), forked_interpreter("torch")
    plain_outcome, outcome_under_run = (
        run_job(tmp_path, torchrun_command(interpreter, 2, script), env, is_under_run=is_under_run)
        for is_under_run in (False, True)
    )
    page = outcome_under_run.page

    assert outcome_under_run.status == plain_outcome.status
    assert outcome_under_run.stdout_lines == plain_outcome.stdout_lines
    assert outcome_under_run.stderr_lines == plain_outcome.stderr_lines
    assert plain_outcome.status != 0
    assert sum_by_labels(page, "torchelastic_train_step_seconds_count", rank="0") == 6
    assert sum_by_labels(page, "torchelastic_train_step_seconds_count", rank="1") == 6
    assert sum_by_labels(page, "training_events_total", type="worker.evt") == 4
    assert sum_by_labels(page, "training_elastic_restarts_total", role="agent", run="llama") == 1
    assert sum_by_labels(page, "training_elastic_failure_restarts_total") == 1
    assert sum_by_labels(page, "training_elastic_rendezvous_seconds_count") == 2
    assert sum_by_labels(page, "training_elastic_worker_starts_total") == 4
    assert sum_by_labels(page, "training_elastic_runs_total", outcome="failed_with_retries") == 1
    assert sum_by_labels(page, "training_elastic_runs_total") == 1
    for exit_code in ("3", "-15"):
        labels = {"result": "failed", "exit_code": exit_code}
        assert sum_by_labels(page, "training_elastic_worker_results_total", **labels) == 1
    assert sum_by_labels(page, "training_events_total", type="torchelastic.agent.status.SUCCEEDED") == 1
    assert sum_by_labels(page, "exporter_collector_success", collector="feed") == 1


WAITING_WORKER_PROGRAM = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
"""Program that creates a file at its start and waits for a signal. Needs no torch."""


def test_an_agent_ends_on_sigterm_as_without_the_exporter_and_the_run_is_interrupted(tmp_path: Path) -> None:
    script, env = tmp_path / "worker.py", job_environment(tmp_path)
    script.write_text(WAITING_WORKER_PROGRAM)
    plain_outcome, outcome_under_run = (
        run_job(
            tmp_path,
            torchrun_command(sys.executable, 1, script, alive),
            env,
            is_under_run=is_under_run,
            sigterm_when=alive.exists,
        )
        for is_under_run in (False, True)
        for alive in [tmp_path / f"alive-{is_under_run}"]
    )
    page = outcome_under_run.page

    assert outcome_under_run.status == plain_outcome.status
    assert outcome_under_run.stdout_lines == plain_outcome.stdout_lines
    assert outcome_under_run.stderr_lines == plain_outcome.stderr_lines
    assert plain_outcome.status != 0
    assert sum_by_labels(page, "training_elastic_runs_total", outcome="interrupted", run="llama") == 1
    assert sum_by_labels(page, "training_elastic_runs_total") == 1
    calls = {"function": "SimpleElasticAgent.run", "outcome": "failure"}
    assert sum_by_labels(page, "training_elastic_function_calls_total", **calls) == 1
    assert sum_by_labels(page, "training_events_total", type="torchelastic.agent.status.FAILED") == 1
    assert sum_by_labels(page, "training_elastic_restarts_total") == 0


LAUNCHER_PROGRAM = """
# my_launcher.py
import sys
import exporter.elastic.events as events
import exporter.elastic.metrics as metrics
import torch.distributed.elastic.rendezvous.registry as rdzv_registry
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters

class MyMetricHandler(metrics.MetricHandler):
    def emit(self, metric_data: metrics.MetricData):
        # push metric_data to your metric sink
        print("metric", metric_data.name)

class MyEventHandler(events.EventHandler):
    def record(self, event: events.Event):
        # process event
        print("event", event.name, event.source.value, event.timestamp > 1e12)

def trainer_entrypoint_fn(value):
    return value + 1

def main():
    metrics.configure(MyMetricHandler())
    events.configure(MyEventHandler())
    rdzv_handler = rdzv_registry.get_rendezvous_handler(
        RendezvousParameters(backend="c10d", endpoint="127.0.0.1:0", run_id="custom", min_nodes=1, max_nodes=1)
    )
    spec = WorkerSpec(
        role="trainer",
        local_world_size=1,
        entrypoint=trainer_entrypoint_fn,
        args=(41,),
        rdzv_handler=rdzv_handler,
        max_restarts=1,
        monitor_interval=0.1,
        master_addr="127.0.0.1",
    )
    agent = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(), start_method="spawn")
    run_result = agent.run()
    if run_result.is_failed():
        print(f"worker 0 failed with: {run_result.failures[0]}")
    else:
        print(f"worker 0 return value is: {run_result.return_values[0]}")
    rdzv_handler.shutdown()

if __name__ == "__main__":
    main()
"""
"""Launcher from torch 2.13's documentation of customization. Only the imports of its handlers are changed."""


def test_a_custom_launcher_with_its_handlers_is_recorded_as_an_agent(tmp_path: Path) -> None:
    launcher, feed = tmp_path / "my_launcher.py", tmp_path / "feed"
    launcher.write_text(LAUNCHER_PROGRAM)
    feed.mkdir()
    env = job_environment(tmp_path, EXPORTER_FEED_DIR=str(feed))
    process = run_to_completion([forked_interpreter("torch"), str(launcher)], env=env, cwd=tmp_path)
    page = page_of_feed(feed)

    assert process.returncode == 0, process.stderr
    for line in (
        "worker 0 return value is: 42",
        "metric SimpleElasticAgent._rendezvous.success",
        "metric workers.trainer.run_success_no_retries",
        "event torchelastic.worker.status.START WORKER True",
        "event torchelastic.worker.status.SUCCEEDED WORKER True",
    ):
        assert line in process.stdout
    labels = {"result": "succeeded", "worker_role": "trainer"}
    rendezvous = {"type": "torchelastic.rendezvous.SUCCEEDED", "role": "agent"}
    assert sum_by_labels(page, "training_elastic_runs_total", run="custom", outcome="success_no_retries") == 1
    assert sum_by_labels(page, "training_elastic_worker_results_total", **labels) == 1
    assert sum_by_labels(page, "training_events_total", **rendezvous) >= 1


WORKER_PROGRAM = """
import os, sys, time
time.sleep(1)
marker = sys.argv[1]
if marker and not os.path.exists(marker):
    open(marker, "w").close()
    sys.exit(1)
time.sleep(8)
"""
"""Program that fails once if its argument names a marker file, and otherwise sleeps. Needs no torch."""


def test_a_restart_caused_by_another_node_is_recorded_by_both_agents(tmp_path: Path) -> None:
    script, feeds = tmp_path / "worker.py", [tmp_path / "healthy", tmp_path / "failing"]
    script.write_text(WORKER_PROGRAM)
    env = job_environment(tmp_path, EXPORTER_AUTO="1")
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=two", "--rdzv-backend=c10d"]
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *options,
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
    ]

    agents = []
    for feed in feeds:
        feed.mkdir()
        marker = str(tmp_path / "failed") if feed.name == "failing" else ""
        agents.append(
            subprocess.Popen(
                [*agent, str(script), marker],
                env={**env, "EXPORTER_FEED_DIR": str(feed)},
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    try:
        statuses = [process.wait(timeout=100 * PATIENCE) for process in agents]
    finally:
        for process in agents:
            process.kill()
            process.wait()

    assert statuses == [0, 0]
    for feed, failure_restarts, outcome in zip(
        feeds, (0, 1), ("success_no_retries", "success_with_retries"), strict=True
    ):
        page = page_of_feed(feed)
        assert sum_by_labels(page, "training_elastic_restarts_total", run="two", role="agent") == 1
        assert sum_by_labels(page, "training_elastic_failure_restarts_total") == failure_restarts
        assert sum_by_labels(page, "training_elastic_runs_total", outcome=outcome) == 1
