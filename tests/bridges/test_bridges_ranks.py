"""A rank belongs to the process that trains: not to a launcher, a wrapper, a sibling, or a worker of its data."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, Job, job, wanted
from elastic_support import series

pytestmark = [wanted("torch"), pytest.mark.timeout(240)]

TRAIN = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

def train(rank=0, workers=1):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for (batch,) in DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4, num_workers=workers):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, f"checkpoint{rank}")
"""
MAIN = TRAIN + "\nif __name__ == '__main__':\n    train()\n"
SPAWNS = (
    TRAIN
    + """
def ranked(rank, size):
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=size)
    train(rank, workers=0)
    dist.destroy_process_group()

if __name__ == '__main__':
    torch.multiprocessing.spawn(ranked, args=(2,), nprocs=2)
"""
)

LAUNCHER = "subprocess.run([sys.executable, '-m', 'accelerate.commands.launch', '--cpu', '--num_processes', '1', 'train.py'], check=True)"
WRAPPER = "import torch; torch.ones(2).sum(); subprocess.run([sys.executable, 'train.py'], check=True)"
SIBLING = """
other = subprocess.Popen([sys.executable, '-c', 'import time, torch; print(torch.ones(2).sum(), flush=True); time.sleep(60)'],
                         stdout=subprocess.PIPE)
other.stdout.readline()
subprocess.run([sys.executable, 'train.py'], check=True)
other.terminate()
"""


def ran(directory: Path, script: str, program: str) -> Job:
    (directory / "train.py").write_text(script)
    return job(directory, f"import subprocess, sys, exporter.bridges\n{program}", AUTO)


@pytest.mark.parametrize(
    "program",
    [pytest.param(LAUNCHER, marks=wanted("accelerate")), WRAPPER, SIBLING],
    ids=["accelerate launch", "a wrapper", "a sibling"],
)
def test_who_trains_has_rank_0_and_nobody_else_has_a_rank(tmp_path: Path, program: str) -> None:
    found = ran(tmp_path, MAIN, program)

    assert found.value("training_steps_total", mode="train", rank="0") == 3
    assert found.value("training_checkpoints_total", result="ok") == 1
    assert "worker=" not in found.page
    ranked = [
        key for key in series(found.page, "training_feed_last_update_timestamp_seconds") if 'rank="' in key
    ]
    assert len(ranked) == 1


def test_ranks_that_are_spawned_have_theirs_from_the_process_group(tmp_path: Path) -> None:
    program = "subprocess.run([sys.executable, 'train.py', str(sys.path and __import__('os').path.abspath('rendezvous'))], check=True)"
    found = ran(tmp_path, SPAWNS, program)

    for rank in ("0", "1"):
        assert found.value("training_steps_total", mode="train", rank=rank) == 3
    assert "worker=" not in found.page
