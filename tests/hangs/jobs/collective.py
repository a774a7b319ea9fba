"""Rank of a gloo job with three ranks. The rank given as the first argument hangs in the data loading; the others wait in an all-reduce."""

import sys
import time

import torch
import torch.distributed as dist

from exporter import training

hanging_rank, group_kind = int(sys.argv[1]), sys.argv[2]


def read_shard() -> None:
    """Sleep, as a read from storage that hangs does."""
    time.sleep(600)


dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.group.WORLD if group_kind == "default" else dist.new_group([0, 1, 2])
tensor = torch.ones(1)
for step in range(1000):
    with training.training_iteration():
        with training.data_loading():
            if rank == hanging_rank and step == 3:
                read_shard()
        dist.all_reduce(tensor, group=group)
