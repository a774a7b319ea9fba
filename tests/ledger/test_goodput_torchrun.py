"""Goodput of a real torchrun with two ranks, killed and resumed twice, compared with a calculation by hand.

Rank 0 saves every 10 steps. Sequence:

    attempt 1   steps  0 … 24, then rank 1 is killed while it sleeps; rank 0 waits for rank 1 in step 25
    attempt 2   steps 20 … 36, then rank 0 is killed
    attempt 3   steps 30 … 49, then both ranks exit normally

By hand: steps 0 … 19 of attempt 1, 20 … 29 of attempt 2 and all steps of attempt 3 are productive; steps 20 … 24 (5) and
30 … 36 (7) are lost, and so is the incomplete step 25 of rank 0. No rank trains between attempts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from goodput_support import check_identity, counts_by_reason, training_value
from serve_support import environment, sidecar
from test_goodput_scenarios import page as page_of
from test_goodput_scenarios import wait_for
from waiting import PATIENCE

from exporter.ledger.goodput.accounting import BADPUT_CAUSES

TRAIN = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
import exporter
from exporter import training

directory = sys.argv[1]
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
log_file = open(f"{directory}/log-{rank}", "a", buffering=1)

def log_event(**fields):
    log_file.write(json.dumps({"attempt": attempt, "at": time.time(), **fields}) + "\\n")

ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
log_event(event="start", start=time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks)
with training.application():
    with training.distributed_init():
        # A separate store per attempt: in torchrun's store, gloo finds addresses of the previous attempt.
        store = f"file://{directory}/store-{attempt}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    with training.checkpoint_load():
        path = f"{directory}/saved"
        start = int(open(path).read()) if os.path.exists(path) else 0
        dist.barrier()  # no rank saves before all have read
    with training.training_loop(train_iterations_start=start):
        log_event(event="loop")
        for step in range(start, 50):
            started_at = time.monotonic()
            try:
                with training.training_iteration():
                    time.sleep(0.02 + 0.01 * rank)
                    with training.phase("grad_sync"):
                        dist.all_reduce(torch.ones(1))
            except BaseException:
                log_event(event="failed", seconds=time.monotonic() - started_at)
                raise
            log_event(event="step", step=step, seconds=time.monotonic() - started_at)
            if (step + 1) % 10 == 0:
                with training.checkpoint_save(global_step=step + 1):
                    if rank == 0:
                        with open(f"{path}-new", "w") as file:
                            file.write(str(step + 1))
                        os.rename(f"{path}-new", path)
                    dist.barrier()
            exporter.flush()
            if (attempt, rank, step + 1) in {(0, 1, 25), (1, 0, 37)}:
                time.sleep(0.2)  # the other rank has started its next step
                log_event(event="killed")
                os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
log_event(event="end")
"""


@pytest.mark.timeout(180)
def test_the_goodput_of_a_torchrun_killed_twice_matches_a_hand_calculation(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")

    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (tmp_path / "exporter.yaml").write_text("feed:\n  interval: 200ms\n")
    command = [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"),
        "--monitor-interval=2",  # a rank whose peer dies can report the error
        *(str(script), str(tmp_path)),
    ]
    env = environment(
        EXPORTER_FEED_DIR=str(tmp_path / "feed"),
        EXPORTER_FLUSH_SECONDS="0.2",
        OMP_NUM_THREADS="1",
    )
    with sidecar(tmp_path, f"--config.file={tmp_path / 'exporter.yaml'}") as running:
        result = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=150 * PATIENCE, check=False
        )
        assert result.returncode == 0, result.stderr
        name = "training_uncommitted_seconds"
        wait_for(running, lambda scraped: [round(value, 6) for value in scraped.all(name).values()] == [0])
        page = page_of(running)

    lines = [json.loads(line) for line in (tmp_path / "log-0").read_text().splitlines()]

    def job_records(event: str, attempt: int) -> list[Any]:
        return [line for line in lines if (line["event"], line["attempt"]) == (event, attempt)]

    steps = [
        {record["step"]: record["seconds"] for record in job_records("step", attempt)} for attempt in range(3)
    ]
    assert [list(step) for step in steps] == [[*range(25)], [*range(20, 37)], [*range(30, 50)]]
    unfinished_seconds = sum(line["seconds"] for line in lines if line["event"] == "failed")
    saved_steps_by_attempt = ((0, range(20)), (1, range(20, 30)), (2, range(30, 50)))
    productive_seconds = sum(
        steps[attempt][step] for attempt, saved_steps in saved_steps_by_attempt for step in saved_steps
    )
    lost_seconds = sum(sum(step.values()) for step in steps) - productive_seconds + unfinished_seconds

    ((((_, run),), _),) = page.all("training_attempt").items()  # one run, although unnamed
    assert run.startswith("train-")
    assert training_value(page, "attempt", run) == 3
    assert training_value(page, "attempt_steps", run) == 20
    assert training_value(page, "lost_steps_total", run) == 5 + 7
    assert training_value(page, "productive_seconds_total", run) == pytest.approx(
        productive_seconds, rel=0.1, abs=0.1
    )
    # The sidecar dates a death at its detection, which is later on a busy machine.
    lost_progress = training_value(page, "badput_seconds_total", run, cause="lost_progress")
    assert 0.9 * lost_seconds - 0.2 < lost_progress < 1.1 * lost_seconds + 0.2 * PATIENCE
    starts = [line["start"] for line in lines if line["event"] == "start"]
    ends = [
        job_records(event, attempt)[-1]["at"] for attempt, event in enumerate(("failed", "killed", "end"))
    ]
    wall, downtime = ends[2] - starts[0], (starts[1] - ends[0]) + (starts[2] - ends[1])
    preparation_seconds = sum(
        job_records("loop", attempt)[-1]["at"] - starts[attempt] for attempt in range(3)
    )
    lost_time = {
        cause: training_value(page, "badput_seconds_total", run, cause=cause) or 0.0
        for cause in BADPUT_CAUSES
    }

    assert training_value(page, "wall_seconds_total", run) == pytest.approx(wall, abs=0.5)
    # The time between the last flush and the end of a process is unknown to the exporter.
    assert lost_time["downtime"] == pytest.approx(downtime, abs=0.8)
    assert lost_time["init"] + lost_time["checkpoint_load"] == pytest.approx(preparation_seconds, abs=0.5)
    assert lost_time["checkpoint_save"] > 0
    assert [lost_time["hang"], lost_time["validation"], lost_time["data_stall"]] == [0, 0, 0]
    assert [counts_by_reason(page, "restarts", run), counts_by_reason(page, "interruptions", run)] == [
        {"signal": 2},
        {"signal": 2},
    ]
    check_identity(page, run)
