"""`run` of a user without privileges, in a shared directory in which a different user has created every fixed name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hangs_support import kill_tree
from run_support import child_environment, fetch_page, free_port
from users_support import NOBODY, command_as_user, reason_to_skip
from waiting import wait_until

ATTACKER = 12345
DISABLING_RULES = '{"version": 1, "rules": [{"match": "*", "enabled": false}]}'
ENTRY_NAMES = ("overrides.json", "owner.lock", "stacks.request", "ledger", "runs")
JOB = """
import time, exporter
from exporter import training
stat = exporter.Stat("mine")
while True:
    with training.training_iteration():
        stat.add(1.0)
        time.sleep(0.05)
"""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def squatted_directory() -> Iterator[Path]:
    """Yield a directory of mode 1777 with foreign entries for every fixed name and for the names with the job's user id."""
    if reason := reason_to_skip():  # not at import, because each worker of pytest-xdist imports this file
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        directory.chmod(0o1777)
        for name in ENTRY_NAMES:
            entry = directory / name
            for candidate in (entry, entry.with_name(f"{entry.stem}-{NOBODY}{entry.suffix}")):
                if entry.suffix:
                    candidate.write_text(DISABLING_RULES)
                else:
                    candidate.mkdir(mode=0o755)
                os.chown(candidate, ATTACKER, ATTACKER)
        yield directory


def test_every_total_of_a_run_is_served_where_another_user_has_taken_every_name(
    squatted_directory: Path,
) -> None:
    port = free_port()
    flags = [
        f"--feed.dir={squatted_directory}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--run.name=honest",
    ]
    command = [sys.executable, "-m", "exporter", "run", *flags, "--", sys.executable, "-c", JOB]
    env = child_environment(HOME="/tmp")
    run = subprocess.Popen(command_as_user(command), env=env, cwd="/", start_new_session=True)
    try:
        page = wait_until(lambda: page_with("training_steps_total{", port))
        stacks = subprocess.run(
            command_as_user(
                [sys.executable, "-m", "exporter", "stacks", "--json", f"--feed.dir={squatted_directory}"]
            ),
            env=env,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        uid_of_run = psutil.Process(run.pid).uids().real
    finally:
        kill_tree(run)

    foreign_entries = set(re.findall(r'exporter_feed_foreign_entry\{entry="([^"]*)"\} 1', page))
    assert uid_of_run == NOBODY
    assert foreign_entries == {"overrides.json", "owner.lock", "stacks.request", "ledger", f"runs-{NOBODY}"}
    assert "exporter_feed_owner 1" in page
    assert 'mine_count{rank="0",run="honest"}' in page
    assert json.loads(stacks.stdout)[0]["silent"] == {}


def page_with(family_start: str, port: int) -> str:
    """Return the page if it has a line that starts with this text, otherwise an empty string."""
    page = fetch_page(port)
    return page if f"\n{family_start}" in page else ""
