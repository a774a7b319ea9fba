"""A phase that is added to the table, in a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from places import PROJECT, TESTS
from programs import code_of
from programs import one_logger as programs
from training_support import run_python

ADDITIONS = (
    (
        "phases.py",
        '        Phase("optimizer"',
        '        Phase("data_transfer", work=True, recurring=True, badput=None),\n',
    ),
    (
        "kinds.py",
        "INFERRED_LOOP =",
        'DATA_TRANSFER = BlockKind("data_transfer", "data_transfer", "data_transfer")\n',
    ),
    ("kinds.py", "OPTIMIZER_UPDATE)\n", "DATA_TRANSFER, "),
)
"""File, text before which a line is inserted, and the line: the phase, the kind of its block, and its place in a tuple."""


def test_phase_added_to_the_table_has_blocks_and_leaves_the_names_of_one_logger_alone(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "exporter", tmp_path / "exporter", ignore=shutil.ignore_patterns("__pycache__"))
    for name, next_text, addition in ADDITIONS:
        file = tmp_path / "exporter" / "training" / name
        file.write_text(file.read_text("utf-8").replace(next_text, addition + next_text, 1), "utf-8")
    path = os.pathsep.join(map(str, (tmp_path, TESTS)))
    completed = run_python(code_of(programs.train_with_an_added_phase), tmp_path, PYTHONPATH=path)

    assert completed.stderr == ""
    assert completed.stdout.splitlines() == ["60", "[]"]  # three entries in each of 20 steps, and no misuse
    records = [json.loads(line) for line in (tmp_path / "telemetry.json").read_text("ascii").splitlines()]
    names = [record["name"] for record in records if record["type"] == "start"]
    assert names == ["application", "training_loop"]  # short spans are not exported unless requested
