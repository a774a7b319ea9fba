"""A real torchrun under `run`: two gloo ranks on the CPU, one of which fails once and is restarted."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from run_support import environment, free_port, page, processes_naming, run_command, started

# Three steps, then rank 1 fails; after the restart five more in both ranks.
TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from exporter import Aggregation, Stat, flush

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
# A store of its own for each attempt: over torchrun's, gloo meets addresses of the attempt before.
store = f"file://{sys.argv[1]}-{attempt}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
steps = Stat("train.steps", {Aggregation.COUNT}, window_seconds=1.0)
for _ in range(5 if attempt else 3):
    dist.all_reduce(torch.ones(1))
    steps.add(1.0)
flush()
dist.barrier()
if not attempt and rank == 1:
    sys.exit(7)
dist.barrier()
dist.destroy_process_group()
"""


def totals(text: str) -> dict[str, float]:
    """The recorded steps by rank."""
    found = re.findall(r'^train_steps_count\{(?:.*,)?rank="(\d+)".*\} (\S+)$', text, re.MULTILINE)
    return {rank: float(value) for rank, value in found}


@pytest.mark.timeout(150)
def test_the_ranks_of_torchrun_are_on_the_last_page_with_their_totals_over_the_restart(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    feed, port = tmp_path / "feed", free_port()
    feed.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nnodes=1", "--nproc-per-node=2", "--max-restarts=1"]
    static = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    job = [*torchrun, *static, str(script), str(tmp_path / "store")]
    command = run_command(feed, job, "--run.linger=100s", "--run.name=llama", port=port)
    pages: list[str] = []
    env = environment(OMP_NUM_THREADS="1")
    with started(command, tmp_path, env=env) as run:
        while run.poll() is None:
            pages.append(page(port) or (pages[-1] if pages else ""))  # not up yet, not ready yet, or over
            time.sleep(0.5)

    assert run.returncode == 0
    assert totals(pages[-1]) == {"0": 3 + 5, "1": 3 + 5}
    assert 'run="llama"' in pages[-1]
    assert processes_naming(str(feed)) == {}
