"""Goodput of a real torchrun with two ranks, killed and resumed twice, compared with a calculation by hand.

Rank 0 saves every 10 steps. Sequence:

    attempt 1   steps  0 … 24, then rank 1 is killed while it sleeps; rank 0 waits for rank 1 in step 25
    attempt 2   steps 20 … 36, then rank 0 is killed
    attempt 3   steps 30 … 49, then both ranks exit normally

Outcome by hand:

    attempt 1   productive: steps  0 … 19   lost: steps 20 … 24 (5), and the incomplete step 25 of rank 0
    attempt 2   productive: steps 20 … 29   lost: steps 30 … 36 (7)
    attempt 3   productive: steps 30 … 49

No rank trains between attempts.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bridges_support import needs
from fork_server import forked_interpreter
from goodput_support import check_seconds_add_up, counts_by_reason, read_page, training_value, wait_for_page
from places import PROJECT, TESTS
from run_support import child_environment
from serve_support import sidecar
from waiting import PATIENCE

from exporter.ledger.goodput.accounting import BADPUT_CAUSES


@needs("torch")
@pytest.mark.timeout(180)
def test_the_goodput_of_a_torchrun_killed_twice_matches_a_hand_calculation(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"from programs.goodput import train_and_kill_ranks\ntrain_and_kill_ranks({str(tmp_path)!r})\n"
    )
    (tmp_path / "exporter.yaml").write_text("feed:\n  interval: 200ms\n")
    command = [
        forked_interpreter("torch"),
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"),
        "--monitor-interval=2",  # so that a rank has the time to log its failed step after the death of the other rank
        str(script),
    ]
    env = child_environment(
        EXPORTER_FEED_DIR=str(tmp_path / "feed"),
        EXPORTER_FLUSH_SECONDS="0.2",
        OMP_NUM_THREADS="1",
        PYTHONPATH=f"{PROJECT}:{TESTS}",
    )
    with sidecar(tmp_path, f"--config.file={tmp_path / 'exporter.yaml'}") as running:
        result = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=150 * PATIENCE, check=False
        )
        assert result.returncode == 0, result.stderr
        wait_for_page(
            running,
            lambda scraped: (
                [round(seconds, 6) for seconds in scraped.all("training_uncommitted_seconds").values()] == [0]
            ),
        )
        page = read_page(running)

    log_records = [json.loads(line) for line in (tmp_path / "log-0").read_text().splitlines()]

    def records_of(event: str, attempt: int) -> list[Any]:
        return [record for record in log_records if (record["event"], record["attempt"]) == (event, attempt)]

    seconds_by_step = [
        {record["step"]: record["seconds"] for record in records_of("step", attempt)} for attempt in range(3)
    ]
    assert [list(steps) for steps in seconds_by_step] == [[*range(25)], [*range(20, 37)], [*range(30, 50)]]
    unfinished_seconds = sum(record["seconds"] for record in log_records if record["event"] == "failed")
    saved_steps_by_attempt = ((0, range(20)), (1, range(20, 30)), (2, range(30, 50)))
    productive_seconds = sum(
        seconds_by_step[attempt][step]
        for attempt, saved_steps in saved_steps_by_attempt
        for step in saved_steps
    )
    finished_seconds = sum(sum(steps.values()) for steps in seconds_by_step)
    lost_seconds = finished_seconds - productive_seconds + unfinished_seconds

    (labels,) = page.all("training_attempt")  # one run, although unnamed
    run = dict(labels)["run"]
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
    attempt_starts = [record["start"] for record in log_records if record["event"] == "start"]
    attempt_ends = [
        records_of(event, attempt)[-1]["at"] for attempt, event in enumerate(("failed", "killed", "end"))
    ]
    wall_seconds = attempt_ends[2] - attempt_starts[0]
    downtime_seconds = (attempt_starts[1] - attempt_ends[0]) + (attempt_starts[2] - attempt_ends[1])
    preparation_seconds = sum(
        records_of("loop", attempt)[-1]["at"] - attempt_starts[attempt] for attempt in range(3)
    )
    badput_seconds = {
        cause: training_value(page, "badput_seconds_total", run, cause=cause) or 0.0
        for cause in BADPUT_CAUSES
    }

    assert training_value(page, "wall_seconds_total", run) == pytest.approx(wall_seconds, abs=0.5)
    # The time between the last flush and the end of a process is unknown to the exporter.
    assert badput_seconds["downtime"] == pytest.approx(downtime_seconds, abs=0.8)
    assert badput_seconds["init"] + badput_seconds["checkpoint_load"] == pytest.approx(
        preparation_seconds, abs=0.5
    )
    assert badput_seconds["checkpoint_save"] > 0
    assert {badput_seconds[cause] for cause in ("hang", "validation", "data_stall")} == {0}
    assert counts_by_reason(page, "restarts", run) == {"signal": 2}
    assert counts_by_reason(page, "interruptions", run) == {"signal": 2}
    check_seconds_add_up(page, run)
