"""Ranks belong to training processes, not to launchers, wrappers, siblings or data workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from bridges_support import AUTO, SAVES, STEPS, needs, run_job, run_script
from program_support import series

pytestmark = [needs("torch"), pytest.mark.timeout(240)]

TRAIN_FUNCTION = """
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
SPAWNING_CODE = """
def train_rank(rank, size):
    import os
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/rendezvous", rank=rank, world_size=size)
    train(rank, workers=0)
    dist.destroy_process_group()

if __name__ == '__main__':
    torch.multiprocessing.spawn(train_rank, args=(2,), nprocs=2)
"""

LAUNCHER_LINE = "subprocess.run([sys.executable, '-m', 'accelerate.commands.launch', '--cpu', '--num_processes', '1', 'train.py'], check=True)"
WRAPPER_LINE = "import torch; torch.ones(2).sum(); subprocess.run([sys.executable, 'train.py'], check=True)"
SIBLING_CODE = """
sibling = subprocess.Popen([sys.executable, '-c', 'import time, torch; print(torch.ones(2).sum(), flush=True); time.sleep(60)'],
                           stdout=subprocess.PIPE)
sibling.stdout.readline()
subprocess.run([sys.executable, 'train.py'], check=True)
sibling.terminate()
"""


@pytest.mark.parametrize(
    "launch",
    [pytest.param(LAUNCHER_LINE, marks=needs("accelerate")), WRAPPER_LINE, SIBLING_CODE],
    ids=["accelerate launch", "a wrapper", "a sibling"],
)
def test_the_training_process_has_rank_0_and_no_other_process_has_a_rank(tmp_path: Path, launch: str) -> None:
    train = f"{TRAIN_FUNCTION}\nif __name__ == '__main__':\n    train()\n"
    library = None if launch == LAUNCHER_LINE else "torch"
    spawned_job = run_script(tmp_path, train, f"import exporter.bridges\n{launch}", library=library)

    assert spawned_job.differences({f"{STEPS} rank=0": 3, SAVES: 1}) == {}
    assert "worker=" not in spawned_job.page
    processes = series(spawned_job.page, "training_feed_last_update_timestamp_seconds")
    assert len([labels for labels in processes if 'rank="' in labels]) == 1


def test_spawned_processes_have_the_rank_of_the_process_group(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN_FUNCTION + SPAWNING_CODE)
    spawned_job = run_job(tmp_path, script, AUTO, library="torch")

    assert spawned_job.differences({f"{STEPS} rank=0": 3, f"{STEPS} rank=1": 3}) == {}
    assert "worker=" not in spawned_job.page
