"""Rank of a gloo job with worker processes that load batches. The rank given as the argument kills the workers, like the OOM killer."""

import multiprocessing
import sys

import torch
import torch.distributed as dist

from exporter import training

hanging_rank = int(sys.argv[1])


def produce(queue: "multiprocessing.Queue[int]") -> None:
    """Put increasing numbers into a queue until the process is killed."""
    sequence = 0
    while True:
        queue.put(sequence)
        sequence += 1


def next_batch() -> torch.Tensor:
    """Return the next batch that a worker has put into the queue."""
    return torch.tensor([float(batches.get())])


dist.init_process_group("gloo")
rank = dist.get_rank()
batches: "multiprocessing.Queue[int]" = multiprocessing.Queue(maxsize=2)
workers = [multiprocessing.Process(target=produce, args=(batches,), daemon=True) for _ in range(2)]
for worker in workers:
    worker.start()
for step in range(1000):
    if rank == hanging_rank and step == 5:
        for worker in workers:
            worker.kill()
    with training.training_iteration():
        with training.data_loading():
            batch = next_batch()
        dist.all_reduce(batch)
