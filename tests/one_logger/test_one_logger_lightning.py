"""One-logger's Trainer and callback for PyTorch Lightning, with the real Trainer on a CPU."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bridges_support import needs
from training_support import run_python

pytestmark = [needs("lightning"), pytest.mark.timeout(240)]


def read_records(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "t.jsonl").read_text(encoding="ascii").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("program", ["train_with_the_trainer_of_one_logger", "train_with_a_hooked_trainer"])
def test_a_trainer_is_recorded_with_its_sanity_check_and_saves(program: str, tmp_path: Path) -> None:
    code = f"from programs.one_logger_lightning import {program}\n{program}()\n"
    completed = run_python(code, tmp_path, timeout=200, library="lightning")
    assert completed.returncode == 0, completed.stderr
    # The options of the job, or its own class of Trainer.
    assert "unchanged True\n" in completed.stdout
    assert "pickled True\n" in completed.stdout
    assert (tmp_path / "good.ckpt").exists()

    records = read_records(tmp_path)
    ended_spans = Counter(record["name"] for record in records if record["type"] in {"stop", "complete"})
    events = Counter(record["event"]["name"] for record in records if record["type"] == "event")
    assert (
        ended_spans["application"] == ended_spans["model_initialization"] == ended_spans["training_loop"] == 1
    )
    # The sanity check is a validation of one batch.
    assert ended_spans["validation_loop"] == events["validation_metrics_update"] == 2
    assert ended_spans["testing_loop"] == events["testing_metrics_update"] == 1
    assert events["training_metrics_update"] == 2  # optimizer steps of four batches
    assert ended_spans["checkpoint_save_sync"] == events["sync_checkpoint_metrics_update"] == 2
    assert events["save_checkpoint_success"] == 1
