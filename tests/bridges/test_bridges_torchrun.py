"""torchrun, unchanged: under `run` it ends and writes as without us, and all it tells is on the page."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bridges_support import installed_distribution
from elastic_support import labelled, page_of
from run_support import answers, environment, free_port, run_command, scrape, started
from test_bridges import torch_wanted
from waiting import PATIENCE, wait_until

# Two ranks; rank 1 fails once, while rank 0 waits to be ended with it.
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.distributed.elastic.events as events
import torch.distributed.elastic.metrics as metrics

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# A store for each attempt: in torch 2.13 the second may find addresses of the first in torchrun's own.
store = f"file://{sys.argv[1]}-{attempt}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
for step in range(3):
    dist.all_reduce(torch.ones(1))
    metrics.put_metric("train.step_ms", 12)
events.record(events.Event("worker.evt", events.EventSource.WORKER, metadata={"rank": rank}))
sys.stdout.write(f"rank {rank} attempt {attempt}\\n")
sys.stdout.flush()
dist.barrier()
time.sleep(1)  # a rank that torchrun ends by SIGTERM has lost what it did not write yet
if not attempt:
    if rank == 1:
        sys.exit(7)
    time.sleep(60)
if rank == 0 and os.environ["ENDS_WITH"] != "0":
    time.sleep(60)
sys.exit(int(os.environ["ENDS_WITH"]))
"""


def torchrun(script: Path, store: Path) -> list[str]:
    static = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    own = ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=1"]
    return [sys.executable, "-m", "torch.distributed.run", *static, *own, str(script), str(store)]


def told(text: str) -> list[str]:
    """What was written, without what is another each time, and without the sidecar's own log."""
    lines = [
        re.sub(r"\d+", "#", line) for line in text.splitlines() if not line.startswith(("time=", "exporter:"))
    ]
    return sorted(lines)


@torch_wanted
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ends_with", [0, 3])
def test_a_restarted_job_ends_and_writes_as_without_us_and_is_told_in_full(
    tmp_path: Path, ends_with: int
) -> None:
    script, feed, port = tmp_path / "train.py", tmp_path / "feed", free_port()
    script.write_text(TRAIN)
    feed.mkdir()
    site = installed_distribution(tmp_path / "site")
    env = environment(
        OMP_NUM_THREADS="1",
        PYTHONWARNINGS="ignore",
        ENDS_WITH=str(ends_with),
        EXPORTER_FLUSH_SECONDS="0.2",
    )
    env["PYTHONPATH"] = f"{site}:{env['PYTHONPATH']}"
    plain = subprocess.run(
        torchrun(script, tmp_path / "plain"),
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        check=False,
    )

    pages = [""]
    command = run_command(
        feed, torchrun(script, tmp_path / "watched"), "--run.linger=100s", "--run.name=llama", port=port
    )
    with (
        (tmp_path / "out").open("w+") as out,
        (tmp_path / "err").open("w+") as err,
        started(command, tmp_path, env=env, stdout=out, stderr=err, cwd=tmp_path) as run,
    ):
        while run.poll() is None:
            with contextlib.suppress(OSError):  # not up yet, not ready yet, or over
                pages.append(scrape(port))
            time.sleep(0.5)
    page = pages[-1]

    assert run.returncode == plain.returncode
    assert (plain.returncode == 0) is (ends_with == 0)
    assert told((tmp_path / "out").read_text()) == told(plain.stdout)
    assert told((tmp_path / "err").read_text()) == told(plain.stderr)
    assert labelled(page, "torchelastic_train_step_seconds_count", rank="0") == 6
    assert labelled(page, "torchelastic_train_step_seconds_count", rank="1") == 6
    assert labelled(page, "training_events_total", type="worker.evt") == 4
    assert labelled(page, "training_elastic_restarts_total", role="agent", run="llama") == 1
    assert labelled(page, "training_elastic_failure_restarts_total") == 1
    assert labelled(page, "training_elastic_rendezvous_seconds_count") == 2
    assert labelled(page, "training_elastic_worker_starts_total") == 4
    outcome = "failed_with_retries" if ends_with else "success_with_retries"
    assert labelled(page, "training_elastic_runs_total", outcome=outcome) == 1
    assert labelled(page, "training_elastic_runs_total") == 1
    results = [("failed", "3"), ("failed", "-15")] if ends_with else [("succeeded", "0"), ("succeeded", "0")]
    for result, code in results:
        found = labelled(page, "training_elastic_worker_results_total", result=result, exit_code=code)
        assert found == results.count((result, code))
    assert labelled(page, "training_events_total", type="torchelastic.agent.status.SUCCEEDED") == 1
    assert labelled(page, "training_torch_wait_calls_total", key="c10d.init_process_group", rank="0") == 2
    assert labelled(page, "training_torch_wait_calls_total", role="agent") > 0
    assert labelled(page, "exporter_collector_success", collector="feed") == 1


