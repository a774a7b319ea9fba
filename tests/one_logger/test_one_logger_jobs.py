"""Jobs that nobody has written, as a second implementation of one-logger's rules says that they are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import replay_one_logger
from one_logger_jobs import content, vector
from one_logger_model import Model
from places import DATA

GOLDEN: dict[str, Any] = json.loads((DATA / "one-logger-golden.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("golden", GOLDEN["vectors"], ids=lambda golden: golden["id"])
def test_the_model_says_what_the_golden_vectors_ask_for(golden: dict[str, Any]) -> None:
    records, misuse = Model(golden, GOLDEN["clock"]).run()
    told = json.loads(json.dumps(records))

    assert misuse == golden["misuse"]
    assert (
        replay_one_logger.mismatches(replay_one_logger.wanted(golden), told, replay_one_logger.TOLERANCE)
        == []
    )


@pytest.mark.parametrize("orderly", [True, False], ids=["orderly", "any"])
def test_jobs_are_recorded_as_the_model_says(
    orderly: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = content([vector(seed, orderly=orderly) for seed in range(6)])
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(jobs), encoding="utf-8")

    status = replay_one_logger.replay_all([str(path)])

    assert status == 0, capsys.readouterr().out
    assert any(job["misuse"] for job in jobs["vectors"]) is not orderly
