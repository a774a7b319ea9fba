"""One-logger's golden vectors: 24 jobs, replayed step by step through the public API in fresh processes."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import replay_one_logger
from places import DATA, TESTS

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


@pytest.mark.parametrize("text", ['{"schema": "other"}', "[]", "{", None])
def test_a_file_that_is_none_of_the_schema_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")

    assert replay_one_logger.replay_all([str(path)]) == 2
    assert str(path) in capsys.readouterr().out


def test_a_call_that_does_not_exist_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = one()
    vector["steps"].append([2.0, "on_coffee_break", {}])

    assert replay_one_logger.replay_all([file_of(tmp_path / "one.json", vector)]) == 1
    assert "on_coffee_break: raised AttributeError" in capsys.readouterr().out


def test_records_of_one_step_may_come_in_any_order_and_what_is_left_out_has_its_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = one()
    vector["right"].reverse()
    del vector["misuse"], vector["reference"]

    status = replay_one_logger.replay_all([file_of(tmp_path / "one.json", vector)])

    assert status == 0, capsys.readouterr().out


def test_a_field_that_does_not_exist_is_no_misuse_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vector = one()
    vector["config"]["colour"] = vector["config"]["telemetry"]["colour"] = "red"

    status = replay_one_logger.replay_all([file_of(tmp_path / "one.json", vector)])

    assert status == 0, capsys.readouterr().out


def test_a_file_may_allow_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vector = one()
    stop = next(each for each in vector["right"] if each["type"] == "span_stop")
    stop["duration_msec"] += 1
    path = file_of(tmp_path / "one.json", vector)
    allowed = replay_one_logger.replay_all([path])
    Path(path).write_text(
        json.dumps({**CONTENT, "vectors": [vector], "tolerance": {"msec_absolute": 0}}), encoding="utf-8"
    )

    assert (allowed, replay_one_logger.replay_all([path])) == (0, 1)
    assert "duration_msec" in capsys.readouterr().out


def test_the_command_says_what_it_does() -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "replay_one_logger.py"), "--help"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0
    assert "FILE" in done.stdout
