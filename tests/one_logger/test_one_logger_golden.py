"""One-logger's golden vectors, each of which is a job: replayed step by step through the public API in fresh processes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import replay_one_logger
from places import DATA

GOLDEN = DATA / "one-logger-golden.json"
CONTENT: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))


def write_vector(path: Path, vector: dict[str, Any]) -> str:
    path.write_text(json.dumps({**CONTENT, "vectors": [vector]}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("vector", CONTENT["vectors"], ids=lambda vector: vector["id"])
def test_a_job_writes_the_records_of_its_golden_vector(
    vector: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = replay_one_logger.replay_all([write_vector(tmp_path / "one.json", vector)])

    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        lambda vector: vector["right"][0]["attributes"].update(value=1),
        lambda vector: vector["right"].append({"step": 3, "type": "error", "span": "training_loop"}),
        lambda vector: vector["right"].pop(),
        lambda vector: vector["misuse"].append(2),
    ],
    ids=["value", "missing", "superfluous", "misuse"],
)
def test_the_replay_detects_wrong_missing_and_superfluous_records(
    damage: Callable[[dict[str, Any]], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = copy.deepcopy(next(vector for vector in CONTENT["vectors"] if vector["id"] == "fresh-n1"))
    damage(vector)

    status = replay_one_logger.replay_all([write_vector(tmp_path / "one.json", vector)])

    assert status == 1
    assert "0 of 1 vectors are the same" in capsys.readouterr().out