# The customisation page's launcher, as torch 2.13 wants it; nothing but its handlers' import lines is changed.
LAUNCHER = """
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


@torch_wanted
@pytest.mark.timeout(120)
def test_a_custom_launcher_has_its_handlers_and_is_an_agent(tmp_path: Path) -> None:
    launcher, feed = tmp_path / "my_launcher.py", tmp_path / "feed"
    launcher.write_text(LAUNCHER)
    feed.mkdir()
    env = environment(EXPORTER_FEED_DIR=str(feed), PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")

    done = subprocess.run(
        [sys.executable, str(launcher)],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        check=False,
    )
    page = page_of(feed)

    assert done.returncode == 0, done.stderr
    assert "worker 0 return value is: 42" in done.stdout
    assert "metric SimpleElasticAgent._rendezvous.success" in done.stdout
    assert "metric workers.trainer.run_success_no_retries" in done.stdout
    assert "event torchelastic.worker.status.START WORKER True" in done.stdout
    assert "event torchelastic.worker.status.SUCCEEDED WORKER True" in done.stdout
    assert labelled(page, "training_elastic_runs_total", run="custom", outcome="success_no_retries") == 1
    assert (
        labelled(page, "training_elastic_worker_results_total", result="succeeded", worker_role="trainer")
        == 1
    )
    assert (
        labelled(page, "training_events_total", type="torchelastic.rendezvous.SUCCEEDED", role="agent") >= 1
    )


# Fails once on the node that is told to, else lives for a while; needs no torch.
WORKER = """
import os, sys, time
time.sleep(1)
marker = sys.argv[1]
if marker and not os.path.exists(marker):
    open(marker, "w").close()
    sys.exit(1)
time.sleep(8)
"""


@torch_wanted
@pytest.mark.timeout(120)
def test_a_restart_that_another_node_has_caused_is_seen_by_both_agents(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    feeds = [tmp_path / "healthy", tmp_path / "failing"]
    site = installed_distribution(tmp_path / "site")
    env = environment(EXPORTER_AUTO="1", PYTHONWARNINGS="ignore")
    env["PYTHONPATH"] = f"{site}:{env['PYTHONPATH']}"
    own = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=two", "--rdzv-backend=c10d"]
    agent = [sys.executable, "-m", "torch.distributed.run", *own, f"--rdzv-endpoint=127.0.0.1:{free_port()}"]

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
    healthy, failing = map(page_of, feeds)

    assert statuses == [0, 0]
    for page, own_failures, outcome in (
        (healthy, 0, "success_no_retries"),
        (failing, 1, "success_with_retries"),
    ):
        assert labelled(page, "training_elastic_restarts_total", run="two", role="agent") == 1
        assert labelled(page, "training_elastic_failure_restarts_total") == own_failures
        assert labelled(page, "training_elastic_runs_total", outcome=outcome) == 1


# Ended by a signal, with nothing but `EXPORTER_AUTO=1` ---------------------------------------------------------


def auto_environment(path: Path, feed: Path | None) -> dict[str, str]:
    """That of a job where the package is installed; recorded into a feed directory, if there is one."""
    env = environment(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", EXPORTER_FLUSH_SECONDS="0.2")
    site = path / "site" if (path / "site").exists() else installed_distribution(path / "site")
    env["PYTHONPATH"] = f"{site}:{env['PYTHONPATH']}"
    if feed is not None:
        feed.mkdir(exist_ok=True)
        env |= {"EXPORTER_AUTO": "1", "EXPORTER_FEED_DIR": str(feed)}
    return env


# Says that it lives, then waits to be ended; needs no torch.
WAITING = """
import pathlib, sys, time
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@torch_wanted
@pytest.mark.timeout(150)
def test_an_agent_that_is_ended_by_sigterm_ends_as_without_us_and_was_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WAITING)
    ends = []
    for feed in (None, tmp_path / "feed"):
        alive = tmp_path / f"alive-{feed is None}"
        means = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        command = [sys.executable, "-m", "torch.distributed.run", *means, "--nproc-per-node=1"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
        with started(
            [*command, str(script), str(alive)], tmp_path, env=auto_environment(tmp_path, feed), **options
        ) as agent:
            wait_until(alive.exists, 60)
            agent.send_signal(signal.SIGTERM)
            out, err = agent.communicate(timeout=60 * PATIENCE)
            # Without the frames: the signal comes wherever the agent happens to be.
            words = [line for line in told(err) if line.strip() and not line.startswith(" ")]
            ends.append((agent.returncode, told(out), words))
    page = page_of(tmp_path / "feed")

    assert ends[0] == ends[1]
    assert ends[0][0] != 0
    assert labelled(page, "training_elastic_runs_total", outcome="interrupted") == 1
    assert labelled(page, "training_elastic_runs_total") == 1
    ran = {"function": "SimpleElasticAgent.run", "outcome": "failure"}
    assert labelled(page, "training_elastic_function_calls_total", **ran) == 1
    assert labelled(page, "training_events_total", type="torchelastic.agent.status.FAILED") == 1
    assert labelled(page, "training_elastic_restarts_total") == 0


@torch_wanted
@pytest.mark.timeout(150)
def test_sigterm_to_run_reaches_the_agent_and_its_last_words_are_on_the_page(tmp_path: Path) -> None:
    script, feed, alive = tmp_path / "worker.py", tmp_path / "feed", tmp_path / "alive"
    script.write_text(WAITING)
    feed.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    port, pages = free_port(), [""]
    job = [*torchrun, str(script), str(alive)]
    command = run_command(feed, job, "--run.name=llama", "--run.linger=100s", port=port)

    with started(command, tmp_path, env=auto_environment(tmp_path, None), cwd=tmp_path) as run:
        wait_until(lambda: alive.exists() and answers(port), 60)
        pages.append(scrape(port))  # whoever has scraped once is waited for at the end
        os.kill(run.pid, signal.SIGTERM)
        while run.poll() is None:
            with contextlib.suppress(OSError):  # over
                pages.append(scrape(port))
            time.sleep(0.3)

    assert run.returncode != 0
    assert labelled(pages[-1], "training_elastic_runs_total", outcome="interrupted", run="llama") == 1
