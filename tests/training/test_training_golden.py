"""One-logger's golden vectors: 24 jobs, replayed step by step through the public API in fresh processes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import replay_one_logger
from places import DATA

GOLDEN = DATA / "one-logger-golden.json"
CONTENT: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))


def one() -> dict[str, Any]:
    return copy.deepcopy(next(each for each in CONTENT["vectors"] if each["id"] == "fresh-n1"))


def file_of(path: Path, vector: dict[str, Any]) -> str:
    path.write_text(json.dumps({**CONTENT, "vectors": [vector]}), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("vector", CONTENT["vectors"], ids=lambda vector: vector["id"])
def test_a_job_is_recorded_as_its_vector_says(
    vector: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = replay_one_logger.replay_all([file_of(tmp_path / "one.json", vector)])

    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("damage", ["value", "missing", "superfluous", "misuse"])
def test_the_replay_sees_every_kind_of_difference(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = one()
    records = vector["right"]
    if damage == "value":
        event = next(each for each in records if each.get("event") == "training_metrics_update")
        event["attributes"]["train_tokens"] += 1
    elif damage == "missing":
        records.append({"step": 3, "type": "error", "span": "training_loop"})
    elif damage == "superfluous":
        records.pop()
    else:
        vector["misuse"].append(2)

    status = replay_one_logger.replay_all([file_of(tmp_path / "one.json", vector)])

    assert status == 1
    assert "0 of 1 vectors are the same" in capsys.readouterr().out
