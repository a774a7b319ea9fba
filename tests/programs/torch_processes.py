"""Training loops of plain torch in the main thread, in a second thread and in child processes, which end in different ways."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch

from programs.torch_parts import loader, model_and_optimizer, train_step


def train() -> None:
    """Train three steps."""
    model, optimizer = model_and_optimizer()
    for (batch,) in loader(12):
        train_step(model, optimizer, batch)


def train_and_raise() -> None:
    train()
    raise ZeroDivisionError("after the training")


def train_and_exit_with_an_error() -> None:
    train()
    sys.exit(1)


def run_in_thread(target: Callable[[], None]) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


def run_in_child(method: str, target: Callable[[], None]) -> None:
    """Run a function in a child process, which is started by `fork` or `spawn`."""
    child = torch.multiprocessing.get_context(method).Process(target=target)
    child.start()
    child.join()
