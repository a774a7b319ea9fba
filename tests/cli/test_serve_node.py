"""A whole node: eight replayed GPUs, a job of eight ranks, the real sidecar with its default settings."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from serve_support import recording, sidecar
from waiting import wait_until

RANKS = 8
MOST_SERIES = 1500
MOST_CHILD_BYTES = 30 << 20
MOST_BYTES = 48 << 20

RANK = """
import sys, exporter
stats = [exporter.Stat(f"own.part{number}", ["mean", "p95", "max"], window_seconds=1.0) for number in range(50)]
for stat in stats:
    stat.add(1.0)
print("recording", flush=True)
sys.stdin.readline()
"""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(60)
def test_a_node_of_eight_gpus_and_ranks_keeps_its_budgets(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"energy: {{lock_dir: {tmp_path}}}\n")
    with sidecar(tmp_path, f"--config.file={file}", "--gpu.replay=h100") as running, ExitStack() as stack:
        for number in range(RANKS):
            stack.enter_context(recording(tmp_path, RANK, number))
        wait_until(
            lambda: running.ask("/metrics")[1].count("training_process_unique_bytes{") == RANKS, seconds=30
        )
        wait_until(lambda: running.sample("exporter_nvml_child_resident_memory_bytes"), seconds=30)
        page = running.ask("/metrics")[1]
        child = running.sample("exporter_nvml_child_resident_memory_bytes")
        own = resident_bytes(running.process.pid)

    series = [line for line in page.splitlines() if line and not line.startswith("#")]
    fixed = [line for line in series if not line.startswith("own_part")]
    assert len(re.findall(r"^gpu_up\{.*\} 1", page, re.MULTILINE)) == 8
    assert len(series) - len(fixed) > 1000
    assert len(fixed) <= MOST_SERIES
    assert child is not None
    assert child <= MOST_CHILD_BYTES
    assert own <= MOST_BYTES
