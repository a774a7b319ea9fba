"""torchrun by itself, with nothing but `EXPORTER_AUTO=1`: standalone, and ended by a signal."""

from __future__ import annotations

import contextlib
import os
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
from test_bridges_torchrun import told
from waiting import wait_until


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
@pytest.mark.parametrize("backend", ["static", "standalone"])
def test_an_agent_that_is_ended_by_sigterm_ends_as_without_us_and_was_interrupted(
    tmp_path: Path, backend: str
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WAITING)
    ends = []
    for feed in (None, tmp_path / "feed"):
        alive = tmp_path / f"alive-{feed is None}"
        means = (
            ["--standalone"]
            if backend == "standalone"
            else ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        )
        command = [sys.executable, "-m", "torch.distributed.run", *means, "--nproc-per-node=1"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
        with started(
            [*command, str(script), str(alive)], tmp_path, env=auto_environment(tmp_path, feed), **options
        ) as agent:
            wait_until(alive.exists, 60)
            agent.send_signal(signal.SIGTERM)
            out, err = agent.communicate(timeout=60)
            ends.append((agent.returncode, told(out), told(err)))
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
